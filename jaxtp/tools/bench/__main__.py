"""`jaxtp bench`."""

import contextlib
import dataclasses
import io
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

import jaxtp
from jaxtp.analysis.hardware import TABLE, Hardware, find, of_kind
from jaxtp.analysis.tables import columns
from jaxtp.config import entry
from jaxtp.config.affects import in_short_help
from jaxtp.config.command_line import Command, choose
from jaxtp.config.files import require_writable, write_json, writing
from jaxtp.config.schema import ConfigError, Count, UserPath, replace_nested
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.distributed.devices import build_mesh
from jaxtp.distributed.environment import keep_programs
from jaxtp.distributed.failures import run_and_report, watch
from jaxtp.distributed.joining import join_processes
from jaxtp.mesh import CONTEXT, TP, batch_parts, describe_mesh, mesh_shape, mesh_sizes, parts
from jaxtp.models.config import ModelConfig, padded_sizes, violations
from jaxtp.tools.bench.measure import (
    Line,
    Message,
    Repeats,
    TimedProduct,
    fit_line,
    measure_messages,
    measure_products,
    measured_fields,
)
from jaxtp.train.config import IGNORED_BY_COST, TrainConfig, training_of
from jaxtp.train.defaults import resolve_defaults

KIB = 2**10
SIZES = tuple(KIB * 4**i for i in range(2, 10))
"""Bytes, 16 KiB to 256 MiB: from one token's activations to a gathered weight."""
CPU_SIZES = tuple(KIB * 4**i for i in range(2, 6))
"""Bytes, up to 1 MiB."""
VIRTUAL = "virtual CPU devices share one processor: their times mean nothing for hardware"

PROGRAM = "jaxtp bench"
DESCRIPTION = """Measures collectives and matrix products on the devices of this machine.

Times all-reduce, all-gather, reduce-scatter, all-to-all and permute over message sizes on each axis of the mesh, and
the matrix products of a transformer block at each tp. --config FILE reads the configuration of a training run (see
configs/), for its mesh and sizes; dotted flags override it. --out writes a hardware file for jaxtp estimate.

  jaxtp bench comm --config configs/llama3_8b.yaml --out h100.yaml
  jaxtp estimate --config configs/llama3_8b.yaml --hardware h100.yamlx8

Without GPUs it measures virtual CPU devices: that tries the command, and says nothing about hardware. Of several
processes, started as those of jaxtp train, the first one prints and writes.
"""


