"""Reads files of every format: yields documents, and problems for what gives none."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxtp.data.template import ChatError
from jaxtp.prepare import errors
from jaxtp.prepare.compression import BROKEN, GZIP, ZSTD, WindowError, open_stream
from jaxtp.prepare.errors import END, Document, PrepareError, Problem, Turn

TEXT, JSONL, PARQUET, DATASETS = "text", "jsonl", "parquet", "datasets"
"""Formats; the last is that of the library datasets."""

_SUFFIXES = {".jsonl": JSONL, ".ndjson": JSONL, ".parquet": PARQUET}
_ROWS, _FEW_ROWS = 512, 16
"""Rows of a table in memory at a time, and the fewest."""
_TABLE_BYTES = 2**28
"""Bytes that rows of Parquet may take together; below `_FEW_ROWS` reading would be slow."""
_SKIPPED = 2**20
"""Bytes at a time of a line that is left out."""
_BINARY_PREFIX = 8192
"""Bytes in which a NUL makes a file found in a folder a binary, as in git."""
_BOM = b"\xef\xbb\xbf"

Event = Document | Problem


@dataclass(frozen=True)
class Fields:
    """The columns of a row that make a document."""

    text: str
    prompt: str | None = None
    turns: Callable[[Any], tuple[Turn, ...]] | None = None
    """Makes turns of the column `text`, if it is a conversation; raises `ChatError` where it is none, and
    `TooLargeError` where its documents would take too much memory."""

    @property
    def names(self) -> list[str]:
        """Names of the columns, in the order of reading."""
        return [self.text] if self.prompt is None else [self.prompt, self.text]


@dataclass(frozen=True)
class Source:
    """One file, or one table of the library datasets."""

    path: str
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds."""
    format: str
    max_document: int
    """Bytes of a document, or of a line of JSONL, at most: more count as unreadable."""
    max_window: int
    """Bytes that unpacking a zstd file may keep."""
    found: bool = False
    """Whether it was found in a folder, rather than named."""
    table: Any = None
    """The opened table, where the format is `datasets`."""

    def problem(self, kind: str, complaint: str, *, after: str = "", harmless: bool = False) -> Problem:
        """Returns a problem that leaves out the source, or the rest of it after a place."""
        return Problem(kind, f"{self.path}{after}: {complaint}", END, self.size, harmless)


class _Item(NamedTuple):
    """A line or a row of a source."""

    source: Source
    unit: str
    """The word `line` or `row`."""
    number: int
    """Its number, from 1."""
    done: int
    """Bytes of the source that have been read."""

    def problem(self, kind: str, complaint: str, *, harmless: bool = False) -> Problem:
        """Returns a problem that leaves out the item alone."""
        message = f"{self.source.path}, {self.unit} {self.number}: {complaint}"
        return Problem(kind, message, self.number, self.done, harmless)


def format_of(path: Path) -> str:
    """Returns the format that a file's suffix says; compression aside, whatever is not known is text."""
    suffixes = path.suffixes[:-1] if path.suffix in (GZIP, ZSTD) else path.suffixes
    return _SUFFIXES.get(suffixes[-1], TEXT) if suffixes else TEXT


