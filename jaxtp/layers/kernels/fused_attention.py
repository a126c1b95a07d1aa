"""Causal self-attention as fused Pallas kernels for NVIDIA GPUs, compiled by Triton.

They never store `[T, T]` scores. The algorithm is FlashAttention-2 (Dao, arXiv 2307.08691). A
program holds a block of rows on the chip and visits the blocks that these rows see, or are seen by:

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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.typing import DTypeLike

from jaxtp.collectives import ATTENDED, vary_alike
from jaxtp.layers.kernels.blockwise_attention import sinks_gradient
from jaxtp.layers.kernels.padding import pad_ranges, pad_to, round_up
from jaxtp.layers.kernels.programs import padded_size, run_programs
from jaxtp.layers.positions import Part, key_ranges, query_ranges

_Ranges = tuple[Array, Array]
"""First and last key that each query sees, or first and last query that sees each key."""

_Input = tuple[Array, pl.BlockSpec]
_Ref = Any

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


class _Operands(NamedTuple):
    q: Array
    k: Array
    v: Array
    sinks: Array | None
    keys_of_queries: Any  # `_Ranges`
    queries_of_keys: Any


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

    For the arguments see `blockwise_attention`, for the widest heads `KERNELS` (`select.py`). Off
    CUDA the kernels run in Pallas' interpreter, slowly, for tests.
    """
    length = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    width = v_BSKH.shape[3]
    max_width = padded_size(max(q_BTNH.shape[3], width))
    forward, backward = block_sizes(max_width, q_BTNH.dtype)
    query_block = max(forward.queries, backward.queries)
    key_block = max(forward.keys, backward.keys)
    keys_of_queries = key_ranges(q_BTNH.shape[:2], num_keys, window, segments_BT, part)
    queries_of_keys = query_ranges(keys_of_queries, num_keys, window, segments_BT, part)
    beyond = length + num_keys
    keys_of_queries = pad_ranges(keys_of_queries, query_block, beyond)
    q = _padded(q_BTNH, query_block)
    queries_of_keys = pad_ranges(queries_of_keys, key_block, beyond)
    k = _padded(k_BSKH, key_block)
    v = _padded(v_BSKH, key_block)
    operands = _Operands(q, k, v, sinks, keys_of_queries, queries_of_keys)
    settings = _Settings(scale, softcap, forward, backward)
    return _attention(settings, vary_alike(operands))[:, :length, :, :width]


def _padded(x: Array, block: int) -> Array:
    """Pads `[B, T, heads, H]` to whole blocks and to a width that Triton multiplies."""
    _, length, _, width = x.shape
    return pad_to(x, {1: round_up(length, block), 3: padded_size(width)})


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: _Settings, operands: _Operands) -> Array:
    return _forward(settings, operands)[0]


_Residuals = tuple[_Operands, Array, Array]


def _forward(settings: _Settings, operands: _Operands) -> tuple[Array, _Residuals]:
    blocks = settings.forward
    size = blocks.queries
    rows, length, heads, _ = operands.q.shape
    width = operands.v.shape[3]
    inputs = _inputs_of_queries(operands, size)
    if operands.sinks is not None:
        sinks = operands.sinks.astype(jnp.float32)
        inputs.append((sinks, pl.BlockSpec((None,), lambda i, n, b: (n,))))
    o, lse = _run(
        _forward_kernel,
        settings,
        blocks,
        size,
        inputs=inputs,
        outputs=[
            ((rows, length, heads, width), operands.q.dtype, _block(size, width)),
            ((rows, heads, length), jnp.float32, _statistics(size)),
        ],
    )
    o = checkpoint_name(o, ATTENDED)
    lse = checkpoint_name(lse, ATTENDED)
    return o, (operands, o, lse)


def _backward(settings: _Settings, residuals: _Residuals, do: Array) -> tuple[_Operands]:
    operands, o, lse = residuals
    sinks = operands.sinks
    delta = jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32), axis=-1)
    delta = delta.swapaxes(1, 2)  # [B, N, T]
    dq = _queries_gradient(settings, operands, do, lse, delta)
    dk, dv = _keys_gradients(settings, operands, do, lse, delta)
    d_sinks = None
    if sinks is not None:
        summands = sinks_gradient(sinks[:, None], lse, delta)
        d_sinks = summands.sum((0, 2)).astype(sinks.dtype)
    return (_Operands(dq, dk, dv, d_sinks, None, None),)


_attention.defvjp(_forward, _backward)


