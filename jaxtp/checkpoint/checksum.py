"""A checksum of an array, the same however it is split over devices, computed where it lies.

The bits of each element are mixed with its position (the finaliser of MurmurHash3, Austin Appleby, public domain) and
summed modulo 2^32, twice with different seeds: integer sums do not depend on their order, so each device sums its part.
One changed bit escapes with a probability of 2^-64.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

_SEEDS = (0x9E3779B9, 0x7F4A7C15)
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(arrays: Mapping[str, Array]) -> dict[str, str]:
    """16 hexadecimal digits for each array; of elements of at most 4 bytes."""
    sums = jax.device_get(_sums(dict(arrays)))
    return {name: "".join(f"{int(word):08x}" for word in words) for name, words in sums.items()}


@jax.jit
def _sums(arrays: dict[str, Array]) -> dict[str, list[Array]]:
    return {name: [_sum(array, seed) for seed in _SEEDS] for name, array in arrays.items()}


def _sum(array: Array, seed: int) -> Array:
    bits = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(bits, _UNSIGNED[bits.dtype.itemsize]).astype(jnp.uint32)
    position = jnp.full(array.shape, seed, jnp.uint32)
    for dim in range(array.ndim):
        position = _mix(position + lax.broadcasted_iota(jnp.uint32, array.shape, dim))
    return jnp.sum(_mix(bits ^ position), dtype=jnp.uint32)


def _mix(x: Array) -> Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
