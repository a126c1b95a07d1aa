"""Several documents in one row: attention stays inside each, and its positions count from its beginning.

`segments` `[B, T]` are integers that are equal within a document and differ between neighbours: 1, 2, ... as
`data/packing.py` makes them, with 0 for padding.
"""

import jax
import jax.numpy as jnp
from jax import Array


def segment_positions(segments_BT: Array) -> Array:
    """`[B, T]`: how far each position is from the first one of its document."""
    index = jnp.arange(segments_BT.shape[1])
    begins = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    start = jax.lax.cummax(jnp.where(begins.at[:, 0].set(True), index, 0), axis=1)
    return index - start


def segment_mask(segments_BT: Array) -> Array:
    """`[B, 1, T, S]`: whether a query and a key are of one document."""
    return (segments_BT[:, :, None] == segments_BT[:, None, :])[:, None]
