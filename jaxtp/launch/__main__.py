"""`jaxtp launch`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic
import tyro

from jaxtp import entry
from jaxtp.command_line import Command
from jaxtp.config import UserPath, allowed
from jaxtp.launch.environment import gpus_present
from jaxtp.launch.supervisor import Group, SupervisorError, supervise

PROGRAM = "jaxtp launch"
DESCRIPTION = """Starts the processes of one machine, each with its share of the GPUs; ends all of them when one dies.

    jaxtp launch --processes 2 -- jaxtp train --config FILE

What follows -- is a command of jaxtp, or the arguments of Python, as in -- -m mine.train. One process is enough to
drive all GPUs of a host; several are for trying a run of several hosts, on CPUs too, and for a program that wants one
for each GPU.
"""
MOST_PROCESSES = 1024
Number = Annotated[int, pydantic.Field(ge=1, le=MOST_PROCESSES), allowed(f"1 to {MOST_PROCESSES}")]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Command line of a launch, but for what is started."""

    processes: Number
    """Number of processes."""

    devices: Number | None = None
    """Virtual CPU devices of each process; by default the GPUs of the machine are divided among them."""

    restarts: Annotated[int, pydantic.Field(ge=0, le=MOST_PROCESSES), allowed(f"0 to {MOST_PROCESSES}")] = 0
    """Most times that all are started again after one has failed; not after a mistake (exit code 2), nor where numbers
    are wrong (3)."""

    logs: Annotated[UserPath, tyro.conf.arg(metavar="DIR")] = Path("logs")
    """Folder of the logs, process-0.log and so on; those of an earlier start are replaced."""


COMMAND = Command(program=PROGRAM, schema=Launch, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code of the first process that failed, else 0."""
    return entry.attempt(PROGRAM, lambda: _launch(argv))


def _launch(argv: Sequence[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    flags, command = list(argv[:at]), list(argv[at + 1 :])
    if not command and not {"-h", "--help", "--help-all"} & set(flags):
        raise SupervisorError("no command: it follows --, as in -- jaxtp train --config FILE")
    asked, _ = COMMAND.load(flags)
    if command[0] == "jaxtp":
        command = ["-m", *command]
    if asked.devices is None and not gpus_present():
        print(
            "no NVIDIA GPUs here: each process takes what JAX finds (--devices N makes virtual CPU devices)",
            file=sys.stderr,
        )
    return supervise(Group(asked.processes, command, asked.logs, asked.devices), restarts=asked.restarts)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
