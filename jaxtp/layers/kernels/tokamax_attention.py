"""Causal self-attention by the Mosaic kernels of tokamax, for Hopper and Blackwell.

The public function of tokamax takes no ranges of keys, so this file calls classes of
`tokamax._src`, and the extra bounds the versions. The forward kernel skips blocks of keys that no
query sees. The backward kernels skip only keys after the queries: they compute and mask the scores
of other documents, and those outside of a window. `scripts/tokamax_absent.py` interprets and
compiles them; nobody has run them on a GPU.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import mlir
from tokamax import config
from tokamax._src.ops.attention.base import Mask
from tokamax._src.ops.attention.pallas_mosaic_gpu import PallasMosaicGpuFlashAttention
from tokamax._src.ops.attention.pallas_mosaic_gpu_vjp import PallasMosaicGpuFlashAttentionVjp

from jaxtp.collectives import ATTENDED, vary_alike, vary_like
from jaxtp.layers.kernels.padding import pad_to, round_up
from jaxtp.layers.positions import key_ranges

# The backward kernels read blocks of this many queries, also beyond the last query.
_BLOCK = 128


_untyped = Primitive("untyped")
"""Returns its operand, typed as an array that varies over no axis of the mesh.

JAX refuses to trace Mosaic kernels of several warps on arrays that vary. The results are marked as
varying, and no gradient passes here: both are within the rules of `_attention`.
"""
_untyped.def_impl(lambda x: x)
_untyped.def_abstract_eval(lambda x: x.update(manual_axis_type=type(x.manual_axis_type)()))
mlir.register_lowering(_untyped, lambda context, x: [x])


class _Operands(NamedTuple):
    q: Array
    k: Array
    v: Array
    first: Array  # first key that each query sees


class _Settings(NamedTuple):
    """Compile-time settings."""

    scale: float
    softcap: float | None


def tokamax_attention(
    q_BTNH: Array,
    k_BTKH: Array,
    v_BTKH: Array,
    segments_BT: Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    **excluded: None,
) -> Array:
    """Returns values weighted by causal attention, `[B, T, N, values' width]`.

    For the arguments see `blockwise_attention`; `Kernel.problems` excludes others.
    """
    del excluded
    length = q_BTNH.shape[1]
    whole_blocks = {1: round_up(length, _BLOCK)}
    q, k, v = (pad_to(x, whole_blocks) for x in (q_BTNH, k_BTKH, v_BTKH))
    first, _ = key_ranges(q_BTNH.shape[:2], length, window, segments_BT)
    # Queries of padding see only padding.
    first = pad_to(first, whole_blocks, length)
    operands = vary_alike(_Operands(q, k, v, first))
    return _attention(_Settings(scale, softcap), operands)[:, :length]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(settings: _Settings, operands: _Operands) -> Array:
    return _forward(settings, operands)[0]


_Residuals = tuple[_Operands, Array, Array]


def _forward(settings: _Settings, operands: _Operands) -> tuple[Array, _Residuals]:
    q = operands.q
    arguments, options = _bound(settings, operands)
    options["return_residuals"] = True
    # It has no tuned blocks for ranges, and would print a warning.
    with config.ignore_autotuning_cache(True):
        o, (max_score, total) = PallasMosaicGpuFlashAttention()(*arguments, **options)
    o = checkpoint_name(vary_like(o, q), ATTENDED)
    log_sum = checkpoint_name(vary_like(max_score + jnp.log(total), q), ATTENDED)
    return o, (operands, o, log_sum)


def _backward(settings: _Settings, residuals: _Residuals, do: Array) -> tuple[_Operands]:
    operands, o, log_sum = residuals
    q = operands.q
    arguments, options = _bound(settings, operands)
    # Of its maximum and total of a softmax, only exp(maximum) * total matters.
    log_sum = _untyped.bind(log_sum)
    statistics = (log_sum, jnp.ones_like(log_sum))
    outputs = (_untyped.bind(o), _untyped.bind(do))
    with config.ignore_autotuning_cache(True):
        gradients = PallasMosaicGpuFlashAttentionVjp()(statistics, *outputs, *arguments, **options)
    dq, dk, dv = (vary_like(gradients[name], q) for name in "qkv")
    return (_Operands(dq, dk, dv, None),)  # type: ignore[arg-type]  # integers have no gradient


_attention.defvjp(_forward, _backward)


def _bound(settings: _Settings, operands: _Operands) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the positional and the keyword arguments of both operations of tokamax."""
    q, k, v, first = map(_untyped.bind, operands)
    bound = PallasMosaicGpuFlashAttention().bind(
        q,
        k,
        v,
        mask=Mask(k_start=first[:, None], is_causal=True),
        logits_scale=settings.scale,
        logits_soft_cap=settings.softcap,
    )
    return bound.args, bound.kwargs
