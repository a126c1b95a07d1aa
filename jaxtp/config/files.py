"""Files: checksums, atomic and synced writes, and checks of output paths."""

import errno
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxtp.config.reading import open_regular, read_bytes
from jaxtp.config.schema import ConfigError

PARTIAL = ".partial"  # Suffix of a file that is being written
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_NOT_REGULAR = "not a regular file"
_MAX_MARK = 100  # Maximum bytes of a mark of `mark_as_own`
_KEY_BYTES = 32
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_NO_MARK = (OSError, RuntimeError)  # RuntimeError: no home folder


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


def mark_as_own(path: Path) -> None:
    """Records that this user wrote a file at this place, for `is_own`.

    Does nothing without a home folder, or if the disk refuses.
    """
    with suppress(*_NO_MARK):
        key = _new_key()
        mark = _mark_of(path)
        _keep_others_from_writing(path)
        write_atomically(mark, _signature(path, key))
        _keep_others_from_writing(mark)


def is_own(path: Path) -> bool:
    """Returns whether `mark_as_own` marked a file, and it was not changed, moved or copied
    since."""
    mark = _mark_of(path)
    try:
        if not (_only_user_writes(path) and _only_user_writes(mark)):
            return False
        signature = _signature(path, _read_key(_key_file()))
        return hmac.compare_digest(read_bytes(mark, _MAX_MARK), signature)
    except _NO_MARK:
        return False


def _key_file() -> Path:
    return Path.home() / ".local/state/jaxtp/key"


def _new_key() -> bytes:
    """Returns this user's secret key, and creates it if there is none."""
    path = _key_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        # Links to a complete file: of several processes that begin at once, one wins, and none
        # reads an incomplete key.
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # only its user can read it
            file.write(secrets.token_bytes(_KEY_BYTES))
            sync_file(file)
            with suppress(FileExistsError):
                path.hardlink_to(file.name)
    return _read_key(path)


def _read_key(path: Path) -> bytes:
    status = path.lstat()
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & _OPEN_TO_OTHERS:
        raise PermissionError(errno.EPERM, "others can read or write it", str(path))
    key = read_bytes(path, _KEY_BYTES)
    if len(key) != _KEY_BYTES:
        raise OSError(errno.EINVAL, "not a key", str(path))
    return key


def _mark_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.own")


def _signature(path: Path, key: bytes) -> bytes:
    # The owner of a file proves nothing, because a file from an archive belongs to the user who
    # unpacks it. But an unpacked file gets another inode, and the kernel sets the time of its last
    # change. The author of a file system image can choose both, but does not have the key.
    status = path.lstat()
    place = path.parent.resolve() / path.name
    identity = f"{status.st_ino} {status.st_ctime_ns} {sha256(path)} {place}"
    return hmac.digest(key, os.fsencode(identity), "sha256").hex().encode()


def _keep_others_from_writing(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.lstat().st_mode) & ~_WRITABLE_BY_OTHERS)


def _only_user_writes(path: Path) -> bool:
    status = path.lstat()
    is_of_user = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
    return is_of_user and not status.st_mode & _WRITABLE_BY_OTHERS


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


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Creates a command's folder, and locks it until the process ends."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}; name another folder by --out DIR") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"{out} is being written by another command; wait until it ends"
        ) from None
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
