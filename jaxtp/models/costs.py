"""What a step of a decoder moves, computes and holds on one device: sums of what its layers declare."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
from flax import nnx

from jaxtp.communication import Collective, Place, bytes_by_place
from jaxtp.layers.costs import (
    ELEMENTWISE_AGAIN,
    Cached,
    Cost,
    Kept,
    Moves,
    Product,
    Scores,
    Share,
    Streamed,
    Weight,
    Working,
    itemsize,
)
from jaxtp.mesh import abstract_mesh, batch_parts, sized
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What one device does in a step, and what it holds in one of its micro-batches."""

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

    @property
    def flops(self) -> float:
        """Number of operations in all products."""
        return sum(product.flops for product in (*self.products, *self.attention))

    @property
    def budget(self) -> dict[Place, float]:
        """Bytes that the device may send, by module and mesh axes."""
        return bytes_by_place(self.traffic)


def step_costs(
    config: ModelConfig, mesh: Mapping[str, int], *, batch_size: int, sequence_length: int, accumulation: int = 1
) -> StepCosts:
    """Returns what each device does in a training step; its traffic is exact for the Llama shapes.

    With biases, norms of queries and keys, and adapters the traffic is an upper bound.

    Args:
      config: the model.
      mesh: devices along each axis.
      batch_size: sequences in the step, over all devices and micro-batches.
      sequence_length: tokens in a sequence.
      accumulation: micro-batches.
    """
    rows = batch_size // (batch_parts(mesh) * accumulation)
    frozen = config.lora.rank > 0
    share = Share(sizes=mesh, rows=rows, length=sequence_length, remat=config.remat, frozen=frozen)
    return costs_of(config, share, accumulation)


def costs_of(config: ModelConfig, share: Share, accumulation: int = 1) -> StepCosts:
    """Returns what a model costs for a share of a micro-batch, and in all micro-batches."""
    model = _described(replace(config, remat="full"))
    blocks = [(stack.repeats, list(block.costs(share))) for stack, kinds in model.stacked() for block in kinds]
    outside = list(model.costs(share))
    every = [*((repeats, cost) for repeats, costs in blocks for cost in costs), *((1, cost) for cost in outside)]

    def total(kind: type[Streamed | Kept | Working | Cached], costs: Iterable[tuple[int, Cost]]) -> float:
        return sum(times * cost.bytes for times, cost in costs if isinstance(cost, kind))

    def products(attention: bool) -> tuple[Product, ...]:
        found = ((n, c) for n, c in every if isinstance(c, Product) and c.attention == attention)
        return tuple(_merged((n * accumulation, product) for n, product in found))

    def scores(kind: str) -> float:
        return accumulation * sum(n * c.bytes for n, c in every if isinstance(c, Scores) and c.kind == kind)

    passes = (2.5 + (share.remat in ELEMENTWISE_AGAIN)) if share.training else 1.0  # backward as 1.5 times forward
    inside = [[(1, cost) for cost in costs] for _, costs in blocks]
    return StepCosts(
        traffic=_traffic(every, share, accumulation),
        products=products(False),
        attention=products(True),
        elementwise=accumulation * passes * total(Streamed, every),
        scores=scores("scores"),
        logits=scores("logits"),
        itemsize=itemsize(config.precision.compute),
        kept=int(total(Kept, every)),
        working=int(max(total(Working, costs) for costs in inside)),
        weights=int(max(sum(c.loaded_bytes(share) for _, c in costs if isinstance(c, Weight)) for costs in inside)),
        transposed=int(
            sum(n * c.stored_bytes(share.sizes) for n, c in every if isinstance(c, Weight) and c.transposed)
        ),
        loss=int(total(Working, ((1, cost) for cost in outside))),
        cached=int(total(Cached, every)),
        adapters=sum(n * c.size for n, c in every if isinstance(c, Weight) and c.adapter),
    )


def _traffic(costs: Iterable[tuple[int, Cost]], share: Share, accumulation: int) -> dict[Collective, int]:
    """Returns all collectives, their axes those of more than one device, in the mesh's order."""
    found: Counter[Collective] = Counter()
    for times, cost in costs:
        for moves in cost.moves(share) if isinstance(cost, Weight) else [cost] if isinstance(cost, Moves) else []:
            one = moves.collective
            if one.group > 1 and moves.count:
                spanned = tuple(axis for axis in share.sizes if axis in one.axes and share.sizes[axis] > 1)
                found[replace(one, axes=spanned)] += times * moves.count * accumulation
    return dict(found)


def _merged(products: Iterable[tuple[int, Product]]) -> Iterator[Product]:
    """Yields products of one name and shape once."""
    found: Counter[Product] = Counter()
    for times, product in products:
        found[replace(product, count=0)] += times * product.count
    for product, count in found.items():
        yield replace(product, count=count)


@lru_cache(maxsize=32)
def _described(config: ModelConfig) -> Decoder:
    """Returns the model without arrays, on no mesh; what its layers declare depends on no mesh."""
    with jax.sharding.use_abstract_mesh(abstract_mesh(sized())):
        model: Decoder = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    return model
