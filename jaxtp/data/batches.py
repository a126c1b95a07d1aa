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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import chain, repeat
from itertools import count as count_from
from typing import Any, TypeVar

import grain
import jax
import numpy as np

from jaxtp.data.columns import (
    WEIGHTS,
    BatchError,
    Columns,
    Layout,
    check_layout,
    checksum,
    layout_of,
    num_rows,
    pad,
    reading,
    stack,
    take,
    to_columns,
)
from jaxtp.data.samples import ORDER, SHUFFLE, shuffle_identity, shuffled
from jaxtp.data.streams import Record, Stream
from jaxtp.distributed.agreement import all_gather_json, is_multiprocess

T = TypeVar("T")

AHEAD = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
"""Reads a user's samples in order, since their `__getitem__` need not be safe in several threads."""
TOGETHER = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
"""Reads two batches at a time."""


@dataclass(frozen=True)
class Position:
    """A place between two batches; a checkpoint stores it as JSON."""

    step: int = 0
    """Number of batches so far."""
    sample: int = 0
    """Number of rows so far."""
    streams: list[Record | None] | None = None
    """A record of each stream, None if this process does not read it; of a function, the checksum of its last batch."""

    def gathered(self) -> "Position":
        """Returns the position with all processes' records, for a checkpoint. All processes must call it."""
        if self.streams is None or len(self.streams) == 1:
            return self
        records = zip(*all_gather_json(self.streams), strict=True)
        return Position(self.step, self.sample, [next(filter(None, each), None) for each in records])

    def check_agreement(self, name: str) -> None:
        """Raises `BatchError` if processes read other rows from one source. All processes must call it."""
        checksums = [record and record["crc32"] for record in self.streams or ()]
        for seen in zip(*all_gather_json(checksums), strict=True):
            if len(set(seen) - {None}) > 1:
                raise BatchError(
                    f"{name}, step {self.step}: processes read different rows; seed it by the step alone, and not by "
                    "process"
                )


@dataclass(kw_only=True)
class Batches(ABC):
    """A source of batches."""

    name: str
    """For messages."""
    batch_size: int | None = None
    """The setting; `global_batch_size` is the source's."""
    with_weights: bool = False
    """Whether short batches are padded; then each batch has `WEIGHTS`."""
    once: bool = False
    """Whether `read` ends after one pass in order, for evaluation."""
    report: Callable[[str], None] = print
    num_rows: int | None = None
    """In an epoch, if known."""
    left_out: int = field(default=0, init=False)
    """Number of rows that the last pass left out, since they did not fill a batch."""

    @property
    @abstractmethod
    def global_batch_size(self) -> int:
        """Number of rows of a batch."""

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Columns of the first sample, without `WEIGHTS` that jaxtp adds."""

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract arrays of a whole batch."""
        weights = {WEIGHTS: ((), np.dtype(np.float32))} if self.with_weights else {}
        size = self.global_batch_size
        return {
            name: jax.ShapeDtypeStruct((size, *shape), dtype)
            for name, (shape, dtype) in (weights | self.layout).items()
        }

    @property
    def description(self) -> dict[str, object]:
        """JSON, compared when a run resumes."""
        columns = {name: f"{dtype}{list(shape)}" for name, (shape, dtype) in sorted(self.layout.items())}
        return {"kind": type(self).__name__, "columns": columns}

    @abstractmethod
    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """Yields these rows of `count` batches from a position, and the position after each.

        It reads ahead in a thread. A pass `once` ends with the source.

        Raises:
          BatchError: the source raised an error, or a batch cannot be used.
          EndOfDataError: an iterator has fewer batches.
        """

    def _whole(self, columns: Columns, size: int) -> Columns:
        # Checks a batch, and pads it to `size` rows.
        rows = num_rows(columns)
        check_layout(self.layout, rows_layout(columns))
        if rows > size:
            raise BatchError(f"has {rows} rows, more than the {size} of the first batch")
        if self.with_weights:
            columns = {WEIGHTS: np.ones(rows, np.float32)} | columns
        elif rows < size:
            raise BatchError(
                f"has {rows} rows, fewer than the {size} of the first batch: leave a short batch out (drop_last=True), "
                f"or let the loss read batch[{WEIGHTS!r}], which is 0 in rows that pad it"
            )
        return pad(columns, size)

    def _steps(self, position: Position, count: int | None) -> Iterator[tuple[int, Position]]:
        # Each step, and the position after it without streams.
        for done in range(count) if count is not None else count_from():
            after = position.sample + (done + 1) * self.global_batch_size
            yield position.step + done, Position(position.step + done + 1, after)

    def _reading(self, step: int) -> AbstractContextManager[None]:
        return reading(f"{self.name}, step {step + 1}")


