"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Keys and values of all heads come from one latent.

A token has a latent of `kv_rank` numbers, a rotated key of `rope_head_dim` numbers that all heads
share, and perhaps a latent of `query_rank` numbers for its queries. Heads are split over tp,
latents are not:

    sequence parallelism   each device projects and normalises the latents of its own tokens, and
                           one all-gather brings them to the tp group. They are narrower than the
                           input, which other layers gather.
    otherwise              each device computes all latents, from equal inputs.

The latents' gradient is summed over tp once, where they enter the heads. Gradients of the down
projections are then equal on all devices, or of each device's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    PROJECTED,
    axis_size,
    batch_spec,
    constrain,
    device_view,
    enter_parallel,
    token_spec,
)
from jaxtp.config.schema import CountOrZero
from jaxtp.layers.attention import AttentionConfig, CausalSelfAttention, Heads, PaddedHeads
from jaxtp.layers.branch import KVCache
from jaxtp.layers.cache import LAYER_SPEC, NewTokens, visible
from jaxtp.layers.kernels.select import Use, masked_attention
from jaxtp.layers.linear import (
    ColumnParallelLinear,
    LayerContext,
    RowParallelLinear,
    default_kernel_init,
)
from jaxtp.layers.lora import Lora, Target
from jaxtp.layers.norm import ATTEND, Norm, NormConfig
from jaxtp.layers.parameter import ExactDim, PaddedDim, Weights, parameter, params_and_specs
from jaxtp.layers.rope import apply_rope
from jaxtp.layers.transport import SequenceParallel, activation_spec, sequence_dim
from jaxtp.mesh import STORAGE, TP

# Name in profiles of the down projections, and of the latents' gather
LATENT = "latent"

LATENT_NORM = NormConfig(norm="rms", norm_eps=1e-6)
"""Norm of the latents in every family: transformers does not pass the settings of the block."""


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig(AttentionConfig):
    """Settings of multi-head latent attention."""

    kv_rank: CountOrZero = 0
    """Width of the latent from which multi-head latent attention computes keys and values; 0 is
    ordinary attention."""

    query_rank: CountOrZero = 0
    """Latent attention: width of the latent from which queries are computed; 0 computes them from
    the input."""

    rope_head_dim: CountOrZero = 0
    """Latent attention: last part of head_dim that is rotated; all heads share this part of the
    keys."""

    value_head_dim: CountOrZero = 0
    """Latent attention: width of a head's values and results."""

    @property
    def heads(self) -> PaddedHeads:
        """See `AttentionConfig`."""
        if not self.kv_rank:
            return super().heads
        return LatentHeads((self.num_heads, 1, self.head_dim), self.head_dim)

    def use(self, **fields: object) -> Use:
        """See `AttentionConfig`."""
        return super().use(**fields, value_head_dim=self.value_head_dim if self.kv_rank else None)


class LatentHeads(PaddedHeads):
    """Heads with keys of their own, which no devices share.

    The factors are their number N, 1, head width H.
    """

    stored = PaddedDim.stored


