"""Layers with experts: in place of an MLP, or in addition to one."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import (
    PROJECTED,
    all_gather,
    axis_index,
    axis_size,
    batch_spec,
    device_view,
    enter_parallel,
    leave_parallel,
    own_part,
    reduce_scatter,
    swap_sequence,
    token_spec,
)
from jaxtp.layers.balance import Routing, SelectionBias
from jaxtp.layers.branch import PositionwiseBranch
from jaxtp.layers.context import Sequences
from jaxtp.layers.experts.dispatch import Operands, Rows, sum_over_parts
from jaxtp.layers.experts.experts_config import ExpertsConfig
from jaxtp.layers.experts.placement import (
    Placement,
    StackedDims,
    on_first_device,
    place,
    storage_letter,
)
from jaxtp.layers.experts.router import Router
from jaxtp.layers.kernels.grouped import grouped_matmul, pick_method
from jaxtp.layers.latent_attention import DownProjection
from jaxtp.layers.linear import LayerContext, default_kernel_init
from jaxtp.layers.lora import Lora, LoraConfig, StoredKernel, Target
from jaxtp.layers.mlp import ACTIVATIONS, MLP, hidden_features
from jaxtp.layers.norm import Norm, NormConfig
from jaxtp.layers.parameter import Variable, Weights, parameter, params_and_specs
from jaxtp.layers.transport import activation_spec, sequence_dim
from jaxtp.mesh import SEQUENCE, STORAGE, TP, current_platform

EXPERTS = "mixture_of_experts"
EXPERT_TARGETS: dict[str, Target] = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class MixtureOfExperts(PositionwiseBranch):
    """Experts in place of an MLP, without overlap.

    Shapes: `[B, T, D] -> [B, T, D]`, and the `Routing`. `router` is `[D, E]` and `router_bias`
    `[E]`; `gate` (unless plain) and `up` are `[E, D, F]`, `down` `[E, F, D]`, their biases `[E, F]`
    and `[E, D]`, their adapters' A `[E, in, rank]` and B `[E, rank, out]`; `selection_bias` is
    `[E]`, `shared_gate` `[D, 1]`. With `experts_rank`, experts have this width in place of D;
    `latent_down` projects a device's own tokens to it, `latent_up` from it. With `dense_mlp` the
    input is normalised without a scale; `input_scale` and `router_scale` are `[D]`, `expert_scale`
    `[E]`.
    """

    down: Variable | StoredKernel

    def __init__(
        self,
        d_model: int,
        config: ExpertsConfig = ExpertsConfig(num_experts=8),
        context: LayerContext = LayerContext(),
        *,
        rngs: nnx.Rngs,
    ):
        self.d_model = d_model
        self.config = config
        # Features of the experts' input
        self.width = config.experts_rank or d_model
        self.sequence_parallel = context.sequence_parallel
        self.precision = context.precision
        experts = config.num_experts
        dtype = self.precision.param
        router = default_kernel_init(rngs.params(), (d_model, experts), dtype)
        self.router = parameter("router", router, P(STORAGE, None))
        if config.router_bias:
            self.router_bias = parameter("router bias", jnp.zeros(experts, dtype), P(None))
        self._add_experts(context.lora, rngs)
        if config.experts_rank:
            project = partial(DownProjection, context=context, rngs=rngs)
            self.latent_down = project(d_model, self.width, target="fc1_latent_proj")
            self.latent_up = project(self.width, d_model, target="fc2_latent_proj")
        if config.shared_experts:
            # `_shared` computes this MLP inside the experts' `device_view`, in the compute dtype.
            precision = replace(context.precision, matmul="compute")
            inside = replace(context, caller_communicates=True, precision=precision)
            shared = replace(config, d_ff=config.shared_experts)
            self.shared = MLP(d_model, shared, inside, rngs=rngs)
        if config.shared_experts_gate:
            gate = default_kernel_init(rngs.params(), (d_model, 1), dtype)
            self.shared_gate = parameter("shared gate", gate, P(STORAGE, None))
        if config.dense_mlp:
            self.input_scale = parameter("input scale", jnp.ones(d_model, dtype), P(STORAGE))
            self.router_scale = parameter("router scale", jnp.ones(d_model, dtype), P(STORAGE))
            self.expert_scale = parameter("expert scale", jnp.ones(experts, dtype), P(None))
        if config.selection_bias:
            bias = jnp.zeros(experts, jnp.float32)
            self.selection_bias = parameter("selection bias", bias, P(None), kind=SelectionBias)

    def _add_experts(self, lora: LoraConfig, rngs: nnx.Rngs) -> None:
        stacked = StackedDims.of(self.width, self.config, axis_size(TP), axis_size(*STORAGE))
        projections = self.config.projections()
        dtype = self.precision.param
        for name, dims in projections.items():
            kernel = default_kernel_init(rngs.params(), stacked.shape(dims), dtype)
            setattr(self, name, stacked.parameter(name, dims, kernel))
            if self.config.experts_bias:
                bias_dims = dims[0] + dims[2]
                zeros = jnp.zeros(stacked.shape(bias_dims), dtype)
                setattr(self, f"{name}_bias", stacked.parameter(f"{name} bias", bias_dims, zeros))
        stack = (self.config.num_experts,)
        for name, dims in projections.items():
            if lora.adapted(EXPERT_TARGETS[name]):
                expert, inner, outer = tuple(dims)
                features = (stacked.sizes[inner], stacked.sizes[outer])
                specs = (stacked.spec(f"{expert}{inner}r"), stacked.spec(f"{expert}r{outer}"))
                adapter = Lora(features, lora, specs, stack=stack, rngs=rngs)
                setattr(self, f"{name}_lora", adapter)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> tuple[Array, Routing]:  # type: ignore[override]
        """Returns the output and the `Routing`.

        Padding tokens go only through the shared experts.
        """
        split_dim = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(split_dim)
        weights, specs = params_and_specs(self)
        if self.config.selection_bias:
            weights["selection_bias"] = self.selection_bias[...]
            specs["selection_bias"] = P(None)
        # Each device slices its part itself: if these came in split over tp, XLA would split their
        # other readers too.
        token_data = {"segments": sequences.segments, "experts": sequences.experts}
        token_data = jax.tree.map(sequences.local_tokens, token_data)
        sums = batch_spec(SEQUENCE)
        recorded = P(*activation[:2])
        transform = device_view(
            partial(self._transform, split_dim, sequences.record),
            EXPERTS,
            in_specs=(activation, activation, specs, token_spec()),
            out_specs=(activation, Routing(*[sums] * 5, *[recorded] * 2)),  # type: ignore[arg-type]
        )
        latents = self.latent_down(x_BTD) if self.config.experts_rank else None
        y_BTD, routing = transform(x_BTD, latents, weights, token_data)
        if latents is not None:
            shared_BTD = y_BTD[..., self.width :]
            y_BTD = self.latent_up(y_BTD[..., : self.width])
            if self.config.shared_experts:
                y_BTD += shared_BTD
        return y_BTD, routing

    def _transform(
        self,
        split_dim: int | None,
        record: bool,
        x: Array,
        latents: Array | None,
        weights: Weights,
        token_data: dict[str, Array | None],
    ) -> tuple[Array, Routing]:
        """Transforms a device's tokens `[b, t, D]`; tp splits their dim `split_dim`, if any.

        With `experts_rank` the result has the sum of the experts of `latents` before the shared
        experts' output, if any.
        `token_data` `[b, T/cp, ...]`, if any, are of all tokens of the tp group.
        """
        config = self.config
        k = config.experts_per_token
        if split_dim is not None:
            token_data = jax.tree.map(partial(own_part, axis=TP, dim=1), token_data)
        segments = token_data["segments"]
        not_padding = jnp.ones(x.shape[:2], bool) if segments is None else segments != 0
        router = Router(config, self.precision, weights, is_split=split_dim is not None)
        replayed = token_data["experts"]
        experts, gates, routing = router.route(x, not_padding, replayed, record=record)
        # One exchange for gates, experts and the shared gate: float32 holds indices exactly.
        choices = [gates, experts.astype(jnp.float32)]
        if config.shared_experts_gate:
            choices.append(jax.nn.sigmoid(router.project(x, "shared_gate")))
        choice = enter_parallel(jnp.concatenate(choices, axis=-1), split_dim)
        # Here and for `x` below, [b, T/cp, ...] becomes [T/cp, b, ...] if tp splits the sequence.
        choice = swap_sequence(choice, split_dim)
        gates = choice[..., :k]
        experts = choice[..., k : 2 * k].astype(jnp.int32)
        shared_gate = choice[..., 2 * k :]
        if config.dense_mlp:
            is_split = split_dim is not None
            x = x * self.precision.load(weights["input_scale"], 0, used_by_all_tp=is_split)
        x = x.astype(self.precision.compute)
        if latents is not None:
            # One exchange for both
            x = jnp.concatenate([latents, x], axis=-1) if config.shared_experts else latents
        x = enter_parallel(x, split_dim)
        x = swap_sequence(x, split_dim)
        routed = x[..., : self.width].reshape(-1, self.width)  # [N, D]
        gates = gates.reshape(-1, k)
        experts = experts.reshape(-1, k)
        y, num_rows = self._routed(routed, gates, experts, weights)
        y = y.reshape(*x.shape[:2], -1)
        if config.shared_experts:
            y = self._with_shared(y, x[..., -self.d_model :], shared_gate, weights)
        if not config.over_tp(axis_size(TP)):
            # Every device of a tp group computes a part of each row; only the first counts it.
            num_rows = on_first_device(num_rows)
        # The rows are of all sequences together; one sequence counts them.
        is_first_sequence = jnp.arange(len(routing.entropy))[:, None] == 0
        computed = jnp.where(is_first_sequence, num_rows, 0.0)
        y = swap_sequence(y, split_dim)
        return leave_parallel(y, split_dim), replace(routing, computed=computed)

    def _routed(
        self,
        x: Array,
        gates: Array,
        experts: Array,
        weights: Weights,
    ) -> tuple[Array, Array]:
        """Returns this device's summands of tokens `[N, D]`, and the number of its rows.

        Gates and experts are `[N, k]`.
        """
        trained = isinstance(self.down, nnx.Param)
        placement = self.placement(len(x), axis_size(TP), axis_size(*STORAGE), trained=trained)
        gathers_tokens = placement.shards > 1
        if gathers_tokens:
            x, gates, experts = _gathered_tokens(x, gates, experts)  # [shards * N, ...]
        # The axes along which devices multiply with other experts
        holders: tuple[str, ...] = STORAGE if gathers_tokens else ()
        if self.config.over_tp(axis_size(TP)):
            holders = (TP, *holders)
        count = placement.experts
        local = experts - axis_index(*holders) * count
        is_local = (local >= 0) & (local < count)
        rows = Rows.of(jnp.where(is_local, local, count), count)
        loaded = self._load_experts(weights, gathered=not gathers_tokens)
        bias = loaded.pop("down_bias", None)
        frozen = {name: w for name, w in loaded.items() if not trained and "_lora" not in name}
        changing = {name: w for name, w in loaded.items() if name not in frozen}
        operands = Operands(x, gates, changing)
        y = sum_over_parts(self._compute, placement.part_rows, operands, frozen, rows)
        if bias is not None:
            # [tokens, k, count]; an expert of another device has a row of zeros.
            weighted = jax.nn.one_hot(local, count) * gates[..., None]
            by_expert = jnp.sum(weighted, axis=1).astype(bias.dtype)
            if TP not in holders:
                # Every device of a tp group has all experts; only the first adds their biases.
                bias = on_first_device(bias)
            y += by_expert @ bias
        if gathers_tokens:
            y = reduce_scatter(y, *STORAGE)
        return y, jnp.sum(rows.sizes)

    def placement(self, tokens: int, tp: int, shards: int, *, trained: bool) -> Placement:
        """Returns a device's part of a training step; each device has `tokens` tokens."""
        compute = jnp.dtype(self.precision.compute).itemsize
        gathered = self.down.itemsize if isinstance(self.down, StoredKernel) else compute
        # A step gathers each kernel twice and reduces its gradient.
        moved = 2 * gathered + trained * jnp.dtype(self.precision.reduce).itemsize
        return place(self.config, tokens, tp, shards, token_bytes=compute, kernel_bytes=moved)

    def _load_experts(self, weights: Weights, *, gathered: bool) -> Weights:
        """Returns the device's arrays of experts; unless `gathered`, as they are stored."""
        arrays: dict[str, str] = {}  # dims by name
        for name, dims in self.config.projections().items():
            adapter = {f"{name}_lora.a": f"{dims[:2]}r", f"{name}_lora.b": f"Er{dims[2]}"}
            arrays |= {name: dims, f"{name}_bias": dims[0] + dims[2], **adapter}
        tp = axis_size(TP)
        stored = storage_letter(self.config, tp, axis_size(*STORAGE))
        over_tp = self.config.over_tp(tp)
        load = partial(self.precision.load, gathered=gathered)
        loaded: Weights = {}
        for name, dims in arrays.items():
            if name in weights:
                stored_dim = dims.index(stored) if stored in dims else None
                on_all_tp = "F" not in dims and not over_tp
                loaded[name] = load(weights[name], stored_dim, used_by_all_tp=on_all_tp)
        return loaded

    def _compute(self, operands: Operands, frozen: Weights, rows: Rows) -> Array:
        """Returns the summands of these rows, `[N, D]`, without the last bias."""
        weights = {**operands.weights, **frozen}
        method, _ = pick_method(self.config.grouped, current_platform())
        multiply_rows = partial(grouped_matmul, sizes_E=rows.sizes, method=method)

        def project(x: Array, name: str) -> Array:
            y = multiply_rows(x, weights[name])
            if f"{name}_lora.a" in weights:
                inner = multiply_rows(x, weights[f"{name}_lora.a"])
                lora: Lora = getattr(self, f"{name}_lora")
                y = lora.add(y, inner, weights[f"{name}_lora.b"], multiply_rows)
            return y

        inputs = rows.spread(operands.x)  # [rows, D]
        products = []
        *columns, down = self.config.projections()
        for name in columns:
            y = project(inputs, name)
            if f"{name}_bias" in weights:
                y = y + rows.of_experts(weights[f"{name}_bias"])
            products.append(checkpoint_name(y, PROJECTED))
        activate = ACTIVATIONS[self.config.activation]
        hidden = hidden_features(activate, products, self.config.swiglu_limit)  # [rows, F]
        # Weighted before the last product, so that the backward pass does not need that product's
        # result.
        gates = rows.of_choices(operands.gates.reshape(-1))
        weighted = (hidden * gates[:, None]).astype(hidden.dtype)
        return rows.collect(project(weighted, down))

    def _with_shared(self, y: Array, x: Array, gate: Array, weights: Weights) -> Array:
        """Adds the shared experts' output, or appends it to the sum of the experts of latents."""
        shared = self._shared(x, gate, weights)
        if self.config.experts_rank:
            return jnp.concatenate([y, shared], axis=-1)
        return y + shared

    def _shared(self, x: Array, gate: Array, weights: Weights) -> Array:
        """Returns this device's summands of the shared experts: a dense MLP of gathered tokens."""
        config = self.config
        load = self.precision.load
        columns = "up" if config.mlp == "plain" else "gate_up"
        column_weights = _weights_of(f"shared.{columns}", weights)
        products = self.shared.columns.project(None, x, column_weights)
        hidden = hidden_features(ACTIVATIONS[config.activation], products, config.swiglu_limit)
        if config.shared_experts_gate:
            hidden = (hidden * gate).astype(hidden.dtype)
        # As a row layer, without its reduction
        down = _weights_of("shared.down", weights)
        y = hidden @ load(down["kernel"], 1)
        for lora in self.shared.down.loras:
            inner = hidden @ load(down["loras.0.a"], None)
            y = lora.add(y, inner, load(down["loras.0.b"], 1, used_by_all_tp=True))
        if config.mlp_bias:
            bias = on_first_device(load(down["bias"], 0, used_by_all_tp=True))
            if config.shared_experts_gate:
                bias = (bias * gate).astype(y.dtype)
            y += bias
        return y