class FunctionBatches(Batches):
    """Batches of a function of the step; `read` needs a count."""

    def __init__(self, function: Callable[..., object], *, by_rows: bool, **settings: Any):
        super().__init__(**settings)
        self._function, self._by_rows = function, by_rows

    @cached_property
    def _first(self) -> Columns:
        with self._reading(0):
            columns = self._call(0, [0])
            num_rows(columns)
            return columns

    @cached_property
    def global_batch_size(self) -> int:
        """Rows of the batch of step 0, or the setting if the function takes rows."""
        return _required(self.batch_size) if self._by_rows else num_rows(self._first)

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
        for step, after in self._steps(position, count):
            with self._reading(step):
                columns = self._call(step, rows)
                if self._by_rows:
                    if (returned := num_rows(columns)) != len(rows):
                        raise BatchError(f"returned {returned} rows, and was called with {len(rows)}")
                    columns = self._whole(columns, len(rows))
                else:
                    columns = self._whole(columns, self.global_batch_size)
                    records = [{"crc32": checksum(columns)}]
                    columns = take(columns, rows)
            yield columns, replace(after, streams=records)

    def _call(self, step: int, rows: Sequence[int]) -> Columns:
        return to_columns(self._function(step, **({"rows": np.asarray(rows)} if self._by_rows else {})))


