"""Measurements in the terms of an estimate: latency and bandwidth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jaxtp.bench.moving import Message
from jaxtp.communication import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from jaxtp.hardware import Hardware, inside_domain, link_of


@dataclass(frozen=True)
class Line:
    """Seconds of a collective along an axis, as `latency + bytes sent / speed`."""

    axis: str
    """Axis of the mesh."""

    devices: int
    """Along it."""

    latency: float
    """Seconds."""

    speed: float
    """Bytes/s that each device sends."""

    off: float
    """Median of how far the measured times are from it, relative to them."""


_AROUND_A_RING = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)


def fit(messages: Sequence[Message]) -> Line | None:
    """Returns the line through the collectives around a ring of one axis; None if times do not grow with bytes.

    Errors count relative to the times, so that short messages decide the latency and long ones the speed. All-to-alls
    and permutes are left out: they go between pairs of devices, for which an estimate has rules of its own.
    """
    taken = [message for message in messages if message.collective.kind in _AROUND_A_RING]
    seconds = np.array([message.seconds for message in taken])
    sent = np.array([message.collective.bytes_sent for message in taken])
    per_byte = sent / seconds
    (latency, slope), *_ = np.linalg.lstsq(np.stack([1 / seconds, per_byte], axis=1), np.ones(len(taken)))
    if latency < 0:
        latency, slope = 0.0, per_byte.sum() / (per_byte**2).sum()
    if slope <= 0:
        return None
    off = float(np.median(np.abs(latency + slope * sent - seconds) / seconds))
    return Line(taken[0].axis, taken[0].collective.group, float(latency), float(1 / slope), off)


def measured_fields(
    hardware: Hardware, sizes: Mapping[str, int], lines: Sequence[Line], matmul_efficiency: float
) -> dict[str, float]:
    """Returns the fields of a hardware file that give an estimate what was measured.

    What does not grow with bytes is all latency: a start and the steps around a ring of that size are not told apart.
    Where an axis lies within a domain of fast links its speed is that of a link, or, of links between pairs, of those
    that it has; else it is that of each device's share of the network. Of several the axis with the most devices
    counts. Measured speeds are what programs reach, so
    `link_efficiency`, which takes a share of both, is 1, and a network that was not measured is less by the share.

    Args:
      hardware: what is not measured.
      sizes: devices along each axis of the measured mesh.
      lines: of its axes.
      matmul_efficiency: measured.
    """
    inside = {line.axis: inside_domain(hardware, sizes, (line.axis,)) for line in lines}
    by_size = sorted(lines, key=lambda line: line.devices)
    fast = [line for line in by_size if inside[line.axis] == line.devices]
    slow = [line for line in by_size if inside[line.axis] < line.devices]
    share = 1.0 if fast else hardware.link_efficiency
    fields = {"matmul_efficiency": matmul_efficiency}
    if fast:
        network = hardware.network * hardware.link_efficiency
        own = link_of(hardware, fast[-1].devices) / hardware.link
        fields |= {"link": fast[-1].speed / own, "link_efficiency": share, "network": network}
    if slow:
        fields["network"] = slow[-1].speed / inside[slow[-1].axis] / share
    if lines:
        fields |= {"latency": (fast or slow)[-1].latency, "hop" if fast else "network_hop": 0.0}
    return fields
