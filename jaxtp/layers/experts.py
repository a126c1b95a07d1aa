"""Mixture of experts: each token uses the k experts with its highest router scores.

See Shazeer et al., arXiv 1701.06538.

Scores are float32, a softmax over all E experts or a sigmoid of each; ties go to the lower index.
No token is dropped: every choice becomes a row, sorted by expert (`layers/kernels/grouped.py`).
Kernels are stacked, `[E, D, F]`, and split over tp:

    experts over tp   if tp divides E: a device has E/tp whole experts and computes the rows that
                      chose them.
    experts inside    otherwise: a device has F/tp of every expert, padded, and computes its part
                      of every row.

Under sequence parallelism both send as much as a dense MLP, plus two floats per choice, without
all-to-all. Shared experts are a dense MLP with the same gathered input and sum over tp.

fsdp and cp split E too, if they divide a device's experts: gathering them only concatenates.
Otherwise they split D. If tokens are fewer bytes than such kernels, tokens are gathered instead,
and outputs are reduce-scattered (`share`).

All tokens may choose one device's experts, so rows are computed in parts of 1.5 times its average.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    KEPT,
    PROJECTED,
    all_gather,
    axis_index,
    axis_size,
    batch_spec,
    device_view,
    enter_parallel,
    leave_parallel,
    reduce_scatter,
    token_spec,
    vary_like,
)
from jaxtp.compiler_hints import sequence_first
from jaxtp.config.affects import COST
from jaxtp.config.hints import Problem, not_divisible
from jaxtp.config.schema import Count, CountOrZero, NonNegative, Positive
from jaxtp.layers.balance import Routing, SelectionBias
from jaxtp.layers.branch import Padded, PositionwiseBranch, ShrinkSpec, smallest_congruent
from jaxtp.layers.context import Sequences
from jaxtp.layers.kernels.grouped import Implementation, grouped_matmul, pick_method
from jaxtp.layers.linear import LayerContext, default_kernel_init
from jaxtp.layers.lora import Float8Kernel, Lora, Target
from jaxtp.layers.mlp import (
    ACTIVATIONS,
    MIN_FEATURES,
    MLP,
    MLP_TARGETS,
    XIELU,
    MLPConfig,
    hidden_features,
)
from jaxtp.layers.norm import Norm, NormConfig
from jaxtp.layers.parameter import ExactDim, PaddedDim, Weights, parameter, params_and_specs
from jaxtp.layers.sequence_parallel import activation_spec, sequence_dim
from jaxtp.mesh import SEQUENCE, STORAGE, TP, current_platform

EXPERTS = "mixture_of_experts"
# Scope of loops that seldom run: accounts of a program count none of their turns
RARELY = "jaxtp_rarely"
_SMALL_EXPERTS = 4
_SMALL_CHOICES = 2
SPARE = 1.5  # rows of a part, relative to a device's average
# Rows that cost less than to ask whether there are more: a GPU stops for each answer
FEW_ROWS = 8192
_PLAIN = {"up": "EDF", "down": "EFD"}
_TARGETS: Mapping[str, Target] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(MLPConfig):
    """Settings of a block's MLP, or of experts in its place, each with the MLP's hidden width."""

    num_experts: CountOrZero = 0
    """Number of experts; 0 for a dense MLP. d_ff is the width of each expert."""

    experts_per_token: Count = 2
    """Experts that each token uses."""

    normalize_experts: bool = True
    """Divide the weights of a token's experts by their sum."""

    normalize_floor: NonNegative = 0.0
    """Least number that normalize_experts divides by (Ernie 4.5)."""

    experts_scale: Positive = 1.0
    """Factor of the weights of a token's experts, after normalisation."""

    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: a softmax over all of them, or the sigmoid of each (DeepSeek-V3)."""

    router_bias: bool = False
    """Add a learned bias to the router's logits (gpt-oss)."""

    experts_bias: bool = False
    """Biases on the projections of experts (gpt-oss)."""

    expert_groups: Count = 1
    """Number of groups of equally many consecutive experts; each token chooses in groups_per_token
    of them."""

    groups_per_token: Count = 1
    """Groups in which a token chooses its experts: the groups with the highest scores."""

    group_score: Literal["top2", "max"] = "top2"
    """Score of a group: the sum of its two highest scores (DeepSeek-V3), or its highest score
    (DeepSeek-V2)."""

    shared_experts: CountOrZero = 0
    """Hidden width of a dense MLP whose output is added to the output of the experts; 0 for none.
    mlp_bias gives biases to this MLP, not to the experts."""

    shared_experts_gate: bool = False
    """Multiply the output of shared_experts by the sigmoid of a projection of the input
    (Qwen2-MoE)."""

    dense_mlp: CountOrZero = 0
    """Hidden width of a dense MLP whose output is added to the output of the experts, both
    normalised; 0 for none. Each of both reads the residual stream through its own norm. Learned
    scales multiply the input of the router and the weight of each expert (Gemma 4)."""

    selection_bias: bool = False
    """Add a bias to each expert's score, for the choice only. Each update moves it against the
    expert's load; see train.selection_bias_rate."""

    grouped: Annotated[Implementation, COST] = "auto"
    """Kernel that multiplies rows with their experts. pallas runs on NVIDIA GPUs. xla runs
    everywhere, but on GPUs it multiplies every row with every expert. auto takes pallas where it
    runs."""

    def over_tp(self, tp: int) -> bool:
        """Returns whether each device has whole experts."""
        return self.num_experts % tp == 0

    def stored_by_expert(self, tp: int, shards: int) -> bool:
        """Returns whether `shards` of the storage split a device's experts.

        Otherwise they split the features of each.
        """
        return self.num_experts % (shards * (tp if self.over_tp(tp) else 1)) == 0

    def projections(self) -> dict[str, str]:
        """Returns the kernels of experts and their dims.

        These are E experts, D features of the model, F of an expert.
        """
        return {"gate": "EDF", **_PLAIN} if self.mlp == "gated" else _PLAIN

    def arrays(self) -> dict[str, str]:
        """Returns the kernels, and what each may have, with their dims; r is an adapter's rank."""
        found: dict[str, str] = {}
        for name, dims in self.projections().items():
            adapter = {f"{name}_lora.a": f"{dims[:2]}r", f"{name}_lora.b": f"Er{dims[2]}"}
            found |= {name: dims, f"{name}_bias": dims[0] + dims[2], **adapter}
        return found

    def problems(self, sizes: Mapping[str, int]) -> Iterator[Problem]:
        """See `BranchConfig`."""
        yield from super().problems(sizes)
        if not self.num_experts:
            return
        experts = self.num_experts
        yield from self._group_problems()
        if self.mlp_bias and not self.shared_experts:
            yield Problem(
                f"model.mlp_bias=true: the {experts} experts of model.num_experts have their "
                "biases by model.experts_bias; use it, and model.mlp_bias=false"
            )
        if self.activation == XIELU:
            yield Problem(
                f"model.activation={XIELU}: the {experts} experts of model.num_experts have no "
                "learned activations; use, for example, model.activation=silu"
            )
        if self.shared_experts_gate and not self.shared_experts:
            yield Problem(
                "model.shared_experts_gate=true needs model.shared_experts, the width of its MLP"
            )

    def _group_problems(self) -> Iterator[Problem]:
        experts = self.num_experts
        groups = self.expert_groups
        k = self.experts_per_token
        if self.groups_per_token > groups:
            yield Problem(
                f"model.groups_per_token={self.groups_per_token} is more than "
                f"model.expert_groups={groups}; at most "
                f"{groups} works"
            )
        among = {"model.expert_groups": experts}
        yield from not_divisible("model.num_experts", experts, "model.expert_groups", groups, among)
        most = min(self.groups_per_token, groups) * (experts // groups)
        if experts % groups == 0 and k > most:
            reached = f"the experts in {self.groups_per_token} of model.expert_groups={groups}"
            reached = f"model.num_experts={experts}" if groups == 1 else reached
            yield Problem(
                f"model.experts_per_token={k} is more than {reached}; at most {most} works"
            )

    def adapter_kernels(self) -> Iterator[tuple[Target, str]]:
        """See `BranchConfig`."""
        if not self.num_experts:
            yield from super().adapter_kernels()
            return
        yield from super(MLPConfig, self).adapter_kernels()
        module = "mlp.experts" if self.dense_mlp else "mlp"
        if self.dense_mlp:
            yield from self._mlp_kernels("mlp.mlp")
        kernels = [f"{module}.{name}" for name in self.projections()]
        yield from zip(MLP_TARGETS[-len(kernels) :], kernels, strict=True)
        if self.shared_experts:
            yield from self._mlp_kernels(f"{module}.shared")

    def padding(self, tp: int) -> Iterator[Padded]:
        """See `BranchConfig`; the width of experts is padded only if it is split."""
        yield from (
            super(MLPConfig, self).padding(tp)
            if self.num_experts and self.over_tp(tp)
            else super().padding(tp)
        )
        if self.num_experts and self.dense_mlp:
            yield "dense_mlp", self.dense_mlp, PaddedDim((self.dense_mlp,)).padded(tp)
        if self.num_experts and self.shared_experts:
            yield (
                "shared_experts",
                self.shared_experts,
                PaddedDim((self.shared_experts,)).padded(tp),
            )

    def shrink(self, small: ShrinkSpec) -> dict[str, Any]:
        """See `BranchConfig`."""
        settings = super().shrink(small)
        groups = self.expert_groups
        if self.shared_experts:
            settings["shared_experts"] = small.size(self.shared_experts, MIN_FEATURES)
        if self.dense_mlp:
            settings["dense_mlp"] = small.size(self.dense_mlp, MIN_FEATURES)
        least = max(_SMALL_EXPERTS, _SMALL_CHOICES * groups)
        few = smallest_congruent(self.num_experts, math.lcm(*small.tps, groups), least)
        if not self.num_experts or self.num_experts <= few:
            return settings
        every = self.experts_per_token == self.num_experts
        return {
            **settings,
            "num_experts": few,
            "experts_per_token": few if every else min(self.experts_per_token, _SMALL_CHOICES),
        }


class MixtureOfExperts(PositionwiseBranch):
    """Experts in place of an MLP, without overlap.

    Shapes: `[B, T, D] -> [B, T, D]`, and the `Routing`. `router` is `[D, E]` and `router_bias`
    `[E]`; `gate` (unless plain) and `up` are `[E, D, F]`, `down` `[E, F, D]`, their biases `[E, F]`
    and `[E, D]`, their adapters' A `[E, in, rank]` and B `[E, rank, out]`; `selection_bias` is
    `[E]`, `shared_gate` `[D, 1]`. With `dense_mlp` the input is normalised without a scale;
    `input_scale` and `router_scale` are `[D]`, `expert_scale` `[E]`.
    """

    def __init__(
        self,
        d_model: int,
        config: ExpertsConfig,
        context: LayerContext = LayerContext(),
        *,
        rngs: nnx.Rngs,
    ):
        self.d_model = d_model
        self.config = config
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        experts = config.num_experts
        dtype = self.precision.param
        over_tp = config.over_tp(axis_size(TP))
        features = ExactDim((config.d_ff,)) if over_tp else PaddedDim((config.d_ff,))
        dims = {"E": ExactDim((experts,)), "D": ExactDim((d_model,)), "F": features}
        axes: dict[str, tuple[str, ...]] = {
            "E": (TP,) if over_tp else (),
            "D": (),
            "F": () if over_tp else (TP,),
        }
        axes["E" if config.stored_by_expert(axis_size(TP), axis_size(*STORAGE)) else "D"] += STORAGE

        def spec(names: str) -> P:
            return P(*(axes.get(name) or None for name in names))

        def stacked(
            name: str, names: str, initial: Callable[[tuple[int, ...]], Array]
        ) -> nnx.Param[Array]:
            value = initial(tuple(dims[dim].size for dim in names))
            padding = tuple((i - len(names), dims[dim]) for i, dim in enumerate(names))
            return parameter(name, value, spec(names), padding=padding)

        def kernel(name: str, shape: tuple[int, ...], spec: P) -> nnx.Param[Array]:
            return parameter(name, default_kernel_init(rngs.params(), shape, dtype), spec)

        zeros = partial(jnp.zeros, dtype=dtype)
        self.router = kernel("router", (d_model, experts), P(STORAGE, None))
        if config.router_bias:
            self.router_bias = parameter("router bias", zeros(experts), P(None))
        for name, names in config.projections().items():
            setattr(
                self,
                name,
                stacked(name, names, partial(default_kernel_init, rngs.params(), dtype=dtype)),
            )
            if config.experts_bias:
                setattr(self, f"{name}_bias", stacked(f"{name} bias", names[0] + names[2], zeros))
        for name, names in config.projections().items():
            if context.lora.adapted(_TARGETS[name]):
                specs = spec(f"{names[:2]}r"), spec(f"Er{names[2]}")
                adapter = Lora(
                    (dims[names[1]], dims[names[2]]),
                    context.lora,
                    specs,
                    stack=(experts,),
                    rngs=rngs,
                )
                setattr(self, f"{name}_lora", adapter)
        if config.shared_experts:  # `_shared` computes them inside the experts' `device_view`
            joined = replace(context, schedule=replace(context.schedule, joined=True))
            self.shared = MLP(
                d_model, replace(config, d_ff=config.shared_experts), joined, rngs=rngs
            )
        if config.shared_experts_gate:
            self.shared_gate = kernel("shared gate", (d_model, 1), P(STORAGE, None))
        if config.dense_mlp:
            self.input_scale, self.router_scale = (
                parameter(f"{name} scale", jnp.ones(d_model, dtype), P(STORAGE))
                for name in ("input", "router")
            )
            self.expert_scale = parameter("expert scale", jnp.ones(experts, dtype), P(None))
        if config.selection_bias:
            bias = jnp.zeros(experts, jnp.float32)
            self.selection_bias = parameter("selection bias", bias, P(None), kind=SelectionBias)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> tuple[Array, Routing]:  # type: ignore[override]
        """Padding has no experts but the shared ones."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(sequence)
        weights, specs = params_and_specs(self)
        if self.config.selection_bias:
            weights["selection_bias"] = self.selection_bias[...]
            specs["selection_bias"] = P(None)
        # Each device slices its part itself: if these came in split over tp, XLA would split their
        # other readers too.
        by_token = {"segments": sequences.segments, "experts": sequences.experts}
        of_tokens = {
            name: sequences.local_tokens(x) for name, x in by_token.items() if x is not None
        }
        sums = batch_spec(SEQUENCE)
        recorded = P(*activation[:2]) if sequences.record else None
        transform = device_view(
            partial(self._transform, sequence, sequences.record),
            EXPERTS,
            in_specs=(activation, specs, {name: token_spec() for name in of_tokens}),
            out_specs=(activation, Routing(*[sums] * 5, *[recorded] * 2)),  # type: ignore[arg-type]
        )
        return transform(x_BTD, weights, of_tokens)

    def _transform(
        self, sequence: int | None, record: bool, x: Array, weights: Weights, of_tokens: Weights
    ) -> tuple[Array, Routing]:
        config = self.config
        over_tp = self.config.over_tp(axis_size(TP))
        if sequence is not None:
            part = partial(jax.lax.dynamic_slice_in_dim, slice_size=x.shape[1], axis=1)
            of_tokens = {
                name: part(array, axis_index(TP) * x.shape[1]) for name, array in of_tokens.items()
            }
        segments = of_tokens.get("segments")
        not_padding = jnp.ones(x.shape[:2], bool) if segments is None else segments != 0
        experts, shares, routing = self._route(
            sequence, record, x, weights, not_padding, of_tokens.get("experts")
        )
        # One exchange for all: float32 holds expert indices exactly.
        k = config.experts_per_token
        by_token = [shares, experts.astype(jnp.float32)]
        if config.shared_experts_gate:
            by_token.append(jax.nn.sigmoid(self._project(x, weights["shared_gate"], sequence)))
        together = sequence_first(
            enter_parallel(jnp.concatenate(by_token, axis=-1), sequence), sequence
        )
        shares = together[..., :k]
        experts = together[..., k : 2 * k].astype(jnp.int32)
        gate = together[..., 2 * k :]
        if config.dense_mlp:
            x = x * self.precision.load(
                weights["input_scale"], 0, used_by_all_tp=sequence is not None
            )
        # The input may be [T/cp, b, D].
        x = sequence_first(enter_parallel(x.astype(self.precision.compute), sequence), sequence)
        y, rows = self._routed(
            x.reshape(-1, x.shape[-1]), shares.reshape(-1, k), experts.reshape(-1, k), weights
        )
        if config.shared_experts:
            y += self._shared(x, gate, weights).reshape(y.shape)
        # With experts divided inside, every device of a tp group computes a part of each row; only
        # the first counts it.
        rows = rows if over_tp else _on_first_device(rows)
        routing = replace(
            routing, computed=jnp.where(jnp.arange(len(routing.entropy))[:, None] == 0, rows, 0.0)
        )
        return leave_parallel(
            sequence_first(y.reshape(*x.shape[:2], -1), sequence), sequence
        ), routing

    def _route(
        self,
        sequence: int | None,
        record: bool,
        x: Array,
        weights: Weights,
        not_padding: Array,
        replayed: Array | None,
    ) -> tuple[Array, Array, Routing]:
        """Returns the experts of this device's tokens, their weights, and router statistics.

        Experts and weights are `[b, t, k]`.

        Padding gets expert E, which does not exist. `replayed` experts replace the router's choice,
        which is recorded.
        """
        config = self.config
        k = self.config.experts_per_token
        load_scale = partial(
            replace(self.precision, compute="float32").load, used_by_all_tp=sequence is not None
        )
        if config.dense_mlp:
            x = x.astype(jnp.float32) * load_scale(weights["router_scale"], 0) * self.d_model**-0.5
        logits = self._project(x, weights["router"], sequence)
        if config.router_bias:
            logits += load_scale(weights["router_bias"], None)
        softmax = config.router_scores == "softmax"
        # Log-scores, up to a term that is equal for all experts
        log_scores = logits if softmax else jax.nn.log_sigmoid(logits)
        probabilities = jax.nn.softmax(log_scores)  # scores over their sum
        scores = probabilities if softmax else jax.nn.sigmoid(logits)
        for_choice = jax.lax.stop_gradient(scores)
        if config.selection_bias:
            for_choice = for_choice + weights["selection_bias"]
        for_choice, group_margin = self._in_best_groups(for_choice)
        best, choice = jax.lax.top_k(for_choice, min(k + record, config.num_experts))
        # Saved under every remat policy: recomputed scores could round differently and choose other
        # experts.
        choice = checkpoint_name(choice[..., :k], KEPT)
        experts = choice if replayed is None else replayed
        shares = self._shares(experts, scores, log_scores)
        if config.dense_mlp:
            shares *= jnp.take(load_scale(weights["expert_scale"], None), experts)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        log_probabilities = (
            log_scores
            - (normaliser if softmax else jax.nn.logsumexp(log_scores, axis=-1))[..., None]
        )
        valid = not_padding.astype(jnp.float32)
        sums = [
            jnp.sum(jax.nn.one_hot(experts, config.num_experts).sum(2) * valid[..., None], axis=1),
            jnp.sum(probabilities * valid[..., None], axis=1),
            jnp.sum(jnp.square(normaliser) * valid, axis=1),
            jax.lax.stop_gradient(
                jnp.sum(-jnp.sum(probabilities * log_probabilities, axis=-1) * valid, axis=1)
            ),
        ]
        if sequence is None:  # every device of a tp group has the same tokens
            sums = [_on_first_device(each) for each in sums]
        routing = Routing(*(each[:, None] for each in sums), computed=valid)  # type: ignore[misc]
        if record:
            margin = best[..., k - 1] - (
                jnp.zeros_like(best[..., 0]) if best.shape[-1] == k else best[..., k]
            )
            margin = margin if group_margin is None else jnp.minimum(margin, group_margin)
            routing = replace(routing, experts=choice, margin=margin)
        return jnp.where(not_padding[..., None], experts, config.num_experts), shares, routing

    def _shares(self, experts: Array, scores: Array, log_scores: Array) -> Array:
        config = self.config
        of_choices = partial(jnp.take_along_axis, indices=experts, axis=-1)
        # Scores over their sum are a softmax of their logarithms, so the gradient of the other
        # logits is exactly zero. Rounding noise there would become full steps in Adafactor,
        # different on each mesh.
        shares = (
            jax.nn.softmax(of_choices(log_scores))
            if config.normalize_experts
            else of_choices(scores)
        )
        if config.normalize_experts and config.normalize_floor:
            shares *= jnp.minimum(
                jnp.sum(of_choices(scores), axis=-1, keepdims=True) / config.normalize_floor, 1
            )
        return shares if config.experts_scale == 1 else shares * config.experts_scale

    def _project(self, x: Array, kernel: Array, sequence: int | None) -> Array:
        """Returns tokens times a kernel `[D, n]` that all devices have, in float32."""
        loaded = replace(self.precision, compute="float32").load(
            kernel, 0, used_by_all_tp=sequence is not None
        )
        return jnp.einsum(
            "btd,de->bte", x.astype(jnp.float32), loaded, precision=jax.lax.Precision.HIGHEST
        )

    def _in_best_groups(self, scores: Array) -> tuple[Array, Array | None]:
        """Returns scores `[b, t, E]`, -inf outside of each token's groups, and a lead `[b, t]`.

        It is the lead of the lowest chosen group.

        The lead is over the next group; it is None if no group is left out.
        """
        groups = self.config.expert_groups
        taken = self.config.groups_per_token
        if taken >= groups:
            return scores, None
        by_group = scores.reshape(*scores.shape[:2], groups, -1)
        best, _ = jax.lax.top_k(
            by_group, min(2 if self.config.group_score == "top2" else 1, by_group.shape[-1])
        )
        best, order = jax.lax.top_k(jnp.sum(best, axis=-1), taken + 1)
        is_taken = jnp.any(jax.nn.one_hot(order[..., :taken], groups, dtype=bool), axis=-2)
        limited = jnp.where(is_taken[..., None], by_group, -jnp.inf)
        return limited.reshape(scores.shape), best[..., taken - 1] - best[..., taken]

    def _shared(self, x: Array, gate: Array, weights: Weights) -> Array:
        config = self.config
        load = self.precision.load
        name, columns = (
            ("up", self.shared.up) if config.mlp == "plain" else ("gate_up", self.shared.gate_up)
        )
        before = f"shared.{name}."
        of_columns = {
            path.removeprefix(before): shard
            for path, shard in weights.items()
            if path.startswith(before)
        }
        products = columns.project(None, x, of_columns)
        hidden = hidden_features(ACTIVATIONS[config.activation], products, config.swiglu_limit)
        hidden = (hidden * gate).astype(hidden.dtype) if config.shared_experts_gate else hidden
        y = hidden @ load(weights["shared.down.kernel"], 1)
        for lora in self.shared.down.loras:
            inner = hidden @ load(weights["shared.down.loras.0.a"], None)
            b = load(weights["shared.down.loras.0.b"], 1, used_by_all_tp=True)
            y = lora.add(y, inner, b)
        if config.mlp_bias:
            bias = _on_first_device(load(weights["shared.down.bias"], 0, used_by_all_tp=True))
            y += (bias * gate).astype(y.dtype) if config.shared_experts_gate else bias
        return y

    def _routed(
        self, x: Array, shares: Array, experts: Array, weights: Weights
    ) -> tuple[Array, Array]:
        """Returns the summands of tokens `[N, D]` from this device, and the number of its rows.

        The summands are from the device's kernels.

        Shares and experts are `[N, k]`.
        """
        config = self.config
        k = config.experts_per_token
        *_, down = config.projections()
        trained = isinstance(getattr(self, down), nnx.Param)
        share = self.share(len(x), axis_size(TP), axis_size(*STORAGE), trained=trained)
        axes = ((TP,) if config.over_tp(axis_size(TP)) else ()) + (
            STORAGE if share.shards > 1 else ()
        )
        if share.shards > 1:
            together = all_gather(
                jnp.concatenate([shares, experts.astype(jnp.float32)], axis=-1), *STORAGE
            )
            x = all_gather(x, *STORAGE)
            shares = together[:, :k]
            experts = together[:, k:].astype(jnp.int32)
        local = experts - axis_index(*axes) * share.experts
        count = share.experts
        rows = Rows.of(jnp.where((local >= 0) & (local < count), local, count), count)
        arrays = ((name, dims) for name, dims in config.arrays().items() if name in weights)
        loaded = {
            name: self._load(weights[name], dims, gathered=share.shards == 1)
            for name, dims in arrays
        }
        bias = loaded.pop(f"{down}_bias", None)
        changing = {name for name in loaded if trained or "_lora" in name}
        variable, fixed = (
            {name: a for name, a in loaded.items() if (name in changing) is on}
            for on in (True, False)
        )
        y = _in_parts(self._compute, share.part, (x, shares, variable), fixed, rows)
        if bias is not None:
            by_expert = jnp.sum(jax.nn.one_hot(local, count) * shares[..., None], axis=1).astype(
                bias.dtype
            )
            y += by_expert @ (bias if TP in axes else _on_first_device(bias))
        return reduce_scatter(y, *STORAGE) if share.shards > 1 else y, jnp.sum(rows.sizes)

    def _compute(self, variable: "_Variable", fixed: Weights, rows: "Rows") -> Array:
        """Returns the summands of these rows without down_bias, `[N, D]`."""
        x, shares, changing = variable
        weights = {**changing, **fixed}
        method, _ = pick_method(self.config.grouped, current_platform())
        multiply = partial(grouped_matmul, sizes_E=rows.sizes, method=method)

        def project(x: Array, name: str) -> Array:
            y = multiply(x, weights[name])
            if f"{name}_lora.a" in weights:
                inner = multiply(x, weights[f"{name}_lora.a"])
                lora: Lora = getattr(self, f"{name}_lora")
                y = lora.add(y, inner, weights[f"{name}_lora.b"], multiply)
            return y

        def hidden(x: Array, name: str) -> Array:
            y = project(x, name)
            bias = weights.get(f"{name}_bias")
            return checkpoint_name(y if bias is None else y + rows.of_experts(bias), PROJECTED)

        inputs = rows.spread(x)
        *columns, down = self.config.projections()
        products = [hidden(inputs, name) for name in columns]
        features = hidden_features(
            ACTIVATIONS[self.config.activation], products, self.config.swiglu_limit
        )
        # Weighted before the last product, so that the backward pass does not need that product's
        # result.
        weighed = (features * rows.of_choices(shares.reshape(-1))[:, None]).astype(features.dtype)
        return rows.collect(project(weighed, down))

    def _load(self, shard: Array, dims: str, *, gathered: bool) -> Array:
        at = dims.find(
            "E" if self.config.stored_by_expert(axis_size(TP), axis_size(*STORAGE)) else "D"
        )
        used_by_all_tp = "F" not in dims and not self.config.over_tp(axis_size(TP))
        return self.precision.load(
            shard, None if at < 0 else at, gathered=gathered, used_by_all_tp=used_by_all_tp
        )

    def share(self, tokens: int, tp: int, shards: int, *, trained: bool) -> "Share":
        """Returns a device's part; bytes are a training step's."""
        # Tokens move in, out, in again, and with both gradients; kernels twice, and their
        # gradients.
        config = self.config
        dtypes = (self.precision.compute, self.precision.reduce)
        compute, reduced = (jnp.dtype(dtype).itemsize for dtype in dtypes)
        gathered = 1 if isinstance(vars(self)["down"], Float8Kernel) else compute
        kernels = (
            config.num_experts
            * len(config.projections())
            * config.d_ff
            * (2 * gathered + trained * reduced)
        )
        shards = (
            shards
            if config.stored_by_expert(tp, shards) and 5 * compute * tokens * shards * tp < kernels
            else 1
        )
        devices = shards * (tp if config.over_tp(tp) else 1)
        width = config.d_ff if config.over_tp(tp) else PaddedDim((config.d_ff,)).local(tp)
        choices = shards * tokens * config.experts_per_token
        part = min(choices, max(FEW_ROWS, math.ceil(SPARE * choices / devices)))
        return Share(shards, config.num_experts // devices, width, choices // devices, part)


class Share(NamedTuple):
    """A device's part of a mixture."""

    shards: int  # of the storage, whose tokens it has; 1: its own, and the kernels are gathered
    experts: int
    width: int  # of each
    rows: int  # on average
    part: int  # rows at a time


class ExpertsBesideMLP(PositionwiseBranch):
    """Experts and a dense MLP, each between two norms.

    It maps `[B, T, D] -> [B, T, D]`, and also returns the `Routing`.
    """

    def __init__(
        self,
        d_model: int,
        config: ExpertsConfig,
        context: LayerContext = LayerContext(),
        *,
        norm: NormConfig = NormConfig(),
        rngs: nnx.Rngs,
    ):
        self.config = config
        normalise = partial(Norm, d_model, context=context)
        self.mlp_norm = normalise(norm)
        self.experts_norm = normalise(replace(norm, norm="rms_plain"))
        self.mlp = MLP(d_model, replace(config, d_ff=config.dense_mlp), context, rngs=rngs)
        self.experts = MixtureOfExperts(d_model, config, context, rngs=rngs)
        self.mlp_after_norm, self.experts_after_norm = (normalise(norm.after()) for _ in range(2))

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> tuple[Array, Routing]:  # type: ignore[override]
        """Sums the results for the residual stream."""
        y_BTD, routing = self.experts(self.experts_norm(x_BTD), sequences)
        return self.experts_after_norm(y_BTD) + self.mlp_after_norm(
            self.mlp(self.mlp_norm(x_BTD))
        ), routing


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Maps N tokens' k choices to rows sorted by expert, and back.

    The index N * k means none: a choice of another device's expert has no row, and surplus rows
    have no choice.
    """

    sizes: Array  # rows of each expert, `[experts]` int32
    row_of_choice: Array  # `[N, k]`
    # The index of a token times k, plus the index of its choice, `[rows]`, N * k in all
    choice_of_row: Array

    @classmethod
    def of(cls, experts: Array, count: int) -> "Rows":
        """Sorts choices `[N, k]`; expert `count` means none."""
        flat = experts.reshape(-1)
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        places = (
            jnp.zeros_like(flat)
            .at[order]
            .set(jnp.arange(flat.size, dtype=flat.dtype), unique_indices=True)
        )
        sizes = jnp.sum(jax.nn.one_hot(flat, count, dtype=jnp.int32), axis=0)
        none = jnp.arange(flat.size) >= jnp.sum(sizes)
        return cls(
            sizes,
            jnp.where(flat < count, places, flat.size).reshape(experts.shape),
            jnp.where(none, flat.size, order),
        )

    def part(self, begin: Array | int, size: int) -> "Rows":
        """Returns `size` rows from `begin` on."""
        ends = jnp.cumsum(self.sizes)
        none = self.row_of_choice.size
        index = jnp.arange(size, dtype=jnp.int32)
        sizes = jnp.diff(jnp.clip(ends - begin, 0, size), prepend=0)
        places = self.row_of_choice - begin
        of_rows = jnp.take(self.choice_of_row, begin + index, mode="fill", fill_value=none)
        return Rows(sizes, jnp.where((places < 0) | (places >= size), none, places), of_rows)

    def spread(self, x: Array) -> Array:
        """Copies tokens to their rows: `[N, D] -> [rows, D]`."""
        return _spread(x, self.row_of_choice, self.choice_of_row)

    def collect(self, rows: Array) -> Array:
        """Sums each token's rows in float32: `[rows, D] -> [N, D]`."""
        return _collect(rows, self.row_of_choice, self.choice_of_row)

    def of_experts(self, values: Array) -> Array:
        """Copies values of experts to their rows: `[experts, F] -> [rows, F]`."""
        row = jnp.arange(self.choice_of_row.size)
        return _of_experts(
            values, jnp.sum(row[:, None] >= jnp.cumsum(self.sizes), axis=1), self.sizes
        )

    def of_choices(self, values: Array) -> Array:
        """Copies values of choices to their rows: `[N * k] -> [rows]`."""
        return _spread(values[:, None], self.row_of_choice.reshape(-1, 1), self.choice_of_row)[:, 0]


_Variable = tuple[Array, Array, Weights]  # what has a gradient: tokens, shares, weights
_Backward = Callable[[Array], tuple[_Variable]]
_T = TypeVar("_T")


def _in_parts(
    run: Callable[[_Variable, Weights, Rows], Array],
    size: int,
    variable: _Variable,
    fixed: Weights,
    rows: Rows,
) -> Array:
    """Returns the sum of `run` over parts of `size` rows.

    A loop computes all but the first, and saves no residuals.
    """
    if size == rows.row_of_choice.size:
        return run(variable, fixed, rows)
    leaves = jax.tree.leaves((variable, fixed, rows))

    def with_others(first: _T, rows: Rows, compute: Callable[[Rows], _T]) -> _T:
        def turn(state: tuple[Array, _T]) -> tuple[Array, _T]:
            begin, sums = state
            return begin + size, jax.tree.map(jnp.add, sums, compute(rows.part(begin, size)))

        with jax.named_scope(RARELY):
            begin = vary_like(jnp.int32(size), rows.sizes)
            total = jnp.sum(rows.sizes)
            return jax.lax.while_loop(lambda state: state[0] < total, turn, (begin, first))[1]

    def vjp(variable: _Variable, fixed: Weights, part: Rows) -> tuple[Array, _Backward]:
        return jax.vjp(lambda variable: run(variable, fixed, part), variable)

    def forward(
        variable: _Variable, fixed: Weights, rows: Rows
    ) -> tuple[Array, tuple[object, ...]]:
        y, backward = vjp(variable, fixed, rows.part(0, size))
        return with_others(y, rows, partial(run, variable, fixed)), (
            backward,
            variable,
            fixed,
            rows,
        )

    def backward(
        residuals: tuple[_Backward, _Variable, Weights, Rows], grad: Array
    ) -> tuple[_Variable, None, None]:
        of_first, variable, fixed, rows = residuals
        return (
            with_others(
                of_first(grad)[0], rows, lambda part: vjp(variable, fixed, part)[1](grad)[0]
            ),
            None,
            None,
        )

    summed = jax.custom_vjp(lambda *args: forward(*args)[0])
    summed.defvjp(forward, backward)
    return summed(*jax.tree.map(lambda x: vary_like(x, *leaves), (variable, fixed, rows)))


@jax.custom_vjp
def _spread(x: Array, row_of_choice: Array, choice_of_row: Array) -> Array:
    """Gathers rows. The hand-written transpose gathers too; JAX's would scatter-add row by row."""
    return jnp.take(x, choice_of_row // row_of_choice.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _collect(rows: Array, row_of_choice: Array, choice_of_row: Array) -> Array:
    # The rows are [N, k, D], fused.
    taken = jnp.take(rows, row_of_choice, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    return jnp.sum(taken, axis=1).astype(rows.dtype)


@jax.custom_vjp
def _of_experts(values: Array, expert_of_row: Array, sizes_E: Array) -> Array:
    """As `_spread`, but the transpose is a product."""
    return jnp.take(values, expert_of_row, axis=0, mode="fill", fill_value=0)


def _sum_by_expert(indices: tuple[Array, Array], grad: Array) -> tuple[Array, None, None]:
    expert_of_row, sizes_E = indices
    is_of = jax.nn.one_hot(expert_of_row, len(sizes_E), dtype=grad.dtype)
    return (
        jnp.einsum("me,mf->ef", is_of, grad, preferred_element_type=jnp.float32).astype(grad.dtype),
        None,
        None,
    )


_of_experts.defvjp(
    lambda values, *indices: (_of_experts(values, *indices), indices), _sum_by_expert
)
_spread.defvjp(
    lambda x, *indices: (_spread(x, *indices), indices),
    lambda residuals, grad: (_collect(grad, *residuals), None, None),
)
_collect.defvjp(
    lambda rows, *indices: (_collect(rows, *indices), indices),
    lambda residuals, grad: (_spread(grad, *residuals), None, None),
)


def _on_first_device(x: Array) -> Array:
    return jnp.where(axis_index(TP) == 0, x, 0)
