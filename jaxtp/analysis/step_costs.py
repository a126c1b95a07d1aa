"""Costs of a decoder's step on one device: sums over its layers.

A branch without formulas (`layer_costs.py`) is traced, which takes a second instead of a
millisecond. Its collectives are exact, and so are the products outside of kernels. The estimate of
its memory assumes that residuals are divided evenly over all devices.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import repeat
from operator import attrgetter
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.extend.core import Jaxpr
from jax.sharding import AbstractDevice

from jaxtp.analysis.census import (
    array_bytes,
    arrays,
    count_collectives,
    equations,
    products_of,
)
from jaxtp.analysis.collective import ALL_REDUCE, Collective, Place, bytes_by_place, spanned
from jaxtp.analysis.layer_costs import (
    FLOAT32,
    Bytes,
    CollectiveCost,
    Cost,
    Costs,
    Product,
    Weight,
    Workload,
    branch_costs,
    collective_cost,
    collectives_of,
    column_costs,
    embedding_costs,
    enter,
    has_formulas,
    itemsize,
    latents_costs,
    leave,
    norm_costs,
    row_costs,
    weight_of,
)
from jaxtp.config.schema import ConfigError
from jaxtp.layers import remat
from jaxtp.layers.balance import BALANCE
from jaxtp.layers.branch import Branch
from jaxtp.layers.context import Sequences
from jaxtp.layers.embedding import EMBEDDING
from jaxtp.layers.gated_delta import DELTA, GatedDeltaConfig, GatedDeltaNet, KimiDeltaAttention
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.loss import LOSS
from jaxtp.layers.mamba2 import Mamba2
from jaxtp.layers.parameter import (
    GRADIENTS,
    PARAMETERS,
    PaddedDim,
    Precision,
    mark_unreduced,
)
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import (
    BATCH,
    CP,
    DP,
    SEQUENCE,
    TOKENS,
    TP,
    Sizes,
    abstract_mesh,
    as_only,
    batch_parts,
    mesh_shape,
)
from jaxtp.models.block import STATES
from jaxtp.models.config import ModelConfig, padded_sizes
from jaxtp.models.decoder import JOINED, Decoder, DecoderBlock, create_decoder

LOGIT_PASSES = 6
"""Estimated passes of all float32 logits through memory besides the matrix products. Compiled steps
make 3.5: maximum and exponentials; then they read the logits, and write a gradient in 16 bits."""

BACKWARD_OF_DELTA = 1.2
"""Memory of Gated DeltaNet's backward pass in units of all activations between its projections,
which it recomputes: measured in programs of NVIDIA's compiler (one block of Qwen3.5-27B, 8,192 to
32,768 tokens)."""

MUCH_PADDING = 0.25
"""Fraction that padding may add to a block's weights without a warning."""

LayersCost = tuple[int, Cost]
"""The number of layers that have a cost, and the cost in one of them."""

