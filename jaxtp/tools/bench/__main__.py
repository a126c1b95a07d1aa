"""`jaxtp bench`: times collectives along each mesh axis, and a transformer block's products.

A collective is timed in a loop within one program: starting a program from Python takes longer than
a small message. All groups along an axis communicate at once. Compiled for an H100, the loop adds
nothing to an all-reduce, a copy of 1/n of the message (n devices) to an all-gather or a
reduce-scatter, and a copy of the whole message to a permute.
"""

if __name__ == "__main__":
    from jaxtp.config.entry import start

    start("jaxtp bench")

import contextlib
import io
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.collective import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from jaxtp.analysis.hardware import TABLE, Hardware, find, inside_domain, link_of, of_kind
from jaxtp.analysis.step_costs import step_costs
from jaxtp.analysis.tables import Record, columns
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
from jaxtp.config.affects import Argument, in_short_help
from jaxtp.config.command_line import Command, choose
from jaxtp.config.files import require_writable, write_json, writing
from jaxtp.config.schema import ConfigError, Count, OptionalFile, UserPath, replace_nested
from jaxtp.distributed.agreement import raise_everywhere, run_and_report, watch
from jaxtp.distributed.devices import build_mesh
from jaxtp.distributed.environment import enable_compilation_cache
from jaxtp.distributed.joining import join_processes
from jaxtp.mesh import (
    AXES,
    CONTEXT,
    TP,
    Sizes,
    batch_parts,
    describe_mesh,
    mesh_shape,
    mesh_sizes,
    parts,
)
from jaxtp.models.config import ModelConfig, padded_sizes, violations
from jaxtp.train.config import IGNORED_BY_COST, TrainConfig, training_of
from jaxtp.train.defaults import resolve_defaults
from jaxtp.train.run_report import describe_block

KIB = 2**10
SIZES = tuple(KIB * 4**i for i in range(2, 10))
"""Bytes, 16 KiB to 256 MiB: from one token's activations to a gathered weight."""
CPU_SIZES = SIZES[:4]  # Bytes, up to 1 MiB
WARM_UP = 2  # calls before the first timed call
VIRTUAL = "virtual CPU devices share one processor: their times mean nothing for hardware"

PROGRAM = "jaxtp bench"
DESCRIPTION = """Measures collectives and matrix products on the devices of this machine.

Times all-reduce, all-gather, reduce-scatter, all-to-all and permute over message sizes on each axis
of the mesh, and the matrix products of a transformer block at each tp. --config FILE reads the
configuration of a training run (see configs/), for its mesh and sizes; dotted flags override it.
--out writes a hardware file for jaxtp estimate.

  jaxtp bench comm --config configs/llama3_8b.yaml --out h100.yaml
  jaxtp estimate --config configs/llama3_8b.yaml --hardware h100.yamlx8

Without GPUs it measures virtual CPU devices: this tests the command, but says nothing about
hardware. Several processes, started as for jaxtp train, measure together; the first prints and
writes.
"""


@dataclass(frozen=True, kw_only=True)
class CommConfig(TrainConfig):
    """Flags of `jaxtp bench comm`, and a training configuration for mesh and sizes."""

    message_bytes: Annotated[tuple[Count, ...], Argument("16384 1048576")] = ()
    """Sizes of the messages in bytes; by default 16 KiB to 256 MiB (on CPUs to 1 MiB), each four
    times the previous one."""

    rounds: Count = 10
    """Measurements of each program; the median counts."""

    in_a_row: Count = 10
    """Runs in each measurement, which share the time to start a program from Python."""

    out: Annotated[UserPath | None, Argument("FILE.yaml")] = None
    """Hardware file to write, for jaxtp estimate --hardware FILE.yamlx8."""

    like: Annotated[str | None, Argument("h100")] = None
    """Row of the hardware table that supplies the peak FLOP/s, and every value that bench does not
    measure; by default the row of the present devices."""

    json: OptionalFile = None
    """JSON file for all numbers."""


COMMANDS = {
    "comm": Command(
        program=f"{PROGRAM} comm",
        schema=CommConfig,
        description=DESCRIPTION,
        short_help=(
            *("message_bytes", "rounds", "in_a_row", "out", "like", "json"),
            *in_short_help(TrainConfig),
        ),
        ignored=IGNORED_BY_COST,
    )
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _bench(argv)))


