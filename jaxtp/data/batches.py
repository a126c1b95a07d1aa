"""Batches of rows on the host, and the position of a run in them.

Rows may come from any source (`sources.py`).
"""

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from typing import Any, TypeAlias

import grain
import jax
import numpy as np

from jaxtp.data.columns import (
    WEIGHTS,
    BatchError,
    Columns,
    check_columns,
    layout_of,
    reading,
    to_columns,
    too_short,
)
from jaxtp.data.rows import Samples
from jaxtp.data.samples import ORDER, SHUFFLE, shuffle_description, shuffled
from jaxtp.distributed.agreement import all_gather_json

Record: TypeAlias = dict[str, Any]
"""A record of a stream's or function's last batch, in JSON, with its checksum as `crc32`."""

Read: TypeAlias = tuple[Columns, list[Record | None] | None]
"""The rows of a batch, and `Position.streams` after it."""


@dataclass(frozen=True)
class Position:
    """A place between two batches; a checkpoint stores it as JSON."""

    step: int = 0  # number of batches so far
    sample: int = 0  # number of rows so far
    streams: list[Record | None] | None = None
    """A record of each stream, or None for a stream that this process does not read; or one record
    of a function."""

    def gathered(self) -> "Position":
        """Returns the position with all processes' records, for a checkpoint.

        All processes must call it.
        """
        if self.streams is None or len(self.streams) == 1:
            return self
        records = [
            next(filter(None, records_of_stream), None)
            for records_of_stream in zip(*all_gather_json(self.streams), strict=True)
        ]
        return replace(self, streams=records)

    def check_agreement(self, name: str) -> None:
        """Raises `BatchError` if processes read other rows from one source.

        All processes must call it.
        """
        checksums = [record and record["crc32"] for record in self.streams or ()]
        for stream_checksums in zip(*all_gather_json(checksums), strict=True):
            if len(set(stream_checksums) - {None}) > 1:
                raise BatchError(
                    f"{name}, step {self.step}: processes read different rows; give the same whole "
                    "source in each process, with the same seed; jaxtp gives each device its rows"
                )


