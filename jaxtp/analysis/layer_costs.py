"""Costs of each layer on one device: closed formulas, fast enough to search many settings.

A layer yields records: weights, collectives, products, and bytes of memory and of traffic through
it; `step_costs.py` sums them. The size and split of a weight come from the layer's variable, except
for the vocabulary, which the embedding and the head may share. The other formulas derive from a
layer's sizes and one device's workload, not from the layer's code. So the tests that compare them
with jaxprs (`tests/models/test_budget.py`) and with compiled programs
(`tests/tools/estimate/test_partitioned.py`) find mistakes in both. `branch_costs` dispatches on the
class of a branch: register a function for a new class, or it is traced.

`tools/estimate/README.md` has the bytes that a device sends for each layer. Layers in float8 gather
kernels, and tokens in the forward pass, in 8 bits with float32 scales. Each scale is an all-reduced
maximum over the devices that split its token or input features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, singledispatch
from itertools import chain
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtp.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Axes,
    Collective,
)
from jaxtp.collectives import gradient_sum_axes
from jaxtp.layers.attention import CausalSelfAttention
from jaxtp.layers.branch import Branch
from jaxtp.layers.context import (
    ContextAttention,
    LocalShape,
    Method,
    chunk_size,
    halo,
    hops,
    num_routes,
)
from jaxtp.layers.embedding import EMBEDDING, VocabParallelEmbedding
from jaxtp.layers.experts import EXPERTS, ExpertsBesideMLP, MixtureOfExperts, Placement
from jaxtp.layers.experts.placement import StackedDims
from jaxtp.layers.kernels.grouped import is_dense, pick_method
from jaxtp.layers.kernels.select import Kernel, num_scores, pick_kernel
from jaxtp.layers.latent_attention import LATENT, DownProjection, LatentAttention
from jaxtp.layers.linear import COLUMN, ROW, ColumnParallelLinear, RowParallelLinear
from jaxtp.layers.lora import Lora, StoredKernel
from jaxtp.layers.mlp import MLP, XIELU, MLPConfig
from jaxtp.layers.norm import ATTEND, Norm
from jaxtp.layers.parameter import (
    GRADIENTS,
    ExactDim,
    Matmul,
    PaddedDim,
    Precision,
    Variable,
    logical_shape,
    padding_of,
    spec_of,
)
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import CONTEXT, CP, STORAGE, TP, Sizes, axes_of, parts

Projection = ColumnParallelLinear | RowParallelLinear

FLOAT32 = INT32 = 4  # Bytes of an element

SCORE_PASSES = 5
"""Times that float32 scores go through memory outside of products: mask and maximum, exponentials,
division; backward the product with the probabilities, and the difference. An estimate."""


@dataclass(frozen=True, kw_only=True)
class Workload(LocalShape):
    """A micro-batch on one device, and how it is processed."""

    remat: RematPolicy = "none"
    frozen: bool = False  # only adapters are trained
    accumulation: int = 1  # micro-batches in a step, whose gradients are added up
    once: bool = False  # scores that are not kept count as computed once

    @property
    def shards(self) -> int:
        """Devices that fsdp and cp divide the storage of weights among."""
        return parts(self.sizes, STORAGE)

    @property
    def num_gradients(self) -> int:
        """Products in the backward pass of a product with a weight: one if frozen."""
        return 1 if self.frozen else 2

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass computes anything but products with weights again."""
        return self.remat != "none"

    @property
    def reprojects(self) -> bool:
        """Whether the backward pass computes products of column layers again."""
        return self.remat not in ("none", "save_dots")

    @property
    def regathers(self) -> bool:
        """Whether the backward pass gathers inputs of column layers again."""
        return self.remat not in ("none", "save_gathered")

    @property
    def rereduces(self) -> bool:
        """Whether the backward pass computes again the sums of row layers that it reads."""
        return self.remat in ("full", "offload")

    @property
    def saves_reduced(self) -> bool:
        """Whether sums of row layers that the backward pass reads are saved by themselves."""
        return self.recomputes and not self.rereduces

    def num_evals(self, recomputed: bool, num_backward: int | None = None) -> int:
        """Returns how often a product runs: forward, recomputed and backward.

        In the backward pass it runs by default as often as a product with a weight.
        """
        if num_backward is None:
            num_backward = self.num_gradients
        return 1 + (recomputed and not self.once) + num_backward