class Message(NamedTuple):
    """A collective along one axis, and its median time."""

    axis: str
    devices: int
    kind: str
    bytes: int  # Size of a device's larger array: the result, or a reduce-scatter's input
    bytes_sent: float  # Bytes that each device sends
    seconds: float


class TimedProduct(NamedTuple):
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


class Line(NamedTuple):
    """Fitted seconds of collectives along an axis: `latency + bytes sent / speed`."""

    axis: str
    devices: int
    latency: float
    speed: float
    """Bytes/s that each device sends."""
    error: float
    """Median relative error of the line."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results on the devices of a mesh."""

    kind: str
    platform: str
    sizes: Sizes
    dtype: str  # Dtype of messages and products
    hardware: Hardware | None  # The row of the hardware table to compare with
    messages: Sequence[Message]
    products: Sequence[TimedProduct]

    @property
    def peak(self) -> float | None:
        """FLOP/s of the hardware in the dtype; float32 has half of bfloat16's."""
        if self.hardware is None:
            return None
        return self.hardware.flops * 2 / jnp.dtype(self.dtype).itemsize

    @property
    def lines(self) -> list[Line]:
        """The fitted line of each axis whose times grow with the bytes."""
        by_axis = itertools.groupby(self.messages, key=lambda message: message.axis)
        lines = (fit_line(list(messages)) for _, messages in by_axis)
        return list(filter(None, lines))

    @property
    def matmul_efficiency(self) -> float | None:
        """The products' share of the peak, at the tp nearest to the mesh's; None if unknown."""
        if self.peak is None:
            return None
        nearest = min(self.products, key=lambda product: abs(product.tp - self.sizes[TP]))
        products = [product for product in self.products if product.tp == nearest.tp]
        flops = sum(product.flops for product in products)
        return flops / sum(product.seconds for product in products) / self.peak

    def table(self) -> str:
        """Formats a line per collective and size, and per product and tp."""
        rows = []
        for message in self.messages:
            place = f"{message.axis} {message.devices}"
            size = f"{digits(message.bytes / KIB)} KiB"
            speed = f"{digits(message.bytes_sent / message.seconds / 1e9)} GB/s"
            rows.append((message.kind, place, size, f"{message.seconds * 1e6:,.1f}", speed))
        for product in self.products:
            rate = product.flops / product.seconds
            share = "" if self.peak is None else f", {rate / self.peak:.1%} of the peak"
            shape = f"{product.m:,} x {product.k:,} x {product.n:,}"
            speed = f"{digits(rate / 1e12)} TFLOP/s{share}"
            microseconds = f"{product.seconds * 1e6:,.1f}"
            rows.append((product.name, f"tp {product.tp}", shape, microseconds, speed))
        return columns(("measured", "over", "size", "us", "speed of a device"), rows)

    def hardware_file(self) -> str:
        """Returns the measured fields as YAML; needs `hardware`."""
        lines = self.lines
        fitted = {line.axis for line in lines}
        missing = {message.axis for message in self.messages} - fitted
        if missing:
            raise ConfigError(
                f"--out: the times along {' and '.join(sorted(missing))} do not increase with the "
                "message size, so no bandwidth can be fitted; use a wider range of "
                "--message-bytes, or more --rounds"
            )
        efficiency = self.matmul_efficiency
        assert self.hardware is not None
        assert efficiency is not None
        devices = devices_text(self.platform, self.kind, self.sizes)
        text = f"# jaxtp bench comm on {devices}, jax {jax.__version__}\n"
        if self.platform == "cpu":
            text += f"# {VIRTUAL}\n"
        text += f"like: {self.hardware.name} # for all other keys\n"
        for name, value in measured_fields(self.hardware, self.sizes, lines, efficiency).items():
            text += f"{name}: {value:.3e}\n"
        return text

    def record(self) -> Record:
        """Returns every number for JSON."""
        place = {
            "kind": self.kind,
            "platform": self.platform,
            "sizes": self.sizes,
            "dtype": self.dtype,
            "devices": math.prod(self.sizes.values()),
            "processes": jax.process_count(),
            "hardware": None if self.hardware is None else asdict(self.hardware),
        }
        return {
            "jax": jax.__version__,
            **({"note": VIRTUAL} if self.platform == "cpu" else {}),
            "place": place,
            "messages": list(map(Message._asdict, self.messages)),
            "products": list(map(TimedProduct._asdict, self.products)),
            "lines": list(map(Line._asdict, self.lines)),
            "matmul_efficiency": self.matmul_efficiency,
        }