class Batches(ABC):
    """A source of batches.

    Attributes:
      name: the source's name in messages.
      global_batch_size: number of rows of a batch.
      with_weights: whether short batches are padded; then each batch has the column `WEIGHTS`.
      num_rows: number of rows in an epoch, if known.
      description: a description in JSON, which is compared when a run resumes.
    """

    def __init__(self, name: str, first: Columns, size: int | None, identity: Mapping[str, object]):
        if size is None:
            raise BatchError(
                f"{name} has rows, not batches: set the number of rows of a batch (batch_size)"
            )
        if size == 0:
            raise BatchError(
                f"{name}: its first batch has no rows; give at least one for each device of dp "
                "and fsdp"
            )
        self.name = name
        self.global_batch_size = size
        self.with_weights = False
        self.num_rows: int | None = None
        self._threads = 1
        self._layout = layout_of(first)
        columns = {
            name: f"{dtype}{list(shape)}" for name, (shape, dtype) in sorted(self._layout.items())
        }
        self.description = {**identity, "columns": columns}

    @property
    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Abstract arrays of a whole batch."""
        layout = self._layout
        if self.with_weights:
            layout = {WEIGHTS: ((), np.dtype(np.float32)), **layout}
        return {
            name: jax.ShapeDtypeStruct((self.global_batch_size, *shape), dtype)
            for name, (shape, dtype) in layout.items()
        }

    def read(
        self, rows: Sequence[int], position: Position, count: int | None = None
    ) -> Iterator[tuple[Columns, Position]]:
        """Yields these rows of `count` batches from a position, and the position after each.

        Reads four batches ahead. With `count` None it reads to the end of the source, if any.

        Raises:
          BatchError: the source raised an error, or a batch cannot be used.
          EndOfDataError: an iterator has fewer batches.
        """
        # All of a user's code runs in the pool, because the main thread has set a mesh.
        pool = ThreadPoolExecutor(self._threads)
        try:
            read = pool.submit(self._open, rows, position).result()
            steps = islice(count_from(position.step), count)
            pending = deque(pool.submit(read, step) for step in islice(steps, 4))
            step = position.step
            sample = position.sample
            while pending and (batch := pending.popleft().result()) is not None:
                pending.extend(pool.submit(read, step) for step in islice(steps, 1))
                step += 1
                sample += self.global_batch_size
                yield batch[0], Position(step, sample, batch[1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @abstractmethod
    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        """Returns a function that reads the batch of a step, or None after the end.

        The caller reads the steps in order.
        """

    def _zeros(self, rows: int) -> Columns:
        return {
            name: np.zeros((rows, *spec.shape[1:]), spec.dtype)
            for name, spec in self.shapes.items()
        }

    def _put(self, into: Columns, columns: Columns, size: int, rows: Mapping[int, int]) -> None:
        # Checks columns of `size` rows, and copies rows to their places. Rows that a short batch
        # lacks stay zero.
        num_rows = check_columns(columns, self._layout)
        if num_rows > size:
            raise BatchError(f"has {num_rows} rows, more than the {size} of the first batch")
        if self.with_weights:
            columns = {WEIGHTS: np.ones(num_rows, np.float32)} | columns
            rows = {place: row for place, row in rows.items() if row < num_rows}
        elif num_rows < size:
            raise BatchError(too_short(num_rows))
        places = _index(list(rows))
        indices = _index(list(rows.values()))
        for name, array in columns.items():
            into[name][places] = array[indices]


def _index(numbers: list[int]) -> slice | list[int]:
    # Returns consecutive numbers as a slice, which NumPy copies at once.
    if numbers and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return slice(numbers[0], numbers[-1] + 1)
    return numbers


class SampleBatches(Batches):
    """Batches of a dataset: once, or endless.

    Endless batches are shuffled by `seed`, differently in each epoch, unless they come from a
    `grain.MapDataset`, which has its own order.
    """

    def __init__(
        self, name: str, dataset: Any, size: int | None, *, seed: int = 0, once: bool = False
    ):
        with reading(name):
            rows = len(dataset)
        is_grain = isinstance(dataset, grain.MapDataset)
        endless = rows == sys.maxsize
        if not rows:
            raise BatchError(f"{name} has no rows")
        if once and endless:
            raise BatchError(f"{name} has no end; leave out repeat() for an evaluation")
        if not (once or endless):
            dataset = dataset.repeat() if is_grain else shuffled([dataset], [1.0], seed)
        self._dataset = dataset
        self._end = rows if once else sys.maxsize
        with reading(name, 0):
            first = self._sample(0)
        num_rows = None if endless else rows
        order = {SHUFFLE: shuffle_description()}
        super().__init__(name, first, size, {"kind": "samples", "rows": num_rows, ORDER: order})
        self.num_rows = num_rows
        if is_grain:  # a user's dataset need not allow several threads
            self._threads = 2

    def _open(self, rows: Sequence[int], position: Position) -> Callable[[int], Read | None]:
        size = self.global_batch_size
        min_rows = 1 if self.with_weights else size
        if self._end < min_rows:
            raise BatchError(f"{self.name}: a batch of {size} rows {too_short(self._end)}")

        def read(step: int) -> Read | None:
            first = position.sample + (step - position.step) * size
            if self._end - first < min_rows:
                return None
            columns = self._zeros(len(rows))
            with reading(self.name, step):
                for place, row in enumerate(rows):
                    if first + row < self._end:
                        self._put(columns, self._sample(first + row), 1, {place: 0})
            return columns, None

        return read

    def _sample(self, index: int) -> Columns:
        # Returns a sample as a batch of one row.
        sample = self._dataset[index]
        if sample is None:
            raise BatchError(f"sample {index} is None; filter the samples before")
        return {name: array[None] for name, array in to_columns(sample).items()}


def token_batches(samples: Samples, size: int, *, once: bool = False) -> SampleBatches:
    """Returns batches of samples in their order."""
    return SampleBatches("data", samples, size, once=once)
