"""The costs of a layer, in the words in which each layer declares them beside its forward pass.

A layer's `costs(share)` yields records: the weights that it loads, the collectives that it asks for, the products that
it computes, the bytes that go through memory outside of products, and what it keeps for its backward pass. They follow
from the layer's sizes and from the share of one device, and say nothing of how the layer is written: that is what makes
it worth comparing them with the jaxpr and with the compiled program. A model's accounts are sums of them
(`models/costs.py`).

Of activations over tp, in units of (t-1)/t * batch * sequence * d_model * bytes sent by a device:

| layer            | all-reduce: forward, again, backward | sequence-parallel: forward, again, backward |
|------------------|--------------------------------------|---------------------------------------------|
| column           | 0, 0, 2                              | 1, 1, 1                                     |
| column, ring     |                                      | 1, 1, 2                                     |
| row              | 2, 2, 0                              | 1, 1, 1                                     |
| row, ring        |                                      | 1, 1, 1                                     |
| embedding        | 2, never, 0                          | 1, never, 1                                 |
| head             | 0, never, 2                          | 1, never, 1                                 |

The embedding's table may stay as fsdp divides it: activations then go over fsdp (`layers/embedding.py`). What attention
moves over cp is in `layers/context.py`.

"Again" is paid where the remat policy does not keep what the backward pass reads (`layers/remat.py`): the gathered
input of a column layer, or in a ring its outputs, as its backward pass gathers anyway. Nothing reads a block's last
sum, so it is never made again. Every other weight is gathered over fsdp for the forward pass and, in a block, again for
the backward pass, in the compute dtype. Its gradient is reduced in the reduction dtype: over fsdp in each micro-batch,
and over dp once in a step, after the last of them. Megatron-LM (arXiv 1909.08053, 2205.05198), ZeRO stage 3 (arXiv
1910.02054).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp

from jaxtp.communication import ALL_GATHER, ALL_REDUCE, PERMUTE, REDUCE_SCATTER, Axes, Collective
from jaxtp.layers.activations import Context, SequenceParallel, is_split
from jaxtp.layers.parameter import GRADIENTS, Precision, Split
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import CONTEXT, STORAGE, TP, copies, parts

FLOAT32 = INT32 = 4
"""Bytes of an element."""

PROJECTIONS_AGAIN: tuple[RematPolicy, ...] = ("save_gathered", "save_reduced", "full", "offload")
"""Policies under which a column layer's products are computed again in the backward pass."""

GATHERS_AGAIN: tuple[RematPolicy, ...] = ("save_dots", "save_reduced", "full", "offload")
"""Policies under which the gathered input of a column layer is gathered again."""

SUMS_AGAIN: tuple[RematPolicy, ...] = ("full", "offload")
"""Policies under which a row layer's sum is made again, where the backward pass reads it."""

ELEMENTWISE_AGAIN: tuple[RematPolicy, ...] = ("save_dots", "save_gathered", "save_reduced", "full", "offload")
"""Policies under which what is no product with weights is computed again."""

RESULTS_KEPT: tuple[RematPolicy, ...] = ("save_dots",)
"""Policies that keep results of products, a kernel of attention's among them, and compute what lies between again."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """One device's share of a micro-batch, for which a layer says what it costs."""

    sizes: Mapping[str, int]
    """Devices along each axis."""

    rows: int
    """Sequences on the device."""

    length: int
    """Tokens in each sequence."""

    remat: RematPolicy = "none"
    """The policy that says what a block keeps for its backward pass."""

    frozen: bool = False
    """Adapters are trained, and nothing else has a gradient."""

    training: bool = True
    """There is a backward pass."""

    packed: bool = False
    """Sequences hold several documents."""

    platform: str | None = "cpu"
    """Kind of device, by which a layer chooses its kernel: cpu, cuda, rocm or tpu; None is not known."""

    accumulation: int = 1
    """Micro-batches in a step, whose gradients are added up."""

    context: Context = "auto"
    """Method of attention over cp that is asked for."""

    zigzag: bool = False
    """Devices along cp hold tokens in the order zigzag (`layers/context.py`)."""

    @property
    def tp(self) -> int:
        """Devices that split each product."""
        return self.sizes[TP]

    @property
    def tokens(self) -> int:
        """Number of tokens on the device inside a pair of parallel layers."""
        return self.rows * self.length // parts(self.sizes, CONTEXT)

    def is_split(self, setting: SequenceParallel) -> bool:
        """Returns whether activations between layers are split over tp along the sequence."""
        return is_split(setting, self.length, self.sizes)

    def between(self, setting: SequenceParallel) -> int:
        """Returns the number of tokens on the device between parallel layers."""
        return self.tokens // (self.tp if self.is_split(setting) else 1)

    @property
    def gradients(self) -> int:
        """Number of products in the backward pass of one with a weight of the model: none of a frozen weight."""
        return 1 if self.frozen else 2

    def passes(self, again: bool, backward: int) -> int:
        """Returns how often a product is computed: forward, again, and `backward` times."""
        return 1 + again + backward if self.training else 1


