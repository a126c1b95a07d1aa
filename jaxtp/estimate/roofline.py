"""Seconds of a training step, from what it computes and moves and from what the hardware can do: a model.

Each matrix product takes the longer of computing and of reading and writing its operands; what is no product goes at
the speed of memory (Williams et al., "Roofline", CACM 2009). Collectives: `links.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from jaxtp.communication import Axes
from jaxtp.estimate.links import collective_seconds, leaves_domain
from jaxtp.hardware import Hardware
from jaxtp.layers.costs import Product
from jaxtp.models.costs import StepCosts
from jaxtp.train.memory import Memory


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
    """The optimizer and the sums of gradients: products of its rule, and all else at the speed of memory."""

    communication: Mapping[Axes, float]
    """Seconds by mesh axes."""

    crossing: frozenset[Axes]
    """Mesh axes of `communication` that leave a domain of fast links."""

    @property
    def computing(self) -> float:
        """Seconds that a device computes."""
        return self.products + self.attention + self.elementwise + self.update

    @property
    def moving(self) -> float:
        """Seconds of all communication."""
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
        """Share of computing in a step in which nothing overlaps."""
        return self.computing / self.serial


def step_time(
    hardware: Hardware, sizes: Mapping[str, int], costs: StepCosts, memory: Memory, accumulation: int
) -> StepTime:
    """Returns the model's account of a step.

    Args:
      hardware: what each device can do.
      sizes: devices along each axis.
      costs: what each computes and sends.
      memory: what each holds.
      accumulation: micro-batches.
    """
    speed = hardware.bandwidth * hardware.bandwidth_efficiency
    communication: dict[Axes, float] = {}
    for one, times in costs.traffic.items():
        once = collective_seconds(hardware, sizes, one)
        communication[one.axes] = communication.get(one.axes, 0.0) + times * once
    sums = 3 * memory.gradients * accumulation if accumulation > 1 else 0  # two read, one written, each micro-batch
    return StepTime(
        products=sum(_product(hardware, product, costs.itemsize) for product in costs.products),
        attention=sum(_product(hardware, product, costs.itemsize) for product in costs.attention)
        + costs.scores / speed,
        elementwise=(costs.elementwise + costs.logits) / speed,
        update=sum(_product(hardware, product, costs.param_itemsize) for product in costs.update)
        + (2 * memory.state + 2 * memory.gradients + sums) / speed,  # the gradients once more for their norm
        communication=communication,
        crossing=frozenset(axes for axes in communication if leaves_domain(hardware, sizes, axes)),
    )


def _product(hardware: Hardware, product: Product, itemsize: int) -> float:
    peak = hardware.flops * hardware.matmul_efficiency * jnp.dtype("bfloat16").itemsize / itemsize
    moving = product.bytes * product.count / (hardware.bandwidth * hardware.bandwidth_efficiency)
    return max(product.flops / peak, moving)
