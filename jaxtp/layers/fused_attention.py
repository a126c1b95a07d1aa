"""Causal self-attention as fused kernels for NVIDIA GPUs, which never hold `[T, T]` scores.

Pallas kernels that Triton compiles: one for the outputs, one for the gradients of queries, one for those of keys and
values. Each program holds a block of rows on the chip and visits, one after the other, the blocks that these rows see
or are seen by; scores live only there. FlashAttention-2 (Dao, arXiv 2307.08691) is the algorithm. JAX's own kernel of
this kind (`jax.experimental.pallas.ops.gpu.attention.mha`, deprecated in jax 0.12) has no grouped queries, windows or
softcaps, computes all blocks of other documents, and takes only sequences that its blocks divide.

What a query sees is one range of keys: those of its document, no further away than the window, up to itself, among
those that this device holds. Two integers of each query say it, the indices `first` and `last` of its keys, and two of
each key which queries see it; the kernels mask with them and find with them the blocks that they need not visit.

    kernel     one program for each      visits                            writes
    forward    block of queries          blocks of keys                    o, log-sum-exp
    queries    block of queries          blocks of keys                    dq
    keys       block of keys             blocks of queries of all heads    dk, dv
                                         of its group

Sums are made in float32 in one order: no atomics, so the same input gives the same bits. Products of float32 follow
`jax.default_matmul_precision`, and are TF32 by default, as XLA's are. Jax 0.12 warns that Pallas will drop Triton.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxtp.collectives import ATTENDED, vary_like
from jaxtp.layers.activations import Part, seeing_queries, seen_keys

MOST_HEAD_DIM = 256
"""Widest head: blocks of wider ones do not fit a GPU's shared memory."""

DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes of queries, keys and values."""

_LEAST_HEAD_DIM = 16
"""Narrowest product that Triton computes; narrower heads are padded to it, others to a power of two."""

_Ranges = tuple[Array, Array]
"""The first and the last that each row sees or is seen by."""

_LOG2_E = math.log2(math.e)
_NOTHING_SEEN = -1e30
"""A maximum below all scores; finite, so that differences of it are not NaN."""


@dataclass(frozen=True)
class Blocks:
    """Sizes of a kernel's blocks, and how Triton compiles it."""

    queries: int
    """Rows of a block of queries; a power of two, at least 16 on a GPU."""

    keys: int
    """Rows of a block of keys, alike."""

    warps: int
    """Groups of 32 threads that share a program."""

    stages: int
    """Blocks that are loaded ahead, and the one that is computed."""


@dataclass(frozen=True)
class _Settings:
    """All that is known when the kernels are compiled."""

    scale: float
    softcap: float | None
    forward: Blocks
    backward: Blocks
    interpret: bool


def block_sizes(head_dim: int, dtype: DTypeLike) -> tuple[Blocks, Blocks]:
    """Returns the blocks of the forward kernel and of the two backward kernels."""
    wide = head_dim if jnp.dtype(dtype).itemsize == 2 else 4 * head_dim  # products in float32 take more registers
    if wide <= 64:
        return Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 2)
    if wide <= 128:
        return Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 2)
    if wide <= 256:
        return Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 1)
    return Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1)


