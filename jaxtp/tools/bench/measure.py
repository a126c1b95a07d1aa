"""Measures collectives along each mesh axis and the matrix products of a transformer block.

A collective is timed in a loop within one program: starting a program from Python takes longer than a small message.
All groups along an axis communicate at once. For an H100 the loop adds nothing to an all-reduce, a copy of 1/n of the
message to an all-gather and a reduce-scatter, and a copy of the message to a permute.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, REDUCE_SCATTER, Collective
from jaxtp.analysis.hardware import Hardware, inside_domain, link_of
from jaxtp.analysis.step_costs import step_costs
from jaxtp.collectives import all_gather, all_reduce, all_to_all, axis_size, device_view, permute, reduce_scatter, vary
from jaxtp.mesh import AXES, mesh_shape
from jaxtp.models.config import ModelConfig

Program = Callable[[], object]
"""Returns arrays, which are waited for."""
WARM_UP = 2  # calls before the first that is timed


class Repeats(NamedTuple):
    """Measurements, whose median counts, and runs in each."""

    rounds: int = 10
    in_a_row: int = 10


@dataclass(frozen=True)
class Message:
    """A collective along one axis, and its median time.

    `collective.bytes` is the size of a device's larger array: the result, or a reduce-scatter's input.
    """

    collective: Collective
    seconds: float

    @property
    def axis(self) -> str:
        """The mesh axis."""
        return self.collective.axes[0]

    @property
    def speed(self) -> float:
        """Bytes/s that each device sends."""
        return self.collective.bytes_sent / self.seconds

    def record(self) -> dict[str, object]:
        """Returns every number for JSON."""
        one = self.collective
        sizes = {"bytes": int(one.bytes), "bytes_sent": one.bytes_sent}
        return {"axis": self.axis, "devices": one.group, "kind": one.kind, **sizes, "seconds": self.seconds}


@dataclass(frozen=True)
class TimedProduct:
    """A block's product `[m, k] x [k, n]` on one of `tp` devices, and its median time."""

    tp: int
    name: str
    m: int
    k: int
    n: int
    seconds: float

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.k * self.n


@dataclass(frozen=True)
class Line:
    """Seconds of collectives along an axis, as `latency + bytes sent / speed`."""

    axis: str
    devices: int
    latency: float
    speed: float
    """Bytes/s that each device sends."""
    error: float
    """Median relative error of the line."""


