"""Plain, gzip and zstd files as streams of bytes; one that is cut short is an error, never a short file."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtp.prepare.errors import PrepareError

GZIP, ZSTD = ".gz", ".zst"

BROKEN = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of reading a stream that is cut short or damaged, zstd's included."""

_CHUNK = 2**11
"""Compressed bytes at a time; zstd makes up to 30,000 times as many of them, which are in memory together."""


class WindowError(ValueError):
    """A zstd stream that takes more memory to unpack than it may."""


@dataclass(frozen=True)
class Stream:
    """An opened file."""

    content: BinaryIO
    """The decompressed bytes."""

    file: BinaryIO
    """The file itself, whose position is how much of it has been read."""


@contextmanager
def open_stream(path: Path, max_window: int) -> Iterator[Stream]:
    """Opens a file and decompresses it as its suffix says.

    Args:
      path: the file.
      max_window: bytes of what was unpacked that a zstd stream may refer back to, and so keep in memory.

    Raises:
      OSError: it cannot be opened.
      PrepareError: the library for it is not installed.
    """
    with path.open("rb") as file:
        if path.suffix == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield Stream(cast(BinaryIO, unpacked), file)
        elif path.suffix == ZSTD:
            yield Stream(cast(BinaryIO, io.BufferedReader(_Zstd(file, max_window), 2**18)), file)
        else:
            yield Stream(file, file)


def zstandard() -> Any:
    """Returns the library.

    Raises:
      PrepareError: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise PrepareError(f"{ZSTD} files need the library zstandard: pip install 'jaxtp[data]'") from None
    return zstandard


class _Zstd(io.RawIOBase):
    """Reads frames one after the other. The library's own reader takes a frame that is cut short for a whole one."""

    def __init__(self, file: BinaryIO, max_window: int):
        library = zstandard()
        self._file, self._error = file, library.ZstdError
        self._decompressor = library.ZstdDecompressor(max_window_size=max_window)
        self._frame: Any = None
        self._rest, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._decompress_more():
                return 0
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress_more(self) -> bool:
        data = self._rest or self._file.read(_CHUNK)
        if not data:
            if self._frame is not None:
                raise EOFError("the zstd stream is cut short")
            return False
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._output = memoryview(self._frame.decompress(data))
        except self._error as error:
            kind = WindowError if "requires too much memory" in str(error) else EOFError
            raise kind(str(error)) from None
        self._rest = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True
