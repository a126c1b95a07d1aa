"""Seconds of a collective: the algorithm that is fastest, between the devices that the mesh puts where.

A collective takes a start, its steps one after the other, and its bytes at the speed of the slowest link. Of n devices
on h hosts, n/h on each; hop and network hop are `Hardware`'s:

| algorithm | of                    | steps                                             | share of the speed |
|-----------|-----------------------|---------------------------------------------------|--------------------|
| ring      | gather, scatter       | (n - h) hop + (h - 1) network hop                 | 1                  |
| ring      | all-reduce            | twice that                                        | 1                  |
| tree      | all-reduce            | 2 ((n/h - 1) hop + log2(h) network hop)           | 0.92               |
| PAT       | gather, scatter, n = h | log2(h) network hop / 3.5 + n 2.8 us             | 0.75               |

With one host a ring's steps are n - 1 hops. The formulas and their constants are those by which NCCL itself chooses
(src/graph/tuning.cc of github.com/NVIDIA/nccl; its protocol for large messages); TPUs have rings only. Rings:
Patarasso and Yuan, JPDC 2009; trees: Sanders, Speck and Traeff, Parallel Computing 2009. What NVLink's switches can
reduce by themselves (NVLS) is left out, and each collective is counted by itself: a compiler merges small ones.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

from jaxtp.hardware import Hardware, inside_domain, link_of
from jaxtp.models.budget import ALL_REDUCE

TREE_SHARE, PAT_SHARE = 0.92, 0.75
PAT_NETWORK = 1 / 3.5
PAT_EACH_S = 2.8e-6


def collective_seconds(
    hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str], kind: str, bytes_sent: float
) -> float:
    """Seconds of one collective.

    Args:
      hardware: its links.
      sizes: devices along each axis.
      axes: those along which the devices talk.
      kind: all-reduce, all-gather or reduce-scatter.
      bytes_sent: by each device, around a ring.
    """
    axes = tuple(axes)
    moving = bytes_sent / link_speed(hardware, sizes, axes)
    return min(steps + moving / share for steps, share in _algorithms(hardware, sizes, axes, kind))


def _algorithms(
    hardware: Hardware, sizes: Mapping[str, int], axes: tuple[str, ...], kind: str
) -> Iterator[tuple[float, float]]:
    """Seconds however little is sent, and the share of the links' speed, of each that there is."""
    devices = math.prod(sizes[axis] for axis in axes)
    hosts = devices // inside_domain(hardware, sizes, axes)
    start, hop, network = hardware.latency, hardware.hop, hardware.network_hop
    rounds = 2 if kind == ALL_REDUCE else 1
    yield start + rounds * ((devices - hosts) * hop + (hosts - 1) * network), 1.0
    if hardware.platform == "tpu":
        return
    if kind == ALL_REDUCE:
        yield start + 2 * ((devices // hosts - 1) * hop + math.log2(hosts) * network), TREE_SHARE
    elif 1 < hosts == devices:
        yield start + math.log2(hosts) * network * PAT_NETWORK + devices * PAT_EACH_S, PAT_SHARE


def leaves_domain(hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> bool:
    """Whether devices along these axes are in several domains."""
    axes = tuple(axes)
    return inside_domain(hardware, sizes, axes) < math.prod(sizes[axis] for axis in axes)


def link_speed(hardware: Hardware, sizes: Mapping[str, int], axes: Iterable[str]) -> float:
    """Bytes/s that each device of a ring along these axes can send.

    A ring that leaves its domain goes through the network as often as it has devices there: each brings its own share.
    Where links join pairs directly, a ring has those between its devices.
    """
    axes = tuple(axes)
    inside = inside_domain(hardware, sizes, axes)
    link = link_of(hardware, inside)
    if leaves_domain(hardware, sizes, axes):
        link = min(link, hardware.network * inside)
    return link * hardware.link_efficiency