KINDS: Mapping[str, Callable[[Array, str], Array]] = {
    ALL_REDUCE: lambda x, axis: vary(all_reduce(x, axis), axis),
    ALL_GATHER: lambda x, axis: all_gather(x[: x.shape[0] // axis_size(axis)], axis),
    REDUCE_SCATTER: lambda x, axis: lax.dynamic_update_slice_in_dim(x, reduce_scatter(x, axis), 0, 0),
    ALL_TO_ALL: lambda x, axis: all_to_all(x, axis, split=0, join=0),
    PERMUTE: permute,
}
"""Collectives whose result has the shape of their argument, so that a loop can repeat them."""


def measure_messages(mesh: Mesh, dtype: str, sizes: Sequence[int], repeats: Repeats) -> Iterator[Message]:
    """Times every kind of collective along every axis larger than 1, on messages of `sizes` bytes."""
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, P(AXES)))
    for axis, size in itertools.product((axis for axis in AXES if mesh.shape[axis] > 1), sizes):
        each = max(1, size // (jnp.dtype(dtype).itemsize * mesh.shape[axis])) * mesh.shape[axis]
        x = make(jax.random.key(0), (mesh.size * each,), dtype)
        with jax.set_mesh(mesh):
            traced = {kind: jax.jit(repeated(kind, axis, repeats.in_a_row)).trace(x) for kind in KINDS}
            programs = {kind: partial(one.lower().compile(), x) for kind, one in traced.items()}
        seconds = medians(programs, repeats.rounds)
        for kind, program in traced.items():
            (moved,) = count_collectives(program.jaxpr, dict(mesh.shape))
            yield Message(moved, seconds[kind] / repeats.in_a_row)


def repeated(kind: str, axis: str, times: int) -> Callable[[Array], Array]:
    """Returns a function that runs a collective `times` times on an array split over all devices."""

    def body(x: Array) -> Array:
        return lax.scan(lambda x, _: (KINDS[kind](x, axis), None), x, length=times)[0]

    return device_view(body, f"bench_{kind}", (P(AXES),), P(AXES))


def measure_products(
    model: ModelConfig, tps: Sequence[int], rows: int, length: int, repeats: Repeats
) -> Iterator[TimedProduct]:
    """Times a block's products on one device, for `rows` sequences of `length`, at every tp."""
    for tp in tps:
        costs = step_costs(model, mesh_shape(tp=tp), batch_size=rows, sequence_length=length)
        shapes = {product.name: (product.m, product.k, product.n) for product in costs.products}
        del shapes["head"]  # not in a block
        left, right = jax.random.split(jax.random.key(0))
        dtype, product = model.precision.compute, jax.jit(jnp.matmul)
        programs = {
            name: partial(product, jax.random.normal(left, (m, k), dtype), jax.random.normal(right, (k, n), dtype))
            for name, (m, k, n) in shapes.items()
        }
        seconds = medians(programs, repeats.rounds, calls=repeats.in_a_row)
        for name, shape in shapes.items():
            yield TimedProduct(tp, name, *shape, seconds[name])


def medians(
    programs: Mapping[str, Program],
    rounds: int,
    *,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of a call of each program.

    Rounds run all programs in turn, so that all see the same machine. A measurement starts `calls` calls, then
    waits.
    """
    for program in programs.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            started = clock()
            for _ in range(calls - 1):
                program()
            jax.block_until_ready(program())  # a device runs its programs in order, so the last ends last
            times[name].append((clock() - started) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def fit_line(messages: Sequence[Message]) -> Line | None:
    """Fits one axis's ring collectives; None if times do not grow with bytes.

    Errors are relative, so that short messages decide the latency and long messages the speed.
    """
    ring = [message for message in messages if message.collective.kind in (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)]
    seconds = np.array([message.seconds for message in ring])
    sent = np.array([message.collective.bytes_sent for message in ring])
    per_byte = sent / seconds
    (latency, slope), *_ = np.linalg.lstsq(np.stack([1 / seconds, per_byte], axis=1), np.ones(len(ring)))
    if latency < 0:
        latency, slope = 0.0, per_byte.sum() / (per_byte**2).sum()
    if slope <= 0:
        return None
    error = float(np.median(np.abs(latency + slope * sent - seconds) / seconds))
    return Line(ring[0].axis, ring[0].collective.group, float(latency), float(1 / slope), error)


def measured_fields(
    hardware: Hardware, sizes: Mapping[str, int], lines: Sequence[Line], matmul_efficiency: float
) -> dict[str, float]:
    """Returns the measured fields of a hardware file.

    The latency includes a ring's steps, so `hop` is 0. An axis inside a domain of fast links measures `link`, others
    the network; the axis with the most devices counts. Measured speeds need no efficiency, so `link_efficiency` is 1;
    the table's efficiency reduces an unmeasured network.
    """
    inside = {line.axis: inside_domain(hardware, sizes, (line.axis,)) for line in lines}
    by_size = sorted(lines, key=lambda line: line.devices)
    fast = [line for line in by_size if inside[line.axis] == line.devices]
    slow = [line for line in by_size if inside[line.axis] < line.devices]
    efficiency = 1.0 if fast else hardware.link_efficiency
    fields = {"matmul_efficiency": matmul_efficiency}
    if fast:
        network = hardware.network * hardware.link_efficiency
        share = link_of(hardware, fast[-1].devices) / hardware.link
        fields |= {"link": fast[-1].speed / share, "link_efficiency": efficiency, "network": network}
    if slow:
        fields["network"] = slow[-1].speed / inside[slow[-1].axis] / efficiency
    if lines:
        fields |= {"latency": (fast or slow)[-1].latency, "hop" if fast else "network_hop": 0.0}
    return fields
