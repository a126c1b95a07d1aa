"""`jaxtp checkpoint`: inspects, verifies and compares checkpoints, and finds documents of steps."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from jaxtp.checkpoint import silence_orbax
from jaxtp.checkpoint.storage import ArrayFacts, StoredCheckpoint, is_of_run, open_checkpoint
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command, choose
from jaxtp.config.files import require_writable, write_json
from jaxtp.config.reading import truncate
from jaxtp.config.schema import Count, FolderOrUrl, OptionalFile, UserPath
from jaxtp.data.copies import local
from jaxtp.distributed.environment import accept_absent_gpus
from jaxtp.mesh import describe_mesh, mesh_shape

PROGRAM = "jaxtp checkpoint"
Folder = Annotated[FolderOrUrl, POSITIONAL, Argument("DIR")]
# Settings in the section `model` that affect a user's model
_OF_OWN_MODEL = ("build", "arguments", "plan", "precision")
_RECORDED = ("next_sample", "mesh", "processes", "versions", "corpus", "config")


@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Flags of `jaxtp checkpoint inspect` and `verify`."""

    dir: Folder
    """Folder or URL of a run (its newest checkpoint), or of one checkpoint."""
    json: OptionalFile = None
    """JSON file to write the result to."""


@dataclass(frozen=True, kw_only=True)
class Diff:
    """Flags of `jaxtp checkpoint diff`."""

    a: Folder
    """Folder or URL of a run (its newest checkpoint), or of one checkpoint."""
    b: Folder
    """Folder of a run or checkpoint to compare with."""
    json: OptionalFile = None
    """JSON file to write the result to."""


@dataclass(frozen=True, kw_only=True)
class RowsOf:
    """Flags of `jaxtp checkpoint rows`."""

    run: Annotated[UserPath, POSITIONAL, Argument("RUN")]
    """Folder of a run."""
    step: Count
    """The step, from 1; also one that is not saved, or yet to come."""
    json: OptionalFile = None
    """JSON file to write the result to."""


def inspect(args: Inspect) -> int:
    """Prints the contents of a checkpoint."""
    stored = open_checkpoint(local(args.dir))
    info = stored.info
    record = _record(stored)
    print(f"{stored.folder}, {record['bytes']:,} bytes on disk")
    if is_of_run(info):
        print(f"step      {record['step']}, next sample {info['next_sample']:,}")
        mesh = describe_mesh(mesh_shape(**info["mesh"]))
        print(f"written   on mesh {mesh} by {info.get('processes', 'unknown')} process(es)")
        versions = (f"{name} {version}" for name, version in info.get("versions", {}).items())
        print(f"versions  {', '.join(versions)}")
        print(f"data      {json.dumps(info['corpus'])}")
        config = dict(info["config"])
        if config["model"].get("build") is not None:
            config["model"] = {name: config["model"][name] for name in _OF_OWN_MODEL}
        for section, values in config.items():
            print(f"{section:<10}{json.dumps(values)}")
        print()
    else:
        facts = ArrayFacts.model_fields
        user_info = {name: value for name, value in info.items() if name not in facts}
        print(f"step      {record['step']}\ninfo      {json.dumps(user_info)}\n")
    for name, array in record["arrays"].items():
        shape = "x".join(map(str, array["shape"])) or "scalar"
        print(
            f"{name:<60}{shape:<18}{array['dtype']:<10}{array['bytes']:>14,}  "
            f"{array['split'] or ''}"
        )
    write_json("--json", args.json, record)
    return 0


def _record(stored: StoredCheckpoint) -> dict[str, Any]:
    name = stored.folder.name
    # The folder of a copy may have any name.
    step = int(name) if name.isdecimal() else name
    record: dict[str, Any] = {"folder": str(stored.folder), "step": step}
    files = filter(Path.is_file, stored.folder.rglob("*"))
    record["bytes"] = sum(path.stat().st_size for path in files)
    for name in _RECORDED:
        if name in stored.info:
            record[name] = stored.info[name]
    record["arrays"] = {}
    for name, array in stored.arrays.items():
        record["arrays"][name] = {
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "bytes": array.size * array.dtype.itemsize,
            "split": stored.info.get("specs", {}).get(name),
        }
    return record


