"""Causal self-attention as fused Pallas kernels for NVIDIA GPUs, compiled by Triton.

They never store `[T, T]` scores.

The algorithm is FlashAttention-2 (Dao, arXiv 2307.08691). A program holds a block of rows on the
chip and visits the blocks that these rows see, or are seen by:

    kernel     one program per     visits                                        writes
    forward    query block         key blocks                                    o, log-sum-exp
    queries    query block         key blocks                                    dq
    keys       key block           query blocks of all heads of its group        dk, dv

Sums are float32 in a fixed order, without atomics: results are deterministic. JAX's kernel
(`pallas.ops.gpu.attention`) lacks grouped queries, windows and softcaps, and needs divisible
lengths.
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
from jaxtp.layers.kernels.blockwise_attention import sinks_gradient
from jaxtp.layers.sequence_parallel import Part, key_ranges, query_ranges
from jaxtp.mesh import current_platform

MOST_HEAD_DIM = 256  # widest head: blocks of wider ones do not fit a GPU's shared memory

DTYPES = ("bfloat16", "float16", "float32")  # dtypes of queries, keys and values

_LEAST_HEAD_DIM = 16
"""Narrowest product that Triton computes; narrower heads are padded to it, others to a power of
two."""

# First and last key that each query sees, or first and last query that sees each key
_Ranges = tuple[Array, Array]
_BothRanges = tuple[_Ranges, _Ranges]

_LOG2_E = math.log2(math.e)
# Initial maximum: below all scores, finite so that its differences are not NaN
_NOTHING_SEEN = -1e30


@dataclass(frozen=True)
class Blocks:
    """Block sizes of a kernel, and Triton's options."""

    queries: int  # rows of a block of queries; a power of two, at least 16 on a GPU
    keys: int  # rows of a block of keys
    warps: int  # groups of 32 threads that share a program
    stages: int  # pipeline depth: the current block and the prefetched blocks


@dataclass(frozen=True)
class _Settings:
    """Compile-time settings."""

    scale: float
    softcap: float | None
    forward: Blocks
    backward: Blocks


