"""Batches of samples on the mesh, read ahead of the steps that need them.

A process reads the rows that its own devices hold, each of them once, however the devices lie along the axes of the
mesh, and over however many devices a row is copied. A range from the first to the last of them would not do, because
the order of devices along dp and fsdp may be any.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec
from jaxtp.data.rows import SEGMENTS, Row, Samples

Index: TypeAlias = tuple[slice, ...]

Batch = dict[str, jax.Array]
"""The arrays of its rows, `[B, T]` int32, split over (dp, fsdp)."""


def batches(samples: Samples, mesh: Mesh, *, global_batch_size: int, start: int, count: int) -> Iterator[Batch]:
    """Yields batches on the mesh, read ahead by Grain's threads; each process reads its own rows.

    Args:
      samples: rows, by global sample index.
      mesh: the mesh that the batch is split over.
      global_batch_size: B, the number of sequences in a batch over all processes.
      start: global index of the first sample.
      count: number of batches.
    """
    sharding = NamedSharding(mesh, batch_spec(None))
    held = sharding.addressable_devices_indices_map((global_batch_size, 1))
    rows = held_rows(held.values(), global_batch_size)
    for local in local_batches(samples, rows, global_batch_size, start, count):
        yield {name: _on_mesh(array, rows, sharding, global_batch_size) for name, array in local.items()}


def local_batches(
    samples: Samples, rows: Sequence[int], global_batch_size: int, start: int, count: int
) -> Iterator[Row]:
    """Yields the given rows of each batch, `[len(rows), T]`, on the host."""

    def read(batch: int) -> Row:
        first = start + int(batch) * global_batch_size
        read = [samples[first + row] for row in rows]
        return {name: np.stack([row[name] for row in read]) for name in read[0]}

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.range(count).map(read).to_iter_dataset(options))


def abstract_batch(
    mesh: Mesh, global_batch_size: int, sequence_length: int, *, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes, dtype and sharding of a batch, to compile a step with."""
    sharding = NamedSharding(mesh, batch_spec(None))
    tokens = jax.ShapeDtypeStruct((global_batch_size, sequence_length), np.int32, sharding=sharding)
    return dict.fromkeys(("inputs", "labels", *([SEGMENTS] if packed else [])), tokens)


def held_rows(indices: Iterable[Index | None], global_batch_size: int) -> list[int]:
    """Returns the rows of a batch that devices hold, ascending, each of them once.

    Args:
      indices: part of the batch that each device holds: slices of its rows and of their tokens.
      global_batch_size: B.
    """
    held = {_bounds(index, global_batch_size) for index in indices if index is not None}
    return sorted({row for bounds in held for row in range(*bounds)})


def _on_mesh(array: NDArray[np.int32], rows: Sequence[int], sharding: NamedSharding, size: int) -> jax.Array:
    """Returns a batch of `size` rows on the mesh, from those of them that this process holds.

    Args:
      array: `[len(rows), T]`.
      rows: the place of each in the batch, ascending.
      sharding: the sharding of the batch.
      size: B.
    """

    def part(index: Index | None) -> NDArray[np.int32]:
        assert index is not None
        first, last = _bounds(index, size)
        at = bisect_left(rows, first)
        return array[at : at + last - first, index[1]]

    return jax.make_array_from_callback((size, array.shape[1]), sharding, part)


def _bounds(index: Index, size: int) -> tuple[int, int]:
    """Returns the first row of a part, and the row after its last."""
    first, last, _ = index[0].indices(size)
    return first, last
