"""Reads documents from Parquet and from tables of Hugging Face's `datasets`."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtp.config.schema import HF_PREFIX
from jaxtp.data.prepare.readers import (
    BROKEN_FILE,
    NO_FIELD,
    NOT_A_STRING,
    NOT_UTF8,
    TOO_LARGE,
    UNREADABLE,
    Event,
    Fields,
    Item,
    PrepareError,
    Problem,
    Source,
    make_document,
    no_field,
    not_utf8,
)

if TYPE_CHECKING:
    import datasets
    from pyarrow import parquet

_ROWS, _MIN_ROWS = 512, 16
"""Rows in memory at a time, and the fewest: reading row by row is slow."""
_MAX_BATCH_BYTES = 2**28


def require_pyarrow() -> None:
    """Raises `PrepareError` if pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise PrepareError("Parquet files need the library pyarrow: pip install 'jaxtp[data]'") from None


def parquet_columns(path: str) -> list[str]:
    """Returns the column names; empty if the file is unreadable."""
    import pyarrow
    from pyarrow import parquet

    with suppress(pyarrow.lib.ArrowException, OSError, ValueError), parquet.ParquetFile(path) as file:
        return list(file.schema_arrow.names)
    return []


def read_parquet(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields documents after the first `start` rows."""
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True, pre_buffer=False) as file:
            wrong = _wrong_columns(source, file.schema_arrow, fields)
            if wrong is not None:
                yield wrong
                return
            rows = file.metadata.num_rows
            for row, values in _parquet_rows(file, start, fields.names_in(file.schema_arrow.names)):
                yield _document(Item(source, "row", row, source.size * row // max(rows, row)), values, fields)
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        yield _broken(source, row, error)
        return
    if rows == 0:
        yield source.empty("a table without rows")


def _parquet_rows(file: "parquet.ParquetFile", start: int, names: list[str]) -> Iterator[tuple[int, dict[str, object]]]:
    """Yields rows after the first `start`, numbered from 1; skips row groups before them.

    Each batch starts with its row group, so the same rows precede a damaged page wherever reading started.
    """
    first = 0
    for group in range(file.num_row_groups):
        metadata = file.metadata.row_group(group)
        size = _batch_rows(metadata, names)
        is_read = first + metadata.num_rows > start
        row = first
        for batch in file.iter_batches(size, row_groups=[group], columns=names) if is_read else ():
            columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
            for values in zip(*columns, strict=True):  # a dictionary's text becomes a Python string a row at a time
                row += 1
                if row > start:
                    yield row, {name: value.as_py() for name, value in zip(names, values, strict=True)}
        first += metadata.num_rows


def _batch_rows(group: "parquet.RowGroupMetaData", names: list[str]) -> int:
    """Returns rows per read; dictionary encoding may store a value once for all rows."""
    columns = (group.column(index) for index in range(group.num_columns))
    sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names]
    return min(_ROWS, max(_MIN_ROWS, _MAX_BATCH_BYTES // max(1, *sizes, 0)))


def _wrong_columns(source: Source, schema: "parquet.ParquetSchema", fields: Fields) -> Problem | None:
    for name in fields.names:
        if schema.get_field_index(name) < 0:
            return source.problem(NO_FIELD, no_field(name, schema.names))
        kind = str(schema.field(name).type)
        is_nested = kind.startswith(("list", "large_list", "struct", "map"))
        needs_lists = fields.turns is not None and fields.prompt is None
        if is_nested != needs_lists or "string" not in kind:
            expected = "lists of messages" if needs_lists else "strings"
            return source.problem(NOT_A_STRING, f"the column {name!r} holds {kind}, not {expected}")
    return None


def _broken(source: Source, row: int, error: Exception) -> Problem:
    reason = str(error).split("\n")[0][:200]
    if isinstance(error, UnicodeDecodeError):
        return source.problem(NOT_UTF8, not_utf8(error), after=f", after row {row}")
    if isinstance(error, OSError) and error.errno is not None:
        return source.problem(UNREADABLE, error.strerror or reason)
    return source.problem(BROKEN_FILE, f"broken Parquet file after row {row}: {reason}")


def open_table(name: str) -> "datasets.Dataset":
    """Opens `hf:FOLDER[:SPLIT]` or `hf:NAME[:CONFIGURATION]:SPLIT`."""
    try:
        import datasets
    except ImportError:
        raise PrepareError(f"{name} needs the library datasets: pip install 'jaxtp[datasets]'") from None
    first, *rest = name.removeprefix(HF_PREFIX).split(":")
    is_folder = Path(first).is_dir()
    if not (is_folder or rest):
        raise PrepareError(f"{name}: no such folder; of a dataset by name also name the split: {name}:train")
    datasets.disable_progress_bars()
    try:
        if is_folder:
            table = datasets.load_from_disk(first)
            table = table[rest[0]] if rest else table
        else:
            table = datasets.load_dataset(first, *rest[:-1], split=rest[-1])
    except Exception as error:  # the library has no base exception
        raise PrepareError(f"{name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from None
    if not isinstance(table, datasets.Dataset):
        raise PrepareError(f"{name} has several splits; name one: {', '.join(f'{name}:{split}' for split in table)}")
    return table


def read_table(source: Source, start: int, fields: Fields) -> Iterator[Event]:
    """Yields documents after the first `start` rows."""
    table = source.table
    assert table is not None
    for name in fields.names:
        if name not in table.column_names:
            yield source.problem(NO_FIELD, no_field(name, table.column_names))
            return
    if not len(table):
        yield source.empty("a table without rows")
        return
    names = fields.names_in(table.column_names)
    table = table.select_columns(names).with_format(None)
    for first in range(start, len(table), _ROWS):
        columns = table[first : first + _ROWS]
        for row, values in enumerate(zip(*(columns[name] for name in names), strict=True), first + 1):
            item = Item(source, "row", row, source.size * row // len(table))
            yield _document(item, dict(zip(names, values, strict=True)), fields)


def _document(item: Item, row: Mapping[str, object], fields: Fields) -> Event:
    if any(isinstance(value, str) and _is_longer(value, item.source.max_document) for value in row.values()):
        return item.problem(TOO_LARGE, item.source.too_large)
    return make_document(item, row, fields)


def _is_longer(text: str, limit: int) -> bool:
    return len(text) > limit or (4 * len(text) > limit and len(text.encode(errors="replace")) > limit)
