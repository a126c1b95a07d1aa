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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import grain
import numpy as np

from jaxtp.data.batches import Batches, Position, Record, SampleBatches, required
from jaxtp.data.columns import BatchError, Columns, Layout, checksum, num_rows, reading, rows_layout, take, to_columns
from jaxtp.data.samples import shuffled
from jaxtp.data.streams import ITERABLE, StreamBatches, ahead


@dataclass(kw_only=True, eq=False)
class FunctionBatches(Batches):
    """Batches of a function of the step; `read` needs a count."""

    kind = "function"

    function: Callable[..., object]
    by_rows: bool

    @cached_property
    def _first(self) -> Columns:
        with self._reading(0):
            columns = self._call(0, [0])
            num_rows(columns)
            return columns

    @cached_property
    def global_batch_size(self) -> int:
        """Rows of the batch of step 0, or the setting if the function takes rows."""
        return required(self.batch_size) if self.by_rows else num_rows(self._first)

    @property
    def layout(self) -> Layout:
        """Columns of step 0."""
        return rows_layout(self._first)

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """See `Batches`."""
        if count is None:
            raise BatchError(f"{self.name} has no end: set the number of batches")
        return ahead(self._read(rows, position, count))

    def _read(self, rows: Sequence[int], position: Position, count: int) -> Iterator[tuple[Columns, Position]]:
        records: list[Record | None] | None = None
        if position.step and position.streams and not self.by_rows:
            with self._reading(position.step - 1):
                columns = self._whole(self._call(position.step - 1, rows), self.global_batch_size)
                if position.streams[0] != {"crc32": checksum(columns)}:
                    raise BatchError(
                        "its batch is not the checkpoint's, so the function or its data changed; start another run "
                        "from these weights (--run.init-from)"
                    )
        for step, after in self._steps(position, count):
            with self._reading(step):
                columns = self._call(step, rows)
                if not self.by_rows:
                    columns = self._whole(columns, self.global_batch_size)
                    records = [{"crc32": checksum(columns)}]
                    columns = take(columns, rows)
                elif (returned := num_rows(columns)) != len(rows):
                    raise BatchError(f"returned {returned} rows, and was called with {len(rows)}")
                else:
                    columns = take(
                        self._whole(columns, returned), range(returned)
                    )  # a copy: it may use its arrays again
            yield columns, replace(after, streams=records)

    def _call(self, step: int, rows: Sequence[int]) -> Columns:
        return to_columns(self.function(step, **({"rows": np.asarray(rows)} if self.by_rows else {})))


def open_batches(
    source: Any,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    with_weights: bool = False,
    once: bool = False,
    report: Callable[[str], None] = print,
) -> Batches:
    """Returns the batches of a source; reads at most one sample.

    A dataset is shuffled by `seed` anew in each epoch, unless it is a `grain.MapDataset`, which has its own order; both
    are repeated, and read in order if `once`. A function without parameters returns a source, or yields batches.

    Args:
      batch_size: number of rows; sources of batches have their own.
      with_weights: whether the loss reads the column `weights`; then short batches are padded.
      once: whether a read is one pass in order, for evaluation.
      report: takes lines for the user.

    Raises:
      BatchError: the source is none of these, or is empty.
    """
    name = _name_of(source)
    settings: dict[str, Any] = {"name": name, "with_weights": with_weights, "once": once, "report": report}
    settings["batch_size"] = batch_size
    if _is_function(source):
        if parameters := _parameters(source):
            return FunctionBatches(function=source, by_rows="rows" in parameters, **settings)
        with reading(name):
            made = source()
        if isinstance(made, Mapping):
            raise BatchError(f"{name} returned one batch; with a parameter `step` it is called for each step")
        source = _Again(source) if isinstance(made, Iterator) else made
    if isinstance(source, list | tuple) and not all(isinstance(each, Mapping | tuple) for each in source):
        streams = [_stream(each, f"{name}[{index}]", once) for index, each in enumerate(source)]
        return StreamBatches(sources=streams, **settings)
    with reading(name):
        if not _is_dataset(source):
            return StreamBatches(sources=[_stream(source, name, once)], **settings)
        rows = len(source)
    if not rows:
        raise BatchError(f"{name} has no rows")
    is_grain, endless = isinstance(source, grain.MapDataset), rows == sys.maxsize
    if once and endless:
        raise BatchError(f"{name} has no end; leave out repeat() for an evaluation")
    if not (once or endless):
        source = source.repeat() if is_grain else shuffled([source], [1.0], seed)
    threads = 2 if is_grain else 1  # Grain's may be read in any number of threads
    return SampleBatches(samples=source, num_rows=None if endless else rows, threads=threads, **settings)


def _is_function(source: object) -> bool:
    iterable = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    return callable(source) and (inspect.isclass(source) or not iterable)


def _parameters(function: Callable[..., object]) -> list[str]:
    # Which of step and rows a function takes.
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # some functions in C
        return ["step"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, each in parameters.items() if each.kind not in kinds]
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if "rows" in names and isinstance(parameters["rows"].default, int):
        raise BatchError(
            f"{_name_of(function)} has a parameter rows={parameters['rows'].default}, and jaxtp passes the indices of "
            "the rows to read in rows; rename it"
        )
    if not required and names[:1] != ["step"]:
        return []
    if set(required[1:]) <= {"rows"} and parameters[names[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return ["step", "rows"] if "rows" in names[1:] else ["step"]
    raise BatchError(
        f"{_name_of(function)} takes ({', '.join(names)}); it must take (step) or (step, rows), or nothing if it "
        "yields batches"
    )


def _is_dataset(source: Any) -> bool:
    # Whether it has samples by index.
    if isinstance(source, Mapping | str | bytes) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
        splits = f" ({', '.join(map(str, source))}): choose one split" if isinstance(source, Mapping) else ""
        raise BatchError(
            f"is a {type(source).__name__}{splits}; give a function of the step, a dataset (len() and [index]), or an "
            "iterable of batches"
        )
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        return False
    if not hasattr(source, "__iter__"):
        return True
    try:
        return not len(source) or source[0] is not NotImplemented
    except NotImplementedError:  # an IterableDataset of torch inherits it
        return False


def _stream(source: Any, name: str, once: bool) -> Iterable[object]:
    with reading(name):
        if _is_dataset(source):
            raise BatchError("is a dataset of samples; give one dataset, which jaxtp splits by itself")
        if once and isinstance(source, Iterator):
            raise BatchError(f"is an iterator, and each evaluation reads it again; give {ITERABLE}")
    return source


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