class SampleBatches(Batches):
    """Batches of samples by index: endless, or `num_rows` of them once."""

    def __init__(self, samples: Sequence[Any], *, options: grain.ReadOptions = AHEAD, **settings: Any):
        super().__init__(**settings)
        self._samples, self._options, self._layout = samples, options, dict[str, Any]()

    @property
    def global_batch_size(self) -> int:
        """The setting."""
        return _required(self.batch_size)

    @property
    def layout(self) -> Layout:
        """Columns of a sample."""
        if not self._layout:
            with self._reading(0):
                self._layout = layout_of(self._sample(0))
        return self._layout

    @property
    def description(self) -> dict[str, object]:
        """With the number of rows, and the identity of their order."""
        order = {"algorithm": f"grain {version('grain')}", "sha256": shuffle_identity()}
        return {**super().description, "rows": self.num_rows, ORDER: {SHUFFLE: order}}

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """See `Batches`."""
        size, end = self.global_batch_size, sys.maxsize
        if self.once:
            end = _required(self.num_rows)
            whole = -(-end // size) if self.with_weights else end // size
            self.left_out = max(end - whole * size, 0)
            if not whole:
                raise BatchError(f"{self.name}: {end} rows do not fill a batch of {size}; use smaller batches")
            count = whole if count is None else min(count, whole)

        def batch(index: int) -> Columns:
            first = position.sample + int(index) * size
            with self._reading(position.step + int(index)):
                return self._batch([first + row for row in rows], end)

        batches = grain.MapDataset.range(_required(count)).map(batch).to_iter_dataset(self._options)
        for columns, (_, after) in zip(batches, self._steps(position, count), strict=True):
            yield columns, after

    def _batch(self, indices: Sequence[int], end: int) -> Columns:
        samples = {row: self._sample(index) for row, index in enumerate(indices) if index < end}
        for sample in samples.values():
            self._layout = self._layout or layout_of(sample)
            check_layout(self._layout, layout_of(sample))
        columns = stack(samples, len(indices), self.layout)
        if not self.with_weights:
            return columns
        return {WEIGHTS: np.asarray([index < end for index in indices], np.float32)} | columns

    def _sample(self, index: int) -> Columns:
        sample = self._samples[index]
        if sample is None:
            raise BatchError(f"sample {index} is None; filter the samples before")
        return to_columns(sample)


class StreamBatches(Batches):
    """Batches of S streams: stream s yields rows `[s * B / S, (s + 1) * B / S)` of each."""

    def __init__(self, streams: Sequence[Iterable[object]], **settings: Any):
        super().__init__(**settings)
        self._streams = [Stream(stream, once=self.once) for stream in streams]

    @cached_property
    def _first(self) -> Columns:
        process, processes = (jax.process_index(), jax.process_count()) if is_multiprocess() else (0, 1)
        stream = process * len(self._streams) // processes  # most likely one that this process reads
        with self._reading(0, stream):
            return self._streams[stream].peek()

    @property
    def global_batch_size(self) -> int:
        """Rows of the first batch of all streams."""
        return num_rows(self._first) * len(self._streams)

    @property
    def layout(self) -> Layout:
        """Columns of the first batch."""
        return rows_layout(self._first)

    @property
    def description(self) -> dict[str, object]:
        """With the number of streams."""
        return {**super().description, "streams": len(self._streams)}

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """See `Batches`."""
        self.left_out = 0
        batches = ahead(self._read(rows, position, count))
        if not (self.once and len(self._streams) > 1 and is_multiprocess()):
            yield from batches
            return
        padding = pad(
            {name: np.zeros((0, *spec.shape[1:]), spec.dtype) for name, spec in self.shapes.items()}, len(rows)
        )
        for batch in chain(batches, repeat(None)):
            there = all_gather_json(batch is not None)
            if not (any(there) if self.with_weights else all(there)):
                self.left_out += len(rows) if batch else 0
                return
            yield batch or (padding, position)

    def _read(self, rows: Sequence[int], position: Position, count: int | None) -> Iterator[tuple[Columns, Position]]:
        size = self.global_batch_size // len(self._streams)
        records = position.streams or [None] * len(self._streams)
        places: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row // size, []).append(place)
        readers = {}
        for stream in places:
            with self._reading(position.step, stream):
                say = partial(self._say, stream)
                readers[stream] = self._streams[stream].read(position.step, records[stream], say)
        for step, after in self._steps(position, count):
            parts: dict[int, Columns] = {}
            latest: list[Record | None] = [None] * len(self._streams)
            for stream, reader in readers.items():
                with self._reading(step, stream):
                    if (read := next(reader, None)) is None:
                        continue
                    parts[stream], latest[stream] = read
            if not parts:
                return
            if self.once and not self.with_weights:
                found = [num_rows(part) for part in parts.values()]
                if found != [size] * len(readers):
                    self.left_out += sum(found)
                    continue
            columns = {name: np.zeros((len(rows), *spec.shape[1:]), spec.dtype) for name, spec in self.shapes.items()}
            for stream, part in parts.items():
                with self._reading(step, stream):
                    part = take(self._whole(part, size), [rows[place] % size for place in places[stream]])
                for name, array in part.items():
                    columns[name][places[stream]] = array
            yield columns, replace(after, streams=latest)

    def _say(self, stream: int, line: str) -> None:
        self.report(f"{self._name(stream)}: {line}")

    def _reading(self, step: int, stream: int = 0) -> AbstractContextManager[None]:
        return reading(f"{self._name(stream)}, step {step + 1}")

    def _name(self, stream: int) -> str:
        return self.name if len(self._streams) == 1 else f"{self.name}[{stream}]"


def ahead(items: Iterator[T], count: int = 2) -> Iterator[T]:
    """Yields items, and reads `count` ahead in a thread."""
    end: Any = object()
    pool = ThreadPoolExecutor(1)
    try:
        pending = deque(pool.submit(next, items, end) for _ in range(count))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, items, end))
            yield item
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


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
    settings: dict[str, Any] = {"name": _name_of(source), "batch_size": batch_size}
    settings |= {"with_weights": with_weights, "once": once, "report": report}
    is_data = hasattr(source, "__iter__") or hasattr(source, "__getitem__")
    if callable(source) and (isinstance(source, type) or not is_data):
        if parameters := _parameters(source):
            return FunctionBatches(source, by_rows="rows" in parameters, **settings)
        with reading(settings["name"]):
            made = source()
        if isinstance(made, Mapping):
            raise BatchError(
                f"{settings['name']} returned one batch; with a parameter `step` it is called for each step"
            )
        source = _Again(source) if isinstance(made, Iterator) else made
    if isinstance(source, list | tuple) and not all(isinstance(each, Mapping | tuple) for each in source):
        return StreamBatches(
            [_stream(each, once, f"{settings['name']}[{i}]") for i, each in enumerate(source)], **settings
        )
    with reading(settings["name"]):
        if not _is_dataset(source):
            return StreamBatches([_stream(source, once, settings["name"])], **settings)
        rows = len(source)
    if not rows:
        raise BatchError(f"{settings['name']} has no rows")
    is_grain, endless = isinstance(source, grain.MapDataset), rows == sys.maxsize
    if once and endless:
        raise BatchError(f"{settings['name']} has no end; leave out repeat() for an evaluation")
    if once or endless:
        samples = source
    else:
        samples = source.repeat() if is_grain else shuffled([source], [1.0], seed)
    options = {"options": TOGETHER} if is_grain else {}
    return SampleBatches(samples, num_rows=None if endless else rows, **options, **settings)


