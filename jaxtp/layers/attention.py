"""Causal self-attention with heads split over tp.

With fewer kv heads than tp, the tp / kv_heads devices that share a head all-gather its columns of
the k and v kernels before use, and each outputs the head. Replicated k and v kernels would take up
to tp times the memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import axis_index, axis_size, batch_spec, constrain, device_view, token_spec
from jaxtp.config.affects import COST
from jaxtp.config.schema import (
    ConfigError,
    Count,
    Even,
    Fraction,
    NonNegative,
    Positive,
    Settings,
    of_length,
)
from jaxtp.layers.branch import Branch, KVCache
from jaxtp.layers.cache import LAYER_SPEC, NewTokens, visible
from jaxtp.layers.context import ContextAttention, LocalShape, Method, Sequences, of_heads
from jaxtp.layers.kernels.select import (
    KernelChoice,
    Use,
    architecture_of,
    masked_attention,
    pick_kernel,
    unsupported,
)
from jaxtp.layers.linear import (
    ColumnParallelLinear,
    FixedBias,
    LayerContext,
    RowParallelLinear,
)
from jaxtp.layers.lora import Target
from jaxtp.layers.norm import ATTEND, NormConfig, QKNorm, QKNormKind, rms_normalise
from jaxtp.layers.parameter import PaddedDim, Weights, parameter, params_and_specs, spec_of
from jaxtp.layers.positions import Part, segment_positions
from jaxtp.layers.rope import RopeScaling, apply_rope, rotated_dims
from jaxtp.mesh import CP, TP, current_device, current_mesh, mesh_sizes

# Queries, keys, values and perhaps gates
Heads = tuple[Array, ...]

_MAX_SHARED_KV_HEADS = 4096
"""Bounds the search of `_padded_heads`: it also sees meshes that are refused later, which may have
any size."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Settings):
    """Settings of a block's attention."""

    num_heads: Count = 8
    """Number of query heads. Divisible by num_kv_heads; the layer pads them if mesh.tp needs
    more."""

    num_kv_heads: Count = 8
    """Number of key and value heads; the layer pads them unless they divide mesh.tp or mesh.tp
    divides them."""

    head_dim: Even = 16
    """Width of a head; need not be d_model / num_heads."""

    rope_theta: Positive | None = 10_000.0
    """Base of the rotary frequencies; none turns the rotary embedding off."""

    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for long contexts."""

    rotary_fraction: Fraction = 1.0
    """Leading part of each head that is rotated, as in GLM-4 and Phi-2."""

    sliding_window: Count | None = None
    """Number of positions that a query attends to, including its own; by default all up to its
    own."""

    qk_norm: QKNormKind = "none"
    """Normalisation of queries and keys, as in norm but without a bias. It is of each head, with
    one scale for all heads (head), a scale for each (heads) or none (head_plain), or RMS
    normalisation of the whole projection. head_bias is head with a bias (Phi)."""

    qk_norm_after_rope: bool = False
    """Normalise queries and keys after the rotary embedding (Hunyuan)."""

    value_norm: bool = False
    """RMS normalisation of each head's values, without a scale (Gemma 4)."""

    value_is_key: bool = False
    """Values are the keys before their normalisation, without a projection of their own (Gemma
    4)."""

    clip_qkv: Positive | None = None
    """Clamps queries, keys and values to this magnitude, before the rotary embedding (OLMo)."""

    query_temperature: NonNegative = 0.0
    """Multiplies queries by 1 + query_temperature * log(1 + floor(position /
    rope_scaling.original_length)) (Ministral 3)."""

    query_scale: Positive | None = None
    """Factor of attention scores; by default head_dim ** -0.5."""

    attention_scales: Annotated[tuple[Positive, ...], of_length(3)] = (1.0, 1.0, 1.0)
    """Factors of attention's input, of its scores beside query_scale, and of its output
    (Falcon-H1)."""

    attention_softcap: Positive | None = None
    """Caps attention scores: c * tanh(score / c)."""

    attention_sinks: bool = False
    """A learned score of each query head that joins the softmax without a value (gpt-oss)."""

    attention_gate: bool = False
    """Multiplies the heads' results by the sigmoid of another projection of the input (Muse
    Glimmer)."""

    gate_per_head: bool = False
    """One number of attention_gate for each head (LFM3)."""

    attention_bias: bool = False
    """Biases on the query, key, value and gate projections."""

    attention_out_bias: bool = False
    """A bias on the attention's output projection."""

    attention: Annotated[KernelChoice, COST] = "auto"
    """Kernel of attention; auto takes the first that supports the run: on Hopper cudnn, on other
    NVIDIA GPUs fused. Both need an NVIDIA GPU; cudnn also needs 16 bits, and no packed documents or
    sinks. blockwise and xla run everywhere; xla stores all scores. tokamax takes packed documents
    in 16 bits on Hopper and Blackwell; it needs its extra, and auto does not choose it."""

    @property
    def heads(self) -> PaddedHeads:
        """The division of query heads over tp."""
        group = self.num_heads // self.num_kv_heads
        return PaddedHeads((self.num_kv_heads, group, self.head_dim), self.head_dim)

    def use_on(self, shape: LocalShape, dtype: str) -> Use:
        """Returns the `Use` of a kernel on a device's sequences."""
        method, _ = self.context_attention(shape.tp).method(shape)
        return self.use(
            dtype=dtype,
            part=method == "gather",
            length=shape.length,
            packed=shape.packed,
            platform=shape.platform,
        )

    def use(self, **fields: Any) -> Use:
        """Returns the `Use` of a kernel; `fields` are those that are not settings."""
        scale = self.query_scale
        _, factor, _ = self.attention_scales
        if factor != 1:
            scale = (scale or self.head_dim**-0.5) * factor
        return Use(
            head_dim=self.head_dim,
            window=self.sliding_window,
            softcap=self.attention_softcap,
            scale=scale,
            sinks=self.attention_sinks,
            **fields,
        )

    def context_attention(self, tp: int) -> ContextAttention:
        """Returns a device's heads and window, for context parallelism."""
        queries, keys = self.heads.on_device(tp)
        return ContextAttention(queries=queries, keys=keys, window=self.sliding_window)

    def zigzag(self, shape: LocalShape) -> bool:
        """Returns whether only zigzag order gives devices equal work."""
        return self.context_attention(shape.tp).zigzag(shape)

    def fixed_bias(self, *, rotates: bool = True, output: int = 0) -> FixedBias | None:
        """Returns which part of a bias of the keys is fixed, if any; `rotates`: rope follows it."""
        # In a dim without rope, a key bias adds the same to all scores of a query, which the
        # softmax cancels. Its gradient is rounding noise, and Adam would turn it into updates.
        if self.attention_softcap is not None or self.clip_qkv is not None or self.attention_sinks:
            return None
        period, num_rotated = rotated_dims(self.head_dim, self.rope_scaling, self.rotary_fraction)
        rotates = rotates and self.rope_theta is not None
        return FixedBias(period, num_rotated if rotates else 0, output)

    def qkv_outputs(self) -> dict[Target, PaddedDim]:
        """Returns the outputs of `qkv` and their divisions over tp."""
        queries = self.heads
        keys = self.heads.keys
        outputs: dict[Target, PaddedDim] = {"q_proj": queries, "k_proj": keys}
        if not self.value_is_key:
            outputs["v_proj"] = keys
        if self.attention_gate:
            outputs["gate_proj"] = queries.numbers() if self.gate_per_head else queries
        return outputs


