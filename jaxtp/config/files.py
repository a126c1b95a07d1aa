"""Files: checksums, atomic and synced writes, and checks of output paths."""

import errno
import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxtp.config.reading import open_regular
from jaxtp.config.schema import ConfigError

PARTIAL = ".partial"  # Suffix of a file that is being written
PAUSES = (1.0, 3.0, 9.0)  # Seconds before each retry of a read or write
_NOT_REGULAR = "not a regular file"


def sha256(path: Path) -> str:
    """Returns the hex sha256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: object) -> str:
    """Returns the hex sha256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_file(file: IO[Any]) -> None:
    """Flushes an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk, for example after a rename."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_directly(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Opens a file to write it in a folder that someone else may have prepared.

    Raises an `OSError` for a link, which could lead to another file of the user, and for a pipe or
    device.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering, encoding=encoding, opener=_open_no_link)


def _open_no_link(name: str, flags: int) -> int:
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if os.path.islink(name):
            problem = "a link, and jaxtp does not write through it; delete it"
            raise OSError(errno.ELOOP, problem, name) from None
        if error.errno == errno.ENXIO:  # a pipe that nobody reads
            raise OSError(errno.EINVAL, _NOT_REGULAR, name) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, _NOT_REGULAR, name)
    os.set_blocking(descriptor, True)
    return descriptor


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file and syncs it.

    After a crash or with concurrent writers the file is whole or unchanged.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with open_directly(partial, "wb") as file:
            file.write(content)
            sync_file(file)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def require_writable(flag: str, path: Path | None) -> None:
    """Checks that a flag's file, if any, can be written, and creates its folder."""
    if path is None:
        return
    if str(path) == "-":
        raise ConfigError(f"{flag} -: standard output is used for text; name a file")
    with writing(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink(missing_ok=True)  # a command that ends early leaves no empty file


def lock(file: int | IO[str], in_use: str) -> None:
    """Locks an open file until it is closed; raises ConfigError `in_use` if another process has it.

    A file system without locks locks nothing.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(in_use) from None
    except OSError:
        pass


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Creates a command's folder, and locks it until the process ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder by --out DIR") from None
    try:
        lock(descriptor, f"{out} is being written by another command; wait until it ends")
        yield
    finally:
        os.close(descriptor)


def require_empty(out: Path, content: str) -> None:
    """Raises ConfigError if a folder, which has no `content` yet, has other files."""
    names = sorted(path.name for path in out.iterdir() if not path.name.endswith(PARTIAL))
    if names:
        raise ConfigError(
            f"{out} holds other files ({', '.join(names[:3])}{', ...' if names[3:] else ''}) and "
            f"no {content}; name a folder of its own by --out DIR"
        )


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Converts an `OSError` while writing a flag's file to an error that names the flag."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name another file") from None


def write_json(flag: str, path: Path | None, record: Mapping[str, object]) -> None:
    """Writes a record to a flag's file, if any; errors as in `writing`."""
    if path is not None:
        with writing(flag, path):
            path.write_text(json.dumps(record, indent=2) + "\n")
