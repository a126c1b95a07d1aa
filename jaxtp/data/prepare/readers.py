"""Reads documents from text files, JSONL and JSON arrays."""

import codecs
import difflib
import itertools
import json
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from jaxtp.config.entry import UserError
from jaxtp.data.chat_template import ChatError
from jaxtp.data.prepare.compression import BROKEN, GZIP, ZSTD, WindowError, open_stream

if TYPE_CHECKING:
    import datasets

TEXT, JSONL, ARRAY, PARQUET, DATASETS = "text", "jsonl", "array", "parquet", "datasets"
"""Formats; `ARRAY` is a JSON file with a list of objects."""

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
_BINARY_PREFIX = 8192
"""A NUL byte in this prefix marks a binary file, as in git."""
_BOM = b"\xef\xbb\xbf"
_ARRAY_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
_PEEKED_BYTES = 4096
"""The first object of an array must start in this prefix."""
_READ_BYTES = 2**16
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()
_LONGEST_TOKEN = 16
"""An error this close to the end of the text may come from a JSON token that is not read to its end yet."""


class PrepareError(UserError):
    """An unusable input or folder."""


class TooLargeError(ValueError):
    """A conversation's documents together exceed `max_document`."""


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
    is_harmless: bool = False
    """Whether it is only counted, regardless of `--on-error`."""


Event = Document | Problem


@dataclass(frozen=True)
class Fields:
    """The columns that make a document."""

    text: str
    prompt: str | None = None
    optional: tuple[str, ...] = ()
    turns: Callable[[Mapping[str, object]], tuple[Turn, ...]] | None = None
    """Converts a row of a conversation; raises `ChatError` or `TooLargeError`."""

    @property
    def names(self) -> list[str]:
        """The required columns."""
        return [self.text] if self.prompt is None else [self.prompt, self.text]

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

    def problem(self, kind: str, complaint: str, *, after: str = "", is_harmless: bool = False) -> Problem:
        """Returns a problem that ends the source."""
        return Problem(kind, f"{self.path}{after}: {complaint}", END, self.size, is_harmless)

    def empty(self, complaint: str) -> Problem:
        """Returns the problem of a source without rows."""
        return self.problem(EMPTY_FILE, complaint, is_harmless=self.in_folder)

    @property
    def too_large(self) -> str:
        """The complaint about an oversized document."""
        return f"more than {self.max_document:,} bytes; a larger --max-document-bytes reads it"


class _ArrayError(ValueError):
    """Kind and complaint; the rest of the array is unreadable."""


class Item(NamedTuple):
    """A line or row of a source."""

    source: Source
    unit: str
    """`line` or `row`."""
    number: int
    """From 1."""
    done: int

    def problem(self, kind: str, complaint: str, *, is_harmless: bool = False) -> Problem:
        """Returns a problem with this item only."""
        message = f"{self.source.path}, {self.unit} {self.number}: {complaint}"
        return Problem(kind, message, self.number, self.done, is_harmless)


def format_of(path: Path) -> str:
    """Returns the format by suffix; unknown suffixes are text."""
    return _SUFFIXES.get(_suffix(path), TEXT)


def is_array(path: Path, format: str, max_window: int) -> bool:
    """Returns whether a file starts as a list of objects."""
    if format != JSONL and _suffix(path) != ".json":
        return False
    with suppress(*BROKEN, WindowError, OSError), open_stream(path, max_window) as stream:
        return _ARRAY_START.match(stream.content.read(_PEEKED_BYTES)) is not None
    return False


