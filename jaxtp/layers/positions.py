"""Positions of tokens: documents, the keys that a query sees, and dropout by position.

`segments` `[B, T]` mark the documents of a row: integers, equal within a document and different
between neighbours, 0 for padding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import constrain


def segment_positions(segments_BT: Array) -> Array:
    """Returns each token's position in its document, `[B, T]`."""
    index = jnp.arange(segments_BT.shape[1])
    begins = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    begins = begins.at[:, 0].set(True)
    begin = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    return index - begin


class Part(NamedTuple):
    """Positions of a device's queries and first key."""

    queries: Array  # position of each query, `[Tq]` int32, ascending
    first_key: Array | int
    """Position of the first key; the others follow one by one. Keys before position 0 are
    masked."""


def key_ranges(
    shape: tuple[int, ...],
    num_keys: int,
    window: int | None,
    segments_BT: Array | None,
    part: Part | None = None,
) -> tuple[Array, Array]:
    """Returns the indices of the first and last key that each query sees.

    Both are `[B, Tq]`, non-decreasing along Tq. The last is before the first if a query sees
    nothing; attention then returns zero. These ranges are all that kernels know about windows,
    documents, cp, halos and zigzag order. `shape` is `(B, Tq)`; segments are of whole sequences.
    """
    queries, first_key = part or (jnp.arange(shape[1], dtype=jnp.int32), 0)  # positions
    begin = jnp.zeros(shape, jnp.int32)
    if segments_BT is not None:
        begin = jnp.arange(segments_BT.shape[1]) - segment_positions(segments_BT)
        if part is not None:
            begin = jnp.take(begin, part.queries, axis=1, mode="clip")
    if window is not None:
        begin = jnp.maximum(begin, queries - (window - 1))
    first = jnp.clip(begin - first_key, 0, num_keys)
    last = jnp.clip(queries - first_key, -1, num_keys - 1)
    return first.astype(jnp.int32), jnp.broadcast_to(last.astype(jnp.int32), shape)


def query_ranges(
    keys_of_queries: tuple[Array, Array],
    num_keys: int,
    window: int | None,
    segments_BT: Array | None,
    part: Part | None = None,
) -> tuple[Array, Array]:
    """Returns the indices of the first and last query that sees each key.

    Both are `[B, S]`, non-decreasing along S. `keys_of_queries` is the result of `key_ranges`.
    """
    first, last = keys_of_queries
    if part is None:
        # In the mirror image of a sequence, queries are keys. It needs no search.
        mirrored_segments = None if segments_BT is None else segments_BT[:, ::-1]
        mirrored, _ = key_ranges(first.shape, num_keys, window, mirrored_segments)
        return last, num_keys - 1 - mirrored[:, ::-1]
    keys = jnp.arange(num_keys, dtype=jnp.int32)
    find = partial(jnp.searchsorted, v=keys, method="scan_unrolled")
    find_begin = jax.vmap(partial(find, side="left"))
    find_end = jax.vmap(partial(find, side="right"))
    begin = find_begin(last).astype(jnp.int32)
    end = find_end(first).astype(jnp.int32)
    return begin, end - 1


def segment_mask(segments_BT: Array) -> Array:
    """Returns whether query and key are in the same document, `[B, 1, T, S]`."""
    begins = segments_BT[:, 1:] != segments_BT[:, :-1]
    document = jnp.cumsum(begins, axis=1)
    document = jnp.pad(document, ((0, 0), (1, 0)))
    same_document = document[:, :, None] == document[:, None, :]
    return same_document[:, None]


def dropout(
    x: Array,
    rate: float,
    keys: Array | None,
    spec: PartitionSpec,
    positions_T: Array,
) -> Array:
    """Zeroes elements of a global `x` with probability `rate`, and scales the others by 1/(1-rate).

    A token's mask depends only on its row's key, from `keys` `[B]`, and its position: not on the
    mesh, micro-batch or token order. Without keys dropout is off. Drawing the mask needs no
    communication.
    """
    if keys is None or rate == 0:
        return x

    def keep_token(row_key: Array, position: Array) -> Array:
        key = jax.random.fold_in(row_key, position)
        return jax.random.bernoulli(key, 1 - rate, x.shape[2:])

    keep_row = jax.vmap(keep_token, in_axes=(None, 0))
    keep_all = jax.vmap(keep_row, in_axes=(0, None))
    keep = constrain(keep_all(keys, positions_T), spec)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
