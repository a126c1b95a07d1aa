"""Seconds of a training step, from what it computes and moves and from what the hardware can do: a model.

Each matrix product takes the longer of computing and of reading and writing its operands; what is no product goes at
the speed of memory (Williams et al., "Roofline", CACM 2009). Collectives: `links.py`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.estimate.links import collective_seconds, leaves_domain
from jaxtp.hardware import Hardware
from jaxtp.models.budget import Move
from jaxtp.models.work import Product, Work
from jaxtp.train.memory import Memory

Axes = tuple[str, ...]


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, on each device."""

    products: float
    """Matrix products with weights."""

    attention: float
    """Its products, and what else its scores go through memory for."""

    elementwise: float
    """Norms, gates, residual sums, logits: at the speed of memory."""

    update: float
    """The optimizer and the sums of gradients, at the speed of memory."""

    communication: Mapping[Axes, float]
    """By mesh axes."""

    crossing: frozenset[Axes]
    """Of them, those that leave a domain of fast links."""

    @property
    def computing(self) -> float:
        """What a device does by itself."""
        return self.products + self.attention + self.elementwise + self.update

    @property
    def moving(self) -> float:
        """All communication."""
        return sum(self.communication.values())

    @property
    def serial(self) -> float:
        """The step, if nothing runs beside anything else."""
        return self.computing + self.moving

    @property
    def overlapped(self) -> float:
        """The step, if computing, fast links and the network all run beside each other."""
        across = sum(seconds for axes, seconds in self.communication.items() if axes in self.crossing)
        return max(self.computing, across, self.moving - across)

    @property
    def expected(self) -> float:
        """The middle of the two, by which settings are compared."""
        return (self.serial + self.overlapped) / 2

    @property
    def computing_share(self) -> float:
        """Of a step in which nothing overlaps."""
        return self.computing / self.serial


def step_time(
    hardware: Hardware, sizes: Mapping[str, int], work: Work, moves: Iterable[Move], memory: Memory, accumulation: int
) -> StepTime:
    """The model's account of a step.

    Args:
      hardware: what each device can do.
      sizes: devices along each axis.
      work: what each computes.
      moves: what each sends.
      memory: what each holds.
      accumulation: micro-batches.
    """
    speed = hardware.bandwidth * hardware.bandwidth_efficiency
    communication: dict[Axes, float] = {}
    for move in moves:
        once = collective_seconds(hardware, sizes, move.axes, move.kind, move.bytes_sent / move.count)
        communication[move.axes] = communication.get(move.axes, 0.0) + move.count * once
    sums = 3 * memory.gradients * accumulation if accumulation > 1 else 0  # two read, one written, each micro-batch
    return StepTime(
        products=sum(_product(hardware, product, work.itemsize) for product in work.products),
        attention=sum(_product(hardware, product, work.itemsize) for product in work.attention) + work.scores / speed,
        elementwise=(work.elementwise + work.logits) / speed,
        update=(2 * memory.state + 2 * memory.gradients + sums) / speed,  # the gradients once more for their norm
        communication=communication,
        crossing=frozenset(axes for axes in communication if leaves_domain(hardware, sizes, axes)),
    )


def _product(hardware: Hardware, product: Product, itemsize: int) -> float:
    peak = hardware.flops * hardware.matmul_efficiency * jnp.dtype("bfloat16").itemsize / itemsize
    moving = product.bytes * product.count / (hardware.bandwidth * hardware.bandwidth_efficiency)
    return max(product.flops / peak, moving)
