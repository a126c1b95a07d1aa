"""Batches of samples on the mesh, read ahead of the steps that need them."""

from collections.abc import Iterator

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtp.collectives import batch_spec
from jaxtp.data.rows import SEGMENTS, Row, Samples

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
    shape = (global_batch_size, len(samples[0]["inputs"]))
    for local in local_batches(samples, _local_rows(sharding, shape), global_batch_size, start, count):
        yield {name: jax.make_array_from_process_local_data(sharding, array, shape) for name, array in local.items()}


def local_batches(samples: Samples, rows: range, global_batch_size: int, start: int, count: int) -> Iterator[Row]:
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


def _local_rows(sharding: NamedSharding, shape: tuple[int, int]) -> range:
    """Returns the rows of a batch that this process's devices hold; contiguous, for tp varies fastest in the mesh."""
    slices = [index[0] for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    return range(min(s.start or 0 for s in slices), max(s.stop or shape[0] for s in slices))
