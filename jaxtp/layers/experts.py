"""A mixture of experts: an MLP of which each token uses the few that its router chooses (Shazeer et al., 1701.06538).

The router's scores are a softmax over all E experts, in float32. A token goes to the k experts of the highest score, of
equal ones to the first; each weighs its score, or that over the sum of the k. No token is dropped, however many choose
one expert: every choice is a row, rows are sorted by expert, and each expert multiplies its own (`layers/grouped.py`).

Kernels are stacked, `[E, D, F]`. Over tp they are divided in one of two ways:

    experts over tp   where tp divides E: a device has E/tp whole experts, and computes the rows that chose them.
    experts inside    else: a device has F/tp of every expert, and computes its part of every row.

In both the all-gather and the reduce-scatter of sequence parallelism bring all tokens of a tp group to its devices, and
sum what they computed: over tp it moves what a dense MLP does, whatever k is, and beside it two floats for each choice,
as each device routes its own tokens. So experts need neither an axis of the mesh nor an all-to-all. The price is rows:
a device has a place for every choice of the group's tokens, since all of them may choose its experts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from pydantic import Field

from jaxtp.collectives import (
    CHOSEN,
    PROJECTED,
    axis_index,
    axis_size,
    batch_spec,
    device_view,
    enter_parallel,
    leave_parallel,
    token_spec,
)
from jaxtp.config import Count, allowed
from jaxtp.hints import Problem, nearest_multiples
from jaxtp.layers.activations import SequenceParallel, activation_spec, sequence_dim
from jaxtp.layers.balance import Routing, SelectionBias
from jaxtp.layers.branch import Memory, Padded, PositionwiseBranch, Small
from jaxtp.layers.cache import NewTokens
from jaxtp.layers.context import Sequences
from jaxtp.layers.costs import (
    ELEMENTWISE_AGAIN,
    FLOAT32,
    GATHERS_AGAIN,
    INT32,
    PROJECTIONS_AGAIN,
    SUMS_AGAIN,
    Cost,
    Kept,
    Product,
    Share,
    Streamed,
    Weight,
    Working,
    enter,
    itemsize,
    leave,
    sums_over,
)
from jaxtp.layers.grouped import Implementation, Method, dense, grouped_matmul, method_of
from jaxtp.layers.linear import default_kernel_init
from jaxtp.layers.mlp import ACTIVATIONS, MLP_TARGETS, MLPConfig
from jaxtp.layers.parameter import Precision, Weights, own, parameter
from jaxtp.mesh import SEQUENCE, STORAGE, TP, parts, platform_here

EXPERTS = "mixture_of_experts"
_SMALL_EXPERTS, _SMALL_CHOICES = 4, 2


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """Settings of a block's MLP, or of the experts in its place: then each has the MLP's hidden width."""

    num_experts: Annotated[int, Field(ge=0), allowed("0 or more")] = 0
    """Experts, of which each token uses a few; 0 for one MLP that all tokens use. d_ff is the width of each."""

    experts_per_token: Count = 2
    """Experts that each token uses."""

    normalize_experts: bool = True
    """Divide the weights of a token's experts by their sum."""

    selection_bias: bool = False
    """A bias of each expert for choosing alone, moved once per update against its load; see
    train.selection_bias_rate."""

    grouped: Implementation = "auto"
    """Products of experts with their rows. pallas is a kernel for NVIDIA GPUs; xla runs everywhere, and on GPUs
    multiplies every row with every expert; auto takes the first that can."""

    def over_tp(self, tp: int) -> bool:
        """Returns whether each of tp devices has whole experts; else it has a part of each."""
        return self.num_experts % tp == 0

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """Yields why the experts, or another branch of the block, cannot run on a mesh of those sizes."""
        yield from super().problems(sizes)
        if not self.num_experts:
            return
        experts, tp = self.num_experts, sizes[TP]
        if self.experts_per_token > experts:
            yield Problem(
                f"model.experts_per_token={self.experts_per_token} is more than model.num_experts={experts}; "
                f"at most {experts} works"
            )
        if self.mlp != "gated" or self.mlp_bias:
            given = f"model.mlp={self.mlp} and model.mlp_bias={str(self.mlp_bias).lower()}"
            yield Problem(
                f"{given}: the {experts} experts of model.num_experts are gated, without biases; use model.mlp=gated "
                "and model.mlp_bias=false"
            )
        if not self.over_tp(tp) and self.d_ff % tp:
            sizes_of = {"model.num_experts": experts, "model.d_ff": self.d_ff}
            yield Problem(
                f"mesh.tp={tp} divides neither model.num_experts={experts} nor their width model.d_ff={self.d_ff}",
                among={f"mesh.{TP}": experts * self.d_ff},
                multiples={name: tuple(nearest_multiples(value, tp)) for name, value in sizes_of.items()},
            )

    def adapter_problems(self, targets: Collection[str]) -> Iterator[Problem]:
        """Yields why no adapters can be where they are to be."""
        yield from super().adapter_problems(targets)
        if self.num_experts and (experts := [target for target in targets if target in MLP_TARGETS]):
            others = " ".join(target for target in targets if target not in MLP_TARGETS) or "q_proj v_proj"
            yield Problem(
                f"model.lora.targets: {', '.join(experts)} are projections of {self.num_experts} experts, which have "
                f"no adapters; use --model.lora.targets {others}"
            )

    def padding(self, tp: int) -> Iterator[Padded]:
        """Yields the sizes of the block that tp devices pad: none of experts."""
        yield from super(MLPConfig, self).padding(tp) if self.num_experts else super().padding(tp)

    def smaller(self, small: Small) -> dict[str, Any]:
        """Returns the settings of few small experts of the same structure, and those of the other branches."""
        settings = super().smaller(small)
        if not self.num_experts or self.num_experts <= (few := small.size(self.num_experts, _SMALL_EXPERTS)):
            return settings
        every = self.experts_per_token == self.num_experts
        return {
            **settings,
            "num_experts": few,
            "experts_per_token": few if every else min(self.experts_per_token, _SMALL_CHOICES),
        }


