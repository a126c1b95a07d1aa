"""Distinguishes corrupted checkpoints from transient I/O errors.

Processes read their parts independently, then share their errors (`distributed/agreement.py`), so
all of them get the same result.
"""

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

import jax

from jaxtp.config.entry import FILES, UserError, say
from jaxtp.config.files import PAUSES
from jaxtp.config.reading import open_regular
from jaxtp.config.schema import Address
from jaxtp.distributed.agreement import first_disagreeing, raise_everywhere

T = TypeVar("T")
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# Errors that do not depend on the content of files
_TRANSIENT = (OSError, MemoryError, jax.errors.JaxRuntimeError)
_PERMANENT = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)
"""File system errors that a retry does not fix."""
_RETRY = "; this proves no damage, and nothing was changed: run the same command again"
# Number of bytes that are read at once
_BLOCK = 1 << 24


class CheckpointError(UserError):
    """A checkpoint cannot be written, read, or used for this run."""


class UnwritableError(CheckpointError):
    """A checkpoint cannot be written.

    A retry resumes from the previous checkpoint and may succeed.
    """

    exit_code = FILES


class DamagedError(CheckpointError):
    """A checkpoint is provably corrupt: files are missing or truncated, or a checksum differs."""


def read_or_explain(folder: Path, read: Callable[[], T]) -> T:
    """Calls `read` on a checkpoint; raises `DamagedError`, or `CheckpointError` if unreadable.

    Libraries hide file system errors, so one failed read does not prove that a checkpoint is
    damaged. It is damaged if every byte of its files can be read, and a second attempt fails too.
    File system errors are retried as in `retry_io`.
    """

    def attempt() -> T:
        failures: list[str] = []
        while len(failures) < 2:
            try:
                return read()
            except CheckpointError:
                raise
            except Exception as error:
                # The objects of a commit are as they were written, so this proves no damage.
                if isinstance(folder, Address):
                    reason = describe_error(error)
                    raise CheckpointError(f"{folder} cannot be read ({reason}){_RETRY}") from error
                transient = isinstance(error, _TRANSIENT) and not isinstance(error, MISSING)
                if not transient or (isinstance(error, OSError) and error.filename is None):
                    with contextlib.suppress(*MISSING):
                        # Raises the file system's error, if there is one; it names the file.
                        _read_every_byte(folder)
                if transient:
                    raise
                failures.append(describe_error(error))
        raise DamagedError(f"{folder} is damaged ({failures[0]})")

    return retry_io(folder, attempt, _RETRY)


def retry_io(folder: Path, look: Callable[[], T], hint: str = "") -> T:
    """Calls `look`, and retries after file system errors, except for missing files.

    Raises `CheckpointError` after the last attempt, with a message that ends with `hint`.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return look()
        except MISSING:
            raise
        except _TRANSIENT as error:
            reason = describe_error(error)
            pause = next(pauses, None)
            if pause is None or not isinstance(error, OSError) or error.errno in _PERMANENT:
                raise CheckpointError(f"{folder} cannot be read ({reason}){hint}") from None
        say(f"{folder} cannot be read now ({reason}); retry in {pause:g} s")
        time.sleep(pause)


def _read_every_byte(folder: Path) -> None:
    for path in files_below(folder):
        try:
            with open_regular(path) as file:
                _read_data(file)
        except OSError as error:
            # The error of a failed read does not name the file.
            error.filename = str(path)
            raise


def _read_data(file: BinaryIO) -> None:
    """Reads a file without its holes, which take no room on the disk and could have terabytes."""
    position = 0
    while True:
        try:
            position = file.seek(position, os.SEEK_DATA)
        except OSError as error:
            # There is no data after this position.
            if error.errno == errno.ENXIO:
                return
            raise
        end = file.seek(position, os.SEEK_HOLE)
        file.seek(position)
        # The block at the end is empty, even if the file is cut meanwhile.
        while block := file.read(min(_BLOCK, end - position)):
            position += len(block)


def files_below(folder: Path) -> Iterator[Path]:
    """Yields every file under a folder."""

    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from map(Path(parent).joinpath, names)


def read_on_all(attempt: Callable[[], T]) -> T:
    """Calls `attempt` in every process; if it fails in one, all raise the error.

    Of several errors, a `DamagedError` comes first.
    """
    with raise_everywhere(kinds=(DamagedError, CheckpointError)):
        return attempt()


def require_shared(folder: Path, look: Callable[[], object]) -> None:
    """Checks that `look` returns the same JSON value in all processes."""
    blind = first_disagreeing(lambda: read_on_all(look))
    if blind is not None:
        raise CheckpointError(
            f"{folder} is not one folder for all: {blind} does not see what process 0 sees there; "
            "name a folder on a file system that all hosts share"
        )


def disk_full_message(error: Exception) -> str | None:
    """Returns the system's message for a full disk or quota, else None."""
    # A TensorStore error lists many files before this message.
    for message in map(os.strerror, (errno.ENOSPC, errno.EDQUOT)):
        if message in str(error):
            return message
    return None


def describe_error(error: Exception) -> str:
    """Returns an Orbax or TensorStore error's message in one line."""
    message = disk_full_message(error)
    if message is not None:
        return message
    text = str(error).split("See full TensorStore details")[0].strip()
    return text.splitlines()[0][:400] if text else type(error).__name__
