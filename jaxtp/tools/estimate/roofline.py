"""A model of a training step's seconds, from its costs and the hardware's speeds.

A matrix product takes the longer of computing and moving its operands; everything else runs at
memory speed (Williams et al., "Roofline", CACM 2009).

A collective takes a start, its sequential steps, and its bytes at the speed of the slowest link.
The fastest algorithm and protocol counts; README.md has the formulas. `Hardware` has the numbers of
Simple rings, and the constants below are shares of these. If `hop` or `network_hop` is 0, the
measured latency includes the protocols.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtp.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Axes,
    Collective,
    Traffic,
)
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


class Way(NamedTuple):
    """An algorithm with a protocol; all fields but `max_speed` are shares of `Hardware`'s."""

    start: float
    hop: float
    network_hop: float
    inside: float  # share of the speed on one host
    across: float  # share of the speed on several hosts
    max_speed: float = math.inf  # bytes/s on several hosts


class Protocol(NamedTuple):
    """An NCCL protocol, by algorithm."""

    ring: Way
    tree: Way


SIMPLE = Protocol(Way(1, 1, 1, 1, 1), Way(1, 4.0 / 3.4, 1, 0.92, 0.92))
LL128 = Protocol(
    Way(14 / 8.4, 1.9 / 3.4, 4.0 / 14, 0.92, 0.92),
    Way(14 / 8.4, 1.25 / 3.4, 8.5 / 14, 0.92 * 7 / 9, 0.92 * 120 / 128),
)
LL = Protocol(
    # 0.38: at most 88 GB/s of the 240 that an A100's links reach, and 141 of an H100's 360
    Way(6.6 / 8.4, 0.6 / 3.4, 2.7 / 14, 0.38, 0.5, 20e9),
    Way(6.8 / 8.4, 0.6 / 3.4, 5.0 / 14, 0.92 / 3.8, 0.92 / 3.8, 20e9),
)
RCCL_LL = Protocol(
    Way(12 / 17, 0.8 / 4.5, 9.5 / 24.1, 0.08, 0.08),
    Way(12 / 17, 0.8 / 4.5, 10.5 / 24.1, 0.06, 0.06),
)
POST = 1.0 / 3.4  # minimum share of a hop that a step of a ring across hosts takes
PCIE = 64e9  # bytes/s one way of PCIe 5.0 x16; faster links are NVLink

# NCCL's algorithm PAT, between hosts of one device each
PAT_SPEED = 0.75  # as a share of the links'
PAT_NETWORK_HOP = 1 / 3.5  # as a share of a ring's
PAT_DEVICE_SECONDS = 2.8e-6


def collective_seconds(hardware: Hardware, sizes: Sizes, collective: Collective) -> float:
    """Returns the seconds of the fastest algorithm and protocol."""
    return min(
        latency + collective.bytes_sent / speed
        for latency, speed in _ways(hardware, sizes, collective.axes, collective.kind)
    )


def _ways(hardware: Hardware, sizes: Sizes, axes: Axes, kind: str) -> Iterator[tuple[float, float]]:
    """Yields the latency in seconds and the bytes/s of each algorithm and protocol."""
    devices = parts(sizes, axes)
    per_host = inside_domain(hardware, sizes, axes)
    hosts = devices // per_host
    start = hardware.latency
    hop = hardware.hop
    network_hop = hardware.network_hop
    full_speed = link_speed(hardware, sizes, axes)
    if kind == ALL_TO_ALL and hosts > 1:
        network = hardware.network * hardware.link_efficiency
        # Of each device's devices - 1 messages, devices - per_host leave the host.
        full_speed = min(full_speed, network * (devices - 1) / (devices - per_host))

    def speed(way: Way) -> float:
        if hosts == 1:
            return full_speed * way.inside
        return min(full_speed * way.across, way.max_speed)

    rounds = 2 if kind == ALL_REDUCE else 1
    hops = devices - hosts
    network_hops = hosts - 1
    if kind == PERMUTE:
        hops = int(hosts == 1)
        network_hops = int(hosts > 1)
    for ring, tree in _protocols(hardware):
        ring_hop = ring.hop if hosts == 1 else max(ring.hop, POST)
        ring_network_hop = tree.network_hop if per_host == 1 else ring.network_hop
        steps = hops * ring_hop * hop + network_hops * ring_network_hop * network_hop
        yield ring.start * start + rounds * steps, speed(ring)
        if kind == ALL_REDUCE and hardware.platform != "tpu":
            steps = (per_host - 1) * tree.hop * hop
            steps += math.log2(hosts) * tree.network_hop * network_hop
            yield tree.start * start + 2 * steps, speed(tree)
    if kind in (ALL_GATHER, REDUCE_SCATTER) and hardware.platform != "tpu" and hosts == devices > 1:
        latency = start + math.log2(hosts) * network_hop * PAT_NETWORK_HOP
        yield latency + devices * PAT_DEVICE_SECONDS, PAT_SPEED * full_speed


def _protocols(hardware: Hardware) -> Sequence[Protocol]:
    if hardware.platform == "tpu" or 0 in (hardware.hop, hardware.network_hop):
        return (SIMPLE,)
    if hardware.platform == "rocm":
        return (SIMPLE, RCCL_LL)
    return (SIMPLE, LL, LL128) if hardware.link > PCIE else (SIMPLE, LL)


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