@dataclass(frozen=True)
class Moves:
    """Collectives of one kind over tp, or over the axes that divide the batch."""

    collective: Collective
    count: int
    once: bool = False
    """It runs after the last micro-batch, for all layers at once; else in each micro-batch and layer."""


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A stored array, and how its layer loads it (`collectives.load_weight`)."""

    module: str
    """Name of the layer, as `Collective.module` has it."""
    size: int
    """Elements of the whole array, without padding."""
    precision: Precision
    split: Split | None = None
    """The padding of the dim over tp."""
    tp: bool = True
    """It is split over tp."""
    fsdp: bool = True
    """It is split over fsdp."""
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
    """Share of its elements that a token uses."""
    transposed: bool = False
    """It is gathered along its last dim, which XLA then brings to the front, for all layers at once."""

    def used_by(self, tokens: int) -> float:
        """Returns the share of its elements that at least one of so many tokens uses, if all are chosen alike."""
        return 1 - (1 - self.active) ** tokens

    def is_frozen(self, share: Share) -> bool:
        """Returns whether it has no gradient."""
        return self.fixed or (share.frozen and not self.adapter)

    def padded(self, tp: int) -> int:
        """Returns the elements of the whole array over tp devices, padding included."""
        return self.size if self.split is None else self.size // self.split.size * self.split.padded(tp)

    def over_tp(self, sizes: Mapping[str, int]) -> float:
        """Returns the elements on a device, fsdp apart."""
        return self.padded(sizes[TP]) / (sizes[TP] if self.tp else 1)

    def loaded_bytes(self, share: Share) -> float:
        """Returns the bytes on a device once it is loaded, with its gradient before that is reduced over fsdp."""
        shards = parts(share.sizes, STORAGE)
        reduced = shards > 1 and self.gathered and not self.is_frozen(share)
        each = itemsize(self.precision.compute) + (itemsize(self.precision.reduce) if reduced else 0)
        return self.over_tp(share.sizes) * self.group * each / (1 if self.gathered else shards)

    def stored(self, sizes: Mapping[str, int]) -> float:
        """Returns the elements that a device stores."""
        return self.over_tp(sizes) / (parts(sizes, STORAGE) if self.fsdp else 1)

    def stored_bytes(self, sizes: Mapping[str, int]) -> float:
        """Returns the bytes that a device stores."""
        return self.stored(sizes) * itemsize(self.precision.param)

    def moves(self, share: Share) -> Iterator[Moves]:
        """Yields gathers in the compute dtype, and reductions of the gradient in the reduction dtype."""
        sizes, trained = share.sizes, share.training and not self.is_frozen(share)
        compute, reduce = itemsize(self.precision.compute), itemsize(self.precision.reduce)
        groups: list[tuple[Axes, int, float]] = [((TP,), self.group, self.stored(sizes) * self.group)]
        if self.fsdp and self.gathered:
            groups.append((STORAGE, parts(sizes, STORAGE), self.over_tp(sizes) * self.group))
        for axes, devices, elements in groups:
            gathers = 1 + (self.again and share.training)
            yield Moves(Collective(ALL_GATHER, axes, devices, elements * compute, self.module), gathers)
            if trained:
                yield Moves(Collective(REDUCE_SCATTER, axes, devices, elements * reduce, self.module), 1)
        last = copies(stored_split=self.fsdp, used_by_all_tp=False) if share.accumulation > 1 else ()
        if trained:
            summed = copies(stored_split=self.fsdp, used_by_all_tp=self.used_by_all_tp)
            each = tuple(axis for axis in summed if axis not in last)
            yield sums_over(self.module, each, sizes, self.stored(sizes) * reduce)
        has_gradient = share.training and (self.adapter or not share.frozen)  # zeros, where it is fixed
        if has_gradient and not self.tied:
            yield replace(sums_over(GRADIENTS, last, sizes, self.stored(sizes) * reduce), once=True)


@dataclass(frozen=True)
class Product:
    """Matrix products `[m, k] x [k, n]` of one shape on one device."""

    name: str
    """Name of what is multiplied."""

    m: int
    k: int
    n: int

    count: int
    """Number of times that it is computed."""

    bytes: float
    """Bytes of operands and result of each, through memory."""

    attention: bool = False
    """It is a product of attention, without weights."""

    counted: float = 1.0
    """Share of it that model FLOPs count: half of a whole square of causal attention."""

    in_kernel: bool = False
    """A kernel of its own computes it, so that it is no product of the compiled program."""

    @classmethod
    def of(cls, name: str, shape: tuple[int, int, int], itemsize: int, count: int) -> "Product":
        """Returns a product with a weight, of operands and a result of that itemsize."""
        m, k, n = shape
        return cls(name, m, k, n, count, (m * (k + n) + k * n) * itemsize)

    @property
    def flops(self) -> float:
        """Number of operations in all of them: 2 for a multiplication and its sum."""
        return 2.0 * self.m * self.k * self.n * self.count


@dataclass(frozen=True)
class Streamed:
    """Bytes that go through memory outside of products in a forward pass: a model in which every elementwise operation
    reads and writes once, as fused kernels do."""

    bytes: float


@dataclass(frozen=True)
class Scores:
    """Bytes of attention scores or of logits that go through memory outside of products, in all passes: modelled."""

    kind: str
    """scores or logits."""
    bytes: float


@dataclass(frozen=True)
class Kept:
    """Bytes that are kept for the backward pass under the share's remat policy."""

    bytes: float


