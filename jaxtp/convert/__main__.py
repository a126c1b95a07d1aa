"""`jaxtp convert`: models from and to folders in Hugging Face format, and their plans for tp."""

import warnings
from collections.abc import Sequence
from typing import Any

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.command_line import Command, choose
from jaxtp.convert.config import EXPORT, IMPORT, PLAN, Export, Import, Plan
from jaxtp.convert.exports import export_run
from jaxtp.convert.imports import import_run
from jaxtp.convert.plan import plan_lines

PROGRAM = "jaxtp convert"
COMMANDS: dict[str, Command[Any]] = {
    "import": Command(program=f"{PROGRAM} import", schema=Import, description=IMPORT),
    "export": Command(program=f"{PROGRAM} export", schema=Export, description=EXPORT),
    "plan": Command(program=f"{PROGRAM} plan", schema=Plan, description=PLAN),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    quieten()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|flax")
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> None:
    chosen, flags = choose(PROGRAM, COMMANDS, argv)
    command, _ = chosen.load(flags)
    if isinstance(command, Import):
        print(import_run(command))
    elif isinstance(command, Export):
        print(export_run(command))
    else:
        print("\n".join(plan_lines(command.source, command.ignore_config)))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
