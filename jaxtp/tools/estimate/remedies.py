"""Changes that speed up the best setting or, if nothing fits, make the run fit.

Each change is tried on all meshes.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtp.analysis.hardware import GB, MAX_DEVICES
from jaxtp.config.schema import replace_nested
from jaxtp.mesh import Sizes, batch_parts
from jaxtp.tools.estimate.search import (
    CLUSTER_SHARE,
    NEAR,
    Model,
    Search,
    Setting,
    Target,
    describe_model,
    estimate,
    leanest,
    meshes_to_try,
    runnable,
    search,
    target,
)
from jaxtp.train.config import TrainConfig

MAX_REMEDIES = 3
MAX_DOUBLINGS = 10  # of the devices
SHORTEST = 512  # Tokens of the shortest sequence to propose
LORA_RANK = 16
CHUNK = 128
"""Tokens of a memory-saving chunk of the loss. With fewer, reading the head limits the speed."""


class Run(NamedTuple):
    """A configuration with changes, its target, and the facts of its model."""

    config: TrainConfig
    where: Target
    model: Model
    change: str = ""  # flags, or a number of devices
    note: str = ""

    def search(self, meshes: Sequence[Sizes], *, as_configured: bool = False) -> Setting:
        """Returns the best setting on some meshes."""
        results = search(self.config, self.where, self.model, meshes, as_configured=as_configured)
        return results.settings[0]


@dataclass(frozen=True)
class Alternative:
    """Changes, and the best setting with them."""

    change: str  # flags, or a number of devices
    setting: Setting
    note: str = ""

    def __str__(self) -> str:
        return f"{self.change} ({self.note})" if self.note else self.change


MORE_MEMORY = f"XLA_PYTHON_CLIENT_MEM_FRACTION={CLUSTER_SHARE} (--memory-fraction {CLUSTER_SHARE})"
Change = dict[str, object]  # Settings, by their dotted names


FREE: dict[str, Change] = {
    # This change is first: kernels may need 16 bits.
    "--model.precision.compute bfloat16": {"model.precision.compute": "bfloat16"},
    "--model.attention auto": {"model.attention": "auto"},
    "--model.grouped auto": {"model.grouped": "auto"},
    MORE_MEMORY: {},
}
"""Settings that cost nothing, by their flags."""
CHEAP: dict[str, Change] = {**FREE, f"--model.loss-chunk {CHUNK}": {"model.loss_chunk": CHUNK}}
"""The settings of `FREE`, and settings that only save memory."""


def changed(run: Run, flags: str) -> Run | None:
    """Returns the run with a change of `CHEAP`; None if the run has it already."""
    where = run.where
    if flags == MORE_MEMORY:
        on_cluster = target(where.hardware, where.devices, CLUSTER_SHARE)
        if on_cluster.room > where.room:
            where = on_cluster
    config = replace_nested(run.config, CHEAP[flags])
    other = run._replace(config=config, where=where, change=f"{run.change} {flags}".strip())
    has_it = (other.config, other.where) == (run.config, run.where)
    return None if has_it else other


def faster(results: Search) -> list[Alternative]:
    """Returns the free changes that together speed up the best setting or free a GB, or none."""
    best = results.settings[0]
    run = Run(best.config, best.target, results.model)
    meshes = [setting.sizes for setting in results.settings]
    for flags in FREE:
        other = changed(run, flags)
        if other is None:
            continue
        setting = other.search(meshes, as_configured=results.as_configured)
        ratio = best.time.expected / setting.time.expected
        frees = other.where == run.where and setting.spare - best.spare > GB and ratio > 1 / NEAR
        if setting.fits and (ratio > NEAR or frees):
            best = setting
            run = other
    return [Alternative(run.change, best)] if run.change else []


def remedies(results: Search) -> Iterator[Alternative]:
    """Yields changes that make the run fit: the first of each kind, cheapest kinds first."""
    best = results.settings[0]
    run = Run(best.config, best.target, results.model)
    cheap = list(_first(_cheap(run)))
    # If no cheap change suffices, the costly ones are also tried together with all cheap ones.
    runs = [run] if cheap else [run, *list(_together(run))[-1:]]
    costly = [itertools.chain(*map(kind, runs)) for kind in (_training, _devices)]
    alternatives = itertools.chain.from_iterable(map(_first, (_less_data(run), *costly)))
    return itertools.islice(itertools.chain(cheap, alternatives), MAX_REMEDIES)


def _first(runs: Iterable[Run]) -> Iterator[Alternative]:
    return itertools.islice(filter(None, map(_fits, runs)), 1)


def _cheap(run: Run) -> Iterator[Run]:
    yield from filter(None, (changed(run, flags) for flags in CHEAP))
    yield from _together(run)


def _together(run: Run) -> Iterator[Run]:
    # The first cheap change, the first two, ...
    for flags in CHEAP:
        if other := changed(run, flags):
            run = other
            yield run


def _less_data(run: Run) -> Iterator[Run]:
    # A batch with one sequence on each device needs no sum of gradients in a wider dtype, and a
    # mesh that does not divide the run's batch may divide it.
    meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware)
    for size in sorted(set(map(batch_parts, meshes)), reverse=True):
        if size < run.config.data.global_batch_size:
            yield _with(run, {"data.global_batch_size": size})
    length = run.config.data.sequence_length // 2
    while length >= SHORTEST:
        yield _with(run, {"data.sequence_length": length})
        length //= 2


def _with(run: Run, change: Change, note: str = "") -> Run:
    config = replace_nested(run.config, change)
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
    text = f"{run.change} {flags}".strip()
    return Run(config, run.where, describe_model(config), text, note)


def _training(run: Run) -> Iterator[Run]:
    in_16_bits: Change = {"model.precision.param": "bfloat16"}
    adapters: Change = {"model.lora.rank": LORA_RANK}
    float8_base: Change = {"model.lora.base": "float8"}
    mxfp4_base: Change = {"model.lora.base": "mxfp4"}
    if run.config.model.lora.rank:
        options = [
            (in_16_bits, "frozen weights in 16 bits"),
            (float8_base, "frozen kernels in 8 bits"),
            (mxfp4_base, "frozen kernels in 4 bits"),
        ]
    else:
        options = [
            ({"optimizer.first_moment": "bfloat16"}, "rounded stochastically"),
            (in_16_bits, "weights lose updates smaller than 1/256 of them"),
            (adapters, "trains adapters only"),
            (adapters | in_16_bits, "frozen weights in 16 bits"),
            (adapters | in_16_bits | float8_base, "frozen kernels in 8 bits"),
            (adapters | in_16_bits | mxfp4_base, "frozen kernels in 4 bits"),
        ]
    for change, note in options:
        other = _with(run, change, note)
        if other.config != run.config:
            yield other


def _devices(run: Run) -> Iterator[Run]:
    where = run.where
    for _ in range(MAX_DOUBLINGS):
        where = dataclasses.replace(where, devices=2 * where.devices)
        if where.devices <= MAX_DEVICES:
            text = f"{run.change} {where.devices} x {where.hardware.name}".strip()
            yield run._replace(where=where, change=text)


def _fits(run: Run) -> Alternative | None:
    # A full search is slow, so first try only the settings that use the least memory. Search all
    # settings only if one of those fits with margin.
    meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware)
    configs, _ = runnable(run.config, meshes)
    lean_configs = itertools.chain.from_iterable(map(leanest, configs))
    if not any(estimate(config, run.where, run.model).has_margin for config in lean_configs):
        return None
    best = run.search([config.mesh.sizes for config in configs])
    return Alternative(run.change, best, run.note) if best.has_margin else None