def block_sizes(head_dim: int, dtype: DTypeLike) -> tuple[Blocks, Blocks]:
    """Returns the blocks of the forward kernel and of the backward kernels."""
    # Products in float32 take more registers.
    wide = head_dim if jnp.dtype(dtype).itemsize == 2 else 4 * head_dim
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
    sinks: Array | None = None,
) -> Array:
    """Returns values weighted by causal attention, `[B, T, N, values' width]`.

    It is 0 if a query sees nothing.

    For the arguments see `blockwise_attention`. Off CUDA the kernels run in Pallas' interpreter,
    slowly, for tests.

    Raises:
      ValueError: unsupported heads or dtype.
    """
    _check(q_BTNH, k_BSKH, v_BSKH)
    length = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    width = v_BSKH.shape[3]
    forward, backward = block_sizes(max(map(_padded_width, (q_BTNH, v_BSKH))), q_BTNH.dtype)
    settings = _Settings(scale, softcap, forward, backward)
    of_queries = key_ranges(q_BTNH.shape[:2], num_keys, window, segments_BT, part)
    of_keys = query_ranges(of_queries, num_keys, window, segments_BT, part)

    def padded(blocks: int, x: Array, ranges: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        filled = (0, 0), (0, -x.shape[1] % blocks)
        begin, end = ranges  # padding sees nothing
        begin = jnp.pad(begin, filled, constant_values=length + num_keys)
        end = jnp.pad(end, filled, constant_values=-1)
        return jnp.pad(x, (*filled, (0, 0), (0, _padded_width(x) - x.shape[3]))), begin, end

    q, first_key, last_key = padded(max(forward.queries, backward.queries), q_BTNH, of_queries)
    k, first_query, last_query = padded(max(forward.keys, backward.keys), k_BSKH, of_keys)
    v, _, _ = padded(max(forward.keys, backward.keys), v_BSKH, of_keys)
    arrays = (q, k, v, sinks, ((first_key, last_key), (first_query, last_query)))
    arrays = jax.tree.map(lambda x: vary_like(x, *jax.tree.leaves(arrays)), arrays)
    return _attention(settings, *arrays)[:, :length, :, :width]


def _padded_width(x: Array) -> int:
    return max(_LEAST_HEAD_DIM, pl.next_power_of_2(x.shape[3]))


def _check(q: Array, k: Array, v: Array) -> None:
    heads = q.shape[2]
    kv_heads = k.shape[2]
    width = max(q.shape[3], v.shape[3])
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are not divisible by {kv_heads} kv heads")
    if width > MOST_HEAD_DIM:
        raise ValueError(
            f"head_dim {width} is above {MOST_HEAD_DIM}, the widest of the fused attention kernels"
        )
    if {x.dtype for x in (q, k, v)} != {q.dtype} or q.dtype.name not in DTYPES:
        dtypes = ", ".join(x.dtype.name for x in (q, k, v))
        raise ValueError(
            f"queries, keys and values are {dtypes}: fused attention takes one of "
            f"{', '.join(DTYPES)}"
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    settings: _Settings, q: Array, k: Array, v: Array, sinks: Array | None, ranges: _BothRanges
) -> Array:
    return _forward(settings, q, k, v, sinks, ranges)[0]


def _forward(
    settings: _Settings, q: Array, k: Array, v: Array, sinks: Array | None, ranges: _BothRanges
) -> tuple[Array, tuple[Any, ...]]:
    blocks = settings.forward
    wide = v.shape[3]
    o_BTNH = (*q.shape[:3], wide)
    rows_BNT = (q.shape[0], q.shape[2], q.shape[1])
    of_heads = (
        []
        if sinks is None
        else [(sinks.astype(jnp.float32), pl.BlockSpec((None,), lambda i, n, b: (n,)))]
    )
    o, lse = _run(
        _forward_kernel,
        settings,
        blocks,
        blocks.queries,
        inputs=[
            *_queries_and_all_keys(q, k, v, blocks.queries),
            *_ranges(ranges[0], blocks.queries),
            *of_heads,
        ],
        outputs=[
            (o_BTNH, q.dtype, _block(blocks.queries, wide)),
            (rows_BNT, jnp.float32, _statistics(blocks.queries)),
        ],
    )
    o = checkpoint_name(o, ATTENDED)
    return o, (q, k, v, sinks, ranges, o, checkpoint_name(lse, ATTENDED))


def _backward(
    settings: _Settings, residuals: tuple[Any, ...], do: Array
) -> tuple[Array | None, ...]:
    q, k, v, sinks, (of_queries, of_keys), o, lse = residuals
    blocks = settings.backward
    group = q.shape[2] // k.shape[2]
    # The sum is [B, N, T].
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    statistics = _statistics(blocks.queries)
    per_query = [(do, _block(blocks.queries, do.shape[3])), (lse, statistics), (delta, statistics)]
    (dq,) = _run(
        _queries_kernel,
        settings,
        blocks,
        blocks.queries,
        inputs=[
            *_queries_and_all_keys(q, k, v, blocks.queries),
            *_ranges(of_queries, blocks.queries),
            *per_query,
        ],
        outputs=[(q.shape, q.dtype, _block(blocks.queries, q.shape[3]))],
    )
    of_k, of_v = (_block(blocks.keys, x.shape[3]) for x in (k, v))
    all_q, all_do = (
        pl.BlockSpec((None, x.shape[1], group, x.shape[3]), lambda j, n, b: (b, 0, n, 0))
        for x in (q, do)
    )
    statistics = pl.BlockSpec((None, group, q.shape[1]), lambda j, n, b: (b, n, 0))
    per_query = [(do, all_do), (lse, statistics), (delta, statistics)]
    dk, dv = _run(
        _keys_kernel,
        settings,
        blocks,
        blocks.keys,
        inputs=[(q, all_q), (k, of_k), (v, of_v), *_ranges(of_keys, blocks.keys), *per_query],
        outputs=[(k.shape, k.dtype, of_k), (v.shape, v.dtype, of_v)],
    )
    d_sinks = (
        None
        if sinks is None
        else sinks_gradient(sinks[:, None], lse, delta).sum((0, 2)).astype(sinks.dtype)
    )
    return dq, dk, dv, d_sinks, None


_attention.defvjp(_forward, _backward)


def _block(size: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, size, None, width), lambda i, n, b: (b, i, n, 0))


