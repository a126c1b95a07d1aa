"""Reads batches of samples ahead of the training steps and places them on the mesh.

Each process reads only its devices' rows, each once. The rows need not be contiguous: device order along dp and fsdp is
arbitrary, and rows may be replicated.
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
"""`[B, T]` int32 arrays, split over (dp, fsdp)."""


def batches(samples: Samples, mesh: Mesh, *, global_batch_size: int, start: int, count: int) -> Iterator[Batch]:
    """Yields `count` batches of `global_batch_size` rows from sample `start`."""
    sharding = NamedSharding(mesh, batch_spec(None))
    indices = sharding.addressable_devices_indices_map((global_batch_size, 1))
    rows = local_rows(indices.values(), global_batch_size)
    for local in local_batches(samples, rows, global_batch_size, start, count):
        yield {name: _on_mesh(array, rows, sharding, global_batch_size) for name, array in local.items()}


def local_batches(
    samples: Samples, rows: Sequence[int], global_batch_size: int, start: int, count: int
) -> Iterator[Row]:
    """Yields some rows of each batch on the host, `[len(rows), T]`."""

    def read(batch: int) -> Row:
        first = start + int(batch) * global_batch_size
        read = [samples[first + row] for row in rows]
        return {name: np.stack([row[name] for row in read]) for name in read[0]}

    options = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    return iter(grain.MapDataset.range(count).map(read).to_iter_dataset(options))


def abstract_batch(
    mesh: Mesh, global_batch_size: int, sequence_length: int, *, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch of abstract arrays, for compilation."""
    sharding = NamedSharding(mesh, batch_spec(None))
    tokens = jax.ShapeDtypeStruct((global_batch_size, sequence_length), np.int32, sharding=sharding)
    return dict.fromkeys(("inputs", "labels", *([SEGMENTS] if packed else [])), tokens)


def local_rows(indices: Iterable[Index | None], global_batch_size: int) -> list[int]:
    """Returns the distinct rows in some devices' slices, ascending."""
    bounds_of_devices = {_bounds(index, global_batch_size) for index in indices if index is not None}
    return sorted({row for bounds in bounds_of_devices for row in range(*bounds)})


def _on_mesh(array: NDArray[np.int32], rows: Sequence[int], sharding: NamedSharding, size: int) -> jax.Array:
    """Assembles a batch of `size` rows from this process's rows `[len(rows), T]`."""

    def part(index: Index | None) -> NDArray[np.int32]:
        assert index is not None
        first, last = _bounds(index, size)
        at = bisect_left(rows, first)
        return array[at : at + last - first, index[1]]

    return jax.make_array_from_callback((size, array.shape[1]), sharding, part)


def _bounds(index: Index, size: int) -> tuple[int, int]:
    first, last, _ = index[0].indices(size)
    return first, last
