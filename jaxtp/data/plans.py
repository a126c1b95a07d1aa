"""Caches row plans in the user's cache folder.

A plan's file is named by the hash of the plan's inputs. It starts with the sha256 of the rest, which checkpoints
record; a file that does not match is replaced. Concurrent processes write identical files, and the rename is atomic.
Without a usable cache, the plan is a temporary file.
"""

import contextlib
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
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
_DIGEST = 32


class Block(NamedTuple):
    """A plan for some of the documents."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: document, and its first token in the piece."""
    counts: NDArray[np.int64]
    """Number of pieces in each row."""
    num_tokens: int
    num_split: int
    num_dropped: int


class Plan(NamedTuple):
    """The pieces of documents in each row, as memory maps."""

    pieces: NDArray[np.int64]
    """As in `Block`."""
    rows: NDArray[np.int64]
    """`[number of rows + 1]`: row i holds the pieces from entry i up to entry i + 1."""
    num_tokens: int
    num_split: int
    num_dropped: int
    sha256: str


def find_plan(key: bytes, max_pieces: int, blocks: Callable[[], Iterator[Block]]) -> Plan:
    """Returns the cached plan, or makes it from `blocks` and tries to cache it; `key` hashes all that it depends on."""
    error: Exception | None = None
    if max_pieces > FEW:
        try:
            folder = cache_folder() / "plans"
            make_private(folder)
            return _find_in(folder, key, blocks)
        except (OSError, RuntimeError) as failure:  # RuntimeError: no home directory
            error = failure
    started = time.monotonic()
    with tempfile.TemporaryFile() as file:
        plan = _make(file, blocks)
    if error is not None and (seconds := time.monotonic() - started) > WARN_AFTER_SECONDS:
        print(f"planning the rows took {seconds:.0f} s; the plan cannot be cached: {error}", file=sys.stderr)
    return plan


def _find_in(folder: Path, key: bytes, blocks: Callable[[], Iterator[Block]]) -> Plan:
    path = folder / f"{key.hex()}{SUFFIX}"
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        if (plan := _read(file)) is not None:
            os.utime(path)  # the least recently used plans are deleted first
            return plan
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=PARTIAL, delete=False) as file:
        try:
            plan = _make(file, blocks)
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        forget_oldest(folder)
    return plan


def _make(file: IO[bytes], blocks: Callable[[], Iterator[Block]]) -> Plan:
    """Writes block by block, since a plan may exceed memory."""
    totals = np.zeros(5, "<i8")  # pieces, rows, tokens, documents split, documents dropped
    file.write(bytes(_DIGEST + totals.nbytes))
    with tempfile.TemporaryFile() as rows:
        rows.write(bytes(8))
        for block in blocks():
            block.pieces.astype("<i8").tofile(file)
            (totals[0] + np.cumsum(block.counts)).astype("<i8").tofile(rows)
            totals += [len(block.pieces), len(block.counts), block.num_tokens, block.num_split, block.num_dropped]
        rows.seek(0)
        shutil.copyfileobj(rows, file)
    file.seek(_DIGEST)
    file.write(totals.tobytes())
    file.flush()
    digest = _sha256(file)
    file.seek(0)
    file.write(digest)
    file.flush()
    plan = _read(file)
    if plan is None:
        raise OSError("the disk does not return what was written")
    return plan


def _read(file: IO[bytes]) -> Plan | None:
    file.seek(0)
    digest = file.read(_DIGEST)
    if digest != _sha256(file):
        return None
    values = np.memmap(file, "<i8", mode="r").view(np.ndarray)[_DIGEST // 8 :]
    num_pieces, _, num_tokens, num_split, num_dropped = values[:5].tolist()
    pieces, rows = np.split(values[5:], [2 * num_pieces])
    return Plan(pieces.reshape(-1, 2), rows, num_tokens, num_split, num_dropped, digest.hex())


def _sha256(file: IO[bytes]) -> bytes:
    file.seek(_DIGEST)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
