"""Dropout whose mask is that of the global array, on every mesh."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import constrain


def dropout(x: Array, rate: float, keys: Array | None, spec: PartitionSpec) -> Array:
    """Zeroes each element with probability `rate` and scales the others by `1 / (1 - rate)`.

    Each row of the batch has its own key, so that its mask depends neither on the mesh nor on the micro-batch that the
    row is in. A device draws its own part of the mask: JAX's counter-based generator needs no communication for it.

    Args:
      x: a global activation.
      rate: probability of zero.
      keys: one for each row, `[B]`; None leaves `x` as it is (evaluation).
      spec: how `x` is split, so that the mask is split alike.
    """
    if keys is None or rate == 0:
        return x
    draw = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))
    keep = constrain(draw(keys), spec)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
