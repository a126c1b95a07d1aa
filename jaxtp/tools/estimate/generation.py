"""Costs of generating: weights and KV cache per device, and the time of a token with a full cache.

Weights are laid out as in `generate/decode_model.py`: fsdp splits rows, as dp does. A token reads
all weights and the whole cache once, and waits for each layer's collectives. Of E experts, n rows
that choose k each read a share of 1 - (1 - k / E) ** n. Prefill (time and activations), sampling
and arithmetic are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxtp.analysis.hardware import GB
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import StepCosts, costs_of
from jaxtp.analysis.tables import Record, about, columns, gigabytes
from jaxtp.config.schema import ConfigError
from jaxtp.generate.decode_model import decode_sizes
from jaxtp.mesh import CP, TP, Sizes, batch_parts, describe_mesh
from jaxtp.models.config import ModelConfig, violations
from jaxtp.tools.estimate.roofline import communication_seconds
from jaxtp.tools.estimate.search import Model, Target
from jaxtp.train.memory import MODEL
from jaxtp.train.validation import multiplies_all

MAX_ROWS = 10
LEFT_OUT = "left out: prefill, its time and its activations; sampling"


@dataclass(frozen=True)
class Generation:
    """Costs on one mesh."""

    sizes: Sizes
    weights: int  # bytes on each device, in the compute dtype; exact
    cache: int  # bytes of full keys and values on each device; exact
    seconds: float  # time of a token of every row, with a full cache; modelled
    rows: int
    room: float

    @property
    def total(self) -> int:
        """Bytes of weights and cache on each device."""
        return self.weights + self.cache

    @property
    def spare(self) -> float:
        """Bytes left on each device; negative if they do not fit."""
        return self.room - self.total

    @property
    def fits(self) -> bool:
        """Whether weights and cache fit."""
        return self.spare >= 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all rows, with a full cache."""
        return self.rows / self.seconds


def generations(
    config: ModelConfig,
    where: Target,
    model: Model,
    meshes: Sequence[Sizes],
    rows: int,
    length: int,
) -> list[Generation]:
    """Returns the costs of `rows` texts of `length` tokens on each possible mesh.

    The fastest that fits is first.

    Raises:
      ConfigError: no mesh can hold them.
    """
    without_cp = [sizes for sizes in meshes if sizes[CP] == 1]
    if not without_cp:
        requested = ", ".join(map(describe_mesh, meshes))
        raise ConfigError(
            f"--generate {rows}: a cache is not divided over cp; add a mesh with cp=1 to "
            f"{requested}"
        )
    # Several meshes of training can have the same layout for decoding.
    layouts = []
    for sizes in without_cp:
        layout = decode_sizes(sizes)
        divides = rows % batch_parts(sizes) == 0
        if divides and layout not in layouts and not list(violations(config, sizes)):
            layouts.append(layout)
    if not layouts:
        raise ConfigError(
            f"--generate {rows}: no mesh of {where.devices} devices holds the model and divides "
            f"{rows} rows by dp*fsdp"
        )
    # Generating multiplies in the compute dtype.
    config = replace(config, precision=replace(config.precision, matmul="compute"))
    generations = [_generation(config, where, model, sizes, rows, length) for sizes in layouts]
    return sorted(
        generations,
        key=lambda costs: (not costs.fits, costs.seconds if costs.fits else costs.total),
    )


def _generation(
    config: ModelConfig,
    where: Target,
    model: Model,
    sizes: Sizes,
    rows: int,
    length: int,
) -> Generation:
    hardware = where.hardware
    token = _costs(config, sizes, rows, length=1)
    weights = 0
    for array in model.arrays:
        if array.name.startswith(MODEL):
            copies = math.prod(split.shared_by(sizes[TP]) for _, split in array.padding)
            weights += array.bytes_per_device(sizes, config.precision.compute) * copies
    unread = 0 if multiplies_all(config, hardware.platform) else token.unused * token.itemsize
    cache = cache_bytes(config, sizes, rows, length)
    reading = (weights - unread + cache) / hardware.memory_speed
    moving = sum(communication_seconds(hardware, sizes, token.traffic).values())
    return Generation(sizes, weights, cache, reading + moving, rows, where.room)


def cache_bytes(config: ModelConfig, sizes: Sizes, rows: int, length: int) -> int:
    """Returns the KV cache's bytes per device."""
    return _costs(config, sizes, rows, length).cached


def _costs(config: ModelConfig, sizes: Sizes, rows: int, length: int) -> StepCosts:
    work = Workload(sizes=sizes, rows=rows // batch_parts(sizes), length=length, training=False)
    return costs_of(config, work)


def table(generations: Sequence[Generation], length: int) -> str:
    """Formats a line per mesh."""
    lines = []
    for generation in generations[:MAX_ROWS]:
        sizes = (f"{generation.weights / GB:,.2f}", f"{generation.cache / GB:,.2f}")
        spare = gigabytes(generation.spare) if generation.fits else "does not fit"
        speed = about(generation.tokens_per_second)
        lines.append((describe_mesh(generation.sizes), *sizes, spare, speed))
    header = ("mesh", "GB of weights", "GB of cache", "to spare", "tokens/s with a full cache")
    title = f"generating {generations[0].rows} rows of {length:,} tokens"
    return f"{title}\n{columns(header, lines)}\n{LEFT_OUT}"


def record(generation: Generation) -> Record:
    """Returns a mesh for JSON."""
    return {
        **generation.sizes,
        "fits": generation.fits,
        "bytes_per_device": {
            "weights": generation.weights,
            "cache": generation.cache,
            "total": generation.total,
        },
        "tokens_per_second": generation.tokens_per_second,
    }