@dataclass(frozen=True)
class CollectiveCost:
    """A collective, and how often it runs."""

    collective: Collective
    count: int
    # Whether it runs once in a step for all layers, not in each micro-batch and layer
    once: bool = False


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, and how its layer loads it (`collectives.load_weight`)."""

    module: str  # name of the layer, as `Collective.module` has it
    size: int  # elements of the whole array, without padding
    precision: Precision
    split: PaddedDim  # the dim over tp with its padding, or a dim without padding
    tp: bool = True  # it is split over tp; `fsdp` likewise
    fsdp: bool = True
    # Whether parts over fsdp are gathered; else each is used for the tokens of all devices along
    # fsdp
    gathered: bool = True
    used_by_all_tp: bool = False  # its gradient is summed over tp
    again: bool = True  # it is loaded again for the backward pass
    adapter: bool = False  # it is trained where there are adapters, and other weights are not
    tied: bool = False  # another layer has it too, and declares the costs that both share
    active: float = 1.0  # fraction of its elements that a token uses
    traced: bool = False  # its collectives are counted in a trace, except the last sum over dp
    # Bytes of an element that is stored and gathered in a form of fewer bits; else 0
    packed: float = 0.0
    matmul: Matmul = "compute"  # float8: it is gathered and multiplied in 8 bits

    def is_frozen(self, work: Workload) -> bool:
        """Returns whether it has no gradient."""
        return work.frozen and not self.adapter

    def padded(self, tp: int) -> int:
        """Returns the elements of the whole array, padded for `tp`."""
        return self.size // self.split.size * self.split.padded(tp)

    def over_tp(self, sizes: Sizes) -> float:
        """Returns the elements per device if fsdp were 1."""
        return self.padded(sizes[TP]) / (sizes[TP] if self.tp else 1)

    def whole(self, work: Workload) -> float:
        """Returns the elements of the loaded weight."""
        return self.over_tp(work.sizes) * self.split.shared_by(work.tp)

    def loaded_bytes(self, work: Workload) -> float:
        """Returns the bytes of the loaded weight, with its gradient before reduction over fsdp."""
        compute = itemsize(self.precision.compute)
        if self.matmul == "float8":
            element_bytes = 1.0
        else:
            # The gathered kernel may be in its form beside the dequantised weight.
            element_bytes = compute + self.packed * (work.shards > 1)
        if self.reduced_bytes(work):
            element_bytes += compute
        loaded = self.whole(work) * element_bytes
        return loaded if self.gathered else loaded / work.shards

    def reduced_bytes(self, work: Workload) -> float:
        """Returns the bytes of the gradient during its reduction."""
        if self.is_frozen(work) or not self.gathered or work.shards == 1:
            return 0.0
        return self.whole(work) * itemsize(self.precision.reduce)

    def stored(self, sizes: Sizes) -> float:
        """Returns the elements a device stores."""
        return self.over_tp(sizes) / (parts(sizes, STORAGE) if self.fsdp else 1)

    def collectives(self, work: Workload) -> Iterator[CollectiveCost]:
        """Yields gathers and gradient reductions.

        Gathers are in the compute dtype or in fewer bits, reductions in the reduction dtype.
        """
        trained = not self.is_frozen(work)
        gradient = self.stored(work.sizes) * itemsize(self.precision.reduce)
        # Sums over these axes wait for the last micro-batch.
        last: Axes = ()
        if work.accumulation > 1:
            last = gradient_sum_axes(stored_split=self.fsdp, used_by_all_tp=False)
        if not self.traced:
            yield from self.loads(work, trained=trained)
            summed = gradient_sum_axes(stored_split=self.fsdp, used_by_all_tp=self.used_by_all_tp)
            axes = tuple(axis for axis in summed if axis not in last)
            yield collective_cost(ALL_REDUCE, axes, self.module, work, gradient, int(trained))
        if trained and not self.tied:
            yield replace(collective_cost(ALL_REDUCE, last, GRADIENTS, work, gradient), once=True)

    def loads(self, work: Workload, *, trained: bool) -> Iterator[CollectiveCost]:
        """Yields the gathers of a weight, and the reductions of its gradient if it is trained.

        A gather and its reduction are over the same devices.
        """
        gathered_itemsize = self.packed or itemsize(self.precision.compute)
        if self.matmul == "float8":
            gathered_itemsize = 1
        num_gathers = 1 + self.again
        group = self.split.shared_by(work.tp)
        groups: list[tuple[Axes, int, float]] = [((TP,), group, self.stored(work.sizes))]
        if self.fsdp and self.gathered:
            groups.append((STORAGE, work.shards, self.over_tp(work.sizes)))
        for axes, devices, elements in groups:
            gathered = elements * group * gathered_itemsize
            reduced = elements * group * itemsize(self.precision.reduce)
            gather = Collective(ALL_GATHER, axes, devices, gathered, self.module)
            reduction = Collective(REDUCE_SCATTER, axes, devices, reduced, self.module)
            yield CollectiveCost(gather, num_gathers)
            yield CollectiveCost(reduction, int(trained))


def weight_of(
    variable: Variable,
    module: str,
    precision: Precision,
    *,
    spec: PartitionSpec | None = None,
    summed: bool = True,
    **facts: Any,
) -> Weight:
    """Returns a parameter of a layer, with the variable's size, padding and split.

    Args:
      spec: replaces the variable's spec where the layout depends on the workload's mesh.
      summed: the gradient is summed over tp unless tp splits the parameter.
      **facts: other fields of `Weight`; `size` and `split` replace the variable's.
    """
    spec = spec_of(variable) if spec is None else spec
    axes = set(chain.from_iterable(map(axes_of, spec)))
    size = math.prod(logical_shape(variable))
    own: dict[str, Any] = {
        "size": size,
        "split": next((split for _, split in padding_of(variable)), ExactDim((size,))),
        "tp": TP in axes,
        "fsdp": not axes.isdisjoint(STORAGE),
        "used_by_all_tp": summed and TP not in axes,
        "adapter": isinstance(variable, nnx.LoRAParam),
    }
    return Weight(module=module, precision=precision, **(own | facts))


def kernel_weights(
    kernel: Variable | StoredKernel, module: str, precision: Precision, **facts: Any
) -> Iterator[Weight]:
    """Yields a projection's kernel, and the scales of one in fewer bits."""
    weight = partial(weight_of, module=module)
    if isinstance(kernel, StoredKernel):
        yield weight(kernel.bits, precision=precision, **packed(kernel), **facts)
        yield weight(kernel.scale, precision=in_float32(precision), packed=scale_bytes(kernel))
    else:
        yield weight(kernel, precision=precision, **facts)


def packed(kernel: StoredKernel) -> dict[str, Any]:
    """Returns facts of the `Weight` of a kernel's bits."""
    size = math.prod(logical_shape(kernel.bits)) / kernel.itemsize
    return {"size": round(size), "packed": kernel.itemsize}


def scale_bytes(kernel: StoredKernel) -> int:
    """Returns the bytes of a scale that is not loaded in float32, else 0."""
    size = itemsize(kernel.scale.dtype)
    return size if size < FLOAT32 else 0


def in_float32(precision: Precision) -> Precision:
    """Returns the dtypes of a weight that is loaded in float32."""
    return replace(precision, compute="float32")