def _ranges(ranges: _Ranges, size: int) -> list[tuple[Array, pl.BlockSpec]]:
    return [(ends, pl.BlockSpec((None, size), lambda i, n, b: (b, i))) for ends in ranges]


def _statistics(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, size), lambda i, n, b: (b, n, i))


def _queries_and_all_keys(
    q: Array, k: Array, v: Array, size: int
) -> list[tuple[Array, pl.BlockSpec]]:
    group = q.shape[2] // k.shape[2]
    whole = [
        (
            x,
            pl.BlockSpec(
                (None, x.shape[1], None, x.shape[3]), lambda i, n, b: (b, 0, n // group, 0)
            ),
        )
        for x in (k, v)
    ]
    return [(q, _block(size, q.shape[3])), *whole]


def _run(
    kernel: Callable[..., None],
    settings: _Settings,
    blocks: Blocks,
    size: int,
    *,
    inputs: list[tuple[Array, pl.BlockSpec]],
    outputs: list[tuple[tuple[int, ...], DTypeLike, pl.BlockSpec]],
) -> Any:
    """Runs a program per block of `size`, head and row of the first output, `[B, T, heads, H]`."""
    rows, length, heads, _ = outputs[0][0]
    varying = jax.typeof(inputs[0][0]).manual_axis_type  # all inputs vary equally

    def program(*refs: object) -> None:
        # Inside shard_map the interpreter evaluates operations one by one, and shard_map refuses
        # operations between a varying array and a kernel constant. jit keeps the kernel whole.
        jax.jit(partial(kernel, settings))(*refs)

    return pl.pallas_call(
        program,
        grid=(length // size, heads, rows),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for *_, spec in outputs],
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)
            for shape, dtype, _ in outputs
        ],
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        interpret=current_platform() != "cuda",
        name=f"attention{kernel.__name__}".removesuffix("_kernel"),
    )(*(array for array, _ in inputs))


def _forward_kernel(settings: _Settings, *refs: Any) -> None:
    q_ref, k_ref, v_ref, first_ref, last_ref, *sink_ref, o_ref, lse_ref = refs
    q = q_ref[...]
    first = first_ref[...]
    last = last_ref[...]
    size = settings.forward.keys

    def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        o, highest, total = carry
        keys = pl.ds(j * size, size)
        k = k_ref[keys, :]
        v = v_ref[keys, :]
        s = jnp.where(_within(_rows(j, size), first, last), _scores(q, k, settings), -jnp.inf)
        higher = jnp.maximum(highest, jnp.max(s, axis=1))
        p = jnp.exp2(s - higher[:, None])
        rescale = jnp.exp2(highest - higher)
        return (
            rescale[:, None] * o + triton.dot(p.astype(v.dtype), v),
            higher,
            rescale * total + jnp.sum(p, axis=1),
        )

    zeros = jnp.zeros(first.shape, jnp.float32)
    o = jnp.zeros(o_ref.shape, jnp.float32)
    # As in `blockwise_attention`, the softmax begins with the sink, and the other kernels need not
    # know it.
    highest, total = (
        (zeros + sink_ref[0][...] * _LOG2_E, zeros + 1)
        if sink_ref
        else (zeros + _NOTHING_SEEN, zeros)
    )
    o, highest, total = lax.fori_loop(*_visited(first, last, size), visit, (o, highest, total))
    total = jnp.where(total > 0, total, 1)  # a row that sees nothing outputs 0
    o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = (highest + jnp.log2(total)) / _LOG2_E


