"""Plans of packed rows, kept in the user's cache: one process makes a plan, and all that need it read it where it lies.

A plan's name is a hash of everything that it depends on. A kept file is never trusted: it is read if its size and its
sha256 are those that it states, its name is the one that was asked for, and its numbers can be those of the documents.
Any other is made anew. The name covers the lengths of the documents as they are read, so damaged offsets are noticed;
the sha256 is compared over processes and stored in the checkpoint. Where the cache or its locks cannot be used, a
process makes a plan of its own, in a file that has no name.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxtp.files import PARTIAL
from jaxtp.launch.environment import cache_folder, forget_oldest, make_private
from jaxtp.reading import open_regular

FOLDER = "plans"
"""The folder of plans in the user's cache."""
SUFFIX = ".plan"
FEW = 2**10
"""Number of pieces up to which a plan is not kept: it is made within milliseconds."""
LONGEST_WAIT = 3600.0
"""Seconds to wait for another process that makes the plan; then this one makes its own."""
TELL_AFTER = 5.0
"""Seconds of making a plan after which it is said that it could not be kept."""

_MAGIC = b"jaxtpln1"
_HEADER = struct.Struct("<8s32s32s5q")
"""Magic; sha256 of all that follows the key; key; numbers of pieces, rows, tokens, documents split and dropped."""
_HASHED = 8 + 32 + 32
"""First byte that the sha256 covers."""
_BLOCK = 2**20
"""Numbers of a plan that are checked at a time."""


class Block(NamedTuple):
    """The part of a plan that holds some of the documents."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: a document, and its token that the piece begins with."""
    counts: NDArray[np.int64]
    """Number of pieces in each row."""
    num_tokens: int
    num_split: int
    num_dropped: int


@dataclass(frozen=True)
class Plan:
    """The rows of documents: which pieces of them each row holds. Its arrays are maps of a file."""

    pieces: NDArray[np.int64]
    """`[n, 2]`, in the order of their rows: a document, and its token that the piece begins with."""
    rows: NDArray[np.int64]
    """`[number of rows + 1]`: row i holds the pieces from entry i up to entry i + 1."""
    num_tokens: int
    """Number of tokens in all rows."""
    num_split: int
    """Number of documents that were cut because they are longer than a row."""
    num_dropped: int
    """Number of documents that were left out because they are longer than a row."""
    sha256: str
    """Hash of all the above, in hexadecimal digits."""


@dataclass(frozen=True)
class Wanted:
    """A plan that is asked for."""

    key: bytes
    """Hash `[32]` of all that the plan depends on."""
    num_documents: int
    most_pieces: int
    """Number of pieces at most."""
    make: Callable[[], Iterator[Block]]
    """Makes it."""


def find_plan(wanted: Wanted) -> Plan:
    """Returns a plan: the kept one, or a new one, which is kept if it can be.

    Several processes that ask for one plan at a time wait for the first of them, which makes it.
    """
    if wanted.most_pieces <= FEW:
        return _make_unnamed(wanted)
    try:
        folder = cache_folder() / FOLDER
        make_private(folder)
        return _keep(folder, wanted)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        started = time.monotonic()
        plan = _make_unnamed(wanted)
        if (seconds := time.monotonic() - started) > TELL_AFTER:
            print(f"the rows took {seconds:.0f} s to plan, and are not kept for the next run: {error}", file=sys.stderr)
        return plan


def _keep(folder: Path, wanted: Wanted) -> Plan:
    """Returns the plan in a folder, or makes it there.

    Raises:
      OSError: the folder cannot be written, has no locks, or another process takes too long.
    """
    path = folder / f"{wanted.key.hex()}{SUFFIX}"
    if (plan := _kept(path, wanted)) is not None:
        return plan
    lock = path.with_suffix(".lock")
    with lock.open("a") as held:
        _wait_for(held)
        if (plan := _kept(path, wanted)) is not None:  # another process has made it meanwhile
            return plan
        for left in folder.glob(f"{path.stem}.*{PARTIAL}"):  # by a process that was killed
            left.unlink(missing_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.stem}.", suffix=PARTIAL, delete=False) as file:
            partial = Path(file.name)
            try:
                _in_use(file)
                plan = _make(file, wanted)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)  # who waits for it finds the plan; who comes later finds it too
    with contextlib.suppress(OSError):  # the plan is there, whatever becomes of others
        forget_oldest(folder, forget=_forget_unused)
    return plan