@dataclass(frozen=True)
class Product:
    """Matrix products `[m, k] x [k, n]` of one shape on one device."""

    name: str
    m: int
    k: int
    n: int
    count: int
    bytes: float  # bytes of operands and result of each, through memory
    attention: bool = False  # it is a product of attention, without weights
    # Fraction of it that counts as model FLOPs: about half in causal attention
    counted: float = 1.0
    dtype: str = ""  # float8; empty: the compute dtype
    module: str = ""  # names of the branch and of the layer, as far as known

    @classmethod
    def of(cls, name: str, shape: tuple[int, int, int], itemsize: int, count: int) -> "Product":
        """Returns a product with a weight, all of one itemsize."""
        m, k, n = shape
        return cls(name, m, k, n, count, (m * (k + n) + k * n) * itemsize)

    @property
    def flops(self) -> float:
        """FLOPs: 2 per multiply-add."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True)
class Bytes:
    """Bytes of memory, or of traffic through it."""

    kind: Literal["elementwise", "scores", "logits", "saved", "copied", "workspace", "gradient"]
    """elementwise: traffic of a forward pass, each operation fused into one kernel; scores and
    logits: estimated traffic outside of products, in all passes; saved: activations that the remat
    policy saves; copied: their copies before the backward pass; workspace: activations alive at
    once in the branch's backward pass; gradient: the head's."""
    bytes: float
    module: str = ""  # as in `Product`


Cost = CollectiveCost | Weight | Product | Bytes
Costs = Iterator[Cost]


def collectives_of(cost: Cost, work: Workload) -> Iterator[CollectiveCost]:
    """Yields the collectives of a cost."""
    if isinstance(cost, Weight):
        yield from cost.collectives(work)
    elif isinstance(cost, CollectiveCost):
        yield cost


def collective_cost(
    kind: str, axes: Axes, module: str, work: Workload, size: float, count: int = 1
) -> CollectiveCost:
    """Returns a collective of all devices along `axes`, with a message of `size` bytes."""
    return CollectiveCost(Collective(kind, axes, parts(work.sizes, axes), size, module), count)


def enter(
    module: str,
    work: Workload,
    size: float,
    *,
    split: bool,
    again: bool,
    gathered: float | None = None,
) -> list[CollectiveCost]:
    """Returns the collectives of `enter_parallel` for an activation of `size` bytes.

    Args:
      split: the activation is split along the sequence.
      again: the backward pass repeats the forward collective.
      gathered: bytes that the forward collective moves, by default `size`.
    """
    cost = partial(collective_cost, axes=(TP,), module=module, work=work)
    if not split:
        return [cost(ALL_REDUCE, size=size)]
    gathered = size if gathered is None else gathered
    return [
        cost(ALL_GATHER, size=gathered, count=1 + again),
        cost(REDUCE_SCATTER, size=size),
    ]


def leave(
    module: str, work: Workload, size: float, *, split: bool, again: bool
) -> list[CollectiveCost]:
    """Returns the collectives of `leave_parallel`; arguments as for `enter`."""
    forward = 1 + again
    if not split:
        return [collective_cost(ALL_REDUCE, (TP,), module, work, size, forward)]
    return [
        collective_cost(REDUCE_SCATTER, (TP,), module, work, size, forward),
        collective_cost(ALL_GATHER, (TP,), module, work, size),
    ]


def ring(module: str, work: Workload, size: float, times: int) -> CollectiveCost:
    """Returns the permutes of `times` rings over tp for an activation of `size` bytes.

    See `layers/overlap.py`.
    """
    return collective_cost(PERMUTE, (TP,), module, work, size / work.tp, times * (work.tp - 1))


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element."""
    return jnp.dtype(dtype).itemsize


def compute_itemsize(layer: Any) -> int:
    """Returns the bytes of an element of the layer's compute dtype."""
    return itemsize(layer.precision.compute)


@singledispatch
def branch_costs(branch: Branch, work: Workload, *, read: bool) -> Costs:
    """Yields the costs of a branch without arrays; `read`: the backward pass reads its result."""
    raise NotImplementedError  # `has_formulas` is false


def has_formulas(branch: Branch) -> bool:
    """Returns whether `branch_costs` supports the branch.

    A subclass has its base's formulas unless it overrides a method that computes.
    """
    kind = type(branch)
    registered = next(base for base in kind.__mro__ if base in branch_costs.registry)
    return registered is not object and all(
        getattr(kind, method, None) is getattr(registered, method, None)
        for method in ("__call__", "project", "output")
    )


def column_costs(layer: ColumnParallelLinear, work: Workload, name: str) -> Costs:
    """Yields the costs of a column layer; `name` labels its product."""
    tokens = work.tokens
    compute = compute_itemsize(layer)
    recomputed = work.reprojects
    local = [f.local(work.tp) for f in layer.features]
    weight = partial(weight_of, module=COLUMN, precision=layer.precision)
    for kernel in layer.kernels:
        yield from projection_weights(layer, kernel, COLUMN, work, STORAGE)
    for bias in layer.biases:
        yield weight(bias, again=recomputed)
    hidden = moved = tokens * layer.in_features * compute
    if layer.matmul == "float8":
        moved = tokens * (layer.in_features + FLOAT32)
        yield from column_gradient_costs(layer, work)
    split = work.is_split(layer.sequence_parallel)
    chunks = 1
    saved_input = moved
    if layer.transport.caller_communicates:
        saved_input = 0
    elif layer.transport.is_ring(work.tp, split=split):
        chunks = work.tp
        saved_input = moved // chunks
        again = not recomputed and (not work.frozen or bool(layer.adapted))
        yield ring(COLUMN, work, moved, work.num_evals(recomputed, again))
        yield ring(COLUMN, work, hidden, 1)
    else:
        if layer.adapted and not work.recomputes:  # adapters dequantise their input
            saved_input = hidden
        yield from enter(COLUMN, work, hidden, split=split, again=work.regathers, gathered=moved)
    shape = tokens // chunks, layer.in_features, sum(local)
    yield from projection_products(layer, name, shape, work, chunks=chunks, recomputed=recomputed)
    yield Bytes("workspace", 3 * hidden)
    outputs = tokens * sum(local)
    # Outputs are in float32 when they are scaled, before the cast.
    scaled = outputs * (FLOAT32 - compute) * (layer.matmul == "float8")
    saved = {
        "none": saved_input + scaled,
        "save_gathered": saved_input,
        "save_dots": outputs * compute,
    }
    yield Bytes("saved", saved.get(work.remat, 0))
    for i, lora in zip(layer.adapted, layer.loras, strict=True):
        features = layer.in_features, local[i]
        yield from lora_costs(lora, work, features, weight, recomputed=recomputed)


