"""Reads documents from text, JSONL, JSON lists, Parquet and Hugging Face's `datasets`."""

import codecs
import difflib
import gzip
import itertools
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from jaxtp.config.entry import UserError
from jaxtp.data.chat_template import ChatError
from jaxtp.data.worker_process import limited_memory

if TYPE_CHECKING:
    import datasets
    import pyarrow

TEXT = "text"
JSONL = "jsonl"
PARQUET = "parquet"
DATASETS = "datasets"
"""Formats; `JSONL` is also a list of objects."""
GZIP = ".gz"
ZSTD = ".zst"

EMPTY_FILE = "empty file"
EMPTY_DOCUMENT = "empty document"
BINARY_FILE = "binary file"
DUPLICATE = "duplicate"
UNREADABLE = "unreadable file"
BROKEN_FILE = "broken file"
NOT_UTF8 = "not UTF-8"
NOT_JSON = "not JSON"
NO_FIELD = "no such field"
NOT_A_STRING = "not a string"
NO_CONVERSATION = "no conversation"
TOO_LARGE = "too large"
MEDIA = "image, audio or video"
"""Kinds of problems, as `dataset.json` counts them."""

END = -1  # The `item` of an event that ends its source

T = TypeVar("T")

SKIP_BYTES = 2**20
_MAX_SKIPS = 2**8  # Maximum number of times that `SKIP_BYTES` are read to find the end of a line
_PEEKED_ROWS = 100  # `first_row` returns an object among these rows
_BINARY_PREFIX = 8192  # A NUL byte in this prefix marks a binary file, as in git
_PDF = b"%PDF-"  # The start of the only common files that are no text and may have no such byte
# The start of a list of objects, in the first member of a packed file
_LIST = re.compile(rb"\s*\[\s*\{")
MAX_LIST = 2**30
"""Maximum bytes of a JSON list, which is parsed as a whole and takes several times its size in
memory. ShareGPT's list, of 0.7 GB, is read."""
MAX_VALUES = 2**22  # Maximum number of values of a row; each takes some 100 bytes of memory
_DECODING = 2**30
_EXPANSION = 64
"""Maximum memory for decoding a table or a list: bytes, and bytes for each byte of the file."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, which may be cut short. The quantifiers are possessive, because backtracking would
take gigabytes of memory."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
DECOMPRESSION_ERRORS = (gzip.BadGzipFile, EOFError, zlib.error)
"""Errors of truncated or damaged gzip streams; `_open_stream` converts zstd's to EOFError."""
_KNOWN_BY = {
    "--preference": {"chosen", "rejected"},
    "--messages instruction": {"instruction", "output"},
}
"""Fields of rows that these flags read."""
_LOG_OF_WINDOW = 31  # The largest window of zstd, with which `zstd --long=31` packs: 2 GiB
ZSTD_LIBRARY = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
_MAX_IGNORED = 100
_PARQUET_ROWS = 32  # Rows in memory at a time


class PrepareError(UserError):
    """An unusable input or folder."""


class BadInputError(Exception):
    """A row, or the remainder of a source, is unusable.

    If `is_harmless`, the problem is only counted, whatever `--on-error` is.
    """

    def __init__(self, kind: str, complaint: str, *, is_harmless: bool = False):
        super().__init__(complaint)
        self.kind = kind
        self.is_harmless = is_harmless

    def at(self, place: str) -> "BadInputError":
        """Returns the error with its place in the message."""
        return BadInputError(self.kind, f"{place}: {self}", is_harmless=self.is_harmless)


class Turn(NamedTuple):
    """A document of the dataset."""

    prompt: str | None
    text: str  # the document without its prompt
    is_rendered: bool = False
    """Whether a chat template wrote it, with marked special tokens (see `chat_template.py`)."""


class Documents(NamedTuple):
    """The documents of a row or of a text file."""

    turns: tuple[Turn, ...]  # One turn, or one for each answer of a conversation
    left_out: tuple[str, ...] = ()
    """Why other answers of the conversation are no documents, as `dataset.json` counts them."""


class Position(NamedTuple):
    """A position in the inputs, before which everything has been read."""

    source: int
    item: int  # number of items of that source that have been read


class Event(NamedTuple):
    """A row of a source, or a text file: its documents, or a problem."""

    documents: Documents
    item: int  # Number of lines or rows that have been read, including this one
    bytes_read: int  # approximate bytes of the source
    problem: BadInputError | None = None
    place: str = ""  # such as `a.jsonl, line 3`


