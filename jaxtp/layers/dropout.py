"""Dropout whose mask is that of the global array, on every mesh."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import constrain


def dropout(x: Array, rate: float, key: Array | None, spec: PartitionSpec) -> Array:
    """Zeroes each element with probability `rate` and scales the others by `1 / (1 - rate)`.

    Each device draws its own part of one global mask: JAX's counter-based generator needs no communication for it
    (`jax_threefry_partitionable`).

    Args:
      x: a global activation.
      rate: probability of zero.
      key: None leaves `x` as it is (evaluation).
      spec: how `x` is split, so that the mask is split alike.
    """
    if key is None or rate == 0:
        return x
    keep = constrain(jax.random.bernoulli(key, 1 - rate, x.shape), spec)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
