"""Files: their checksums, writing them whole, waiting until they are on the disk, whether one can be written."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from jaxtp.config import ConfigError

PARTIAL = ".partial"
"""The end of a file's name while it is written."""


def sha256(path: Path) -> str:
    """Returns the sha256 of a file in hexadecimal, read in pieces.

    Raises:
      OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Returns the sha256 of what JSON can hold, in hexadecimal; the order of an object's keys makes no difference."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def sync_file(file: IO[Any]) -> None:
    """Waits until what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk: after a rename, the new one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file that is there whole or not at all, whatever happens or others write; on disk when this returns."""
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        with partial.open("wb") as file:
            file.write(content)
            sync_file(file)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    sync_folder(path.parent)


def require_writable(flag: str, path: Path | None) -> None:
    """Checks that a file that a flag asks for, if it asks for one, can be written, and makes its folder.

    Raises:
      ConfigError: it cannot; the message names the flag.
    """
    if path is None:
        return
    if str(path) == "-":
        raise ConfigError(f"{flag} -: standard output has the text; name a file")
    with writing(flag, path):
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a").close()
        if not was_there:
            path.unlink(missing_ok=True)  # what ends before it is written leaves no empty file


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Surrounds what writes a file that a flag asks for, at the end of the work that it tells of.

    Raises:
      ConfigError: it cannot be written, as where the disk is full; the message names the flag.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}; name another file") from None


def write_json(flag: str, path: Path | None, record: Mapping[str, Any]) -> None:
    """Writes a record, if a flag asks for a file of it.

    Raises:
      ConfigError: it cannot be written.
    """
    if path is not None:
        with writing(flag, path):
            path.write_text(json.dumps(record, indent=2) + "\n")


def require_picture(flag: str, path: Path | None) -> None:
    """Checks that a picture that a flag asks for, if it asks for one, can be drawn, and makes its folder.

    Raises:
      ConfigError: matplotlib is not installed, the name is not that of a kind of picture, or it cannot be written.
    """
    if path is None:
        return
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(f"{flag} needs matplotlib: pip install 'jaxtp[plot]'") from None
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ConfigError(f"{flag} {path}: pictures are {', '.join(f'.{name}' for name in sorted(known))}")
    require_writable(flag, path)


def write_picture(flag: str, path: Path | None, draw: Callable[[Any], None]) -> None:
    """Writes a picture, if a flag asks for one.

    Args:
      flag: what asks for it, for messages.
      path: checked by `require_picture`.
      draw: draws on a matplotlib `Figure`.

    Raises:
      ConfigError: it cannot be written.
    """
    if path is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    draw(figure)
    with writing(flag, path):
        figure.savefig(path, dpi=120)
