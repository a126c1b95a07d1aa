"""Activations between parallel layers: split along the sequence, with several documents in a row, and dropout.

Sequence parallelism splits them over tp along the sequence: norms, dropout and residual sums then work on `1/tp` of the
tokens; a column layer gathers them (all-gather) and a row layer leaves its sum split (reduce-scatter). Korthikanti et
al., arXiv 2205.05198.

In a row of several documents, attention stays inside each, and its positions count from its beginning. `segments`
`[B, T]` are integers that are equal within a document and differ between neighbours: 1, 2, ... as `data/packing.py`
makes them, with 0 for padding.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import axis_size, batch_spec, constrain
from jaxtp.mesh import SEQUENCE

SEQUENCE_DIM = 1

SequenceParallel = bool | None
"""On, off, or None: on wherever tp > 1 divides the sequence of the input, so that decoding a token is off."""


def sequence_dim(setting: SequenceParallel, shape: tuple[int, ...]) -> int | None:
    """The dim of an activation that is split over tp between layers, or None.

    Args:
      setting: as the layer was told.
      shape: of the global activation or ids, `[B, T, ...]`.
    """
    return SEQUENCE_DIM if is_split(setting, shape[SEQUENCE_DIM], axis_size(*SEQUENCE)) else None


def is_split(setting: SequenceParallel, length: int, tp: int) -> bool:
    """Returns whether a sequence of so many tokens is split over so many devices."""
    return tp > 1 and length % tp == 0 if setting is None else setting


def activation_spec(sequence: int | None) -> PartitionSpec:
    """The spec of `[B, T, D]` between layers, of which `sequence_dim` says whether T is split over tp."""
    return batch_spec(None if sequence is None else SEQUENCE, None)


def segment_positions(segments_BT: Array) -> Array:
    """`[B, T]`: how far each position is from the first one of its document."""
    index = jnp.arange(segments_BT.shape[1])
    begins = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    start = jax.lax.cummax(jnp.where(begins.at[:, 0].set(True), index, 0), axis=1)
    return index - start


def seen_range(rows: int, length: int, window: int | None, segments_BT: Array | None) -> tuple[Array, Array]:
    """Returns the first key that each query sees and the last query that sees each key, `[B, T]` both, never falling.

    A query sees itself and what comes before it: in its document, and in a window of so many positions.
    """
    index = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    before, after = index, length - 1 - index
    if segments_BT is not None:
        before, after = segment_positions(segments_BT), segment_positions(segments_BT[:, ::-1])[:, ::-1]
    if window is not None:
        before, after = jnp.minimum(before, window - 1), jnp.minimum(after, window - 1)
    return index - before, index + after


def segment_mask(segments_BT: Array) -> Array:
    """Returns whether a query and a key are of one document, `[B, 1, T, S]`; neighbours differ in their number."""
    changes = segments_BT[:, 1:] != segments_BT[:, :-1]
    document = jnp.pad(jnp.cumsum(changes, axis=1), ((0, 0), (1, 0)))
    return (document[:, :, None] == document[:, None, :])[:, None]


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
