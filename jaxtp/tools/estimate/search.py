"""Tries every mesh, micro-batch and remat policy that a configuration can run with, and ranks them.

Costs are formulas (`analysis/step_costs.py`, `train/memory.py`), so hundreds of settings take a
second; `compiler.py` compiles the best one.

Settings that fit even if the modelled memory is off by 20% rank first, then the middle of the time
range decides. Among a mesh's settings within 5% of its fastest, the least memory wins; among meshes
within 5% of the fastest, the simplest.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import Array

from jaxtp.analysis.hardware import MAX_DEVICES, Hardware, devices_per_host
from jaxtp.analysis.step_costs import StepCosts
from jaxtp.config.command_line import parse_mesh
from jaxtp.config.hints import divisors
from jaxtp.config.reading import first_lines
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.distributed.devices import MEMORY_FRACTION, Allocator
from jaxtp.layers.remat import RematPolicy
from jaxtp.mesh import (
    AXES,
    CP,
    TP,
    Sizes,
    batch_parts,
    describe_mesh,
    describe_split,
    fitting_meshes,
)
from jaxtp.models.decoder import Decoder
from jaxtp.models.log_probs import token_log_probs
from jaxtp.tools.estimate.roofline import StepTime, leaves_domain, step_time
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import Objective
from jaxtp.train.memory import (
    Memory,
    StoredArray,
    costs_of_step,
    memory_per_device,
    stored_arrays,
)
from jaxtp.train.parts import load_parts
from jaxtp.train.performance import flops_per_token
from jaxtp.train.setup import Plan, plan_step
from jaxtp.train.user_step import row_work
from jaxtp.train.validation import violations_on

REMATS: tuple[RematPolicy, ...] = ("none", "save_gathered", "save_dots", "save_reduced", "full")
"""Policies to try; `offload` only if configured, because transfers to the host are not modelled."""

CLUSTER_SHARE = 0.9  # of a GPU's memory for JAX, as scripts/cluster/gpu.env sets it
MEMORY_ERROR = 0.2
"""Safety margin for modelled memory, which is 19% too low at worst
(`scripts/results/estimate_accuracy.txt`)."""
NEAR = 1.05  # times within this factor count as equal
MIN_PART = 8192  # with cp, minimum tokens of a sequence on each device
MAX_REASONS = 3  # in the error that no mesh works
MAX_ACCUMULATIONS = 16  # numbers of micro-batches to try on a mesh
MAX_SETTINGS = 4096  # approximate limit per search; each takes milliseconds


@dataclass(frozen=True)
class Target:
    """Devices, and their memory for a step."""

    hardware: Hardware
    devices: int
    room: float  # bytes of each device
    # Share of the memory that JAX's allocator takes; None on TPUs, where it takes all
    share: float | None = None
    share_source: str = ""  # the setting, file or default that sets this share

    @property
    def hosts(self) -> dict[str, int]:
        """Hosts, and devices that fast links join on each."""
        on_each = devices_per_host(self.hardware, self.devices)
        return {"hosts": self.devices // on_each, "devices_per_host": on_each}


def target(
    hardware: Hardware,
    devices: int,
    memory_fraction: float | None = None,
    allocator: Allocator = "default",
) -> Target:
    """Returns the target with JAX's memory, or less if communication and driver leave less.

    By default the share is the allocator's, or on several hosts from scripts/cluster/gpu.env.
    """
    if hardware.platform == "tpu":
        return Target(hardware, devices, hardware.memory - hardware.reserved)
    if memory_fraction is not None:
        share = memory_fraction
        source = "--memory-fraction"
    elif allocator == "cuda_async":
        share = MEMORY_FRACTION[allocator]
        source = "of launch.allocator=cuda_async"
    elif devices > hardware.domain:
        share = CLUSTER_SHARE
        source = "set by scripts/cluster/gpu.env"
    else:
        share = MEMORY_FRACTION["default"]
        source = "JAX's default"
    room = min(share * hardware.memory, hardware.memory - hardware.reserved)
    return Target(hardware, devices, room, share, source)


@dataclass(frozen=True)
class LossWork:
    """A row of a user's loss on a decoder, traced on one device."""

    flops: float  # of products, without recomputation
    relative: float  # to the cross-entropy's
    saved: float  # bytes for the backward pass, more than the cross-entropy's
    columns: int  # bytes of the batch