def fused_attention(
    q_BTNH: Array,
    k_BSKH: Array,
    v_BSKH: Array,
    segments_BT: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    part: Part | None = None,
    interpret: bool = False,
) -> Array:
    """Returns the values weighted by causal attention, `[B, T, N, H]` in the queries' dtype; 0 where nothing is seen.

    Args:
      q_BTNH: queries; head n reads kv head `n // (N // K)`.
      k_BSKH: keys.
      v_BSKH: values.
      segments_BT: integers, equal within a document and different between neighbours; None for one document. They are
        those of whole sequences, also beside a part.
      scale: multiplies the products of queries and keys.
      window: number of positions that each one sees, itself and those before it; None for all.
      softcap: c, where each score s becomes `c * tanh(s / c)`; None leaves it.
      part: which queries and keys of the sequences these are; None for all.
      interpret: run the kernels on any device, slowly, as a test does.

    Raises:
      ValueError: the kernels do not take these heads or this dtype.
    """
    _check(q_BTNH, k_BSKH, v_BSKH)
    length, num_keys, width = q_BTNH.shape[1], k_BSKH.shape[1], q_BTNH.shape[3]
    padded_width = max(_LEAST_HEAD_DIM, pl.next_power_of_2(width))
    forward, backward = block_sizes(padded_width, q_BTNH.dtype)
    settings = _Settings(scale, softcap, forward, backward, interpret)
    of_queries = seen_keys(q_BTNH.shape[:2], num_keys, window, segments_BT, part)
    of_keys = seeing_queries(of_queries, num_keys, window, segments_BT, part)

    def padded(blocks: int, x: Array, ranges: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        filled = (0, 0), (0, -x.shape[1] % blocks)
        begin, end = ranges  # of what fills a block it is none
        begin = jnp.pad(begin, filled, constant_values=length + num_keys)
        end = jnp.pad(end, filled, constant_values=-1)
        return jnp.pad(x, (*filled, (0, 0), (0, padded_width - width))), begin, end

    q, first_key, last_key = padded(max(forward.queries, backward.queries), q_BTNH, of_queries)
    k, first_query, last_query = padded(max(forward.keys, backward.keys), k_BSKH, of_keys)
    v, _, _ = padded(max(forward.keys, backward.keys), v_BSKH, of_keys)
    arrays = (q, k, v, (first_key, last_key), (first_query, last_query))
    arrays = jax.tree.map(lambda x: vary_like(x, *jax.tree.leaves(arrays)), arrays)
    return _attention(settings, *arrays)[:, :length, :, :width]


def _check(q: Array, k: Array, v: Array) -> None:
    heads, kv_heads, width = q.shape[2], k.shape[2], q.shape[3]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not divisible by {kv_heads} kv heads")
    if width > MOST_HEAD_DIM:
        raise ValueError(f"head_dim {width} is above {MOST_HEAD_DIM}, the widest of the fused attention kernels")
    if {x.dtype for x in (q, k, v)} != {q.dtype} or q.dtype.name not in DTYPES:
        given = ", ".join(x.dtype.name for x in (q, k, v))
        raise ValueError(f"queries, keys and values are {given}: fused attention takes one of {', '.join(DTYPES)}")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: _Settings, q: Array, k: Array, v: Array, of_queries: _Ranges, of_keys: _Ranges) -> Array:
    return _forward(settings, q, k, v, of_queries, of_keys)[0]


def _forward(
    settings: _Settings, q: Array, k: Array, v: Array, of_queries: _Ranges, of_keys: _Ranges
) -> tuple[Array, tuple[Any, ...]]:
    """Returns the output, and what the backward pass reads: the inputs, the output and log-sum-exp `[B, N, T]`."""
    blocks = settings.forward
    rows, statistics, keys = _block(q, blocks.queries), _statistics(blocks.queries), _all_keys(q, k)
    rows_BNT = (q.shape[0], q.shape[2], q.shape[1])
    o, lse = _run(
        _forward_kernel,
        settings,
        blocks,
        blocks.queries,
        inputs=[(q, rows), (k, keys), (v, keys), *_ranges(of_queries, blocks.queries)],
        outputs=[(q.shape, q.dtype, rows), (rows_BNT, jnp.float32, statistics)],
    )
    o = checkpoint_name(o, ATTENDED)
    return o, (q, k, v, of_queries, of_keys, o, checkpoint_name(lse, ATTENDED))


