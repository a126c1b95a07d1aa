"""`python -m jaxtp.checkpoint`: what is in a checkpoint, whether it is whole, how two differ."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp import entry
from jaxtp.checkpoint import reader
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.launch import accept_absent_gpus

PROGRAM = "python -m jaxtp.checkpoint"
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True)
class Inspect:
    """Shows what a checkpoint holds: step, mesh, versions, configuration, and each array."""

    dir: Folder
    """Folder of a run (its newest checkpoint), or of one checkpoint."""


@dataclass(frozen=True)
class Verify:
    """Reads every array, one at a time, and compares shape and checksum; exit code 1 if one is not as it was saved."""

    dir: Folder
    """Folder of a run (its newest checkpoint), or of one checkpoint."""


@dataclass(frozen=True)
class Diff:
    """Shows by how much each array differs between two checkpoints: relative L2 norms; exit code 1 if any does."""

    a: Folder
    """Folder of a run (its newest checkpoint), or of one checkpoint."""

    b: Folder
    """The other one."""


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 for arrays that differ, 2 for a user's mistake."""
    accept_absent_gpus()
    quieten()
    command = tyro.extras.subcommand_cli_from_dict(
        {"inspect": Inspect, "verify": Verify, "diff": Diff}, args=list(argv), prog=PROGRAM, description=__doc__
    )
    return entry.attempt(PROGRAM, lambda: _run(command))


def _run(command: Inspect | Verify | Diff) -> int:
    if isinstance(command, Inspect):
        return _inspect(reader.open_checkpoint(command.dir))
    if isinstance(command, Verify):
        return _verify(reader.open_checkpoint(command.dir))
    return _diff(reader.open_checkpoint(command.a), reader.open_checkpoint(command.b))


def _inspect(stored: reader.Stored) -> int:
    print(f"{stored.folder}, {stored.bytes_on_disk():,} bytes on disk")
    for line in stored.summary():
        print(line)
    print()
    print(stored.table())
    return 0


def _verify(stored: reader.Stored) -> int:
    problems = 0
    for name in stored.arrays:
        problem = stored.verify(name)
        problems += problem is not None
        if problem is not None:
            print(f"{name}: {problem}")
    print(f"{stored.folder}: {len(stored.arrays)} arrays, {problems or 'no'} problems")
    return 1 if problems else 0


def _diff(a: reader.Stored, b: reader.Stored) -> int:
    differ = 0
    names = dict.fromkeys((*a.arrays, *b.arrays))
    for name in names:
        difference = reader.difference(a, b, name)
        if difference:
            differ += 1
            print(f"{difference:<23} {name}")
    print(f"{differ or 'none'} of {len(names)} arrays differ")
    return 1 if differ else 0


if __name__ == "__main__":
    entry.run(PROGRAM, main)