@dataclass(frozen=True)
class Model:
    """Facts that a search's settings share."""

    arrays: tuple[StoredArray, ...]
    parameters: int  # without padding
    flops_per_token: float  # as MFU counts them
    loss: LossWork | None = None  # the decoder's own cross-entropy


def describe_model(config: TrainConfig) -> Model:
    """Traces a run's state once, for all meshes, and a user's loss."""
    arrays = stored_arrays(config)
    parameters = sum(array.parameters for array in arrays)
    flops = flops_per_token(config.model, parameters, config.data.sequence_length)
    _, parts = load_parts(config)
    if parts.loss.has_formulas:
        return Model(arrays, parameters, flops)
    row = {"data.global_batch_size": 1, "train.accumulation": 1}
    loss = _loss_work(plan_step(replace_nested(config, row)))
    return Model(arrays, parameters, flops * loss.relative, loss)


def _loss_work(row: Plan) -> LossWork:
    flops, saved = _row_work(row)
    usual = replace_nested(row.config, {"train.loss": None, "train.loss_arguments": {}})
    usual_flops, usual_saved = _row_work(plan_step(usual), objective=Objective.of(_by_token))
    columns = sum(column.size * column.dtype.itemsize for column in row.shapes.values())
    return LossWork(flops, flops / usual_flops, max(0.0, saved - usual_saved), columns)


def _row_work(plan: Plan, **changes: Any) -> tuple[float, float]:
    make_model = plan.parts.model.maker(plan.config.model)
    return row_work(replace(plan.step_settings, **changes), make_model, plan.shapes)


def _by_token(model: Decoder, batch: Mapping[str, Array], key: Array) -> tuple[Array, Array]:
    """Computes the cross-entropy from numbers of each token, as other losses do.

    `Decoder.loss` saves its gradients in place of the table.
    """
    labels = batch["labels"]
    log_probs = token_log_probs(model, batch["inputs"], labels, segments=batch.get(SEGMENTS))
    return -jnp.sum(jnp.asarray(log_probs)), jnp.sum(labels != IGNORE)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A step on a mesh of the target, with memory and time per device."""

    config: TrainConfig  # its mesh has sizes
    target: Target
    memory: Memory
    time: StepTime

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return self.config.mesh.sizes

    def __str__(self) -> str:
        return describe_split(self.sizes)

    @property
    def spare(self) -> float:
        """Bytes left per device; negative if it does not fit."""
        return self.target.room - self.memory.total

    @property
    def fits(self) -> bool:
        """Whether the modelled peak fits."""
        return self.spare >= 0

    @property
    def has_margin(self) -> bool:
        """Whether it fits with memory higher by `MEMORY_ERROR`."""
        return self.spare >= MEMORY_ERROR * (self.memory.total - self.memory.state)


C = TypeVar("C", bound=Candidate)


def rank(candidate: Candidate) -> tuple[int, float, float]:
    """Returns a sort key: with margin, tight, too large; then time or missing memory."""
    if not candidate.fits:
        return 2, -candidate.spare, candidate.time.expected
    return int(not candidate.has_margin), 0.0, candidate.time.expected


def is_near(candidate: Candidate, first: Candidate) -> bool:
    """Returns whether a candidate's time counts as equal to the fastest."""
    return candidate.time.expected <= NEAR * first.time.expected


def simplest_first(ranked: Sequence[C], is_as_fast: Callable[[C, C], bool] = is_near) -> list[C]:
    """Moves the simplest of the candidates that fit alike and are as fast to the front."""

    def complexity(candidate: C) -> tuple[bool, int, int, int]:
        sizes = candidate.sizes
        leaves = leaves_domain(candidate.target.hardware, sizes, (TP,))
        return leaves, candidate.config.train.accumulation, sizes[TP], sizes[CP]

    first = ranked[0]
    equal = []
    for candidate in ranked:
        fits_alike = candidate.fits and candidate.has_margin == first.has_margin
        if fits_alike and is_as_fast(candidate, first):
            equal.append(candidate)
    simplest = min(equal, key=complexity, default=first)
    return [simplest, *(candidate for candidate in ranked if candidate is not simplest)]


