"""Files into documents, or into what is wrong with them, by format."""

import difflib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from jaxtp.data.template import ChatError
from jaxtp.prepare import errors
from jaxtp.prepare.compression import BROKEN, GZIP, ZSTD, Stream, WindowError, open_stream
from jaxtp.prepare.errors import END, Document, PrepareError, Problem, Turn

TEXT, JSONL, PARQUET, DATASETS = "text", "jsonl", "parquet", "datasets"
"""Formats; the last is of the library datasets."""

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
Place = Callable[[int], str]


@dataclass(frozen=True)
class Fields:
    """Which columns of a row make a document."""

    text: str
    prompt: str | None = None
    turns: Callable[[Any], tuple[Turn, ...]] | None = None
    """Makes them of the column, where that is a conversation; raises `ChatError` where it is none, and `TooLargeError`
    where its documents would take too much memory."""

    @property
    def names(self) -> list[str]:
        """The columns, in the order of reading."""
        return [self.text] if self.prompt is None else [self.prompt, self.text]


@dataclass(frozen=True)
class Limits:
    """The most that may be in memory at a time; what needs more counts as unreadable."""

    document: int
    """Bytes of a document, or of a line of JSONL."""
    window: int
    """Bytes that are kept to unpack a zstd file."""


@dataclass(frozen=True)
class Source:
    """One file, or one table of the library datasets."""

    path: str
    size: int
    """Bytes."""
    modified: int
    """Nanoseconds."""
    format: str
    limits: Limits
    found: bool = False
    """In a folder, rather than named."""
    table: Any = None
    """An opened table, of the format `datasets`."""


def format_of(path: Path) -> str:
    """The format that a file's suffix says; compression aside, whatever is not known is text."""
    suffixes = path.suffixes[:-1] if path.suffix in (GZIP, ZSTD) else path.suffixes
    return _SUFFIXES.get(suffixes[-1], TEXT) if suffixes else TEXT