_AMPERE = "8.0"  # the oldest NVIDIA architecture with every kernel
_MAX_PROPOSED_TP = 1024


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Traffic and products of a step on one device, and the memory of a micro-batch."""

    traffic: Mapping[Collective, int]  # collectives, and how often each runs
    products: tuple[Product, ...]  # matrix products with weights
    attention: tuple[Product, ...]  # scores, and the values weighted by them
    # Bytes through memory outside of products, except for `scores` and `logits`
    elementwise: tuple[Bytes, ...]
    # Bytes of attention scores through memory outside of products; 0 for a kernel that never holds
    # them
    scores: float
    logits: float
    itemsize: int  # bytes of an element of the compute dtype
    param_itemsize: int  # bytes of an element of the trained parameters' dtype
    saved: int  # bytes that all blocks save for the backward pass
    copied: int  # bytes of the copies of `saved` before the backward pass
    working: int  # bytes of activations that the backward pass of the largest branch works on
    weights: int  # bytes of the largest block's loaded weights, and of their unreduced gradients
    # Bytes of the head, of the logits of a chunk, and of its share of the head's gradient
    loss: int
    # Bytes of the head's gradient before it is reduced, which is after the blocks' backward passes
    head: int
    adapters: int  # elements of all adapters
    # Elements of a device's weights that none of its tokens uses, on average: weights of experts
    # that no token chooses
    unused: float
    # Matrix products of the optimizer's rule, in the parameters' dtype
    update: tuple[Product, ...] = ()
    owned: int = 0  # bytes of whole matrices that the optimizer's rule works on
    padding: float  # elements that padding adds to the weights of all blocks, as a share of them

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        products = (*self.products, *self.attention, *self.update)
        return sum(map(attrgetter("flops"), products))

    @property
    def budget(self) -> dict[Place, float]:
        """Bytes that the device may send, by module and axes."""
        return bytes_by_place(self.traffic)


def step_costs(
    config: ModelConfig,
    mesh: Sizes,
    *,
    batch_size: int,
    sequence_length: int,
    accumulation: int = 1,
    **shape: Any,
) -> StepCosts:
    """Returns each device's work in a training step.

    Traffic is exact for Llama's layers, and an upper bound with biases, QK norms or adapters.

    Args:
      batch_size: sequences per step, over all devices and micro-batches.
      **shape: other fields of `LocalShape`: packed, platform, context.

    Raises:
      ConfigError: a device has no token of a micro-batch.
    """
    row_parts = batch_parts(mesh) * accumulation
    if batch_size < row_parts or sequence_length < mesh[CP]:
        raise ConfigError(
            f"a device has no token of a micro-batch: batch_size={batch_size} should be at least "
            f"dp * fsdp * accumulation = {row_parts}, and sequence_length={sequence_length} at "
            f"least cp = {mesh[CP]}"
        )
    work = Workload(
        sizes=mesh,
        rows=batch_size // row_parts,
        length=sequence_length,
        remat=config.remat,
        frozen=config.lora.rank > 0,
        accumulation=accumulation,
        **shape,
    )
    return costs_of(config, work)


def costs_of(config: ModelConfig, work: Workload) -> StepCosts:
    """Returns a model's costs: traffic and products of all micro-batches, memory of one."""
    work = replace(work, zigzag=config.zigzag(work))
    model = described(config)
    if not all(map(_has_formulas, dict(_stacked_blocks(model)))):
        model = described(config, work.tp)  # its arrays are padded for tp, as a trace needs them
    blocks = _stacked_blocks(model)
    by_block: dict[DecoderBlock, list[Cost]] = {}
    inside: list[LayersCost] = []
    for block, layers in blocks:
        if block not in by_block:
            by_block[block] = list(block_costs(block, work))
        inside += zip(repeat(layers), by_block[block], strict=False)
    outside = list(zip(repeat(1), decoder_costs(model, work), strict=False))
    every_cost = inside + outside
    # A backward pass counts 1.5.
    passes = 2.5 + work.recomputes
    elementwise = [
        replace(cost, bytes=work.accumulation * passes * layers * cost.bytes)
        for layers, cost in _of_kind("elementwise", every_cost)
    ]
    size = padded_size = adapter_size = 0
    unused = 0.0
    for layers, cost in inside:
        if isinstance(cost, Weight):
            size += layers * cost.size
            padded_size += layers * cost.padded(work.tp)
            adapter_size += layers * cost.size * cost.adapter
            # Routing is assumed to be uniform.
            unused += layers * (cost.over_tp(work.sizes) * (1 - cost.active) ** work.tokens)
    loaded = max(_loaded(costs, work) for costs in by_block.values())

    return StepCosts(
        traffic=_traffic(every_cost, work),
        products=_products(every_cost, work, attention=False),
        attention=_products(every_cost, work, attention=True),
        elementwise=tuple(elementwise),
        scores=work.accumulation * _bytes("scores", every_cost),
        logits=work.accumulation * _bytes("logits", every_cost),
        itemsize=itemsize(config.precision.compute),
        param_itemsize=itemsize(config.trained_dtype),
        saved=int(_bytes("saved", every_cost)),
        copied=int(_bytes("copied", every_cost)),
        working=int(max(cost.bytes for _, cost in _of_kind("workspace", inside))),
        weights=int(loaded),
        loss=int(_bytes("workspace", outside)),
        head=int(_bytes("gradient", outside)),
        adapters=adapter_size,
        unused=unused,
        padding=padded_size / size - 1,
    )


