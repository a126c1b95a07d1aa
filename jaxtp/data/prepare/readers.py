"""Reads documents from text, JSONL, lists of JSON objects, Parquet and Hugging Face's `datasets`."""

import difflib
import gzip
import io
import itertools
import json
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, cast

from jaxtp.config.entry import UserError
from jaxtp.data.chat_template import ChatError

if TYPE_CHECKING:
    import datasets
    from _typeshed import WriteableBuffer

TEXT, JSONL, ARRAY, PARQUET, DATASETS = "text", "jsonl", "array", "parquet", "datasets"
"""Formats; `ARRAY` is a JSON file with a list of objects."""
GZIP, ZSTD = ".gz", ".zst"

EMPTY_FILE, EMPTY_DOCUMENT, BINARY_FILE, DUPLICATE = "empty file", "empty document", "binary file", "duplicate"
UNREADABLE, BROKEN_FILE, NOT_UTF8 = "unreadable file", "broken file", "not UTF-8"
NOT_JSON, NO_FIELD, NOT_A_STRING = "not JSON", "no such field", "not a string"
NO_CONVERSATION, TOO_LARGE, MEDIA = "no conversation", "too large", "image, audio or video"
"""Kinds of problems, as `dataset.json` counts them."""

END = -1  # The `item` of an event that ends its source

_SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_SKIP_BYTES = 2**20
_PEEKED_LINES = 100  # The first object must be in these lines for its keys to be read
_MAX_ARRAY = 2**30  # Bytes of a JSON list, which is in memory as a whole
_BINARY_PREFIX = 8192  # A NUL byte in this prefix marks a binary file, as in git
_ARRAY_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_PEEKED_BYTES = 4096  # The first object of an array must start in this prefix
DECOMPRESSION_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of truncated or damaged gzip streams; `_unpack_zstd` converts zstd's to EOFError."""
_ZSTD_CHUNK = 2**11
"""Compressed bytes at a time; zstd may unpack them to 30,000 times as many, which are in memory together."""
_PARQUET_ROWS = 32  # Rows in memory at a time


class PrepareError(UserError):
    """An unusable input or folder."""


class BadInputError(Exception):
    """A row or the rest of a source is unusable; if `is_harmless`, it is only counted, whatever `--on-error` is."""

    def __init__(self, kind: str, complaint: str, *, is_harmless: bool = False):
        super().__init__(complaint)
        self.kind, self.is_harmless = kind, is_harmless

    def at(self, place: str) -> "BadInputError":
        """Returns the error with its place."""
        return BadInputError(self.kind, f"{place}: {self}", is_harmless=self.is_harmless)


class Turn(NamedTuple):
    """A document of the dataset."""

    prompt: str | None
    text: str  # the document without its prompt
    is_rendered: bool = False
    """Whether a chat template wrote it, with marked special tokens (see `chat_template.py`)."""


class Position(NamedTuple):
    """A position in the inputs; everything before has been read."""

    source: int
    item: int  # number of items of that source that have been read


class Event(NamedTuple):
    """A row of a source, or a text file: its documents, or a problem."""

    turns: tuple[Turn, ...]  # One turn; one for each answer of a conversation
    item: int  # Number of lines or rows that have been read, including this one
    done: int  # Approximate bytes of the source that have been read
    problem: BadInputError | None = None


Row = Mapping[str, object]
Item = tuple[int, int, object]
"""Number from 1, bytes of the source read so far, and a text, a line of JSON (bytes), or a row."""


@dataclass(frozen=True)
class Fields:
    """The columns that make a document."""

    text: str
    prompt: str | None = None
    optional: tuple[str, ...] = ()
    turns: Callable[[Row], tuple[Turn, ...]] | None = None
    """Converts a row of a conversation or a pair; raises `ChatError` or `BadInputError`."""
    required: tuple[str, ...] = ()  # columns that pairs have after `text`

    @property
    def names(self) -> list[str]:
        """The required columns."""
        return [self.text, *self.required] if self.prompt is None else [self.prompt, self.text]

    @property
    def is_list(self) -> bool:
        """Whether the column holds lists of messages."""
        return self.turns is not None and self.prompt is None

    def names_in(self, columns: Container[str]) -> list[str]:
        """Returns the subset of columns to read."""
        return [*self.names, *(name for name in self.optional if name in columns)]


