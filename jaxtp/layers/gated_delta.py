"""Gated DeltaNet (arXiv 2412.06464): linear attention with a matrix state.

Qwen3-Next and Qwen3.5 have it. Kimi Linear has Kimi Delta Attention (arXiv 2510.26692), with a
decay for each key channel, and with latents from which decays and gates are computed.

Queries, keys and values pass a causal depthwise convolution. Each value head has a state `[K, V]`:
a token decays it, and writes the difference of its value and the value that the state has for its
key (`kernels/delta_rule.py`). The results are normalised per head and gated. Each key head serves a
group of value heads. Both are split over tp like kv heads and their query heads, so that only the
column and the row layer communicate over tp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxtp.collectives import ATTENDED, axis_size, batch_spec, constrain, device_view, token_spec
from jaxtp.config.schema import (
    Count,
    CountOrZero,
    NonNegative,
    Positive,
    Settings,
    of_length,
)
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.branch import Branch, KVCache
from jaxtp.layers.cache import LAYER_SPEC, NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.convolution import (
    convolution_taps,
    convolve,
    last_tokens,
    recomputed,
    with_earlier,
)
from jaxtp.layers.kernels.delta_rule import Scan, State, Tokens, delta_rule, delta_step
from jaxtp.layers.kernels.select import architecture_of, pick_scan
from jaxtp.layers.latent_attention import DownProjection, enter_latents
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext, RowParallelLinear
from jaxtp.layers.lora import Target
from jaxtp.layers.norm import NormConfig, rms_normalise
from jaxtp.layers.parameter import PaddedDim, Weights, own_params_and_specs, parameter
from jaxtp.mesh import CP, TP, current_device

DELTA = "gated_delta"  # name in profiles of the layer without its projections

_L2_EPS = 1e-6  # added to the squared norm of queries and keys, in every family
_STEPS = (1e-3, 0.1)
"""Bounds of the initial values of softplus(dt_bias) in Kimi Delta Attention and Mamba-2."""
# Outputs of `in_proj`
DELTA_TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "b_proj", "a_proj")
KIMI_TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "b_proj")
MAMBA_TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "a_proj")
CONVOLUTIONS = ("q_conv", "k_conv", "v_conv")


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(Settings):
    """Settings of Gated DeltaNet and Mamba-2, layers with states."""

    delta_value_heads: CountOrZero = 0
    """Value heads of Gated DeltaNet, which replaces attention in blocks where this is not 0.
    Divisible by delta_key_heads; the layer pads both if mesh.tp needs more."""

    delta_key_heads: CountOrZero = 0
    """Gated DeltaNet: query and key heads."""

    delta_key_dim: CountOrZero = 0
    """Gated DeltaNet: width of a query or key head."""

    delta_value_dim: CountOrZero = 0
    """Gated DeltaNet: width of a value head."""

    delta_gate_rank: CountOrZero = 0
    """Width of the latents from which the gate, and a decay for each key channel, are computed:
    Kimi Delta Attention. 0 is Gated DeltaNet, with one decay for each head."""

    delta_conv: Count = 4
    """Gated DeltaNet: tokens that the causal convolution of queries, keys and values reads, with
    the current one."""

    delta_kind: Literal["gated_delta", "mamba2"] = "gated_delta"
    """Layer with states: Gated DeltaNet, or Mamba-2 (arXiv 2405.21060), whose value heads are its
    heads, and whose key heads are its groups, of delta_key_dim states each."""

    mamba_bias: bool = False
    """Mamba-2: biases on the projections."""

    mamba_out_bias: bool | None = None
    """Mamba-2: a bias on the output projection, if another than mamba_bias says."""

    mamba_conv_bias: bool = True
    """Mamba-2: a bias on the convolution."""

    mamba_norm: bool = True
    """Mamba-2: normalise the gated results of each group."""

    mamba_min_step: NonNegative = 0.0
    """Mamba-2: least time step of a head, after the softplus."""

    mamba_max_step: Positive | None = None
    """Mamba-2: largest time step of a head; by default no limit."""

    mamba_scales: Annotated[tuple[Positive, ...], of_length(7)] = (1.0,) * 7
    """Mamba-2: factors of the input, of the projected gates, values (x), keys (B), queries (C) and
    time steps, and of the output (Falcon-H1)."""

    @property
    def delta_targets(self) -> tuple[Target, ...]:
        """The outputs of `in_proj`, named as adapters name them."""
        if self.delta_kind == "mamba2":
            return MAMBA_TARGETS
        return KIMI_TARGETS if self.delta_gate_rank else DELTA_TARGETS

    @property
    def delta_heads(self) -> PaddedHeads:
        """The division of value heads over tp; key heads, which have the width, are kv heads."""
        group = self.delta_value_heads // self.delta_key_heads
        return PaddedHeads((self.delta_key_heads, group, self.delta_key_dim), self.delta_key_dim)


class GatedDeltaNet(Branch):
    """Gated DeltaNet, `delta_value_heads / tp` states per device.

    `norm` gives the epsilon of the norm before the gate.

    Shapes: `[B, T, D] -> [B, T, D]`, with Hk key heads of width K and Hv value heads of width V.
    Kernels `in_proj.kernels`: queries and keys `[D, Hk*K]`, values and gate `[D, Hv*V]`, write
    strength and decay `[D, Hv]`; `out` `[Hv*V, D]`; heads contiguous. Taps `q_conv`, `k_conv`,
    `v_conv` `[W, ...]`, the last for the current token.
    """

    over_cp = True
    min_rate = 0.01
    """Smallest initial value of exp(decay_log); the largest is 16."""
    step = staticmethod(delta_step)
    state_products: ClassVar[int] = 3
    """Products of a token with a state: to read it by key and by query, and to write."""
    inside: ClassVar[tuple[str, ...]] = (*CONVOLUTIONS, "decay_log", "dt_bias", "norm_scale")
    """Parameters outside of the projections."""

    def __init__(
        self,
        d_model: int,
        config: GatedDeltaConfig,
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = NormConfig(norm_eps=1e-6),
        rngs: nnx.Rngs,
    ):
        if not config.delta_key_heads or config.delta_value_heads % config.delta_key_heads:
            raise ValueError(
                f"delta_value_heads={config.delta_value_heads} is not divisible by "
                f"delta_key_heads={config.delta_key_heads}"
            )
        self.config = config
        self.caller_communicates = context.caller_communicates
        self.precision = context.precision
        dtype = self.precision.param
        heads = config.delta_heads
        width = config.delta_value_dim
        keys = heads.keys
        values = heads.numbers(width)
        numbers = heads.numbers()
        self._add_projections(d_model, context, rngs)

        taps_of = partial(convolution_taps, config.delta_conv, dtype=dtype, rngs=rngs)
        self.q_conv = taps_of(keys)
        self.k_conv = taps_of(keys)
        self.v_conv = taps_of(values)
        shape = (config.delta_value_heads,)
        rates = jax.random.uniform(rngs.params(), shape, dtype, self.min_rate, 16)
        padding = ((-1, numbers),)
        self.decay_log = parameter("decay_log", jnp.log(rates), P(TP), padding=padding)
        bias, bias_dim = self._initial_dt_bias(rngs)
        self.dt_bias = parameter("dt_bias", bias, P(TP), padding=((-1, bias_dim),))
        self.norm_scale = parameter("scale", jnp.ones(width, dtype), P())
        self.norm_eps = norm.norm_eps
        use_bias = config.mamba_bias if config.mamba_out_bias is None else config.mamba_out_bias
        use_bias &= config.delta_kind == "mamba2"
        self.out = RowParallelLinear(
            values, d_model, context, use_bias=use_bias, target="o_proj", rngs=rngs
        )

    def _add_projections(self, d_model: int, context: LayerContext, rngs: nnx.Rngs) -> None:
        heads = self.config.delta_heads
        values = heads.numbers(self.config.delta_value_dim)
        numbers = heads.numbers()
        features = (heads.keys, heads.keys, values, values, numbers, numbers)
        self.in_proj = ColumnParallelLinear(
            d_model, features, context, targets=DELTA_TARGETS, rngs=rngs
        )

    def _initial_dt_bias(self, rngs: nnx.Rngs) -> tuple[Array, PaddedDim]:
        del rngs
        bias = jnp.ones(self.config.delta_value_heads, self.precision.param)
        return bias, self.config.delta_heads.numbers()

    def project(self, x_BTD: Array) -> tuple[Array, ...]:
        """Returns queries, keys, values, gates, write strengths and decays, `[B, T, F]` each."""
        return tuple(self.in_proj(x_BTD))

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Reads each document from its first token on."""
        # Only routers read chosen experts.
        sequences = replace(sequences, experts=None)
        projected = self.project(x_BTD)
        weights, specs = own_params_and_specs(self)
        in_specs = (specs, token_spec(TP), batch_spec(None))
        read = device_view(self._read, DELTA, in_specs, token_spec(TP))
        return self.out(read(weights, projected, sequences))

    def _read(self, weights: Weights, projected: tuple[Array, ...], sequences: Sequences) -> Array:
        q, k, v, gate, *numbers = projected  # [b, T/cp, F/tp]
        projections, positions = with_earlier(
            jnp.concatenate([q, k, v], axis=-1), self.config.delta_conv, sequences
        )  # [b * chunks, W - 1 + t, F/tp]
        rows, length = positions.shape
        numbers = [x.reshape(rows, length, -1) for x in numbers]
        q, k, v = self.heads(weights, projections, positions)
        starts = None if sequences.segments is None else positions == 0
        initial = None if axis_size(CP) == 1 else sequences.initial_states
        log_decay, write = self.strengths(weights, *numbers)
        tokens = Tokens(q, k, v, log_decay, write, starts)
        y, _ = self.rule(tokens, initial)
        return self.gated(weights, checkpoint_name(y, ATTENDED), v, gate)

    def rule(self, tokens: Tokens, state: State = None) -> tuple[Array, Array]:
        """See `delta_rule`."""
        return delta_rule(tokens, state, scan=self._scan())

    def _scan(self) -> Scan | None:
        scan, _ = pick_scan(self.config.delta_key_dim, architecture_of(current_device()))
        return scan

    def heads(self, weights: Weights, tokens: Array, positions: Array) -> tuple[Array, ...]:
        """Returns queries, keys and values `[b, T, heads, width]`, convolved and normalised.

        `tokens` `[b, W - 1 + T, F]` are projections of queries, keys and values, from W - 1 tokens
        before the first on; `positions` `[b, T]` are positions in documents, which hide the tokens
        before a document.
        """
        config = self.config
        heads_of = partial(_normalised_heads, config.delta_key_dim, config.delta_value_dim)
        taps = self.load_convolution(weights, *CONVOLUTIONS)
        return recomputed(heads_of, tokens, positions, *taps)

    def load_convolution(self, weights: Weights, q: str, k: str, v: str) -> tuple[Array, ...]:
        """Loads taps `[W, F]`, or biases `[F]`, of queries, keys and values."""
        load = partial(self.precision.load, storage_dim=None, accumulate="float32")
        dim = weights[k].ndim - 1
        num_shards = self.config.delta_heads.keys.num_shards(axis_size(TP), weights[k].shape[dim])
        keys = [load(weights[name], tp_gather=(dim, num_shards)) for name in (q, k)]
        return (*keys, load(weights[v]))

    def strengths(self, weights: Weights, write: Array, decay: Array) -> tuple[Array, Array]:
        """Returns the logarithm of each head's decay, and its write strength.

        They are `[b, T, heads]` in float32; a decay for each key channel `[b, T, heads, K]`.
        """
        load = replace(self.precision, compute="float32").load
        log_rate = load(weights["decay_log"], None)
        bias = load(weights["dt_bias"], None)
        rate = -jnp.exp(log_rate)
        log_decay = rate * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        return log_decay, jax.nn.sigmoid(write.astype(jnp.float32))

    def activated(self, gate: Array) -> Array:
        """Returns the factor of results for a projected gate."""
        return jax.nn.silu(gate)

    def gated(self, weights: Weights, y: Array, v: Array, gate: Array) -> Array:
        """Normalises and gates results `[b, T, heads, V]` of values `v`; returns `[b, T, F]`.

        Padded heads are zero.
        """

        def run(y: Array, gate: Array, scale: Array) -> Array:
            y = rms_normalise(y, self.norm_eps) * scale
            y = y.reshape(gate.shape).astype(jnp.float32)
            y *= self.activated(gate.astype(jnp.float32))
            return y.astype(gate.dtype)

        # Loaded outside, so that no gradient of a frozen scale is summed over devices
        scale = self.precision.load(weights["norm_scale"], None, used_by_all_tp=True)
        return recomputed(run, y, gate, scale)

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns empty states `[B, Hv, K, V]`, and the convolution's last inputs.

        These are `[B, tp, W - 1, F / tp]`.
        """
        config = self.config
        key_dim = config.delta_key_dim
        value_dim = config.delta_value_dim
        tp = axis_size(TP)
        values, keys = config.delta_heads.on_device(tp)
        features = 2 * keys * key_dim + values * value_dim
        state = jnp.zeros((num_rows, tp * values, key_dim, value_dim), jnp.float32)
        window_shape = (num_rows, tp, config.delta_conv - 1, features)
        window = jnp.zeros(window_shape, self.precision.compute)
        return constrain(state, LAYER_SPEC), constrain(window, LAYER_SPEC)

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """Continues each row's state; packed tokens are of one row in each sequence."""
        projected = self.project(x_BTD)
        weights, specs = own_params_and_specs(self)
        in_specs = (specs, token_spec(TP), LAYER_SPEC, batch_spec(None))
        read = device_view(self._read_on, DELTA, in_specs, (token_spec(TP), LAYER_SPEC))
        y, cache = read(weights, projected, cache, new)
        return self.out(y), cache

    def _read_on(
        self,
        weights: Weights,
        projected: tuple[Array, ...],
        cache: KVCache,
        new: NewTokens,
    ) -> tuple[Array, KVCache]:
        q, k, v, gate, *numbers = projected  # [b, T, F/tp]
        states, windows = cache
        state = new.first(states)  # [b, Hv, K, V]
        window = new.first(windows)[:, 0]  # [b, W - 1, F/tp]
        tokens = jnp.concatenate([window, jnp.concatenate([q, k, v], axis=-1)], axis=1)
        q, k, v = self.heads(weights, tokens, new.positions)
        # Dropped tokens, which come last, leave the states as they are.
        is_kept = new.is_kept()
        log_decay, write = self.strengths(weights, *numbers)
        log_decay = jnp.where(_expanded(is_kept, log_decay), log_decay, 0)
        write = jnp.where(is_kept[..., None], write, 0)
        begins = new.positions == 0
        if gate.shape[1] == 1:
            log_decay = jnp.where(_expanded(begins, log_decay), -jnp.inf, log_decay)
            y, state = self.step(
                q[:, 0],
                k[:, 0],
                v[:, 0],
                log_decay[:, 0],
                write[:, 0],
                state,
            )
            y = y[:, None]
        else:
            read = Tokens(q, k, v, log_decay, write, begins)
            y, state = self.rule(read, state)
        # The window ends with the last token that is kept.
        num_kept = jnp.sum(is_kept, axis=1, keepdims=True)
        window = last_tokens(tokens, num_kept, self.config.delta_conv)
        cache = (new.replace(states, state), new.replace(windows, window[:, None]))
        return self.gated(weights, y, v, gate), cache