@lru_cache(maxsize=32)
def _stacked_blocks(model: Decoder) -> tuple[tuple[DecoderBlock, int], ...]:
    """Returns one block of each stack and its number of layers.

    Equal blocks are one object, so that `costs_of` prices them once.
    """
    blocks: list[tuple[DecoderBlock, int]] = []
    equal_blocks: dict[Hashable, DecoderBlock] = {}
    for stack, stacked in model.stacked():
        for block in stacked:
            graph, state = nnx.split(block)
            unstacked = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), state
            )
            key = (graph, tuple(jax.tree.leaves(unstacked)))
            if key not in equal_blocks:
                equal_blocks[key] = nnx.merge(graph, unstacked)
            blocks.append((equal_blocks[key], stack.repeats))
    return tuple(blocks)


def _has_formulas(block: DecoderBlock) -> bool:
    return all(has_formulas(branch) for _, branch, *_ in block.branches())


def block_costs(block: DecoderBlock, work: Workload) -> Costs:
    """Yields the costs of branches, norms, residual sums and saved input."""
    config = block.config
    compute = itemsize(config.precision.compute)
    stream = FLOAT32 if config.residual_float32 else compute
    size = work.between(config.sequence_parallel) * config.d_model * stream
    last = block.names[-1]
    num_inputs = 1 if block.parallel else len({*block.names} - {STATES})
    saved_inputs = {"none": num_inputs, "offload": 0}
    yield Bytes("saved", size * saved_inputs.get(work.remat, 1))
    regathered = work.regathers
    joined = [name for name, branch, *_ in block.branches() if branch.caller_communicates]
    if joined:
        hidden = work.tokens * config.d_model * compute
        split = work.is_split(config.sequence_parallel)
        yield from _within(joined[0], enter(JOINED, work, hidden, split=split, again=regathered))
        read = not block.parallel and joined[-1] != last
        yield from leave(JOINED, work, hidden, split=split, again=read and work.rereduces)
        yield Bytes("saved", hidden * (not regathered))
        if read and work.saves_reduced:
            # Each row layer has the costs of a result, and there is one sum.
            yield Bytes("saved", size * (1 - len(joined)))
    for name, branch, before, after in block.branches():
        if before is not None:
            yield from _within(name, norm_costs(before, work, recomputed=regathered))
        # A result is recomputed if a branch follows: its norm reads the sum that contains this
        # result.
        if after is not None:
            recomputed = name != last and work.recomputes
            yield from _within(name, norm_costs(after, work, recomputed=recomputed))
        read = (name != last and not block.parallel) or after is not None
        if has_formulas(branch):
            costs = branch_costs(branch, work, read=read)
        else:
            costs = traced_costs(branch, work, config.d_model, config.precision, read=read)
        yield from _within(name, costs)
        yield Bytes("elementwise", 3 * size, "norm")


def _within(branch_name: str, costs: Iterable[Cost]) -> Costs:
    """Adds the branch's name to its costs, and adds up its workspace."""
    workspace = 0.0
    for cost in costs:
        if isinstance(cost, CollectiveCost):
            scope = f"{branch_name}/{cost.collective.scope}"
            yield replace(cost, collective=replace(cost.collective, scope=scope))
        elif isinstance(cost, Bytes) and cost.kind == "workspace":
            workspace += cost.bytes
        else:
            yield replace(cost, module=f"{branch_name}/{cost.module}")
    yield Bytes("workspace", workspace)


