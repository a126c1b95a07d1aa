"""Caches row plans in the user's cache folder.

A plan is an int64 array in a file named by the hash of the plan's inputs. The file starts with that hash and the sha256
of the rest; a file that fails either check is replaced. Checkpoints record the sha256. Concurrent processes write
identical files, and the rename is atomic. Without a usable cache, the plan is a temporary file.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtp.config.files import PARTIAL
from jaxtp.config.reading import open_regular
from jaxtp.distributed.environment import cache_folder, forget_oldest, make_private

SUFFIX = ".rows"
FEW = 2**10
"""Plans of at most this many pieces take milliseconds and are not cached."""
WARN_AFTER_SECONDS = 5.0
"""Planning time after which a failure to cache is reported."""
_HEADER = 2 * 32
"""Bytes of the two hashes at the beginning of a file."""


class Block(NamedTuple):
    """A plan for some of the documents."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: document, and its first token in the piece."""
    counts: NDArray[np.int64]
    """Number of pieces in each row."""
    num_tokens: int
    num_split: int
    num_dropped: int


@dataclass(frozen=True)
class Plan:
    """The pieces of documents in each row, as memory maps."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: document, and its first token in the piece."""
    rows: NDArray[np.int64]
    """`[number of rows + 1]`: row i holds the pieces from entry i up to entry i + 1."""
    num_tokens: int
    num_split: int
    num_dropped: int
    sha256: str


@dataclass(frozen=True)
class PlanRequest:
    """A plan to find or make."""

    key: bytes
    """sha256 of everything that the plan depends on."""
    max_pieces: int
    blocks: Callable[[], Iterator[Block]]
    """Computes the plan."""


def find_plan(request: PlanRequest) -> Plan:
    """Returns the cached plan, or makes and tries to cache it."""
    if request.max_pieces <= FEW:
        return _make_temporary(request)
    try:
        folder = cache_folder() / "plans"
        make_private(folder)
        return _find_in(folder, request)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home directory
        started = time.monotonic()
        plan = _make_temporary(request)
        if (seconds := time.monotonic() - started) > WARN_AFTER_SECONDS:
            print(f"planning the rows took {seconds:.0f} s; the plan cannot be cached: {error}", file=sys.stderr)
        return plan


def _find_in(folder: Path, request: PlanRequest) -> Plan:
    path = folder / f"{request.key.hex()}{SUFFIX}"
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        is_deleted = os.fstat(file.fileno()).st_nlink == 0  # another process did, before the lock
        if not is_deleted and (plan := _read(file, request.key)) is not None:
            os.utime(path)  # the least recently used plans are deleted first
            return plan
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=PARTIAL, delete=False) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            plan = _make(file, request)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        forget_oldest(folder, forget=_delete_unused)
    return plan


def _make_temporary(request: PlanRequest) -> Plan:
    with tempfile.TemporaryFile() as file:
        return _make(file, request)


def _make(file: IO[bytes], request: PlanRequest) -> Plan:
    """Writes block by block, since a plan may exceed memory."""
    totals = np.zeros(5, "<i8")  # pieces, rows, tokens, documents split, documents dropped
    file.write(bytes(_HEADER + totals.nbytes))
    with tempfile.TemporaryFile() as rows:
        rows.write(bytes(8))
        for block in request.blocks():
            block.pieces.astype("<i8").tofile(file)
            (totals[0] + np.cumsum(block.counts)).astype("<i8").tofile(rows)
            totals += [len(block.pieces), len(block.counts), block.num_tokens, block.num_split, block.num_dropped]
        rows.seek(0)
        shutil.copyfileobj(rows, file)
    file.seek(_HEADER)
    file.write(totals.tobytes())
    file.flush()
    digest = _sha256(file)
    file.seek(0)
    file.write(request.key + digest)
    file.flush()
    plan = _read(file, request.key)
    if plan is None:
        raise OSError("the disk does not return what was written")
    return plan


def _read(file: IO[bytes], key: bytes) -> Plan | None:
    file.seek(0)
    header = file.read(_HEADER)
    if header != key + _sha256(file):
        return None
    values = np.memmap(file, "<i8", mode="r").view(np.ndarray)[_HEADER // 8 :]
    num_pieces, _, num_tokens, num_split, num_dropped = values[:5].tolist()
    pieces, rows = np.split(values[5:], [2 * num_pieces])
    return Plan(pieces.reshape(-1, 2), rows, num_tokens, num_split, num_dropped, header[32:].hex())


def _sha256(file: IO[bytes]) -> bytes:
    file.seek(_HEADER)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def _delete_unused(path: Path) -> None:
    """Deletes a file unless a process maps it: a map holds a copy of the descriptor and thus its shared lock.

    On a shared folder, deletion from another host would crash the process that reads the map.
    """
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
