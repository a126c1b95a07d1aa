"""Costs of generating: weights and KV cache per device, and the time of a token with a full cache.

Weights are laid out as in `generate/decode_model.py`: fsdp splits rows, as dp does. A token reads
all weights and cache once, and waits for each layer's collectives. With E experts, n rows that
choose k each read the share 1 - (1 - k / E) ** n. Left out: prefill (time and activations),
sampling, arithmetic.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxtp.analysis.hardware import GB
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import costs_of
from jaxtp.analysis.tables import columns, gigabytes
from jaxtp.config.schema import ConfigError
from jaxtp.generate.decode_model import decode_sizes
from jaxtp.mesh import CP, TP, batch_parts, describe_mesh
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

    sizes: Mapping[str, int]
    weights: int  # bytes on each device, in the compute dtype; exact
    cache: int  # bytes of full keys and values on each device; exact
    seconds: float  # time of a token of every row, with a full cache; modelled
    rows: int
    room: float

    @property
    def fits(self) -> bool:
        """Whether weights and cache fit."""
        return self.weights + self.cache <= self.room

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all rows, with a full cache."""
        return self.rows / self.seconds


def generations(
    config: ModelConfig,
    where: Target,
    model: Model,
    meshes: Sequence[Mapping[str, int]],
    rows: int,
    length: int,
) -> list[Generation]:
    """Returns the costs of `rows` texts of `length` tokens on each possible mesh.

    The fastest that fits is first.

    Raises:
      ConfigError: no mesh can hold them.
    """
    alone = [sizes for sizes in meshes if sizes[CP] == 1]  # a cache is not divided over cp
    if not alone:
        requested = ", ".join(map(describe_mesh, meshes))
        raise ConfigError(
            f"--generate {rows}: a cache is not divided over cp; add a mesh with cp=1 to "
            f"{requested}"
        )
    able = [
        sizes
        for sizes in alone
        if not list(violations(config, sizes)) and rows % batch_parts(sizes) == 0
    ]
    if not able:
        raise ConfigError(
            f"--generate {rows}: no mesh of {where.devices} devices holds the model and divides "
            f"{rows} rows by dp*fsdp"
        )
    # The dtype is as in `jaxtp generate`.
    config = replace(config, precision=replace(config.precision, matmul="compute"))
    hardware = where.hardware
    arrays = [array for array in model.arrays if array.name.startswith(MODEL)]
    found = []
    for sizes in {tuple(sizes.values()): sizes for sizes in map(decode_sizes, able)}.values():
        token = costs_of(
            config, Workload(sizes=sizes, rows=rows // batch_parts(sizes), length=1, training=False)
        )
        weights = sum(
            array.bytes_per_device(sizes, config.precision.compute)
            * math.prod(split.shared_by(sizes[TP]) for _, split in array.padding)
            for array in arrays
        )
        unread = 0 if multiplies_all(config, hardware.platform) else token.unused * token.itemsize
        cache = cache_bytes(config, sizes, rows, length)
        reading = (weights - unread + cache) / hardware.memory_speed
        moving = sum(communication_seconds(hardware, sizes, token.traffic).values())
        found.append(Generation(dict(sizes), weights, cache, reading + moving, rows, where.room))
    return sorted(
        found, key=lambda one: (not one.fits, one.seconds if one.fits else one.weights + one.cache)
    )


def cache_bytes(config: ModelConfig, sizes: Mapping[str, int], rows: int, length: int) -> int:
    """Returns the KV cache's bytes per device."""
    share = Workload(sizes=sizes, rows=rows // batch_parts(sizes), length=length, training=False)
    return costs_of(config, share).cached


def table(found: Sequence[Generation], length: int) -> str:
    """Formats a line per mesh."""
    lines = []
    for one in found[:MAX_ROWS]:
        spare = gigabytes(one.room - one.weights - one.cache) if one.fits else "does not fit"
        sizes = (f"{one.weights / GB:,.2f}", f"{one.cache / GB:,.2f}", spare)
        lines.append((describe_mesh(one.sizes), *sizes, f"{one.tokens_per_second:,.0f}"))
    header = ("mesh", "GB of weights", "GB of cache", "to spare", "tokens/s with a full cache")
    return (
        f"generating {found[0].rows} rows of {length:,} "
        f"tokens\n{columns(header, lines)}\n{LEFT_OUT}"
    )


def record(one: Generation) -> dict[str, object]:
    """Returns a mesh for JSON."""
    return {
        **one.sizes,
        "fits": one.fits,
        "bytes_per_device": {
            "weights": one.weights,
            "cache": one.cache,
            "total": one.weights + one.cache,
        },
        "tokens_per_second": one.tokens_per_second,
    }
