"""Tells damage from what only cannot be read now, and makes the processes of a run agree on which it is.

Each process reads its part alone and all decide together (`launch/agreement.py`): a process has an Orbax checkpointer
of its own, in which nobody waits for others, and shares what it met. Damage counts before an error that may pass.
Checksums take all devices, so they begin only when every process has read its part.
"""

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxtp.entry import UserError
from jaxtp.launch.agreement import agree, first_other

T = TypeVar("T")
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_MAY_PASS = (OSError, MemoryError, jax.errors.JaxRuntimeError)
"""Errors that say nothing about files that are there."""
_STAY = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)
"""Errors of a file system that do not pass by themselves."""
PAUSES = (1.0, 3.0, 9.0)
"""Seconds before each new attempt, where the file system fails."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written, read, or used for this run."""


class DamagedError(CheckpointError):
    """A checkpoint that is proven not to be what was written: files are missing or cut, or a checksum differs."""


def read_or_explain(folder: Path, read: Callable[[], T]) -> T:
    """Returns what `read` makes of the files in the folder of a checkpoint.

    Libraries turn an error of the file system into others, or into none: a failed read proves no damage. It is proven
    where every byte of every file can be read, and a second attempt fails too. An error of the file system may pass:
    there are as many more attempts as `PAUSES` has.

    Raises:
      DamagedError: the files are damaged.
      CheckpointError: they cannot be read now, which may pass: an error of the file system, too little memory.
    """
    pauses, said = iter(PAUSES), ""
    while True:
        try:
            return read()
        except CheckpointError:
            raise
        except Exception as error:
            cause = _passing(folder, error)
            if cause is None and said:
                raise DamagedError(f"{folder} is damaged ({said})") from None
            if cause is None:
                said = reason(error)
                continue
            said = ""
        if not (isinstance(cause, OSError) and _paused(folder, cause, pauses)):
            raise CheckpointError(
                f"{folder} cannot be read ({_named(folder, cause)}), which proves no damage: everything is left as it "
                "is, for the same command to try again"
            )


def patiently(folder: Path, look: Callable[[], T]) -> T:
    """Returns what `look` sees in a folder, after more attempts where the file system fails.

    Raises:
      CheckpointError: it still fails.
      OSError: something that `look` wants is not there.
    """
    pauses = iter(PAUSES)
    while True:
        try:
            return look()
        except MISSING:
            raise
        except OSError as error:
            if not _paused(folder, error, pauses):
                raise CheckpointError(f"{folder} cannot be read ({reason(error)})") from None


def _paused(folder: Path, error: OSError, pauses: Iterator[float]) -> bool:
    """Waits for the next attempt, and says so; returns False if there is none."""
    seconds = next(pauses, None)
    if seconds is None or error.errno in _STAY:
        return False
    print(f"{folder} cannot be read now ({reason(error)}); next attempt in {seconds:g} s", file=sys.stderr, flush=True)
    time.sleep(seconds)
    return True


def _passing(folder: Path, error: Exception) -> Exception | None:
    """Returns the error of a file system or of memory that a failed read may come from; None if there is none.

    There is none where every byte in the folder can be read, or files are missing.
    """
    if isinstance(error, _MAY_PASS) and not isinstance(error, MISSING):
        return error
    try:
        _read_every_byte(folder)
    except MISSING:
        return None
    except _MAY_PASS as cause:
        return cause
    return None


def _named(folder: Path, error: Exception) -> str:
    """Returns the message of a failed read, with the file that cannot be read, if there is one still."""
    if isinstance(error, OSError) and error.filename is None:
        try:
            _read_every_byte(folder)
        except OSError as again:
            return reason(again)
    return reason(error)


def _read_every_byte(folder: Path) -> None:
    for path in files_below(folder):
        try:
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        except OSError as error:  # that of a read does not name the file
            error.filename = str(path)
            raise


def files_below(folder: Path) -> Iterator[Path]:
    """Yields every file in a folder and those below it.

    Raises:
      OSError: one of them cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        yield from (Path(parent) / name for name in names)


def agreed(attempt: Callable[[], T]) -> T:
    """Returns what each process of a run reads by itself; what one of them cannot read, none has read.

    Raises:
      DamagedError: one has proven damage.
      CheckpointError: none has, and one cannot read now.
    """
    return agree(attempt, (DamagedError, CheckpointError))


def require_shared(folder: Path, look: Callable[[], Any]) -> None:
    """Checks that all processes of a run see the same in a folder, as one that they share shows it.

    Args:
      folder: the folder, for the message.
      look: returns what this process sees, which JSON can hold; may raise a `CheckpointError`.

    Raises:
      CheckpointError: one of them sees something else than process 0, and goes on to.
    """
    blind = first_other(lambda: agreed(look))
    if blind is not None:
        raise CheckpointError(
            f"{folder} is not one folder for all: {blind} does not see what process 0 sees there; name a folder on a "
            "file system that all hosts share"
        )


def reason(error: Exception) -> str:
    """Returns the message of an error of Orbax or TensorStore in one line."""
    text = str(error).split("See full TensorStore details")[0].strip()
    return text.splitlines()[0][:400] if text else type(error).__name__
