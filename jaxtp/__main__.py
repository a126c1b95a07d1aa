"""`jaxtp`: the commands of the package; `jaxtp train` and `python -m jaxtp.train` are the same."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start()

import ast
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal, NoReturn

import tyro

import jaxtp
from jaxtp.config import entry
from jaxtp.config.command_line import Command, asks_for_help, choose_name, completion
from jaxtp.config.schema import ConfigError
from jaxtp.distributed.environment import is_launched

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
REMOVED = {
    "bench": "python scripts/bench.py, in jaxtp's repository",
    "convert plan": "jaxtp explain --model.from-hf HF_DIR --mesh tp=8, for jaxtp's plan",
}
"""Removed commands, with what replaces them."""
HELP = f"""
{PROGRAM} COMMAND --help says more; {PROGRAM} --version prints the version. For completion by Tab:

  bash  {PROGRAM} {COMPLETION} bash > ~/.local/share/bash-completion/completions/{PROGRAM}
  zsh   {PROGRAM} {COMPLETION} zsh > ~/.zfunc/_{PROGRAM}, where fpath has ~/.zfunc
  fish  {PROGRAM} {COMPLETION} fish > ~/.config/fish/completions/{PROGRAM}.fish
"""


def commands() -> dict[str, str]:
    """Returns the first line of the docstring of each command's package, without importing it."""
    summaries = {}
    for name, package in COMMANDS.items():
        path = Path(__file__).parent.joinpath(*package.split(".")[1:], "__init__.py")
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        summaries[name] = (docstring or "").partition("\n")[0]
    return summaries


def main(argv: Sequence[str]) -> int:
    """Runs a command, or lists them; returns its exit code."""
    return entry.attempt(PROGRAM, lambda: _run(argv))


def script() -> NoReturn:
    """Runs `jaxtp`, after `entry.start`."""
    hasten_help()
    entry.run(PROGRAM, main)


def hasten_help() -> None:
    """Imports stand-ins for libraries from now on if the process only prints help."""
    if asks_for_help(sys.argv[1:]) and not is_launched():
        sys.meta_path.insert(0, _StandIns())


def _run(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        print(f"{PROGRAM} {jaxtp.__version__}")
        return 0
    for words, successor in REMOVED.items():
        if f"{' '.join(argv)} ".startswith(f"{words} "):
            raise ConfigError(f"{PROGRAM} {words} is now {successor}")
    name, flags = choose_name(PROGRAM, {**commands(), COMPLETION: SUMMARY}, argv, HELP)
    if name == COMPLETION:
        return _complete(flags)
    return entry.import_fast(f"{COMMANDS[name]}.__main__").main(flags)


class _StandIns(MetaPathFinder, Loader):
    """Imports stand-ins for libraries that take a second to import; help does not need them."""

    LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "numpy", "tensorboardX")

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.LIBRARIES:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = _StandIn().__getattr__  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn:
    """A class, function, decorator or type where a module is defined; false and 0."""

    def __getattr__(self, name: str) -> "_StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *arguments: object, **_: object) -> object:
        # As a decorator of a class it returns the class.
        return arguments[0] if arguments and isinstance(arguments[0], type) else self

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (type("StandIn", (), {"__init_subclass__": lambda *_, **__: None}),)

    def __getitem__(self, _: object) -> "_StandIn":
        return self

    __or__ = __ror__ = __getitem__

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class _Completion:
    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """Shell of the completion script."""


def _complete(argv: Sequence[str]) -> int:
    command = Command(program=f"{PROGRAM} {COMPLETION}", schema=_Completion, description=SUMMARY)
    config, _ = command.load(argv)
    commands = {}
    for name, package in COMMANDS.items():
        module = importlib.import_module(f"{package}.__main__")
        commands[name] = getattr(module, "COMMANDS", None) or module.COMMAND
    print(completion(PROGRAM, {**commands, COMPLETION: command}, config.shell))
    return 0


if __name__ == "__main__":
    script()
