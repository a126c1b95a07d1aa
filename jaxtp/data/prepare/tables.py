"""Reads rows from Parquet and from tables of Hugging Face's `datasets`."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtp.config.schema import HF_PREFIX
from jaxtp.data.prepare.readers import (
    BROKEN_FILE,
    NOT_A_STRING,
    NOT_UTF8,
    BadInputError,
    Fields,
    Item,
    PrepareError,
    Source,
    not_utf8,
    require_fields,
    unreadable,
)

if TYPE_CHECKING:
    import datasets
    from pyarrow import parquet

_ROWS, _MIN_ROWS = 512, 16
"""Rows in memory at a time, and the fewest: reading row by row is slow."""
_MAX_BATCH_BYTES = 2**28


def parquet_columns(path: str) -> list[str]:
    """Returns the column names; empty if the file is unreadable."""
    import pyarrow
    from pyarrow import parquet

    with suppress(pyarrow.lib.ArrowException, OSError, ValueError):
        return list(parquet.read_schema(path).names)
    return []


def read_parquet(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    """Yields rows after the first `start`; skips row groups before them.

    Each batch starts with its row group, so the same rows precede a damaged page wherever reading started.
    """
    import pyarrow
    from pyarrow import parquet

    row = 0
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True, pre_buffer=False) as file:
            _check_columns(file.schema_arrow, fields)
            names = fields.names_in(file.schema_arrow.names)
            for group in range(file.num_row_groups):
                metadata = file.metadata.row_group(group)
                if row + metadata.num_rows <= start:
                    row += metadata.num_rows
                    continue
                for batch in file.iter_batches(_batch_rows(metadata, names), row_groups=[group], columns=names):
                    columns = [batch.column(batch.schema.get_field_index(name)) for name in names]
                    for values in zip(*columns, strict=True):  # one row at a time: a dictionary may repeat long texts
                        row += 1
                        if row > start:
                            done = source.size * row // max(file.metadata.num_rows, row)
                            yield row, done, {n: value.as_py() for n, value in zip(names, values, strict=True)}
    except UnicodeDecodeError as error:
        raise BadInputError(NOT_UTF8, not_utf8(error)) from None
    except (pyarrow.lib.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(source, error) from None
        raise BadInputError(BROKEN_FILE, f"broken Parquet file: {str(error).splitlines()[0][:200]}") from None


def _batch_rows(group: "parquet.RowGroupMetaData", names: list[str]) -> int:
    """Returns rows per read; dictionary encoding may store a value once for all rows."""
    columns = (group.column(index) for index in range(group.num_columns))
    sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema.split(".")[0] in names]
    return min(_ROWS, max(_MIN_ROWS, _MAX_BATCH_BYTES // max(1, *sizes, 0)))


def _check_columns(schema: "parquet.ParquetSchema", fields: Fields) -> None:
    require_fields(schema.names, fields)
    for name in fields.names:
        kind = str(schema.field(name).type)
        is_nested = kind.startswith(("list", "large_list", "struct", "map"))
        if is_nested != fields.is_list or "string" not in kind:
            expected = "lists of messages" if fields.is_list else "strings"
            raise BadInputError(NOT_A_STRING, f"the column {name!r} holds {kind}, not {expected}")


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


def read_table(source: Source, start: int, fields: Fields) -> Iterator[Item]:
    """Yields rows after the first `start`."""
    table = source.table
    assert table is not None
    require_fields(table.column_names, fields)
    rows = table.select_columns(fields.names_in(table.column_names)).with_format(None)
    for row, values in enumerate(rows.select(range(start, len(rows))), start + 1):
        yield row, source.size * row // len(rows), values