def _bench(argv: Sequence[str]) -> None:
    name, flags = choose(PROGRAM, COMMANDS, argv)
    join_processes()
    with raise_everywhere(watch):
        options, _ = COMMANDS[name].load(flags, _with_defaults)
    config = training_of(options)
    mesh = build_mesh(config.mesh.sizes)
    enable_compilation_cache(mesh.devices.flat[0].platform)
    if jax.process_index() != 0:
        with contextlib.redirect_stdout(io.StringIO()):
            _measure(options, config, mesh)
        return
    require_writable("--json", options.json)
    require_writable("--out", options.out)
    if options.out is not None and options.out.suffix not in (".yaml", ".yml"):
        raise ConfigError(
            f"--out {options.out}: a hardware file is YAML; name it "
            f"{options.out.with_suffix('.yaml')}"
        )
    measured = _measure(options, config, mesh)
    write_json("--json", options.json, measured.record())
    if options.out is not None:
        with writing("--out", options.out):
            options.out.write_text(measured.hardware_file())
        print(f"\n{options.out}: for jaxtp estimate --hardware {options.out}x{mesh.size}")


def _with_defaults(options: CommConfig, explicit: Set[str]) -> tuple[CommConfig, list[str]]:
    # Epochs would need a dataset.
    return resolve_defaults(replace_nested(options, {"train.epochs": None}), explicit)