def decoder_costs(model: Decoder, work: Workload) -> Costs:
    """Yields the costs of embedding, final norm, head and loss."""
    config = model.config
    exchanges = model.embedding.exchanges(work)
    yield from embedding_costs(model.embedding, work, exchanges=exchanges)
    if model.positions is not None:
        table = model.positions.table
        split = work.is_split(config.sequence_parallel)
        name = "learned_positions"
        yield weight_of(table, name, config.precision, summed=split, again=False)
    yield from norm_costs(model.norm, work, inside=False)
    yield from loss_costs(config, work)
    num_experts = [block.num_experts for block in config.layers() if block.num_experts]
    if num_experts:
        experts = sum(num_experts)
        statistics = (2 * experts + 3 * len(num_experts)) * work.rows
        yield collective_cost(ALL_REDUCE, SEQUENCE, BALANCE, work, FLOAT32 * statistics)
        yield collective_cost(ALL_REDUCE, BATCH, BALANCE, work, FLOAT32 * (experts + 4))


def _token_row_costs(config: ModelConfig, work: Workload) -> Costs:
    """Yields the sums of the gradients of trained rows, whose tables have gradients, too."""
    row_bytes = config.d_model * itemsize(config.lora.dtype) / work.shards
    gradient = len(config.lora.tokens) * row_bytes
    yield collective_cost(ALL_REDUCE, (TP,), EMBEDDING, work, gradient, 2)
    if work.accumulation > 1:
        tables = 1 if config.tie_embeddings else 2
        yield replace(
            collective_cost(ALL_REDUCE, (DP,), GRADIENTS, work, gradient, tables), once=True
        )