@dataclass(frozen=True)
class Source:
    """A file, or a table of Hugging Face's `datasets`."""

    path: str
    size: int
    modified: int  # nanoseconds
    format: str
    max_document: int  # maximum bytes of a document or of a line of JSONL
    max_window: int  # maximum bytes of memory for unpacking a zstd file
    in_folder: bool = False  # whether a folder contains it, rather than the command line
    table: "datasets.Dataset | None" = None


def format_of(path: Path) -> str:
    """Returns the format by suffix; unknown suffixes are text."""
    return _SUFFIXES.get(_suffix(path), TEXT)


def is_array(path: Path, format: str, max_window: int) -> bool:
    """Returns whether a file starts as a list of objects."""
    if format != JSONL and _suffix(path) != ".json":
        return False
    with suppress(*DECOMPRESSION_ERRORS, BadInputError, OSError), open_stream(path, max_window) as (content, _):
        return _ARRAY_START.match(content.read(_PEEKED_BYTES)) is not None
    return False


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (GZIP, ZSTD) else path.suffix


def read_source(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields an event for each item after the first `start`."""
    unit, number = "line" if source.format == JSONL else "row", start
    try:
        for number, done, item in _READERS[source.format](source, start, fields):
            if isinstance(item, bytes) and item.isspace():
                continue
            try:
                yield Event(_turns(source, item, fields), number, done)
            except BadInputError as error:
                yield Event((), number, done, error.at(f"{source.path}, {unit} {number}"))
        if not number:
            raise BadInputError(EMPTY_FILE, "the file is empty", is_harmless=source.in_folder)
    except (BadInputError, *DECOMPRESSION_ERRORS, OSError) as error:
        after = f", after {unit} {number}" if number else ""
        yield Event((), END, source.size, _to_bad_input(source, error).at(f"{source.path}{after}"))


def first_keys(source: Source) -> list[str]:
    """Returns the columns, or the first JSON object's keys; empty if unreadable."""
    if source.table is not None:
        return list(source.table.column_names)
    if source.format == PARQUET:
        import pyarrow
        from pyarrow import parquet

        with suppress(pyarrow.lib.ArrowException, OSError, ValueError):
            return list(parquet.read_schema(source.path).names)
        return []
    return list(first_row(source, None))


def first_row(source: Source, fields: Fields | None) -> Row:
    """Returns the first JSON object, or a table's first row of `fields`; empty if unreadable."""
    with suppress(*DECOMPRESSION_ERRORS, BadInputError, OSError):
        for _, _, item in itertools.islice(_READERS[source.format](source, 0, fields), _PEEKED_LINES):
            with suppress(BadInputError):
                return _row(source, item)
    return {}


def _read_text(source: Source, start: int, fields: Fields | None) -> Iterator[Item]:
    if start:
        return
    if fields is not None and (fields.prompt is not None or fields.turns is not None):
        what = "pairs" if fields.required else "conversations" if fields.turns else "prompts and completions"
        raise BadInputError(NO_FIELD, f"text has no fields; {what} are read from JSONL and Parquet")
    with open_stream(Path(source.path), source.max_window) as (stream, _):
        content = stream.read(source.max_document + 1)
    if len(content) > source.max_document:
        raise too_large(source.max_document)
    if source.in_folder and b"\0" in content[:_BINARY_PREFIX]:
        raise BadInputError(BINARY_FILE, "not text", is_harmless=True)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(NOT_UTF8, f"{_not_utf8(error)} (line {line})") from None
    if text:
        yield 1, source.size, text


def _read_lines(source: Source, start: int, _: Fields | None) -> Iterator[Item]:
    with open_stream(Path(source.path), source.max_window) as (content, file):
        for number, line in enumerate(_lines(content, source.max_document), 1):
            if number > start:
                yield number, file.tell(), line


def _read_array(source: Source, start: int, _: Fields | None) -> Iterator[Item]:
    with open_stream(Path(source.path), source.max_window) as (stream, _file):
        content = stream.read(_MAX_ARRAY + 1)
    if len(content) > _MAX_ARRAY:
        raise BadInputError(TOO_LARGE, f"a JSON list of more than {_MAX_ARRAY:,} bytes; make JSONL of it")
    rows = _parse(content)
    assert isinstance(rows, list)
    for number, row in enumerate(rows[start:], start + 1):
        yield number, source.size * number // len(rows), row


def _read_parquet(source: Source, start: int, fields: Fields | None) -> Iterator[Item]:
    """Skips row groups before `start`.

    Others are read from their first row, so a resumed read meets a damaged page at the same row.
    """
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True, pre_buffer=False) as file:
            names = _columns(file.schema_arrow.names, fields)
            for group in range(file.num_row_groups):
                if row + (size := file.metadata.row_group(group).num_rows) <= start:
                    row += size
                    continue
                for batch in file.iter_batches(_PARQUET_ROWS, row_groups=[group], columns=names):
                    columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
                    for values in zip(*columns, strict=True):  # by row: a dictionary column may repeat long texts
                        row += 1
                        if row > start:
                            done = source.size * row // max(file.metadata.num_rows, row)
                            yield row, done, {n: value.as_py() for n, value in zip(names, values, strict=True)}
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, _not_utf8(error)) from None
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise _to_bad_input(source, error) from None
        raise BadInputError(BROKEN_FILE, f"broken Parquet file: {str(error).splitlines()[0][:200]}") from None