class KimiDeltaAttention(GatedDeltaNet):
    """Kimi Delta Attention, `delta_value_heads / tp` states per device.

    It has as many key heads as value heads. Kernels `in_proj.kernels`: queries, keys `[D, H*K]`,
    values `[D, H*V]` and write strength `[D, H]`; `decay_down` and `gate_down`
    `[D, delta_gate_rank]`, `decay_up` `[delta_gate_rank, H*K]`, `gate_up`
    `[delta_gate_rank, H*V]`. Biases of decays `dt_bias` `[H*K]`. All else is as in `GatedDeltaNet`.
    """

    min_rate = 1.0

    def _add_projections(self, d_model: int, context: LayerContext, rngs: nnx.Rngs) -> None:
        config = self.config
        heads = config.delta_heads
        rank = config.delta_gate_rank
        values = heads.numbers(config.delta_value_dim)
        features = (heads.keys, heads.keys, values, heads.numbers())
        self.sequence_parallel = context.sequence_parallel
        self.in_proj = ColumnParallelLinear(
            d_model, features, context, targets=KIMI_TARGETS, rngs=rngs
        )
        self.decay_down = DownProjection(d_model, rank, context, target="f_a_proj", rngs=rngs)
        self.gate_down = DownProjection(d_model, rank, context, target="g_a_proj", rngs=rngs)
        # Latents enter the tp group together.
        inside = replace(context, caller_communicates=True)
        channels = (heads.numbers(config.delta_key_dim),)
        self.decay_up = ColumnParallelLinear(
            rank, channels, inside, targets=("f_b_proj",), rngs=rngs
        )
        self.gate_up = ColumnParallelLinear(
            rank, (values,), inside, targets=("g_b_proj",), rngs=rngs
        )

    def _initial_dt_bias(self, rngs: nnx.Rngs) -> tuple[Array, PaddedDim]:
        dim = self.config.delta_heads.numbers(self.config.delta_key_dim)
        return initial_steps(dim, self.precision.param, rngs), dim

    def project(self, x_BTD: Array) -> tuple[Array, ...]:
        """See `GatedDeltaNet`."""
        q, k, v, write = self.in_proj(x_BTD)
        latents = (self.decay_down(x_BTD), self.gate_down(x_BTD))
        decay_latent, gate_latent = enter_latents(latents, self.sequence_parallel)
        (decay,) = self.decay_up(decay_latent)
        (gate,) = self.gate_up(gate_latent)
        return q, k, v, gate, write, decay

    def activated(self, gate: Array) -> Array:
        """See `GatedDeltaNet`."""
        return jax.nn.sigmoid(gate)

    def strengths(self, weights: Weights, write: Array, decay: Array) -> tuple[Array, Array]:
        """See `GatedDeltaNet`."""
        load = replace(self.precision, compute="float32").load
        rate = -jnp.exp(load(weights["decay_log"], None))[:, None]  # [heads, 1]
        steps = jax.nn.softplus(decay.astype(jnp.float32) + load(weights["dt_bias"], None))
        log_decay = rate * steps.reshape(*steps.shape[:2], rate.shape[0], -1)
        return log_decay, jax.nn.sigmoid(write.astype(jnp.float32))