@dataclass(frozen=True, kw_only=True)
class Setting(Candidate):
    """A mesh, remat policy and micro-batch, with costs per device."""

    costs: StepCosts
    flops_per_token: float
    relative_work: float = 1.0  # of a user's loss

    @property
    def rows(self) -> int:
        """Micro-batch size per device."""
        return rows_of(self.config) // self.config.train.accumulation

    @property
    def update_is_modelled(self) -> bool:
        """Whether the optimizer's costs are modelled."""
        return optimizers.is_modelled(self.config.optimizer)

    @property
    def fits_surely(self) -> bool:
        """Whether it has the margin and everything is modelled."""
        return self.has_margin and self.update_is_modelled

    @property
    def tokens_per_second(self) -> float:
        """Tokens/s of all devices, at the expected time."""
        return self.tokens / self.time.expected

    @property
    def tokens_per_second_range(self) -> tuple[float, float]:
        """Tokens/s if nothing overlaps, and if everything does."""
        return self.tokens / self.time.serial, self.tokens / self.time.overlapped

    @property
    def mfu_range(self) -> tuple[float, float]:
        """Model FLOPs utilization, relative to the dense bfloat16 peak."""
        peak = self.target.devices * self.target.hardware.flops
        slow, fast = self.tokens_per_second_range
        return slow * self.flops_per_token / peak, fast * self.flops_per_token / peak

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.data.global_batch_size * self.config.data.sequence_length


@dataclass(frozen=True)
class Search:
    """Result of a search."""

    # The best setting of each mesh, ranked; the first is the best of all
    settings: Sequence[Setting]
    all: Sequence[Setting]
    refused: Mapping[str, str]  # why the other meshes cannot run the configuration, by mesh
    as_configured: bool  # remat and accumulation are as configured
    model: Model


