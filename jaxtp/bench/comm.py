"""Measuring what `jaxtp bench comm` shows, table by table."""

import itertools
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxtp.bench.computing import measure_pairs, measure_products
from jaxtp.bench.config import CommConfig, hardware_of, message_sizes, tokens_on_a_device, usable_tps
from jaxtp.bench.fit import Line, fit
from jaxtp.bench.measured import Measured, Place
from jaxtp.bench.moving import Message, measure_messages
from jaxtp.bench.report import heading, messages_lines, pairs_table, products_table
from jaxtp.bench.timing import Repeats
from jaxtp.mesh import mesh_sizes
from jaxtp.train.config import TrainConfig


def measure(asked: CommConfig, config: TrainConfig, mesh: Mesh) -> Measured:
    """Measures, and prints each table when it is there.

    Args:
      asked: how often, which sizes, and what the devices are compared with.
      config: the sizes of the model and of a micro-batch.
      mesh: the devices; the same on every process.

    Raises:
      ConfigError: the model's sizes do not fit each other, or a file is asked for and nothing to base it on.
    """
    place, repeats = _place(asked, config, mesh), Repeats(asked.rounds, asked.in_a_row)
    tps, tokens = usable_tps(config.model, place.devices), tokens_on_a_device(config, place.sizes)
    print(heading(place, config, tokens, repeats), end="\n\n", flush=True)
    messages = list(measure_messages(mesh, place.dtype, message_sizes(asked, place.platform), repeats))
    lines = _lines(messages)
    print(messages_lines(messages, lines), end="\n\n", flush=True)
    products = list(measure_products(config.model, tps, *tokens, repeats))
    print(products_table(products, place.peak, place.hardware), end="\n\n", flush=True)
    over = tps if place.processes == 1 else [tp for tp in tps if tp == place.devices]  # a mesh takes all processes
    pairs = list(measure_pairs(config.model, over, *tokens, repeats))
    print(pairs_table(pairs), flush=True)
    return Measured(place=place, messages=messages, lines=lines, products=products, pairs=pairs)


def _place(asked: CommConfig, config: TrainConfig, mesh: Mesh) -> Place:
    device = mesh.devices.flat[0]
    return Place(
        kind=device.device_kind,
        platform=device.platform,
        devices=mesh.size,
        processes=jax.process_count(),
        sizes=mesh_sizes(mesh),
        dtype=config.model.precision.compute,
        hardware=hardware_of(asked, device),
    )


def _lines(messages: Sequence[Message]) -> list[Line]:
    """Returns the line of each axis that has one."""
    groups = itertools.groupby(messages, key=lambda message: message.axis)
    return [line for line in (fit(list(group)) for _, group in groups) if line is not None]
