"""`jaxtp`: the commands of the package; `jaxtp train` and `python -m jaxtp.train` are the same."""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start()

import gc
import importlib
import sys
from collections.abc import Sequence

import jaxtp
from jaxtp.config import entry
from jaxtp.config.command_line import choose

PROGRAM = "jaxtp"
COMMANDS = {
    "check": "jaxtp.tools.check",
    "checkpoint": "jaxtp.checkpoint",
    "convert": "jaxtp.tools.convert",
    "doctor": "jaxtp.tools.doctor",
    "estimate": "jaxtp.tools.estimate",
    "evaluate": "jaxtp.tools.evaluate",
    "explain": "jaxtp.tools.explain",
    "generate": "jaxtp.generate",
    "launch": "jaxtp.tools.launch",
    "prepare": "jaxtp.data.prepare",
    "report": "jaxtp.tools.report",
    "score": "jaxtp.tools.score",
    "train": "jaxtp.train",
}
"""Package of each command."""


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
    note = f"\n{PROGRAM} COMMAND --help says more; {PROGRAM} --version prints the version."
    name, flags = choose(PROGRAM, commands(), argv, note)
    module = f"{COMMANDS[name]}.__main__"
    if module not in sys.modules:
        with entry.paused_collection():
            importlib.import_module(module)
        gc.freeze()  # later collections, also that at the exit, skip what the imports made
    return sys.modules[module].main(flags)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
