"""Reads batches of samples ahead of the training steps and places them on the mesh.

Each process reads only the rows of its devices, and each row once. The rows need not be contiguous:
the order of devices along dp and fsdp is arbitrary, and rows may be replicated.
"""

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jaxtp.collectives import batch_spec
from jaxtp.data.batches import Batches, Position
from jaxtp.data.columns import BatchError
from jaxtp.data.rows import SEGMENTS
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.mesh import batch_parts, mesh_sizes

Index: TypeAlias = tuple[slice, ...]

Batch = dict[str, jax.Array]  # `[B, ...]` arrays, split over (dp, fsdp)
_CHECK_EVERY = 256  # Number of batches between checks that processes read the same rows


def on_mesh(
    source: Batches,
    mesh: Mesh,
    position: Position,
    count: int | None = None,
    *,
    micro_batches: int = 1,
) -> Iterator[tuple[Batch, Position]]:
    """Yields batches from a position, split over (dp, fsdp), and the position after each.

    Args:
      count: maximum number of batches; None for a source that is read `once`.
      micro_batches: their number A; micro-batch i has rows `[i * B / A, (i + 1) * B / A)`.

    Raises:
      BatchError: the batch cannot be split, or processes read different rows, which is checked from
        time to time.
    """
    size = source.global_batch_size
    order = _order(size, batch_parts(mesh_sizes(mesh)), micro_batches)
    places = local_rows(
        NamedSharding(mesh, batch_spec()).addressable_devices_indices_map((size,)).values(), size
    )
    for number, (columns, after) in enumerate(source.read(order[places].tolist(), position, count)):
        if after.streams and number % _CHECK_EVERY == 0 and is_multiprocess():
            after.check_agreement(source.name)
        yield {name: _on_mesh(array, places, mesh, size) for name, array in columns.items()}, after


def _order(size: int, devices: int, micro_batches: int) -> NDArray[np.int64]:
    # Returns the row at each place of a batch, because a step splits the rows of each device into
    # micro-batches.
    if size % (devices * micro_batches):
        raise BatchError(
            f"a batch of {size} rows cannot be split over {devices} devices along dp and fsdp, and "
            f"{micro_batches} micro-batches (train.accumulation)"
        )
    return np.arange(size).reshape(micro_batches, devices, -1).swapaxes(0, 1).reshape(-1)


def abstract_batch(
    mesh: Mesh, global_batch_size: int, sequence_length: int, *, packed: bool = False
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns a batch of abstract arrays, for compilation."""
    tokens = jax.ShapeDtypeStruct((global_batch_size, sequence_length), np.int32)
    return split(dict.fromkeys(("inputs", "labels", *([SEGMENTS] if packed else [])), tokens), mesh)


def split(
    shapes: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch with the shardings of `on_mesh`."""
    return {name: spec.update(sharding=_sharding(mesh, spec.ndim)) for name, spec in shapes.items()}


def local_rows(indices: Iterable[Index | None], global_batch_size: int) -> list[int]:
    """Returns the distinct rows in some devices' slices, ascending."""
    bounds = {_bounds(index, global_batch_size) for index in indices if index is not None}
    return sorted({*itertools.chain.from_iterable(itertools.starmap(range, bounds))})


def _on_mesh(array: NDArray[Any], places: Sequence[int], mesh: Mesh, size: int) -> jax.Array:
    # Assembles a batch of `size` rows from this process's rows `[len(places), ...]`.
    def part(index: Index | None) -> NDArray[Any]:
        assert index is not None
        first, last = _bounds(index, size)
        at = bisect_left(places, first)
        return array[at : at + last - first]

    return jax.make_array_from_callback((size, *array.shape[1:]), _sharding(mesh, array.ndim), part)


def _sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    return NamedSharding(mesh, batch_spec(*[None] * (ndim - 1)))


def _bounds(index: Index, size: int) -> tuple[int, int]:
    first, last, _ = index[0].indices(size)
    return first, last