Row = Mapping[str, object]
Item = tuple[int, int, object]
"""An item's number from 1, the bytes of the source that are read so far, and the item: a text, a
line of JSON (bytes), or a row."""


@dataclass(frozen=True)
class Fields:
    """The columns that make a document."""

    text: str
    prompt: str | None = None
    optional: tuple[str, ...] = ()
    turns: Callable[[Row], Documents] | None = None
    """Converts a row of a conversation or a pair; raises `ChatError` or `BadInputError`."""
    required: tuple[str, ...] = ()  # columns of pairs and of tools, after `text`
    only_texts: bool = False  # Whether the command reads no conversations and no pairs
    ignored: set[str] = field(default_factory=set, compare=False)
    """The other columns that rows had so far, up to `_MAX_IGNORED`."""

    @property
    def names(self) -> list[str]:
        """The required columns."""
        texts = [self.text] if self.prompt is None else [self.prompt, self.text]
        return [*texts, *self.required]

    @property
    def is_list(self) -> bool:
        """Whether the column holds lists of messages."""
        return self.turns is not None and self.prompt is None

    def names_in(self, columns: Container[str]) -> list[str]:
        """Returns the subset of columns to read."""
        return [*self.names, *(name for name in self.optional if name in columns)]

    def ignore(self, columns: Iterable[str]) -> None:
        """Notes that columns are not read."""
        for name in columns:
            if len(self.ignored) < _MAX_IGNORED:
                self.ignored.add(name)


class AnyFields(Fields):
    """Columns of any type, which may be absent."""

    @property
    def names(self) -> list[str]:
        """No column is required."""
        return []


@dataclass(frozen=True)
class Source:
    """A file, or a table of Hugging Face's `datasets`."""

    path: str
    size: int
    modified: int  # nanoseconds
    format: str
    max_document: int  # maximum bytes of a document or of a line of JSONL
    in_folder: bool = False  # whether a folder contains it, rather than the command line
    table: "datasets.Dataset | None" = None

    @property
    def max_memory(self) -> int:
        """Maximum memory for decoding the file."""
        return _DECODING + _EXPANSION * self.size