def _gathered_tokens(x: Array, gates: Array, experts: Array) -> tuple[Array, Array, Array]:
    """Gathers tokens along the storage, with their choices in one exchange."""
    k = gates.shape[1]
    choices = jnp.concatenate([gates, experts.astype(jnp.float32)], axis=-1)
    choices = all_gather(choices, *STORAGE)
    x = all_gather(x, *STORAGE)
    gates = choices[:, :k]
    experts = choices[:, k:].astype(jnp.int32)
    return x, gates, experts


def _weights_of(module: str, weights: Weights) -> Weights:
    """Returns the weights of a module of the layer, by their paths in it."""
    prefix = f"{module}."
    return {path.removeprefix(prefix): w for path, w in weights.items() if path.startswith(prefix)}


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
        self.mlp_norm = Norm(d_model, norm, context)
        self.experts_norm = Norm(d_model, replace(norm, norm="rms_plain"), context)
        self.mlp = MLP(d_model, replace(config, d_ff=config.dense_mlp), context, rngs=rngs)
        self.experts = MixtureOfExperts(d_model, config, context, rngs=rngs)
        self.mlp_after_norm = Norm(d_model, norm.after(), context)
        self.experts_after_norm = Norm(d_model, norm.after(), context)

    def __call__(self, x_BTD: Array, sequences: Sequences = Sequences()) -> tuple[Array, Routing]:  # type: ignore[override]
        """Sums the results for the residual stream."""
        y_BTD, routing = self.experts(self.experts_norm(x_BTD), sequences)
        y_BTD = self.experts_after_norm(y_BTD)
        dense_BTD = self.mlp(self.mlp_norm(x_BTD))
        return y_BTD + self.mlp_after_norm(dense_BTD), routing
