"""Seconds of a collective: the algorithm and protocol that are fastest, between the devices that the mesh puts where.

A collective takes a start, its steps one after the other, and its bytes at the speed of the slowest link. Of n devices
on h hosts, n/h on each:

| algorithm | of                    | steps                                            |
|-----------|-----------------------|--------------------------------------------------|
| ring      | gather, scatter       | (n - h) hop + (h - 1) network hop                |
| ring      | all-reduce            | twice that                                       |
| tree      | all-reduce            | 2 ((n/h - 1) hop + log2(h) network hop)          |
| PAT       | gather, scatter, n = h | log2(h) network hop / 3.5 + n 2.8 us            |
| none      | permute               | hop, or network hop between hosts                |

With one host a ring's steps are n - 1 hops. An all-to-all takes the steps of a gather; of what a device sends, (n -
n/h) / (n - 1) goes through the network, at that device's share of it. What they take depends on the protocol: Simple is
for large messages; LL and LL128 send flags with the data instead of waiting, and so less data. In microseconds, as NCCL
has them for NVLink:

| protocol | start    | hop: ring, tree | network hop: ring, tree | share of the speed: ring, tree             |
|----------|----------|-----------------|-------------------------|--------------------------------------------|
| Simple   | 8.4      | 3.4, 4.0        | 14, 14                  | 1, 0.92; PAT 0.75                          |
| LL128    | 14       | 1.9, 1.25       | 4.0, 8.5                | 0.92, 0.72; across hosts 0.86 for trees    |
| LL       | 6.6, 6.8 | 0.6, 0.6        | 2.7, 5.0                | 0.38, 0.24; across 0.5, 0.24, 20 GB/s at most |

`Hardware` has the numbers of Simple and rings; here the others are shares of these. A ring with one device on each host
waits as long as a tree for the network, and each step of one through several hosts at least 1 us. LL128 needs NVLink.
On GPUs of AMD LL is as RCCL has it (its tuning model 5); TPUs have rings only, and no protocols. Where `hop` or
`network_hop` is 0 the latency was measured: the protocols are in it, and none is added.

The formulas and their constants are those by which NCCL itself chooses (src/graph/tuning.cc of
github.com/NVIDIA/nccl, 2.28). Rings: Patarasso and Yuan, JPDC 2009; trees: Sanders, Speck and Traeff, Parallel
Computing 2009. What NVLink's switches can reduce by themselves (NVLS) and the corrections for trees and messages of
middling size are left out, and each collective is counted by itself: a compiler merges small ones.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxtp.communication import ALL_REDUCE, ALL_TO_ALL, PERMUTE, Axes, Collective
from jaxtp.hardware import Hardware, inside_domain, link_of
from jaxtp.mesh import parts


class Way(NamedTuple):
    """An algorithm by a protocol; all but `most` as shares of what `Hardware` has."""

    start: float
    hop: float
    network_hop: float
    inside: float
    """Share of the speed on one host."""
    across: float
    """Share of the speed on several hosts."""
    most: float = math.inf
    """Bytes/s on several hosts."""


class Protocol(NamedTuple):
    """Its ways."""

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
POST = 1.0 / 3.4
"""Least share of a hop that a step of a ring takes where the network is in it."""

PCIE = 64e9
"""Bytes/s one way of PCIe 5.0 x16: what is faster is NVLink."""

PAT_SHARE = 0.75
PAT_NETWORK = 1 / 3.5
PAT_EACH_S = 2.8e-6


def collective_seconds(hardware: Hardware, sizes: Mapping[str, int], one: Collective) -> float:
    """Returns the seconds of one collective.

    Args:
      hardware: its links.
      sizes: devices along each axis.
      one: an all-reduce, all-gather, reduce-scatter, all-to-all or permute.
    """
    return min(steps + one.bytes_sent / speed for steps, speed in _ways(hardware, sizes, one.axes, one.kind))


def _ways(hardware: Hardware, sizes: Mapping[str, int], axes: Axes, kind: str) -> Iterator[tuple[float, float]]:
    """Yields the seconds however little is sent, and the bytes/s, of each way that there is."""
    devices = parts(sizes, axes)
    hosts = devices // inside_domain(hardware, sizes, axes)
    start, hop, network = hardware.latency, hardware.hop, hardware.network_hop
    full = link_speed(hardware, sizes, axes)
    if kind == ALL_TO_ALL and hosts > 1:
        full = min(full, hardware.network * hardware.link_efficiency * (devices - 1) / (devices - devices // hosts))

    def speed(way: Way) -> float:
        return full * way.inside if hosts == 1 else min(full * way.across, way.most)

    rounds = 2 if kind == ALL_REDUCE else 1
    hops = (int(hosts == 1), int(hosts > 1)) if kind == PERMUTE else (devices - hosts, hosts - 1)
    for ring, tree in _protocols(hardware):
        step = ring.hop if hosts == 1 else max(ring.hop, POST)
        far = tree.network_hop if hosts == devices else ring.network_hop
        steps = hops[0] * step * hop + hops[1] * far * network
        yield ring.start * start + rounds * steps, speed(ring)
        if kind == ALL_REDUCE and hardware.platform != "tpu":
            steps = (devices // hosts - 1) * tree.hop * hop + math.log2(hosts) * tree.network_hop * network
            yield tree.start * start + 2 * steps, speed(tree)
    if kind not in (ALL_REDUCE, ALL_TO_ALL, PERMUTE) and hardware.platform != "tpu" and 1 < hosts == devices:
        yield start + math.log2(hosts) * network * PAT_NETWORK + devices * PAT_EACH_S, PAT_SHARE * full


def _protocols(hardware: Hardware) -> Sequence[Protocol]:
    """Returns the protocols that are chosen from."""
    if hardware.platform == "tpu" or 0 in (hardware.hop, hardware.network_hop):
        return (SIMPLE,)
    if hardware.platform == "rocm":
        return (SIMPLE, RCCL_LL)
    return (SIMPLE, LL, LL128) if hardware.link > PCIE else (SIMPLE, LL)


def leaves_domain(hardware: Hardware, sizes: Mapping[str, int], axes: Axes) -> bool:
    """Returns whether devices along these axes are in several domains."""
    return inside_domain(hardware, sizes, axes) < parts(sizes, axes)


def link_speed(hardware: Hardware, sizes: Mapping[str, int], axes: Axes) -> float:
    """Returns the bytes/s that each device of a ring along these axes can send.

    A ring that leaves its domain goes through the network as often as it has devices there: each brings its own share.
    Where links join pairs directly, a ring has those between its devices.
    """
    inside = inside_domain(hardware, sizes, axes)
    link = link_of(hardware, inside)
    if leaves_domain(hardware, sizes, axes):
        link = min(link, hardware.network * inside)
    return link * hardware.link_efficiency
