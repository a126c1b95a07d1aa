"""Batches of rows on the host, from any source: a function, a dataset, a stream or several streams.

`open_batches` recognizes a source by its methods; no other library is imported.

    source                                   resumes by                     a process reads
    f(step) -> columns                       the step                       all rows
    f(step, rows) -> columns                 the step                       its rows
    dataset: len(d), d[i]                    the index of the next sample   its rows
    stream: iter(s), batches                 its state, or from its start   all rows
    S streams, each 1/S of a batch           their states                   the streams of its rows
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from jaxtp.config.entry import UserError
from jaxtp.config.python_object import user_code
from jaxtp.data.batches import Batches, Position, Read, SampleBatches
from jaxtp.data.columns import BatchError, Columns, checksum, count_rows, reading, to_columns
from jaxtp.data.streams import ITERABLE, StreamBatches

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class FunctionBatches(Batches):
    """Endless batches from a function of the step.

    `batch_size` is for a function that takes rows.
    """

    def __init__(
        self, name: str, function: Callable[..., object], batch_size: int | None, *, by_rows: bool
    ):
        self._function = function
        self._by_rows = by_rows
        with reading(name, 0):
            first = self._call(0, [0])
            returned = count_rows(first)
            if by_rows and returned == 0:
                _require_rows(returned, 1)
        super().__init__(name, first, batch_size if by_rows else returned, {"kind": "function"})

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        record = position.streams
        if record and not self._by_rows and self._read(rows, position.step - 1)[1] != record:
            raise BatchError(
                f"{self.name}, step {position.step}: its batch is not the checkpoint's, so the "
                "function or its data changed; start another run from these weights "
                "(--run.init-from)"
            )
        return partial(self._read, rows)

    def _read(self, rows: Sequence[int], step: int) -> Read:
        copied = self._zeros(len(rows))  # copies, because the function may reuse its arrays
        with reading(self.name, step):
            columns = self._call(step, rows)
            if not self._by_rows:
                self._put(copied, columns, self.global_batch_size, dict(enumerate(rows)))
                return copied, [{"crc32": checksum(columns)}]
            returned = count_rows(columns)
            _require_rows(returned, len(rows))
            self._put(copied, columns, returned, {row: row for row in range(returned)})
            return copied, None

    def _call(self, step: int, rows: Sequence[int]) -> Columns:
        if self._by_rows:
            return to_columns(self._function(step, rows=np.asarray(rows)))
        return to_columns(self._function(step))


def _require_rows(returned: int, expected: int) -> None:
    if returned != expected:
        raise BatchError(f"returned {returned} rows, but was called with {expected}")


def open_batches(
    source: Any, *, batch_size: int | None = None, seed: int = 0, once: bool = False
) -> Batches:
    """Returns the batches of a source; reads its first sample or batch.

    Unless `once`, a dataset is repeated and shuffled by `seed`, differently in each epoch. A
    `grain.MapDataset` has its own order. A function without parameters returns a source, or yields
    batches.

    Args:
      batch_size: number of rows in a batch, for sources of rows.
      once: whether a read is a single pass in order, for evaluation.

    Raises:
      BatchError: the source is none of these, or is empty.
    """
    name = _name_of(source)
    with user_code(name, UserError):
        return _open(source, name, batch_size, seed, once)


def _open(source: Any, name: str, batch_size: int | None, seed: int, once: bool) -> Batches:
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if callable(source) and (inspect.isclass(source) or not iterable):
        if parameters := _parameters(source):
            return FunctionBatches(name, source, batch_size, by_rows="rows" in parameters)
        with reading(name):
            returned = source()
        source = _Again(source) if isinstance(returned, Iterator) else returned
    streams = {name: source}
    is_list = isinstance(source, list | tuple)
    # A list of dicts or tuples is a dataset.
    if is_list and not all(isinstance(item, Mapping | tuple) for item in source):
        streams = {f"{name}[{index}]": stream for index, stream in enumerate(source)}
    for stream_name, stream in streams.items():
        with reading(stream_name):
            is_dataset = _is_dataset(stream)
            if is_dataset and stream is not source:
                raise BatchError(
                    "is a dataset of samples; give one dataset, which jaxtp splits by itself"
                )
            if once and isinstance(stream, Iterator):
                raise BatchError(
                    f"is an iterator, and each evaluation reads it again; give {ITERABLE}"
                )
        if is_dataset:
            return SampleBatches(name, source, batch_size, seed=seed, once=once)
    return StreamBatches(name, streams, once=once)


def _parameters(function: Callable[..., object]) -> list[str]:
    # Returns the parameters of a function: `step`, `rows`, both or none.
    signature = inspect.signature(function)
    defaults = {
        parameter.name: parameter.default
        for parameter in signature.parameters.values()
        if parameter.kind not in _VARIADIC
    }
    first, *other_names = defaults or [""]
    required = {name for name, default in defaults.items() if default is inspect.Parameter.empty}
    if not required and first != "step":
        return []
    if first == "rows" or not required <= {first, "rows"} or isinstance(defaults.get("rows"), int):
        raise BatchError(
            f"{_name_of(function)} takes {signature}; it must take (step), or (step, rows) with "
            "the indices of rows to read, or nothing if it yields batches. If its parameter rows "
            "has another meaning, rename it"
        )
    return ["step", "rows"] if "rows" in other_names else ["step"]


def _is_dataset(source: Any) -> bool:
    # Whether a source has samples by index.
    has_index = hasattr(source, "__getitem__")
    has_iter = hasattr(source, "__iter__")
    if isinstance(source, Mapping | str | bytes) or not (has_index or has_iter):
        keys = (
            f" of {', '.join(map(str, source))}: choose one split"
            if isinstance(source, Mapping)
            else ""
        )
        raise BatchError(
            f"is a {type(source).__name__}{keys}; give a function of the step, a dataset (len() "
            "and [index]), or an iterable of batches"
        )
    if not (has_index and hasattr(source, "__len__")):
        return False
    try:
        if has_iter and len(source):
            source[0]
    except NotImplementedError:  # an IterableDataset of torch inherits it
        return False
    return True


@dataclass(frozen=True)
class _Again:
    make: Callable[[], Iterator[object]]

    def __iter__(self) -> Iterator[object]:
        return self.make()


def _name_of(source: object) -> str:
    if isinstance(source, FunctionType | MethodType):
        code = source.__code__
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    kind = source if isinstance(source, type) else type(source)
    library = kind.__module__.partition(".")[0]
    # A module with a space in its name is a file that a setting names.
    is_users = library in ("builtins", "__main__") or " " in library
    return kind.__name__ if is_users else f"{library} {kind.__name__}"
