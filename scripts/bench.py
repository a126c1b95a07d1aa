"""Times collectives, and the products of a transformer block on each device.

    python scripts/bench.py --config configs/llama3_8b.yaml --mesh fsdp=2,tp=4 --out h100.yaml
    jaxtp estimate --config configs/llama3_8b.yaml --hardware h100.yamlx8

Several processes, started as for `jaxtp train`, measure together, and the first prints and writes.
Without GPUs it times virtual CPU devices, which share one processor: this tests the script, but
says nothing about hardware.

A collective is timed in a loop within one program: starting a program from Python takes longer than
a small message. All groups along an axis communicate at once. Compiled for an H100, the loop adds
nothing to an all-reduce, a copy of 1/n of the message (n devices) to an all-gather or a
reduce-scatter, and a copy of the whole message to a permute.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxtp.analysis.hardware import TABLE, Hardware, inside_domain, link_of, of_kind
from jaxtp.analysis.step_costs import step_costs
from jaxtp.analysis.tables import columns
from jaxtp.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_size,
    device_view,
    permute,
    reduce_scatter,
    vary,
)
from jaxtp.config import entry
from jaxtp.config.command_line import parse_mesh
from jaxtp.config.files import require_writable, writing
from jaxtp.config.schema import ConfigError, from_yaml
from jaxtp.distributed.agreement import host_names, process_name, run_and_report
from jaxtp.distributed.devices import build_mesh
from jaxtp.distributed.joining import join_processes
from jaxtp.guards.stragglers import gather_numbers
from jaxtp.mesh import AXES, CP, TP, Sizes, batch_parts, describe_mesh, mesh_shape, mesh_sizes
from jaxtp.train.config import TrainConfig

SIZES = [2**14 * 4**i for i in range(8)]
"""Bytes, 16 KiB to 256 MiB: from one token's activations to a gathered weight."""
WARM_UP = 2  # calls before the first timed call

