"""Gated DeltaNet (arXiv 2412.06464): linear attention with a matrix state.

Qwen3-Next and Qwen3.5 have it.

Queries, keys and values pass a causal depthwise convolution. Each value head has a state `[K, V]`:
a token decays it, and writes the difference of its value and the value that the state has for its
key (`kernels/delta_rule.py`). The results are normalised per head and gated. Each key head serves a
group of value heads. Both are split over tp like kv heads and their query heads, so that only the
column and the row layer communicate over tp.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import ATTENDED, axis_size, batch_spec, constrain, device_view, token_spec
from jaxtp.config.hints import Problem
from jaxtp.config.schema import Count, CountOrZero
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.branch import Branch, KVCache, Padded, ShrinkSpec
from jaxtp.layers.cache import LAYER_SPEC, NewTokens
from jaxtp.layers.context import Sequences, with_halo
from jaxtp.layers.kernels.delta_rule import Scan, Tokens, chunk_states, delta_rule, delta_step
from jaxtp.layers.kernels.select import architecture_of, pick_scan
from jaxtp.layers.latent_attention import LatentAttentionConfig
from jaxtp.layers.linear import ColumnParallelLinear, LayerContext, RowParallelLinear
from jaxtp.layers.lora import Target
from jaxtp.layers.norm import NormConfig, rms_normalise
from jaxtp.layers.parameter import PaddedDim, Weights, parameter, params_and_specs
from jaxtp.layers.sequence_parallel import LocalShape, segment_positions
from jaxtp.mesh import CP, TP, current_device

DELTA = "gated_delta"  # name in profiles of the layer without its projections

_L2_EPS = 1e-6  # added to the squared norm of queries and keys, in every family
_TARGETS: tuple[Target, ...] = ("q_proj", "k_proj", "v_proj", "gate_proj", "b_proj", "a_proj")
_INSIDE = ("q_conv", "k_conv", "v_conv", "decay_log", "dt_bias", "norm_scale")
_SMALL_KEY = 8
_SMALL_VALUE = 10


@dataclass(frozen=True, kw_only=True)
class GatedDeltaConfig(LatentAttentionConfig):
    """Settings of a block's attention, or of its Gated DeltaNet."""

    delta_value_heads: CountOrZero = 0
    """Value heads of Gated DeltaNet, which replaces attention in blocks where this is not 0.
    Divisible by delta_key_heads; the layer pads both if mesh.tp needs more."""

    delta_key_heads: CountOrZero = 0
    """Gated DeltaNet: query and key heads."""

    delta_key_dim: CountOrZero = 0
    """Gated DeltaNet: width of a query or key head."""

    delta_value_dim: CountOrZero = 0
    """Gated DeltaNet: width of a value head."""

    delta_conv: Count = 4
    """Gated DeltaNet: tokens that the causal convolution of queries, keys and values reads, with
    the current one."""

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """See `BranchConfig`."""
        if not self.delta_value_heads:
            yield from super().problems(sizes)
            return
        count = self.delta_value_heads
        for name, works in {
            "delta_key_heads": count,
            "delta_key_dim": 128,
            "delta_value_dim": 128,
        }.items():
            if not getattr(self, name):
                yield Problem(
                    f"model.{name}=0, but model.delta_value_heads={count} needs it; {works} works"
                )
        if self.delta_key_heads and count % self.delta_key_heads:
            text = (
                f"model.delta_value_heads={count} is not divisible by "
                f"model.delta_key_heads={self.delta_key_heads}"
            )
            yield Problem(text, among={"model.delta_key_heads": count})
        if sizes[TP] > 2 * count:
            text = (
                f"mesh.tp={sizes[TP]} is more than twice model.delta_value_heads={count}: most "
                "devices get no head"
            )
            yield Problem(text, among={f"mesh.{TP}": count})

    @property
    def delta_heads(self) -> PaddedHeads:
        """The division of value heads over tp, with key heads as kv heads, which have the width."""
        return PaddedHeads(
            (
                self.delta_key_heads,
                self.delta_value_heads // self.delta_key_heads,
                self.delta_key_dim,
            )
        )

    def describe_heads(self) -> str:
        """See `AttentionConfig`."""
        count = self.delta_value_heads
        keys = self.delta_key_heads
        states = (
            f"{count} heads with states ({keys} key) of {self.delta_key_dim} x "
            f"{self.delta_value_dim}"
        )
        return states if count else super().describe_heads()

    def zigzag(self, shape: LocalShape) -> bool:
        """See `BranchConfig`."""
        return not self.delta_value_heads and super().zigzag(shape)

    def context_problems(self, shape: LocalShape) -> Iterator[Problem]:
        """See `BranchConfig`."""
        if not self.delta_value_heads:
            yield from super().context_problems(shape)

    def adapter_kernels(self) -> Iterator[tuple[Target, str]]:
        """See `BranchConfig`."""
        if not self.delta_value_heads:
            yield from super().adapter_kernels()
            return
        yield from ((target, f"attention.in_proj.kernels.{i}") for i, target in enumerate(_TARGETS))
        yield "o_proj", "attention.out.kernel"

    def padding(self, tp: int) -> Iterator[Padded]:
        """See `BranchConfig`."""
        if not self.delta_value_heads:
            yield from super().padding(tp)
        elif self.delta_key_heads and self.delta_value_heads % self.delta_key_heads == 0:
            key_heads, group, _ = self.delta_heads.stored(tp)
            yield "delta value heads", self.delta_value_heads, key_heads * group
            yield "delta key heads", self.delta_key_heads, key_heads

    def shrink(self, small: ShrinkSpec) -> dict[str, Any]:
        """See `BranchConfig`."""
        return {
            **super().shrink(small),
            "delta_key_dim": small.size(self.delta_key_dim, min(self.delta_key_dim, _SMALL_KEY)),
            "delta_value_dim": small.width(self.delta_value_dim, _SMALL_VALUE),  # unlike the keys'
        }


