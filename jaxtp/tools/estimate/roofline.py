"""A model of a training step's seconds, from its costs and the hardware's speeds.

A matrix product takes the longer of computing and moving its operands; everything else runs at
memory speed (Williams et al., "Roofline", CACM 2009).

A collective takes a start, its sequential steps, and its bytes at the speed of the slowest link.
The faster protocol counts. `Hardware` has the numbers of the protocol Simple. If `hop` or
`network_hop` is 0, the measured latency includes the protocols.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jaxtp.analysis.collective import ALL_REDUCE, ALL_TO_ALL, PERMUTE, Axes, Collective, Traffic
from jaxtp.analysis.hardware import Hardware, inside_domain, link_of
from jaxtp.analysis.layer_costs import Product
from jaxtp.analysis.step_costs import StepCosts
from jaxtp.mesh import Sizes, parts
from jaxtp.train.memory import Memory


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step per device, by part."""

    products: float  # matrix products with weights
    attention: float  # its products, and the traffic of its scores through memory
    elementwise: float  # norms, gates, residual sums, logits
    update: float  # the optimizer and the sums of gradients
    communication: Mapping[Axes, float]  # by mesh axes
    crossing: frozenset[Axes]  # the mesh axes of `communication` that use the network

    @property
    def computing(self) -> float:
        """Seconds without communication."""
        return self.products + self.attention + self.elementwise + self.update

    @property
    def moving(self) -> float:
        """Seconds of all communication."""
        return sum(self.communication.values())

    @property
    def serial(self) -> float:
        """Seconds if nothing overlaps."""
        return self.computing + self.moving

    @property
    def overlapped(self) -> float:
        """Seconds if computing, fast links and network overlap fully."""
        across = sum(
            seconds for axes, seconds in self.communication.items() if axes in self.crossing
        )
        return max(self.computing, across, self.moving - across)

    @property
    def expected(self) -> float:
        """Mean of serial and overlapped, for comparisons."""
        return (self.serial + self.overlapped) / 2

    @property
    def computing_share(self) -> float:
        """Share of computing if nothing overlaps."""
        return self.computing / self.serial


def step_time(
    hardware: Hardware,
    sizes: Sizes,
    costs: StepCosts,
    memory: Memory,
    accumulation: int,
    work: float = 1.0,
) -> StepTime:
    """Models a step of `accumulation` micro-batches.

    The model does `work` times the work of `costs`.
    """

    def seconds_of(products: Iterable[Product], itemsize: int) -> float:
        seconds = []
        for product in products:
            size = product.count * product.bytes
            seconds.append(product_seconds(hardware, product.flops, size, itemsize, product.dtype))
        return sum(seconds)

    speed = hardware.memory_speed
    communication = communication_seconds(hardware, sizes, costs.traffic)
    communication = {axes: work * seconds for axes, seconds in communication.items()}
    elementwise = sum(operation.bytes for operation in costs.elementwise)
    # The state is read and written. Gradients are read twice, once for their norm.
    moved = 2 * memory.state + 2 * memory.gradients
    if accumulation > 1:
        # Two gradients are read and one is written, in each micro-batch.
        moved += 3 * memory.gradients * accumulation
    return StepTime(
        products=work * seconds_of(costs.products, costs.itemsize),
        attention=work * (seconds_of(costs.attention, costs.itemsize) + costs.scores / speed),
        elementwise=work * (elementwise + costs.logits) / speed,
        update=seconds_of(costs.update, costs.param_itemsize) + moved / speed,
        communication=communication,
        crossing=crossing_axes(hardware, sizes, communication),
    )


def product_seconds(
    hardware: Hardware, flops: float, size: float, itemsize: int, dtype: str = ""
) -> float:
    """Returns the seconds of matrix products that move `size` bytes.

    `dtype` is as in `layer_costs.Product`.
    """
    bfloat16_bytes = 2
    peak = hardware.peak(dtype) if dtype else hardware.flops * bfloat16_bytes / itemsize
    return max(flops / (peak * hardware.matmul_efficiency), size / hardware.memory_speed)


def communication_seconds(hardware: Hardware, sizes: Sizes, traffic: Traffic) -> dict[Axes, float]:
    """Returns the seconds of all collectives, by mesh axes."""
    seconds: dict[Axes, float] = {}
    for collective, times in traffic.items():
        total = times * collective_seconds(hardware, sizes, collective)
        seconds[collective.axes] = seconds.get(collective.axes, 0.0) + total
    return seconds


# Protocols of NCCL: shares of the start, hop, network hop and speed of `Hardware`
SIMPLE = 1.0, 1.0, 1.0, 1.0
# 0.38: at most 88 GB/s of the 240 that an A100's links reach, and 141 of an H100's 360
LL = 6.6 / 8.4, 0.6 / 3.4, 2.7 / 14, 0.38


def collective_seconds(hardware: Hardware, sizes: Sizes, collective: Collective) -> float:
    """Returns the seconds of a collective by the faster protocol."""
    axes = collective.axes
    kind = collective.kind
    devices = parts(sizes, axes)
    per_host = inside_domain(hardware, sizes, axes)
    hosts = devices // per_host
    speed = link_speed(hardware, sizes, axes)
    if kind == ALL_TO_ALL and hosts > 1:
        network = hardware.network * hardware.link_efficiency
        # Of each device's devices - 1 messages, devices - per_host leave the host.
        speed = min(speed, network * (devices - 1) / (devices - per_host))
    # Of a ring
    hops: float = devices - hosts
    network_hops: float = hosts - 1
    if kind == PERMUTE:
        hops = int(hosts == 1)
        network_hops = int(hosts > 1)
    elif kind == ALL_REDUCE:
        if hardware.platform != "tpu":  # a tree of chains, which in one host is a ring
            hops = per_host - 1
            network_hops = math.log2(hosts)
        hops *= 2
        network_hops *= 2
    is_measured = 0 in (hardware.hop, hardware.network_hop)
    protocols = (SIMPLE,) if is_measured or hardware.platform == "tpu" else (SIMPLE, LL)
    return min(
        hardware.latency * start
        + hops * hardware.hop * hop
        + network_hops * hardware.network_hop * network_hop
        + collective.bytes_sent / (speed * share)
        for start, hop, network_hop, share in protocols
    )


def leaves_domain(hardware: Hardware, sizes: Sizes, axes: Axes) -> bool:
    """Returns whether a group spans several domains."""
    return inside_domain(hardware, sizes, axes) < parts(sizes, axes)


def crossing_axes(hardware: Hardware, sizes: Sizes, groups: Iterable[Axes]) -> frozenset[Axes]:
    """Returns the groups that span several domains."""
    return frozenset(axes for axes in groups if leaves_domain(hardware, sizes, axes))


def link_speed(hardware: Hardware, sizes: Sizes, axes: Axes) -> float:
    """Returns the bytes/s per device of a ring; each adds its share of the network."""
    inside = inside_domain(hardware, sizes, axes)
    link = link_of(hardware, inside)
    if leaves_domain(hardware, sizes, axes):
        link = min(link, hardware.network * inside)
    return link * hardware.link_efficiency