def read(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """The documents of a source and what is wrong with it, in order, after the first `start` items."""
    if source.format == TEXT:
        return _read_text(source, start, fields)
    if source.format == JSONL:
        return _read_jsonl(source, start, fields)
    if source.format == PARQUET:
        return _read_parquet(source, start, fields)
    return _read_table(source, start, fields)


def _read_text(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    if start:
        return
    if fields.prompt is not None or fields.turns is not None:
        what = "conversations" if fields.turns else "prompts and completions"
        message = f"{source.path}: text has no fields; {what} are read from JSONL and Parquet"
        yield Problem(errors.NO_FIELD, message, END, source.size)
        return
    try:
        with open_stream(Path(source.path), source.limits.window) as stream:
            content = stream.content.read(source.limits.document + 1)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, "")
        return
    if len(content) > source.limits.document:
        yield Problem(errors.TOO_LARGE, f"{source.path}: {_too_large(source)}", END, source.size)
    else:
        yield _text_document(source, content)


def _text_document(source: Source, content: bytes) -> Event:
    if not content:
        return Problem(errors.EMPTY_FILE, f"{source.path}: the file is empty", END, source.size, source.found)
    if source.found and b"\0" in content[:_BINARY_PREFIX]:
        return Problem(errors.BINARY_FILE, f"{source.path}: not text", END, source.size, True)
    try:
        return Document((Turn(None, content.decode()),), 1, source.size)
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        return Problem(errors.NOT_UTF8, f"{source.path}: {_not_utf8(error, line)}", END, source.size)


def _read_jsonl(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    number = 0
    try:
        with open_stream(Path(source.path), source.limits.window) as stream:
            for number, line in enumerate(_lines(stream.content, source.limits.document), 1):
                if number > start and not line.isspace():
                    yield _line(source, number, line, fields, stream)
    except (*BROKEN, WindowError, OSError) as error:
        yield _unreadable(source, error, f" after line {number}")
        return
    if number == 0:
        yield Problem(errors.EMPTY_FILE, f"{source.path}: the file is empty", END, source.size, source.found)


def _lines(content: BinaryIO, limit: int) -> Iterator[bytes]:
    """The lines; of one that is longer than the limit the beginning, as `_is_cut` tells."""
    while line := content.readline(limit + 1):
        yield line
        if _is_cut(line, limit):
            while (rest := content.readline(_SKIPPED)) and not rest.endswith(b"\n"):
                pass


def _is_cut(line: bytes, limit: int) -> bool:
    return len(line) > limit and not line.endswith(b"\n")


def _line(source: Source, number: int, line: bytes, fields: Fields, stream: Stream) -> Event:
    done = stream.file.tell()

    def problem(kind: str, complaint: str) -> Problem:
        return Problem(kind, f"{source.path}, line {number}: {complaint}", number, done)

    if _is_cut(line, source.limits.document):
        return problem(errors.TOO_LARGE, _too_large(source))
    try:
        record = json.loads(line.removeprefix(_BOM if number == 1 else b"").decode())
    except UnicodeDecodeError as error:
        return problem(errors.NOT_UTF8, _not_utf8(error, None))
    except (ValueError, RecursionError) as error:  # also of integers of thousands of digits
        return problem(errors.NOT_JSON, f"not JSON: {error}")
    if not isinstance(record, dict):
        return problem(errors.NOT_JSON, f"not a JSON object: {line[:40].decode(errors='replace').strip()}")
    missing = [name for name in fields.names if name not in record]
    if missing:
        return problem(errors.NO_FIELD, _no_field(missing[0], record))
    values = [record[name] for name in fields.names]
    return _document(source, values, fields, number, done, problem)


def _document(
    source: Source, values: list[Any], fields: Fields, item: int, done: int, problem: Callable[[str, str], Problem]
) -> Event:
    if fields.turns is not None:
        try:
            return Document(fields.turns(values[0]), item, done)
        except ChatError as error:
            return problem(errors.NO_CONVERSATION, f"{fields.text!r}: {error}")
        except errors.TooLargeError:
            return problem(errors.TOO_LARGE, f"its answers with all before each: {_too_large(source)}")
    for name, value in zip(fields.names, values, strict=True):
        if not isinstance(value, str):
            return problem(errors.NOT_A_STRING, f"{name!r} is not a string, but {_shown(value)}")
        if not value.isascii() and _has_surrogate(value):
            return problem(errors.NOT_UTF8, f"{name!r} holds half of a surrogate pair, which is no character")
    if not values[-1]:
        return problem(errors.EMPTY_DOCUMENT, f"{fields.text!r} is empty")._replace(harmless=True)
    return Document((Turn(values[0] if fields.prompt is not None else None, values[-1]),), item, done)


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
                yield _row(source, row, values, fields, source.size * row // max(rows, row))
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        yield _broken_table(source, row, error)
        return
    if rows == 0:
        yield _no_rows(source)


def _parquet_rows(file: Any, start: int, fields: Fields) -> Iterator[tuple[int, list[Any]]]:
    """Rows after the first `start`, numbered from 1; row groups that end before are not read.

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
    """Rows at a time of a row group: a value that is stored once, in a dictionary, may be that of every row."""
    columns = (group.column(index) for index in range(group.num_columns))
    sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in fields.names]
    return min(_ROWS, max(_FEW_ROWS, _TABLE_BYTES // max(1, *sizes, 0)))


def _wrong_columns(source: Source, schema: Any, fields: Fields) -> Problem | None:
    for name in fields.names:
        if schema.get_field_index(name) < 0:
            message = f"{source.path}: {_no_field(name, schema.names)}"
            return Problem(errors.NO_FIELD, message, END, source.size)
        kind = str(schema.field(name).type)
        nested = kind.startswith(("list", "large_list", "struct", "map"))
        if nested != (fields.turns is not None) or "string" not in kind:
            wanted = "lists of messages" if fields.turns else "strings"
            message = f"{source.path}: the column {name!r} holds {kind}, not {wanted}"
            return Problem(errors.NOT_A_STRING, message, END, source.size)
    return None


def _read_table(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    table = source.table
    missing = [name for name in fields.names if name not in table.column_names]
    if missing:
        message = f"{source.path}: {_no_field(missing[0], table.column_names)}"
        yield Problem(errors.NO_FIELD, message, END, source.size)
        return
    if not len(table):
        yield _no_rows(source)
        return
    table = table.select_columns(fields.names).with_format(None)
    for first in range(start, len(table), _ROWS):
        columns = table[first : first + _ROWS]
        for row, values in enumerate(zip(*(columns[name] for name in fields.names), strict=True), first + 1):
            yield _row(source, row, list(values), fields, source.size * row // len(table))


def _too_large(source: Source) -> str:
    limit = source.limits.document
    return f"more than {limit:,} bytes; a larger --max-document-bytes reads it"


def _no_rows(source: Source) -> Problem:
    return Problem(errors.EMPTY_FILE, f"{source.path}: a table without rows", END, source.size, source.found)


def _row(source: Source, row: int, values: list[Any], fields: Fields, done: int) -> Event:
    def problem(kind: str, complaint: str) -> Problem:
        return Problem(kind, f"{source.path}, row {row}: {complaint}", row, done)

    if any(isinstance(value, str) and _is_longer(value, source.limits.document) for value in values):
        return problem(errors.TOO_LARGE, _too_large(source))
    return _document(source, values, fields, row, done, problem)


def pyarrow_and_parquet() -> tuple[Any, Any]:
    """The library and its reader of Parquet.

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
    """Of a file that cannot be read or decompressed, from some place on."""
    if isinstance(error, WindowError):
        window = (
            f"unpacking takes more than {source.limits.window:,} bytes of memory; a larger --max-window-bytes allows it"
        )
        return Problem(errors.TOO_LARGE, f"{source.path}: {window}, up to 2**31", END, source.size)
    if isinstance(error, BROKEN):
        kind = Path(source.path).suffix.removeprefix(".")
        return Problem(errors.BROKEN_FILE, f"{source.path}: broken {kind} file{place}: {error}", END, source.size)
    reason = getattr(error, "strerror", None) or error
    return Problem(errors.UNREADABLE, f"{source.path}: {reason}{place}", END, source.size)


def _broken_table(source: Source, row: int, error: Exception) -> Problem:
    reason = str(error).split("\n")[0][:200]
    if isinstance(error, UnicodeDecodeError):
        return Problem(errors.NOT_UTF8, f"{source.path}, after row {row}: {_not_utf8(error, None)}", END, source.size)
    if isinstance(error, OSError) and error.errno is not None:
        return Problem(errors.UNREADABLE, f"{source.path}: {error.strerror or reason}", END, source.size)
    return Problem(
        errors.BROKEN_FILE, f"{source.path}: broken Parquet file after row {row}: {reason}", END, source.size
    )


def _not_utf8(error: UnicodeDecodeError, line: int | None) -> str:
    where = "" if line is None else f" (line {line})"
    return f"not UTF-8 text: byte 0x{error.object[error.start]:02x} at position {error.start}{where}"


def _is_longer(text: str, limit: int) -> bool:
    """Whether a text has more bytes than that."""
    return len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="replace")) > limit)


def _has_surrogate(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_field(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(map(repr, names)) or 'none'}"
    return f"no field {name!r}{hint}"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return f"{text[:40]}..." if len(text) > 40 else text