def read(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields the documents and problems of a source, in order, after the first `start` items."""
    readers = {TEXT: _read_text, JSONL: _read_jsonl, PARQUET: _read_parquet, DATASETS: _read_table}
    return readers[source.format](source, start, fields)


def _read_text(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    if start:
        return
    if fields.prompt is not None or fields.turns is not None:
        what = "conversations" if fields.turns else "prompts and completions"
        yield source.problem(errors.NO_FIELD, f"text has no fields; {what} are read from JSONL and Parquet")
        return
    try:
        with open_stream(Path(source.path), source.max_window) as stream:
            content = stream.content.read(source.max_document + 1)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, "")
        return
    if len(content) > source.max_document:
        yield source.problem(errors.TOO_LARGE, _too_large(source))
    else:
        yield _text_document(source, content)


def _text_document(source: Source, content: bytes) -> Event:
    if not content:
        return source.problem(errors.EMPTY_FILE, "the file is empty", harmless=source.found)
    if source.found and b"\0" in content[:_BINARY_PREFIX]:
        return source.problem(errors.BINARY_FILE, "not text", harmless=True)
    try:
        return Document((Turn(None, content.decode()),), 1, source.size)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return source.problem(errors.NOT_UTF8, f"{_not_utf8(error)} (line {line})")


def _read_jsonl(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    number = 0
    try:
        with open_stream(Path(source.path), source.max_window) as stream:
            for number, line in enumerate(_lines(stream.content, source.max_document), 1):
                if number > start and not line.isspace():
                    yield _line(_Item(source, "line", number, stream.file.tell()), line, fields)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, f" after line {number}")
        return
    if number == 0:
        yield source.problem(errors.EMPTY_FILE, "the file is empty", harmless=source.found)


def _lines(content: BinaryIO, limit: int) -> Iterator[bytes]:
    """Yields each line, and of one that is longer than the limit its beginning, as `_is_cut` tells."""
    while line := content.readline(limit + 1):
        yield line
        if _is_cut(line, limit):
            while (rest := content.readline(_SKIPPED)) and not rest.endswith(b"\n"):
                pass


def _is_cut(line: bytes, limit: int) -> bool:
    return len(line) > limit and not line.endswith(b"\n")


def _line(item: _Item, line: bytes, fields: Fields) -> Event:
    if _is_cut(line, item.source.max_document):
        return item.problem(errors.TOO_LARGE, _too_large(item.source))
    try:
        record = json.loads(line.removeprefix(_BOM if item.number == 1 else b"").decode())
    except UnicodeDecodeError as error:
        return item.problem(errors.NOT_UTF8, _not_utf8(error))
    except (ValueError, RecursionError) as error:  # a ValueError also for integers of thousands of digits
        return item.problem(errors.NOT_JSON, f"not JSON: {error}")
    if not isinstance(record, dict):
        return item.problem(errors.NOT_JSON, f"not a JSON object: {line[:40].decode(errors='replace').strip()}")
    for name in fields.names:
        if name not in record:
            return item.problem(errors.NO_FIELD, _no_field(name, record))
    return _document(item, [record[name] for name in fields.names], fields)


def _document(item: _Item, values: list[Any], fields: Fields) -> Event:
    if fields.turns is not None:
        try:
            return Document(fields.turns(values[0]), item.number, item.done)
        except ChatError as error:
            return item.problem(errors.NO_CONVERSATION, f"{fields.text!r}: {error}")
        except errors.TooLargeError:
            return item.problem(errors.TOO_LARGE, f"its answers with all before each: {_too_large(item.source)}")
    for name, value in zip(fields.names, values, strict=True):
        if not isinstance(value, str):
            return item.problem(errors.NOT_A_STRING, f"{name!r} is not a string, but {errors.shown(value)}")
        if not value.isascii() and _has_surrogate(value):
            return item.problem(errors.NOT_UTF8, f"{name!r} holds half of a surrogate pair, which is no character")
    if not values[-1]:
        return item.problem(errors.EMPTY_DOCUMENT, f"{fields.text!r} is empty", harmless=True)
    return Document((Turn(values[0] if fields.prompt is not None else None, values[-1]),), item.number, item.done)


def _read_parquet(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    pyarrow, parquet = pyarrow_and_parquet()
    row = 0
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True, pre_buffer=False) as file:
            wrong = _wrong_columns(source, file.schema_arrow, fields)
            if wrong is not None:
                yield wrong
                return
            rows = file.metadata.num_rows
            for row, values in _parquet_rows(file, start, fields):
                yield _row(_Item(source, "row", row, source.size * row // max(rows, row)), values, fields)
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        yield _broken_table(source, row, error)
        return
    if rows == 0:
        yield _no_rows(source)


def _parquet_rows(file: Any, start: int, fields: Fields) -> Iterator[tuple[int, list[Any]]]:
    """Yields the rows after the first `start`, numbered from 1; row groups that end before are not read.

    Batches begin with their row group, so that before a damaged page it is the same rows wherever reading began.
    """
    first = 0
    for group in range(file.num_row_groups):
        described = file.metadata.row_group(group)
        rows, size = described.num_rows, _batch_rows(described, fields)
        batches = file.iter_batches(size, row_groups=[group], columns=fields.names) if first + rows > start else ()
        row = first
        for batch in batches:
            columns = [batch.column(batch.schema.get_field_index(name)) for name in fields.names]
            for values in zip(*columns, strict=True):  # each becomes Python's own when it is its turn
                row += 1
                if row > start:
                    yield row, [value.as_py() for value in values]
        first += rows


def _batch_rows(group: Any, fields: Fields) -> int:
    """Returns how many rows of a row group to read at a time.

    A value that is stored once, in a dictionary, may be that of every row.
    """
    columns = (group.column(index) for index in range(group.num_columns))
    sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in fields.names]
    return min(_ROWS, max(_FEW_ROWS, _TABLE_BYTES // max(1, *sizes, 0)))


def _wrong_columns(source: Source, schema: Any, fields: Fields) -> Problem | None:
    for name in fields.names:
        if schema.get_field_index(name) < 0:
            return source.problem(errors.NO_FIELD, _no_field(name, schema.names))
        kind = str(schema.field(name).type)
        nested = kind.startswith(("list", "large_list", "struct", "map"))
        if nested != (fields.turns is not None) or "string" not in kind:
            wanted = "lists of messages" if fields.turns else "strings"
            return source.problem(errors.NOT_A_STRING, f"the column {name!r} holds {kind}, not {wanted}")
    return None


def _read_table(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    table = source.table
    for name in fields.names:
        if name not in table.column_names:
            yield source.problem(errors.NO_FIELD, _no_field(name, table.column_names))
            return
    if not len(table):
        yield _no_rows(source)
        return
    table = table.select_columns(fields.names).with_format(None)
    for first in range(start, len(table), _ROWS):
        columns = table[first : first + _ROWS]
        for row, values in enumerate(zip(*(columns[name] for name in fields.names), strict=True), first + 1):
            yield _row(_Item(source, "row", row, source.size * row // len(table)), list(values), fields)


def _too_large(source: Source) -> str:
    return f"more than {source.max_document:,} bytes; a larger --max-document-bytes reads it"


def _no_rows(source: Source) -> Problem:
    return source.problem(errors.EMPTY_FILE, "a table without rows", harmless=source.found)


def _row(item: _Item, values: list[Any], fields: Fields) -> Event:
    if any(isinstance(value, str) and _is_longer(value, item.source.max_document) for value in values):
        return item.problem(errors.TOO_LARGE, _too_large(item.source))
    return _document(item, values, fields)


def pyarrow_and_parquet() -> tuple[Any, Any]:
    """Returns the library and its reader of Parquet.

    Raises:
      PrepareError: it is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise PrepareError("Parquet files need the library pyarrow: pip install 'jaxtp[data]'") from None
    return pyarrow, parquet


def _unreadable(source: Source, error: Exception, place: str) -> Problem:
    """Returns the problem of a file that cannot be read or decompressed, from some place on."""
    if isinstance(error, WindowError):
        window = f"unpacking takes more than {source.max_window:,} bytes of memory"
        return source.problem(errors.TOO_LARGE, f"{window}; a larger --max-window-bytes allows it, up to 2**31")
    if isinstance(error, BROKEN):
        kind = Path(source.path).suffix.removeprefix(".")
        return source.problem(errors.BROKEN_FILE, f"broken {kind} file{place}: {error}")
    return source.problem(errors.UNREADABLE, f"{getattr(error, 'strerror', None) or error}{place}")


def _broken_table(source: Source, row: int, error: Exception) -> Problem:
    reason = str(error).split("\n")[0][:200]
    if isinstance(error, UnicodeDecodeError):
        return source.problem(errors.NOT_UTF8, _not_utf8(error), after=f", after row {row}")
    if isinstance(error, OSError) and error.errno is not None:
        return source.problem(errors.UNREADABLE, error.strerror or reason)
    return source.problem(errors.BROKEN_FILE, f"broken Parquet file after row {row}: {reason}")


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}"


def _is_longer(text: str, limit: int) -> bool:
    """Returns whether a text has more bytes than the limit."""
    return len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="replace")) > limit)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_field(name: str, names: Iterable[str]) -> str:
    there = list(names)
    close = difflib.get_close_matches(name, there, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(map(repr, there)) or 'none'}"
    other = "; --field NAME takes another" if name == "text" else ""
    return f"no field {name!r}{hint}{other}"
