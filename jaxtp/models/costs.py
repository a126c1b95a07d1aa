"""The costs of a step of a decoder on one device: sums of what its layers declare.

One walk over the layers adds them up, so a new layer is known to the audit, the estimate, memory and metrics once it
declares its costs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import jax
from flax import nnx
from jax.sharding import AbstractMesh

from jaxtp.communication import Collective, Place, bytes_by_place
from jaxtp.layers.activations import Context
from jaxtp.layers.costs import (
    ELEMENTWISE_AGAIN,
    Cached,
    Cost,
    Kept,
    Product,
    Scores,
    Share,
    Streamed,
    Weight,
    Working,
    itemsize,
    moves_of,
)
from jaxtp.mesh import TP, abstract_mesh, batch_parts, sized
from jaxtp.models.config import ModelConfig, padded_sizes
from jaxtp.models.decoder import Decoder

C = TypeVar("C")

MUCH_PADDING = 0.25
"""Share of a block's weights from which padding is warned of."""


_FURTHEST = 1024
"""Sizes of tp beyond this are not proposed."""


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The traffic and the products of a step on one device, and the bytes that a micro-batch holds there."""

    traffic: Mapping[Collective, int]
    """Collectives, and how often each runs."""

    products: tuple[Product, ...]
    """Matrix products with weights."""

    attention: tuple[Product, ...]
    """Scores, and the values weighted by them."""

    elementwise: float
    """Bytes through memory outside of products, but for attention scores and logits."""

    scores: float
    """Bytes of attention scores through memory outside of products; 0 for a kernel that never holds them."""

    logits: float
    """Bytes of logits through memory outside of products."""

    itemsize: int
    """Bytes of an element of the compute dtype."""

    param_itemsize: int
    """Bytes of an element of the parameters' dtype."""

    kept: int
    """Bytes that all blocks keep for the backward pass."""

    working: int
    """Bytes of activations that the backward pass of the largest block works on."""

    weights: int
    """Bytes of the largest block's weights as its layers multiply with them, and of their unreduced gradients."""

    transposed: int
    """Bytes of stored weights that are gathered along their last dim, in all blocks."""

    loss: int
    """Bytes of the head, of the logits of a chunk, and of their gradients."""

    cached: int
    """Bytes that all blocks remember of the tokens of all rows."""

    adapters: int
    """Number of elements of all adapters."""

    unused: float
    """Number of elements of a device's weights that none of its tokens uses: experts that none chose, on average."""

    update: tuple[Product, ...] = ()
    """Matrix products of the optimizer's rule, in the parameters' dtype."""

    owned: int = 0
    """Bytes of whole matrices that the optimizer's rule works on."""

    padding: float
    """Elements that padding adds to the weights of all blocks, as a share of them."""

    @property
    def flops(self) -> float:
        """Number of operations in all products."""
        return sum(product.flops for product in (*self.products, *self.attention, *self.update))

    @property
    def flops_of_xla(self) -> float:
        """Number of operations in those that no kernel of its own computes."""
        attention = self.attention if self.scores else ()
        every = (*self.products, *attention, *self.update)
        return sum(product.flops for product in every if not product.in_kernel)

    @property
    def budget(self) -> dict[Place, float]:
        """Bytes that the device may send, by module and mesh axes."""
        return bytes_by_place(self.traffic)


def step_costs(
    config: ModelConfig,
    mesh: Mapping[str, int],
    *,
    batch_size: int,
    sequence_length: int,
    accumulation: int = 1,
    packed: bool = False,
    platform: str = "cpu",
    context: Context = "auto",
) -> StepCosts:
    """Returns what each device does in a training step; its traffic is exact for the Llama shapes.

    With biases, norms of queries and keys, and adapters the traffic is an upper bound.

    Args:
      config: the model.
      mesh: devices along each axis.
      batch_size: sequences in the step, over all devices and micro-batches.
      sequence_length: tokens in a sequence.
      accumulation: micro-batches.
      packed: sequences hold several documents.
      platform: kind of device, which decides the kernels.
      context: method of attention over cp.
    """
    rows = batch_size // (batch_parts(mesh) * accumulation)
    frozen = config.lora.rank > 0
    share = Share(
        sizes=mesh,
        rows=rows,
        length=sequence_length,
        remat=config.remat,
        frozen=frozen,
        packed=packed,
        platform=platform,
        accumulation=accumulation,
        context=context,
    )
    return costs_of(config, share)