def rows_layout(columns: Columns) -> Layout:
    """Returns shapes and dtypes of the rows of a batch."""
    return {name: (array.shape[1:], array.dtype) for name, array in columns.items()}


def _parameters(function: Callable[..., object]) -> list[str]:
    # Which of step and rows a function takes.
    try:
        parameters = dict(inspect.signature(function).parameters)
    except ValueError:  # some functions in C
        return ["step"]
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [name for name, each in parameters.items() if each.kind not in kinds]
    required = [name for name in names if parameters[name].default is inspect.Parameter.empty]
    if not required and names[:1] != ["step"]:
        return []
    if set(required[1:]) <= {"rows"} and parameters[names[0]].kind is not inspect.Parameter.KEYWORD_ONLY:
        return ["step", "rows"] if "rows" in names[1:] else ["step"]
    raise BatchError(
        f"{_name_of(function)} takes ({', '.join(names)}); it must take (step) or (step, rows), or nothing if it yields "
        "batches"
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


def _stream(source: Any, once: bool, name: str) -> Iterable[object]:
    if not hasattr(source, "__iter__") or hasattr(source, "shape") or isinstance(source, str):
        raise BatchError(f"{name} is a {type(source).__name__}, which does not yield batches")
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and _is_dataset(source):
        raise BatchError(f"{name} is a dataset of samples; give the whole dataset, which jaxtp splits by itself")
    if once and isinstance(source, Iterator):
        raise BatchError(
            f"{name} is an iterator, and each evaluation reads it again; give an object whose iter() begins anew"
        )
    return source


@dataclass(frozen=True)
class _Again:
    make: Callable[[], Iterator[object]]

    def __iter__(self) -> Iterator[object]:
        return self.make()


def _required(value: int | None) -> int:
    if value is None:
        raise BatchError("a number is missing: batch_size, or the number of batches")
    return value


def _name_of(source: object) -> str:
    if code := getattr(source, "__code__", None):
        return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    kind = type(source)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library in ("builtins", "__main__") else f"{library} {kind.__name__}"