def _queries_gradient(
    settings: _Settings,
    operands: _Operands,
    do: Array,
    lse: Array,
    delta: Array,
) -> Array:
    q = operands.q
    size = settings.backward.queries
    (dq,) = _run(
        _queries_kernel,
        settings,
        settings.backward,
        size,
        inputs=[
            *_inputs_of_queries(operands, size),
            (do, _block(size, do.shape[3])),
            (lse, _statistics(size)),
            (delta, _statistics(size)),
        ],
        outputs=[(q.shape, q.dtype, _block(size, q.shape[3]))],
    )
    return dq


def _keys_gradients(
    settings: _Settings,
    operands: _Operands,
    do: Array,
    lse: Array,
    delta: Array,
) -> list[Array]:
    q, k, v, _, _, queries_of_keys = operands
    size = settings.backward.keys
    group = q.shape[2] // k.shape[2]
    k_block = _block(size, k.shape[3])
    v_block = _block(size, v.shape[3])
    statistics = pl.BlockSpec((None, group, q.shape[1]), lambda j, n, b: (b, n, 0))

    def all_queries(x: Array) -> _Input:
        shape = (None, x.shape[1], group, x.shape[3])
        return x, pl.BlockSpec(shape, lambda j, n, b: (b, 0, n, 0))

    return _run(
        _keys_kernel,
        settings,
        settings.backward,
        size,
        inputs=[
            all_queries(q),
            (k, k_block),
            (v, v_block),
            *_ranges(queries_of_keys, size),
            all_queries(do),
            (lse, statistics),
            (delta, statistics),
        ],
        outputs=[(k.shape, k.dtype, k_block), (v.shape, v.dtype, v_block)],
    )


def _block(size: int, width: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, size, None, width), lambda i, n, b: (b, i, n, 0))


def _ranges(ranges: _Ranges, size: int) -> list[_Input]:
    return [(ends, pl.BlockSpec((None, size), lambda i, n, b: (b, i))) for ends in ranges]


def _statistics(size: int) -> pl.BlockSpec:
    return pl.BlockSpec((None, None, size), lambda i, n, b: (b, n, i))