def _backward(settings: _Settings, kept: tuple[Any, ...], do: Array) -> tuple[Array | None, ...]:
    """Returns the gradients of queries, keys and values."""
    q, k, v, of_queries, of_keys, o, lse = kept
    blocks, group = settings.backward, q.shape[2] // k.shape[2]
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1).swapaxes(1, 2)  # [B, N, T]
    rows, statistics, keys = _block(q, blocks.queries), _statistics(blocks.queries), _all_keys(q, k)
    per_query = [(do, rows), (lse, statistics), (delta, statistics)]
    (dq,) = _run(
        _queries_kernel,
        settings,
        blocks,
        blocks.queries,
        inputs=[(q, rows), (k, keys), (v, keys), *_ranges(of_queries, blocks.queries), *per_query],
        outputs=[(q.shape, q.dtype, rows)],
    )
    rows = _block(k, blocks.keys)
    queries = pl.BlockSpec((None, q.shape[1], group, q.shape[3]), lambda j, n, b: (b, 0, n, 0))
    statistics = pl.BlockSpec((None, group, q.shape[1]), lambda j, n, b: (b, n, 0))
    per_query = [(do, queries), (lse, statistics), (delta, statistics)]
    dk, dv = _run(
        _keys_kernel,
        settings,
        blocks,
        blocks.keys,
        inputs=[(q, queries), (k, rows), (v, rows), *_ranges(of_keys, blocks.keys), *per_query],
        outputs=[(k.shape, k.dtype, rows), (v.shape, v.dtype, rows)],
    )
    return dq, dk, dv, None, None


_attention.defvjp(_forward, _backward)


def _block(x: Array, size: int) -> pl.BlockSpec:
    """Returns the part of `[B, T, heads, H]` that belongs to a program `(block, head, row)`."""
    return pl.BlockSpec((None, size, None, x.shape[3]), lambda i, n, b: (b, i, n, 0))


def _ranges(ranges: _Ranges, size: int) -> list[tuple[Array, pl.BlockSpec]]:
    """Returns both ends `[B, T]`, with its part of them."""
    return [(ends, pl.BlockSpec((None, size), lambda i, n, b: (b, i))) for ends in ranges]


def _statistics(size: int) -> pl.BlockSpec:
    """Returns its part of `[B, heads, T]`."""
    return pl.BlockSpec((None, None, size), lambda i, n, b: (b, n, i))