def row_costs(layer: RowParallelLinear, work: Workload, name: str, *, read: bool) -> Costs:
    """Yields the costs of a row layer."""
    compute = compute_itemsize(layer)
    split = work.is_split(layer.sequence_parallel)
    recomputed = read and work.rereduces
    local = layer.in_features.local(work.tp)
    weight = partial(weight_of, module=ROW, precision=layer.precision)
    yield from projection_weights(layer, layer.kernel, ROW, work, (TP,))
    if layer.matmul == "float8":  # each token's maximum
        again = work.recomputes and (not work.frozen or recomputed)
        yield collective_cost(
            ALL_REDUCE, (TP,), ROW, work, FLOAT32 * work.tokens, work.num_evals(again, 0)
        )
    if layer.bias is not None:
        summed = split or layer.transport.caller_communicates
        yield weight(layer.bias, summed=summed, again=read and work.recomputes)
    chunks = 1
    size = work.tokens * layer.features * compute
    if layer.transport.is_ring(work.tp, split=split):
        chunks = work.tp
        yield ring(ROW, work, size, work.num_evals(recomputed, 1))
    elif not layer.transport.caller_communicates:  # else the block sums all branches at once
        yield from leave(ROW, work, size, split=split, again=recomputed)
    shape = work.tokens // chunks, local, layer.features
    yield from projection_products(layer, name, shape, work, chunks=chunks, recomputed=recomputed)
    if read and work.saves_reduced:
        yield Bytes("saved", work.between(layer.sequence_parallel) * layer.features * compute)
    for lora in layer.loras:
        features = local, layer.features
        yield from lora_costs(lora, work, features, weight, recomputed=recomputed)


def projection_weights(
    layer: Projection, kernel: Variable | StoredKernel, module: str, work: Workload, axes: Axes
) -> Costs:
    """Yields the costs of loading a kernel; `axes` split its input features."""
    yield from kernel_weights(kernel, module, layer.precision, matmul=layer.matmul)
    if layer.matmul == "float8" and not isinstance(kernel, StoredKernel):  # for each gather
        *_, features = logical_shape(kernel)
        *_, split_by = spec_of(kernel)
        # One scale for each output feature
        scales = weight_of(
            kernel,
            module,
            in_float32(layer.precision),
            spec=PartitionSpec(split_by),
            size=features,
            split=dict(padding_of(kernel)).get(-1, ExactDim((features,))),
        )
        yield collective_cost(
            ALL_REDUCE, axes, module, work, FLOAT32 * scales.stored(work.sizes), 2
        )
        yield from scales.loads(work, trained=False)


def projection_products(
    layer: Projection,
    name: str,
    shape: tuple[int, int, int],
    work: Workload,
    *,
    chunks: int,
    recomputed: bool,
) -> Costs:
    """Yields the products of a layer.

    With `matmul` in 8 bits, only the product of the weight's gradient is in the compute dtype.
    """
    m, k, n = shape
    compute = compute_itemsize(layer)
    product = Product.of(name, shape, compute, chunks * work.num_evals(recomputed))
    if layer.matmul == "compute":
        yield product
        return
    in_float8 = chunks * work.num_evals(recomputed, 1)
    # The average of the forward product and the input's gradient
    moved = m * (k + n) * (1 + compute) / 2 + k * n
    yield replace(product, count=in_float8, bytes=moved, dtype=layer.matmul)
    yield replace(product, count=product.count - in_float8)
    # An estimate: reads for maxima and to quantise, and writes of 8 bits, of input and gradient.
    yield Bytes("elementwise", chunks * m * (k * (2 * compute + 1) + n * compute))


def column_gradient_costs(layer: ColumnParallelLinear, work: Workload) -> Costs:
    """Yields the collectives over tp that quantise the outputs' gradients.

    All-reduces find each token's maximum, and gathers average the gradients of shared heads.
    """
    for f in layer.features:
        group = f.shared_by(work.tp)
        size = FLOAT32 * work.tokens
        yield collective_cost(ALL_REDUCE, (TP,), COLUMN, work, size)
        yield CollectiveCost(
            Collective(ALL_GATHER, (TP,), group, group * size * f.local(work.tp), COLUMN), 1
        )


def lora_costs(
    lora: Lora,
    work: Workload,
    features: tuple[int, int],
    weight: Callable[[Variable], Weight],
    *,
    recomputed: bool,
) -> Costs:
    """Yields the costs of an adapter with local `features`.

    `weight` is `weight_of` in its layer. The product of A and B may be recomputed.
    """
    a = weight(lora.a)
    compute = itemsize(a.precision.compute)
    yield a
    yield weight(lora.b)
    in_features, out_features = features
    a_count = work.num_evals(work.reprojects, 2)
    b_count = work.num_evals(recomputed, 2)
    yield Product.of("adapter's A", (work.tokens, in_features, lora.rank), compute, a_count)
    yield Product.of("adapter's B", (work.tokens, lora.rank, out_features), compute, b_count)
    if not work.reprojects:
        yield Bytes("saved", work.tokens * lora.rank * compute)


def norm_costs(
    norm: Norm, work: Workload, *, inside: bool = True, recomputed: bool = False
) -> Costs:
    """Yields the costs of a norm.

    A backward pass reloads scales inside of blocks, and biases if they are recomputed.
    """
    split = work.is_split(norm.sequence_parallel)
    for param, again in ((norm.scale, inside), (norm.bias, recomputed)):
        if param is not None:
            yield weight_of(param, norm.name, norm.precision, summed=split, again=again)
    if inside:
        residual = work.between(norm.sequence_parallel) * norm.features
        yield Bytes("elementwise", 2 * residual * itemsize(norm.precision.compute), norm.name)
        if not work.recomputes:  # the input, and the result for the gradient of the scale
            yield Bytes("saved", FLOAT32 * residual * work.num_gradients)


