"""Opens plain, gzip and zstd files as byte streams; truncation is an error."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

GZIP, ZSTD = ".gz", ".zst"

BROKEN = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of truncated or damaged streams, including zstd's."""

_CHUNK = 2**11
"""Compressed bytes at a time; zstd may unpack them to 30,000 times as many, which are in memory together."""


class WindowError(ValueError):
    """A zstd stream needs too much memory to unpack."""


@dataclass(frozen=True)
class Stream:
    """An opened file."""

    content: BinaryIO
    """The decompressed bytes."""
    file: BinaryIO
    """The file; its position is the number of bytes that have been read."""


@contextmanager
def open_stream(path: Path, max_window: int) -> Iterator[Stream]:
    """Decompresses a file by its suffix; zstd may use `max_window` bytes of memory."""
    with path.open("rb") as file:
        if path.suffix == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield Stream(cast(BinaryIO, unpacked), file)
        elif path.suffix == ZSTD:
            yield Stream(cast(BinaryIO, io.BufferedReader(_Zstd(file, max_window), 2**18)), file)
        else:
            yield Stream(file, file)


class _Zstd(io.RawIOBase):
    """Reads zstd frames. The library's reader treats a truncated frame as complete."""

    def __init__(self, file: BinaryIO, max_window: int):
        import zstandard

        self._file, self._error = file, zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=max_window)
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._rest, self._output = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        while not self._output:
            if not self._decompress_more():
                return 0
        target = memoryview(buffer)
        size = min(len(target), len(self._output))
        target[:size] = self._output[:size]
        self._output = self._output[size:]
        return size

    def _decompress_more(self) -> bool:
        data = self._rest or self._file.read(_CHUNK)
        if not data:
            if self._frame is not None:
                raise EOFError("the zstd stream is cut short")
            return False
        frame = self._frame = self._frame or self._decompressor.decompressobj()
        try:
            self._output = memoryview(frame.decompress(data))
        except self._error as error:
            kind = WindowError if "requires too much memory" in str(error) else EOFError
            raise kind(str(error)) from None
        self._rest = frame.unused_data if frame.eof else b""
        if frame.eof:
            self._frame = None
        return True