@dataclass(frozen=True)
class PaddedHeads(PaddedDim):
    """Splits query heads, or numbers of them, over tp.

    The factors are kv heads K, query heads per kv head G, and the width of a head, or of its
    numbers if it has several. Each device has the query heads of whole kv heads, or shares a kv
    head. Otherwise padding adds kv heads, or query heads to each group, whichever computes less.
    """

    # Width of a head, also if the factors divide its numbers
    head_dim: int

    def numbers(self, *width: int) -> PaddedHeads:
        """Returns the division of one number per query head, or of `width`."""
        return replace(self, factors=(*self.factors[:2], *width))

    @property
    def keys(self) -> PaddedKVHeads:
        """The division of kv heads over tp."""
        return PaddedKVHeads((self.factors[0], self.head_dim), self.factors[1])

    def stored(self, tp: int) -> tuple[int, ...]:
        """See `PaddedDim`."""
        kv_heads, group, *width = self.factors
        return *_padded_heads(kv_heads, group, self.head_dim, tp), *width

    def on_device(self, tp: int) -> tuple[int, int]:
        """Returns each device's query heads and kv heads."""
        kv_heads, group, *_ = self.stored(tp)
        return kv_heads * group // tp, max(1, kv_heads // tp)


@dataclass(frozen=True)
class PaddedKVHeads(PaddedDim):
    """Splits kv heads over tp; factors: their number K and width H."""

    # Query heads of each kv head
    group: int

    def stored(self, tp: int) -> tuple[int, ...]:
        """See `PaddedDim`."""
        kv_heads, width = self.factors
        kv_heads, _ = _padded_heads(kv_heads, self.group, width, tp)
        return kv_heads, width

    def shared_by(self, tp: int) -> int:
        """See `PaddedDim`.

        With fewer heads than tp, neighbours store parts of a head, and each outputs it whole.
        """
        return max(1, tp // self.stored(tp)[0])


@lru_cache(maxsize=1024)
def _padded_heads(kv_heads: int, group: int, width: int, tp: int) -> tuple[int, int]:
    """Returns the padded K and G of `PaddedHeads` with the fewest query heads."""
    unshared = -(-kv_heads // tp) * tp
    for shared in range(kv_heads, min(unshared, tp, _MAX_SHARED_KV_HEADS)):
        # `tp / shared` devices share a head, and store a part of it.
        if tp % shared or shared * width % tp:
            continue
        padded_heads = -(-group * shared // tp) * tp
        if padded_heads <= unshared * group:
            return shared, padded_heads // shared
    return unshared, group


class CausalSelfAttention(Branch):
    """Grouped-query causal attention, `num_heads / tp` query heads per device.

    `norm` are the settings of query, key and value norms.

    Shapes: `[B, T, D] -> [B, T, D]`. Kernels: q `[D, N*H]`, k and v `[D, K*H]` (`qkv.kernels` 0, 1,
    2), out `[N*H, D]`; heads contiguous. The kernel of a gate, `[D, N*H]` or `[D, N]`, is the last
    of `qkv.kernels`.
    """

    over_cp = True

    def __init__(
        self,
        d_model: int,
        config: AttentionConfig = AttentionConfig(),
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = NormConfig(norm_eps=1e-6),
        rngs: nnx.Rngs,
    ):
        if config.num_heads % config.num_kv_heads:
            raise ValueError(
                f"num_heads={config.num_heads} is not divisible by "
                f"num_kv_heads={config.num_kv_heads}"
            )
        self.config = config
        self.precision = context.precision
        self.caller_communicates = context.caller_communicates
        self.norm_eps = norm.norm_eps
        queries = config.heads
        keys = config.heads.keys
        outputs = config.qkv_outputs()
        use_bias: bool | FixedBias = config.attention_bias
        if config.attention_bias and config.qk_norm == "none" and not config.value_is_key:
            use_bias = config.fixed_bias(output=1) or True
        self.qkv = ColumnParallelLinear(
            d_model,
            tuple(outputs.values()),
            context,
            use_bias=use_bias,
            targets=tuple(outputs),
            rngs=rngs,
        )
        if config.attention_sinks:
            zeros = jnp.zeros(config.num_heads, self.precision.param)
            padding = ((-1, queries.numbers()),)
            self.sinks = parameter("sinks", zeros, P(TP), padding=padding)
        else:
            self.sinks = None
        self.qk_norms: nnx.List[QKNorm] = nnx.List([])
        if config.qk_norm != "none":
            normalise = partial(QKNorm, config.qk_norm, norm=norm, precision=self.precision)
            fixed_bias = config.fixed_bias(rotates=not config.qk_norm_after_rope)
            self.qk_norms.append(normalise(queries))
            self.qk_norms.append(normalise(keys, fixed_bias=fixed_bias))
        self.out = RowParallelLinear(
            queries,
            d_model,
            context,
            use_bias=config.attention_out_bias,
            target="o_proj",
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Causal attention within each document."""
        # Only routers read chosen experts.
        sequences = replace(sequences, experts=None)
        attend = partial(self._attend, self._local_shape(x_BTD.shape[1], sequences))
        y_BTF = self._on_heads(attend, x_BTD, (sequences,), (batch_spec(None),), token_spec(TP))
        return self.output(y_BTF, x_BTD)

    def project(self, x_BTD: Array) -> Heads:
        """Returns the projections `[B, T, F]` of the input, split over tp."""
        queries, keys, *values_and_gate = self.qkv(x_BTD)
        if self.config.value_is_key:
            return queries, keys, keys, *values_and_gate
        return queries, keys, *values_and_gate

    def output(self, heads_BTF: Array, x_BTD: Array) -> Array:
        """Projects the heads' results `[B, T, N * H]`, split over tp.

        A subclass may gate them by the input.
        """
        return self.out(heads_BTF)

    def init_cache(self, num_rows: int, num_slots: int) -> KVCache:
        """Returns empty keys and values, `[B, max(K, tp), S, H]` each."""
        tp = axis_size(TP)
        kv_heads, *_ = self.config.heads.stored(tp)
        shape = (num_rows, max(kv_heads, tp), num_slots, self.config.head_dim)
        dtype = self.precision.compute
        return tuple(constrain(jnp.zeros(shape, dtype), LAYER_SPEC) for _ in range(2))

    def decode(self, x_BTD: Array, cache: KVCache, new: NewTokens) -> tuple[Array, KVCache]:
        """Attends from new tokens to the KV cache and to each other."""
        in_specs = (LAYER_SPEC, batch_spec(None))
        out_specs = (token_spec(TP), LAYER_SPEC)
        y, cache = self._on_heads(self._attend_cached, x_BTD, (cache, new), in_specs, out_specs)
        return self.output(y, x_BTD), cache

    def _on_heads(
        self,
        body: Callable[..., Any],
        x_BTD: Array,
        arguments: tuple[Any, ...],
        specs: tuple[Any, ...],
        out_specs: object,
    ) -> Any:
        """Returns `body(weights, project(x_BTD), *arguments)`, run on each device's heads."""
        weights, weight_specs = params_and_specs(self.qk_norms)
        if self.sinks is not None:
            weights["sinks"] = jnp.asarray(self.sinks[...])
            weight_specs["sinks"] = spec_of(self.sinks)
        heads = self.project(x_BTD)
        in_specs = (weight_specs, token_spec(TP), *specs)
        return device_view(body, ATTEND, in_specs, out_specs)(weights, heads, *arguments)

    def _local_shape(self, length: int, sequences: Sequences) -> LocalShape:
        shape = LocalShape(
            sizes=mesh_sizes(current_mesh()),
            rows=1,
            length=length,
            packed=sequences.segments is not None,
            platform=architecture_of(current_device()),
            context=sequences.context,
            zigzag=sequences.zigzag,
        )
        queries, _ = self.config.heads.on_device(shape.tp)
        cp = shape.sizes[CP]
        if shape.context == "ulysses" and queries % cp:
            raise ValueError(
                f'context="ulysses": cp={cp} does not divide the {queries} query heads of a device '
                f'over tp={shape.tp}; use "gather" or "auto"'
            )
        return shape

    def _attend(
        self,
        shape: LocalShape,
        weights: Weights,
        qkv: Heads,
        sequences: Sequences,
    ) -> Array:
        segments = sequences.segments
        positions = sequences.local_positions(shape.length)
        if segments is not None:
            in_documents = segment_positions(segments)
            if shape.sizes[CP] == 1:
                positions = in_documents
            else:
                positions = jnp.take(in_documents, positions, axis=1)
        q, k, v = self._normalise_and_rotate(weights, qkv, positions, shape.length)
        method, _ = self.config.context_attention(shape.tp).method(shape)
        sinks = self._load_sinks(weights, method)
        run = self._kernel(shape, sinks)
        y = sequences.attend(run, method, self.config.sliding_window, q, k, v)
        return self._merge_heads(y, *qkv[3:])

    def _kernel(self, shape: LocalShape, sinks: Array | None) -> Callable[..., Array]:
        """Returns the kernel for sequences, as a function `(q, k, v, segments, part=)`."""
        config = self.config
        use = config.use_on(shape, self.precision.compute)
        for problem in unsupported(config.attention, use):
            raise ConfigError(f'attention="{config.attention}": {problem}')
        kernel, _ = pick_kernel(config.attention, use)
        run = partial(kernel.run, **use.scores, window=use.window, sinks=sinks)
        if shape.packed or sinks is not None or shape.sizes[CP] > 1 or not kernel.platforms:
            return run
        is_split = shape.is_split(self.out.sequence_parallel)
        is_ring = self.out.transport.is_ring(shape.tp, split=True)
        # Whether `swap_sequence` has swapped the projections
        is_swapped = is_split and shape.tp > 1 and not is_ring
        return partial(_rows_as_heads, run) if is_swapped else run

    def _attend_cached(
        self,
        weights: Weights,
        qkv: Heads,
        cache: KVCache,
        new: NewTokens,
    ) -> tuple[Array, KVCache]:
        use = self.config.use(dtype=self.precision.compute)
        num_slots = cache[0].shape[2]
        q, k, v = self._normalise_and_rotate(weights, qkv, new.positions, num_slots)
        keys = new.write(cache[0], k)
        values = new.write(cache[1], v)
        sinks = self._load_sinks(weights)
        if new.rows is None:
            mask = visible(new.positions, num_slots, use.window)
            y = masked_attention(q, (keys, values), mask, **use.scores, sinks=sinks)
        else:
            # Earlier tokens of the first row come before all new tokens.
            if new.continued:
                k = jnp.concatenate([new.before(cache[0]), k], axis=1)
                v = jnp.concatenate([new.before(cache[1]), v], axis=1)
            y = self._attend_packed((q, k, v), new, num_slots, sinks)
        return self._merge_heads(y, *qkv[3:]), (keys, values)

    def _attend_packed(
        self,
        qkv: Heads,
        new: NewTokens,
        num_slots: int,
        sinks: Array | None = None,
    ) -> Array:
        """Attends from packed tokens.

        A row that continues has keys and values of all its slots, then of new tokens.
        """
        q, k, v = qkv
        part = None
        if new.continued:
            index = jnp.arange(q.shape[1], dtype=jnp.int32)
            part = Part(num_slots + index, 0)
        use = self.config.use(
            length=k.shape[1],
            packed=True,
            part=new.continued,
            dtype=self.precision.compute,
            platform=architecture_of(current_device()),
        )
        # The kernel configured for training may not support this use.
        kernel, _ = pick_kernel("auto", use)
        segments = new.segments(num_slots)
        return kernel.run(
            q, k, v, segments, part=part, window=use.window, **use.scores, sinks=sinks
        )

    def _normalise_and_rotate(
        self,
        weights: Weights,
        qkv: Heads,
        positions: Array,
        length: int,
    ) -> tuple[Array, Array, Array]:
        config = self.config
        # Each is `[B/(dp*fsdp), T/cp, N/tp, H]`.
        q, k, v = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in qkv[:3])
        if not config.qk_norm_after_rope:
            q, k = self._normalise(weights, q, k)
        if config.value_norm:
            v = rms_normalise(v, self.norm_eps)
        limit = config.clip_qkv
        if limit is not None:
            q, k, v = (jnp.clip(x, -limit, limit) for x in (q, k, v))
        if config.rope_theta is not None:
            rotate = partial(
                apply_rope,
                positions=positions,
                theta=config.rope_theta,
                scaling=config.rope_scaling,
                length=length,
                fraction=config.rotary_fraction,
            )
            q = rotate(q)
            k = rotate(k)
        if config.qk_norm_after_rope:
            q, k = self._normalise(weights, q, k)
        return self._with_temperature(q, positions), k, v

    def _with_temperature(self, q: Array, positions: Array) -> Array:
        temperature = self.config.query_temperature
        if not temperature:
            return q
        times = positions // self.config.rope_scaling.original_length
        factor = 1 + temperature * jnp.log1p(times)
        return q * factor[..., None, None].astype(q.dtype)

    def _load_sinks(self, weights: Weights, method: Method = "gather") -> Array | None:
        if self.sinks is None:
            return None
        in_float32 = replace(self.precision, compute="float32")
        sinks = in_float32.load(weights["sinks"], None)
        return of_heads(sinks, method)

    def _normalise(self, weights: Weights, q: Array, k: Array) -> tuple[Array, Array]:
        if not self.qk_norms:
            return q, k
        query_norm, key_norm = self.qk_norms
        q = query_norm(q, weights.get("0.scale"), weights.get("0.bias"))
        return q, key_norm(k, weights.get("1.scale"), weights.get("1.bias"))

    def _merge_heads(self, y: Array, *gate: Array) -> Array:
        """Merges heads, times their gate.

        Padded heads become zero: the output kernel gets no gradient there.
        """
        heads = self.config.heads
        rows, length, num_heads, _ = y.shape
        stored = heads.stored(axis_size(TP))
        if stored != heads.factors:
            kv_heads, group, _ = heads.factors
            head = axis_index(TP) * num_heads + jnp.arange(num_heads)
            kv_head, member = jnp.divmod(head, stored[1])
            is_real = (kv_head < kv_heads) & (member < group)
            y = jnp.where(is_real[:, None], y, 0)
        if gate:
            factors = jax.nn.sigmoid(gate[0]).reshape(rows, length, num_heads, -1)
            y = y * factors
        return y.reshape(rows, length, -1)


def _rows_as_heads(
    attend: Callable[..., Array], q: Array, k: Array, v: Array, segments: None
) -> Array:
    """Runs an attention kernel on the heads of all rows, as if they were heads of one row.

    With `swap_sequence` around attention's projections, activations are `[T, B, F]` in memory. A
    kernel of a GPU takes `[B, T, N, H]` row-major, so XLA would swap queries, keys, values and
    results; `[1, T, B * N, H]` is the memory as it is.
    """
    rows, length = q.shape[:2]
    one_row = (x.swapaxes(0, 1).reshape(1, length, -1, x.shape[3]) for x in (q, k, v))
    y = attend(*one_row, segments)
    return y.reshape(length, rows, -1, y.shape[3]).swapaxes(0, 1)
