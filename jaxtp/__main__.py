"""`jaxtp`: the commands of the package, `jaxtp train` and others; `python -m jaxtp.train` is the same."""

import ast
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jaxtp.config import entry
from jaxtp.config.reading import shown

PROGRAM = "jaxtp"
COMPLETION = "completion"
COMMANDS = {
    "bench": "jaxtp.tools.bench",
    "check": "jaxtp.tools.check",
    "checkpoint": "jaxtp.checkpoint",
    "convert": "jaxtp.tools.convert",
    "estimate": "jaxtp.tools.estimate",
    "evaluate": "jaxtp.tools.evaluate",
    "explain": "jaxtp.tools.explain",
    "generate": "jaxtp.generate",
    "launch": "jaxtp.tools.launch",
    "prepare": "jaxtp.data.prepare",
    "train": "jaxtp.train",
}
"""Package of each command."""
SHELLS = ("bash", "zsh", "fish")
HELP = f"""
{PROGRAM} COMMAND --help says more; {PROGRAM} --version prints the version. For completion by Tab:

  bash  {PROGRAM} {COMPLETION} bash > ~/.local/share/bash-completion/completions/{PROGRAM}
  zsh   {PROGRAM} {COMPLETION} zsh > ~/.zfunc/_{PROGRAM}, where fpath has ~/.zfunc
  fish  {PROGRAM} {COMPLETION} fish > ~/.config/fish/completions/{PROGRAM}.fish
"""


def commands() -> dict[str, str]:
    """Returns each command, and the first line of its package's docstring; no command is imported."""
    found = {}
    for name, module in COMMANDS.items():
        source = Path(__file__).parent.joinpath(*module.split(".")[1:], "__init__.py")
        found[name] = (ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return found


def main(argv: Sequence[str]) -> int:
    """Runs a command, or lists them; returns its exit code."""
    return entry.attempt(PROGRAM, lambda: _run(argv))


def script() -> NoReturn:
    """Runs `jaxtp` as it is installed."""
    entry.run(PROGRAM, main)


def _run(argv: Sequence[str]) -> int:
    from jaxtp.config.command_line import choose_name  # with tyro: Ctrl-C is heeded by now

    if list(argv) == ["--version"]:
        import jaxtp

        print(f"{PROGRAM} {jaxtp.__version__}")
        return 0
    listed = commands()
    name, rest = choose_name(
        PROGRAM, {**listed, COMPLETION: "Prints what a shell needs to complete commands."}, argv, HELP
    )
    if name == COMPLETION:
        return _complete(rest, list(listed))
    return importlib.import_module(f"{COMMANDS[name]}.__main__").main(rest)


def _complete(argv: Sequence[str], names: Sequence[str]) -> int:
    """Prints the script by which a shell completes all commands and their flags."""
    from jaxtp.config.command_line import choose_name, completion

    program = f"{PROGRAM} {COMPLETION}"
    shell, others = choose_name(program, {name: f"For {name}." for name in SHELLS}, argv, HELP)
    if others:
        raise entry.UserError(f"{program} takes a shell and nothing else, and {shown(' '.join(others))} follows")
    modules = {name: importlib.import_module(f"{COMMANDS[name]}.__main__") for name in names}
    commands = {name: getattr(m, "COMMANDS", None) or m.COMMAND for name, m in modules.items()}
    print(completion(PROGRAM, commands, {COMPLETION: SHELLS}, shell))
    return 0


if __name__ == "__main__":
    script()