class GatedDeltaNet(Branch):
    """Gated DeltaNet, `delta_value_heads / tp` states per device.

    `norm` gives the epsilon of the norm before the gate.

    Shapes: `[B, T, D] -> [B, T, D]`, with Hk key heads of width K and Hv value heads of width V.
    Kernels `in_proj.kernels`: queries and keys `[D, Hk*K]`, values and gate `[D, Hv*V]`, write
    strength and decay `[D, Hv]`; `out` `[Hv*V, D]`; heads contiguous. Taps `q_conv`, `k_conv`,
    `v_conv` `[W, ...]`, the last for the current token.
    """

    over_cp = True

    def __init__(
        self,
        d_model: int,
        config: GatedDeltaConfig,
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = NormConfig(norm_eps=1e-6),
        rngs: nnx.Rngs,
    ):
        self.config = config
        self.joined = context.schedule.joined
        self.precision = context.precision
        dtype = self.precision.param
        heads = config.delta_heads
        width = config.delta_value_dim
        keys = heads.keys
        values = heads.numbers(width)
        numbers = heads.numbers()
        features = (keys, keys, values, values, numbers, numbers)
        self.in_proj = ColumnParallelLinear(d_model, features, context, targets=_TARGETS, rngs=rngs)

        def taps(split: PaddedDim) -> Any:
            bound = config.delta_conv**-0.5
            shape = (config.delta_conv, split.size)
            initial = jax.random.uniform(rngs.params(), shape, dtype, -bound, bound)  # PyTorch's
            return parameter("taps", initial, P(None, TP), padding=((-1, split),))

        self.q_conv, self.k_conv, self.v_conv = (taps(split) for split in (keys, keys, values))
        initial = jnp.log(
            jax.random.uniform(rngs.params(), (config.delta_value_heads,), dtype, 0.01, 16)
        )
        self.decay_log = parameter("decay_log", initial, P(TP), padding=((-1, numbers),))
        self.dt_bias = parameter("dt_bias", jnp.ones_like(initial), P(TP), padding=((-1, numbers),))
        self.norm_scale = parameter("scale", jnp.ones(width, dtype), P())
        self.norm_eps = norm.norm_eps
        self.out = RowParallelLinear(values, d_model, context, target="o_proj", rngs=rngs)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Reads each document from its first token on."""
        segments_BT = sequences.segments
        projected = self.in_proj(x_BTD)
        weights, specs = self._inner()
        in_specs = (
            specs,
            (token_spec(TP),) * len(projected),
            None if segments_BT is None else batch_spec(None),
        )
        read = partial(self._read, replace(sequences, segments=None))
        return self.out(
            device_view(read, DELTA, in_specs, token_spec(TP))(weights, projected, segments_BT)
        )

    def _inner(self) -> tuple[Weights, dict[str, P]]:
        weights, specs = params_and_specs(self)
        return {name: weights[name] for name in _INSIDE}, {name: specs[name] for name in _INSIDE}

    def _read(
        self,
        sequences: Sequences,
        weights: Weights,
        projected: tuple[Array, ...],
        segments: Array | None,
    ) -> Array:
        *qkv, gate, write, decay = projected
        rows, length, _ = gate.shape
        chunks = sequences.num_chunks
        positions = sequences.local_positions(length * axis_size(CP))
        if segments is not None:
            positions = jnp.take(segment_positions(segments), positions, axis=1)
        positions = jnp.broadcast_to(positions, (rows, length)).reshape(rows * chunks, -1)
        whole = with_halo(jnp.concatenate(qkv, axis=-1), self.config.delta_conv - 1, chunks)
        tokens, write, decay = (
            x.reshape(rows * chunks, -1, x.shape[-1])
            for x in (jnp.stack(whole, axis=1), write, decay)
        )
        q, k, v = self.heads(weights, tokens, positions)
        starts = None if segments is None else positions == 0
        initial = None if axis_size(CP) == 1 else sequences.initial_states
        scan, _ = pick_scan(self.config.delta_key_dim, architecture_of(current_device()))
        y, _ = delta_rule(
            Tokens(q, k, v, *self.strengths(weights, write, decay), starts), initial, scan=scan
        )
        return self.gated(weights, checkpoint_name(y, ATTENDED), gate)

    def heads(self, weights: Weights, tokens: Array, positions: Array) -> tuple[Array, ...]:
        """Returns queries, keys and values `[b, T, heads, width]`, convolved and normalised.

        `tokens` `[b, W - 1 + T, F]` are projections of queries, keys and values, from W - 1 tokens
        before the first on; `positions` `[b, T]` are positions in documents, which hide the tokens
        before a document.
        """
        load = partial(self.precision.load, fsdp_dim=None, accumulate="float32")
        shared = (
            1,
            self.config.delta_heads.keys.num_shards(axis_size(TP), weights["k_conv"].shape[1]),
        )
        taps = [load(weights[name], tp_gather=shared) for name in ("q_conv", "k_conv")] + [
            load(weights["v_conv"])
        ]
        widths = (self.config.delta_key_dim, self.config.delta_value_dim)
        return _recomputed(partial(_convolved_heads, widths), tokens, positions, *taps)

    def strengths(self, weights: Weights, write: Array, decay: Array) -> tuple[Array, Array]:
        """Returns the logarithm of each head's decay, and its write strength.

        They are `[b, T, heads]` in float32.
        """
        load = replace(self.precision, compute="float32").load
        rate, bias = (load(weights[name], None) for name in ("decay_log", "dt_bias"))
        log_decay = -jnp.exp(rate) * jax.nn.softplus(decay.astype(jnp.float32) + bias)
        return log_decay, jax.nn.sigmoid(write.astype(jnp.float32))

    def gated(self, weights: Weights, y: Array, gate: Array) -> Array:
        """Normalises and gates results `[b, T, heads, V]`; returns `[b, T, F]`.

        Padded heads are zero.
        """

        def run(y: Array, gate: Array, scale: Array) -> Array:
            y = (rms_normalise(y, self.norm_eps) * scale).reshape(gate.shape).astype(jnp.float32)
            return (y * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)

        # The scale is loaded outside: of a frozen one no gradient is summed.
        return _recomputed(
            run, y, gate, self.precision.load(weights["norm_scale"], None, used_by_all_tp=True)
        )

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns empty states `[B, Hv, K, V]`, and the convolution's last inputs.

        These are `[B, tp, W - 1, F / tp]`.
        """
        config = self.config
        tp = axis_size(TP)
        values, keys = config.delta_heads.on_device(tp)
        features = 2 * keys * config.delta_key_dim + values * config.delta_value_dim
        state = jnp.zeros(
            (num_rows, tp * values, config.delta_key_dim, config.delta_value_dim), jnp.float32
        )
        window = jnp.zeros((num_rows, tp, config.delta_conv - 1, features), self.precision.compute)
        return constrain(state, LAYER_SPEC), constrain(window, LAYER_SPEC)

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """Reads new tokens on from the states of their rows."""
        projected = self.in_proj(x_BTD)
        weights, specs = self._inner()
        cache_specs = (LAYER_SPEC, LAYER_SPEC)
        in_specs = (specs, (token_spec(TP),) * len(projected), cache_specs, new.specs)
        read = device_view(self._read_on, DELTA, in_specs, (token_spec(TP), cache_specs))
        y, cache = read(weights, projected, cache, new)
        return self.out(y), cache

    def _read_on(
        self, weights: Weights, projected: tuple[Array, ...], cache: KVCache, new: NewTokens
    ) -> tuple[Array, KVCache]:
        *qkv, gate, write, decay = projected
        state = cache[0]
        window = cache[1][:, 0]
        single = new.rows is None and gate.shape[1] == 1
        new = new.by_row()
        tokens = jnp.concatenate([new.first(window), jnp.concatenate(qkv, axis=-1)], axis=1)
        q, k, v = self.heads(weights, tokens, new.positions)
        dropped = jnp.asarray(new.rows)[..., None] < 0  # they leave the states as they are
        log_decay, write = (
            jnp.where(dropped, 0, each) for each in self.strengths(weights, write, decay)
        )
        if single:
            log_decay = jnp.where(new.positions[..., None] == 0, -jnp.inf, log_decay)
            y, state = delta_step(q[:, 0], k[:, 0], v[:, 0], log_decay[:, 0], write[:, 0], state)
            y = y[:, None]
        else:
            scan, _ = pick_scan(self.config.delta_key_dim, architecture_of(current_device()))
            packed = Tokens(q, k, v, log_decay, write, new.positions == 0)
            y, state = _packed_rule(packed, state, new, scan or chunk_states)
        there, sequence, last = new.ends(len(window))
        latest = tokens[sequence[:, None], last[:, None] + 1 + jnp.arange(window.shape[1])]
        window = jnp.where(there[:, None, None], latest, window)
        return self.gated(weights, y, gate), (state, window[:, None])