def verify(args: Inspect) -> int:
    """Prints the arrays that differ from their checksums; returns 1 if there are any."""
    stored = open_checkpoint(local(args.dir))
    problems = {}
    for name in stored.arrays:
        problem = stored.verify(name)
        if problem is not None:
            problems[name] = problem
            print(f"{name}: {problem}")
    plural = "" if len(problems) == 1 else "s"
    num_arrays = len(stored.arrays)
    print(f"{stored.folder}: {num_arrays} arrays, {len(problems) or 'no'} problem{plural}")
    record = {"folder": str(stored.folder), "arrays": num_arrays, "problems": problems}
    write_json("--json", args.json, record)
    return 1 if problems else 0


def diff(args: Diff) -> int:
    """Prints how much each array differs between two checkpoints; returns 1 if any array does."""
    a = open_checkpoint(local(args.a))
    b = open_checkpoint(local(args.b))
    names = dict.fromkeys((*a.arrays, *b.arrays))
    differ = {}
    for name in names:
        difference = describe_difference(a, b, name)
        if difference is not None:
            differ[name] = difference
            print(f"{difference:<23} {name}")
    print(f"{len(differ) or 'none'} of {len(names)} arrays differ")
    write_json("--json", args.json, {"a": str(a.folder), "b": str(b.folder), "differ": differ})
    return 1 if differ else 0


def describe_difference(a: StoredCheckpoint, b: StoredCheckpoint, name: str) -> str | None:
    """Returns the relative L2 norm of a difference, or a description; None if equal."""
    shapes = [stored.arrays[name].shape if name in stored.arrays else "absent" for stored in (a, b)]
    if shapes[0] != shapes[1]:
        return f"{shapes[0]} and {shapes[1]}"
    checksum = a.info["checksums"].get(name)
    if checksum is not None and checksum == b.info["checksums"].get(name):
        return None
    array = np.asarray(a.read(name), np.float64)
    difference = array - np.asarray(b.read(name), np.float64)
    norm = float(np.linalg.norm(array)) or 1.0
    return f"{float(np.linalg.norm(difference)) / norm:.3e}"


def rows(args: RowsOf) -> int:
    """Prints the documents in the batch of a step."""
    from jaxtp.checkpoint.provenance import rows_of_step

    record = rows_of_step(args.run, args.step)
    first = record["first_sample"]
    last = first + len(record["rows"]) - 1
    print(f"step {args.step} of {args.run}: samples {first:,} to {last:,} of the run")
    print(f"{'row':>6}  {'tokens':<17}  document")
    for index, pieces in enumerate(record["rows"]):
        for piece in pieces:
            line = "" if piece["line"] is None else f", line {piece['line']}"
            tokens = f"{piece['start']}:{piece['stop']}"
            # The dataset may come from someone else.
            file = truncate(piece["file"], 1000)
            print(f"{index:>6}  {tokens:<17}  {file}{line}")
    write_json("--json", args.json, {"run": str(args.run), **record})
    return 0


_INSPECT = "Shows a checkpoint's step, mesh, versions, configuration, and each array."
_VERIFY = "Compares each array with its checksum; exit code 1 if one differs."
_DIFF = "Shows how much each array differs in relative L2 norm; exit code 1 if any does."
_ROWS = """Shows the documents in the batch of a step, by row: file, line and tokens.

Tokens are a range within the document; the last label is the token after it. The line is a row in
Parquet and lists, and 1 in a text.
"""
COMMANDS: dict[str, Command[Any]] = {
    "inspect": Command(program=f"{PROGRAM} inspect", schema=Inspect, description=_INSPECT),
    "verify": Command(program=f"{PROGRAM} verify", schema=Inspect, description=_VERIFY),
    "diff": Command(program=f"{PROGRAM} diff", schema=Diff, description=_DIFF),
    "rows": Command(program=f"{PROGRAM} rows", schema=RowsOf, description=_ROWS),
}
_FUNCTIONS: dict[str, Callable[[Any], int]] = {
    "inspect": inspect,
    "verify": verify,
    "diff": diff,
    "rows": rows,
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 1 if arrays differ, 2 for a user error."""
    accept_absent_gpus()
    silence_orbax()
    return entry.attempt(PROGRAM, lambda: _run(argv))


def _run(argv: Sequence[str]) -> int:
    name, flags = choose(PROGRAM, COMMANDS, argv)
    args, _ = COMMANDS[name].load(flags)
    require_writable("--json", args.json)
    return _FUNCTIONS[name](args)


if __name__ == "__main__":
    entry.run(PROGRAM, main)
