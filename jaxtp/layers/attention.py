"""Causal self-attention with the heads split over tp.

kv heads may be fewer than tp. Their kernels stay split over tp like any other, so that no device stores more than its
share. The tp / kv_heads devices that share a head gather its columns before use (an all-gather in groups, whose
transpose sums the gradient), and the output has one head for each device: globally, kv heads are repeated. Kernels
replicated over tp, which was the first design, would store far more: 8.4 million parameters and their moments on every
device for each of k and v in each layer of a 70B model at tp 16, instead of a sixteenth of that.

Where tp does not divide the heads they are padded group by group (`HeadSplit`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated, Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from pydantic import Field

from jaxtp.collectives import axis_index, axis_size, batch_spec, constrain, device_view, token_spec
from jaxtp.config import ConfigError, Count, Positive, allowed
from jaxtp.hints import Problem
from jaxtp.layers.activations import Part, SequenceParallel, segment_positions
from jaxtp.layers.branch import Branch, BranchConfig, Memory, Padded, Small
from jaxtp.layers.cache import LAYER_SPEC, NewTokens, visible
from jaxtp.layers.context import Attended, Sequences
from jaxtp.layers.costs import (
    ELEMENTWISE_AGAIN,
    FLOAT32,
    RESULTS_KEPT,
    Cached,
    Cost,
    Kept,
    Product,
    Scores,
    Share,
    Streamed,
    Working,
    itemsize,
)
from jaxtp.layers.kernels import Implementation, Use, chosen, masked_attention, refused, seen
from jaxtp.layers.linear import ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import Precision, Split, Weights, own
from jaxtp.layers.qk_norm import ATTEND, QKNorm, QKNormKind
from jaxtp.layers.rings import Overlap
from jaxtp.layers.rope import RopeScaling, apply_rope, rope_problems
from jaxtp.mesh import CP, TP, current_mesh, mesh_sizes, platform_here

SCORE_PASSES = 5
"""Times that float32 scores go through memory outside of products, forward and backward, where they exist: mask and
maximum, exponentials, division; backward the product with the probabilities, and the difference. Modelled."""

_MOST_SHARED = 4096
"""Numbers of kv heads from which on it is not tried to share one: a mesh may be of any size until it is refused."""

_SMALL_HEAD_DIMS = (8, 16, 32, 64)
_SMALL_THETA = 2.0
"""All dims turn: in one that hardly does, a key bias has no gradient but rounding noise."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(BranchConfig):
    """Settings of a block's attention."""

    num_heads: Count = 8
    """Query heads. Divisible by num_kv_heads; padded inside the layer where mesh.tp needs more."""

    num_kv_heads: Count = 8
    """Key and value heads; padded inside the layer where they and mesh.tp do not divide one another."""

    head_dim: Annotated[int, Field(ge=2, multiple_of=2), allowed("even")] = 16
    """Width of a head; need not be d_model / num_heads."""

    rope_theta: Positive | None = 10_000.0
    """Base of the rotary frequencies; none rotates nothing."""

    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for long contexts."""

    sliding_window: Count | None = None
    """Positions that each one sees, itself and those before it; by default all."""

    qk_norm: QKNormKind = "none"
    """RMS normalisation of queries and keys: of each head, or of the whole projection."""

    query_scale: Positive | None = None
    """Multiplies the products of queries and keys; by default head_dim ** -0.5."""

    attention_softcap: Positive | None = None
    """Attention scores are squashed to below this by c * tanh(score / c)."""

    attention_bias: bool = False
    """Biases on the query, key and value projections."""

    attention_out_bias: bool = False
    """A bias on the attention's output projection."""

    attention: Implementation = "auto"
    """Kernel. auto takes the first that can do what is asked where it runs. cudnn and fused need an NVIDIA GPU, cudnn
    also 16 bits and no packed documents; blockwise runs everywhere; xla does too, and holds all scores."""

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields why attention, or another branch of the block, cannot run on a mesh of those sizes."""
        yield from super().problems(sizes)
        if self.num_heads % self.num_kv_heads:
            yield Problem(
                f"model.num_heads={self.num_heads} is not divisible by model.num_kv_heads={self.num_kv_heads}",
                among={"model.num_kv_heads": self.num_heads},
            )
        if sizes[TP] > 2 * self.num_heads:
            text = (
                f"mesh.tp={sizes[TP]} is more than twice model.num_heads={self.num_heads}: most devices would have none"
            )
            yield Problem(text, among={f"mesh.{TP}": self.num_heads})
        yield from map(Problem, rope_problems(self.head_dim, self.rope_theta, self.rope_scaling))
        yield from map(Problem, refused(self.attention, self.use()))

    @property
    def heads(self) -> "HeadSplit":
        """The division of query heads over tp."""
        return HeadSplit((self.num_kv_heads, self.num_heads // self.num_kv_heads, self.head_dim))

    def use_on(self, share: Share, dtype: str) -> Use:
        """Returns what a kernel is asked to do for a device's share, in a compute dtype."""
        method, _ = self.attended(share.tp).method(share)
        known: dict[str, Any] = {"length": share.length, "packed": share.packed, "platform": share.platform}
        return self.use(dtype=dtype, part=method == "gather", **known)

    def use(self, **known: Any) -> Use:
        """Returns what a kernel is asked to do, with what is known of the rest."""
        window, softcap, scale = self.sliding_window, self.attention_softcap, self.query_scale
        return Use(head_dim=self.head_dim, window=window, softcap=softcap, scale=scale, **known)

    def attended(self, tp: int, itemsize: int = 1) -> Attended:
        """Returns what context parallelism has to know of attention on tp devices."""
        queries, keys = self.heads.on_device(tp)
        return Attended(queries=queries, keys=keys, head_bytes=self.head_dim * itemsize, window=self.sliding_window)

    def zigzag(self, share: Share) -> bool:
        """Returns whether this attention, or another branch, has work that is even in the order zigzag alone."""
        return super().zigzag(share) or self.attended(share.tp).zigzag(share)

    def context_problems(self, share: Share) -> Iterator[Problem]:
        """Yields why attention, or another branch, cannot use the method over cp that is asked for."""
        yield from super().context_problems(share)
        queries, cp = self.heads.on_device(share.tp)[0], share.sizes[CP]
        if share.context == "ulysses" and queries % cp:
            text = (
                f"mesh.context=ulysses: mesh.cp={cp} does not divide the {queries} query heads of a device over "
                f"mesh.tp={share.tp}; use gather or auto"
            )
            yield Problem(text, among={f"mesh.{CP}": queries})

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the numbers of heads that tp devices may have to pad."""
        yield from super().padding(tp)
        if self.num_heads % self.num_kv_heads == 0:
            kv_heads, group, _ = self.heads.stored(tp)
            yield "query heads", self.num_heads, kv_heads * group
            yield "kv heads", self.num_kv_heads, kv_heads

    def smaller(self, small: Small) -> dict[str, Any]:
        """Returns the settings of a small attention of the same structure, and those of the other branches."""
        heads = self.heads

        def alike(width: int) -> bool:
            other = replace(self, head_dim=width).heads
            return all(heads.stored(tp)[:-1] == other.stored(tp)[:-1] for tp in small.tps)

        head_dims = (size for size in _SMALL_HEAD_DIMS if size < self.head_dim and alike(size))
        head_dim, length = next(head_dims, self.head_dim), small.positions(self.rope_scaling.original_length)
        return {
            "head_dim": head_dim,
            "rope_theta": self.rope_theta and _SMALL_THETA,
            "rope_scaling": self.rope_scaling.smaller(head_dim, length),
            "sliding_window": self.sliding_window and small.positions(self.sliding_window),
            "attention": "auto" if self.attention in ("cudnn", "fused") else self.attention,  # those need a GPU
            **super().smaller(small),
        }


@dataclass(frozen=True)
class HeadSplit(Split):
    """The division of query heads over tp: kv heads K, the G query heads of each, and their width H.

    Each device has the query heads of whole kv heads, or shares one kv head with others. Where that is impossible, kv
    heads are added, or query heads to each group, whichever computes less.
    """

    @property
    def keys(self) -> "KeySplit":
        """The division of the kv heads."""
        kv_heads, group, width = self.factors
        return KeySplit((kv_heads, width), group)

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the factors over tp devices."""
        return _padded_heads(*self.factors, tp)

    def on_device(self, tp: int) -> tuple[int, int]:
        """Returns the number of query heads and of kv heads that each of tp devices computes with."""
        kv_heads, group, _ = self.stored(tp)
        return kv_heads * group // tp, max(1, kv_heads // tp)


