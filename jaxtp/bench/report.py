"""Report of `jaxtp bench comm`."""

import itertools
import math
from collections.abc import Sequence

import jax

import jaxtp
from jaxtp.audit.tables import columns
from jaxtp.bench.computing import Pair, TimedProduct
from jaxtp.bench.fit import Line
from jaxtp.bench.measured import VIRTUAL, Place
from jaxtp.bench.moving import KINDS, Message
from jaxtp.bench.timing import Repeats
from jaxtp.hardware import Hardware
from jaxtp.mesh import describe_mesh
from jaxtp.train.config import TrainConfig

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def heading(place: Place, config: TrainConfig, tokens: tuple[int, int], repeats: Repeats) -> str:
    """Returns where and what is measured, with `tokens`, sequences and tokens of each, on a device."""
    model, (rows, length) = config.model, tokens
    processes = f", {place.processes} processes" if place.processes > 1 else ""
    lines = {
        "on": f"{place}{processes}, jaxtp {jaxtp.__version__} with jax {jax.__version__}",
        "mesh": f"{describe_mesh(place.sizes)}, {place.dtype}",
        "block": f"{model.describe_block()}; {rows * length:,} tokens on a device: {rows} of {length:,}",
        "times": f"medians of {repeats.rounds} rounds, {repeats.in_a_row} runs in each, after a warm-up; random data",
    }
    if place.virtual:
        lines["beware"] = VIRTUAL
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def messages_lines(messages: Sequence[Message], lines: Sequence[Line]) -> str:
    """Returns the table of collectives, and the line of each axis."""
    if not messages:
        return "one device: nothing moves"
    return "\n".join((_messages_table(messages), *map(_line, lines)))


def _messages_table(messages: Sequence[Message]) -> str:
    """Returns a table of microseconds, and GB/s that each device sends, for each axis and size."""
    header = ["over", "devices", "KiB"]
    for kind in KINDS:
        header += [f"{kind}, us", "GB/s"]
    groups = itertools.groupby(messages, key=lambda one: (one.axis, one.collective.group, one.collective.bytes))
    rows = []
    for (axis, devices, size), group in groups:
        row = [axis, f"{devices}", _digits(size / 1024)]
        for message in group:
            row += [f"{message.seconds * 1e6:,.1f}", _digits(message.speed / 1e9)]
        rows.append(row)
    return columns(header, rows)


def _line(line: Line) -> str:
    return (
        f"over {line.axis}, {line.devices} devices: {_digits(line.latency * 1e6)} us and a second for every "
        f"{_in_unit(line.speed, 'B')} sent; half of the times are within {line.off:.0%} of that"
    )


def products_table(products: Sequence[TimedProduct], peak: float | None, hardware: Hardware | None) -> str:
    """Returns a table of the products at each tp; with the share of the peak, in FLOP/s, where there is one."""
    header = ["tp", "product on a device", "m x k x n", "us", "TFLOP/s"]
    rows = []
    for product in products:
        rate = product.flops / product.seconds
        shape = f"{product.m:,} x {product.k:,} x {product.n:,}"
        row = [f"{product.tp}", product.name, shape, f"{product.seconds * 1e6:,.1f}", _digits(rate / 1e12)]
        rows.append(row if peak is None else [*row, f"{rate / peak:.1%}"])
    if hardware is not None and peak is not None:
        header.append(f"of {hardware.name}'s {peak / 1e12:,.0f}")
    return columns(header, rows)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """Returns a table of the pair at each tp: its time, what of it is computing, its speed relative to one device."""
    if not pairs:
        return "column and row layer: their mesh takes all processes' devices, and the model cannot use as many"
    header = ("tp", "column and row, us", "computing, us", "communication, us", "of the time", "x tp 1")
    one = pairs[0]
    rows = [
        (
            f"{pair.tp}",
            f"{pair.seconds * 1e6:,.1f}",
            f"{pair.computing * 1e6:,.1f}",
            f"{pair.moving * 1e6:,.1f}",
            f"{pair.moving / pair.seconds:.0%}",
            f"{one.seconds / pair.seconds:.2f}" if one.tp == 1 else "-",
        )
        for pair in pairs
    ]
    return columns(header, rows)


def _digits(value: float) -> str:
    """Returns three digits that say something, in a column whose unit is given: `1,234`, `12.3`, `0.0123`."""
    if value == 0 or value >= 100:
        return f"{value:,.0f}"
    return f"{value:.{2 - math.floor(math.log10(value))}f}" if value >= 1e-6 else f"{value:.2e}"


def _in_unit(value: float, unit: str) -> str:
    """Returns a value in the largest unit of which it has at least one: `12.3 GB`, `40.1 kB`."""
    power, prefix = next(((power, prefix) for power, prefix in _PREFIXES if value >= power), (1.0, ""))
    return f"{_digits(value / power)} {prefix}{unit}"
