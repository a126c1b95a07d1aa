"""Reads documents from text files, JSONL and JSON lists of objects."""

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
NO_CONVERSATION, TOO_LARGE = "no conversation", "too large"
"""Kinds of problems, as `dataset.json` counts them."""

END = -1
"""The `item` of an event that ends its source."""

_SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_SKIP_BYTES = 2**20
_PEEKED_LINES = 100
"""The first object must be in these lines, if its keys are to decide."""
_MAX_ARRAY = 2**30
"""Bytes of a JSON list, which is in memory as a whole."""
_BINARY_PREFIX = 8192
"""A NUL byte in this prefix marks a binary file, as in git."""
_BOM = b"\xef\xbb\xbf"
_ARRAY_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_PEEKED_BYTES = 4096
"""The first object of an array must start in this prefix."""
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
BROKEN = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of truncated or damaged streams, including zstd's."""
_ZSTD_CHUNK = 2**11
"""Compressed bytes at a time; zstd may unpack them to 30,000 times as many, which are in memory together."""


class PrepareError(UserError):
    """An unusable input or folder."""


class BadInputError(Exception):
    """A row or the rest of a source is unusable; `is_harmless` ones are only counted, regardless of `--on-error`."""

    def __init__(self, kind: str, complaint: str, *, is_harmless: bool = False):
        super().__init__(complaint)
        self.kind, self.is_harmless = kind, is_harmless


class Turn(NamedTuple):
    """A document of the dataset."""

    prompt: str | None
    text: str
    """The document without its prompt."""
    is_rendered: bool = False
    """Whether a chat template wrote it, with marked special tokens (see `chat_template.py`)."""


class Document(NamedTuple):
    """A row of a source, or a text file."""

    turns: tuple[Turn, ...]
    """One turn; one for each answer of a conversation."""
    item: int
    """Number of lines or rows that have been read, including this one."""
    done: int
    """Approximate bytes of the source that have been read."""


class Problem(NamedTuple):
    """A source or row without a document."""

    kind: str
    message: str
    item: int
    done: int
    is_harmless: bool


Event = Document | Problem
Row = Mapping[str, object]
Item = tuple[int, int, str | bytes | Row]
"""Number from 1, bytes of the source read so far, and a text, a line of JSON or a table's row."""


@dataclass(frozen=True)
class Fields:
    """The columns that make a document."""

    text: str
    prompt: str | None = None
    optional: tuple[str, ...] = ()
    turns: Callable[[Row], tuple[Turn, ...]] | None = None
    """Converts a row of a conversation; raises `ChatError` or `BadInputError`."""

    @property
    def names(self) -> list[str]:
        """The required columns."""
        return [self.text] if self.prompt is None else [self.prompt, self.text]

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
    modified: int
    """Nanoseconds."""
    format: str
    max_document: int
    """Maximum bytes of a document or of a line of JSONL."""
    max_window: int
    """Maximum bytes of memory for unpacking a zstd file."""
    in_folder: bool = False
    """Whether it was found in a folder rather than named."""
    table: "datasets.Dataset | None" = None


def format_of(path: Path) -> str:
    """Returns the format by suffix; unknown suffixes are text."""
    return _SUFFIXES.get(_suffix(path), TEXT)


def is_array(path: Path, format: str, max_window: int) -> bool:
    """Returns whether a file starts as a list of objects."""
    if format != JSONL and _suffix(path) != ".json":
        return False
    with suppress(*BROKEN, BadInputError, OSError), open_stream(path, max_window) as (content, _):
        return _ARRAY_START.match(content.read(_PEEKED_BYTES)) is not None
    return False


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (GZIP, ZSTD) else path.suffix