def _measure(options: CommConfig, config: TrainConfig, mesh: Mesh) -> Measured:
    device = mesh.devices.flat[0]
    sizes = mesh_sizes(mesh)
    dtype = config.model.precision.compute
    hardware = _hardware_of(options, device)
    virtual = device.platform == "cpu"
    tps = usable_tps(config.model, mesh.size)
    rows = max(1, config.data.global_batch_size // (batch_parts(sizes) * config.train.accumulation))
    length = max(1, config.data.sequence_length // parts(sizes, CONTEXT))
    devices = devices_text(device.platform, device.device_kind, sizes)
    print(
        f"devices {devices}, processes: {jax.process_count()}, jaxtp {jaxtp.__version__} with jax "
        f"{jax.__version__}"
    )
    print(f"mesh    {describe_mesh(sizes)}, {dtype}")
    print(
        f"block   {describe_block(config.model)}; {rows * length:,} tokens on a device: {rows} of "
        f"{length:,}"
    )
    print(
        f"times   medians of {options.rounds} rounds, {options.in_a_row} runs in each, after a "
        "warm-up; random data"
    )
    print(f"beware  {VIRTUAL}\n" if virtual else "", flush=True)
    message_bytes = options.message_bytes or (CPU_SIZES if virtual else SIZES)
    measured = Measured(
        kind=device.device_kind,
        platform=device.platform,
        sizes=sizes,
        dtype=dtype,
        hardware=hardware,
        messages=list(
            measure_messages(mesh, dtype, message_bytes, options.rounds, options.in_a_row)
        ),
        products=list(
            measure_products(config.model, tps, rows, length, options.rounds, options.in_a_row)
        ),
    )
    print(measured.table(), flush=True)
    for line in measured.lines:
        print(
            f"{line.axis} {line.devices}: {digits(line.latency * 1e6)} us and "
            f"{digits(line.speed / 1e9)} GB/s; half of "
            f"the times are within {line.error:.0%} of this line"
        )
    return measured


def devices_text(platform: str, kind: str, sizes: Sizes) -> str:
    """Formats devices: `8 x NVIDIA H100 80GB HBM3`."""
    count = math.prod(sizes.values())
    return f"{count} virtual CPU devices" if platform == "cpu" else f"{count} x {kind}"


def usable_tps(model: ModelConfig, devices: int) -> list[int]:
    """Returns the powers of two up to `devices` that divide a block without padding."""
    if problems := list(violations(model, mesh_shape())):
        raise ConfigError("\n  ".join(("these settings do not fit each other:", *problems)))
    powers = [2**exponent for exponent in range(devices.bit_length())]
    return [tp for tp in powers if not padded_sizes(model, tp)]


def _hardware_of(options: CommConfig, device: jax.Device) -> Hardware | None:
    if options.like is not None:
        if options.like.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"--like {options.like}: should be a name of the table, one of {', '.join(TABLE)}"
            )
        return find(options.like)
    hardware = of_kind(device.device_kind)
    if hardware is None and options.out is not None:
        raise ConfigError(
            f"--out {options.out}: {device.device_kind!r} is not in the hardware table "
            "(jaxtp/analysis/hardware.py); name the most similar row, as in --like h100"
        )
    return hardware


def digits(value: float) -> str:
    """Formats three significant digits: `1,234`, `12.3`, `0.0123`."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}" if value >= 1e-6 else f"{value:.2e}"


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


def measure_messages(
    mesh: Mesh, dtype: str, sizes: Sequence[int], rounds: int, in_a_row: int
) -> Iterator[Message]:
    """Times collectives of every kind along every axis larger than 1.

    `sizes` are the bytes of the messages.
    """
    make = jax.jit(
        jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, P(AXES))
    )
    itemsize = jnp.dtype(dtype).itemsize
    axes = [axis for axis in AXES if mesh.shape[axis] > 1]
    for axis, size in itertools.product(axes, sizes):
        devices = mesh.shape[axis]
        elements = max(1, size // (itemsize * devices)) * devices
        x = make(jax.random.key(0), (mesh.size * elements,), dtype)
        programs = {}
        with jax.set_mesh(mesh):
            for kind in KINDS:
                compiled = jax.jit(repeated(kind, axis, in_a_row)).lower(x).compile()
                programs[kind] = partial(compiled, x)
        for kind, seconds in medians(programs, rounds).items():
            collective = Collective(kind, (axis,), devices, elements * itemsize)
            sent = collective.bytes_sent
            yield Message(axis, devices, kind, int(collective.bytes), sent, seconds / in_a_row)


def repeated(kind: str, axis: str, times: int) -> Callable[[Array], Array]:
    """Returns a function that runs a collective repeatedly on an array split over all devices."""

    def body(x: Array) -> Array:
        return lax.scan(lambda x, _: (KINDS[kind](x, axis), None), x, length=times)[0]

    return device_view(body, f"bench_{kind}", (P(AXES),), P(AXES))


def measure_products(
    model: ModelConfig, tps: Sequence[int], rows: int, length: int, rounds: int, in_a_row: int
) -> Iterator[TimedProduct]:
    """Times a block's products on one device, for `rows` sequences of `length`, at every tp."""
    for tp in tps:
        costs = step_costs(model, mesh_shape(tp=tp), batch_size=rows, sequence_length=length)
        shapes = {product.name: (product.m, product.k, product.n) for product in costs.products}
        del shapes["head"]  # not in a block
        left, right = jax.random.split(jax.random.key(0))
        dtype = model.precision.compute
        matmul = jax.jit(jnp.matmul)
        programs = {}
        for name, (m, k, n) in shapes.items():
            a = jax.random.normal(left, (m, k), dtype)
            b = jax.random.normal(right, (k, n), dtype)
            programs[name] = partial(matmul, a, b)
        seconds = medians(programs, rounds, calls=in_a_row)
        for name, shape in shapes.items():
            yield TimedProduct(tp, name, *shape, seconds[name])


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


def fit_line(messages: Sequence[Message]) -> Line | None:
    """Fits one axis's ring collectives; None if times do not grow with bytes.

    Errors are relative, so that short messages decide the latency and long messages the speed.
    """
    kinds = (ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER)
    ring = [message for message in messages if message.kind in kinds]
    seconds = np.array([message.seconds for message in ring])
    sent = np.array([message.bytes_sent for message in ring])
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
    return Line(ring[0].axis, ring[0].devices, float(latency), float(1 / slope), error)


def measured_fields(
    hardware: Hardware, sizes: Sizes, lines: Sequence[Line], matmul_efficiency: float
) -> dict[str, float]:
    """Returns the measured fields of a hardware file.

    The latency includes a ring's steps, so `hop` is 0. An axis inside a domain of fast links
    determines `link`, and any other axis `network`; of several axes, the one with the most devices.
    A measured `link` includes inefficiency, so `link_efficiency` is 1. A network that is not
    measured gets the table's value times its efficiency.
    """
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


if __name__ == "__main__":
    entry.run(PROGRAM, main)
