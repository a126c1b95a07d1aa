"""Every setting of mesh, micro-batch and remat that a configuration can run with on given hardware, ranked.

An estimate is arithmetic first: a step's collectives, products and memory are sums of what its layers declare
(`models/costs.py`, `train/memory.py`), so hundreds of settings cost a second. Tests hold these sums equal to the jaxpr
and to the partitioned program, and the memory to within 15% of the compiler's. The two compilers (`partitioned.py`,
`target.py`) only confirm the best setting.

The best setting is chosen in this order. First comes what fits even if the modelled part of the memory is off by 20%,
then the middle of the range of times. Of the settings within 5% on one mesh it is the one that takes the least memory,
and of the meshes within 5% of the fastest the simplest.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtp.config import ConfigError, changed
from jaxtp.estimate.links import leaves_domain
from jaxtp.estimate.roofline import StepTime, step_time
from jaxtp.hardware import Hardware
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import CP, TP, batch_parts, describe_mesh, divisors, fitting_meshes
from jaxtp.models.costs import StepCosts
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig, violations_on
from jaxtp.train.memory import MODEL, Memory, StoredArray, costs_of_step, memory_per_device, stored_arrays
from jaxtp.train.metrics import flops_per_token

REMATS: tuple[RematPolicy, ...] = ("none", "save_gathered", "save_dots", "save_reduced", "full")
"""Policies that are tried; `offload` only where it is configured: the way to the host's memory is not modelled."""


MEMORY_ERROR = 0.2
"""Error of the model, without the state: in `scripts/results/estimate_accuracy.txt` it is 18% too little at most."""

NEAR = 1.05
"""Slower by less than that is as fast: the model of time is not that good."""

LEAST_PART = 8192
"""Least tokens of a part of a sequence, of the meshes that are tried with cp."""

MAX_REASONS = 3
"""Why meshes cannot run a configuration, in one message."""

FURTHEST = 64
"""Numbers of devices further off are not proposed."""

MAX_ACCUMULATIONS = 16
"""Numbers of micro-batches that are tried on a mesh, of all that divide its rows."""

MAX_SETTINGS = 4096
"""Most settings of a search, about: each takes milliseconds. On many meshes fewer micro-batches are tried."""


@dataclass(frozen=True)
class Target:
    """The hardware that is asked about."""

    hardware: Hardware
    devices: int
    room: float
    """Bytes that a training step may take on each device."""


def target(hardware: Hardware, devices: int, memory_fraction: float) -> Target:
    """Returns hardware with the memory that JAX's allocator takes, or that communication and driver leave, if less."""
    if hardware.platform == "tpu":
        return Target(hardware, devices, hardware.memory - hardware.reserved)
    return Target(hardware, devices, min(memory_fraction * hardware.memory, hardware.memory - hardware.reserved))


@dataclass(frozen=True)
class Model:
    """Facts about the model that are the same for every setting."""

    arrays: tuple[StoredArray, ...]
    parameters: int
    """Number of parameters without padding."""
    flops_per_token: float
    """FLOPs of a token as MFU counts them."""


def describe_model(config: TrainConfig) -> Model:
    """Traces the state once, on no mesh."""
    arrays = stored_arrays(config)
    parameters = sum(math.prod(array.shape) for array in arrays if array.name.startswith(MODEL))
    return Model(arrays, parameters, flops_per_token(config.model, parameters, config.data.sequence_length))


