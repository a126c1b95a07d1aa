"""Records of a layer's costs: weights, collectives, products, memory traffic and memory.

`layer_costs` yields them, and `step_costs` sums them. They derive from a layer's sizes and one device's workload, not
from the layer's code, so that a comparison with the jaxpr and the compiled program finds mistakes in both.

Bytes that a device sends over tp for activations, in units of (t-1)/t * batch * sequence * d_model * itemsize:

| layer            | all-reduce: forward, recomputed, backward | sequence-parallel: forward, recomputed, backward |
|------------------|-------------------------------------------|--------------------------------------------------|
| column           | 0, 0, 2                                   | 1, 1, 1                                          |
| column, ring     |                                           | 1, 1, 2                                          |
| row              | 2, 2, 0                                   | 1, 1, 1                                          |
| row, ring        |                                           | 1, 1, 1                                          |
| embedding        | 2, never, 0                               | 1, never, 1                                      |
| head             | 0, never, 2                               | 1, never, 1                                      |

The middle number applies if the backward pass reads values that the remat policy does not save (`layers/remat.py`); it
never reads a block's last sum. Weights are gathered over fsdp in the compute dtype, for the forward pass and, in a
block, again for the backward pass. Gradients are reduced in the reduction dtype: over fsdp per micro-batch, over dp
once per step. Megatron-LM (arXiv 1909.08053, 2205.05198), ZeRO stage 3 (arXiv 1910.02054).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxtp.analysis.collective import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Axes, Collective
from jaxtp.layers.activations import LocalShape
from jaxtp.layers.parameter import GRADIENTS, PaddedDim, Precision
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import STORAGE, TP, gradient_sum_axes, parts

FLOAT32 = INT32 = 4
"""Bytes of an element."""

# The remat policies that run again, for the backward pass: products of column layers; gathers of their inputs; sums of
# row layers which the backward pass reads; everything but products with weights.
REPROJECT_POLICIES: tuple[RematPolicy, ...] = ("save_gathered", "save_reduced", "full", "offload")
REGATHER_POLICIES: tuple[RematPolicy, ...] = ("save_dots", "save_reduced", "full", "offload")
REREDUCE_POLICIES: tuple[RematPolicy, ...] = ("full", "offload")
RECOMPUTE_POLICIES: tuple[RematPolicy, ...] = ("save_dots", "save_gathered", "save_reduced", "full", "offload")

SAVED_RESULT_POLICIES: tuple[RematPolicy, ...] = ("save_dots",)
"""Remat policies that save the results of products and of attention kernels."""


@dataclass(frozen=True, kw_only=True)
class Workload(LocalShape):
    """A micro-batch on one device, and how it is processed."""

    remat: RematPolicy = "none"
    """Remat policy of the blocks."""
    frozen: bool = False
    """Only adapters are trained."""
    training: bool = True
    """There is a backward pass."""
    accumulation: int = 1
    """Micro-batches in a step, whose gradients are added up."""

    @property
    def num_gradients(self) -> int:
        """Products in the backward pass of a product with a weight: one if frozen."""
        return 1 if self.frozen else 2

    def num_evals(self, recomputed: bool, num_backward: int) -> int:
        """Returns how often a product runs: forward, recomputed and backward."""
        return 1 + recomputed + num_backward if self.training else 1


@dataclass(frozen=True)
class CollectiveCost:
    """A collective, and how often it runs."""

    collective: Collective
    count: int
    once: bool = False
    """Runs once in a step, for all layers, instead of in each micro-batch and layer."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter, and how its layer loads it (`collectives.load_weight`)."""

    module: str
    """Name of the layer, as `Collective.module` has it."""
    size: int
    """Elements of the whole array, without padding."""
    precision: Precision
    split: PaddedDim | None = None
    """The padding of the dim over tp."""
    tp: bool = True
    """It is split over tp; `fsdp` likewise."""
    fsdp: bool = True
    gathered: bool = True
    """Its parts over fsdp are gathered; else each is used as it is, for the tokens of all devices along fsdp."""
    group: int = 1
    """Neighbours over tp that gather each other's parts."""
    used_by_all_tp: bool = False
    """Its gradient is summed over tp."""
    again: bool = True
    """It is loaded again for the backward pass."""
    adapter: bool = False
    """It is trained where there are adapters, and other weights are not."""
    fixed: bool = False
    """It is never trained."""
    tied: bool = False
    """Another layer has it too, which declares what is done once for both."""
    active: float = 1.0
    """Fraction of its elements that a token uses."""
    transposed: bool = False
    """It is gathered along its last dim, which XLA then brings to the front, for all layers at once."""
    traced: bool = False
    """Its collectives are counted in a traced program, except the sum over dp after the last micro-batch."""

    def used_by(self, tokens: int) -> float:
        """Returns the expected fraction that `tokens` tokens use under uniform routing."""
        return 1 - (1 - self.active) ** tokens

    def is_frozen(self, work: Workload) -> bool:
        """Returns whether it has no gradient."""
        return self.fixed or (work.frozen and not self.adapter)

    def padded(self, tp: int) -> int:
        """Returns the elements of the whole array, padded for `tp`."""
        return self.size if self.split is None else self.size // self.split.size * self.split.padded(tp)

    def over_tp(self, sizes: Mapping[str, int]) -> float:
        """Returns the elements per device if fsdp were 1."""
        return self.padded(sizes[TP]) / (sizes[TP] if self.tp else 1)

    def loaded_bytes(self, work: Workload) -> float:
        """Returns the bytes of the loaded weight, with its gradient before reduction over fsdp."""
        shards = parts(work.sizes, STORAGE)
        reduced = shards > 1 and self.gathered and not self.is_frozen(work)
        each = itemsize(self.precision.compute) + (itemsize(self.precision.reduce) if reduced else 0)
        return self.over_tp(work.sizes) * self.group * each / (1 if self.gathered else shards)

    def stored(self, sizes: Mapping[str, int]) -> float:
        """Returns the elements a device stores."""
        return self.over_tp(sizes) / (parts(sizes, STORAGE) if self.fsdp else 1)

    def stored_bytes(self, sizes: Mapping[str, int]) -> float:
        """Returns the bytes a device stores."""
        return self.stored(sizes) * itemsize(self.precision.param)

    def collectives(self, work: Workload) -> Iterator[CollectiveCost]:
        """Yields gathers in the compute dtype, gradient reductions in the reduction dtype."""
        sizes, trained = work.sizes, work.training and not self.is_frozen(work)
        reduce = itemsize(self.precision.reduce)
        last = gradient_sum_axes(stored_split=self.fsdp, used_by_all_tp=False) if work.accumulation > 1 else ()
        if not self.traced:
            yield from self._loads(work, trained=trained)
        if trained and not self.traced:
            summed = gradient_sum_axes(stored_split=self.fsdp, used_by_all_tp=self.used_by_all_tp)
            each = tuple(axis for axis in summed if axis not in last)
            yield sums_over(self.module, each, sizes, self.stored(sizes) * reduce)
        has_gradient = work.training and (self.adapter or not work.frozen)  # zeros if fixed
        if has_gradient and not self.tied:
            yield replace(sums_over(GRADIENTS, last, sizes, self.stored(sizes) * reduce), once=True)

    def _loads(self, work: Workload, *, trained: bool) -> Iterator[CollectiveCost]:
        sizes = work.sizes
        compute, reduce = itemsize(self.precision.compute), itemsize(self.precision.reduce)
        groups: list[tuple[Axes, int, float]] = [((TP,), self.group, self.stored(sizes) * self.group)]
        if self.fsdp and self.gathered:
            groups.append((STORAGE, parts(sizes, STORAGE), self.over_tp(sizes) * self.group))
        for axes, devices, elements in groups:
            gathers = 1 + (self.again and work.training)
            yield CollectiveCost(Collective(ALL_GATHER, axes, devices, elements * compute, self.module), gathers)
            if trained:
                yield CollectiveCost(Collective(REDUCE_SCATTER, axes, devices, elements * reduce, self.module), 1)