KINDS: Mapping[str, Callable[[Array, str], Array]] = {
    ALL_REDUCE: lambda x, axis: vary(all_reduce(x, axis), axis),
    ALL_GATHER: lambda x, axis: all_gather(x[: x.shape[0] // axis_size(axis)], axis),
    REDUCE_SCATTER: lambda x, axis: lax.dynamic_update_slice_in_dim(
        x, reduce_scatter(x, axis), 0, 0
    ),
    ALL_TO_ALL: lambda x, axis: all_to_all(x, axis, split=0, join=0),
    PERMUTE: permute,
}
"""Collectives whose result has the shape of their argument, so that a loop can repeat them."""


class Message(NamedTuple):
    """A collective and its median time."""

    collective: Collective
    seconds: float


class Line(NamedTuple):
    """Fitted seconds of collectives along an axis: `latency + bytes sent / speed`."""

    axis: str
    devices: int
    latency: float
    speed: float  # bytes/s that each device sends
    error: float  # median relative error of the line


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", help="configuration of jaxtp train, for the block's sizes")
    parser.add_argument("--mesh", help="sizes of the axes, fsdp=2,tp=4; by default tp of all")
    parser.add_argument("--message-bytes", type=int, nargs="+", help="sizes of the messages")
    parser.add_argument("--rounds", type=int, default=10, help="measurements of each program")
    parser.add_argument("--in-a-row", type=int, default=10, help="runs in each measurement")
    parser.add_argument(
        "--like", choices=TABLE, help="row of the hardware table, by default that of the devices"
    )
    parser.add_argument("--out", type=Path, help="file for jaxtp estimate --hardware FILE.yamlx8")
    options = parser.parse_args(argv)
    return run_and_report(lambda: entry.attempt("bench.py", lambda: bench(options)))


def bench(options: argparse.Namespace) -> None:
    join_processes()
    require_writable("--out", options.out)
    config = TrainConfig() if options.config is None else from_yaml(TrainConfig, options.config)
    mesh = build_mesh(parse_mesh(options.mesh, AXES) if options.mesh else mesh_shape(tp=-1))
    sizes = mesh_sizes(mesh)
    device = mesh.devices.flat[0]
    hardware = TABLE[options.like] if options.like else of_kind(device.device_kind)
    if options.out is not None and hardware is None:
        raise ConfigError(
            f"--out: {device.device_kind!r} is not in the hardware table "
            "(jaxtp/analysis/hardware.toml); name the most similar row, as in --like h100"
        )
    dtype = config.model.precision.compute
    message_bytes = options.message_bytes or (SIZES[:4] if device.platform == "cpu" else SIZES)
    messages = list(measure_messages(mesh, dtype, message_bytes, options.rounds, options.in_a_row))
    rows = max(1, config.data.global_batch_size // (batch_parts(sizes) * config.train.accumulation))
    costs = step_costs(
        config.model,
        mesh_shape(tp=sizes[TP]),
        batch_size=rows,
        sequence_length=config.data.sequence_length // sizes[CP],
    )
    shapes = {product.name: (product.m, product.k, product.n) for product in costs.products}
    del shapes["head"]  # not in a block
    seconds, slowest = measure_devices(mesh, shapes, dtype, options)
    flops = 2 * sum(m * k * n for m, k, n in shapes.values()) / sum(seconds.values())
    if jax.process_index() != 0:
        return
    where = f"{mesh.size} x {device.device_kind}, {describe_mesh(sizes)}, {dtype}"
    print(f"{where}; medians of {options.rounds} rounds of {options.in_a_row} runs\n")
    print(table(messages, shapes, seconds))
    lines = [line for axis in AXES if (line := fit_line(axis, messages))]
    for line in lines:
        print(
            f"{line.axis} {line.devices}: {1e6 * line.latency:.3g} us and {line.speed / 1e9:.3g} "
            f"GB/s; half of the times are within {line.error:.0%} of this line"
        )
    print(slowest)
    if hardware is not None:
        efficiency = flops / (hardware.flops * 2 / jnp.dtype(dtype).itemsize)
        print(f"products: {efficiency:.1%} of the peak of {hardware.name}")
    if options.out is not None:
        fields = measured_fields(hardware, sizes, lines, efficiency)
        with writing("--out", options.out):
            options.out.write_text(hardware_file(hardware, fields, where))
        print(f"\n{options.out}: for jaxtp estimate --hardware {options.out}x{mesh.size}")


def table(
    messages: Sequence[Message],
    shapes: Mapping[str, tuple[int, int, int]],
    seconds: Mapping[str, float],
) -> str:
    rows = []
    for collective, duration in messages:
        place = f"{collective.axes[0]} {collective.group}"
        speed = f"{collective.bytes_sent / duration / 1e9:.3g} GB/s"
        size = f"{collective.bytes / 2**10:,.4g} KiB"
        rows.append((collective.kind, place, size, f"{1e6 * duration:,.1f}", speed))
    for name, (m, k, n) in shapes.items():
        speed = f"{2e-12 * m * k * n / seconds[name]:.3g} TFLOP/s"
        rows.append((name, "", f"{m:,} x {k:,} x {n:,}", f"{1e6 * seconds[name]:,.1f}", speed))
    return columns(("measured", "over", "size", "us", "speed of a device"), rows)


def measure_messages(
    mesh: Mesh, dtype: str, sizes: Sequence[int], rounds: int, in_a_row: int
) -> Iterator[Message]:
    """Times messages of these bytes, of every kind, along every axis larger than 1."""
    make = jax.jit(
        jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, P(AXES))
    )
    itemsize = jnp.dtype(dtype).itemsize
    for axis in (axis for axis in AXES if mesh.shape[axis] > 1):
        devices = mesh.shape[axis]
        for size in sizes:
            elements = max(1, size // (itemsize * devices)) * devices
            x = make(jax.random.key(0), (mesh.size * elements,), dtype)
            programs = {}
            with jax.set_mesh(mesh):
                for kind in KINDS:
                    compiled = jax.jit(repeated(kind, axis, in_a_row)).lower(x).compile()
                    programs[kind] = partial(compiled, x)
            for kind, seconds in medians(programs, rounds).items():
                collective = Collective(kind, (axis,), devices, elements * itemsize)
                yield Message(collective, seconds / in_a_row)


def repeated(kind: str, axis: str, times: int) -> Callable[[Array], Array]:
    """Returns a function that runs a collective repeatedly on an array split over all devices."""

    def body(x: Array) -> Array:
        return lax.scan(lambda x, _: (KINDS[kind](x, axis), None), x, length=times)[0]

    return device_view(body, f"bench_{kind}", (P(AXES),), P(AXES))


def measure_devices(
    mesh: Mesh,
    shapes: Mapping[str, tuple[int, int, int]],
    dtype: str,
    options: argparse.Namespace,
) -> tuple[dict[str, float], str]:
    """Times the products on each local device.

    Returns the seconds of the first one, and a line that names the slowest of all processes.
    """
    by_device = []
    for device in mesh.local_devices:
        with jax.default_device(device):
            by_device.append(measure_products(shapes, dtype, options.rounds, options.in_a_row))
    totals = [sum(seconds.values()) for seconds in by_device]
    # [processes, local devices]
    gathered = gather_numbers(np.array(totals, np.float32))
    factor = gathered.max() / np.percentile(gathered, 50, method="lower")
    process, local = divmod(int(gathered.argmax()), gathered.shape[1])
    name = f"device {local} of {process_name(process, host_names()[process])}"
    line = f"slowest: {name} takes {factor:.2f} times the median for the same products"
    return by_device[0], line


def measure_products(
    shapes: Mapping[str, tuple[int, int, int]], dtype: str, rounds: int, in_a_row: int
) -> dict[str, float]:
    """Times products `[m, k] x [k, n]` on one device."""
    left, right = jax.random.split(jax.random.key(0))
    matmul = jax.jit(jnp.matmul)
    programs = {}
    for name, (m, k, n) in shapes.items():
        a = jax.random.normal(left, (m, k), dtype)
        programs[name] = partial(matmul, a, jax.random.normal(right, (k, n), dtype))
    return medians(programs, rounds, calls=in_a_row)


def medians(
    programs: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of a call of each program.

    Each round runs all programs in turn, so that changes of the machine's speed affect all. A
    measurement starts `calls` calls, then waits for their arrays.
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
            # A device runs its programs in order, so the last ends last.
            jax.block_until_ready(program())
            times[name].append((clock() - started) / calls)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def fit_line(axis: str, messages: Sequence[Message]) -> Line | None:
    """Fits an axis's ring collectives; None without any, or if times do not grow with bytes.

    Errors are relative, so that short messages decide the latency and long messages the speed.
    """
    kinds = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    ring = [m for m in messages if m.collective.axes == (axis,) and m.collective.kind in kinds]
    if not ring:
        return None
    seconds = np.array([message.seconds for message in ring])
    sent = np.array([message.collective.bytes_sent for message in ring])
    per_byte = sent / seconds
    (latency, slope), *_ = np.linalg.lstsq(
        np.stack([1 / seconds, per_byte], axis=1), np.ones(len(ring))
    )
    if latency < 0:
        latency = 0.0
        slope = per_byte.sum() / (per_byte**2).sum()
    if slope <= 0:
        return None
    error = float(np.median(np.abs(latency + slope * sent - seconds) / seconds))
    return Line(axis, ring[0].collective.group, float(latency), float(1 / slope), error)


def measured_fields(
    hardware: Hardware, sizes: Sizes, lines: Sequence[Line], matmul_efficiency: float
) -> dict[str, float]:
    """Returns the measured fields of a hardware file.

    The latency includes a ring's steps, so `hop` is 0. An axis inside a domain of fast links
    determines `link`, and any other axis `network`; of several axes, the one with the most devices.
    A measured `link` includes inefficiency, so `link_efficiency` is 1. A network that is not
    measured gets the table's value times its efficiency.
    """
    fitted = {line.axis for line in lines}
    missing = [axis for axis in AXES if sizes[axis] > 1 and axis not in fitted]
    if missing:
        raise ConfigError(
            f"--out: the times along {' and '.join(missing)} do not increase with the "
            "message size, so no bandwidth can be fitted; use a wider range of --message-bytes, "
            "or more --rounds"
        )
    inside = {line.axis: inside_domain(hardware, sizes, (line.axis,)) for line in lines}
    by_size = sorted(lines, key=lambda line: line.devices)
    fast = [line for line in by_size if inside[line.axis] == line.devices]
    slow = [line for line in by_size if inside[line.axis] < line.devices]
    efficiency = hardware.link_efficiency
    fields = {"matmul_efficiency": matmul_efficiency}
    if fast:
        efficiency = 1.0
        share = link_of(hardware, fast[-1].devices) / hardware.link
        fields["link"] = fast[-1].speed / share
        fields["link_efficiency"] = efficiency
        fields["network"] = hardware.network * hardware.link_efficiency
    if slow:
        fields["network"] = slow[-1].speed / inside[slow[-1].axis] / efficiency
    if lines:
        fields["latency"] = (fast or slow)[-1].latency
        fields["hop" if fast else "network_hop"] = 0.0
    return fields


def hardware_file(hardware: Hardware, fields: Mapping[str, float], where: str) -> str:
    lines = [
        f"# scripts/bench.py on {where}, jax {jax.__version__}",
        f"like: {hardware.name} # for all other keys",
        *(f"{name}: {value:.3e}" for name, value in fields.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