@dataclass(frozen=True)
class Setting:
    """A way to run, and its costs on each device."""

    config: TrainConfig
    """Configuration with this mesh, remat and accumulation."""
    target: Target
    memory: Memory
    costs: StepCosts
    time: StepTime
    flops_per_token: float

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return self.config.mesh.sizes

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch on each device."""
        return self.config.data.global_batch_size // (batch_parts(self.sizes) * self.config.train.accumulation)

    @property
    def fits(self) -> bool:
        """Whether there is memory for it."""
        return self.spare >= 0

    @property
    def spare(self) -> float:
        """Bytes that are left on each device; negative where it does not fit."""
        return self.target.room - self.memory.total

    @property
    def has_margin(self) -> bool:
        """Whether it fits even where the model of memory is off by as much as it may be."""
        return self.spare >= MEMORY_ERROR * (self.memory.total - self.memory.state)

    @property
    def update_is_modelled(self) -> bool:
        """Whether the update is modelled: of other optimizers neither memory nor time nor communication is known."""
        return optimizers.is_modelled(self.config.optimizer)

    @property
    def fits_surely(self) -> bool:
        """Whether it fits with that margin, and all of it is modelled."""
        return self.has_margin and self.update_is_modelled

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices, at the middle of the range of a step's time."""
        return self._tokens / self.time.expected

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Nothing overlaps, and everything that can."""
        return self._tokens / self.time.serial, self._tokens / self.time.overlapped

    @property
    def mfu_range(self) -> tuple[float, float]:
        """Range of the share of the dense bfloat16 peak."""
        peak = self.target.devices * self.target.hardware.flops
        low, high = (tokens * self.flops_per_token / peak for tokens in self.tokens_per_second_range)
        return low, high

    @property
    def _tokens(self) -> int:
        return self.config.data.global_batch_size * self.config.data.sequence_length

    def __str__(self) -> str:
        """Returns the axes of several devices: `fsdp 2 x tp 4`."""
        return " x ".join(f"{axis} {size}" for axis, size in self.sizes.items() if size > 1) or "one device"


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    settings: tuple[Setting, ...]
    """The best of each mesh: those that fit with the margin, the fastest first; those that fit by less than the model's
    error, the fastest first; the others, by what they lack. Of what is as fast as the first the simplest is it."""
    all: tuple[Setting, ...]
    """Every setting that can run, over all meshes."""
    refused: Mapping[str, str]
    """Why the other meshes cannot run it, by mesh."""
    as_configured: bool
    """Remat and accumulation were kept."""

    @property
    def fitting(self) -> list[Setting]:
        """Settings that fit, the best of each mesh."""
        return [setting for setting in self.settings if setting.fits]


def search(
    config: TrainConfig,
    where: Target,
    model: Model,
    meshes: Sequence[Mapping[str, int]],
    *,
    as_configured: bool = False,
) -> Search:
    """Estimates every setting on every mesh.

    Args:
      config: the run.
      where: the hardware.
      model: `describe_model(config)`.
      meshes: what to try.
      as_configured: keeps remat and accumulation as they are.

    Raises:
      ConfigError: no mesh can run it; with the reasons of each.
    """
    able, refused = runnable(config, meshes, as_configured=as_configured)
    if not able:
        raise ConfigError(_none_can(config, where.devices, refused))
    most = min(MAX_ACCUMULATIONS, MAX_SETTINGS // (len(REMATS) * len(able)))
    of_mesh = [
        [estimate(choice, where, model) for choice in ([one] if as_configured else _choices(one, most))] for one in able
    ]
    best = sorted(map(_choose, of_mesh), key=rank)
    return Search(_simplest_first(best), tuple(itertools.chain(*of_mesh)), refused, as_configured)


def meshes_to_try(config: TrainConfig, devices: int, domain: int | None = None) -> list[dict[str, int]]:
    """Returns the meshes of so many devices that may be good for a run.

    Over cp sequences are divided into parts that are long enough: a short sequence is cheaper where it is whole.

    Args:
      config: the run.
      devices: number of devices.
      domain: number of devices that fast links join; a group along tp lies in one, where the run does not allow more.
    """
    longest = max(1, config.data.sequence_length // LEAST_PART)
    meshes = [sizes for sizes in fitting_meshes(devices) if sizes[CP] <= longest or sizes[CP] == config.mesh.cp]
    if config.mesh.tp_across_hosts or domain is None:
        return meshes
    return [sizes for sizes in meshes if not spans_hosts(sizes, domain)]


def spans_hosts(sizes: Mapping[str, int], domain: int) -> bool:
    """Returns whether a group along tp has devices of several domains."""
    return math.prod(sizes.values()) > domain and domain % sizes[TP] != 0


def runnable(
    config: TrainConfig, meshes: Sequence[Mapping[str, int]], *, as_configured: bool = False
) -> tuple[list[TrainConfig], dict[str, str]]:
    """Returns the run on each mesh that can run it, in one micro-batch unless as configured; why the others cannot."""
    able, refused = [], {}
    once = config if as_configured else changed(config, {"train.accumulation": 1})
    for sizes in meshes:
        on_mesh = changed(once, {"mesh": once.mesh.of_sizes(sizes)})
        if (problem := next(violations_on(on_mesh, sizes), None)) is None:
            able.append(on_mesh)
        else:
            refused[describe_mesh(sizes)] = problem
    return able, refused


def leanest(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yields the run in the settings of which one takes the least memory on its mesh: as little kept, and one row at a
    time or all at once, which adds up no gradients."""
    remat = "offload" if config.model.remat == "offload" else "full"
    for accumulation in {rows_of(config), 1}:
        yield changed(config, {"model.remat": remat, "train.accumulation": accumulation})