class LatentAttention(CausalSelfAttention):
    """Latent attention, `num_heads / tp` heads per device.

    Shapes: `[B, T, D] -> [B, T, D]`. Kernels: `query_down` `[D, query_rank]` and `query_up`
    `[query_rank, N*H]`, or only `query_up` `[D, N*H]`; `latent_down` `[D, kv_rank + rope]`, the
    last columns for the shared key; `latent_up` `[kv_rank, N*(nope + V)]`, in each head the columns
    of keys, then of values; `out` `[N*V, D]`. H is nope + rope.
    """

    config: LatentAttentionConfig

    def __init__(
        self,
        d_model: int,
        config: LatentAttentionConfig,
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = LATENT_NORM,
        rngs: nnx.Rngs,
    ):
        # Latents do not follow the norm of the block.
        del norm
        self.config = config
        self.precision = context.precision
        self.sequence_parallel = context.sequence_parallel
        self.qk_norms = nnx.List([])
        self.sinks = None
        count = config.num_heads
        rope = config.rope_head_dim
        values = config.value_head_dim
        down = partial(DownProjection, d_model, context=context, rngs=rngs)
        # Latents enter the tp group together.
        inside = replace(context, caller_communicates=True)
        up = partial(ColumnParallelLinear, rngs=rngs)
        if config.query_rank:
            self.query_down = down(config.query_rank, target="q_a_proj")
            self.query_norm = Norm(config.query_rank, LATENT_NORM, context)
            self.query_up = up(config.query_rank, (config.heads,), inside, targets=("q_b_proj",))
        else:
            self.query_up = up(d_model, (config.heads,), context, targets=("q_proj",))
        self.latent_down = down(config.kv_rank + rope, target="kv_a_proj_with_mqa")
        self.latent_norm = Norm(config.kv_rank, LATENT_NORM, context)
        keys_and_values = PaddedDim((count, config.head_dim - rope + values))
        self.latent_up = up(config.kv_rank, (keys_and_values,), inside, targets=("kv_b_proj",))
        self.out = RowParallelLinear(
            PaddedDim((count, values)),
            d_model,
            context,
            use_bias=config.attention_out_bias,
            target="o_proj",
            rngs=rngs,
        )

    @property
    def _nope(self) -> int:
        """Width of the part of each query and key that is not rotated."""
        return self.config.head_dim - self.config.rope_head_dim

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns an empty cache of latents with their rotated keys.

        It has one kv head, which every device stores.
        """
        width = self.config.kv_rank + self.config.rope_head_dim
        shape = (num_rows, axis_size(TP), num_slots, width)
        return (constrain(jnp.zeros(shape, self.precision.compute), LAYER_SPEC),)

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """See `Branch`."""
        heads = self._latents(x_BTD)
        weights, specs = params_and_specs(self.latent_up)
        in_specs = (specs, token_spec(TP), LAYER_SPEC, batch_spec(None))
        out_specs = (token_spec(TP), LAYER_SPEC)
        attend = device_view(self._attend_cached, ATTEND, in_specs, out_specs)
        y, cache = attend(weights, heads, cache, new)
        return self.output(y, x_BTD), cache

    def _attend_cached(
        self,
        weights: Weights,
        qkv: Heads,
        cache: KVCache,
        new: NewTokens,
    ) -> tuple[Array, KVCache]:
        q, latent, shared = qkv
        num_slots = cache[0].shape[2]
        q = self._queries(q, new.positions, num_slots)
        shared = self._rotate(shared[:, :, None], new.positions, num_slots)
        tokens = jnp.concatenate([latent[:, :, None], shared], axis=-1)  # [b, T, 1, kv_rank + rope]
        slots = new.write(cache[0], tokens)
        up = self.latent_up.merged(weights)
        if new.rows is None:
            y = self._attend_slots(q, slots, up, new.positions)
        else:
            if new.continued:
                tokens = jnp.concatenate([new.before(cache[0]), tokens], axis=1)
            rank = self.config.kv_rank
            kv = tokens[:, :, 0, :rank] @ up
            k, v = self._keys_and_values(kv, tokens[..., rank:])
            y = self._attend_packed((q, k, v), new, num_slots)
        return self._merge_heads(y), (slots,)

    def _attend_slots(self, q: Array, slots: Array, up: Array, positions: Array) -> Array:
        """Attends to slots without projecting them.

        Queries absorb the up-projection of keys, results the up-projection of values.
        """
        config = self.config
        nope = self._nope
        use = config.use(dtype=self.precision.compute)
        up = up.reshape(config.kv_rank, -1, nope + config.value_head_dim)
        absorbed = jnp.einsum("btnh,rnh->btnr", q[..., :nope], up[..., :nope])
        q = jnp.concatenate([absorbed, q[..., nope:]], axis=-1)
        # The keys serve as values: a slice of the cache would be copied for each token.
        mask = visible(positions, slots.shape[2], use.window)
        y = masked_attention(q, (slots, slots), mask, **use.scores)
        return jnp.einsum("btnr,rnh->btnh", y[..., : config.kv_rank], up[..., nope:])

    def project(self, x_BTD: Array) -> Heads:
        """Returns queries, keys with values, and the shared key."""
        queries, latent, shared = self._latents(x_BTD)
        return queries, *self.latent_up(latent), shared

    def _latents(self, x_BTD: Array) -> Heads:
        """Returns queries, split over tp, and for each device the whole latent and shared key."""
        rank = self.config.kv_rank
        kv = self.latent_down(x_BTD)
        latents = [self.latent_norm(kv[..., :rank]), kv[..., rank:]]
        if self.config.query_rank:
            latents.append(self.query_norm(self.query_down(x_BTD)))
        latent, shared, *query = enter_latents(latents, self.sequence_parallel)
        (queries,) = self.query_up(query[0] if query else x_BTD)
        return queries, latent, shared

    def _normalise_and_rotate(
        self,
        weights: Weights,
        qkv: Heads,
        positions: Array,
        length: int,
    ) -> tuple[Array, Array, Array]:
        q, kv, shared = qkv
        shared = self._rotate(shared[:, :, None], positions, length)
        return self._queries(q, positions, length), *self._keys_and_values(kv, shared)

    def _keys_and_values(self, kv: Array, shared: Array) -> tuple[Array, Array]:
        nope = self._nope
        kv = kv.reshape(*kv.shape[:2], -1, nope + self.config.value_head_dim)
        shared = jnp.broadcast_to(shared, (*kv.shape[:3], shared.shape[-1]))
        keys = jnp.concatenate([kv[..., :nope], shared], axis=-1)
        return keys, kv[..., nope:]

    def _queries(self, q: Array, positions: Array, length: int) -> Array:
        nope = self._nope
        q = q.reshape(*q.shape[:2], -1, self.config.head_dim)
        rotated = self._rotate(q[..., nope:], positions, length)
        queries = jnp.concatenate([q[..., :nope], rotated], axis=-1)
        return self._with_temperature(queries, positions)

    def _rotate(self, x: Array, positions: Array, length: int) -> Array:
        theta = self.config.rope_theta
        if theta is None:
            return x
        return apply_rope(x, positions, theta, self.config.rope_scaling, length)


def enter_latents(latents: Sequence[Array], sequence_parallel: SequenceParallel) -> list[Array]:
    """Returns the latents of all tokens on each device of a tp group, by one gather."""
    split_dim = sequence_dim(sequence_parallel, latents[0].shape)
    *ends, _ = accumulate(latent.shape[-1] for latent in latents)

    def enter(*latents: Array) -> list[Array]:
        gathered = enter_parallel(jnp.concatenate(latents, axis=-1), split_dim)
        return jnp.split(gathered, ends, axis=-1)

    return device_view(enter, LATENT, activation_spec(split_dim), token_spec(TP))(*latents)


class DownProjection(nnx.Module):
    """Projects `[B, T, D]` to latents `[B, T, R]`, with tokens split like the input.

    The kernel `[D, R]` is stored as `P(STORAGE)`: tp replicates it, as a device needs all of it for
    its own tokens.
    """

    def __init__(
        self,
        d_model: int,
        rank: int,
        context: LayerContext,
        *,
        target: Target,
        rngs: nnx.Rngs,
    ):
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        kernel = default_kernel_init(rngs.params(), (d_model, rank), self.precision.param)
        self.kernel = parameter("kernel", kernel, P(STORAGE))
        self.loras: nnx.List[Lora] = nnx.List([])
        if context.lora.adapted(target):
            dims = (ExactDim((d_model,)), ExactDim((rank,)))
            specs = (P(STORAGE), P())
            self.loras.append(Lora(dims, context.lora, specs, rngs=rngs))

    def __call__(self, x_BTD: Array) -> Array:
        """Projects `[B, T, D]` to `[B, T, R]`."""
        split_dim = sequence_dim(self.sequence_parallel, x_BTD.shape)
        spec = activation_spec(split_dim)
        weights, specs = params_and_specs(self)
        project = partial(self._project, split_dim is not None)
        return device_view(project, LATENT, (spec, specs), spec)(x_BTD, weights)

    def _project(self, split: bool, x: Array, weights: Weights) -> Array:
        load = partial(self.precision.load, used_by_all_tp=split)
        x = x.astype(self.precision.compute)
        y = x @ load(weights["kernel"], 0)
        for at, lora in enumerate(self.loras):
            inner = x @ load(weights[f"loras.{at}.a"], 0)
            y = lora.add(y, inner, load(weights[f"loras.{at}.b"], None))
        return checkpoint_name(y, PROJECTED)