@dataclass(frozen=True)
class KeySplit(Split):
    """The division of kv heads over tp: their number K, and their width H."""

    group: int
    """Query heads of each."""

    def stored(self, tp: int) -> tuple[int, ...]:
        """Returns the factors over tp devices."""
        kv_heads, _, width = _padded_heads(self.factors[0], self.group, self.factors[1], tp)
        return kv_heads, width


@lru_cache(maxsize=1024)
def _padded_heads(kv_heads: int, group: int, width: int, tp: int) -> tuple[int, int, int]:
    """Returns kv heads, query heads of each and width over tp devices: those of the fewest query heads."""
    least = -(-kv_heads // tp) * tp
    for more in range(kv_heads, min(least, tp, _MOST_SHARED)):
        if tp % more == 0 and more * width % tp == 0:  # tp / more devices share a head, each storing a part of it
            padded = -(-group * more // tp) * tp // more
            if more * padded <= least * group:
                return more, padded, width
    return least, group, width


class CausalSelfAttention(Branch):
    """Grouped-query causal attention: each device computes `num_heads / tp` query heads.

    Args:
      d_model: D.
      config: N query heads, divisible by the K key and value heads; H their width. Where K < tp, a head is held and
        its gradient summed by the tp / K devices that share it; what tp cannot divide so is padded. The kernel cudnn
        runs on NVIDIA GPUs in bfloat16 without ever holding `[T, T]` scores; it raises where it cannot run.
      norm_eps: of the normalisation of queries and keys.
      norm_plus_one: its factor is 1 + scale.
      sequence_parallel: activations outside are split over tp along the sequence.
      overlap: whether the projections gather and sum while they multiply; see `layers.rings`.
      lora: adapters of the projections that it names.
      precision: the dtypes.
      rngs: source of the `params` key.

    Shapes: `[B, T, D] -> [B, T, D]`; segments `[B, T]`, see `layers/activations.py`. Kernels: q `[D, N*H]`, k and v
    `[D, K*H]` (`qkv.kernels` 0, 1, 2) and out `[N*H, D]`, heads contiguous.
    """

    over_cp = True

    def __init__(
        self,
        d_model: int,
        config: AttentionConfig,
        *,
        norm_eps: float = 1e-6,
        norm_plus_one: bool = False,
        sequence_parallel: SequenceParallel = False,
        overlap: Overlap = "none",
        lora: LoraConfig = LoraConfig(),
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        self.config, self.precision = config, precision
        over_tp: dict[str, Any] = {"sequence_parallel": sequence_parallel, "overlap": overlap}
        shared: dict[str, Any] = {**over_tp, "precision": precision, "rngs": rngs}
        queries, keys = config.heads, config.heads.keys
        plain = config.rope_theta is None and config.qk_norm == "none" and config.attention_softcap is None
        self.qkv = ColumnParallelLinear(
            d_model,
            (queries, keys, keys),
            use_bias=config.attention_bias,
            # It then adds the same to all scores of a query, which changes nothing: its gradient is rounding noise, of
            # which Adam would make updates.
            fixed_biases=(1,) if plain and config.attention_bias else (),
            unit=config.head_dim,
            lora=lora,
            adapted=lora.adapted("q_proj", "k_proj", "v_proj"),
            **shared,
        )
        norm = partial(QKNorm, config.qk_norm, eps=norm_eps, plus_one=norm_plus_one, precision=precision)
        normalised = () if config.qk_norm == "none" else (queries, keys)
        self.qk_norms = nnx.List(norm(heads, config.head_dim) for heads in normalised)
        self.out = RowParallelLinear(
            queries, d_model, use_bias=config.attention_out_bias, lora=lora.only("o_proj"), **shared
        )

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> Array:
        """Attends from each position of `[B, T, D]` to itself and those before it in its document."""
        segments = [] if sequences.segments is None else [sequences.segments]
        attend = partial(self._attend, replace(sequences, segments=None), self._share(x_BTD.shape[1], sequences))
        return self.out(self._view(attend, segments, [batch_spec(None)], token_spec(TP))(self.qkv(x_BTD)))

    def memory(self, num_rows: int, num_slots: int) -> Memory:
        """Returns keys and values `[B, K, S, H]` of no tokens; K is tp where that is more than the kv heads."""
        tp = axis_size(TP)
        shape = (num_rows, max(self.config.heads.stored(tp)[0], tp), num_slots, self.config.head_dim)
        return tuple(constrain(jnp.zeros(shape, self.precision.compute), LAYER_SPEC) for _ in range(2))

    def extend(self, x_BTD: Array, memory: Memory, new: NewTokens) -> tuple[Array, Memory]:
        """Attends from new tokens to those of a memory of keys and values, and to each other; see `Branch.extend`."""
        memory_specs = (LAYER_SPEC, LAYER_SPEC)
        attend = self._view(
            self._attend_cached, [memory, new], [memory_specs, new.specs], (token_spec(TP), memory_specs)
        )
        y, memory = attend(self.qkv(x_BTD))
        return self.out(y), memory

    def _view(self, body: Any, others: list[Any], specs: list[Any], out_specs: Any) -> Any:
        """Returns a function of queries, keys and values that runs `body(weights, q, k, v, *others)` on each device."""
        weights, weight_specs = own(self.qk_norms)
        in_specs = (weight_specs, *[token_spec(TP)] * 3, *specs[: len(others)])
        return lambda qkv: device_view(body, ATTEND, in_specs, out_specs)(weights, *qkv, *others)

    def _share(self, length: int, sequences: Sequences) -> Share:
        """Returns what decides how a device attends over cp."""
        sizes, context = mesh_sizes(current_mesh()), sequences.context
        share = Share(sizes=sizes, rows=1, length=length, context=context, zigzag=sequences.zigzag)
        for problem in self.config.context_problems(share):
            raise ConfigError(problem.text)
        return share

    def _attend(
        self,
        sequences: Sequences,
        share: Share,
        weights: Weights,
        q: Array,
        k: Array,
        v: Array,
        segments: Array | None = None,
    ) -> Array:
        config, sequences = self.config, replace(sequences, segments=segments)
        positions = sequences.own_positions(share.length)
        if segments is not None:
            within = segment_positions(segments)
            positions = within if share.sizes[CP] == 1 else jnp.take(within, positions, axis=1)
        q, k, v = self._heads(weights, q, k, v, positions, share.length)
        method, _ = config.attended(share.tp).method(share)
        use = config.use_on(
            replace(share, packed=segments is not None, platform=platform_here()), self.precision.compute
        )
        for problem in refused(config.attention, use):
            raise ConfigError(problem)
        kernel, _ = chosen(config.attention, use)
        settings = {"scale": self._scale, "window": config.sliding_window, "softcap": config.attention_softcap}
        return self._joined(sequences.attend(partial(kernel.run, **settings), method, config.sliding_window, q, k, v))

    def _attend_cached(
        self, weights: Weights, q: Array, k: Array, v: Array, memory: Memory, new: NewTokens
    ) -> tuple[Array, Memory]:
        num_slots, window = memory[0].shape[2], self.config.sliding_window
        q, k, v = self._heads(weights, q, k, v, new.positions, num_slots)
        keys, values = new.write(memory[0], k), new.write(memory[1], v)
        settings: dict[str, Any] = {"scale": self._scale, "softcap": self.config.attention_softcap}
        if new.rows is None:
            y = masked_attention(q, keys, values, visible(new.positions, num_slots, window), **settings)
            return self._joined(y), (keys, values)
        part = None
        if new.continued:  # one sequence: what comes before the first row's tokens, and then all of them
            k, v = (jnp.concatenate([new.before(old), x], axis=1) for old, x in zip(memory, (k, v), strict=True))
            part = Part(num_slots + jnp.arange(q.shape[1], dtype=jnp.int32), 0)
        use = self.config.use(
            dtype=self.precision.compute,
            length=k.shape[1],
            packed=True,
            part=new.continued,
            platform=platform_here(),
        )
        kernel, _ = chosen("auto", use)  # one that training was told to use may not do this
        y = kernel.run(q, k, v, new.segments(num_slots), part=part, window=window, **settings)
        return self._joined(y), (keys, values)

    def _heads(
        self, weights: Weights, q: Array, k: Array, v: Array, positions: Array, length: int
    ) -> tuple[Array, Array, Array]:
        """Returns the heads of this device, queries and keys normalised and rotated to positions below `length`."""
        config = self.config
        q, k, v = (x.reshape(*x.shape[:2], -1, config.head_dim) for x in (q, k, v))  # [B/(dp*fsdp), T/cp, N/tp, H]
        if self.qk_norms:
            q, k = (
                norm(x, weights[f"{i}.scale"]) for i, (norm, x) in enumerate(zip(self.qk_norms, (q, k), strict=True))
            )
        if (theta := config.rope_theta) is not None:
            q, k = (apply_rope(x, positions, theta, config.rope_scaling, length) for x in (q, k))
        return q, k, v

    @property
    def _scale(self) -> float:
        return self.config.use().factor

    def _joined(self, y: Array) -> Array:
        """Returns the results of all heads side by side, `[B, T, N*H]`."""
        return self._unpadded(y).reshape(*y.shape[:2], -1)

    def _unpadded(self, y: Array) -> Array:
        """Returns the heads of this device, padding set to zero, so that the output kernel has no gradient there."""
        heads, tp = self.config.heads, axis_size(TP)
        if heads.stored(tp) == heads.factors:
            return y
        kv_heads, group, _ = heads.factors
        index = axis_index(TP) * y.shape[2] + jnp.arange(y.shape[2])
        place, member = jnp.divmod(index, heads.stored(tp)[1])
        return jnp.where(((place < kv_heads) & (member < group))[:, None], y, 0)

    def costs(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what it costs.

        A kernel makes scores in products of the shape that it says; one that holds none makes them again in its
        backward pass. Float32 are the scores before and after the softmax, and queries and keys before their rotation.
        Where all scores are held and there is no remat, and a device has several kv heads, the backward loop reads one
        stack of scores in another layout than the forward loop has written it in: XLA copies it. In a backward pass
        there are two arrays of scores in float32 and two in the compute dtype: the scores or their gradient, and a
        constant of their shape that the mask selects (XLA takes it out of the loop over the blocks); the softmax, in
        the layouts of two products.
        """
        config, compute, cp = self.config, itemsize(self.precision.compute), share.sizes[CP]
        kernel, _ = chosen(config.attention, config.use_on(share, self.precision.compute))
        stored_kv, group, _ = config.heads.stored(share.tp)
        heads, kv_heads = config.heads.on_device(share.tp)
        queries, keys = (share.tokens * count * config.head_dim for count in (heads, kv_heads))
        yield from self.qkv.costs(share, "q, k, v")
        for norm in self.qk_norms:
            yield from norm.costs(share)

        attended = config.attended(share.tp, compute)
        method, _ = attended.method(share)
        result_read = not share.frozen or bool(self.out.loras)
        yield from attended.moves(method, ATTEND, share, result_read=result_read)
        chunks = attended.chunks(method, share)
        number, m, n = kernel.blocks(chunks, config.sliding_window)
        kept = kernel.keeps_result and share.remat in RESULTS_KEPT
        again = share.remat in ELEMENTWISE_AGAIN and not kept
        runs = share.rows * (heads // cp if method == "ulysses" else heads) * number
        through = 2 * m * config.head_dim * compute + (m * n * FLOAT32 if kernel.streams_scores else 0)
        counted = seen(chunks, config.sliding_window) / (number * m * n)
        shared: dict[str, Any] = {"bytes": through, "attention": True, "counted": counted}
        made = share.passes(again, 2 if kernel.holds_scores else 3)
        yield Product("scores", m, config.head_dim, n, made * runs, **shared)
        yield Product("weighted values", m, n, config.head_dim, share.passes(again, 2) * runs, **shared)
        held = runs * m * n if kernel.holds_scores else 0
        if kernel.streams_scores:
            yield Scores("scores", runs * m * n * FLOAT32 * SCORE_PASSES)
        rotated = stored_kv * (group + 1) * config.head_dim // share.tp
        yield Streamed(share.tokens * 2 * rotated * compute)
        yield Working(held * 2 * (FLOAT32 + compute) + attended.moved_bytes(method, share))
        if share.remat == "none":
            copies = 2 + (kv_heads > 1)
            yield Kept(FLOAT32 * (copies * held + queries + keys) + compute * (queries + keys))
            yield Kept(attended.moved_bytes(method, share))
        if kept:
            yield Kept(queries * compute + share.tokens * heads * FLOAT32)
        yield Cached(2 * keys * compute)
        yield from self.out.costs(share, "attention out", read=read)
