"""The command `jaxtp launch`."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pydantic

from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command
from jaxtp.config.schema import UserPath
from jaxtp.distributed.environment import LaunchError, gpus_present
from jaxtp.distributed.supervisor import Group, supervise

PROGRAM = "jaxtp launch"
DESCRIPTION = """\
Starts the processes of one machine, each with its share of the GPUs, and ends all of them when one
dies.

    jaxtp launch --processes 2 -- jaxtp train --config FILE

After -- comes a jaxtp command, or arguments for Python such as -m mine.train. One process can drive
all GPUs of a host. Several are for trying a run of several hosts, also on CPUs, and for programs
that need one process for each GPU.
"""
MAX_PROCESSES = 1024
Number = Annotated[int, pydantic.Field(ge=1, le=MAX_PROCESSES)]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Flags of `jaxtp launch`."""

    processes: Number
    """Number of processes."""

    devices: Number | None = None
    """Virtual CPU devices of each process. By default the processes divide the GPUs of the machine,
    or, if it has none, the virtual devices of the mesh."""

    restarts: Annotated[int, pydantic.Field(ge=0, le=MAX_PROCESSES)] = 0
    """Maximum number of restarts after failures; none after a mistake (exit code 2) or wrong
    numbers (3)."""

    logs: Annotated[UserPath, Argument("DIR")] = Path("logs")
    """Folder of the logs process-0.log, ...; a later start appends to them."""

    command: Annotated[tuple[str, ...], POSITIONAL, Argument("-- COMMAND")] = ()
    """jaxtp command, or arguments for Python."""


COMMAND = Command(program=PROGRAM, schema=Launch, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command and returns the exit code of the first process that failed."""
    return entry.attempt(PROGRAM, lambda: _launch(argv))


def _launch(argv: Sequence[str]) -> int:
    launch, _ = COMMAND.load(argv)
    command = list(launch.command)
    if not command or "--" not in argv:
        raise LaunchError("no command; it follows --, as in -- jaxtp train --config FILE")
    if re.fullmatch(r"python[\d.]*", Path(command[0]).name):
        raise LaunchError(f"-- {command[0]}: leave it out; after -- come the arguments for Python")
    if command[0] == "jaxtp":
        command = ["-m", *command]
    if launch.devices is None and not gpus_present():
        print(
            "no NVIDIA GPUs here: the processes divide the mesh's devices, which are virtual CPU "
            "devices (--devices N gives each process N)",
            file=sys.stderr,
        )
    return supervise(
        Group(launch.processes, command, launch.logs, launch.devices), restarts=launch.restarts
    )


if __name__ == "__main__":
    entry.run(PROGRAM, main)
