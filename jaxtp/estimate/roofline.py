"""Seconds of a training step, from what it computes and moves and from what the hardware can do: a model.

Each matrix product takes the longer of computing and of reading and writing its operands; what is no product goes at
the speed of memory; a collective goes around a ring (Patarasso and Yuan, JPDC 2009) at the speed of its slowest link.
Williams et al., "Roofline", CACM 2009.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.hardware import Hardware, inside_domain
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
        communication[move.axes] = communication.get(move.axes, 0.0) + _seconds(hardware, sizes, move)
    sums = 3 * memory.gradients * accumulation if accumulation > 1 else 0  # two read, one written, each micro-batch
    return StepTime(
        products=sum(_product(hardware, product, work.itemsize) for product in work.products),
        attention=sum(_product(hardware, product, work.itemsize) for product in work.attention) + work.scores / speed,
        elementwise=(work.elementwise + work.logits) / speed,
        update=(2 * memory.state + 2 * memory.gradients + sums) / speed,  # the gradients once more for their norm
        communication=communication,
        crossing=frozenset(axes for axes in communication if leaves_domain(hardware, sizes, axes)),
    )


def leaves_domain(hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> bool:
    """Whether devices along these axes are in several domains."""
    return inside_domain(hardware, sizes, axes) < math.prod(sizes[axis] for axis in axes)


def link_speed(hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> float:
    """Bytes/s that each device of a ring along these axes can send.

    A ring that leaves its domain goes through the network as often as it has devices there: each brings its own share.
    """
    axes = tuple(axes)
    link = hardware.link
    if leaves_domain(hardware, sizes, axes):
        link = min(link, hardware.network * inside_domain(hardware, sizes, axes))
    return link * hardware.link_efficiency


def _seconds(hardware: Hardware, sizes: Mapping[str, int], move: Move) -> float:
    return move.bytes_sent / link_speed(hardware, sizes, move.axes) + move.count * hardware.latency


def _product(hardware: Hardware, product: Product, itemsize: int) -> float:
    peak = hardware.flops * hardware.matmul_efficiency * jnp.dtype("bfloat16").itemsize / itemsize
    moving = product.bytes * product.count / (hardware.bandwidth * hardware.bandwidth_efficiency)
    return max(product.flops / peak, moving)