def _read_table(source: Source, start: int, fields: Fields | None) -> Iterator[Item]:
    table = source.table
    assert table is not None
    rows = table.select_columns(_columns(table.column_names, fields)).with_format(None)
    for row, values in enumerate(rows.select(range(start, len(rows))), start + 1):
        yield row, source.size * row // len(rows), values


_READERS: dict[str, Callable[[Source, int, Fields | None], Iterator[Item]]] = {
    TEXT: _read_text,
    JSONL: _read_lines,
    ARRAY: _read_array,
    PARQUET: _read_parquet,
    DATASETS: _read_table,
}
"""By format: takes a source, the number of items to skip, and the columns to read of a table."""


def _columns(existing: list[str], fields: Fields | None) -> list[str]:
    assert fields is not None
    _require_fields(existing, fields)
    return fields.names_in(existing)


def _lines(content: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yields lines, cut after the limit."""
    while line := content.readline(limit + 1):
        yield line
        if len(line) > limit and not line.endswith(b"\n"):
            while (rest := content.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass


@contextmanager
def open_stream(path: Path, max_window: int) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yields a file's unpacked content by its suffix, and the file; zstd may use `max_window` bytes of memory."""
    with path.open("rb") as file:
        if path.suffix == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BinaryIO, unpacked), file
        elif path.suffix == ZSTD:
            yield cast(BinaryIO, io.BufferedReader(_Unpacked(_unpack_zstd(file, max_window)), 2**18)), file
        else:
            yield file, file


class _Unpacked(io.RawIOBase):
    """A stream of nonempty parts."""

    def __init__(self, parts: Iterator[memoryview]):
        self._parts, self._left = parts, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        self._left = self._left or next(self._parts, self._left)
        target = memoryview(buffer)
        size = min(len(target), len(self._left))
        target[:size], self._left = self._left[:size], self._left[size:]
        return size