def _all_keys(q: Array, k: Array) -> pl.BlockSpec:
    """Returns the keys or values of a query head, all of which its programs can read."""
    group = q.shape[2] // k.shape[2]
    return pl.BlockSpec((None, k.shape[1], None, k.shape[3]), lambda i, n, b: (b, 0, n // group, 0))


def _run(
    kernel: Callable[..., None],
    settings: _Settings,
    blocks: Blocks,
    size: int,
    *,
    inputs: list[tuple[Array, pl.BlockSpec]],
    outputs: list[tuple[tuple[int, ...], DTypeLike, pl.BlockSpec]],
) -> Any:
    """Runs a program for each block of `size`, head and row of the first output, `[B, T, heads, H]`."""
    rows, length, heads, _ = outputs[0][0]
    varying = jax.typeof(inputs[0][0]).manual_axis_type  # as that of all inputs

    def program(*refs: Any) -> None:
        # The interpreter evaluates operations one by one inside of shard_map, which refuses those of an array that
        # varies over the mesh with a constant of the kernel; what is jitted it leaves whole.
        jax.jit(partial(kernel, settings))(*refs)

    return pl.pallas_call(
        program,
        grid=(length // size, heads, rows),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for *_, spec in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=settings.interpret,
        name=f"attention{kernel.__name__}".removesuffix("_kernel"),
    )(*(array for array, _ in inputs))


def _forward_kernel(settings: _Settings, *refs: Any) -> None:
    """Computes a block of outputs: the softmax is rescaled whenever a block of keys raises its maximum."""
    q_ref, k_ref, v_ref, first_ref, last_ref, o_ref, lse_ref = refs
    q, first, last, size = q_ref[...], first_ref[...], last_ref[...], settings.forward.keys

    def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        o, highest, total = carry
        keys = pl.ds(j * size, size)
        k, v = k_ref[keys, :], v_ref[keys, :]
        s = jnp.where(_within(_rows(j, size), first, last), _scores(q, k, settings), -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(s, axis=1))
        p, rescale = jnp.exp2(s - higher[:, None]), jnp.exp2(highest - higher)
        return rescale[:, None] * o + triton.dot(p.astype(v.dtype), v), higher, rescale * total + jnp.sum(p, axis=1)

    zeros = jnp.zeros(first.shape, jnp.float32)
    carry = (jnp.zeros(q.shape, jnp.float32), zeros + _NOTHING_SEEN, zeros)
    o, highest, total = lax.fori_loop(*_visited(first, last, size), visit, carry)
    total = jnp.where(total > 0, total, 1)  # of a row that sees nothing: it gives 0
    o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = (highest + jnp.log2(total)) / _LOG2_E


def _queries_kernel(settings: _Settings, *refs: Any) -> None:
    """Computes a block of the queries' gradients."""
    q_ref, k_ref, v_ref, first_ref, last_ref, do_ref, lse_ref, delta_ref, dq_ref = refs
    q, do, first, last, size = q_ref[...], do_ref[...], first_ref[...], last_ref[...], settings.backward.keys
    lse, delta = lse_ref[...][:, None], delta_ref[...][:, None]

    def visit(j: Array, dq: Array) -> Array:
        keys = pl.ds(j * size, size)
        k, v = k_ref[keys, :], v_ref[keys, :]
        seen = _within(_rows(j, size), first, last)
        _, ds = _gradients(_scores(q, k, settings), seen, lse, triton.dot(do, v, trans_b=True) - delta, settings)
        return dq + triton.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(*_visited(first, last, size), visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * settings.scale).astype(dq_ref.dtype)


def _keys_kernel(settings: _Settings, *refs: Any) -> None:
    """Computes a block of the gradients of keys and values; scores are transposed here, `[keys, queries]`."""
    q_ref, k_ref, v_ref, first_ref, last_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref = refs
    k, v, first, last, size = k_ref[...], v_ref[...], first_ref[...], last_ref[...], settings.backward.queries

    def visit(g: Array, i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        queries = pl.ds(i * size, size)
        q, do = q_ref[queries, g, :], do_ref[queries, g, :]
        seen = _within(_rows(i, size), first, last)
        dp = triton.dot(v, do, trans_b=True) - delta_ref[g, queries]
        p, ds = _gradients(_scores(k, q, settings), seen, lse_ref[g, queries], dp, settings)
        return dk + triton.dot(ds.astype(q.dtype), q), dv + triton.dot(p.astype(do.dtype), do)

    lower, upper = _visited(first, last, size)
    zeros = jnp.zeros(k.shape, jnp.float32)
    dk, dv = lax.fori_loop(
        0,
        q_ref.shape[1],
        lambda g, carry: lax.fori_loop(lower, upper, partial(visit, g), carry),
        (zeros, zeros),
    )
    dk_ref[...] = (dk * settings.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _rows(block: Array, size: int) -> Array:
    """Returns the indices of the rows of a block."""
    return block * size + jnp.arange(size)


def _visited(first: Array, last: Array, size: int) -> tuple[Array, Array]:
    """Returns the first of the blocks that hold what is in any of the ranges, and the one after the last."""
    return lax.div(jnp.min(first), size), lax.div(jnp.max(last) + size, size)


def _within(index: Array, first: Array, last: Array) -> Array:
    """Returns whether an index is in each range, `[ranges, indices]`."""
    return (first[:, None] <= index) & (index <= last[:, None])


def _scores(x: Array, y: Array, settings: _Settings) -> Array:
    """Returns the scores of rows of x with rows of y, times log2(e): the GPU computes powers of two."""
    s = triton.dot(x, y, trans_b=True)
    if settings.softcap is None:
        return s * (settings.scale * _LOG2_E)
    return jnp.tanh(s * (settings.scale / settings.softcap)) * (settings.softcap * _LOG2_E)


def _gradients(s: Array, seen: Array, lse: Array, dp: Array, settings: _Settings) -> tuple[Array, Array]:
    """Returns the attention's weights, and the gradient of the products of queries and keys without their scale.

    Args:
      s: scores, as `_scores` returns them.
      seen: where a query sees a key.
      lse: log-sum-exp of each query, along its axis.
      dp: gradient of the weights, less its mean under them.
      settings: the softcap is read.
    """
    p = jnp.where(seen, jnp.exp2(s - lse * _LOG2_E), 0)
    ds = p * dp
    return p, ds if settings.softcap is None else ds * (1 - (s / (settings.softcap * _LOG2_E)) ** 2)