def initial_steps(dim: PaddedDim, dtype: DTypeLike, rngs: nnx.Rngs) -> Array:
    """Returns biases whose softplus is between `_STEPS`, uniformly in its logarithm."""
    draw = partial(jax.random.uniform, rngs.params(), (dim.size,), dtype)
    steps = jnp.exp(draw(*map(math.log, _STEPS)))
    # The inverse of softplus
    return steps + jnp.log(-jnp.expm1(-steps))


def _expanded(mask: Array, x: Array) -> Array:
    """Returns a mask `[B, T]` that broadcasts to `[B, T, ...]`."""
    return jnp.expand_dims(mask, tuple(range(2, x.ndim)))


def convolved_heads(
    key_dim: int,
    value_dim: int,
    tokens: Array,
    positions: Array,
    *weights: Array,
) -> tuple[Array, ...]:
    """Convolves tokens `[b, W - 1 + T, F]`; see `GatedDeltaNet.heads`.

    The weights are three taps `[W, F_i]`, and perhaps as many biases `[F_i]`.
    """
    taps = weights[:3]
    biases = weights[3:]
    y = convolve(tokens, jnp.concatenate(taps, axis=1), positions)
    if biases:
        y += jnp.concatenate(biases)
    ends = np.cumsum([x.shape[1] for x in taps[:-1]])
    q, k, v = jnp.split(jax.nn.silu(y), ends, axis=-1)
    shape = positions.shape
    q = q.reshape(*shape, -1, key_dim)
    k = k.reshape(*shape, -1, key_dim)
    v = v.reshape(*shape, -1, value_dim)
    return q, k, v


def _normalised_heads(
    key_dim: int, value_dim: int, tokens: Array, positions: Array, *taps: Array
) -> tuple[Array, ...]:
    q, k, v = convolved_heads(key_dim, value_dim, tokens, positions, *taps)
    q = _l2_normalised(q) * key_dim**-0.5
    k = _l2_normalised(k)
    return tuple(x.astype(tokens.dtype) for x in (q, k, v))


def _l2_normalised(x: Array) -> Array:
    squared_norm = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(squared_norm + _L2_EPS)
