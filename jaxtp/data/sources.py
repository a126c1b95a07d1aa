"""Batches of rows on the host, from any source: a function, a dataset, a stream, or several streams.

`open_batches` recognizes a source by its methods; no other library is imported.

    source                                   resumes by                     a process reads
    f(step) -> columns                       the step                       all rows
    f(step, rows) -> columns                 the step                       its rows
    dataset: len(d), d[i]                    the index of the next sample   its rows
    stream: iter(s), batches                 its state, else from its start all rows
    S streams, each 1/S of a batch           their states                   the streams of its rows
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from jaxtp.data.batches import Batches, Position, Read, SampleBatches
from jaxtp.data.columns import BatchError, Columns, checksum, count_rows, reading, take, to_columns
from jaxtp.data.samples import shuffled
from jaxtp.data.streams import ITERABLE, StreamBatches

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(kw_only=True, eq=False)
class FunctionBatches(Batches):
    """Batches of a function of the step, without an end."""

    kind = "function"

    function: Callable[..., object]
    by_rows: bool

    def _peek(self) -> tuple[Columns, int]:
        if self.by_rows and self.batch_size is None:
            raise BatchError(f"{self.name} takes rows; set the rows of a batch (batch_size)")
        with self._reading(0):
            first = self._call(0, [0])
            return first, self.batch_size or count_rows(first)

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        if position.streams and not self.by_rows and self._read(position.step - 1, rows)[1] != position.streams:
            raise BatchError(
                f"{self.name}, step {position.step}: its batch is not the checkpoint's, so the function or its data "
                "changed; start another run from these weights (--run.init-from)"
            )
        return lambda step: self._read(step, rows)

    def _read(self, step: int, rows: Sequence[int]) -> Read:
        with self._reading(step):
            columns = self._call(step, rows)
            if not self.by_rows:
                return take(self._whole(columns, self.global_batch_size), rows), [{"crc32": checksum(columns)}]
            if (returned := count_rows(columns)) != len(rows):
                raise BatchError(f"returned {returned} rows, and was called with {len(rows)}")
            return take(self._whole(columns, returned), range(returned)), None  # a copy: it may use its arrays again

    def _call(self, step: int, rows: Sequence[int]) -> Columns:
        return to_columns(self.function(step, **({"rows": np.asarray(rows)} if self.by_rows else {})))


def open_batches(
    source: Any, *, batch_size: int | None = None, seed: int = 0, with_weights: bool = False, once: bool = False
) -> Batches:
    """Returns the batches of a source; reads at most one sample.

    A dataset is shuffled by `seed` anew in each epoch, unless it is a `grain.MapDataset`, which has its own order; both
    are repeated, and read in order if `once`. A function without parameters returns a source, or yields batches.

    Args:
      batch_size: number of rows; sources of batches have their own.
      with_weights: whether the loss reads the column `weights`; then short batches are padded.
      once: whether a read is one pass in order, for evaluation.

    Raises:
      BatchError: the source is none of these, or is empty.
    """
    name = _name_of(source)
    settings: dict[str, Any] = {"name": name, "with_weights": with_weights}
    if _is_function(source):
        if parameters := _parameters(source):
            by_rows = "rows" in parameters
            size = batch_size if by_rows else None
            return FunctionBatches(function=source, by_rows=by_rows, batch_size=size, **settings)
        with reading(name):
            made = source()
        source = _Again(source) if isinstance(made, Iterator) else made
    several = isinstance(source, list | tuple) and not all(isinstance(each, Mapping | tuple) for each in source)
    sources = {f"{name}[{index}]": each for index, each in enumerate(source)} if several else {name: source}
    for where, each in sources.items():
        with reading(where):
            if _is_dataset(each):
                if several:
                    raise BatchError("is a dataset of samples; give one dataset, which jaxtp splits by itself")
                return _of_dataset(each, seed, once, batch_size=batch_size, **settings)
            if once and isinstance(each, Iterator):
                raise BatchError(f"is an iterator, and each evaluation reads it again; give {ITERABLE}")
    return StreamBatches(sources=sources, once=once, **settings)


def _of_dataset(dataset: Any, seed: int, once: bool, **settings: Any) -> SampleBatches:
    rows = len(dataset)
    if not rows:
        raise BatchError("has no rows")
    is_grain, endless = isinstance(dataset, grain.MapDataset), rows == sys.maxsize
    if once and endless:
        raise BatchError("has no end; leave out repeat() for an evaluation")
    if not (once or endless):
        dataset = dataset.repeat() if is_grain else shuffled([dataset], [1.0], seed)
    return SampleBatches(
        samples=dataset,
        num_rows=None if endless else rows,
        end=rows if once else sys.maxsize,
        threads=2 if is_grain else 1,  # only Grain's surely allow several
        **settings,
    )


def _is_function(source: object) -> bool:
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    return callable(source) and (inspect.isclass(source) or not iterable)


def _parameters(function: Callable[..., object]) -> list[str]:
    # Returns which of step and rows a function takes.
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions in C
        return ["step"]
    named = {each.name: each.default for each in signature.parameters.values() if each.kind not in _VARIADIC}
    first, *others = named or [""]
    required = [name for name, default in named.items() if default is inspect.Parameter.empty]
    if not required and first != "step":
        return []
    if isinstance(named.get("rows"), int):
        raise BatchError(
            f"{_name_of(function)} has a parameter rows={named['rows']}, and jaxtp passes the indices of the rows to "
            "read in rows; rename it"
        )
    if first == "rows" or not set(required) <= {first, "rows"}:
        raise BatchError(
            f"{_name_of(function)} takes ({', '.join(named)}); it must take (step) or (step, rows), or nothing if it "
            "yields batches"
        )
    return ["step", "rows"] if "rows" in others else ["step"]


def _is_dataset(source: Any) -> bool:
    # Whether it has samples by index.
    has_index, has_iter = hasattr(source, "__getitem__"), hasattr(source, "__iter__")
    if isinstance(source, Mapping | str | bytes) or not (has_index or has_iter):
        keys = f" of {', '.join(map(str, source))}: choose one split" if isinstance(source, Mapping) else ""
        raise BatchError(
            f"is a {type(source).__name__}{keys}; give a function of the step, a dataset (len() and [index]), or an "
            "iterable of batches"
        )
    if not (has_index and hasattr(source, "__len__")):
        return False
    try:
        if len(source):
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
    if code := getattr(source, "__code__", None):
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    kind = type(source)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library in ("builtins", "__main__") else f"{library} {kind.__name__}"
