"""Normalisation of queries and keys before attention (arXiv 2010.04245)."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_size
from jaxtp.layers.norm import rms_normalise
from jaxtp.layers.parameter import PaddedDim, Precision, parameter
from jaxtp.mesh import TP

ATTEND = "attend"  # name of the part of attention between its projections

QKNormKind = Literal["none", "head", "projection"]


class QKNorm(nnx.Module):
    """RMS normalisation of a projection whose heads are split over tp; called inside attention's `device_view`.

    Kind "head" normalises each head, with one scale `[H]` (Qwen 3); "projection" normalises the whole projection, with
    a scale `[heads * H]` split like the heads and a sum over tp (OLMo 2). With `plus_one` the factor is 1 + scale
    (Gemma 3).
    """

    def __init__(
        self,
        kind: QKNormKind,
        heads: PaddedDim,
        *,
        eps: float,
        plus_one: bool = False,
        precision: Precision = Precision(),
    ):
        self.per_head = kind == "head"
        self.heads = heads
        self.eps, self.plus_one = eps, plus_one
        self.precision = precision
        size, spec = (heads.factors[-1], P()) if self.per_head else (heads.size, P(TP))
        initial = (jnp.zeros if plus_one else jnp.ones)(size, precision.param)
        self.scale = parameter("scale", initial, spec, padding=() if self.per_head else ((-1, heads),))

    def __call__(self, x: Array, scale_shard: Array) -> Array:
        """Normalises this device's heads, `[b, T, heads, H]`."""
        if self.per_head:
            scale = self.precision.load(scale_shard, None, used_by_all_tp=True)
            if self.plus_one:
                x32 = x.astype(jnp.float32)
                return (rms_normalise(x32, self.eps) * (1 + scale.astype(jnp.float32))).astype(x.dtype)
            return rms_normalise(x, self.eps) * scale
        sharing = self.heads.shared_by(axis_size(TP))
        scale = self.precision.load(scale_shard, None, tp_gather=(0, sharing))
        x32 = x.astype(jnp.float32)
        squares = all_reduce(jnp.sum(jnp.square(x32), axis=(-2, -1), keepdims=True), TP)
        normalised = x32 * jax.lax.rsqrt(squares / (self.heads.size * sharing) + self.eps)
        return normalised.astype(x.dtype) * scale.reshape(x.shape[-2:])