def _packed_rule(tokens: Tokens, state: Array, new: NewTokens, scan: Scan) -> tuple[Array, Array]:
    """Returns what packed tokens read, and the states of all rows after them."""

    def scan_and_keep(*chunks: Array) -> Any:
        states, written, _ = scan(*chunks)
        return states, written, (states, written)

    y, (states, written) = delta_rule(
        tokens, new.first(state) if new.continued else None, scan=scan_and_keep
    )
    # A row's last state is the decayed state before its last chunk, and what its tokens in this
    # chunk write.
    there, sequence, last = new.ends(len(state))
    index, offset = jnp.divmod(last, written.shape[3])
    at = (last - offset)[:, None] + jnp.arange(written.shape[3])
    rows, k, log_decay, starts = (
        x.at[sequence[:, None], at].get(mode="fill", fill_value=-1)
        for x in (jnp.asarray(new.rows), tokens.k, tokens.log_decay, new.positions == 0)
    )
    of_row = rows == jnp.arange(len(state))[:, None]
    log_decay = jnp.where(of_row[..., None], log_decay, 0)
    later = jax.lax.cumsum(
        jnp.pad(log_decay, ((0, 0), (0, 1), (0, 0)))[:, 1:], axis=1, reverse=True
    )
    weights = jnp.where(of_row[..., None], jnp.exp(later), 0)
    k = jnp.repeat(k, state.shape[1] // k.shape[2], axis=2) * weights[..., None].astype(k.dtype)
    rest = jnp.where(
        jnp.any(starts & of_row, axis=1)[:, None], 0, jnp.exp(jnp.sum(log_decay, axis=1))
    )
    after = jnp.einsum(
        "rchk,rhcv->rhkv", k, written[sequence, :, index], preferred_element_type=state.dtype
    )
    after += rest[..., None, None] * states[sequence, :, index]
    return y, jnp.where(there[:, None, None, None], after, state)


def _recomputed(function: Callable[..., Any], *arguments: Array) -> Any:
    # The backward pass repeats a chain of elementwise operations. A nested `jax.checkpoint` would
    # follow the block's policy, and `none` would save every float32 array of it.
    call = jax.custom_vjp(function)
    call.defvjp(
        lambda *args: (function(*args), args),
        lambda args, grads: jax.vjp(function, *args)[1](grads),
    )
    return call(*arguments)


def _convolved_heads(
    widths: tuple[int, int], tokens: Array, positions: Array, *taps: Array
) -> tuple[Array, ...]:
    last = taps[0].shape[0] - 1
    length = positions.shape[1]
    both = jnp.concatenate(taps, axis=1)
    tokens32 = tokens.astype(jnp.float32)
    y = both[last] * tokens32[:, last:]
    for back in range(1, last + 1):
        y += both[last - back] * jnp.where(
            positions[..., None] >= back, tokens32[:, last - back :][:, :length], 0
        )
    qkv = jnp.split(jax.nn.silu(y), np.cumsum([each.shape[1] for each in taps[:-1]]), axis=-1)
    q, k, v = (
        x.reshape(*x.shape[:2], -1, width)
        for x, width in zip(qkv, (widths[0], *widths), strict=True)
    )
    return tuple(
        x.astype(tokens.dtype)
        for x in (_l2_normalised(q) * widths[0] ** -0.5, _l2_normalised(k), v)
    )


def _l2_normalised(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _L2_EPS)
