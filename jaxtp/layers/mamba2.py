"""Mamba-2 (arXiv 2405.21060): Gated DeltaNet that adds values to its states, and subtracts nothing.

Nemotron-H, Granite 4 H and Falcon-H1 have it. In their words x are the values, B the keys and C the
queries of a group, and dt, the time step, is the strength of writing, which also decays the state.
A head's result gets `skip_scale` times its value, and is gated; then each group of heads is
normalised. Devices that share a group, like kv heads, sum its squares over tp.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_index, axis_size
from jaxtp.layers.convolution import recomputed
from jaxtp.layers.gated_delta import (
    CONVOLUTIONS,
    MAMBA_TARGETS,
    GatedDeltaConfig,
    GatedDeltaNet,
    convolved_heads,
    initial_steps,
)
from jaxtp.layers.kernels.delta_rule import State, Tokens, delta_rule, delta_step
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext
from jaxtp.layers.norm import NormConfig, scaled
from jaxtp.layers.parameter import PaddedDim, Weights, parameter
from jaxtp.mesh import TP

_CHUNK = 128  # Tokens; a token costs as many scores, and this share of its chunk's state.
_SCALES = (4, 3, 2, 1, 5)  # `mamba_scales` of what is projected
_BIASES = ("q_conv_bias", "k_conv_bias", "v_conv_bias")


class Mamba2(GatedDeltaNet):
    """Mamba-2, `delta_value_heads / tp` states per device.

    Shapes: `[B, T, D] -> [B, T, D]`, with G groups (key heads) of width N and H heads (value heads)
    of width P. Kernels `in_proj.kernels`: C and B `[D, G*N]`, x and gate `[D, H*P]`, time step
    `[D, H]`; `out` `[H*P, D]`. Taps `q_conv` of C, `k_conv` of B, `v_conv` of x `[W, ...]`, and
    their biases.
    """

    min_rate = 1.0
    step = staticmethod(partial(delta_step, subtracts=False))
    state_products = 2
    inside = (*GatedDeltaNet.inside, *_BIASES, "skip_scale")

    def __init__(
        self,
        d_model: int,
        config: GatedDeltaConfig,
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = NormConfig(),
        rngs: nnx.Rngs,
    ):
        super().__init__(d_model, config, context, norm=norm, rngs=rngs)
        dtype = self.precision.param
        heads = config.delta_heads
        values = heads.numbers(config.delta_value_dim)
        per_feature = partial(parameter, spec=P(TP))
        for name, dim in zip(_BIASES, (heads.keys, heads.keys, values), strict=True):
            bias = None
            if config.mamba_conv_bias:
                bias = per_feature("bias", jnp.zeros(dim.size, dtype), padding=((-1, dim),))
            setattr(self, name, bias)
        skip = jnp.ones(config.delta_value_heads, dtype)
        self.skip_scale = per_feature("skip_scale", skip, padding=((-1, heads.numbers()),))
        norm_scale = None
        if config.mamba_norm:
            scale = jnp.ones(values.size, dtype)
            norm_scale = per_feature("scale", scale, padding=((-1, values),))
        self.norm_scale = norm_scale

    def _add_projections(self, d_model: int, context: LayerContext, rngs: nnx.Rngs) -> None:
        config = self.config
        heads = config.delta_heads
        values = heads.numbers(config.delta_value_dim)
        self.in_proj = ColumnParallelLinear(
            d_model,
            (heads.keys, heads.keys, values, values, heads.numbers()),
            context,
            use_bias=config.mamba_bias,
            targets=MAMBA_TARGETS,
            rngs=rngs,
        )

    def project(self, x_BTD: Array) -> tuple[Array, ...]:
        """See `GatedDeltaNet`."""
        factors = [self.config.mamba_scales[i] for i in _SCALES]
        return tuple(map(scaled, super().project(x_BTD), factors))

    def _initial_dt_bias(self, rngs: nnx.Rngs) -> tuple[Array, PaddedDim]:
        dim = self.config.delta_heads.numbers()
        return initial_steps(dim, self.precision.param, rngs), dim

    def rule(self, tokens: Tokens, state: State = None) -> tuple[Array, Array]:
        """See `delta_rule`."""
        return delta_rule(tokens, state, chunk=_CHUNK, subtracts=False)

    def heads(self, weights: Weights, tokens: Array, positions: Array) -> tuple[Array, ...]:
        """See `GatedDeltaNet`."""
        config = self.config
        convolution = self.load_convolution(weights, *CONVOLUTIONS)
        if config.mamba_conv_bias:
            convolution += self.load_convolution(weights, *_BIASES)
        heads_of = partial(convolved_heads, config.delta_key_dim, config.delta_value_dim)

        def rounded(tokens: Array, *inputs: Array) -> list[Array]:
            return [x.astype(tokens.dtype) for x in heads_of(tokens, *inputs)]

        return tuple(recomputed(rounded, tokens, positions, *convolution))

    def strengths(self, weights: Weights, *numbers: Array) -> tuple[Array, Array]:
        """See `GatedDeltaNet`; the strength is the time step."""
        load = replace(self.precision, compute="float32").load
        (step,) = numbers
        bias = load(weights["dt_bias"], None)
        step = jax.nn.softplus(step.astype(jnp.float32) + bias)
        step = jnp.clip(step, self.config.mamba_min_step, self.config.mamba_max_step)
        return -jnp.exp(load(weights["decay_log"], None)) * step, step

    def gated(self, weights: Weights, y: Array, v: Array, gate: Array) -> Array:
        """Adds the values, gates and normalises; see `GatedDeltaNet`."""
        config = self.config
        tp = axis_size(TP)
        _, groups = config.delta_heads.on_device(tp)
        shared_by = config.delta_heads.keys.shared_by(tp)
        features = config.delta_value_heads // config.delta_key_heads * config.delta_value_dim

        def sum_of_squares(y: Array) -> Array:
            squares = jnp.sum(jnp.square(y), axis=-1, keepdims=True)  # [b, T, groups, 1]
            if shared_by == 1:
                return squares
            # The device adds to the sum of one of all groups.
            is_own = jnp.arange(tp // shared_by) == axis_index(TP) // shared_by
            sums = all_reduce(jnp.where(is_own, squares, 0), TP)
            return jnp.sum(jnp.where(is_own, sums, 0), axis=-1, keepdims=True)

        def run(y: Array, v: Array, gate: Array, *scales: Array) -> Array:
            # Chunks of a device are rows of `y` and `v`.
            y32, v32, gate32 = (x.reshape(gate.shape).astype(jnp.float32) for x in (y, v, gate))
            y = y32 + jnp.repeat(scales[0], config.delta_value_dim) * v32
            y *= jax.nn.silu(gate32)
            if config.mamba_norm:
                grouped = y.reshape(*y.shape[:2], groups, -1)
                mean_square = sum_of_squares(grouped) / features
                y = (grouped * jax.lax.rsqrt(mean_square + self.norm_eps)).reshape(y.shape)
                y *= scales[1]
            return y.astype(gate.dtype)

        load = partial(replace(self.precision, compute="float32").load, storage_dim=None)
        scales = [load(weights["skip_scale"])]
        if config.mamba_norm:
            scales.append(load(weights["norm_scale"]))
        return recomputed(run, y, v, gate, *scales)