def read_source(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields an event for each item after the first `start`."""
    unit = "line" if source.format == JSONL else "row"
    number = start
    try:
        for number, bytes_read, item in _READERS[source.format](source, start, fields):
            if isinstance(item, bytes) and item.isspace():
                continue
            place = source.path
            if source.format != TEXT:
                # A row of a list has no line.
                place += f", {unit if isinstance(item, bytes) else 'row'} {number}"
            try:
                yield Event(_documents(source, item, fields), number, bytes_read, None, place)
            except BadInputError as error:
                yield Event(Documents(()), number, bytes_read, error.at(place))
        if not number:
            raise BadInputError(EMPTY_FILE, "the file is empty", is_harmless=source.in_folder)
    except (BadInputError, *DECOMPRESSION_ERRORS, OSError) as error:
        after = f", after {unit} {number}" if number else ""
        yield Event(
            Documents(()),
            END,
            source.size,
            _to_bad_input(source, error).at(f"{source.path}{after}"),
        )


def first_row(source: Source, fields: Fields) -> Row:
    """Returns the first JSON object, or the `fields` of a table's first row; empty if
    unreadable."""
    with suppress(*DECOMPRESSION_ERRORS, BadInputError, OSError):
        for _, _, item in itertools.islice(
            _READERS[source.format](source, 0, fields), _PEEKED_ROWS
        ):
            with suppress(BadInputError):
                return _row(source, item, fields)
    return {}


def _read_text(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    if start:
        return
    if fields.prompt is not None or fields.turns is not None:
        raise BadInputError(NO_FIELD, "text has no fields; rows are read from JSONL and Parquet")
    with _open_stream(Path(source.path)) as (stream, _):
        content = stream.read(_BINARY_PREFIX)
        if b"\0" in content or content.startswith(_PDF):
            raise BadInputError(
                BINARY_FILE,
                "not text: it has a NUL byte or is a PDF. Convert UTF-16 with iconv -f UTF-16 -t "
                "UTF-8 FILE > NEW, and other files to text or JSON Lines; names of gzip, zstd and "
                "Parquet files end with .gz, .zst and .parquet",
                is_harmless=source.in_folder,
            )
        content += stream.read(max(0, source.max_document + 1 - len(content)))
    if len(content) > source.max_document:
        raise too_large(source.max_document)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise BadInputError(NOT_UTF8, f"{_not_utf8(error)} (line {line})") from None
    if text:
        yield 1, source.size, text


def _read_json(source: Source, start: int, _: Fields) -> Iterator[Item]:
    """Reads lines, or the rows of a list of objects."""
    with _open_stream(Path(source.path)) as (content, file):
        if content.peek(3).startswith(codecs.BOM_UTF8):
            content.read(3)
        rows: Iterable[object] = _lines(content, source.max_document)
        list_length = 0
        if _LIST.match(content.peek(1)):
            text = content.read(MAX_LIST + 1)
            if len(text) > MAX_LIST:
                raise BadInputError(
                    TOO_LARGE, f"a list of more than {MAX_LIST:,} bytes; {_to_json_lines('.[]')}"
                )
            with _limited_memory(source.max_memory):
                decoded = cast(Sequence[object], _decode(text, None))
            list_length = len(decoded)
            rows = decoded
        for number, row in enumerate(rows, 1):
            if number > start:
                # A list is read before its first row.
                bytes_read = source.size * number // list_length if list_length else file.tell()
                yield number, bytes_read, row


def _read_parquet(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    """Reads rows from the row group of `start` on.

    This row group is read from its first row, so a resumed read meets a damaged page at the same
    row. A file of a few bytes can hold a list of billions of nulls, so types and counts are checked
    before values are decoded.
    """
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(
            source.path, page_checksum_verification=True, pre_buffer=False
        ) as file:
            names = _columns(file.schema_arrow, fields)
            for group in range(file.num_row_groups):
                group_metadata = file.metadata.row_group(group)
                if row + group_metadata.num_rows <= start:
                    row += group_metadata.num_rows
                    continue
                _require_few_values_in(group_metadata, names)
                # Without threads, because the stacks of threads would count as memory.
                decoded = file.iter_batches(
                    _PARQUET_ROWS, row_groups=[group], columns=names, use_threads=False
                )
                rows = (batch.to_pylist() for batch in decoded)
                for values_of_rows in _within_memory(source.max_memory, rows):
                    for values in values_of_rows:
                        row += 1
                        if row > start:
                            yield row, source.size * row // max(file.metadata.num_rows, row), values
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, _not_utf8(error)) from None
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadInputError(
            BROKEN_FILE, f"broken Parquet file: {str(error).splitlines()[0][:200]}"
        ) from None


def _require_few_values_in(group: "pyarrow.parquet.RowGroupMetaData", names: list[str]) -> None:
    for index in range(group.num_columns):
        column = group.column(index)
        name = column.path_in_schema.split(".")[0]
        if name in names and column.num_values > MAX_VALUES * max(group.num_rows, 1):
            rows = f"{column.num_values:,} values in {group.num_rows:,} rows"
            raise BadInputError(
                TOO_LARGE, f"the column {name!r} has {rows}; at most {MAX_VALUES:,} a row are read"
            )


def _within_memory(max_bytes: int, values: Iterator[T]) -> Iterator[T]:
    """Yields values; each of them is made within `_limited_memory`."""
    while True:
        with _limited_memory(max_bytes):
            value = next(values, None)
        if value is None:
            return
        yield value


@contextmanager
def _limited_memory(max_bytes: int) -> Iterator[None]:
    """Raises `BadInputError` where memory ends; on Linux, after `max_bytes` more of it."""
    try:
        with limited_memory(max_bytes):
            yield
    except MemoryError:
        raise BadInputError(
            TOO_LARGE, f"decoding it takes more than {max_bytes:,} bytes of memory"
        ) from None


def _read_table(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    table = source.table
    assert table is not None
    rows = table.select_columns(_columns(table.data.schema, fields)).with_format(None)
    for row, values in enumerate(rows.select(range(start, len(rows))), start + 1):
        yield row, source.size * row // len(rows), values


_READERS: dict[str, Callable[[Source, int, Fields], Iterator[Item]]] = {
    TEXT: _read_text,
    JSONL: _read_json,
    PARQUET: _read_parquet,
    DATASETS: _read_table,
}
"""A reader for each format; it takes a source, the number of items to skip, and a table's columns
to read."""


def _columns(schema: "pyarrow.Schema", fields: Fields) -> list[str]:
    """Returns the columns to read; refuses a column of texts that has another type."""
    from pyarrow import types

    _require_fields(dict.fromkeys(schema.names), fields)
    if fields.turns is None and not fields.required:
        texts = (types.is_string, types.is_large_string, types.is_string_view)
        for name in fields.names:
            kind = schema.field(name).type
            values = kind.value_type if types.is_dictionary(kind) else kind
            if not any(is_text(values) for is_text in texts):
                raise BadInputError(
                    NOT_A_STRING, f"the column {name!r} has no strings, but values of type {kind}"
                )
    names = fields.names_in(schema.names)
    fields.ignore(name for name in schema.names if name not in names)
    return names


def _lines(content: BufferedReader, limit: int) -> Iterator[bytes]:
    """Yields lines, which are cut after the limit; raises if the end of a cut line is far away."""
    while line := content.readline(limit + 1):
        yield line
        if len(line) > limit and not line.endswith(b"\n"):
            for _ in range(_MAX_SKIPS):
                remainder = content.readline(SKIP_BYTES)
                if not remainder or remainder.endswith(b"\n"):
                    break
            else:
                size = _MAX_SKIPS * SKIP_BYTES
                raise BadInputError(
                    TOO_LARGE,
                    f"the end of a line is more than {size:,} bytes behind --max-document-bytes; "
                    "the rest of the file is left out",
                )


@contextmanager
def _open_stream(path: Path) -> Iterator[tuple[BufferedReader, BufferedReader]]:
    """Yields the content of a file, unpacked if its suffix says so, and the file."""
    suffix = path.suffix.lower()
    with path.open("rb") as file:
        if suffix == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast(BufferedReader, unpacked), file
        elif suffix == ZSTD and os.fstat(file.fileno()).st_size > 0:
            zstd = import_module(ZSTD_LIBRARY)
            options = {zstd.DecompressionParameter.window_log_max: _LOG_OF_WINDOW}
            try:
                with zstd.ZstdFile(file, options=options) as unpacked:
                    yield unpacked, file
            except zstd.ZstdError as error:
                if "memory" in str(error):
                    message = f"unpacking takes too much memory: {error}"
                    raise BadInputError(TOO_LARGE, message) from None
                raise EOFError(str(error)) from None
        else:
            yield file, file


def _documents(source: Source, item: object, fields: Fields) -> Documents:
    if isinstance(item, str) and source.format == TEXT:
        return Documents((Turn(None, item),))
    record = _row(source, item, fields)
    _require_fields(record, fields)
    row = {name: record[name] for name in fields.names_in(record)}
    if len(row) < len(record):
        fields.ignore(record.keys() - row.keys())
    for value in row.values():
        if isinstance(value, str) and _is_longer(value, source.max_document):
            raise too_large(source.max_document)
    if row[fields.text] == "" and not fields.is_list:
        raise BadInputError(EMPTY_DOCUMENT, f"{fields.text!r} is empty", is_harmless=True)
    if fields.turns is not None:
        try:
            if source.format in (PARQUET, DATASETS):
                row = {name: _without_nulls(value) for name, value in row.items()}
            return fields.turns(row)
        except ChatError as error:
            where = f"{fields.text!r}: " if fields.is_list else ""
            raise BadInputError(NO_CONVERSATION, f"{where}{error}") from None
        except RecursionError as error:
            raise _not_json(error) from None
    prompt = None if fields.prompt is None else text_of(row, fields.prompt)
    return Documents((Turn(prompt, text_of(row, fields.text)),))


def _without_nulls(value: object, depth: int = 0) -> object:
    """Leaves out nulls below the keys of messages: tables have them for the keys of other rows."""
    if isinstance(value, list):
        return [_without_nulls(part, depth) for part in value]
    if isinstance(value, dict):
        return {
            key: _without_nulls(part, depth + 1)
            for key, part in value.items()
            if part is not None or not depth
        }
    return value


def _row(source: Source, item: object, fields: Fields) -> Row:
    if isinstance(item, bytes):
        if len(item) > source.max_document and not item.endswith(b"\n"):
            raise too_large(source.max_document)
        if _has_many_values(item):
            raise BadInputError(TOO_LARGE, f"a row of more than {MAX_VALUES:,} values")
        item = _decode(item, fields.names if fields.turns is None else None)
    if not isinstance(item, dict):
        raise BadInputError(NOT_JSON, f"not a JSON object: {shorten(item)}")
    return item


def _decode(content: bytes, names: Sequence[str] | None) -> object:
    """Decodes JSON without a key that occurs twice in an object; Python keeps the last value.

    Args:
      names: the keys that may not occur twice; None for all.
    """
    try:
        return json.loads(content.decode("utf-8-sig"), object_pairs_hook=partial(_unique, names))
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, _not_utf8(error)) from None
    except (RecursionError, ValueError) as error:
        raise _not_json(error) from None


def _unique(names: Sequence[str] | None, pairs: Sequence[tuple[str, object]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        ((name, _),) = counts.most_common(1)
        if names is None or name in names:
            raise BadInputError(
                NOT_JSON, f"the key {shorten(name)} occurs twice in an object; remove one of them"
            )
    return row


def _not_json(error: Exception) -> BadInputError:
    """Converts an error of a JSON decoder."""
    problem = "an integer of more digits than Python reads"
    if isinstance(error, RecursionError):
        problem = "nested too deeply"
    elif isinstance(error, json.JSONDecodeError):
        problem = f"{error.msg} at character {error.pos + 1:,}"
        if error.doc.strip() == "{":
            problem += f"; {_to_json_lines('.')}"
    return BadInputError(NOT_JSON, f"not JSON: {problem}")


def _has_many_values(content: bytes) -> bool:
    """Returns whether a row has too many values; one of 2 bytes takes 100 bytes in memory."""
    if len(content) <= MAX_VALUES or _num_marks(content) <= MAX_VALUES:
        return False
    return _num_marks(_STRING.sub(b"", content)) > MAX_VALUES


def _num_marks(content: bytes) -> int:
    return sum(map(content.count, (b",", b"[", b"{")))


def text_of(row: Row, name: str) -> str:
    """Returns a text; raises `BadInputError`."""
    value = row[name]
    if not isinstance(value, str):
        raise BadInputError(NOT_A_STRING, f"{name!r} is not a string, but {shorten(value)}")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        raise BadInputError(
            NOT_UTF8, f"{name!r} holds half of a surrogate pair, which is not a character"
        ) from None
    return value


def _is_longer(text: str, limit: int) -> bool:
    if len(text) > limit:
        return True
    # A character has at most four bytes.
    return 4 * len(text) > limit and len(text.encode(errors="replace")) > limit


def _to_bad_input(source: Source, error: Exception) -> BadInputError:
    if isinstance(error, BadInputError):
        return error
    if isinstance(error, DECOMPRESSION_ERRORS):
        return BadInputError(
            BROKEN_FILE, f"broken {Path(source.path).suffix.removeprefix('.')} file: {error}"
        )
    return BadInputError(UNREADABLE, str(getattr(error, "strerror", None) or error))


def too_large(limit: int, prefix: str = "") -> BadInputError:
    """Returns the error of an oversized document."""
    return BadInputError(
        TOO_LARGE, f"{prefix}more than {limit:,} bytes; a larger --max-document-bytes reads it"
    )


def _not_utf8(error: UnicodeDecodeError) -> str:
    if error.object.startswith(_UTF16):
        return "UTF-16, not UTF-8 text; convert it with iconv -f UTF-16 -t UTF-8 FILE > NEW"
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}"


def _require_fields(row: Row, fields: Fields) -> None:
    """Raises `BadInputError` if a row, or a table's columns without values, lack a field."""
    missing = next((name for name in fields.names if name not in row), None)
    if missing is None:
        return
    hint = f"fields: {', '.join(map(repr, row)) or 'none'}"
    for name in difflib.get_close_matches(missing, row, n=1):
        hint = f"did you mean {name!r}? {hint}"
    other = ""
    if fields.only_texts:
        conversation = "prepare it with jaxtp prepare --messages NAME, then --data"
        other = f". Name it with --field NAME; if it is a conversation, {conversation}"
    elif not fields.required and (fields.prompt is None or fields.turns):
        other = ". Name it with --field NAME, or a conversation with --messages NAME"
        for flags, names in _KNOWN_BY.items():
            if names <= row.keys():
                other += f"; {flags} reads such rows"
    raise BadInputError(NO_FIELD, f"no field {missing!r}; {hint}{other}{_nested_hint(row)}")


def _nested_hint(row: Row) -> str:
    for name, value in row.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if value[0].keys() & {"role", "from", "content", "value"}:
                return f"; {name!r} seems to be a conversation"
            selection = f".[{json.dumps(name)}][]"
            return f"; if {name!r} is the list of rows, {_to_json_lines(selection)}"
    return ""


def _to_json_lines(selection: str) -> str:
    """Returns advice on a JSON file whose rows jq selects."""
    return f"jq -c '{selection}' FILE.json > NEW.jsonl makes JSON Lines of it"


def shorten(value: object) -> str:
    """Returns the beginning of a value's JSON, for messages."""
    try:
        text = json.dumps(value, default=str)
    except RecursionError:
        return f"{type(value).__name__} that is nested too deeply"
    return f"{text[:40]}..." if len(text) > 40 else text