@dataclass(frozen=True)
class Working:
    """Bytes of activations that the layer's backward pass works on."""

    bytes: float


@dataclass(frozen=True)
class Cached:
    """Bytes that a layer remembers of tokens that it has read, to generate the next ones."""

    bytes: float


Cost = Moves | Weight | Product | Streamed | Scores | Kept | Working | Cached


def moves_of(cost: Cost, share: Share) -> Iterator[Moves]:
    """Yields what a cost moves."""
    yield from cost.moves(share) if isinstance(cost, Weight) else [cost] if isinstance(cost, Moves) else []


def bytes_sent(costs: Iterable[Cost], share: Share) -> float:
    """Returns the bytes that a device sends."""
    return sum(moves.count * moves.collective.bytes_sent for cost in costs for moves in moves_of(cost, share))


def within(name: str, costs: Iterable[Cost]) -> Iterator[Cost]:
    """Yields the costs of a layer inside a module of that name."""
    for cost in costs:
        if isinstance(cost, Moves):
            yield replace(cost, collective=replace(cost.collective, scope=f"{name}/{cost.collective.scope}"))
        else:
            yield replace(cost, module=f"{name}/{cost.module}") if isinstance(cost, Weight) else cost


def enter(module: str, share: Share, size: float, *, split: bool, again: bool) -> Iterator[Moves]:
    """Yields what `enter_parallel` moves over tp: an all-gather, or only the sum of the gradient.

    Args:
      module: name of the layer.
      share: of the device.
      size: bytes of the whole activation.
      split: whether it is split along the sequence.
      again: whether the backward pass gathers it again.
    """
    again, backward = again and share.training, int(share.training)
    if split:
        yield Moves(Collective(ALL_GATHER, (TP,), share.tp, size, module), 1 + again)
        yield Moves(Collective(REDUCE_SCATTER, (TP,), share.tp, size, module), backward)
    else:
        yield Moves(Collective(ALL_REDUCE, (TP,), share.tp, size, module), backward)


def leave(module: str, share: Share, size: float, *, split: bool, again: bool) -> Iterator[Moves]:
    """Yields what `leave_parallel` moves over tp; arguments as of `enter`."""
    again = again and share.training
    if split:
        yield Moves(Collective(REDUCE_SCATTER, (TP,), share.tp, size, module), 1 + again)
        yield Moves(Collective(ALL_GATHER, (TP,), share.tp, size, module), int(share.training))
    else:
        yield Moves(Collective(ALL_REDUCE, (TP,), share.tp, size, module), 1 + again)


def ring(module: str, share: Share, size: float, times: int) -> Moves:
    """Returns what rings over tp move (`layers/rings.py`): parts of an activation, each past all other devices.

    Args:
      module: name of the layer.
      share: of the device.
      size: bytes of the whole activation.
      times: how often it goes around.
    """
    return Moves(Collective(PERMUTE, (TP,), share.tp, size / share.tp, module), times * (share.tp - 1))


def sums_over(module: str, axes: Axes, sizes: Mapping[str, int], size: float, count: int = 1) -> Moves:
    """Returns all-reduces of `size` bytes over those axes."""
    return Moves(Collective(ALL_REDUCE, axes, parts(sizes, axes), size, module), count)


def itemsize(dtype: str) -> int:
    """Returns the bytes of an element."""
    return jnp.dtype(dtype).itemsize
