"""Normalisation of the residual stream, and of queries and keys.

Scales are split over fsdp like all weights, so fsdp only gathers weights and reduce-scatters
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_size, device_view
from jaxtp.config.schema import Positive, Settings
from jaxtp.layers.linear import FixedBias, LayerContext
from jaxtp.layers.parameter import (
    DType,
    PaddedDim,
    Precision,
    Weights,
    check_sizes,
    parameter,
    params_and_specs,
)
from jaxtp.layers.transport import activation_spec, sequence_dim
from jaxtp.mesh import STORAGE, TP

NormKind = Literal[
    "rms", "rms_plus_one", "rms_plain", "layer", "layer_plus_one", "layer_no_bias", "layer_plain"
]
NormPlacement = Literal["before", "after", "both", "parallel", "parallel_two"]
QKNormKind = Literal["none", "head", "heads", "head_plain", "head_bias", "projection"]

ATTEND = "attend"  # name in profiles of attention without its projections


@dataclass(frozen=True, kw_only=True)
class NormConfig(Settings):
    """Settings of the norms of a block."""

    norm: NormKind = "rms"
    """Kind of norm: rms divides by the root mean square and multiplies by a scale; layer subtracts
    the mean before, and adds a bias (GPT-2). With plus_one the factor is 1 + scale (Gemma,
    Nemotron); no_bias has only a scale (Cohere); plain has neither (OLMo 1)."""

    norm_eps: Positive = 1e-5
    """Added to the mean square, or the variance, in every norm."""

    norm_placement: NormPlacement = "before"
    """Place of the norms: before attention and MLP, after them (OLMo 2), or both (Gemma 2). With
    parallel, attention and MLP read one norm of the block's input, and the block adds both results
    (Cohere); with parallel_two each has its own norm (GPT-NeoX)."""

    norm_after_eps: Positive | None = None
    """Instead of norm_eps, for the norms after attention and MLP (Muse Glimmer)."""

    def after(self) -> NormConfig:
        """Returns the settings of the norms after attention and MLP."""
        return self if self.norm_after_eps is None else replace(self, norm_eps=self.norm_after_eps)


def scaled(x: Array, factor: float | Array) -> Array:
    """Multiplies in float32, which a factor in bfloat16 would not."""
    if isinstance(factor, float) and factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


class Norm(nnx.Module):
    """Normalises the last dim of `[B, T, D]` in float32.

    See arXiv 1910.07467 for RMSNorm, arXiv 1607.06450 for LayerNorm.

    Under sequence parallelism the scale's gradient is summed over tp. Scale and bias `[D]` are
    stored as `P(STORAGE)`.
    """

    def __init__(
        self,
        features: int,
        config: NormConfig = NormConfig(),
        context: LayerContext = LayerContext(),
    ):
        check_sizes("Norm", features=features)
        self.features = features
        self.kind = config.norm
        self.eps = config.norm_eps
        self.name = "layer_norm" if self.kind.startswith("layer") else "rms_norm"
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        dtype = context.precision.param
        scale = bias = None
        if not self.kind.endswith("plain"):
            initial = _initial_scale(self.kind, features, dtype)
            scale = parameter("scale", initial, P(STORAGE))
        if self.kind in ("layer", "layer_plus_one"):
            bias = parameter("bias", jnp.zeros(features, dtype), P(STORAGE))
        self.scale = scale
        self.bias = bias

    def __call__(self, x_BTD: Array) -> Array:
        """Normalises the last dim of `[B, T, D]`."""
        split_dim = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(split_dim)
        weights, specs = params_and_specs(self)
        normalise = partial(self._normalise, split_dim is not None)
        view = device_view(normalise, self.name, (activation, specs), out_specs=activation)
        return view(x_BTD, weights)

    def _normalise(self, split: bool, x: Array, weights: Weights) -> Array:
        loaded = {
            name: self.precision.load(shard, 0, used_by_all_tp=split)
            for name, shard in weights.items()
        }
        y = _normalised(x, self.kind, self.eps)
        if "scale" in loaded and self.kind.endswith("plus_one"):
            # As one product, autodiff would save 1 + scale.
            y = y + y * loaded["scale"].astype(jnp.float32)
        elif "scale" in loaded:
            y = y * loaded["scale"]
        if "bias" in loaded:
            y = y + loaded["bias"]
        return y.astype(x.dtype)


def _initial_scale(kind: NormKind, size: int, dtype: DType) -> Array:
    return (jnp.zeros if kind.endswith("plus_one") else jnp.ones)(size, dtype)


def _normalised(x: Array, kind: NormKind, eps: float) -> Array:
    """Normalises the last dim, without scale and bias.

    It does so in float32, except for rms and rms_plain (as transformers).
    """
    if kind in ("rms", "rms_plain"):
        return rms_normalise(x, eps)
    x32 = x.astype(jnp.float32)
    if kind.startswith("layer"):
        x32 -= jnp.mean(x32, axis=-1, keepdims=True)
    return rms_normalise(x32, eps)


def rms_normalise(x: Array, eps: float) -> Array:
    """Returns `x / sqrt(mean(x^2) + eps)` over the last dim, in the dtype of `x`.

    It is computed in float32.
    """
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps)).astype(x.dtype)


class QKNorm(nnx.Module):
    """Normalisation of a projection whose heads are split over tp.

    It is called inside attention's `device_view`.

    Kind "head" normalises each head, with one scale `[H]` (Qwen 3); "heads" has a scale for each
    head, `[heads * H]` split like the heads (Cohere); "head_plain" has none (Muse Glimmer);
    "head_bias" has one scale and one bias `[H]` (Phi). They normalise as `norm` does, and only
    "head_bias" adds a bias. "projection" is RMS normalisation of the whole projection, with a scale
    `[heads * H]` and a sum over tp (OLMo 2). The factor is 1 + scale with a plus_one `norm` (Gemma
    3).
    """

    def __init__(
        self,
        kind: QKNormKind,
        heads: PaddedDim,
        norm: NormConfig,
        precision: Precision = Precision(),
        *,
        fixed_bias: FixedBias | None = None,
    ):
        self.kind = kind
        self.heads = heads
        self.precision = precision
        self.fixed_bias = fixed_bias
        self.norm = norm.norm
        self.eps = norm.norm_eps
        self.one_scale = kind in ("head", "head_bias")
        width = heads.factors[-1]
        dtype = precision.param
        scale = bias = None
        if self.one_scale:
            scale = parameter("scale", _initial_scale(self.norm, width, dtype), P())
        elif kind != "head_plain":
            initial = _initial_scale(self.norm, heads.size, dtype)
            scale = parameter("scale", initial, P(TP), padding=((-1, heads),))
        if kind == "head_bias":
            bias = parameter("bias", jnp.zeros(width, dtype), P())
        self.scale = scale
        self.bias = bias

    def __call__(
        self, x: Array, scale_shard: Array | None, bias_shard: Array | None = None
    ) -> Array:
        """Normalises this device's heads, `[b, T, heads, H]`."""
        tp = axis_size(TP)
        scale = None
        if scale_shard is not None and self.one_scale:
            scale = self.precision.load(scale_shard, None, used_by_all_tp=True)  # [H]
        elif scale_shard is not None:
            num_shards = self.heads.num_shards(tp, scale_shard.size)
            scale = self.precision.load(scale_shard, None, tp_gather=(0, num_shards))
        if self.kind == "projection":
            x32 = x.astype(jnp.float32)
            size = self.heads.size * self.heads.shared_by(tp)
            local_sum = jnp.sum(jnp.square(x32), axis=(-2, -1), keepdims=True)
            mean_square = all_reduce(local_sum, TP) / size
            y = (x32 * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        else:
            y = _normalised(x, self.norm, self.eps)
        if scale is not None:
            if not self.one_scale:
                scale = scale.reshape(x.shape[-2:])  # [heads, H]
            if self.norm.endswith("plus_one"):
                scale = 1 + scale.astype(jnp.float32)
            y *= scale
        if bias_shard is not None:
            bias = self.precision.load(bias_shard, None, used_by_all_tp=True)
            if self.fixed_bias is not None:
                bias = self.fixed_bias.stop_gradient(bias)
            y += bias
        return y.astype(x.dtype)