def _inputs_of_queries(operands: _Operands, size: int) -> list[_Input]:
    """Returns blocks of `size` queries, all keys and values, and the ranges of keys."""
    q, k, v = operands[:3]
    group = q.shape[2] // k.shape[2]

    def all_keys(x: Array) -> _Input:
        shape = (None, x.shape[1], None, x.shape[3])
        return x, pl.BlockSpec(shape, lambda i, n, b: (b, 0, n // group, 0))

    queries = (q, _block(size, q.shape[3]))
    return [queries, all_keys(k), all_keys(v), *_ranges(operands.keys_of_queries, size)]


def _run(
    kernel: Callable[..., None],
    settings: _Settings,
    blocks: Blocks,
    size: int,
    *,
    inputs: list[_Input],
    outputs: list[tuple[tuple[int, ...], DTypeLike, pl.BlockSpec]],
) -> list[Array]:
    """Runs a program per block of `size`, head and row of the first output, `[B, T, heads, H]`."""
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, dtypes, out_specs = zip(*outputs, strict=True)
    rows, length, heads, _ = shapes[0]
    return run_programs(
        lambda *refs: jax.jit(partial(kernel, settings))(*refs),
        arrays,
        [*zip(shapes, dtypes, strict=True)],
        grid=(length // size, heads, rows),
        options=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        name=f"attention{kernel.__name__}".removesuffix("_kernel"),
        in_specs=in_specs,
        out_specs=out_specs,
    )


def _forward_kernel(settings: _Settings, *refs: Any) -> None:
    q_ref, k_ref, v_ref, first_ref, last_ref, *sink_ref, o_ref, lse_ref = refs
    q = q_ref[...]
    first = first_ref[...]
    last = last_ref[...]
    size = settings.forward.keys

    def visit(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        o, max_score, total = carry
        keys = pl.ds(j * size, size)
        k = k_ref[keys, :]
        v = v_ref[keys, :]
        s = jnp.where(_visible(j, size, first, last), _scores(q, k, settings), -jnp.inf)
        new_max = jnp.maximum(max_score, jnp.max(s, axis=1))
        p = jnp.exp2(s - new_max[:, None])
        rescale = jnp.exp2(max_score - new_max)
        o = rescale[:, None] * o
        o += triton.dot(p.astype(v.dtype), v)
        total = rescale * total
        total += jnp.sum(p, axis=1)
        return o, new_max, total

    total = jnp.zeros(first.shape, jnp.float32)
    o = jnp.zeros(o_ref.shape, jnp.float32)
    # As in `blockwise_attention`, the softmax begins with the sink, and the other kernels need not
    # know it.
    if sink_ref:
        max_score = total + sink_ref[0][...] * _LOG2_E
        total += 1
    else:
        max_score = total + _NOTHING_SEEN
    bounds = _visited(first, last, size)
    o, max_score, total = lax.fori_loop(*bounds, visit, (o, max_score, total))
    # A row that sees nothing outputs 0.
    total = jnp.where(total > 0, total, 1)
    o_ref[...] = (o / total[:, None]).astype(o_ref.dtype)
    lse_ref[...] = (max_score + jnp.log2(total)) / _LOG2_E


class _Inputs(NamedTuple):
    """References to the inputs of a backward kernel."""

    q: _Ref
    k: _Ref
    v: _Ref
    first: _Ref
    last: _Ref
    do: _Ref
    lse: _Ref
    delta: _Ref


def _queries_kernel(settings: _Settings, *refs: Any) -> None:
    *input_refs, dq_ref = refs
    inputs = _Inputs(*input_refs)
    q = inputs.q[...]
    do = inputs.do[...]
    first = inputs.first[...]
    last = inputs.last[...]
    size = settings.backward.keys
    lse = inputs.lse[...][:, None]
    delta = inputs.delta[...][:, None]

    def visit(j: Array, dq: Array) -> Array:
        keys = pl.ds(j * size, size)
        k = inputs.k[keys, :]
        v = inputs.v[keys, :]
        visible = _visible(j, size, first, last)
        s = _scores(q, k, settings)
        dp = triton.dot(do, v, trans_b=True) - delta
        _, ds = _gradients(s, visible, lse, dp, settings)
        return dq + triton.dot(ds.astype(k.dtype), k)

    begin, end = _visited(first, last, size)
    dq = lax.fori_loop(begin, end, visit, jnp.zeros(q.shape, jnp.float32))
    dq_ref[...] = (dq * settings.scale).astype(dq_ref.dtype)


def _keys_kernel(settings: _Settings, *refs: Any) -> None:
    """Computes blocks of dk and dv; scores are transposed here, `[keys, queries]`."""
    *input_refs, dk_ref, dv_ref = refs
    inputs = _Inputs(*input_refs)
    k = inputs.k[...]
    v = inputs.v[...]
    first = inputs.first[...]
    last = inputs.last[...]
    size = settings.backward.queries

    def visit(head: Array, i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        dk, dv = carry
        queries = pl.ds(i * size, size)
        q = inputs.q[queries, head, :]
        do = inputs.do[queries, head, :]
        visible = _visible(i, size, first, last)
        dp = triton.dot(v, do, trans_b=True) - inputs.delta[head, queries]
        s = _scores(k, q, settings)
        lse = inputs.lse[head, queries]
        p, ds = _gradients(s, visible, lse, dp, settings)
        dk += triton.dot(ds.astype(q.dtype), q)
        dv += triton.dot(p.astype(do.dtype), do)
        return dk, dv

    begin, end = _visited(first, last, size)

    def visit_head(head: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        return lax.fori_loop(begin, end, partial(visit, head), carry)

    zeros = (jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32))
    dk, dv = lax.fori_loop(0, inputs.q.shape[1], visit_head, zeros)
    dk_ref[...] = (dk * settings.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv.astype(dv_ref.dtype)


def _visited(first: Array, last: Array, size: int) -> tuple[Array, Array]:
    """Returns the first block that covers a part of a range, and the end of these blocks."""
    begin = lax.div(jnp.min(first), size)
    end = lax.div(jnp.max(last) + size, size)
    return begin, end


def _visible(block: Array, size: int, first: Array, last: Array) -> Array:
    """Returns which rows of a block each range has, `[ranges, size]`."""
    index = block * size + jnp.arange(size)
    return (first[:, None] <= index) & (index <= last[:, None])


def _scores(x: Array, y: Array, settings: _Settings) -> Array:
    """Returns scores times log2(e), because GPUs compute powers of two."""
    s = triton.dot(x, y, trans_b=True)
    scale = settings.scale
    softcap = settings.softcap
    if softcap is None:
        return s * (scale * _LOG2_E)
    return jnp.tanh(s * (scale / softcap)) * (softcap * _LOG2_E)


def _gradients(
    s: Array,
    visible: Array,
    lse: Array,
    dp: Array,
    settings: _Settings,
) -> tuple[Array, Array]:
    """Returns the attention weights, and the gradient of the unscaled products of queries and keys.

    `dp` is the gradient of the weights minus its weighted mean.
    """
    p = jnp.where(visible, jnp.exp2(s - lse * _LOG2_E), 0)
    ds = p * dp
    if settings.softcap is not None:
        ds *= 1 - (s / (settings.softcap * _LOG2_E)) ** 2
    return p, ds
