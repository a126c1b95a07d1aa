"""Causal attention by blocks in plain `lax`, for every backend, with one block of scores at a time.

It visits pairs of a query block and a key block with an online softmax (Dao et al., arXiv
2205.14135). The backward pass recomputes scores from the log-sum-exp; autodiff of the loop would
save every block.

Query blocks are `[n, b, K, G*c, H]` (n blocks of c positions, K kv heads of G query heads), so that
a pair is one product per kv head; blocks of keys and values are `[n, b, K, c, H]`.
"""

from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from jaxtp.collectives import ATTENDED, vary_alike
from jaxtp.layers.kernels.padding import pad_ranges, pad_to, round_up
from jaxtp.layers.positions import Part, key_ranges

MAX_BLOCK = 256
"""Positions in a block of a long sequence, the fastest from 128 to 512 on CPUs
(aa673834:scripts/attention_speed.py)."""

_MIN_BLOCK = 8
_MIN_BLOCKS = 4
_NO_SCORE = -1e30  # initial maximum; finite, so that differences of it are 0, not NaN


class _Operands(NamedTuple):
    q: Array
    k: Array
    v: Array
    sinks: Array | None
    segments: Array | None
    part: Part | None


class _Settings(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None
    block: int


def blockwise_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    part: Part | None = None,
    sinks: Array | None = None,
) -> Array:
    """Returns values weighted by causal attention, `[B, T, N, values' width]`.

    It is 0 if a query sees nothing.

    Args:
      q_BTNH: queries; head n attends to kv head n // (N // K).
      k_BSKH, v_BSKH: keys and values, whose widths may differ.
      segments_BT: documents of whole sequences.
      window: positions that each query sees, including its position; None for all.
      softcap: squashes each score s to `softcap * tanh(s / softcap)`.
      part: positions of the queries and keys; None for whole sequences.
      sinks: a score of each query head, `[N]`, that joins the softmax without a value.
    """
    settings = _Settings(scale, window, softcap, block_size(q_BTNH.shape[1]))
    operands = _Operands(q_BTNH, k_BSKH, v_BSKH, sinks, segments_BT, part)
    operands = jax.tree.map(jnp.asarray, operands)
    return _attend(settings, vary_alike(operands))


def sinks_gradient(sinks: Array, log_sum: Array, means: Array) -> Array:
    """Returns the summand of each query in the gradient of sinks.

    `log_sum` are the log-sum-exps, `means` the weighted means of the weights' gradients.
    """
    # The value of the sink is 0, so only the mean is left of the gradient of its weight.
    return -jnp.exp(sinks - log_sum) * means