@dataclass(frozen=True, kw_only=True)
class CommConfig(TrainConfig):
    """Command line of a measurement: the mesh and the sizes of a training configuration."""

    message_bytes: Annotated[tuple[Count, ...], tyro.conf.arg(metavar="16384 1048576 ...")] = ()
    """Sizes of messages in bytes. By default 16 KiB to 256 MiB in steps of four, on CPUs to 1 MiB."""

    rounds: Count = 10
    """Measurements of each program; the median counts."""

    in_a_row: Count = 10
    """Runs in each measurement, so that starting one from Python counts for little."""

    out: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """Write a hardware file, for jaxtp estimate --hardware FILE.yamlx8."""

    like: Annotated[str | None, tyro.conf.arg(metavar="h100")] = None
    """Hardware of the table to compare products with, and to take the rest of the file from; by default the devices'
    own."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """Write every number to this file."""


COMMANDS = {
    "comm": Command(
        program=f"{PROGRAM} comm",
        schema=CommConfig,
        description=DESCRIPTION,
        first=("message_bytes", "rounds", "in_a_row", "out", "like", "json", *in_short_help(TrainConfig)),
        without=IGNORED_BY_COST,
    )
}


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, 2 for a user's mistake, 130 for Ctrl-C."""
    return run_and_report(lambda: entry.attempt(PROGRAM, lambda: _bench(argv)))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The measured devices."""

    kind: str
    platform: str
    devices: int
    processes: int
    sizes: dict[str, int]
    dtype: str
    """Dtype of messages and products."""
    hardware: Hardware | None
    """The row of the hardware table to compare with."""

    @property
    def peak(self) -> float | None:
        """FLOP/s of the hardware in the dtype; float32 has half of bfloat16's."""
        if self.hardware is None:
            return None
        return self.hardware.flops * jnp.dtype("bfloat16").itemsize / jnp.dtype(self.dtype).itemsize

    @property
    def virtual(self) -> bool:
        """Whether these are virtual CPU devices."""
        return self.platform == "cpu"

    def __str__(self) -> str:
        """Formats number and kind: `8 x NVIDIA H100 80GB HBM3`."""
        return f"{self.devices} virtual CPU devices" if self.virtual else f"{self.devices} x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results."""

    place: Place
    messages: Sequence[Message]
    products: Sequence[TimedProduct]

    @property
    def lines(self) -> list[Line]:
        """One for each axis whose times grow with the bytes."""
        by_axis = itertools.groupby(self.messages, key=lambda message: message.axis)
        return [line for _, group in by_axis if (line := fit_line(list(group))) is not None]

    @property
    def matmul_efficiency(self) -> float | None:
        """The products' share of the peak, at the nearest tp; None if the peak is unknown."""
        if self.place.peak is None:
            return None
        tp = min({product.tp for product in self.products}, key=lambda tp: abs(tp - self.place.sizes[TP]))
        chosen = [product for product in self.products if product.tp == tp]
        return sum(one.flops for one in chosen) / sum(one.seconds for one in chosen) / self.place.peak

    def table(self) -> str:
        """Formats a line per collective and size, and per product and tp."""
        rows = []
        for message in self.messages:
            one, speed = message.collective, f"{digits(message.speed / 1e9)} GB/s"
            size = f"{digits(one.bytes / KIB)} KiB"
            rows.append((one.kind, f"{message.axis} {one.group}", size, f"{message.seconds * 1e6:,.1f}", speed))
        for product in self.products:
            rate = product.flops / product.seconds
            of_peak = "" if self.place.peak is None else f", {rate / self.place.peak:.1%} of the peak"
            shape = f"{product.m:,} x {product.k:,} x {product.n:,}"
            speed = f"{digits(rate / 1e12)} TFLOP/s{of_peak}"
            rows.append((product.name, f"tp {product.tp}", shape, f"{product.seconds * 1e6:,.1f}", speed))
        return columns(("measured", "over", "size", "us", "speed of a device"), rows)

    def hardware_file(self) -> str:
        """Returns the measured fields as YAML; needs `place.hardware`."""
        if without := {message.axis for message in self.messages} - {line.axis for line in self.lines}:
            raise ConfigError(
                f"--out: over {' and '.join(sorted(without))} times do not grow with messages, so there is no "
                "bandwidth to write; give a wider range of --message-bytes, or more --rounds"
            )
        hardware, efficiency = self.place.hardware, self.matmul_efficiency
        assert hardware is not None
        assert efficiency is not None
        fields = measured_fields(hardware, self.place.sizes, self.lines, efficiency)
        lines = [f"# jaxtp bench comm on {self.place}, jax {jax.__version__}"]
        if self.place.virtual:
            lines.append(f"# {VIRTUAL}")
        lines += [f"like: {hardware.name} # for all other keys", *(f"{name}: {x:.3e}" for name, x in fields.items())]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, object]:
        """Returns every number for JSON."""
        plain = dataclasses.asdict(self) | {
            "messages": [message.record() for message in self.messages],
            "lines": [dataclasses.asdict(line) for line in self.lines],
        }
        note = {"note": VIRTUAL} if self.place.virtual else {}
        return {"jax": jax.__version__, **note, **plain, "matmul_efficiency": self.matmul_efficiency}


