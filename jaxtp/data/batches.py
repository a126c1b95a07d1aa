"""Batches of rows on the host: what a run reads, from any source (`sources.py`), and where it is."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import count as count_from
from typing import Any, ClassVar

import grain
import jax
import numpy as np

from jaxtp.data.columns import (
    WEIGHTS,
    BatchError,
    Columns,
    Layout,
    check_layout,
    layout_of,
    num_rows,
    pad,
    reading,
    rows_layout,
    short_batch,
    stack,
    to_columns,
)
from jaxtp.data.samples import ORDER, SHUFFLE, shuffle_identity
from jaxtp.distributed.agreement import all_gather_json

Record = dict[str, Any]
"""JSON on a stream's last batch, with its checksum as `crc32`."""


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
    """The setting; `global_batch_size` is the source's."""
    with_weights: bool = False
    """Whether short batches are padded; then each batch has `WEIGHTS`."""
    once: bool = False
    """Whether `read` ends after one pass in order, for evaluation."""
    report: Callable[[str], None] = print
    """Takes lines for the user."""
    num_rows: int | None = None
    """In an epoch, if known."""
    left_out: int = field(default=0, init=False)
    """Number of this process's rows that the last pass left out, since they did not fill a batch."""

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
        return {"kind": self.kind, "columns": columns}

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
            raise BatchError(short_batch(rows))
        return pad(columns, size)

    def _steps(self, position: Position, count: int | None) -> Iterator[tuple[int, Position]]:
        # Each step, and the position after it without streams.
        for done in range(count) if count is not None else count_from():
            after = position.sample + (done + 1) * self.global_batch_size
            yield position.step + done, Position(position.step + done + 1, after)

    def _reading(self, step: int) -> AbstractContextManager[None]:
        return reading(f"{self.name}, step {step + 1}")


@dataclass(kw_only=True, eq=False)
class SampleBatches(Batches):
    """Batches of samples by index: endless, or `num_rows` of them once."""

    kind = "samples"

    samples: Sequence[Any]
    threads: int = 1
    """Each reads a batch; a user's `__getitem__` need not be safe in several."""
    _layout: Layout = field(default_factory=dict, init=False)

    @property
    def global_batch_size(self) -> int:
        """The setting."""
        return required(self.batch_size)

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
            end = required(self.num_rows)
            whole = -(-end // size) if self.with_weights else end // size
            self.left_out = max(end - whole * size, 0)
            if not whole:
                raise BatchError(f"{self.name}: a batch of {size} rows {short_batch(end)}")
            count = whole if count is None else min(count, whole)

        def batch(index: int) -> Columns:
            first = position.sample + int(index) * size
            with self._reading(position.step + int(index)):
                return self._batch([first + row for row in rows], end)

        options = grain.ReadOptions(num_threads=self.threads, prefetch_buffer_size=4 * self.threads)
        batches = grain.MapDataset.range(required(count)).map(batch).to_iter_dataset(options)
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
        sample = self.samples[index]
        if sample is None:
            raise BatchError(f"sample {index} is None; filter the samples before")
        return to_columns(sample)


def token_batches(samples: Sequence[Any], size: int) -> SampleBatches:
    """Returns batches of `Samples`, in their order."""
    return SampleBatches(samples=samples, threads=2, name="data", batch_size=size)


def required(value: int | None) -> int:
    """Returns a number that is needed; raises `BatchError` if it is None."""
    if value is None:
        raise BatchError("a number is missing: batch_size, or the number of batches")
    return value
