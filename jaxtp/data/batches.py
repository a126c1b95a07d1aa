"""Batches of rows on the host: what a run reads, from any source (`sources.py`), and where it is."""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count as count_from
from itertools import islice
from typing import Any, ClassVar, TypeAlias

import jax
import numpy as np

from jaxtp.data.columns import (
    WEIGHTS,
    BatchError,
    Columns,
    Layout,
    check_layout,
    count_rows,
    layout_of,
    pad,
    reading,
    short_batch,
    to_columns,
)
from jaxtp.data.samples import ORDER, SHUFFLE, shuffle_identity
from jaxtp.distributed.agreement import all_gather_json

Record: TypeAlias = dict[str, Any]
"""JSON on the last batch of a stream or function, with its checksum as `crc32`."""

Read: TypeAlias = tuple[Columns, list[Record | None] | None]
"""Rows of a batch, and `Position.streams` after it."""

_AHEAD = 4
"""Number of batches that are read ahead."""


@dataclass(frozen=True)
class Position:
    """A place between two batches; a checkpoint stores it as JSON."""

    step: int = 0
    """Number of batches so far."""
    sample: int = 0
    """Number of rows so far."""
    streams: list[Record | None] | None = None
    """A record of each stream, None if this process does not read it; or one record of a function."""

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
                    f"{name}, step {self.step}: processes read different rows; give the same whole source in each "
                    "process, with the same seed; jaxtp gives each device its rows"
                )


@dataclass(kw_only=True, eq=False)
class Batches(ABC):
    """A source of batches."""

    kind: ClassVar[str]
    """Name in descriptions."""

    name: str
    """For messages."""
    batch_size: int | None = None
    """Number of rows; None if the first batch decides it, and is not read yet."""
    with_weights: bool = False
    """Whether short batches are padded; then each batch has `WEIGHTS`."""
    num_rows: int | None = None
    """In an epoch, if known."""
    threads: int = 1
    """Number of threads that read batches."""
    _layout: Layout = field(default_factory=dict, init=False)  # of the first row that is read

    @property
    def global_batch_size(self) -> int:
        """Number of rows of a batch."""
        return self.batch_size or self._look()[1]

    @property
    def layout(self) -> Layout:
        """Columns of the first row, without `WEIGHTS` that jaxtp adds."""
        return self._layout or self._look()[0]

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
        return {"kind": self.kind, "columns": columns}

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """Yields these rows of `count` batches from a position, and the position after each.

        It reads ahead. None reads to the end of the source, which may have none.

        Raises:
          BatchError: the source raised an error, or a batch cannot be used.
          EndOfDataError: an iterator has fewer batches.
        """
        # All of a user's code runs in the pool, because the main thread has set a mesh.
        pool = ThreadPoolExecutor(self.threads)
        try:
            read = pool.submit(self._open, rows, position).result()
            steps = islice(count_from(position.step), count)
            pending = deque(pool.submit(read, step) for step in islice(steps, _AHEAD))
            step, sample = position.step, position.sample
            while pending and (batch := pending.popleft().result()) is not None:
                pending.extend(pool.submit(read, step) for step in islice(steps, 1))
                step, sample = step + 1, sample + self.global_batch_size
                yield batch[0], Position(step, sample, batch[1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def _peek(self) -> tuple[Columns, int]:
        """Reads first rows; returns them and the number of rows of a batch."""

    @abstractmethod
    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        """Returns a function that reads the batch of a step, or None after the end; its calls are in order."""

    def _look(self) -> tuple[Layout, int]:
        rows, self.batch_size = self._peek()
        self._layout = layout_of(rows)
        return self._layout, self.batch_size

    def _reading(self, step: int) -> AbstractContextManager[None]:
        return reading(f"{self.name}, step {step + 1}")

    def _whole(self, columns: Columns, size: int) -> Columns:
        # Checks rows, and pads them to `size`.
        rows, layout = count_rows(columns), layout_of(columns)
        self._layout = self._layout or layout
        check_layout(self._layout, layout)
        if rows > size:
            raise BatchError(f"has {rows} rows, more than the {size} of the first batch")
        if self.with_weights:
            columns = {WEIGHTS: np.ones(rows, np.float32)} | columns
        elif rows < size:
            raise BatchError(short_batch(rows))
        return pad(columns, size)

    def _placed(self, size: int, parts: Iterable[tuple[list[int], Columns]]) -> Columns:
        # Joins rows at their places, with zeros elsewhere. Copies each part at once: a source may use its arrays again.
        joined: Columns = {}
        for places, columns in parts:
            joined = joined or self._zeros(size)
            for name, array in columns.items():
                joined[name][places] = array
        return joined or self._zeros(size)

    def _zeros(self, size: int) -> Columns:
        return {name: np.zeros((size, *spec.shape[1:]), spec.dtype) for name, spec in self.shapes.items()}


@dataclass(kw_only=True, eq=False)
class SampleBatches(Batches):
    """Batches of samples by index."""

    kind = "samples"

    samples: Sequence[Any]
    end: int = sys.maxsize
    """Number of samples."""

    @property
    def description(self) -> dict[str, object]:
        """With the number of rows, and the identity of their order."""
        order = {"algorithm": f"grain {version('grain')}", "sha256": shuffle_identity()}
        return {**super().description, "rows": self.num_rows, ORDER: {SHUFFLE: order}}

    def _peek(self) -> tuple[Columns, int]:
        if self.batch_size is None:
            raise BatchError(f"{self.name} has samples; set the rows of a batch (batch_size)")
        with self._reading(0):
            return self._sample(0), self.batch_size

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        size = self.global_batch_size
        if self.end < size and not self.with_weights:
            raise BatchError(f"{self.name}: a batch of {size} rows {short_batch(self.end)}")

        def read(step: int) -> Read | None:
            first = position.sample + (step - position.step) * size
            if self.end - first < (1 if self.with_weights else size):
                return None
            indices = [(place, first + row) for place, row in enumerate(rows) if first + row < self.end]
            with self._reading(step):
                samples = (([place], self._whole(self._sample(index), 1)) for place, index in indices)
                return self._placed(len(rows), samples), None

        return read

    def _sample(self, index: int) -> Columns:
        # As a batch of one row.
        sample = self.samples[index]
        if sample is None:
            raise BatchError(f"sample {index} is None; filter the samples before")
        return {name: array[None] for name, array in to_columns(sample).items()}


def token_batches(samples: Sequence[Any], size: int, end: int = sys.maxsize) -> SampleBatches:
    """Returns batches of `Samples`, in their order."""
    return SampleBatches(samples=samples, end=end, threads=2, name="data", batch_size=size)
