"""Columns of a batch: converts the values of a user's source to NumPy arrays by name."""

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtp.config.entry import UserError
from jaxtp.config.python_object import describe_exception

WEIGHTS = "weights"  # Column `[B]` or `[B, ...]`: 0 for the rows that pad a short batch
Columns: TypeAlias = dict[str, NDArray[Any]]  # Arrays `[n, ...]` of a batch, `[...]` of a sample

Layout: TypeAlias = dict[str, tuple[tuple[int, ...], np.dtype[Any]]]
"""Shape and dtype of each column of one sample."""

_CHECKED = 2**18  # Approximate maximum number of elements of an array that a checksum reads


class BatchError(UserError):
    """A source or a batch cannot be used."""


class EndOfDataError(BatchError):
    """An iterator ended before the run."""


@contextmanager
def reading(name: str, step: int | None = None) -> Iterator[None]:
    """Converts an error of a user's source to a `BatchError` that begins with its name.

    Other `UserError`s pass through.
    """
    where = name if step is None else f"{name}, step {step + 1}"
    try:
        yield
    except BatchError as error:
        raise type(error)(f"{where}: {error}") from error.__cause__
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:  # also `SystemExit`
        raise BatchError(f"{where} fails{describe_exception(error)}") from error


def to_columns(value: object) -> Columns:
    """Returns a batch or a sample as arrays.

    Columns of a tuple are "0", "1", ...; 64-bit numbers become 32-bit ones, as in JAX.

    Raises:
      BatchError: the value is not a dict or a tuple of arrays; or a column has text, rows of
        different lengths, or numbers beyond 32 bits.
    """
    if isinstance(value, Mapping):
        columns = {str(name): column for name, column in value.items()}
        if len(columns) < len(value):
            twice = next(name for name in value if not isinstance(name, str) and str(name) in value)
            raise BatchError(
                f"has columns {twice!r} and {str(twice)!r}, which have one name; rename one of them"
            )
    elif isinstance(value, tuple) or (
        isinstance(value, list) and all(hasattr(column, "shape") for column in value)
    ):
        columns = {str(index): column for index, column in enumerate(value)}
    else:
        raise BatchError(
            f"gives a {type(value).__name__}; it must give a dict of arrays, or a tuple of them"
        )
    if not columns:
        raise BatchError("gives no columns")
    return {name: _to_array(name, column) for name, column in columns.items()}


def _to_array(name: str, value: object) -> NDArray[Any]:
    if isinstance(value, Mapping):
        keys = ", ".join(map(str, value))
        flat = f"{name}_{next(iter(value), 'key')}"
        raise BatchError(
            f"column {name!r} is a dict of {keys}, and a column is one array; give each its own "
            f"column, such as {flat!r}"
        )
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        hint = "pad its rows to one length" if "inhomogeneous" in str(error) else error
        raise BatchError(f"column {name!r} is not an array of numbers: {hint}") from error
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 4 and array.dtype.isnative:
        return array
    if not (jnp.issubdtype(array.dtype, jnp.number) or array.dtype == np.bool_):
        if array.dtype == object and any(element is None for element in array.flat):
            raise BatchError(
                f"column {name!r} has None; leave such rows out, or give them a number"
            )
        kind = "text" if array.dtype.kind in "US" else array.dtype
        raise BatchError(
            f"column {name!r} is {kind}, not numbers; leave it out, for example by "
            f"remove_columns([{name!r}])"
        )
    dtype = jax.dtypes.canonicalize_dtype(array.dtype.newbyteorder("="))
    if array.dtype != dtype and dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        for number in (int(array.min()), int(array.max())):
            if not limits.min <= number <= limits.max:
                raise BatchError(f"column {name!r} has {number}, which does not fit into {dtype}")
    return array.astype(dtype, copy=False)


def count_rows(columns: Columns) -> int:
    """Returns the number of rows of a batch.

    Raises `BatchError` if columns have different numbers of rows, or are scalars.
    """
    for name, array in columns.items():
        if not array.ndim:
            raise BatchError(
                f"column {name!r} is one number: these are samples; give batches (.batch(8))"
            )
    sizes = set(map(len, columns.values()))
    if len(sizes) > 1:
        listed = ", ".join(f"{name} {list(array.shape)}" for name, array in columns.items())
        raise BatchError(f"columns differ in their number of rows: {listed}")
    return sizes.pop()


def layout_of(columns: Mapping[str, NDArray[Any] | jax.ShapeDtypeStruct]) -> Layout:
    """Returns shapes and dtypes of the rows of a batch."""
    return {name: (array.shape[1:], array.dtype) for name, array in columns.items()}


def check_columns(columns: Columns, expected: Layout) -> int:
    """Returns the number of rows; raises `BatchError` if their layout is not the `expected` one."""
    rows = count_rows(columns)
    layout = layout_of(columns)
    missing = sorted(expected.keys() ^ layout.keys())
    if missing:
        names = ", ".join(layout)
        first = ", ".join(expected)
        raise BatchError(f"has the columns {names}, and the first had {first}: {missing[0]!r}")
    for name, (was, was_dtype) in expected.items():
        shape, dtype = layout[name]
        if (shape, dtype) != (was, was_dtype):
            raise BatchError(
                f"column {name!r} is {dtype}{list(shape)} in a row, and was "
                f"{was_dtype}{list(was)} in the first"
            )
    return rows


def too_short(rows: int) -> str:
    """Returns the end of a message on a short batch."""
    return (
        f"has only {rows} rows: leave a short batch out (drop_last=True), or let the loss multiply "
        f"by batch[{WEIGHTS!r}], which is 0 in rows that pad it"
    )


def checksum(columns: Columns) -> int:
    """Returns a crc32 of names, dtypes, shapes, and evenly spaced elements of all rows."""
    total = 0
    for name, array in sorted(columns.items()):
        total = zlib.crc32(f"{name} {array.dtype} {array.shape}".encode(), total)
        if array.size:
            spaced = array.reshape(len(array), -1)[:, :: max(array.size // _CHECKED, 1)]
            total = zlib.crc32(spaced.tobytes(), total)
    return total