def _suffix(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in (GZIP, ZSTD) else path.suffix


def json_keys(source: Source) -> list[str]:
    """Returns the first object's keys; empty without an object."""
    with (
        suppress(*BROKEN, WindowError, OSError, _ArrayError),
        open_stream(Path(source.path), source.max_window) as stream,
    ):
        for line in itertools.islice(_split(source, stream.content), _PEEKED_LINES):
            with suppress(ValueError, RecursionError):
                if isinstance(record := json.loads(line.removeprefix(_BOM).decode()), dict):
                    return list(record)
    return []


def read_text(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields the document, unless `start` is past it."""
    if start:
        return
    if fields.prompt is not None or fields.turns is not None:
        what = "conversations" if fields.turns else "prompts and completions"
        yield source.problem(NO_FIELD, f"text has no fields; {what} are read from JSONL and Parquet")
        return
    try:
        with open_stream(Path(source.path), source.max_window) as stream:
            content = stream.content.read(source.max_document + 1)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, "")
        return
    if len(content) > source.max_document:
        yield source.problem(TOO_LARGE, source.too_large)
    else:
        yield _text_document(source, content)


def _text_document(source: Source, content: bytes) -> Event:
    if not content:
        return source.empty("the file is empty")
    if source.in_folder and b"\0" in content[:_BINARY_PREFIX]:
        return source.problem(BINARY_FILE, "not text", is_harmless=True)
    try:
        return Document((Turn(None, content.decode()),), 1, source.size)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return source.problem(NOT_UTF8, f"{not_utf8(error)} (line {line})")


def read_json(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields the documents after the first `start` rows."""
    number, unit = 0, "line" if source.format == JSONL else "row"
    try:
        with open_stream(Path(source.path), source.max_window) as stream:
            for number, line in enumerate(_split(source, stream.content), 1):
                if number > start and not line.isspace():
                    yield _parse_line(Item(source, unit, number, stream.file.tell()), line, fields)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, f" after {unit} {number}")
        return
    except _ArrayError as error:
        kind, complaint = error.args
        yield source.problem(kind, complaint, after=f", after row {number}")
        return
    if number == 0:
        yield source.empty("the file is empty")


def _split(source: Source, content: BinaryIO) -> Iterator[bytes]:
    return _lines(content, source.max_document) if source.format == JSONL else _elements(source, content)


def _lines(content: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yields lines without their end, cut at the limit."""
    while line := content.readline(limit + 1):
        yield line
        if _is_cut(line, limit):
            while (rest := content.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass


def _is_cut(line: bytes, limit: int) -> bool:
    return len(line) > limit and not line.endswith(b"\n")


def _elements(source: Source, content: BinaryIO) -> Iterator[bytes]:
    """Yields the JSON of each array element, with little read-ahead.

    Neither `json` nor a library of the extras can stream an array.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    try:
        text, at, separator = decode(content.read(_PEEKED_BYTES)).partition("[")[2], 0, ","
        while separator != "]":
            end, following = _element(text, at)
            if following:
                yield text[at:end].encode()
                at, separator = following, text[following - 1]
                continue
            if len(text) - at > source.max_document:
                raise _ArrayError(TOO_LARGE, source.too_large)
            more = content.read(max(_READ_BYTES, len(text) - at))  # doubling: linear time for a long element
            text, at = text[at:] + decode(more, final=not more), 0
            if not more:
                raise _ArrayError(NOT_JSON, "not JSON: the array has no end")
        text = text[at:]
        while not text.strip():
            if not (more := content.read(_READ_BYTES)):
                return
            text = decode(more)
        raise _ArrayError(NOT_JSON, f"not JSON: more text after the array: {shorten(text.strip()[:50])}")
    except UnicodeDecodeError as error:
        raise _ArrayError(NOT_UTF8, f"not UTF-8 text: byte 0x{error.object[error.start]:02x}") from None


def _element(text: str, at: int) -> tuple[int, int]:
    """Returns an element's end and the index after the next `,` or `]`; zeros if cut."""
    unsure = len(text) - _LONGEST_TOKEN
    try:
        _, end = _DECODER.raw_decode(text, _after_space(text, at))
    except json.JSONDecodeError as error:
        if error.pos >= unsure or error.msg.startswith("Unterminated string"):
            return 0, 0
        raise _ArrayError(NOT_JSON, f"not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # ValueError: integers of thousands of digits
        raise _ArrayError(NOT_JSON, f"not JSON: {error}") from None
    following = _after_space(text, end)
    if text[following : following + 1] in (",", "]"):
        return end, following + 1
    if following < unsure:
        raise _ArrayError(NOT_JSON, f"not JSON: no ',' or ']' before {shorten(text[following : following + 50])}")
    return 0, 0


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _parse_line(item: Item, line: bytes, fields: Fields) -> Event:
    if _is_cut(line, item.source.max_document):
        return item.problem(TOO_LARGE, item.source.too_large)
    try:
        record = json.loads(line.removeprefix(_BOM if item.number == 1 else b"").decode())
    except UnicodeDecodeError as error:
        return item.problem(NOT_UTF8, not_utf8(error))
    except (ValueError, RecursionError) as error:  # ValueError: also integers of thousands of digits
        return item.problem(NOT_JSON, f"not JSON: {error}")
    if not isinstance(record, dict):
        return item.problem(NOT_JSON, f"not a JSON object: {line[:40].decode(errors='replace').strip()}")
    for name in fields.names:
        if name not in record:
            return item.problem(NO_FIELD, no_field(name, record))
    return make_document(item, {name: record[name] for name in fields.names_in(record)}, fields)


def make_document(item: Item, row: Mapping[str, object], fields: Fields) -> Event:
    """Returns the document of a complete row."""
    is_text = fields.turns is None or fields.prompt is not None
    if is_text and row[fields.text] == "":
        return item.problem(EMPTY_DOCUMENT, f"{fields.text!r} is empty", is_harmless=True)
    if fields.turns is not None:
        try:
            return Document(fields.turns(row), item.number, item.done)
        except ChatError as error:
            where = "" if fields.prompt is not None else f"{fields.text!r}: "
            return item.problem(NO_CONVERSATION, f"{where}{error}")
        except TooLargeError:
            return item.problem(TOO_LARGE, f"its answers with all before each: {item.source.too_large}")
    texts = {}
    for name, value in row.items():
        if not isinstance(value, str):
            return item.problem(NOT_A_STRING, f"{name!r} is not a string, but {shorten(value)}")
        if not value.isascii() and _has_surrogate(value):
            return item.problem(NOT_UTF8, f"{name!r} holds half of a surrogate pair, which is no character")
        texts[name] = value
    prompt = None if fields.prompt is None else texts[fields.prompt]
    return Document((Turn(prompt, texts[fields.text]),), item.number, item.done)


def _unreadable(source: Source, error: Exception, place: str) -> Problem:
    if isinstance(error, WindowError):
        window = f"unpacking takes more than {source.max_window:,} bytes of memory"
        return source.problem(TOO_LARGE, f"{window}; a larger --max-window-bytes allows it, up to 2**31")
    if isinstance(error, BROKEN):
        kind = Path(source.path).suffix.removeprefix(".")
        return source.problem(BROKEN_FILE, f"broken {kind} file{place}: {error}")
    return source.problem(UNREADABLE, f"{getattr(error, 'strerror', None) or error}{place}")


def not_utf8(error: UnicodeDecodeError) -> str:
    """Returns the complaint about an undecodable byte."""
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}"


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def no_field(name: str, names: Iterable[str]) -> str:
    """Returns the complaint about a missing column."""
    existing = list(names)
    close = difflib.get_close_matches(name, existing, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(map(repr, existing)) or 'none'}"
    other = "; --field NAME takes another" if name == "text" else ""
    return f"no field {name!r}{hint}{other}"


def shorten(value: object) -> str:
    """Returns the beginning of a value's JSON, for messages."""
    text = json.dumps(value, default=str)
    return f"{text[:40]}..." if len(text) > 40 else text
