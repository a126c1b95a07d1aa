"""`jaxtp convert`: imports, exports, and compares the tp plans of models in Hugging Face format."""

import warnings
from collections.abc import Sequence
from typing import Any

from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.command_line import Command, choose
from jaxtp.tools.convert.tp_plan import PLAN_HELP, Plan, plan_lines
from jaxtp.tools.convert.transfer import EXPORT_HELP, IMPORT_HELP, Export, Import, export_run, import_run

PROGRAM = "jaxtp convert"
COMMANDS: dict[str, Command[Any]] = {
    "import": Command(program=f"{PROGRAM} import", schema=Import, description=IMPORT_HELP),
    "export": Command(program=f"{PROGRAM} export", schema=Export, description=EXPORT_HELP),
    "plan": Command(program=f"{PROGRAM} plan", schema=Plan, description=PLAN_HELP),
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a user's mistake, 3 for weights that are not finite, 130 for Ctrl-C."""
    silence_orbax()
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
