"""Costs of generating: weights and KV cache on each device, and the time of a token where every row is full.

Weights are laid out as `models/reader.py` does it: devices along fsdp divide rows as those along dp do, and are
counted as such. A token takes reading the weights and the whole cache once, and the collectives of each layer. Of E
experts those are read that a row uses: the share 1 - (1 - k / E) ** n of them, where n rows choose k each, all alike.
Left out are prefill (its time, and the memory of its activations), sampling, and the time of norms, products and
attention's own arithmetic. Each token is charged for a full cache: the first ones read less.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtp.audit.tables import columns
from jaxtp.config import ConfigError
from jaxtp.estimate.links import collective_seconds
from jaxtp.estimate.search import Model, Target
from jaxtp.hardware import GB
from jaxtp.layers.costs import Share
from jaxtp.mesh import CP, batch_parts, describe_mesh
from jaxtp.models.config import ModelConfig, violations
from jaxtp.models.costs import costs_of
from jaxtp.models.reader import reading_sizes
from jaxtp.train.config import multiplies_all
from jaxtp.train.memory import MODEL

MAX_ROWS = 10
LEFT_OUT = "left out: prefill, its time and its activations; sampling"


@dataclass(frozen=True)
class Generation:
    """A mesh to generate on."""

    sizes: Mapping[str, int]
    weights: int
    """Bytes on each device, in the compute dtype; exact."""
    cache: int
    """Bytes of keys and values on each device, where every row is full; exact."""
    seconds: float
    """Time of a token of every row, with the cache full: modelled, from weights, cache and links alone."""
    rows: int
    room: float

    @property
    def fits(self) -> bool:
        """Whether weights and cache do."""
        return self.weights + self.cache <= self.room

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all rows, with the cache full."""
        return self.rows / self.seconds


def generations(
    config: ModelConfig, where: Target, model: Model, meshes: Sequence[Mapping[str, int]], rows: int, length: int
) -> list[Generation]:
    """Returns the meshes on which the model can be and that divide the rows: those that fit first, and of these the
    fastest.

    Args:
      config: the model.
      where: the hardware.
      model: what `describe_model` says of it.
      meshes: what to try.
      rows: texts at a time.
      length: tokens of each, prompt included.

    Raises:
      ConfigError: no mesh can.
    """
    alone = [sizes for sizes in meshes if sizes[CP] == 1]  # a cache is not divided over cp
    if not alone:
        given = ", ".join(map(describe_mesh, meshes))
        raise ConfigError(f"--generate {rows}: a cache is not divided over cp; name a mesh with cp=1 beside {given}")
    able = [sizes for sizes in alone if not list(violations(config, sizes)) and rows % batch_parts(sizes) == 0]
    if not able:
        raise ConfigError(
            f"--generate {rows}: no mesh of {where.devices} devices holds the model and divides {rows} rows by dp*fsdp"
        )
    read_on = {tuple(sizes.values()): sizes for sizes in map(reading_sizes, able)}
    found = [_on(config, where, model, sizes, rows, length) for sizes in read_on.values()]
    return sorted(found, key=lambda one: (not one.fits, one.seconds if one.fits else one.weights + one.cache))


def _on(
    config: ModelConfig, where: Target, model: Model, sizes: Mapping[str, int], rows: int, length: int
) -> Generation:
    share = Share(sizes=sizes, rows=rows // batch_parts(sizes), length=1, training=False)
    token = costs_of(config, share)
    arrays = [array for array in model.arrays if array.name.startswith(MODEL)]
    weights = sum(array.bytes_per_device(sizes, config.precision.compute) for array in arrays)
    cache = cache_bytes(config, sizes, rows, length)
    reads_all = multiplies_all(config, where.hardware.platform)
    hardware, speed = where.hardware, where.hardware.bandwidth * where.hardware.bandwidth_efficiency
    unread = 0 if reads_all else token.unused * token.itemsize
    reading = (weights - unread + cache) / speed
    moving = sum(times * collective_seconds(hardware, sizes, one) for one, times in token.traffic.items())
    return Generation(dict(sizes), weights, cache, reading + moving, rows, where.room)


def cache_bytes(config: ModelConfig, sizes: Mapping[str, int], rows: int, length: int) -> int:
    """Returns the bytes of keys and values on each device; see `layers/cache.py`."""
    share = Share(sizes=sizes, rows=rows // batch_parts(sizes), length=length, training=False)
    return costs_of(config, share).cached


def table(found: Sequence[Generation], length: int) -> str:
    """Returns a table with a line for each mesh."""
    lines = [
        (
            describe_mesh(one.sizes),
            f"{one.weights / GB:,.2f}",
            f"{one.cache / GB:,.2f}",
            f"{(one.room - one.weights - one.cache) / GB:,.1f}" if one.fits else "does not fit",
            f"{one.tokens_per_second:,.0f}",
        )
        for one in found[:MAX_ROWS]
    ]
    header = (
        "mesh",
        "GB of weights, exact",
        "GB of cache, exact",
        "to spare",
        "tokens/s, modelled, with the cache full",
    )
    return f"generating {found[0].rows} rows of {length:,} tokens\n{columns(header, lines)}\n{LEFT_OUT}"


def records(found: Sequence[Generation]) -> list[dict[str, Any]]:
    """Returns the meshes as plain values."""
    return [
        {
            **one.sizes,
            "fits": one.fits,
            "bytes_per_device": {"weights": one.weights, "cache": one.cache, "total": one.weights + one.cache},
            "tokens_per_second": one.tokens_per_second,
        }
        for one in found
    ]