def block_size(length: int) -> int:
    """Returns the positions per block; short sequences have several blocks too."""
    size = -(-length // _MIN_BLOCKS)
    return min(MAX_BLOCK, max(_MIN_BLOCK, size))


@lru_cache(maxsize=4096)
def num_visited(chunks: tuple[range, ...], window: int | None) -> int:
    """Returns the number of block pairs that causality and the window leave.

    `chunks` are the queries' positions, ascending; keys start at position 0.
    """
    ends = np.cumsum(list(map(len, chunks)))
    length = int(ends[-1])
    block = block_size(length)
    # The offset from a query's index to its position
    ahead = np.array([chunk.stop for chunk in chunks]) - ends

    # The first and the last query of each block
    first = np.arange(0, length, block)
    last = np.minimum(first + block, length) - 1
    first += ahead[np.searchsorted(ends, first, side="right")]
    last += ahead[np.searchsorted(ends, last, side="right")]
    first_key = 0 if window is None else np.maximum(first - (window - 1), 0)
    return int(np.sum(last // block - first_key // block + 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, operands: _Operands) -> Array:
    return _forward(settings, operands)[0]


_Residuals = tuple[_Operands, Array, Array]


def _forward(settings: _Settings, operands: _Operands) -> tuple[Array, _Residuals]:
    pairs = _Pairs(settings, operands)
    v = operands.v

    def visit(turn: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        max_scores, totals, weighted = sums
        i, j = pairs.at(turn)
        scores, visible = pairs.scores(i, j)
        running_max = max_scores[i]
        block_max = jnp.max(scores, axis=-1, where=visible, initial=_NO_SCORE)
        new_max = jnp.maximum(running_max, block_max)
        shifted = jnp.where(visible, scores - new_max[..., None], -jnp.inf)
        weights = jnp.exp(shifted)
        shrink = jnp.exp(running_max - new_max)
        added = _product(weights.astype(v.dtype), pairs.values[j], 3, 2)
        max_scores = max_scores.at[i].set(new_max)
        total = totals[i] * shrink + weights.sum(-1)
        totals = totals.at[i].set(total)
        return max_scores, totals, weighted.at[i].set(weighted[i] * shrink[..., None] + added)

    shape = (*pairs.queries.shape[:-1], v.shape[3])
    weighted = jnp.zeros_like(pairs.queries, pairs.wide, shape=shape)
    zeros = jnp.zeros_like(pairs.queries[..., 0], pairs.wide)
    totals = zeros
    # The softmax begins with the sink. The log-sum-exp then contains it, so that the backward loop
    # is the same.
    if operands.sinks is None:
        max_scores = zeros + _NO_SCORE
    else:
        max_scores = zeros + pairs.of_heads(operands.sinks)
        totals = zeros + 1
    sums = (max_scores, totals, weighted)
    max_scores, totals, weighted = lax.fori_loop(0, pairs.count, visit, sums)
    # Queries that see nothing have a total of 0.
    totals = jnp.where(totals == 0, 1, totals)
    y = pairs.joined(weighted / totals[..., None], operands.q)
    y = checkpoint_name(y, ATTENDED)
    log_sum = checkpoint_name(max_scores + jnp.log(totals), ATTENDED)
    return y, (operands, y, log_sum)


def _backward(settings: _Settings, residuals: _Residuals, dy: Array) -> tuple[_Operands]:
    operands, y, log_sum = residuals
    q, k, v, sinks = operands[:4]
    pairs = _Pairs(settings, operands)
    grads = pairs.of_queries(dy)
    # The softmax's transpose subtracts the weighted mean of the weights' gradients from each of
    # them.
    means = jnp.sum(y.astype(pairs.wide) * dy.astype(pairs.wide), axis=-1, keepdims=True)
    means = pairs.of_queries(means)

    def visit(turn: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        dq, dk, dv = sums
        i, j = pairs.at(turn)
        scores, visible = pairs.scores(i, j)
        weights = jnp.exp(jnp.where(visible, scores - log_sum[i][..., None], -jnp.inf))
        d_weights = _product(grads[i], pairs.values[j], 3, 3)
        d_scores = weights * (d_weights - means[i])
        if settings.softcap is not None:
            d_scores *= 1 - jnp.square(scores / settings.softcap)
        d_scores = (d_scores * settings.scale).astype(q.dtype)
        dq = dq.at[i].add(_product(d_scores, pairs.keys[j], 3, 2))
        dk = dk.at[j].add(_product(d_scores, pairs.queries[i], 2, 2))
        dv = dv.at[j].add(_product(weights.astype(q.dtype), grads[i], 2, 2))
        return dq, dk, dv

    zeros = jax.tree.map(
        partial(jnp.zeros_like, dtype=pairs.wide), (pairs.queries, pairs.keys, pairs.values)
    )
    dq, dk, dv = lax.fori_loop(0, pairs.count, visit, zeros)
    d_sinks = pairs.sinks_gradient(sinks, log_sum, means)
    dq = pairs.joined(dq, q)
    dk = pairs.joined(dk, k)
    dv = pairs.joined(dv, v)
    return (_Operands(dq, dk, dv, d_sinks, None, None),)


_attend.defvjp(_forward, _backward)


class _Pairs:
    """The pairs of a query block and a key block that have unmasked scores."""

    def __init__(self, settings: _Settings, operands: _Operands):
        q, k, v, _, segments, part = operands
        rows, length, heads, _ = q.shape
        _, num_keys, kv_heads, _ = k.shape
        self.settings = settings
        self.group = heads // kv_heads
        self.wide = jnp.promote_types(q.dtype, jnp.float32)
        block = settings.block
        ranges = key_ranges((rows, length), num_keys, settings.window, segments, part)
        self.first, self.last = pad_ranges(ranges, block, num_keys)
        first = self.first.reshape(rows, -1, block)
        last = self.last.reshape(rows, -1, block)
        # The first and the last key block that any row needs, per query block
        first_block = jnp.min(first, axis=(0, 2)) // block
        last_block = jnp.max(last, axis=(0, 2)) // block
        turns = jnp.maximum(last_block + 1 - first_block, 0)
        self.ends = jnp.cumsum(turns)
        self.offsets = first_block - (self.ends - turns)
        self.count: int | Array
        if segments is None and part is None:
            self.count = num_visited((range(length),), settings.window)
        else:
            self.count = self.ends[-1]
        self.queries = self.of_queries(q)
        self.keys = self._blocks(k, 1)
        self.values = self._blocks(v, 1)

    def at(self, turn: Array) -> tuple[Array, Array]:
        """Returns the indices of the query block and the key block of a turn."""
        i = jnp.sum(self.ends <= turn)
        return i, turn + self.offsets[i]

    def scores(self, i: Array, j: Array) -> tuple[Array, Array]:
        """Returns a pair's scores `[b, K, G*c, c]`, and whether the query sees the key."""
        scale, _, softcap, block = self.settings
        scores = _product(self.queries[i], self.keys[j], 3, 3) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        key = j * block + jnp.arange(block)
        first = lax.dynamic_slice_in_dim(self.first, i * block, block, axis=1)
        last = lax.dynamic_slice_in_dim(self.last, i * block, block, axis=1)
        visible = (first[:, :, None] <= key) & (key <= last[:, :, None])  # [b, c, c]
        visible = jnp.tile(visible, (1, self.group, 1))  # [b, G*c, c]
        return scores, visible[:, None]

    def of_queries(self, x: Array) -> Array:
        return self._blocks(x, self.group)

    def of_heads(self, x: Array) -> Array:
        """Returns a number of each query head for each row of a block, `[K, G*c]`."""
        block = self.settings.block
        return jnp.repeat(x.astype(self.wide), block).reshape(-1, self.group * block)

    def sinks_gradient(self, sinks: Array | None, log_sum: Array, means: Array) -> Array | None:
        """Sums `sinks_gradient` over the queries of each head."""
        if sinks is None:
            return None
        summands = sinks_gradient(self.of_heads(sinks), log_sum, means[..., 0])
        summands = summands.reshape(*summands.shape[:3], self.group, -1)  # [n, b, K, G, c]
        return summands.sum((0, 1, 4)).reshape(sinks.shape).astype(sinks.dtype)

    def _blocks(self, x: Array, group: int) -> Array:
        rows, length, heads, width = x.shape
        block = self.settings.block
        kv_heads = heads // group
        x = pad_to(x, {1: round_up(length, block)})
        x = x.reshape(rows, -1, block, kv_heads, group, width)
        x = x.transpose(1, 0, 3, 4, 2, 5)  # [n, b, K, G, c, H]
        return x.reshape(-1, rows, kv_heads, group * block, width)

    def joined(self, blocks: Array, like: Array) -> Array:
        """Undoes the division into blocks: `[n, b, K, G*c, H] -> [b, T, heads, H]`."""
        rows, length, heads, _ = like.shape
        _, _, kv_heads, _, width = blocks.shape
        x = blocks.reshape(-1, rows, kv_heads, heads // kv_heads, self.settings.block, width)
        x = x.transpose(1, 0, 4, 2, 3, 5)  # [b, n, c, K, G, H]
        x = x.reshape(rows, -1, heads, width)
        return x[:, :length].astype(like.dtype)


def _product(a: Array, b: Array, a_dim: int, b_dim: int) -> Array:
    """Multiplies over these dims, per row and kv head, with at least float32 sums."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    dims = (((a_dim,), (b_dim,)), ((0, 1), (0, 1)))
    return lax.dot_general(a, b, dims, preferred_element_type=wide)