def _none_can(config: TrainConfig, devices: int, refused: Mapping[str, str]) -> str:
    """Returns what could run instead, and each reason once, with the first mesh that it is for."""
    asked = f"none of the meshes asked about can run this configuration; others of {devices:,} devices can:"
    if not _can_run(config, devices):
        fewer = (n for n in range(devices - 1, max(0, devices - FURTHEST), -1) if _can_run(config, n))
        more = (n for n in range(devices + 1, devices + FURTHEST) if _can_run(config, n))
        near = [f"{n:,}" for count in (fewer, more) if (n := next(count, None)) is not None]
        instead = f"; {' or '.join(near)} devices could" if near else ""
        asked = f"no mesh of {devices:,} devices can run this configuration{instead}:"
    first: dict[str, str] = {}
    for mesh, reason in refused.items():
        first.setdefault(reason, mesh)
    lines = [f"  {mesh}: {reason}" for reason, mesh in first.items()]
    rest = [f"  ... and {len(lines) - MAX_REASONS} more reasons"] if len(lines) > MAX_REASONS else []
    return "\n".join([asked, *lines[:MAX_REASONS], *rest])


def _can_run(config: TrainConfig, devices: int) -> bool:
    return any(next(violations_on(config, sizes), None) is None for sizes in meshes_to_try(config, devices))


def estimate(config: TrainConfig, where: Target, model: Model) -> Setting:
    """Returns the costs of a configuration on its own mesh, on each device.

    Args:
      config: the run, with the size of every axis.
      where: the hardware.
      model: `describe_model(config)`.
    """
    sizes = config.mesh.sizes
    costs = costs_of_step(config, sizes, where.hardware.platform)
    memory = memory_per_device(config, sizes, model.arrays, costs=costs)
    time = step_time(where.hardware, sizes, costs, memory, config.train.accumulation)
    return Setting(config, where, memory, costs, time, model.flops_per_token)


def _choose(settings: Sequence[Setting]) -> Setting:
    """Returns the best setting of a mesh: of those as fast as the fastest that fits, the one that takes the least."""
    first = min(settings, key=rank)
    as_fast = [s for s in settings if s.fits and _is_as_fast(s, first)]
    return min(as_fast, key=lambda setting: setting.memory.total) if first.fits else first


def rank(setting: Setting) -> tuple[int, float, float]:
    """Returns a key to sort settings: whether they fit, with the margin or not, then time; others by what they lack."""
    how = 0 if setting.has_margin else 1 if setting.fits else 2
    return how, 0.0 if setting.fits else -setting.spare, setting.time.expected


def _simplest_first(ranked: list[Setting]) -> tuple[Setting, ...]:
    """Returns the simplest of the first and what is as fast and as sure, then the others in their order."""
    first = ranked[0]
    as_good = [s for s in ranked if s.fits and s.has_margin == first.has_margin and _is_as_fast(s, first)]
    simplest = min(as_good, key=_complexity, default=first)
    return (simplest, *(setting for setting in ranked if setting is not simplest))


def _is_as_fast(setting: Setting, first: Setting) -> bool:
    return setting.time.expected <= NEAR * first.time.expected


def _complexity(setting: Setting) -> tuple[bool, int, int, int]:
    """Returns a key to sort by: whether layers wait for the network, micro-batches, devices that share a layer."""
    hardware, sizes = setting.target.hardware, setting.sizes
    return leaves_domain(hardware, sizes, (TP,)), setting.config.train.accumulation, sizes[TP], sizes[CP]


def rows_of(config: TrainConfig) -> int:
    """Returns the number of sequences of a step on each device."""
    return max(1, config.data.global_batch_size // batch_parts(config.mesh.sizes))


def _choices(config: TrainConfig, most: int) -> Iterator[TrainConfig]:
    """Yields every remat policy with every number of micro-batches that divides a device's rows, at most so many."""
    for remat in dict.fromkeys((*REMATS, config.model.remat)):
        for count in _spread(divisors(rows_of(config)), most):
            yield changed(config, {"model.remat": remat, "train.accumulation": count})


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Returns as many of the values, the first and the last among them."""
    most = max(2, most)
    if len(values) <= most:
        return list(values)
    return [values[index * (len(values) - 1) // (most - 1)] for index in range(most)]