@dataclass(frozen=True)
class Product:
    """Matrix products `[m, k] x [k, n]` of one shape on one device."""

    name: str
    m: int
    k: int
    n: int
    count: int
    bytes: float
    """Bytes of operands and result of each, through memory."""
    attention: bool = False
    """It is a product of attention, without weights."""
    counted: float = 1.0
    """Fraction of it that counts as model FLOPs: about half in causal attention."""
    in_kernel: bool = False
    """A kernel of its own computes it, so that it is no product of the compiled program."""

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

    bytes: float


class ElementwiseTraffic(Bytes):
    """Traffic of elementwise operations in a forward pass, each fused into one kernel."""


class ScoreTraffic(Bytes):
    """Estimated traffic of attention scores outside of products, in all passes."""


class LogitTraffic(Bytes):
    """Estimated traffic of logits outside of products, in all passes."""


class SavedActivations(Bytes):
    """Activations that the remat policy saves for the backward pass."""


class Workspace(Bytes):
    """Activations alive at once in the layer's backward pass."""


class CachedBytes(Bytes):
    """KV cache for these tokens."""


Cost = CollectiveCost | Weight | Product | Bytes


def collectives_of(cost: Cost, work: Workload) -> Iterator[CollectiveCost]:
    """Yields the collectives of a cost."""
    if isinstance(cost, Weight):
        yield from cost.collectives(work)
    elif isinstance(cost, CollectiveCost):
        yield cost