def _queries_kernel(settings: _Settings, *refs: Any) -> None:
    q_ref, k_ref, v_ref, first_ref, last_ref, do_ref, lse_ref, delta_ref, dq_ref = refs
    q = q_ref[...]
    do = do_ref[...]
    first = first_ref[...]
    last = last_ref[...]
    size = settings.backward.keys
    lse = lse_ref[...][:, None]
    delta = delta_ref[...][:, None]

    def visit(j: Array, dq: Array) -> Array:
        keys = pl.ds(j * size, size)
        k = k_ref[keys, :]
        v = v_ref[keys, :]
        seen = _within(_rows(j, size), first, last)
        _, ds = _gradients(
            _scores(q, k, settings), seen, lse, triton.dot(do, v, trans_b=True) - delta, settings
        )
        return dq + triton.dot(ds.astype(k.dtype), k)

    dq = lax.fori_loop(*_visited(first, last, size), visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * settings.scale).astype(dq_ref.dtype)


def _keys_kernel(settings: _Settings, *refs: Any) -> None:
    """Computes blocks of dk and dv; scores are transposed here, `[keys, queries]`."""
    q_ref, k_ref, v_ref, first_ref, last_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref = refs
    k = k_ref[...]
    v = v_ref[...]
    first = first_ref[...]
    last = last_ref[...]
    size = settings.backward.queries

    def visit(g: Array, i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        queries = pl.ds(i * size, size)
        q = q_ref[queries, g, :]
        do = do_ref[queries, g, :]
        seen = _within(_rows(i, size), first, last)
        dp = triton.dot(v, do, trans_b=True) - delta_ref[g, queries]
        p, ds = _gradients(_scores(k, q, settings), seen, lse_ref[g, queries], dp, settings)
        return dk + triton.dot(ds.astype(q.dtype), q), dv + triton.dot(p.astype(do.dtype), do)

    lower, upper = _visited(first, last, size)
    zeros = tuple(jnp.zeros(x.shape, jnp.float32) for x in (k, v))
    dk, dv = lax.fori_loop(
        0,
        q_ref.shape[1],
        lambda g, carry: lax.fori_loop(lower, upper, partial(visit, g), carry),
        zeros,
    )
    dk_ref[...] = (dk * settings.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _rows(block: Array, size: int) -> Array:
    return block * size + jnp.arange(size)


def _visited(first: Array, last: Array, size: int) -> tuple[Array, Array]:
    """Returns the block bounds (first, last + 1) that cover all ranges."""
    return lax.div(jnp.min(first), size), lax.div(jnp.max(last) + size, size)


def _within(index: Array, first: Array, last: Array) -> Array:
    return (first[:, None] <= index) & (index <= last[:, None])


def _scores(x: Array, y: Array, settings: _Settings) -> Array:
    """Returns scores times log2(e), because GPUs compute powers of two."""
    s = triton.dot(x, y, trans_b=True)
    if settings.softcap is None:
        return s * (settings.scale * _LOG2_E)
    return jnp.tanh(s * (settings.scale / settings.softcap)) * (settings.softcap * _LOG2_E)


def _gradients(
    s: Array, seen: Array, lse: Array, dp: Array, settings: _Settings
) -> tuple[Array, Array]:
    """Returns the attention weights, and the gradient of the unscaled products of queries and keys.

    `dp` is the gradient of the weights minus its weighted mean.
    """
    p = jnp.where(seen, jnp.exp2(s - lse * _LOG2_E), 0)
    ds = p * dp
    return p, ds if settings.softcap is None else ds * (1 - (s / (settings.softcap * _LOG2_E)) ** 2)
