"""Causal depthwise convolutions over tokens, and the short convolution of LFM2 (arXiv 2511.23404).

A convolution mixes each feature over the last W tokens of its document. tp splits the features, so
it needs nothing from other devices of a tp group; over cp a device receives the W - 1 tokens before
each of its chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import axis_size, batch_spec, constrain, device_view, token_spec
from jaxtp.config.schema import CountOrZero, Settings
from jaxtp.layers.branch import Branch, KVCache
from jaxtp.layers.cache import LAYER_SPEC, NewTokens
from jaxtp.layers.context import Sequences, with_halo
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext, RowParallelLinear
from jaxtp.layers.lora import Target
from jaxtp.layers.parameter import PaddedDim, Weights, own_params_and_specs, parameter
from jaxtp.layers.positions import segment_positions
from jaxtp.mesh import CP, TP

CONVOLUTION = "short_convolution"  # name in profiles of the layer without its projections
# Outputs of `in_proj`: scale, gate and value
CONVOLUTION_TARGETS: tuple[Target, ...] = ("b_proj", "gate_proj", "v_proj")


def convolution_taps(width: int, dim: PaddedDim, dtype: Any, rngs: nnx.Rngs) -> Any:
    """Returns the parameter `[W, F]` of a convolution, whose last tap is for the current token."""
    # The initial values of PyTorch's convolutions
    bound = width**-0.5
    initial = jax.random.uniform(rngs.params(), (width, dim.size), dtype, -bound, bound)
    return parameter("taps", initial, P(None, TP), padding=((-1, dim),))


def with_earlier(x: Array, width: int, sequences: Sequences) -> tuple[Array, Array]:
    """Returns a device's tokens after the W - 1 tokens before them, and their positions.

    Args:
      x: local features `[b, T/cp, F]`.
      width: the number of tokens W that a convolution reads.

    Returns:
      A device's chunks of a row, as rows of their own `[b * chunks, W - 1 + t, F]`, and the
      positions `[b * chunks, t]` of their tokens in their documents.
    """
    rows, length, features = x.shape
    chunks = sequences.num_chunks
    positions = sequences.local_positions(length * axis_size(CP))
    if sequences.segments is not None:
        positions = jnp.take(segment_positions(sequences.segments), positions, axis=1)
    positions = jnp.broadcast_to(positions, (rows, length)).reshape(rows * chunks, -1)
    before_and_chunk = jnp.stack(with_halo(x, width - 1, chunks), axis=1)
    return before_and_chunk.reshape(rows * chunks, -1, features), positions


def convolve(tokens: Array, taps: Array, positions: Array) -> Array:
    """Returns the convolution `[b, T, F]` in float32.

    Args:
      tokens: `[b, W - 1 + T, F]`, from W - 1 tokens before the first on.
      taps: `[W, F]`.
      positions: `[b, T]`, in documents; they hide the tokens before a document.
    """
    reach = taps.shape[0] - 1  # W - 1
    length = positions.shape[1]
    tokens32 = tokens.astype(jnp.float32)
    y = taps[reach] * tokens32[:, reach:]  # [b, T, F]
    for back in range(1, reach + 1):
        is_in_document = positions[..., None] >= back
        earlier = tokens32[:, reach - back :][:, :length]
        y += taps[reach - back] * jnp.where(is_in_document, earlier, 0)
    return y


def last_tokens(tokens: Array, num_kept: Array, width: int) -> Array:
    """Returns the W - 1 tokens `[b, W - 1, F]` that end with the last of `num_kept` `[b, 1]`.

    Args:
      tokens: `[b, W - 1 + T, F]`, from W - 1 tokens before the first on.
    """
    index = num_kept + jnp.arange(width - 1)
    return jnp.take_along_axis(tokens, index[..., None], axis=1)


def recomputed(function: Callable[..., Any], *arguments: Array) -> Any:
    """Calls a chain of elementwise operations, which the backward pass repeats.

    A nested `jax.checkpoint` would follow the block's policy, and `none` would save every float32
    array of it.
    """
    call = jax.custom_vjp(function)
    call.defvjp(
        lambda *args: (function(*args), args),
        lambda args, grads: jax.vjp(function, *args)[1](grads),
    )
    return call(*arguments)


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionConfig(Settings):
    """Settings of a short convolution."""

    short_conv: CountOrZero = 0
    """Tokens that a gated short convolution reads, with the current one; it replaces attention in
    blocks where this is not 0."""


class ShortConvolution(Branch):
    """A gated convolution, `out(gate * convolution(scale * value))`.

    Shapes: `[B, T, D] -> [B, T, D]`. Kernels `in_proj.kernels`: scale, gate and value `[D, D]`;
    `taps` `[W, D]`; `out` `[D, D]`. tp splits the features; if it does not divide D, they are
    padded.
    """

    over_cp = True

    def __init__(
        self,
        d_model: int,
        config: ShortConvolutionConfig,
        context: LayerContext = LayerContext(),
        *,
        rngs: nnx.Rngs,
    ):
        if not config.short_conv:
            raise ValueError("short_conv=0: a convolution reads at least the current token")
        self.width = config.short_conv
        self.caller_communicates = context.caller_communicates
        self.precision = context.precision
        self.dim = PaddedDim((d_model,))
        self.in_proj = ColumnParallelLinear(
            d_model, (self.dim,) * 3, context, targets=CONVOLUTION_TARGETS, rngs=rngs
        )
        self.taps = convolution_taps(self.width, self.dim, self.precision.param, rngs)
        self.out = RowParallelLinear(self.dim, d_model, context, target="o_proj", rngs=rngs)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Reads each document from its first token on."""
        # Only routers read chosen experts.
        sequences = replace(sequences, experts=None)
        weights, specs = own_params_and_specs(self)
        in_specs = (specs, token_spec(TP), batch_spec(None))
        mix = device_view(self._mix, CONVOLUTION, in_specs, token_spec(TP))
        return self.out(mix(weights, self.in_proj(x_BTD), sequences))

    def _load_taps(self, weights: Weights) -> Array:
        load = replace(self.precision, compute="float32").load
        return load(weights["taps"], None)  # [W, F/tp]

    def _mix(self, weights: Weights, projected: tuple[Array, ...], sequences: Sequences) -> Array:
        scale, gate, value = projected  # [b, T/cp, F/tp]
        tokens, positions = with_earlier(scale * value, self.width, sequences)
        return recomputed(_gated, tokens, gate, self._load_taps(weights), positions)

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns the convolution's last inputs `[B, tp, W - 1, F/tp]`, which are zero."""
        tp = axis_size(TP)
        shape = (num_rows, tp, self.width - 1, self.dim.padded(tp) // tp)
        return (constrain(jnp.zeros(shape, self.precision.compute), LAYER_SPEC),)

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """Continues each row's window; packed tokens are of one row in each sequence."""
        weights, specs = own_params_and_specs(self)
        in_specs = (specs, token_spec(TP), LAYER_SPEC, batch_spec(None))
        mix = device_view(self._mix_on, CONVOLUTION, in_specs, (token_spec(TP), LAYER_SPEC))
        y, windows = mix(weights, self.in_proj(x_BTD), cache[0], new)
        return self.out(y), (windows,)

    def _mix_on(
        self, weights: Weights, projected: tuple[Array, ...], windows: Array, new: NewTokens
    ) -> tuple[Array, Array]:
        scale, gate, value = projected  # [b, T, F/tp]
        window = new.first(windows)[:, 0]  # [b, W - 1, F/tp]
        tokens = jnp.concatenate([window, scale * value], axis=1)
        y = _gated(tokens, gate, self._load_taps(weights), new.positions)
        num_kept = jnp.sum(new.is_kept(), axis=1, keepdims=True)
        window = last_tokens(tokens, num_kept, self.width)
        return y, new.replace(windows, window[:, None])


def _gated(tokens: Array, gate: Array, taps: Array, positions: Array) -> Array:
    y = convolve(tokens, taps, positions)
    return (gate.astype(jnp.float32) * y.reshape(gate.shape)).astype(gate.dtype)