def search(
    config: TrainConfig,
    where: Target,
    model: Model,
    meshes: Sequence[Sizes],
    *,
    as_configured: bool = False,
) -> Search:
    """Estimates every setting on every mesh; `as_configured` fixes remat and accumulation.

    Raises:
      ConfigError: no mesh can run the configuration.
    """
    runs, refused = runnable(config, meshes, as_configured=as_configured)
    if not runs:
        raise ConfigError(none_can(where.devices, refused))
    max_counts = max(2, min(MAX_ACCUMULATIONS, MAX_SETTINGS // (len(REMATS) * len(runs))))
    best = []
    settings: list[Setting] = []
    for run in runs:
        choices = [run] if as_configured else _choices(run, max_counts)
        on_mesh = [estimate(choice, where, model) for choice in choices]
        best.append(_choose(on_mesh))
        settings += on_mesh
    best.sort(key=rank)
    return Search(simplest_first(best), settings, refused, as_configured, model)


def parse_meshes(texts: Sequence[str], hardware: str, devices: int) -> list[dict[str, int]]:
    """Returns the meshes of --mesh.

    Raises `ConfigError` unless each has all `devices` of --hardware.
    """
    meshes = [parse_mesh(text, AXES) for text in texts]
    for text, sizes in zip(texts, meshes, strict=True):
        if (needed := math.prod(sizes.values())) != devices:
            kind = re.sub(r"^\d+[xX](?=.+[xX])|\d+$", "", hardware)
            instead = f"; {kind}{needed} has as many" if needed <= MAX_DEVICES else ""
            raise ConfigError(
                f"--mesh {text}: {describe_mesh(sizes)} is {needed:,} devices, and --hardware "
                f"{hardware} is {devices:,}{instead}"
            )
    return meshes


def meshes_to_try(config: TrainConfig, devices: int, hardware: Hardware) -> list[dict[str, int]]:
    """Returns meshes with at least `MIN_PART` tokens per sequence part, or the run's cp.

    Unless the run allows it, no tp group spans several domains of fast links.
    """
    longest = max(1, config.data.sequence_length // MIN_PART)
    meshes = []
    for sizes in fitting_meshes(devices):
        has_usual_cp = sizes[CP] <= longest or sizes[CP] == config.mesh.cp
        is_across_hosts = leaves_domain(hardware, sizes, (TP,))
        if has_usual_cp and (config.mesh.tp_across_hosts or not is_across_hosts):
            meshes.append(sizes)
    return meshes


def runnable(
    config: TrainConfig, meshes: Sequence[Sizes], *, as_configured: bool = False
) -> tuple[list[TrainConfig], dict[str, str]]:
    """Returns the run on each mesh that can run it, and the reason for each mesh that cannot.

    A run has one micro-batch unless `as_configured`.
    """
    runs = []
    refused = {}
    if not as_configured:
        config = replace_nested(config, {"train.accumulation": 1})
    for sizes in meshes:
        run = replace_nested(config, {"mesh": config.mesh.of_sizes(sizes)})
        problem = next(violations_on(run, sizes), None)
        if problem is None:
            runs.append(run)
        else:
            refused[describe_mesh(sizes)] = problem
    return runs, refused


def leanest(config: TrainConfig) -> Iterator[TrainConfig]:
    """Yields the settings that may need the least memory.

    These have full remat, and one row per micro-batch, or all rows in one (no gradients to sum).
    """
    remat = "offload" if config.model.remat == "offload" else "full"
    for accumulation in {rows_of(config), 1}:
        yield replace_nested(config, {"model.remat": remat, "train.accumulation": accumulation})


def none_can(devices: int, refused: Mapping[str, str]) -> str:
    """Returns the error that no mesh can run a configuration, with the reasons."""
    first_mesh: dict[str, str] = {}
    for mesh, reason in refused.items():
        first_mesh.setdefault(reason, mesh)
    lines = [f"{mesh}: {reason}" for reason, mesh in first_mesh.items()]
    problem = f"no mesh of {devices:,} devices that was tried can run this configuration:"
    return "\n  ".join([problem, *first_lines(lines, MAX_REASONS)])


def estimate(config: TrainConfig, where: Target, model: Model) -> Setting:
    """Returns a configuration's costs on its mesh, whose axes have sizes."""
    sizes = config.mesh.sizes
    costs = costs_of_step(config, sizes, where.hardware.architecture)
    memory = memory_per_device(config, sizes, model.arrays, costs=costs)
    work = 1.0
    loss = model.loss
    if loss:
        work = loss.relative
        rows = config.data.global_batch_size // batch_parts(sizes)
        saved = int(loss.saved * rows / (config.train.accumulation * sizes[CP]))
        memory = replace(memory, activations=memory.activations + saved, batch=loss.columns * rows)
    time = step_time(where.hardware, sizes, costs, memory, config.train.accumulation, work)
    return Setting(
        config=config,
        target=where,
        memory=memory,
        costs=costs,
        time=time,
        flops_per_token=model.flops_per_token,
        relative_work=work,
    )


def _choose(settings: Sequence[Setting]) -> Setting:
    """Returns the setting with the least memory among settings as fast as the fastest that fits."""
    first = min(settings, key=rank)
    if not first.fits:
        return first
    as_fast = (setting for setting in settings if setting.fits and is_near(setting, first))
    return min(as_fast, key=lambda setting: setting.memory.total)


def rows_of(config: TrainConfig) -> int:
    """Returns the sequences of a step per device."""
    return max(1, config.data.global_batch_size // batch_parts(config.mesh.sizes))


def _choices(config: TrainConfig, max_counts: int) -> Iterator[TrainConfig]:
    counts = divisors(rows_of(config))
    if len(counts) > max_counts:
        last = len(counts) - 1
        counts = [counts[index * last // (max_counts - 1)] for index in range(max_counts)]
    for remat in dict.fromkeys((*REMATS, config.model.remat)):
        for count in counts:
            yield replace_nested(config, {"model.remat": remat, "train.accumulation": count})