@branch_costs.register
def _attention_costs(layer: CausalSelfAttention, work: Workload, *, read: bool) -> Costs:
    yield from column_costs(layer.qkv, work, "q, k, v")
    for norm in layer.qk_norms:
        for param in (norm.scale, norm.bias):
            if param is not None:
                yield weight_of(param, ATTEND, norm.precision)
        if norm.kind == "projection":
            # The mean square over tp: a float for each token, forward, recomputed and backward.
            size = work.tokens * FLOAT32
            yield collective_cost(ALL_REDUCE, (TP,), ATTEND, work, size, 3)
    if layer.sinks is not None:
        yield weight_of(layer.sinks, ATTEND, in_float32(layer.precision))
    yield from heads_costs(layer, work)
    yield from row_costs(layer.out, work, "attention out", read=read)


@branch_costs.register
def _latent_attention_costs(layer: LatentAttention, work: Workload, *, read: bool) -> Costs:
    inputs = [layer.latent_down]
    yield from norm_costs(layer.latent_norm, work)
    if layer.config.query_rank:
        inputs.append(layer.query_down)
        yield from norm_costs(layer.query_norm, work)
    yield from latents_costs(inputs, work)
    yield from column_costs(layer.query_up, work, "queries")
    yield from column_costs(layer.latent_up, work, "keys, values")
    yield from heads_costs(layer, work)
    yield from row_costs(layer.out, work, "attention out", read=read)


def latents_costs(inputs: Sequence[DownProjection], work: Workload) -> Costs:
    """Yields the costs of down projections, whose latents enter the tp group together."""
    split = work.is_split(inputs[0].sequence_parallel)
    own = of_own_tokens(work, split=split)
    token = 0
    for down in inputs:
        token += down.kernel.shape[1] * compute_itemsize(down)
        yield from down_costs(down, own, split=split, recomputed=work.reprojects)
    again = work.regathers
    yield from enter(LATENT, work, work.tokens * token, split=split, again=again)
    saved = {"none": 2 * work.tokens, "save_gathered": work.tokens, "save_dots": own.tokens}
    yield Bytes("saved", saved.get(work.remat, 0) * token)


