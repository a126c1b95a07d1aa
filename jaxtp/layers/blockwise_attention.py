"""Causal attention by blocks in plain `lax`: it runs on every backend and never holds more than one block of scores.

Pairs of a block of queries and a block of keys are visited one by one, with a running maximum and sum for each query
(Milakov and Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135). A query sees the keys from the first one in
its document and window to itself: that one index holds windows and packed documents alike, and says which pairs have
anything to compute. No other pair is visited. The backward pass makes the scores of a pair again from the log-sum-exp
of its queries; it is written by hand, because the one derived from the loop would keep every block.

Shapes: n blocks of c positions, b sequences, K kv heads of G query heads each, width H. Blocks of queries are
`[n, b, K, G*c, H]`, so that a pair is one product for each kv head; those of keys and values `[n, b, K, c, H]`.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import ATTENDED, vary_like
from jaxtp.layers.activations import seen_range

MOST_IN_BLOCK = 256
"""Positions in a block of a long sequence: of 128 to 512 the quickest on CPUs (`scripts/attention_speed.py`)."""

_LEAST_IN_BLOCK, _FEWEST_BLOCKS = 8, 4
_NO_SCORE = -1e30
"""Maximum of no scores: finite, so that two of them differ by 0."""


class _Settings(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    block: int


def blockwise_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Array:
    """Returns the values weighted by causal attention, `[B, T, N, H]`; 0 for a query that sees nothing.

    Args:
      q_BTNH: queries; head n attends to kv head n // (N // K).
      k_BTKH: keys.
      v_BTKH: values.
      segments_BT: integers, equal within a document, and of neighbouring documents different: no query sees another.
      scale: factor of the scores.
      window: positions that each one sees, itself and those before it; None for all.
      softcap: squashes each score s to `softcap * tanh(s / softcap)`.
    """
    settings = _Settings(scale, window, softcap, block_size(q_BTNH.shape[1]))
    arrays = (q_BTNH, k_BTKH, v_BTKH) if segments_BT is None else (q_BTNH, k_BTKH, v_BTKH, segments_BT)
    q, k, v = (vary_like(x, *arrays) for x in arrays[:3])
    return _attend(q, k, v, segments_BT if segments_BT is None else vary_like(segments_BT, *arrays), settings)


def block_size(length: int) -> int:
    """Returns the number of positions in a block: a quarter of a short sequence, so that it has several too."""
    return min(MOST_IN_BLOCK, max(_LEAST_IN_BLOCK, -(-length // _FEWEST_BLOCKS)))


def visited(length: int, window: int | None) -> list[tuple[int, int]]:
    """Returns the pairs of blocks, of queries and of keys, that causality and a window leave."""
    block = block_size(length)
    reach = length if window is None else window
    first = [max(0, at - reach + 1) // block for at in range(0, length, block)]
    return [(i, j) for i, lowest in enumerate(first) for j in range(lowest, i + 1)]


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend(q: Array, k: Array, v: Array, segments: Array | None, settings: _Settings) -> Array:
    return _forward(q, k, v, segments, settings)[0]


def _forward(
    q: Array, k: Array, v: Array, segments: Array | None, settings: _Settings
) -> tuple[Array, tuple[Array | None, ...]]:
    """Returns the result, and what the backward pass reads: the arguments, the result and the log-sum-exp."""
    pairs = _Pairs(q, k, segments, settings)
    queries, keys, values = pairs.of_queries(q), pairs.of_keys(k), pairs.of_keys(v)

    def visit(turn: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        highest, total, weighted = sums
        i, j = pairs.at(turn)
        scores, seen = pairs.scores(queries[i], keys[j], i, j)
        new = jnp.maximum(highest[i], jnp.max(scores, axis=-1, where=seen, initial=_NO_SCORE))
        weights = jnp.exp(jnp.where(seen, scores - new[..., None], -jnp.inf))
        shrink = jnp.exp(highest[i] - new)
        added = _product(weights.astype(v.dtype), values[j], 3, 2)
        return (
            highest.at[i].set(new),
            total.at[i].set(total[i] * shrink + weights.sum(-1)),
            weighted.at[i].set(weighted[i] * shrink[..., None] + added),
        )

    empty, each = jnp.zeros_like(queries, pairs.wide), jnp.zeros_like(queries[..., 0], pairs.wide)
    highest, total, weighted = lax.fori_loop(0, pairs.count, visit, (each + _NO_SCORE, each, empty))
    total = jnp.where(total == 0, 1, total)  # of a query that sees nothing
    y = checkpoint_name(pairs.joined(weighted / total[..., None], q), ATTENDED)
    return y, (q, k, v, segments, y, checkpoint_name(highest + jnp.log(total), ATTENDED))


def _backward(settings: _Settings, kept: tuple[Array, ...], dy: Array) -> tuple[Array | None, ...]:
    q, k, v, segments, y, log_sum = kept
    pairs = _Pairs(q, k, segments, settings)
    queries, keys, values, grads = pairs.of_queries(q), pairs.of_keys(k), pairs.of_keys(v), pairs.of_queries(dy)
    # What the softmax takes from each gradient of a weight: the mean of them all.
    means = pairs.of_queries(jnp.sum(y.astype(pairs.wide) * dy.astype(pairs.wide), axis=-1, keepdims=True))

    def visit(turn: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        dq, dk, dv = sums
        i, j = pairs.at(turn)
        scores, seen = pairs.scores(queries[i], keys[j], i, j)
        weights = jnp.exp(jnp.where(seen, scores - log_sum[i][..., None], -jnp.inf))
        d_scores = weights * (_product(grads[i], values[j], 3, 3) - means[i])
        if settings.softcap is not None:
            d_scores *= 1 - jnp.square(scores / settings.softcap)
        d_scores = (d_scores * settings.scale).astype(q.dtype)
        return (
            dq.at[i].add(_product(d_scores, keys[j], 3, 2)),
            dk.at[j].add(_product(d_scores, queries[i], 2, 2)),
            dv.at[j].add(_product(weights.astype(q.dtype), grads[i], 2, 2)),
        )

    empty = tuple(jnp.zeros_like(blocks, pairs.wide) for blocks in (queries, keys, values))
    dq, dk, dv = lax.fori_loop(0, pairs.count, visit, empty)
    return pairs.joined(dq, q), pairs.joined(dk, k), pairs.joined(dv, v), None


_attend.defvjp(_forward, _backward)


class _Pairs:
    """The pairs of blocks of one call that have anything to compute.

    Args:
      q: queries `[b, T, N, H]`.
      k: keys `[b, T, K, H]`.
      segments: `[b, T]`, or None.
      settings: of the call.
    """

    def __init__(self, q: Array, k: Array, segments: Array | None, settings: _Settings):
        self.length, self.settings = q.shape[1], settings
        self.group, self.wide = q.shape[2] // k.shape[2], jnp.promote_types(q.dtype, jnp.float32)
        self.num_blocks = -(-self.length // settings.block)
        first, _ = seen_range(q.shape[0], self.length, settings.window, segments)
        filled = ((0, 0), (0, self.num_blocks * settings.block - self.length))
        self.first = jnp.pad(first, filled, constant_values=self.length)
        pairs = np.array(visited(self.length, settings.window), np.int32)
        self.pairs = jnp.asarray(pairs)
        self.count: int | Array = len(pairs)
        if segments is not None:  # those that a document of any row needs come first, and are all that is visited
            begins = jnp.min(self.first[:, :: settings.block], axis=0) // settings.block
            needed = pairs[:, 1] >= begins[pairs[:, 0]]
            self.pairs, self.count = self.pairs[jnp.argsort(~needed)], jnp.sum(needed)

    def at(self, turn: Array) -> tuple[Array, Array]:
        """Returns the blocks of queries and of keys of a pair."""
        return self.pairs[turn, 0], self.pairs[turn, 1]

    def scores(self, queries: Array, keys: Array, i: Array, j: Array) -> tuple[Array, Array]:
        """Returns the scores of a pair `[b, K, G*c, c]`, and which of them are seen."""
        scale, _, softcap, block = self.settings
        scores = _product(queries, keys, 3, 3) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        query_at, key_at = (index * block + jnp.arange(block) for index in (i, j))
        first = lax.dynamic_slice_in_dim(self.first, i * block, block, axis=1)
        seen = (key_at <= query_at[:, None]) & (key_at >= first[:, :, None])
        return scores, jnp.tile(seen, (1, self.group, 1))[:, None]

    def of_queries(self, x: Array) -> Array:
        """Returns the blocks of `[b, T, N, H]`."""
        return self._blocks(x, self.group)

    def of_keys(self, x: Array) -> Array:
        """Returns the blocks of `[b, T, K, H]`."""
        return self._blocks(x, 1)

    def _blocks(self, x: Array, group: int) -> Array:
        rows, length, heads, width = x.shape
        block = self.settings.block
        x = jnp.pad(x, ((0, 0), (0, self.num_blocks * block - length), (0, 0), (0, 0)))
        x = x.reshape(rows, self.num_blocks, block, heads // group, group, width)
        return x.transpose(1, 0, 3, 4, 2, 5).reshape(self.num_blocks, rows, heads // group, group * block, width)

    def joined(self, blocks: Array, like: Array) -> Array:
        """Returns the positions of blocks, in the shape and dtype of `like`."""
        rows, length, heads, width = like.shape
        block, kv_heads = self.settings.block, blocks.shape[2]
        x = blocks.reshape(self.num_blocks, rows, kv_heads, heads // kv_heads, block, width)
        return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, -1, heads, width)[:, :length].astype(like.dtype)


def _product(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """Returns the products of two blocks `[b, K, ., .]` over those dims, in float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((a_dim,), (b_dim,)), ((0, 1), (0, 1))), preferred_element_type=wide)