def costs_of(config: ModelConfig, share: Share) -> StepCosts:
    """Returns what a model costs for a share of a micro-batch, and in all micro-batches."""
    model, share = described(config), replace(share, zigzag=config.zigzag(share))
    blocks = [(stack.repeats, list(block.costs(share))) for stack, kinds in model.stacked() for block in kinds]
    outside = [(1, cost) for cost in model.costs(share)]
    inside = [(repeats, cost) for repeats, costs in blocks for cost in costs]
    every = inside + outside
    products = list(_merged((n * share.accumulation, product) for n, product in _of(Product, every)))
    weights = _of(Weight, inside)
    return StepCosts(
        traffic=_traffic(every, share),
        products=tuple(product for product in products if not product.attention),
        attention=tuple(product for product in products if product.attention),
        elementwise=share.accumulation * _passes(share) * _bytes(_of(Streamed, every)),
        scores=share.accumulation * _bytes((n, scores) for n, scores in _of(Scores, every) if scores.kind == "scores"),
        logits=share.accumulation * _bytes((n, scores) for n, scores in _of(Scores, every) if scores.kind == "logits"),
        itemsize=itemsize(config.precision.compute),
        param_itemsize=itemsize(config.precision.param),
        kept=int(_bytes(_of(Kept, every))),
        working=int(max(sum(cost.bytes for cost in costs if isinstance(cost, Working)) for _, costs in blocks)),
        weights=int(max(sum(c.loaded_bytes(share) for c in costs if isinstance(c, Weight)) for _, costs in blocks)),
        transposed=int(sum(n * weight.stored_bytes(share.sizes) for n, weight in weights if weight.transposed)),
        loss=int(_bytes(_of(Working, outside))),
        cached=int(_bytes(_of(Cached, every))),
        adapters=sum(n * weight.size for n, weight in weights if weight.adapter),
        unused=sum(n * w.over_tp(share.sizes) * (1 - w.used_by(share.tokens)) for n, w in weights),
        padding=sum(n * w.padded(share.tp) for n, w in weights) / sum(n * w.size for n, w in weights) - 1,
    )


def active_parameters(config: ModelConfig, parameters: int) -> int:
    """Returns the number of parameters that a token uses: all, but those of experts that it did not choose.

    Args:
      config: the model.
      parameters: how many it has, without padding.
    """
    return parameters - round(costs_of(config, Share(sizes=sized(), rows=1, length=1, training=False)).unused)


def describe_active(config: ModelConfig, parameters: int) -> str:
    """Returns the number of parameters that a token uses, as it goes on after that of all; nothing where it is that."""
    active = active_parameters(config, parameters)
    return "" if active == parameters else f", {active:,} active for each token"


def _of(kind: type[C], costs: Iterable[tuple[int, Cost]]) -> list[tuple[int, C]]:
    return [(times, cost) for times, cost in costs if isinstance(cost, kind)]


def _bytes(costs: Iterable[tuple[int, Streamed | Scores | Kept | Working | Cached]]) -> float:
    return sum(times * cost.bytes for times, cost in costs)


def _passes(share: Share) -> float:
    """Returns how often elementwise operations are done, a backward pass counted as 1.5."""
    return (2.5 + (share.remat in ELEMENTWISE_AGAIN)) if share.training else 1.0


def describe_padding(config: ModelConfig, mesh: Mapping[str, int]) -> str | None:
    """Returns what tp devices pad and what it costs, a warning where that is much; None where they pad nothing."""
    tp = mesh[TP]
    if not (padded := padded_sizes(config, tp)):
        return None
    added = costs_of(config, Share(sizes=sized(tp=tp), rows=1, length=1, training=False)).padding
    sizes = ", ".join(f"{size} {name} as {more}" for name, (size, more) in padded.items())
    text = f"over tp {tp}: {sizes}, {added:.1%} more in a block"
    if added <= MUCH_PADDING:
        return text
    without = [other for other in range(1, min(2 * tp, _FURTHEST)) if not padded_sizes(config, other)]
    nearest = sorted(sorted(without, key=lambda other: abs(other - tp))[:2])
    return f"{text}; WARNING: that is much, and nothing is padded over tp {' or '.join(map(str, nearest))}"


def _traffic(costs: Iterable[tuple[int, Cost]], share: Share) -> dict[Collective, int]:
    """Returns all collectives, their axes those of more than one device, in the mesh's order."""
    found: Counter[Collective] = Counter()
    for times, cost in costs:
        for moves in moves_of(cost, share):
            one = moves.collective
            if one.group > 1 and moves.count:
                spanned = tuple(axis for axis in share.sizes if axis in one.axes and share.sizes[axis] > 1)
                layers, runs = (times, 1) if moves.once else (1, times * share.accumulation)
                found[replace(one, axes=spanned, bytes=layers * one.bytes)] += moves.count * runs
    return dict(found)


def _merged(products: Iterable[tuple[int, Product]]) -> Iterator[Product]:
    """Yields products of one name and shape once."""
    found: Counter[Product] = Counter()
    for times, product in products:
        found[replace(product, count=0)] += times * product.count
    for product, count in found.items():
        yield replace(product, count=count)


def described(config: ModelConfig, tp: int = 1) -> Decoder:
    """Returns the model without arrays, as on one device or over so many along tp; what its layers declare depends on
    no mesh, how its arrays are split may depend on tp."""
    return _described(replace(config, remat="full"), tp)


@lru_cache(maxsize=32)
def _described(config: ModelConfig, tp: int) -> Decoder:
    none, own = AbstractMesh((), ()), abstract_mesh(sized(tp=tp))  # a mesh in context may not change its size at once
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(own):
        model: Decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return model
