"""What `python -m jaxtp.bench comm` prints."""

import itertools
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


def heading(place: Place, config: TrainConfig, rows: int, repeats: Repeats) -> str:
    """Where and what is measured, with `rows` sequences on each device."""
    model, length = config.model, config.data.sequence_length
    processes = f", {place.processes} processes" if place.processes > 1 else ""
    lines = {
        "on": f"{place}{processes}, jaxtp {jaxtp.__version__} with jax {jax.__version__}",
        "mesh": f"{describe_mesh(place.sizes)}, {place.dtype}",
        "block": f"d_model {model.d_model}, {model.num_heads} heads ({model.num_kv_heads} kv) of {model.head_dim}, "
        f"d_ff {model.d_ff}; {rows * length:,} tokens on a device: {rows} of {length:,}",
        "times": f"medians of {repeats.rounds} rounds, {repeats.in_a_row} runs in each, after a warm-up; random data",
    }
    if place.virtual:
        lines["beware"] = VIRTUAL
    return "\n".join(f"{name:<8}{text}" for name, text in lines.items())


def messages_lines(messages: Sequence[Message], lines: Sequence[Line]) -> str:
    """The table of collectives, and what each axis comes to."""
    if not messages:
        return "one device: nothing moves"
    return "\n".join((_messages_table(messages), *map(_line, lines)))


def _messages_table(messages: Sequence[Message]) -> str:
    """A line for each axis and size: microseconds, and GB/s that each device sends."""
    header = ["over", "devices", "KiB"]
    for kind in KINDS:
        header += [f"{kind}, us", "GB/s"]
    groups = itertools.groupby(messages, key=lambda message: (message.axis, message.devices, message.bytes))
    rows = []
    for (axis, devices, size), group in groups:
        row = [axis, f"{devices}", f"{size / 1024:,.1f}"]
        for message in group:
            row += [f"{message.seconds * 1e6:,.1f}", f"{message.speed / 1e9:,.2f}"]
        rows.append(row)
    return columns(header, rows)


def _line(line: Line) -> str:
    return (
        f"over {line.axis}, {line.devices} devices: {line.latency * 1e6:,.1f} us and a second for every "
        f"{line.speed / 1e9:,.2f} GB sent; half of the times are within {line.off:.0%} of that"
    )


def products_table(products: Sequence[TimedProduct], peak: float | None, hardware: Hardware | None) -> str:
    """A line for each product at each tp; with the share of the peak, in FLOP/s, where there is one."""
    header = ["tp", "product on a device", "m x k x n", "us", "TFLOP/s"]
    rows = []
    for product in products:
        rate = product.flops / product.seconds
        shape = f"{product.m:,} x {product.k:,} x {product.n:,}"
        row = [f"{product.tp}", product.name, shape, f"{product.seconds * 1e6:,.1f}", f"{rate / 1e12:,.3f}"]
        rows.append(row if peak is None else [*row, f"{rate / peak:.1%}"])
    if hardware is not None and peak is not None:
        header.append(f"of {hardware.name}'s {peak / 1e12:,.0f}")
    return columns(header, rows)


def pairs_table(pairs: Sequence[Pair]) -> str:
    """A line for each tp: the pair, what of it is computing, and how much faster it is than on one device."""
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