def of_own_tokens(work: Workload, *, split: bool) -> Workload:
    """Returns the work of a layer that reads a device's own tokens."""
    return replace(work, length=work.length // work.tp) if split else work


def down_costs(down: DownProjection, own: Workload, *, split: bool, recomputed: bool) -> Costs:
    """Yields the costs of a down projection, without the memory of its result."""
    precision = down.precision
    features, rank = down.kernel.shape
    weight = partial(weight_of, module=LATENT, precision=precision, summed=split)
    yield from kernel_weights(down.kernel, LATENT, precision, summed=split)
    shape = own.tokens, features, rank
    yield Product.of("latent", shape, itemsize(precision.compute), own.num_evals(recomputed))
    for lora in down.loras:
        yield from lora_costs(lora, own, (features, rank), weight, recomputed=recomputed)


def heads_costs(layer: CausalSelfAttention, work: Workload) -> Costs:
    """Yields the costs of attention without projections."""
    config = layer.config
    compute = compute_itemsize(layer)
    use = config.use_on(work, layer.precision.compute)
    kernel, _ = pick_kernel(config.attention, use)
    heads, kv_heads = config.heads.on_device(work.tp)
    value_dim = use.value_head_dim or config.head_dim
    results = work.tokens * heads * value_dim

    attention = config.context_attention(work.tp)
    method, _ = attention.method(work)
    # On average, queries are as wide as keys.
    head_bytes = (config.head_dim + value_dim) * compute // 2
    result_read = not work.frozen or bool(layer.out.loras) or config.attention_gate
    yield from context_costs(attention, method, head_bytes, work, result_read=result_read)
    # `save_dots` also saves the result of a kernel.
    saves_result = kernel.can_save_result and work.remat == "save_dots"
    recomputed = work.recomputes and not saves_result
    scores = _device_scores(layer, kernel, method, work)
    yield from _score_products(
        layer, kernel, scores, work, value_dim=value_dim, recomputed=recomputed
    )
    if kernel.streams_scores:
        yield Bytes("scores", scores.size * FLOAT32 * SCORE_PASSES)
    stored_kv, group, _ = config.heads.stored(work.tp)
    rotated = stored_kv * (group + 1) * config.head_dim // work.tp
    yield Bytes("elementwise", work.tokens * 2 * rotated * compute, ATTEND)
    # The gate reads results and gates, writes products, and saves the gates' sigmoid too.
    if config.attention_gate:
        yield Bytes("elementwise", 3 * results * compute, ATTEND)
        yield Bytes("saved", 3 * results * compute * (not work.recomputes))
    # Two arrays of scores in float32: the scores or their gradient, and a constant that the mask
    # selects, which XLA takes out of the loop over the blocks. Two in the compute dtype: the
    # softmax, in the layouts of two products.
    stored_scores = scores.size * kernel.stores_scores
    yield Bytes("workspace", stored_scores * 2 * (FLOAT32 + compute))
    if not work.recomputes:
        # Scores before and after the softmax, and queries and keys before their rotation, in
        # float32. With several kv heads the backward loop reads the scores in another layout than
        # the forward loop writes. XLA copies both: the second after it frees the first, but (as
        # compiled) with two kv heads before.
        rotated = work.tokens * (heads + kv_heads) * config.head_dim
        yield Bytes("saved", FLOAT32 * 2 * stored_scores + (FLOAT32 + compute) * rotated)
        yield Bytes("copied", FLOAT32 * stored_scores * ((kv_heads > 1) + (kv_heads == 2)))
    if saves_result:
        yield Bytes("saved", results * compute + work.tokens * heads * FLOAT32)


class _Scores(NamedTuple):
    """The attention scores of a device, as blocks `[m, n]`."""

    num_blocks: int  # over rows and heads
    m: int  # queries of a block
    n: int  # keys of a block
    counted: float  # fraction that the mask keeps

    @property
    def size(self) -> int:
        """Elements of all blocks."""
        return self.num_blocks * self.m * self.n


def _device_scores(
    layer: CausalSelfAttention, kernel: Kernel, method: Method, work: Workload
) -> _Scores:
    heads, _ = layer.config.heads.on_device(work.tp)
    window = layer.config.sliding_window
    # The queries of the device with the most work
    size = chunk_size(work.length, work.sizes[CP], zigzag=work.zigzag)
    last = range(work.length - size, work.length)
    chunks = (range(size), last) if work.zigzag else (last,)
    if method == "ulysses":
        heads //= work.sizes[CP]
        chunks = (range(work.length),)
    number, m, n = kernel.products(chunks, window)
    counted = num_scores(chunks, window) / (number * m * n)
    return _Scores(work.rows * heads * number, m, n, counted)


def _score_products(
    layer: CausalSelfAttention,
    kernel: Kernel,
    scores: _Scores,
    work: Workload,
    *,
    value_dim: int,
    recomputed: bool,
) -> Iterator[Product]:
    head_dim = layer.config.head_dim
    heads, kv_heads = layer.config.heads.on_device(work.tp)
    num_blocks, m, n, counted = scores
    # Keys and values are read once for the queries of their group.
    read = (heads + kv_heads) / (2 * heads) if work.once else 1.0
    moved = m * (head_dim + value_dim) * compute_itemsize(layer) * read
    if kernel.streams_scores and not work.once:
        moved += m * n * FLOAT32
    product = partial(Product, bytes=moved, attention=True, counted=counted, module=ATTEND)
    # A kernel that does not hold the scores computes them again in its backward pass.
    num_backward = 2 if kernel.stores_scores or work.once else 3
    score_runs = work.num_evals(recomputed, num_backward)
    yield product("scores", m, head_dim, n, num_blocks * score_runs)
    yield product("weighted values", m, n, value_dim, num_blocks * work.num_evals(recomputed, 2))


def context_costs(
    attention: ContextAttention,
    method: Method,
    head_bytes: int,
    work: Workload,
    *,
    result_read: bool = True,
) -> Costs:
    """Yields the collectives of attention over cp, and the memory of what they exchange.

    `head_bytes` is the size of one head of one token. `result_read`: the backward pass reads the
    output's input.
    """
    cp = work.sizes[CP]
    if cp == 1:
        return
    token = work.tokens * head_bytes
    recomputed = work.recomputes
    runs = work.num_evals(recomputed, 1)
    reach = halo(work.length, cp, attention.window, zigzag=work.zigzag)
    if method == "ulysses":
        shared = attention.ulysses_kv_heads(cp)
        for heads in (attention.queries, shared, shared):
            yield collective_cost(ALL_TO_ALL, CONTEXT, ATTEND, work, heads * token, runs)
        count = work.num_evals(recomputed and result_read, 1)
        yield collective_cost(ALL_TO_ALL, CONTEXT, ATTEND, work, attention.queries * token, count)
        exchanged = (attention.queries + 2 * shared) * token
    elif reach is None:
        size = attention.keys * token * cp
        num_gathers = 2 * work.num_evals(recomputed, 0)
        yield collective_cost(ALL_GATHER, CONTEXT, ATTEND, work, size, num_gathers)
        yield collective_cost(REDUCE_SCATTER, CONTEXT, ATTEND, work, size, 2)
        exchanged = 2 * size
    else:
        position = 2 * attention.keys * head_bytes * work.rows
        for hop, tokens in hops(reach, chunk_size(work.length, cp, zigzag=work.zigzag)):
            count = num_routes(cp, hop, zigzag=work.zigzag) * runs
            yield collective_cost(PERMUTE, CONTEXT, ATTEND, work, position * tokens, count)
        exchanged = position * (work.length // cp + (1 + work.zigzag) * reach)
    yield Bytes("workspace", exchanged)
    if not recomputed:
        yield Bytes("saved", exchanged)


@branch_costs.register
def _mlp_costs(layer: MLP, work: Workload, *, read: bool) -> Costs:
    columns = num_columns(layer.config)
    features = work.tokens * layer.hidden.padded(work.tp) // work.tp
    yield from column_costs(layer.columns, work, "gate, up" if columns == 2 else "up")
    yield from row_costs(layer.down, work, "down", read=read)
    further = 0
    if layer.config.activation == XIELU:
        for alpha in (layer.alpha_p, layer.alpha_n):
            yield weight_of(alpha, XIELU, layer.precision)
        # The input, its exponent and its square in float32; and two masks
        further = (3 * FLOAT32 + 2) * features
    yield from hidden_costs(columns, work, features * compute_itemsize(layer), further)


def num_columns(config: MLPConfig) -> int:
    """Returns how many kernels multiply the input of an MLP."""
    return 2 if config.mlp == "gated" else 1


def hidden_costs(columns: int, work: Workload, features: int, further: int) -> Costs:
    """Yields the costs of an MLP between its products.

    `features` are bytes of the hidden features, `further` bytes of other saved arrays.
    """
    yield Bytes("elementwise", (columns + 1) * features)
    # The gate, up, sigmoid, silu, its derivative and the product
    saved = 3 * columns * features + further
    yield Bytes("workspace", saved)
    if not work.recomputes:
        yield Bytes("saved", saved)


@branch_costs.register
def experts_costs(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Costs:
    """Yields the costs of experts under uniform routing."""
    config = layer.config
    experts = config.num_experts
    split = work.is_split(layer.sequence_parallel)
    whole = partial(weight_of, module=EXPERTS, summed=split)
    whole_in_float32 = partial(whole, precision=in_float32(layer.precision))
    yield whole_in_float32(layer.router)
    if config.router_bias:
        yield whole_in_float32(layer.router_bias, again=work.recomputes)
    placement = layer.placement(work.tokens, work.tp, work.shards, trained=not work.frozen)
    yield from _stacked_weights(layer, work, gathered=placement.shards == 1)
    if config.dense_mlp:
        yield whole(layer.input_scale, precision=layer.precision)
        yield whole_in_float32(layer.router_scale)
        yield whole_in_float32(layer.expert_scale)
    token = work.tokens * compute_itemsize(layer)
    hidden = token * layer.width
    exchanged = token * _exchanged(layer)
    if config.experts_rank:
        yield from _experts_latents_costs(layer, work, read=read)
        # The projection from latents reads the sum.
        read = True
    choices = FLOAT32 * work.tokens * 2 * config.experts_per_token
    gate = FLOAT32 * work.tokens
    for entered in (choices + gate * config.shared_experts_gate, exchanged):
        yield from enter(EXPERTS, work, entered, split=split, again=work.regathers)
    reduced = read and work.rereduces
    yield from leave(EXPERTS, work, exchanged, split=split, again=reduced)
    shards = placement.shards
    if shards > 1:
        exchange = partial(collective_cost, axes=STORAGE, module=EXPERTS, work=work)
        for size, forward, backward, again in (
            (choices, ALL_GATHER, REDUCE_SCATTER, work.recomputes),
            (hidden, ALL_GATHER, REDUCE_SCATTER, True),
            (hidden, REDUCE_SCATTER, ALL_GATHER, reduced),
        ):
            yield exchange(forward, size=shards * size, count=work.num_evals(again, 0))
            yield exchange(backward, size=shards * size)
    # Gradients of scores and normalisers, which one device of a tp group sums up
    if not split:
        yield collective_cost(ALL_REDUCE, (TP,), EXPERTS, work, FLOAT32 * (experts + 1) * work.rows)
    yield from _expert_work(layer, work, placement, read=read)
    yield from _shared_costs(layer, work, read=read)


def _exchanged(layer: MixtureOfExperts) -> int:
    """Returns the features of a token that move over tp: the experts', and shared experts'."""
    beside = layer.d_model if layer.config.shared_experts else 0
    return layer.width + (beside if layer.config.experts_rank else 0)


def _experts_latents_costs(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Costs:
    split = work.is_split(layer.sequence_parallel)
    own = of_own_tokens(work, split=split)
    # Latents are saved where the gathered ones are.
    recomputed = work.reprojects and work.regathers
    yield from down_costs(layer.latent_down, own, split=split, recomputed=recomputed)
    yield from down_costs(layer.latent_up, own, split=split, recomputed=read and work.reprojects)
    features = {"none": layer.width, "save_dots": layer.width + read * layer.d_model}
    yield Bytes("saved", features.get(work.remat, 0) * own.tokens * compute_itemsize(layer))


def _stacked_weights(
    layer: MixtureOfExperts, work: Workload, *, gathered: bool
) -> Iterator[Weight]:
    config = layer.config
    # The split of the layer's arrays is another mesh's.
    stacked = StackedDims.of(layer.width, config, work.tp, work.shards)
    chosen = config.experts_per_token / config.num_experts

    def weight(
        variable: Variable,
        dims: str,
        precision: Precision = layer.precision,
        active: float = chosen,
        **facts: Any,
    ) -> Weight:
        return weight_of(
            variable,
            EXPERTS,
            precision,
            spec=stacked.spec(dims),
            split=stacked.sizes["F" if "F" in dims else "E"],
            gathered=gathered,
            active=active,
            **facts,
        )

    for name, dims in config.projections().items():
        without_inputs = dims[0] + dims[2]
        kernel = getattr(layer, name)
        if isinstance(kernel, StoredKernel):
            yield weight(kernel.bits, dims, **packed(kernel))
            scale_dims = dims if kernel.scale.shape[-2] > 1 else without_inputs
            in_full = in_float32(layer.precision)
            # Scales are not parameters: a token leaves none unused.
            stored = scale_bytes(kernel)
            yield weight(kernel.scale, scale_dims, in_full, active=1.0, packed=stored)
        else:
            yield weight(kernel, dims)
        if config.experts_bias:
            # The weights of experts have a gradient.
            again = dims[2] == "D" or work.reprojects
            yield weight(getattr(layer, f"{name}_bias"), without_inputs, again=again)
        if lora := getattr(layer, f"{name}_lora", None):
            yield weight(lora.a, f"{dims[:2]}r")
            yield weight(lora.b, f"Er{dims[2]}")


@branch_costs.register
def experts_beside_mlp_costs(layer: ExpertsBesideMLP, work: Workload, *, read: bool) -> Costs:
    """Yields the costs of experts, a dense MLP and their norms.

    `read` does not matter, because norms read both results.
    """
    norms = (layer.mlp_norm, layer.experts_norm, layer.mlp_after_norm, layer.experts_after_norm)
    for norm in norms:
        yield from norm_costs(norm, work)
    yield from _mlp_costs(layer.mlp, work, read=True)
    yield from experts_costs(layer.experts, work, read=True)


def _shared_costs(layer: MixtureOfExperts, work: Workload, *, read: bool) -> Costs:
    config = layer.config
    if not config.shared_experts:
        return
    shared = layer.shared
    hidden = work.tokens * shared.hidden.local(work.tp)
    gated = FLOAT32 * hidden * config.shared_experts_gate
    yield from hidden_costs(num_columns(config), work, hidden * compute_itemsize(layer), gated)
    projections = (
        column_costs(shared.columns, work, "shared experts' gate, up"),
        row_costs(shared.down, work, "shared experts' down", read=read),
    )
    for cost in chain(*projections):
        if isinstance(cost, Weight):
            # The gradient of the gate reads the bias of the sum.
            gates_bias = config.shared_experts_gate and not cost.tp
            again = cost.again or (gates_bias and work.recomputes)
            yield replace(cost, module=EXPERTS, again=again)
        elif not isinstance(cost, Bytes) or cost.kind != "workspace":
            # The input and its gradients are the experts', too.
            yield cost
    if not config.shared_experts_gate:
        return
    if not work.regathers:
        yield Bytes("saved", FLOAT32 * work.tokens)
    split = work.is_split(layer.sequence_parallel)
    yield weight_of(layer.shared_gate, EXPERTS, in_float32(layer.precision), summed=split)
    shape = work.between(layer.sequence_parallel), layer.d_model, 1
    count = work.num_evals(work.recomputes)
    yield Product.of("shared experts' gate", shape, FLOAT32, count)


def _expert_work(
    layer: MixtureOfExperts, work: Workload, placement: Placement, *, read: bool
) -> Costs:
    """Yields the costs of products, and of memory, without collectives."""
    config = layer.config
    compute = compute_itemsize(layer)
    inputs = layer.width
    tokens = work.between(layer.sequence_parallel)
    columns = num_columns(config)
    hidden_width = columns * placement.width
    method, _ = pick_method(config.grouped, work.platform)
    dense = is_dense(method, work.platform)
    yield from _expert_products(layer, work, placement, dense=dense, read=read)
    rows = 2 * (placement.part_rows + placement.rows) * inputs
    yield Bytes(
        "elementwise", compute * ((columns + 1) * placement.part_rows * placement.width + rows)
    )
    if placement.shards == 1 and work.shards > 1:
        # The loop over layers copies gradients; gathering by features reorders kernels too.
        copies = 2
        if config.stored_by_expert(work.tp, work.shards):
            copies = int(not work.frozen)
        kernels = (columns + 1) * placement.experts * inputs * placement.width
        yield Bytes("elementwise", compute * copies * kernels)

    gathered = 2 * (work.shards - 1) * work.tokens * inputs
    yield Bytes(
        "workspace", compute * (placement.part_rows * (3 * hidden_width + 2 * inputs) + gathered)
    )
    if dense:  # rows repeated for each expert, in two products at a time
        repeated_rows = placement.experts * placement.part_rows
        yield Bytes("workspace", compute * 2 * repeated_rows * max(placement.width, inputs))
    yield Bytes("saved", INT32 * tokens * config.experts_per_token)
    hidden = work.tokens * _exchanged(layer) * compute
    if not work.recomputes:
        scores = 4 * FLOAT32 * tokens * config.num_experts
        features = placement.part_rows * placement.width * (3 * columns * compute + FLOAT32)
        yield Bytes("saved", features + hidden + scores)
    if work.remat == "save_gathered":
        yield Bytes("saved", hidden + 2 * FLOAT32 * work.tokens * config.experts_per_token)
    if work.remat == "save_dots":
        yield Bytes("saved", compute * placement.part_rows * hidden_width)
    # The row layer of shared experts saves the sum.
    if read and work.saves_reduced and (config.experts_rank or not config.shared_experts):
        yield Bytes("saved", tokens * inputs * compute)


def _expert_products(
    layer: MixtureOfExperts, work: Workload, placement: Placement, *, dense: bool, read: bool
) -> Costs:
    # Products compute the rows routed to the device's experts, elementwise operations all rows of a
    # part. Dense products multiply all these with all experts.
    config = layer.config
    compute = compute_itemsize(layer)
    inputs = layer.width
    width = num_columns(config) * placement.width
    reduced = read and work.rereduces
    count = work.num_evals(work.recomputes)
    shape = work.between(layer.sequence_parallel), layer.d_model, config.num_experts
    yield Product.of("router", shape, FLOAT32, count)
    down_count = work.num_evals(reduced)
    products = [
        ("experts' gate, up", inputs, width, work.num_evals(work.reprojects)),
        ("experts' down", placement.width, inputs, down_count),
    ]
    sizes = {"D": inputs, "F": placement.width}
    for name, dims in config.projections().items():
        if lora := getattr(layer, f"{name}_lora", None):
            a_count = work.num_evals(work.reprojects, 2)
            b_count = work.num_evals(reduced, 2) if name == "down" else a_count
            products.append((f"A of experts' {name}", sizes[dims[1]], lora.rank, a_count))
            products.append((f"B of experts' {name}", lora.rank, sizes[dims[2]], b_count))
            if not work.reprojects:
                yield Bytes("saved", placement.part_rows * lora.rank * compute)
    rows = placement.experts * placement.part_rows if dense else placement.rows
    for name, k, n, count in products:
        moved = (rows * k + placement.part_rows * n + placement.experts * k * n) * compute
        yield Product(name, rows, k, n, count, moved, counted=placement.rows / rows)
    if config.experts_bias:
        shape = placement.shards * work.tokens, placement.experts, inputs
        yield Product.of("experts' biases", shape, compute, down_count)
        if not work.frozen:  # gradients: sums over the rows of each expert
            shape = placement.experts, placement.part_rows, width
            yield Product.of("gradients of experts' biases", shape, compute, 1)


def embedding_costs(layer: VocabParallelEmbedding, work: Workload, *, exchanges: bool) -> Costs:
    """Yields the costs of gathering the table over fsdp, or exchanging looked-up rows."""
    has_rows = layer.token_rows is not None
    if has_rows:
        work = replace(work, frozen=False)
    yield Weight(
        module=EMBEDDING,
        size=layer.vocab_size * layer.features,
        precision=layer.precision,
        split=PaddedDim((layer.vocab_size,)),
        again=False,
        gathered=not exchanges,
        adapter=has_rows,
        tied=has_rows and bool(layer.tokens),  # `_token_row_costs` has the sum over dp
    )
    token = layer.features * compute_itemsize(layer)
    if exchanges:
        rows = work.between(layer.sequence_parallel) * token
        ids = work.shards * work.tokens * INT32
        count = 1 + (not work.frozen)
        yield collective_cost(ALL_GATHER, STORAGE, EMBEDDING, work, ids)
        yield collective_cost(ALL_TO_ALL, STORAGE, EMBEDDING, work, rows, count)
    split = work.is_split(layer.sequence_parallel)
    yield from leave(EMBEDDING, work, work.tokens * token, split=split, again=False)
