"""`jaxtp`: the commands of the package; `jaxtp train` and `python -m jaxtp.train` are the same."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start()

import gc
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import jaxtp
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL
from jaxtp.config.command_line import Command, choose, completion

PROGRAM = "jaxtp"
COMPLETION = "completion"
SUMMARY = "Prints a completion script for a shell."
COMMANDS = {
    "check": "jaxtp.tools.check",
    "checkpoint": "jaxtp.checkpoint",
    "convert": "jaxtp.tools.convert",
    "estimate": "jaxtp.tools.estimate",
    "evaluate": "jaxtp.tools.evaluate",
    "explain": "jaxtp.tools.explain",
    "generate": "jaxtp.generate",
    "launch": "jaxtp.tools.launch",
    "prepare": "jaxtp.data.prepare",
    "score": "jaxtp.tools.score",
    "train": "jaxtp.train",
}
"""Package of each command."""
HELP = f"""
{PROGRAM} COMMAND --help says more; {PROGRAM} --version prints the version. For completion by Tab:

  bash  {PROGRAM} {COMPLETION} bash > ~/.local/share/bash-completion/completions/{PROGRAM}
  zsh   {PROGRAM} {COMPLETION} zsh > ~/.zfunc/_{PROGRAM}, where fpath has ~/.zfunc
  fish  {PROGRAM} {COMPLETION} fish > ~/.config/fish/completions/{PROGRAM}.fish
"""


def commands() -> dict[str, str]:
    """Returns the first line of the docstring of each command's package."""
    summaries = {}
    for name, package in COMMANDS.items():
        docstring = importlib.import_module(package).__doc__ or ""
        summaries[name] = docstring.partition("\n")[0]
    return summaries


def main(argv: Sequence[str]) -> int:
    """Runs a command, or lists them; returns its exit code."""
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        print(f"{PROGRAM} {jaxtp.__version__}")
        return 0
    name, flags = choose(PROGRAM, {**commands(), COMPLETION: SUMMARY}, argv, HELP)
    if name == COMPLETION:
        return _complete(flags)
    module = f"{COMMANDS[name]}.__main__"
    if module not in sys.modules:
        with entry.paused_collection():
            importlib.import_module(module)
        gc.freeze()  # later collections, also that at the exit, skip what the imports made
    return sys.modules[module].main(flags)


@dataclass(frozen=True, kw_only=True)
class _Completion:
    shell: Annotated[Literal["bash", "zsh", "fish"], POSITIONAL]
    """Shell of the completion script."""


def _complete(argv: Sequence[str]) -> int:
    command = Command(program=f"{PROGRAM} {COMPLETION}", schema=_Completion, description=SUMMARY)
    config, _ = command.load(argv)
    commands = {}
    for name, package in COMMANDS.items():
        module = importlib.import_module(f"{package}.__main__")
        commands[name] = getattr(module, "COMMANDS", None) or module.COMMAND
    print(completion({**commands, COMPLETION: command}, config.shell))
    return 0


if __name__ == "__main__":
    entry.run(PROGRAM, main)
