"""`jaxtp checkpoint`: what is in a checkpoint, whether it is whole, how two differ."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jaxtp import entry
from jaxtp.checkpoint.orbax_logs import quieten
from jaxtp.checkpoint.reader import difference, open_checkpoint
from jaxtp.command_line import Command, choose
from jaxtp.config import UserPath
from jaxtp.files import require_writable, write_json
from jaxtp.launch.environment import accept_absent_gpus

PROGRAM = "jaxtp checkpoint"
Folder = Annotated[UserPath, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]


@dataclass(frozen=True, kw_only=True)
class Written:
    """Settings of every one of the commands."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write the result to, for machines."""


@dataclass(frozen=True, kw_only=True)
class Inspect(Written):
    """Command line of `jaxtp checkpoint inspect`, and of `verify`."""

    dir: Folder
    """Folder of a run (its newest checkpoint), or of one checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Diff(Written):
    """Command line of `jaxtp checkpoint diff`."""

    a: Folder
    """Folder of a run (its newest checkpoint), or of one checkpoint."""

    b: Folder
    """The other one."""


def inspect(asked: Inspect) -> int:
    """Prints what a checkpoint holds; returns 0."""
    stored = open_checkpoint(asked.dir)
    print(f"{stored.folder}, {stored.bytes_on_disk():,} bytes on disk")
    print(*stored.summary(), "", stored.table(), sep="\n")
    write_json("--json", asked.json, stored.record())
    return 0


def verify(asked: Inspect) -> int:
    """Prints the arrays that are not as they were saved; returns 1 if there are any."""
    stored = open_checkpoint(asked.dir)
    problems = {}
    for name in stored.arrays:
        if (problem := stored.verify(name)) is not None:
            problems[name] = problem
            print(f"{name}: {problem}")
    print(f"{stored.folder}: {len(stored.arrays)} arrays, {len(problems) or 'no'} problems")
    write_json("--json", asked.json, {"folder": str(stored.folder), "arrays": len(stored.arrays), "problems": problems})
    return 1 if problems else 0


def diff(asked: Diff) -> int:
    """Prints by how much each array differs between two checkpoints; returns 1 if any does."""
    one, other = open_checkpoint(asked.a), open_checkpoint(asked.b)
    names = dict.fromkeys((*one.arrays, *other.arrays))
    differ = {}
    for name in names:
        if found := difference(one, other, name):
            differ[name] = found
            print(f"{found:<23} {name}")
    print(f"{len(differ) or 'none'} of {len(names)} arrays differ")
    write_json("--json", asked.json, {"a": str(one.folder), "b": str(other.folder), "differ": differ})
    return 1 if differ else 0


COMMANDS: dict[str, Command[Any]] = {
    "inspect": Command(
        program=f"{PROGRAM} inspect",
        schema=Inspect,
        description="Shows what a checkpoint holds: step, mesh, versions, configuration, and each array.",
    ),
    "verify": Command(
        program=f"{PROGRAM} verify",
        schema=Inspect,
        description="Compares every array with its shape and checksum; exit code 1 if one is not as it was saved.",
    ),
    "diff": Command(
        program=f"{PROGRAM} diff",
        schema=Diff,
        description="Shows by how much each array differs between two checkpoints, in relative L2 norms; exit code 1 "
        "if any does.",
    ),
}
_ACTIONS: dict[str, Callable[[Any], int]] = {"inspect": inspect, "verify": verify, "diff": diff}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code: 0, 1 for arrays that differ, 2 for a user's mistake."""
    accept_absent_gpus()
    quieten()
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    command, flags = choose(PROGRAM, COMMANDS, argv)
    asked, _ = command.load(flags)
    require_writable("--json", asked.json)
    return _ACTIONS[command.program.rpartition(" ")[2]](asked)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