def loss_costs(config: ModelConfig, work: Workload) -> Costs:
    """Yields the costs of head and loss.

    Over tp they are a column layer's input, and three floats per token.
    """
    compute = itemsize(config.precision.compute)
    tokens = work.tokens
    features = config.d_model
    lora = config.lora
    has_rows = bool(lora.rank and lora.tokens)
    trained = has_rows or bool(lora.rank and lora.tables)
    if trained:
        work = replace(work, frozen=False)
    if has_rows:
        yield from _token_row_costs(config, work)
    size = config.vocab_size * features
    vocab = PaddedDim((config.vocab_size,))
    local = vocab.padded(work.tp) // work.tp
    tied = config.tie_embeddings
    weight = partial(Weight, module=LOSS, split=vocab, precision=config.precision, again=False)
    yield weight(size=size, tied=tied or has_rows, adapter=trained)
    if config.head_bias:
        yield weight(size=config.vocab_size, fsdp=False)
    hidden = tokens * features * compute
    yield from enter(LOSS, work, hidden, split=work.is_split(config.sequence_parallel), again=False)
    chunks = -(-tokens // config.loss_chunk)
    for floats in (1, 2):  # the maximum; the sum of exponentials and the label's logit
        yield collective_cost(
            ALL_REDUCE, (TP,), LOSS, work, floats * tokens * FLOAT32 / chunks, chunks
        )
    yield collective_cost(ALL_REDUCE, TOKENS, LOSS, work, 2 * FLOAT32)
    moved = tokens * (features * compute + local * FLOAT32) + chunks * features * local * compute
    yield Product("head", tokens, features, local, work.num_evals(False), moved)
    yield Bytes("logits", tokens * local * FLOAT32 * LOGIT_PASSES)
    table = local * features
    logits = min(config.loss_chunk, tokens) * local
    gradient = FLOAT32 * table * (not work.frozen)
    # XLA transposes a gathered table before the first chunk, and adds up the chunks' gradients of
    # the table.
    first = compute * table * (work.shards > 1) + FLOAT32 * logits
    yield Bytes("workspace", compute * (table + logits) + max(first, gradient * (chunks > 1)))
    yield Bytes("gradient", gradient)


def active_parameters(config: ModelConfig, parameters: int) -> int:
    """Returns the parameters a token uses; `parameters` counts all, without padding."""
    work = Workload(sizes=mesh_shape(), rows=1, length=1)
    return parameters - round(costs_of(config, work).unused)


def describe_active(config: ModelConfig, parameters: int) -> str:
    """Returns a suffix that states the active parameters; empty if all are active."""
    active = active_parameters(config, parameters)
    return "" if active == parameters else f", {active:,} active for each token"


def _of_kind(kind: str, costs: Iterable[LayersCost]) -> Iterator[tuple[int, Bytes]]:
    for layers, cost in costs:
        if isinstance(cost, Bytes) and cost.kind == kind:
            yield layers, cost


def _bytes(kind: str, costs: Iterable[LayersCost]) -> float:
    return sum(layers * cost.bytes for layers, cost in _of_kind(kind, costs))


def _loaded(costs: Iterable[Cost], work: Workload) -> float:
    loaded = 0.0
    largest_reduced = 0.0
    for cost in costs:
        if isinstance(cost, Weight):
            loaded += cost.loaded_bytes(work)
            largest_reduced = max(largest_reduced, cost.reduced_bytes(work))
    return loaded + largest_reduced


def describe_padding(config: ModelConfig, mesh: Sizes) -> str | None:
    """Describes the padding over tp and its cost, with a warning if large."""
    tp = mesh[TP]
    padded = padded_sizes(config, tp)
    if not padded:
        return None
    work = Workload(sizes=mesh_shape(tp=tp), rows=1, length=1)
    padding = costs_of(config, work).padding
    sizes = ", ".join(f"{size} {name} to {more}" for name, (size, more) in padded.items())
    text = f"with tp {tp}: {sizes}, which adds {padding:.1%} to the weights of a block"
    if padding <= MUCH_PADDING:
        return text
    candidates = range(1, min(2 * tp, _MAX_PROPOSED_TP))
    unpadded = [size for size in candidates if not padded_sizes(config, size)]
    nearest = sorted(sorted(unpadded, key=lambda size: abs(size - tp))[:2])
    return f"{text}; WARNING: much padding; tp {' or '.join(map(str, nearest))} needs none"


def _traffic(costs: Iterable[LayersCost], work: Workload) -> dict[Collective, int]:
    traffic: Counter[Collective] = Counter()
    for layers, cost in costs:
        for run in collectives_of(cost, work):
            message = run.collective
            if message.group == 1 or not run.count:
                continue
            message = replace(message, axes=spanned(message.axes, work.sizes))
            if run.once:
                traffic[replace(message, bytes=layers * message.bytes)] += run.count
            else:
                traffic[message] += layers * work.accumulation * run.count
    return dict(traffic)


def _products(
    costs: Iterable[LayersCost], work: Workload, *, attention: bool
) -> tuple[Product, ...]:
    counts: Counter[Product] = Counter()
    for layers, cost in costs:
        if isinstance(cost, Product) and cost.attention == attention:
            counts[replace(cost, count=0)] += layers * work.accumulation * cost.count
    return tuple(replace(product, count=count) for product, count in counts.items())


def described(config: ModelConfig, tp: int = 1, shards: int = 1) -> Decoder:
    """Returns the model without arrays.

    `tp` and the storage's `shards` may change their layout, but nothing else.
    """
    return _described(replace(config, remat="full"), tp, shards)


@lru_cache(maxsize=32)
def _described(config: ModelConfig, tp: int, shards: int) -> Decoder:
    with _abstract(mesh_shape(fsdp=shards, tp=tp)):
        return nnx.eval_shape(lambda: create_decoder(config, rngs=nnx.Rngs(0)))


@branch_costs.register
def delta_costs(layer: GatedDeltaNet, work: Workload, *, read: bool) -> Costs:
    """Yields the costs that all layers with states have.

    The projections have formulas; the computation between them is traced.
    """
    config = layer.config
    heads = config.delta_heads
    queries, keys = heads.on_device(work.tp)
    yield from column_costs(layer.in_proj, work, "delta in")
    for name in layer.inside:
        if (variable := getattr(layer, name)) is not None:
            yield weight_of(variable, DELTA, layer.precision)
    # Rows and key heads are alike: one is traced.
    one_head = replace(config, delta_key_heads=1, delta_value_heads=queries // keys)
    inside = _inside_delta(
        type(layer),
        one_head,
        layer.precision,
        work.sizes[CP],
        length=work.length,
        zigzag=work.zigzag,
        platform=work.platform,
        # Policies that compute products again save nothing between the projections.
        remat="full" if work.reprojects else work.remat,
    )
    for cost in inside:
        yield _repeated(cost, work.rows * keys)
    yield from row_costs(layer.out, work, "attention out", read=read)


@branch_costs.register
def _kimi_costs(layer: KimiDeltaAttention, work: Workload, *, read: bool) -> Costs:
    yield from delta_costs(layer, work, read=read)
    yield from latents_costs((layer.decay_down, layer.gate_down), work)
    yield from column_costs(layer.decay_up, work, "decays")
    yield from column_costs(layer.gate_up, work, "gates")


@branch_costs.register
def _mamba_costs(layer: Mamba2, work: Workload, *, read: bool) -> Costs:
    yield from delta_costs(layer, work, read=read)
    shared_by = layer.config.delta_heads.keys.shared_by(work.tp)
    if layer.config.mamba_norm and shared_by > 1:
        # The squares of each group, forward, recomputed in the backward pass, and its gradient
        size = work.tokens * work.tp // shared_by * FLOAT32
        count = work.num_evals(work.recomputes, 0) + 2
        yield collective_cost(ALL_REDUCE, (TP,), DELTA, work, size, count)


@lru_cache(maxsize=256)
def _inside_delta(
    kind: type[GatedDeltaNet],
    config: GatedDeltaConfig,
    precision: Precision,
    cp: int,
    **shape: Any,
) -> tuple[Bytes | CollectiveCost | Product, ...]:
    # Between the projections, without weights: only their gradients are all-reduced.
    work = Workload(sizes=mesh_shape(cp=cp), rows=1, **shape)
    with _abstract(mesh_shape()):
        layer = nnx.eval_shape(
            lambda: kind(1, config, LayerContext(precision=precision), rngs=nnx.Rngs(0))
        )
    graph, weights = nnx.split(layer)

    def forward(projected: Any, weights: nnx.State) -> Array:
        layer = nnx.merge(graph, weights)
        for projection in ("project", "out"):
            setattr(layer, projection, lambda x: x)
        return layer(projected, Sequences(zigzag=work.zigzag))

    tokens = jax.ShapeDtypeStruct((1, work.length, 1), precision.compute)
    with _abstract(mesh_shape()):
        projected = nnx.eval_shape(lambda layer, x: layer.project(x), layer, tokens)
    costs = list(_program_costs(forward, (projected, weights), work))
    state = config.delta_value_heads * config.delta_key_dim * config.delta_value_dim
    needed = 2.0 * kind.state_products * work.tokens * state * work.num_evals(work.recomputes, 2)
    counted = needed / sum(cost.flops for cost in costs if isinstance(cost, Product))
    inside: list[Bytes | CollectiveCost | Product] = []
    for cost in costs:
        if isinstance(cost, Product):
            inside.append(replace(cost, name="delta rule", attention=True, counted=counted))
        elif isinstance(cost, Bytes):
            factor = BACKWARD_OF_DELTA if cost.kind == "workspace" else 1
            inside.append(replace(cost, bytes=factor * cost.bytes))
        elif cost.collective.kind != ALL_REDUCE:
            inside.append(cost)
    return tuple(inside)


def _repeated(cost: Bytes | CollectiveCost | Product, times: int) -> Cost:
    if isinstance(cost, CollectiveCost):
        message = replace(cost.collective, bytes=times * cost.collective.bytes)
        return replace(cost, collective=message)
    if isinstance(cost, Product):
        return replace(cost, m=times * cost.m, bytes=times * cost.bytes)
    return replace(cost, bytes=times * cost.bytes)


def traced_costs(
    branch: Branch, work: Workload, features: int, precision: Precision, *, read: bool
) -> Costs:
    """Yields the costs of a branch.

    Args:
      branch: has abstract arrays, made for the workload's tp.
      features: D.
      read: as in `branch_costs`.
    """
    for _, variable in nnx.to_flat_state(nnx.state(branch, PARAMETERS)):
        yield weight_of(variable, type(branch).__name__, precision, traced=True)
    rows = work.rows * batch_parts(work.sizes)
    x = jax.ShapeDtypeStruct((rows, work.length, features), precision.compute)
    graph, *states = nnx.split(branch, nnx.Param, ...)
    trained, untrained = states
    sequences = Sequences(context=work.context, zigzag=work.zigzag)

    def forward(inputs: tuple[Array, nnx.State], untrained: nnx.State) -> Array:
        x, trained = inputs
        y = nnx.merge(graph, trained, untrained)(x, sequences)
        return y * y if read else y

    def unreduced(inputs: tuple[Array, nnx.State]) -> tuple[Array, nnx.State]:
        # Copies are summed after the last micro-batch, which `Weight.collectives` counts.
        return inputs[0], mark_unreduced(inputs[1])

    copied = unreduced if work.accumulation > 1 else None
    yield from _program_costs(forward, ((x, trained), untrained), work, copied)


def _program_costs(
    forward: Callable[..., Array],
    arguments: tuple[object, object],
    work: Workload,
    copied: Callable[..., object] | None = None,
) -> Iterator[Bytes | CollectiveCost | Product]:
    """Yields the costs of `forward(inputs, constants)`, and of its gradient.

    The gradient is with respect to the inputs, or to their copies by `copied`.
    """

    def vjp(policy: RematPolicy, inputs: object, constants: object) -> Any:
        # Offloading needs a device with pinned memory; it computes what full does.
        traced_policy = remat.policy("full" if policy == "offload" else policy)
        run = jax.checkpoint(forward, policy=traced_policy)
        return jax.vjp(lambda inputs: run(inputs, constants), inputs)

    def step(inputs: object, constants: object) -> object:
        y, backward = vjp(work.remat, inputs if copied is None else copied(inputs), constants)
        return y, backward(y)

    def residuals(policy: RematPolicy) -> float:
        trace = jax.make_jaxpr(lambda *args: jax.tree.leaves(vjp(policy, *args)[1]))
        jaxpr = trace(*arguments).jaxpr
        saved: dict[int, Any] = {}
        for variable in jaxpr.outvars:
            if variable not in jaxpr.invars:
                saved[id(variable)] = variable.aval
        return sum(map(array_bytes, saved.values())) / math.prod(work.sizes.values())

    with _abstract(work.sizes, work.platform):
        jaxpr = jax.make_jaxpr(step)(*arguments)
        saved = residuals(work.remat)
        everything = residuals("none")
    yield Bytes("saved", saved)
    yield Bytes("workspace", everything)
    yield Bytes("elementwise", everything)
    for message, times in count_collectives(jaxpr, work.sizes).items():
        yield CollectiveCost(
            Collective(message.kind, message.axes, message.group, message.bytes, message.module),
            times,
        )
    yield from _traced_products(jaxpr.jaxpr)


@dataclass(frozen=True)
class _Device(AbstractDevice):
    compute_capability: str


@contextmanager
def _abstract(sizes: Sizes, platform: str | None = None) -> Iterator[None]:
    # Kernels are chosen by the mesh's device. Without a device, layers would ask JAX for one, which
    # starts its backend.
    name, _, capability = (platform or "cpu").partition(" ")
    device = _Device(
        device_kind=name, num_cores=None, platform=name, compute_capability=capability or _AMPERE
    )
    with as_only(abstract_mesh(sizes).update(abstract_device=device)):
        yield


def _traced_products(jaxpr: Jaxpr) -> Iterator[Product]:
    for equation, times, *_ in equations(jaxpr):
        operands = arrays(*equation.invars)
        results = arrays(*equation.outvars)
        products = products_of(equation)
        if products is None and equation.primitive.name == "pallas_call":
            raise ValueError(
                f"the products of the kernel {equation.params['name']!r} are not known; add a rule "
                "to jaxtp.analysis.census"
            )
        if products is not None:
            m, k, n, count = products
            moved = sum(map(array_bytes, operands + results))
            yield Product("products", m, k, n, times * count, moved)
