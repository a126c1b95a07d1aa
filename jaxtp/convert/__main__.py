"""`jaxtp convert`: models from and to folders in Hugging Face format, and their plans for tp."""

import warnings
from collections.abc import Sequence

import tyro

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.config import expand
from jaxtp.convert.config import Export, Import, Plan
from jaxtp.convert.exports import export_run
from jaxtp.convert.imports import import_run
from jaxtp.convert.plan import plan_lines

PROGRAM = "jaxtp convert"


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C."""
    quieten()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"orbax|flax")
    command = tyro.extras.subcommand_cli_from_dict(
        {"import": Import, "export": Export, "plan": Plan}, args=list(argv), prog=PROGRAM, description=__doc__
    )
    return entry.attempt(PROGRAM, lambda: _run(command))


def _run(command: Import | Export | Plan) -> None:
    if isinstance(command, Import):
        print(import_run(command))
    elif isinstance(command, Export):
        print(export_run(command))
    else:
        print("\n".join(plan_lines(expand(command.source), command.ignore_config)))


if __name__ == "__main__":
    entry.run(PROGRAM, main)
