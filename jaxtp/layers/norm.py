"""Normalisation of the residual stream, and of queries and keys.

Scales are split over fsdp like all weights, so that fsdp communication is only weight gathers and gradient
reduce-scatters.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_size, device_view
from jaxtp.config.schema import Positive
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.parameter import PaddedDim, Precision, Weights, check_sizes, parameter, params_and_specs
from jaxtp.layers.sequence_parallel import activation_spec, sequence_dim
from jaxtp.mesh import STORAGE, TP

NormKind = Literal["rms", "rms_plus_one", "layer"]
NormPlacement = Literal["before", "after", "both", "parallel", "parallel_two"]
QKNormKind = Literal["none", "head", "projection"]

ATTEND = "attend"  # name in profiles of attention without its projections


@dataclass(frozen=True, kw_only=True)
class NormConfig:
    """Settings of the norms of a block."""

    norm: NormKind = "rms"
    """Kind of norm: rms divides by the root mean square and multiplies by a scale; rms_plus_one multiplies by 1 + scale
    (Gemma); layer subtracts the mean, and adds a bias (GPT-2)."""

    norm_eps: Positive = 1e-5
    """Added to the mean square, or the variance, in every norm."""

    norm_placement: NormPlacement = "before"
    """Place of the norms: before attention and MLP, after them (OLMo 2), or both (Gemma 2). parallel adds both to the
    same input, normalised once (Cohere); in parallel_two each has a norm (GPT-NeoX)."""

    norm_after_eps: Positive | None = None
    """norm_eps of the norms after attention and MLP; by default the same."""

    def after(self) -> "NormConfig":
        """Returns the settings of the norms after a branch."""
        return self if self.norm_after_eps is None else replace(self, norm_eps=self.norm_after_eps)


class Norm(nnx.Module):
    """Normalises the last dim of `[B, T, D]` in float32 (RMSNorm: arXiv 1910.07467; LayerNorm: arXiv 1607.06450).

    Under sequence parallelism the scale's gradient is summed over tp. Scale and bias `[D]` are stored as `P(STORAGE)`.
    """

    def __init__(self, features: int, config: NormConfig = NormConfig(), context: LayerContext = LayerContext()):
        check_sizes("Norm", features=features)
        self.features, self.kind, self.eps = features, config.norm, config.norm_eps
        self.name = "layer_norm" if self.kind == "layer" else "rms_norm"
        self.sequence_parallel = context.sequence_parallel
        self.precision, dtype = context.precision, context.precision.param
        initial = jnp.zeros if self.kind == "rms_plus_one" else jnp.ones
        self.scale = parameter("scale", initial(features, dtype), P(STORAGE))
        self.bias = parameter("bias", jnp.zeros(features, dtype), P(STORAGE)) if self.kind == "layer" else None

    def __call__(self, x_BTD: Array) -> Array:
        """Normalises the last dim of `[B, T, D]`."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(sequence)
        weights, specs = params_and_specs(self)
        normalise = partial(self._normalise, sequence is not None)
        return device_view(normalise, self.name, in_specs=(activation, specs), out_specs=activation)(x_BTD, weights)

    def _normalise(self, split: bool, x: Array, weights: Weights) -> Array:
        loaded = {name: self.precision.load(shard, 0, used_by_all_tp=split) for name, shard in weights.items()}
        if self.kind == "rms":
            return rms_normalise(x, self.eps) * loaded["scale"]
        x32 = x.astype(jnp.float32)
        if self.kind == "rms_plus_one":
            normalised = rms_normalise(x32, self.eps)  # times 1 + scale: as a product, it would save 1 + scale
            return (normalised + normalised * loaded["scale"].astype(jnp.float32)).astype(x.dtype)
        centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        return (rms_normalise(centred, self.eps) * loaded["scale"] + loaded["bias"]).astype(x.dtype)


def rms_normalise(x: Array, eps: float) -> Array:
    """Returns `x / sqrt(mean(x^2) + eps)` over the last dim, computed in float32, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)


class QKNorm(nnx.Module):
    """RMS normalisation of a projection whose heads are split over tp; called inside attention's `device_view`.

    Kind "head" normalises each head, with one scale `[H]` (Qwen 3); "projection" normalises the whole projection, with
    a scale `[heads * H]` split like the heads and a sum over tp (OLMo 2). The factor is 1 + scale if `norm` is
    rms_plus_one (Gemma 3).
    """

    def __init__(self, kind: QKNormKind, heads: PaddedDim, norm: NormConfig, precision: Precision = Precision()):
        self.heads, self.precision, self.per_head = heads, precision, kind == "head"
        self.eps, self.plus_one = norm.norm_eps, norm.norm == "rms_plus_one"
        size, spec = (heads.factors[-1], P()) if self.per_head else (heads.size, P(TP))
        initial = (jnp.zeros if self.plus_one else jnp.ones)(size, precision.param)
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