def _make_unnamed(wanted: Wanted) -> Plan:
    with tempfile.TemporaryFile() as file:
        return _make(file, wanted)


def _make(file: IO[bytes], wanted: Wanted) -> Plan:
    """Writes a plan into an empty file, and reads it as any other.

    It need not be on the disk: what the machine loses when its power fails, the sha256 notices.

    Raises:
      OSError: the disk is full, or does not keep what is written.
    """
    file.write(bytes(_HEADER.size))
    placed = np.zeros(5, np.int64)
    with tempfile.TemporaryFile() as rows:
        rows.write(bytes(8))  # the first row begins with the first piece
        for block in wanted.make():
            block.pieces.astype("<i8").tofile(file)
            (placed[0] + np.cumsum(block.counts)).astype("<i8").tofile(rows)
            sizes = len(block.pieces), len(block.counts), block.num_tokens, block.num_split, block.num_dropped
            placed += np.array(sizes)
        rows.seek(0)
        shutil.copyfileobj(rows, file)
    _write_header(file, bytes(32), wanted.key, placed)
    _write_header(file, _digest(file), wanted.key, placed)
    plan = _read(file, wanted)
    if plan is None:
        raise OSError("what was written there is not what is read")
    return plan


def _write_header(file: IO[bytes], digest: bytes, key: bytes, numbers: NDArray[np.int64]) -> None:
    file.seek(0)
    file.write(_HEADER.pack(_MAGIC, digest, key, *numbers.tolist()))
    file.flush()


def _digest(file: IO[bytes]) -> bytes:
    file.seek(_HASHED)
    return hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]


def _kept(path: Path, wanted: Wanted) -> Plan | None:
    """Returns the plan in a file, None if there is none or it is not whole."""
    try:
        with open_regular(path) as file:
            _in_use(file)
            if os.fstat(file.fileno()).st_nlink == 0:  # another process has just forgotten it
                return None
            plan = _read(file, wanted)
            if plan is not None:
                os.utime(path)  # those that were used the longest ago are forgotten first
            return plan
    except FileNotFoundError:
        return None


def _read(file: IO[bytes], wanted: Wanted) -> Plan | None:
    """Returns the plan in an open file; None if it is another one, or damaged."""
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    magic, digest, key, pieces, rows, tokens, split, dropped = _HEADER.unpack(header)
    size = os.fstat(file.fileno()).st_size
    if (magic, key) != (_MAGIC, wanted.key) or not 0 <= rows <= pieces <= wanted.most_pieces:
        return None
    if size != _HEADER.size + 8 * (2 * pieces + rows + 1) or _digest(file) != digest:
        return None
    values = np.memmap(file, "<i8", mode="r", offset=_HEADER.size).view(np.ndarray)
    plan = Plan(values[: 2 * pieces].reshape(-1, 2), values[2 * pieces :], tokens, split, dropped, digest.hex())
    return plan if _is_possible(plan, wanted) else None


def _is_possible(plan: Plan, wanted: Wanted) -> bool:
    """Returns whether every row has pieces, and every piece a document; a few MB are read at a time."""
    rows, pieces = plan.rows, plan.pieces
    ascends = all((np.diff(rows[i : i + _BLOCK + 1]) > 0).all() for i in range(0, len(rows), _BLOCK))
    parts = (pieces[i : i + _BLOCK] for i in range(0, len(pieces), _BLOCK))
    exist = all(((part >= 0).all() and (part[:, 0] < wanted.num_documents).all()) for part in parts)
    return bool(ascends and exist and rows[0] == 0 and rows[-1] == len(pieces))


def _wait_for(lock: IO[Any]) -> None:
    """Waits until no other process holds a lock.

    Raises:
      OSError: the file system has no locks, or the other process takes too long.
    """
    until = time.monotonic() + LONGEST_WAIT
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def _in_use(file: IO[bytes]) -> None:
    """Keeps other processes from forgetting a plan, as long as its file or a map of it is open.

    A map holds a copy of the file's descriptor, and with it the lock. Without it another host that shares the folder
    could delete the file, and this process would die when it reads the map.

    Raises:
      OSError: the file system has no locks.
    """
    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _forget_unused(path: Path) -> None:
    """Deletes a file of the folder, unless a process uses it."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