def read_text(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    """Yields the file's text, unless `start` is past it."""
    if start:
        return
    if fields.prompt is not None or fields.turns is not None:
        what = "conversations" if fields.turns else "prompts and completions"
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
        raise BadInputError(NOT_UTF8, f"{not_utf8(error)} (line {line})") from None
    if text:
        yield 1, source.size, text


def read_json(source: Source, start: int, fields: Fields | None) -> Iterator[tuple[int, int, bytes]]:
    """Yields the lines or elements after the first `start`."""
    with open_stream(Path(source.path), source.max_window) as (content, file):
        rows = _lines(content, source.max_document) if source.format == JSONL else _elements(content)
        for number, row in enumerate(rows, 1):
            if number > start:
                yield number, file.tell(), row.removeprefix(_BOM if number == 1 else b"")


def first_keys(source: Source) -> list[str]:
    """Returns the first JSON object's keys; empty if there is none."""
    with suppress(*BROKEN, BadInputError, OSError):
        for _, _, line in itertools.islice(read_json(source, 0, None), _PEEKED_LINES):
            with suppress(BadInputError):
                return list(_parse_line(source, line))
    return []


def _lines(content: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yields lines, cut after the limit."""
    while line := content.readline(limit + 1):
        yield line
        if len(line) > limit and not line.endswith(b"\n"):
            while (rest := content.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass


def _elements(content: BinaryIO) -> Iterator[bytes]:
    """Yields the JSON of each array element."""
    data = content.read(_MAX_ARRAY + 1)
    if len(data) > _MAX_ARRAY:
        raise BadInputError(TOO_LARGE, f"a JSON list of more than {_MAX_ARRAY:,} bytes; make JSONL of it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, not_utf8(error)) from None
    at, separator = text.find("[") + 1, ","
    while separator != "]":
        start = _after_space(text, at)
        try:
            _, end = _DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
            raise BadInputError(NOT_JSON, f"not JSON: {getattr(error, 'msg', error)}") from None
        at = _after_space(text, end) + 1
        separator = text[at - 1 : at]
        if separator not in (",", "]"):
            before = f"no ',' or ']' before {shorten(text[at - 1 : at + 49])}" if separator else "the array has no end"
            raise BadInputError(NOT_JSON, f"not JSON: {before}")
        yield text[start:end].encode()
    if rest := text[at:].strip():
        raise BadInputError(NOT_JSON, f"not JSON: more text after the array: {shorten(rest[:50])}")


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


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
    """Nonempty parts as a stream."""

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
    """Yields the content of all frames. The library's reader takes a truncated frame for a whole one."""
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


def turns_of(source: Source, item: str | bytes | Row, fields: Fields) -> tuple[Turn, ...]:
    """Returns the documents of a text, a line of JSON or a row; raises `BadInputError`."""
    if isinstance(item, str):
        return (Turn(None, item),)
    record = _parse_line(source, item) if isinstance(item, bytes) else item
    require_fields(record, fields)
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
    prompt = None if fields.prompt is None else _text(row, fields.prompt)
    return (Turn(prompt, _text(row, fields.text)),)


def _parse_line(source: Source, line: bytes) -> Row:
    if len(line) > source.max_document and not line.endswith(b"\n"):
        raise too_large(source.max_document)
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, not_utf8(error)) from None
    except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        raise BadInputError(NOT_JSON, f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise BadInputError(NOT_JSON, f"not a JSON object: {line[:40].decode(errors='replace').strip()}")
    return record


def _text(row: Row, name: str) -> str:
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


def unreadable(source: Source, error: Exception) -> BadInputError:
    """Converts an error of reading a file."""
    if isinstance(error, BadInputError):
        return error
    if isinstance(error, BROKEN):
        return BadInputError(BROKEN_FILE, f"broken {Path(source.path).suffix.removeprefix('.')} file: {error}")
    return BadInputError(UNREADABLE, str(getattr(error, "strerror", None) or error))


def too_large(limit: int, what: str = "") -> BadInputError:
    """Returns the error of an oversized document."""
    return BadInputError(TOO_LARGE, f"{what}more than {limit:,} bytes; a larger --max-document-bytes reads it")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Returns the complaint about an undecodable byte."""
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}"


def require_fields(names: Iterable[str], fields: Fields) -> None:
    """Raises `BadInputError` for a missing column, with the nearest name."""
    existing = list(names)
    for name in fields.names:
        if name not in existing:
            close = difflib.get_close_matches(name, existing, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(map(repr, existing)) or 'none'}"
            other = "; --field NAME takes another, --messages NAME a conversation" if name == "text" else ""
            raise BadInputError(NO_FIELD, f"no field {name!r}; {hint}{other}")


def shorten(value: object) -> str:
    """Returns the beginning of a value's JSON, for messages."""
    text = json.dumps(value, default=str)
    return f"{text[:40]}..." if len(text) > 40 else text
