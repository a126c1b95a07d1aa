"""`jaxtp launch`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp import entry
from jaxtp.launch.environment import gpus_present
from jaxtp.launch.supervisor import Group, SupervisorError, supervise

PROGRAM = "jaxtp launch"
DESCRIPTION = """Starts the processes of one machine, each with its share of the GPUs; ends all of them when one dies.

    jaxtp launch --processes 2 -- -m jaxtp.train --config FILE

What follows -- are the arguments of Python. One process is enough to drive all GPUs of a host; several are for trying a
run of several hosts, on CPUs too, and for a program that wants one for each GPU.
"""
MOST_PROCESSES = 1024


def launch(
    processes: int,
    devices: int | None = None,
    restarts: int = 0,
    logs: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("logs"),
) -> tuple[int, int | None, int, Path]:
    """Reads the flags.

    Args:
      processes: Number of processes.
      devices: Virtual CPU devices of each process; by default the GPUs of the machine are divided among them.
      restarts: Most times that all are started again after one has failed; not after a mistake (exit code 2), nor where
        numbers are wrong (3).
      logs: Folder of the logs, process-0.log and so on; those of an earlier start are replaced.
    """
    return processes, devices, restarts, logs


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns the exit code of the first process that failed, else 0."""
    return entry.attempt(PROGRAM, lambda: _launch(argv))


def _launch(argv: Sequence[str]) -> int:
    at = argv.index("--") if "--" in argv else len(argv)
    flags, command = list(argv[:at]), list(argv[at + 1 :])
    if not command and not {"-h", "--help"} & set(flags):
        raise SupervisorError("no command: it follows --, as in -- -m jaxtp.train --config FILE")
    processes, devices, restarts, logs = tyro.cli(launch, args=flags, prog=PROGRAM, description=DESCRIPTION)
    for name, value, least in (("processes", processes, 1), ("devices", devices, 1), ("restarts", restarts, 0)):
        if value is not None and not least <= value <= MOST_PROCESSES:
            raise SupervisorError(f"--{name} {value}: should be from {least} to {MOST_PROCESSES}")
    if devices is None and not gpus_present():
        print(
            "no NVIDIA GPUs here: each process takes what JAX finds (--devices N makes virtual CPU devices)",
            file=sys.stderr,
        )
    return supervise(Group(processes, command, logs, devices), restarts=restarts)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
