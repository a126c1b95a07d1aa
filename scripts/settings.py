"""Writes jaxtp/train/SETTINGS.md: every setting of a run, with the first sentence of its docstring.

python scripts/settings.py
"""

import re
from pathlib import Path

from jaxtp.config.affects import leaf_settings
from jaxtp.config.command_line import help_text, literal_choices
from jaxtp.train.config import TrainConfig

PAGE = Path(__file__).parent.parent / "jaxtp/train/SETTINGS.md"
HEAD = """# Settings of a run

`jaxtp train`, `check`, `estimate` and `explain` take these settings, and Python takes them as
`jaxtp.Trainer(settings={"data.sequence_length": 4096})`. As a flag, a setting has hyphens:
`--data.sequence-length 4096`. `--launch.no-self-check` turns a switch off. In a YAML file each
section is a mapping: `data: {sequence_length: 4096}`.

The defaults are those of the first run of the README. A run that starts from a trained model has
other defaults, and prints them. Other values that a setting can have are in parentheses. This page
has the first sentence about each setting; `jaxtp train --help SECTION` prints all of them.

`python scripts/settings.py` makes this page from the docstrings.
"""


def group_of(setting):
    """Returns the heading of a setting: its section, and what its dataclass is for."""
    kinds = setting.owner.__mro__
    name = setting.path[-1]
    owner = next(kind for kind in kinds if name in vars(kind).get("__annotations__", {}))
    meaning = owner.__doc__.partition(".\n")[0].rstrip(".")
    return f"{'.'.join(setting.keys[:-1])}: {meaning}"


def default_of(setting):
    """Returns the default, and other values of a setting that has only a few."""
    default = setting.default
    choices = list(map(str, literal_choices(setting.kind)))
    shown = str(default)
    if default is None or default == {}:
        shown = "none" if "none" in choices else ""
    elif isinstance(default, bool):
        shown = shown.lower()
    elif isinstance(default, tuple):
        shown = " ".join(map(str, default))
    others = ", ".join(choice for choice in choices if choice != shown)
    return f"{shown} ({others})" if others else shown


def row_of(setting):
    sentence = re.split(r"(?<=\.)\s", help_text(setting), maxsplit=1)[0]
    escaped = re.sub(r"([*|])", r"\\\1", sentence)
    return f"| `{setting.name}` | {default_of(setting)} | {escaped} |"


def page():
    """Returns the text of the page."""
    groups = {}
    for setting in leaf_settings(TrainConfig).values():
        groups.setdefault(group_of(setting), []).append(row_of(setting))
    parts = [HEAD]
    for heading, rows in groups.items():
        table = ["| setting | default | what it does |", "|---|---|---|", *rows]
        parts.append("\n".join([f"## {heading}", "", *table, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
