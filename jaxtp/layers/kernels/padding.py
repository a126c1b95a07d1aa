"""Padding of arrays to whole blocks."""

from collections.abc import Mapping

import jax.numpy as jnp
from jax import Array


def round_up(length: int, block: int) -> int:
    """Returns the smallest multiple of `block` that is at least `length`."""
    return -(-length // block) * block


def pad_to(x: Array, sizes: Mapping[int, int], value: int = 0) -> Array:
    """Pads dims with `value`, at their ends, to sizes given by dim."""
    padding = [(0, 0)] * x.ndim
    for dim, size in sizes.items():
        padding[dim] = (0, size - x.shape[dim])
    return jnp.pad(x, padding, constant_values=value)


def pad_ranges(ranges: tuple[Array, Array], block: int, beyond: int) -> tuple[Array, Array]:
    """Pads the first and last indices that positions see, `[B, T]`, to whole blocks of positions.

    Padding sees nothing; no index reaches `beyond`.
    """
    first, last = ranges
    sizes = {1: round_up(first.shape[1], block)}
    return pad_to(first, sizes, beyond), pad_to(last, sizes, -1)
