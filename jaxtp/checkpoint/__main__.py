"""`jaxtp checkpoint`: what is in a checkpoint, whether it is whole, how two differ."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.checkpoint.reader import difference, open_checkpoint
from jaxtp.config import expand
from jaxtp.launch.environment import accept_absent_gpus

PROGRAM = "jaxtp checkpoint"
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


def inspect(dir: Folder) -> int:
    """Shows what a checkpoint holds: step, mesh, versions, configuration, and each array.

    Args:
      dir: Folder of a run (its newest checkpoint), or of one checkpoint.
    """
    stored = open_checkpoint(expand(dir))
    print(f"{stored.folder}, {stored.bytes_on_disk():,} bytes on disk")
    print(*stored.summary(), "", stored.table(), sep="\n")
    return 0


def verify(dir: Folder) -> int:
    """Reads every array, one at a time, and compares shape and checksum; exit code 1 if one is not as it was saved.

    Args:
      dir: Folder of a run (its newest checkpoint), or of one checkpoint.
    """
    stored = open_checkpoint(expand(dir))
    problems = 0
    for name in stored.arrays:
        if (problem := stored.verify(name)) is not None:
            problems += 1
            print(f"{name}: {problem}")
    print(f"{stored.folder}: {len(stored.arrays)} arrays, {problems or 'no'} problems")
    return 1 if problems else 0


def diff(a: Folder, b: Folder) -> int:
    """Shows by how much each array differs between two checkpoints: relative L2 norms; exit code 1 if any does.

    Args:
      a: Folder of a run (its newest checkpoint), or of one checkpoint.
      b: The other one.
    """
    one, other = open_checkpoint(expand(a)), open_checkpoint(expand(b))
    differ = 0
    names = dict.fromkeys((*one.arrays, *other.arrays))
    for name in names:
        if found := difference(one, other, name):
            differ += 1
            print(f"{found:<23} {name}")
    print(f"{differ or 'none'} of {len(names)} arrays differ")
    return 1 if differ else 0


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 for arrays that differ, 2 for a user's mistake."""
    accept_absent_gpus()
    quieten()
    commands: dict[str, Callable[..., int]] = {"inspect": inspect, "verify": verify, "diff": diff}

    def run() -> int:
        return tyro.extras.subcommand_cli_from_dict(commands, args=list(argv), prog=PROGRAM, description=__doc__)

    return entry.attempt(PROGRAM, run)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