def bytes_sent(costs: Iterable[Cost], work: Workload) -> float:
    """Returns the bytes a device sends."""
    return sum(one.count * one.collective.bytes_sent for cost in costs for one in collectives_of(cost, work))


def within(name: str, costs: Iterable[Cost]) -> Iterator[Cost]:
    """Nests the costs' module names in `name`."""
    for cost in costs:
        if isinstance(cost, CollectiveCost):
            yield replace(cost, collective=replace(cost.collective, scope=f"{name}/{cost.collective.scope}"))
        else:
            yield replace(cost, module=f"{name}/{cost.module}") if isinstance(cost, Weight) else cost


def enter(module: str, work: Workload, size: float, *, split: bool, again: bool) -> Iterator[CollectiveCost]:
    """Yields the collectives of `enter_parallel` for an activation of `size` bytes, maybe split along the sequence.

    `again`: the backward pass repeats the forward collective.
    """
    again, backward = again and work.training, int(work.training)
    if split:
        yield CollectiveCost(Collective(ALL_GATHER, (TP,), work.tp, size, module), 1 + again)
        yield CollectiveCost(Collective(REDUCE_SCATTER, (TP,), work.tp, size, module), backward)
    else:
        yield CollectiveCost(Collective(ALL_REDUCE, (TP,), work.tp, size, module), backward)


def leave(module: str, work: Workload, size: float, *, split: bool, again: bool) -> Iterator[CollectiveCost]:
    """Yields the collectives of `leave_parallel`; arguments as for `enter`."""
    again = again and work.training
    if split:
        yield CollectiveCost(Collective(REDUCE_SCATTER, (TP,), work.tp, size, module), 1 + again)
        yield CollectiveCost(Collective(ALL_GATHER, (TP,), work.tp, size, module), int(work.training))
    else:
        yield CollectiveCost(Collective(ALL_REDUCE, (TP,), work.tp, size, module), 1 + again)


def ring(module: str, work: Workload, size: float, times: int) -> CollectiveCost:
    """Returns the permutes of `times` rings over tp (`layers/overlap.py`) for an activation of `size` bytes."""
    return CollectiveCost(Collective(PERMUTE, (TP,), work.tp, size / work.tp, module), times * (work.tp - 1))


def sums_over(module: str, axes: Axes, sizes: Mapping[str, int], size: float, count: int = 1) -> CollectiveCost:
    """Returns all-reduces of `size` bytes."""
    return CollectiveCost(Collective(ALL_REDUCE, axes, parts(sizes, axes), size, module), count)


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element."""
    return jnp.dtype(dtype).itemsize