def _unpack_zstd(file: BinaryIO, max_window: int) -> Iterator[memoryview]:
    """Yields the content of all frames; the library's own reader does not notice a truncated frame."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=max_window)
    frame, is_open = decompressor.decompressobj(), False
    while data := frame.unused_data or file.read(_ZSTD_CHUNK):
        if frame.eof:
            frame = decompressor.decompressobj()
        try:
            part = frame.decompress(data)
        except zstandard.ZstdError as error:
            if "requires too much memory" not in str(error):
                raise EOFError(str(error)) from None
            window = f"unpacking takes more than {max_window:,} bytes of memory"
            raise BadInputError(TOO_LARGE, f"{window}; a larger --max-window-bytes allows it, up to 2**31") from None
        is_open = not frame.eof
        if part:
            yield memoryview(part)
    if is_open:
        raise EOFError("the zstd stream is cut short")


def _turns(source: Source, item: object, fields: Fields) -> tuple[Turn, ...]:
    if isinstance(item, str) and source.format == TEXT:
        return (Turn(None, item),)
    record = _row(source, item)
    _require_fields(record, fields)
    row = {name: record[name] for name in fields.names_in(record)}
    if any(isinstance(value, str) and _is_longer(value, source.max_document) for value in row.values()):
        raise too_large(source.max_document)
    if row[fields.text] == "" and not fields.is_list:
        raise BadInputError(EMPTY_DOCUMENT, f"{fields.text!r} is empty", is_harmless=True)
    if fields.turns is not None:
        try:
            return fields.turns(row)
        except ChatError as error:
            where = f"{fields.text!r}: " if fields.is_list else ""
            raise BadInputError(NO_CONVERSATION, f"{where}{error}") from None
    prompt = None if fields.prompt is None else text_of(row, fields.prompt)
    return (Turn(prompt, text_of(row, fields.text)),)


def _row(source: Source, item: object) -> Row:
    if isinstance(item, bytes):
        if len(item) > source.max_document and not item.endswith(b"\n"):
            raise too_large(source.max_document)
        item = _parse(item)
    if not isinstance(item, dict):
        raise BadInputError(NOT_JSON, f"not a JSON object: {shorten(item)}")
    return item


def _parse(content: bytes) -> object:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, _not_utf8(error)) from None
    except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        raise BadInputError(NOT_JSON, f"not JSON: {error}") from None


def text_of(row: Row, name: str) -> str:
    """Returns a text; raises `BadInputError`."""
    value = row[name]
    if not isinstance(value, str):
        raise BadInputError(NOT_A_STRING, f"{name!r} is not a string, but {shorten(value)}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise BadInputError(NOT_UTF8, f"{name!r} holds half of a surrogate pair, which is no character") from None
    return value


def _is_longer(text: str, limit: int) -> bool:
    return len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="replace")) > limit)


def _to_bad_input(source: Source, error: Exception) -> BadInputError:
    if isinstance(error, BadInputError):
        return error
    if isinstance(error, DECOMPRESSION_ERRORS):
        return BadInputError(BROKEN_FILE, f"broken {Path(source.path).suffix.removeprefix('.')} file: {error}")
    return BadInputError(UNREADABLE, str(getattr(error, "strerror", None) or error))


def too_large(limit: int, what: str = "") -> BadInputError:
    """Returns the error of an oversized document."""
    return BadInputError(TOO_LARGE, f"{what}more than {limit:,} bytes; a larger --max-document-bytes reads it")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}"


def _require_fields(names: Iterable[str], fields: Fields) -> None:
    existing = list(names)
    for name in fields.names:
        if name not in existing:
            close = difflib.get_close_matches(name, existing, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"fields: {', '.join(map(repr, existing)) or 'none'}"
            other = ". Name it with --field NAME, or a conversation with --messages NAME" if name == "text" else ""
            if other and {"chosen", "rejected"} <= {*existing}:
                other += "; --preference reads pairs of answers"
            raise BadInputError(NO_FIELD, f"no field {name!r}; {hint}{other}")


def shorten(value: object) -> str:
    """Returns the beginning of a value's JSON, for messages."""
    text = json.dumps(value, default=str)
    return f"{text[:40]}..." if len(text) > 40 else text