class MixtureOfExperts(PositionwiseBranch):
    """Experts in place of an MLP, divided over tp.

    Args:
      d_model: D.
      config: number of experts E, k of them for each token, their hidden width F, activation.
      sequence_parallel: activations outside are split over tp along the sequence.
      precision: the dtypes; the router is float32.
      rngs: source of the `params` key.

    Shapes: `[B, T, D] -> [B, T, D]`. The router is `[D, E]`, `gate` and `up` `[E, D, F]`, `down` `[E, F, D]`, and a
    selection bias `[E]`. It also returns its `Routing`.
    """

    def __init__(
        self,
        d_model: int,
        config: ExpertsConfig,
        *,
        sequence_parallel: SequenceParallel = False,
        precision: Precision = Precision(),
        rngs: nnx.Rngs,
    ):
        self.d_model, self.config = d_model, config
        self.sequence_parallel, self.precision = sequence_parallel, precision
        experts, features = config.num_experts, config.d_ff
        over, inside = (TP, None) if config.over_tp(axis_size(TP)) else (None, TP)

        def kernel(name: str, shape: tuple[int, ...], spec: P) -> nnx.Param[Array]:
            value = default_kernel_init(rngs.params(), shape, precision.param)
            made: nnx.Param[Array] = parameter(name, value, spec)
            return made

        self.router = kernel("router", (d_model, experts), P(STORAGE, None))
        self.gate = kernel("gate", (experts, d_model, features), P(over, STORAGE, inside))
        self.up = kernel("up", (experts, d_model, features), P(over, STORAGE, inside))
        self.down = kernel("down", (experts, features, d_model), P(over, inside, STORAGE))
        if config.selection_bias:
            bias = jnp.zeros(experts, jnp.float32)
            self.selection_bias = parameter("selection bias", bias, P(None), kind=SelectionBias)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> tuple[Array, Routing]:  # type: ignore[override]
        """Transforms each position of `[B, T, D]`, and says what was routed where; padding stays zero."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(sequence)
        weights, specs = own(self)
        of_tokens: dict[str, Array] = {}
        if self.config.selection_bias:
            weights["selection_bias"], specs["selection_bias"] = self.selection_bias[...], P(None)
        if sequences.segments is not None:
            of_tokens["segments"] = sequences.own(sequences.segments)
        if sequences.experts is not None:
            of_tokens["experts"] = sequences.own(sequences.experts)
        # Each device takes its part of them: if they came in split over tp, XLA would split whatever else reads them.
        token_specs = {name: token_spec() for name in of_tokens}
        sums = batch_spec(SEQUENCE)
        recorded = P(*activation[:2]) if sequences.record else None
        transform = device_view(
            partial(self._transform, sequence, sequences.record),
            EXPERTS,
            in_specs=(activation, specs, token_specs),
            out_specs=(activation, Routing(*[sums] * 5, *[recorded] * 2)),  # type: ignore[arg-type]
        )
        result: tuple[Array, Routing] = transform(x_BTD, weights, of_tokens)
        return result

    def extend(self, x_BTD: Array, memory: Memory, new: NewTokens) -> tuple[Array, Memory]:
        """Transforms new tokens."""
        return self(x_BTD)[0], ()

    def _transform(
        self, sequence: int | None, record: bool, x: Array, weights: Weights, of_tokens: Weights
    ) -> tuple[Array, Routing]:
        config, over_tp = self.config, self.config.over_tp(axis_size(TP))
        if sequence is not None:
            part = partial(jax.lax.dynamic_slice_in_dim, slice_size=x.shape[1], axis=1)
            of_tokens = {name: part(array, axis_index(TP) * x.shape[1]) for name, array in of_tokens.items()}
        segments = of_tokens.get("segments")
        counts = jnp.ones(x.shape[:2], bool) if segments is None else segments != 0
        experts, shares, routing = self._route(sequence, record, x, weights, counts, of_tokens.get("experts"))
        # In one exchange; whole numbers are exact in float32.
        told = enter_parallel(jnp.concatenate([shares, experts.astype(jnp.float32)], axis=-1), sequence)
        shares, experts = told[..., : config.experts_per_token], told[..., config.experts_per_token :].astype(jnp.int32)
        x = enter_parallel(x.astype(self.precision.compute), sequence)  # [b, T/cp, D]
        count, _ = self._on_device(axis_size(TP))
        local = experts - (axis_index(TP) * count if over_tp else 0)
        mine = (local >= 0) & (local < count)
        rows = Rows.of(jnp.where(mine, local, count).reshape(-1, config.experts_per_token), count)
        y = self._compute(rows, x.reshape(-1, x.shape[-1]), shares.reshape(-1), weights)
        computed = jnp.sum(mine, axis=(1, 2), dtype=jnp.float32)
        # Every device of a tp group computes a part of each row where experts are divided inside: one counts it.
        routing = replace(routing, computed=(computed if over_tp else _once(computed))[:, None])
        return leave_parallel(y.reshape(*x.shape[:2], -1), sequence), routing

    @property
    def _method(self) -> Method:
        return method_of(self.config.grouped, platform_here())[0]

    def _route(
        self,
        sequence: int | None,
        record: bool,
        x: Array,
        weights: Weights,
        counts: Array,
        given: Array | None,
    ) -> tuple[Array, Array, Routing]:
        """Returns the experts of this device's tokens and their weights, `[b, t, k]` both, and the sums.

        Tokens of padding have expert E, which there is not. Where experts are given, they are taken, and the router's
        own choice is only recorded.
        """
        config, k = self.config, self.config.experts_per_token
        router = replace(self.precision, compute="float32").load(
            weights["router"], 0, used_by_all_tp=sequence is not None
        )
        logits = jnp.einsum("btd,de->bte", x.astype(jnp.float32), router, precision=jax.lax.Precision.HIGHEST)
        scores = jax.nn.softmax(logits)
        for_choice = jax.lax.stop_gradient(scores)
        if config.selection_bias:
            for_choice = for_choice + weights["selection_bias"]
        best, own_choice = jax.lax.top_k(for_choice, min(k + record, config.num_experts))
        # Made once: if the backward pass computed the scores again with other rounding, it might choose others.
        own_choice = checkpoint_name(own_choice[..., :k], CHOSEN)
        experts = own_choice if given is None else given
        shares = jnp.take_along_axis(scores, experts, axis=-1)
        if config.normalize_experts:
            total = jnp.sum(shares, axis=-1, keepdims=True)  # 0 if a bias chose what no score is left of
            shares = shares / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        log_scores = logits - normaliser[..., None]
        valid = counts.astype(jnp.float32)
        sums = [
            jnp.sum(jax.nn.one_hot(experts, config.num_experts).sum(2) * valid[..., None], axis=1),
            jnp.sum(scores * valid[..., None], axis=1),
            jnp.sum(jnp.square(normaliser) * valid, axis=1),
            jax.lax.stop_gradient(jnp.sum(-jnp.sum(scores * log_scores, axis=-1) * valid, axis=1)),
        ]
        if sequence is None:  # every device of a tp group has the same tokens
            sums = [_once(each) for each in sums]
        routing = Routing(*(each[:, None] for each in sums), computed=valid)  # type: ignore[misc]
        if record:
            last = jnp.zeros_like(best[..., 0]) if best.shape[-1] == k else best[..., k]
            routing = replace(routing, experts=own_choice, margin=best[..., k - 1] - last)
        return jnp.where(counts[..., None], experts, config.num_experts), shares, routing

    def _compute(self, rows: "Rows", x: Array, shares: Array, weights: Weights) -> Array:
        """Returns what this device's experts add to each token: `[N, D] -> [N, D]`, weights `[N * k]`."""
        gate, up = (self.precision.load(weights[name], 1) for name in ("gate", "up"))
        down = self.precision.load(weights["down"], 2)
        inputs = rows.spread(x)
        multiply = partial(grouped_matmul, sizes_E=rows.sizes, method=self._method)
        gates, ups = (checkpoint_name(multiply(inputs, kernels), PROJECTED) for kernels in (gate, up))
        hidden = ACTIVATIONS[self.config.activation](gates) * ups
        # Weighed before the last product, whose result the backward pass then does not read.
        weighed = (hidden * rows.of_choices(shares)[:, None]).astype(hidden.dtype)
        return rows.collect(multiply(weighed, down))

    def costs(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what it costs; of rows as many as there are if all experts are chosen alike."""
        config, experts = self.config, self.config.num_experts
        split = share.is_split(self.sequence_parallel)
        in_float32 = replace(self.precision, compute="float32")
        yield Weight(module=EXPERTS, size=self.d_model * experts, tp=False, used_by_all_tp=split, precision=in_float32)
        size, active = experts * self.d_model * config.d_ff, config.experts_per_token / experts
        for _ in ("gate", "up", "down"):
            yield Weight(module=EXPERTS, size=size, active=active, precision=self.precision)
        hidden = share.tokens * self.d_model * itemsize(self.precision.compute)
        told = 2 * FLOAT32 * share.tokens * config.experts_per_token
        for moved in (told, hidden):
            yield from enter(EXPERTS, share, moved, split=split, again=share.remat in GATHERS_AGAIN)
        yield from leave(EXPERTS, share, hidden, split=split, again=read and share.remat in SUMS_AGAIN)
        if not split and share.training:  # gradients of scores and normalisers, which one device of a tp group sums up
            yield sums_over(EXPERTS, (TP,), share.sizes, FLOAT32 * (experts + 1) * share.rows)
        yield from self._computed(share, read=read)
        yield from self._kept(share, read=read)

    def _computed(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what is computed, and the memory that goes through.

        There is a place for every choice of the tokens of a tp group (N * k): products compute those that chose one of
        the device's experts, elementwise operations all. Dense products compute all places with all experts.
        """
        config, compute = self.config, itemsize(self.precision.compute)
        tokens, choices = share.between(self.sequence_parallel), share.tokens * config.experts_per_token
        routed = share.passes(share.remat in ELEMENTWISE_AGAIN, share.gradients)
        yield Product.of("router", (tokens, self.d_model, config.num_experts), FLOAT32, routed)
        local, width = self._on_device(share.tp)
        rows = choices // share.tp if config.over_tp(share.tp) else choices
        method, _ = method_of(config.grouped, share.platform)
        for name, inner, outer, again in (
            ("experts' gate, up", self.d_model, 2 * width, share.remat in PROJECTIONS_AGAIN),
            ("experts' down", width, self.d_model, read and share.remat in SUMS_AGAIN),
        ):
            count, kernels = share.passes(again, share.gradients), local * inner * outer
            if dense(method, share.platform):
                moved = (local * choices * inner + choices * outer + kernels) * compute
                yield Product(name, local * choices, inner, outer, count, moved, counted=rows / (local * choices))
            else:
                moved = (rows * inner + choices * outer + kernels) * compute
                yield Product(name, rows, inner, outer, count, moved, in_kernel=method == "pallas")
        yield Streamed(compute * (3 * choices * width + 2 * (choices + rows) * self.d_model))
        if parts(share.sizes, STORAGE) > 1:  # gathered kernels, brought in order
            yield Streamed(compute * 2 * 3 * local * self.d_model * width)

    def _kept(self, share: Share, *, read: bool) -> Iterator[Cost]:
        """Yields what is held: by the backward pass of the layer, and of all layers for it."""
        config, compute = self.config, itemsize(self.precision.compute)
        tokens, choices = share.between(self.sequence_parallel), share.tokens * config.experts_per_token
        hidden, (local, width) = share.tokens * self.d_model * compute, self._on_device(share.tp)
        yield Working(compute * choices * (6 * width + 2 * self.d_model))
        if dense(method_of(config.grouped, share.platform)[0], share.platform):
            # Rows laid out once for each expert, of two products at a time.
            yield Working(compute * 2 * local * choices * max(width, self.d_model))
        yield Kept(INT32 * tokens * config.experts_per_token)
        if share.remat == "none":
            scores = 4 * FLOAT32 * tokens * config.num_experts
            yield Kept(choices * width * (6 * compute + FLOAT32) + hidden + scores)
        if share.remat == "save_gathered":
            yield Kept(hidden + 2 * FLOAT32 * choices)
        if share.remat == "save_dots":
            yield Kept(compute * choices * 2 * width)
        if read and share.remat in ("save_dots", "save_gathered", "save_reduced"):
            yield Kept(tokens * self.d_model * compute)

    def _on_device(self, tp: int) -> tuple[int, int]:
        """Returns how many experts each of tp devices has, and the width that it has of each."""
        config = self.config
        return (
            (config.num_experts // tp, config.d_ff) if config.over_tp(tp) else (config.num_experts, config.d_ff // tp)
        )


@dataclass(frozen=True)
class Rows:
    """The places of tokens' choices among rows that are sorted by expert: N * k, for N tokens with k choices each.

    A choice of no expert of this device has place N * k, and a place of no choice has choice N * k: neither is there.
    """

    sizes: Array
    """Rows of each expert, `[experts]` int32."""

    places: Array
    """Place of each choice, `[N, k]`."""

    choices: Array
    """Choice in each place, `[N * k]`: the number of a token times k, plus which of its choices it is."""

    @classmethod
    def of(cls, experts: Array, count: int) -> "Rows":
        """Returns the places of choices `[N, k]` of so many experts; expert `count` is none."""
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        places = jnp.zeros_like(flat).at[order].set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
        sizes = jnp.sum(jax.nn.one_hot(flat, count, dtype=jnp.int32), axis=0)
        none = jnp.arange(flat.size) >= jnp.sum(sizes)
        return cls(
            sizes,
            jnp.where(flat < count, places, flat.size).reshape(experts.shape),
            jnp.where(none, flat.size, order),
        )

    def spread(self, x: Array) -> Array:
        """Returns the token of each place: `[N, D] -> [N * k, D]`."""
        return _spread(x, self.places, self.choices)

    def collect(self, rows: Array) -> Array:
        """Returns the sum of each token's places, in float32: `[N * k, D] -> [N, D]`."""
        return _collect(rows, self.places, self.choices)

    def of_choices(self, values: Array) -> Array:
        """Returns the value of the choice in each place: `[N * k] -> [N * k]`."""
        return _spread(values[:, None], self.places.reshape(-1, 1), self.choices)[:, 0]


@jax.custom_vjp
def _spread(x: Array, places: Array, choices: Array) -> Array:
    """Takes rows, and in the backward pass sums of them: the transpose that JAX would make adds to rows one by one."""
    return jnp.take(x, choices // places.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(rows: Array, places: Array, choices: Array) -> Array:
    taken = jnp.take(rows, places, axis=0, mode="fill", fill_value=0).astype(jnp.float32)  # [N, k, D], fused
    return jnp.sum(taken, axis=1).astype(rows.dtype)


_spread.defvjp(
    lambda x, places, choices: (_spread(x, places, choices), (places, choices)),
    lambda kept, grad: (_collect(grad, *kept), None, None),
)
_collect.defvjp(
    lambda rows, places, choices: (_collect(rows, places, choices), (places, choices)),
    lambda kept, grad: (_spread(grad, *kept), None, None),
)


def _once(x: Array) -> Array:
    """Returns a value on the first device of a tp group, and zero on the others."""
    return jnp.where(axis_index(TP) == 0, x, 0)
