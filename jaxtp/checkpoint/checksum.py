"""A checksum of an array, the same however it is split over devices, computed where it lies; or one of each part.

The bits of each element are mixed with its position (the finaliser of MurmurHash3, Austin Appleby, public domain) and
summed modulo 2^32, twice with different seeds: integer sums do not depend on their order, so each device sums its part.
A change of one element never escapes, because mixing has an inverse; one of several escapes with a probability of 2^-64
(2^-32 in `device_checksums`, which have one seed).

Whatever is restored is summed again where it lies before it is used.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxtp.collectives import device_view, vary_everywhere
from jaxtp.mesh import AXES

CHECKSUMS = "checksums"
"""Name of the module that sums what each device holds."""

_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15))
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Returns 16 hexadecimal digits for each array, whose elements have at most 4 bytes.

    One array at a time: what a compiler keeps in between is then at most of the size of the largest.
    """
    sums = {name: [int(_sum(array, seed)) for seed in _SEEDS] for name, array in arrays.items()}
    return {name: "".join(f"{word:08x}" for word in words) for name, words in sums.items()}


def device_checksums(arrays: Sequence[Array], specs: tuple[PartitionSpec, ...]) -> Array:
    """Returns a checksum of what each device holds of each array, uint32 `[arrays, devices]`; inside a `jax.jit`.

    Every device reads its own memory and sends nothing: where devices should hold copies, their numbers are equal only
    if the copies are. A column lies on the device that it is of, in the order of the mesh in context.

    Args:
      arrays: those to sum; their elements have at most 4 bytes.
      specs: how each is split.
    """

    def on_device(*shards: Array) -> Array:
        # At once: a loop over layers would have gradients written out before it, which the update makes as it goes.
        sums = [vary_everywhere(_sum_at_once(shard, jnp.asarray(_SEEDS[0]))) for shard in shards]
        return jnp.stack(sums)[:, None]

    out = PartitionSpec(None, AXES)
    columns: Array = device_view(on_device, CHECKSUMS, in_specs=specs, out_specs=out)(*arrays)
    return columns


@jax.jit
def _sum(array: Array, seed: np.uint32) -> Array:
    return _sum_from(array, jnp.asarray(seed))


def _sum_from(array: Array, seed: Array) -> Array:
    if array.ndim > 2:  # stacked layers, one at a time: less is kept in between
        layers = jnp.arange(array.shape[0], dtype=jnp.uint32)
        sums = lax.map(lambda layer: _sum_from(layer[0], _mix(seed + layer[1])), (array, layers))
        return jnp.sum(sums, dtype=jnp.uint32)
    return _sum_at_once(array, seed)


def _sum_at_once(array: Array, seed: Array) -> Array:
    """Returns what `_sum_from` does."""
    bits = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(bits, _UNSIGNED[bits.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.broadcast_to(seed, array.shape)
    for dim in range(array.ndim):
        position = _mix(position + lax.broadcasted_iota(jnp.uint32, array.shape, dim))
    return jnp.sum(_mix(bits ^ position), dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
