"""Activations between parallel layers: split along the sequence, with several documents in a row, and dropout.

Over cp each device has a part of every sequence (`layers/context.py`). Sequence parallelism splits that part over tp,
between parallel layers: norms, dropout and residual sums then work on `1/tp` of the tokens; a column layer gathers them
(all-gather) and a row layer leaves its sum split (reduce-scatter). Korthikanti et al., arXiv 2205.05198.

Whether a sequence is split is decided by the input: a layer that is told nothing splits activations wherever tp > 1
divides the sequence, so that the same model decodes one token and trains on thousands.

In a row of several documents, attention stays inside each, and its positions count from its beginning. `segments`
`[B, T]` are integers that are equal within a document and differ between neighbours: 1, 2, ... as `data/packing.py`
makes them, with 0 for padding. They are all that a packed row adds: positions and the mask of attention follow from
them.
"""

from collections.abc import Mapping
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import batch_spec, constrain
from jaxtp.mesh import CONTEXT, SEQUENCE, TP, current_mesh, mesh_sizes, parts

SEQUENCE_DIM = 1

Method = Literal["ulysses", "gather"]
"""A way of attention to tokens that other devices along cp have (`layers/context.py`)."""
Context = Literal["auto", "ulysses", "gather"]

SequenceParallel = bool | None
"""On, off, or None: on wherever tp > 1 divides the sequence of the input, so that decoding a token is off."""


def sequence_dim(setting: SequenceParallel, shape: tuple[int, ...]) -> int | None:
    """The dim of an activation that is split over tp between layers, or None.

    Args:
      setting: as the layer was told.
      shape: of the global activation or ids, `[B, T, ...]`.
    """
    return SEQUENCE_DIM if is_split(setting, shape[SEQUENCE_DIM], mesh_sizes(current_mesh())) else None


def is_split(setting: SequenceParallel, length: int, sizes: Mapping[str, int]) -> bool:
    """Returns whether a sequence of so many tokens is split over tp between parallel layers."""
    return sizes[TP] > 1 and length % parts(sizes, SEQUENCE) == 0 if setting is None else setting


def activation_spec(sequence: int | None) -> PartitionSpec:
    """The spec of `[B, T, D]` between layers, of which `sequence_dim` says whether T is split over tp."""
    return batch_spec(CONTEXT if sequence is None else SEQUENCE, None)


def segment_positions(segments_BT: Array) -> Array:
    """`[B, T]`: how far each position is from the first one of its document."""
    index = jnp.arange(segments_BT.shape[1])
    begins = segments_BT != jnp.roll(segments_BT, 1, axis=1)
    start = jax.lax.cummax(jnp.where(begins.at[:, 0].set(True), index, 0), axis=1)
    return index - start


class Part(NamedTuple):
    """The positions of the queries that a device has of each sequence, and of the keys beside them."""

    queries: Array
    """Position of each query, `[Tq]` int32, ascending."""

    first_key: Array | int
    """Position of the first key; the others follow one by one. Before position 0 there is no key to see."""


def seen_keys(
    shape: tuple[int, ...], num_keys: int, window: int | None, segments_BT: Array | None, part: Part | None = None
) -> tuple[Array, Array]:
    """Returns the indices of the first and the last key that each query sees, `[B, Tq]` both.

    A query sees itself and what comes before it: in its document, and in a window of so many positions. Neither end
    ever falls along the queries; the last is before the first where a query sees nothing, and attention then gives
    zero. Kernels are told these ranges and no more, so none of them knows of cp, halos or the order zigzag.

    Args:
      shape: `(B, Tq)`.
      num_keys: that there are.
      window: positions that each one sees; None for all.
      segments_BT: of the whole sequences; None for one document.
      part: which queries and keys these are; None for all of the sequences.
    """
    at, first_key = (jnp.arange(shape[1], dtype=jnp.int32), 0) if part is None else part
    begin = jnp.zeros(shape, jnp.int32)
    if segments_BT is not None:
        begin = jnp.arange(segments_BT.shape[1]) - segment_positions(segments_BT)
        begin = begin if part is None else jnp.take(begin, part.queries, axis=1, mode="clip")
    if window is not None:
        begin = jnp.maximum(begin, at - (window - 1))
    first, last = jnp.clip(begin - first_key, 0, num_keys), jnp.clip(at - first_key, -1, num_keys - 1)
    return first.astype(jnp.int32), jnp.broadcast_to(last.astype(jnp.int32), shape)


def seeing_queries(
    seen: tuple[Array, Array], num_keys: int, window: int | None, segments_BT: Array | None, part: Part | None = None
) -> tuple[Array, Array]:
    """Returns the indices of the first and the last query that sees each key, `[B, S]` both, which never fall either.

    Args:
      seen: what `seen_keys` returns of the rest.
      num_keys: as there, like all that follows.
      window: the same.
      segments_BT: the same.
      part: the same.
    """
    first, last = seen
    if part is None:  # the mirror image, which takes no search
        mirrored, _ = seen_keys(first.shape, num_keys, window, None if segments_BT is None else segments_BT[:, ::-1])
        return last, num_keys - 1 - mirrored[:, ::-1]
    find = partial(jnp.searchsorted, v=jnp.arange(num_keys, dtype=jnp.int32), method="scan_unrolled")
    before = jax.vmap(partial(find, side="left"))(last)
    return before.astype(jnp.int32), jax.vmap(partial(find, side="right"))(first).astype(jnp.int32) - 1


def segment_mask(segments_BT: Array) -> Array:
    """Returns whether a query and a key are of one document, `[B, 1, T, S]`; neighbours differ in their number."""
    changes = segments_BT[:, 1:] != segments_BT[:, :-1]
    document = jnp.pad(jnp.cumsum(changes, axis=1), ((0, 0), (1, 0)))
    return (document[:, :, None] == document[:, None, :])[:, None]


def dropout(x: Array, rate: float, keys: Array | None, spec: PartitionSpec, positions_T: Array | None = None) -> Array:
    """Zeroes each element with probability `rate` and scales the others by `1 / (1 - rate)`.

    Each row of the batch has its own key, and each position in it another, so that a token's mask depends on neither
    the mesh, nor the micro-batch that the row is in, nor the order in which devices hold tokens. A device draws its own
    part of the mask: JAX's counter-based generator needs no communication for it.

    Args:
      x: a global activation `[B, T, D]`.
      rate: probability of zero.
      keys: one for each row, `[B]`; None leaves `x` as it is (evaluation).
      spec: how `x` is split, so that the mask is split alike.
      positions_T: positions of the tokens in their row; by default 0, 1, ...
    """
    if keys is None or rate == 0:
        return x
    positions_T = jnp.arange(x.shape[1]) if positions_T is None else positions_T
    of_row = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    of_token = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[2:]))
    keep = constrain(jax.vmap(lambda key: of_token(of_row(key, positions_T)))(keys), spec)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