def _bench(argv: Sequence[str]) -> None:
    command, flags = choose(PROGRAM, COMMANDS, argv)
    join_processes()
    with raise_everywhere(watch):
        options, _ = command.load(
            flags, lambda options, explicit: resolve_defaults(replace_nested(options, {"train.epochs": None}), explicit)
        )
    config = training_of(options)
    mesh = build_mesh(config.mesh.sizes)
    keep_programs(mesh.devices.flat[0].platform)
    if jax.process_index() != 0:
        with contextlib.redirect_stdout(io.StringIO()):
            _measure(options, config, mesh)
        return
    require_writable("--json", options.json)
    require_writable("--out", options.out)
    if options.out is not None and options.out.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"--out {options.out}: a hardware file is YAML; name it {options.out.with_suffix('.yaml')}")
    measured = _measure(options, config, mesh)
    write_json("--json", options.json, measured.record())
    if options.out is not None:
        with writing("--out", options.out):
            options.out.write_text(measured.hardware_file())
        print(f"\n{options.out}: for jaxtp estimate --hardware {options.out}x{measured.place.devices}")


def _measure(options: CommConfig, config: TrainConfig, mesh: Mesh) -> Measured:
    device = mesh.devices.flat[0]
    place = Place(
        kind=device.device_kind,
        platform=device.platform,
        devices=mesh.size,
        processes=jax.process_count(),
        sizes=mesh_sizes(mesh),
        dtype=config.model.precision.compute,
        hardware=_hardware_of(options, device),
    )
    repeats, tps = Repeats(options.rounds, options.in_a_row), usable_tps(config.model, place.devices)
    rows = max(1, config.data.global_batch_size // (batch_parts(place.sizes) * config.train.accumulation))
    length = max(1, config.data.sequence_length // parts(place.sizes, CONTEXT))
    print(f"on      {place}, processes: {place.processes}, jaxtp {jaxtp.__version__} with jax {jax.__version__}")
    print(f"mesh    {describe_mesh(place.sizes)}, {place.dtype}")
    print(f"block   {config.model.describe_block()}; {rows * length:,} tokens on a device: {rows} of {length:,}")
    print(f"times   medians of {repeats.rounds} rounds, {repeats.in_a_row} runs in each, after a warm-up; random data")
    print(f"beware  {VIRTUAL}\n" if place.virtual else "", flush=True)
    sizes = options.message_bytes or (CPU_SIZES if place.virtual else SIZES)
    messages = list(measure_messages(mesh, place.dtype, sizes, repeats))
    products = list(measure_products(config.model, tps, rows, length, repeats))
    measured = Measured(place=place, messages=messages, products=products)
    print(measured.table(), flush=True)
    for line in measured.lines:
        print(
            f"{line.axis} {line.devices}: {digits(line.latency * 1e6)} us and {digits(line.speed / 1e9)} GB/s; half of "
            f"the times are within {line.error:.0%} of that"
        )
    return measured


def usable_tps(model: ModelConfig, devices: int) -> list[int]:
    """Returns the powers of two up to `devices` that divide a block without padding."""
    if problems := list(violations(model, mesh_shape())):
        raise ConfigError("\n  ".join(("these settings do not fit each other:", *problems)))
    return [tp for i in range(devices.bit_length()) if not padded_sizes(model, tp := 2**i)]


def _hardware_of(options: CommConfig, device: jax.Device) -> Hardware | None:
    if options.like is not None:
        if options.like.endswith((".yaml", ".yml")):
            raise ConfigError(f"--like {options.like}: should be a name of the table, one of {', '.join(TABLE)}")
        return find(options.like)
    known = of_kind(device.device_kind)
    if known is None and options.out is not None:
        raise ConfigError(
            f"--out {options.out}: {device.device_kind!r} is not in the hardware table (jaxtp/analysis/hardware.py); "
            "name the most similar row, as in --like h100"
        )
    return known


def digits(value: float) -> str:
    """Formats three significant digits: `1,234`, `12.3`, `0.0123`."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}" if value >= 1e-6 else f"{value:.2e}"


if __name__ == "__main__":
    entry.run(PROGRAM, main)
