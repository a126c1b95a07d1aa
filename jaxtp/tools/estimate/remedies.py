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
from jaxtp.mesh import Sizes, batch_parts, mesh_shape
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
from jaxtp.train.validation import chosen_kernels, multiplies_all

MAX_DOUBLINGS = 10  # of the devices
SHORTEST = 512  # Tokens of the shortest sequence to propose
LORA_RANK = 16
CHUNK = 128
"""Tokens of a memory-saving chunk of the loss. With fewer, reading the head limits the speed."""


class Run(NamedTuple):
    """A configuration, its target, and the facts of its model."""

    config: TrainConfig
    where: Target
    model: Model


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


def flags_of(change: Change) -> str:
    """Returns the flags that make a change."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())


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
    """Returns the run with a change of `CHEAP`; None if the change affects no kernels or memory."""
    where = run.where
    if flags == MORE_MEMORY:
        on_cluster = target(where.hardware, where.devices, CLUSTER_SHARE)
        if on_cluster.room > where.room:
            where = on_cluster
    other = Run(replace_nested(run.config, CHEAP[flags]), where, run.model)
    if _facts(other) == _facts(run):
        return None
    return other


def _facts(run: Run) -> tuple[object, ...]:
    model = run.config.model
    hardware = run.where.hardware
    kernels = chosen_kernels(run.config, mesh_shape(), hardware.architecture).keys()
    chunk = max(model.loss_chunk, CHUNK)
    in_float32 = model.precision.compute == "float32"
    return in_float32, kernels, multiplies_all(model, hardware.platform), chunk, run.where.room


def faster(results: Search) -> list[Alternative]:
    """Returns the free changes that together speed up the best setting or free a GB, or none."""
    best = results.settings[0]
    used = []
    run = Run(best.config, best.target, results.model)
    meshes = [setting.sizes for setting in results.settings]
    for flags in FREE:
        other = changed(run, flags)
        if other is None:
            continue
        setting = search(*other, meshes, as_configured=results.as_configured).settings[0]
        ratio = best.time.expected / setting.time.expected
        frees = other.where == run.where and setting.spare - best.spare > GB and ratio > 1 / NEAR
        if setting.fits and (ratio > NEAR or frees):
            best = setting
            run = other
            used.append(flags)
    if not used:
        return []
    return [Alternative(" ".join(used), best)]


def remedies(results: Search) -> Iterator[Alternative]:
    """Yields changes that make the run fit, cheapest first.

    Costly changes add the cheap ones if needed.
    """
    best = results.settings[0]
    run = Run(best.config, best.target, results.model)
    single = []
    for flags in CHEAP:
        if changed_run := changed(run, flags):
            single.append((flags, changed_run))
    cheap = list(_fitting(single))
    together = _stacked(run)
    if not cheap:
        cheap = _first(together.items())
    yield from cheap
    yield from _without_accumulation(run)
    yield from _shorter(run)
    costly = _costly(run)
    if together and not (cheap or costly):
        flags, run = list(together.items())[-1]
        for other in _costly(run):
            costly.append(dataclasses.replace(other, change=f"{flags} {other.change}"))
    yield from costly


def _costly(run: Run) -> list[Alternative]:
    return [*_other_training(run), *_more_devices(run)]


def _fitting(candidates: Iterable[tuple[str, Run]]) -> Iterator[Alternative]:
    for change, run in candidates:
        if setting := _fits(run):
            yield Alternative(change, setting)


def _first(candidates: Iterable[tuple[str, Run]]) -> list[Alternative]:
    return list(itertools.islice(_fitting(candidates), 1))


def _stacked(run: Run) -> dict[str, Run]:
    # The first cheap change, the first two, ...
    flags = ""
    stacked = {}
    for flag in CHEAP:
        if other := changed(run, flag):
            flags = f"{flags} {flag}".strip()
            run = other
            stacked[flags] = run
    return stacked


def _without_accumulation(run: Run) -> list[Alternative]:
    # The largest batch with one sequence on each device. Gradients are then not summed in a wider
    # dtype, and a mesh that does not divide the run's batch may fit.
    meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware.domain)
    for size in sorted(set(map(batch_parts, meshes)), reverse=True):
        if size >= run.config.data.global_batch_size:
            continue
        changes: Change = {"data.global_batch_size": size, "train.accumulation": 1}
        smaller = Run(replace_nested(run.config, changes), run.where, run.model)
        setting = _fits(smaller, [mesh for mesh in meshes if batch_parts(mesh) == size])
        if setting:
            return [Alternative(flags_of(changes), setting, "a batch without accumulation")]
    return []


def _shorter(run: Run) -> list[Alternative]:
    def candidates() -> Iterator[tuple[str, Run]]:
        length = run.config.data.sequence_length // 2
        while length >= SHORTEST:
            change: Change = {"data.sequence_length": length}
            config = replace_nested(run.config, change)
            yield flags_of(change), Run(config, run.where, describe_model(config))
            length //= 2

    return _first(candidates())


def _other_training(run: Run) -> Iterator[Alternative]:
    in_16_bits: Change = {"model.precision.param": "bfloat16"}
    adapters: Change = {"model.lora.rank": LORA_RANK}
    float8_base: Change = {"model.lora.base": "float8"}
    if run.config.model.lora.rank:
        options = [
            (in_16_bits, "frozen weights in 16 bits"),
            (float8_base, "frozen kernels in 8 bits"),
        ]
    else:
        options = [
            ({"optimizer.first_moment": "bfloat16"}, "rounded stochastically"),
            (in_16_bits, "weights lose updates smaller than 1/256 of them"),
            (adapters, "trains adapters only"),
            (adapters | in_16_bits, "frozen weights in 16 bits"),
            (adapters | in_16_bits | float8_base, "frozen kernels in 8 bits"),
        ]
    for change, note in options:
        config = replace_nested(run.config, change)
        if config == run.config:
            continue
        if setting := _fits(Run(config, run.where, describe_model(config))):
            yield Alternative(flags_of(change), setting, note)


def _more_devices(run: Run) -> list[Alternative]:
    def candidates() -> Iterator[tuple[str, Run]]:
        where = run.where
        for _ in range(MAX_DOUBLINGS):
            where = dataclasses.replace(where, devices=2 * where.devices)
            if where.devices <= MAX_DEVICES:
                larger = Run(run.config, where, run.model)
                yield f"{where.devices} x {where.hardware.name}", larger

    return _first(candidates())


def _fits(run: Run, meshes: Sequence[Sizes] | None = None) -> Setting | None:
    # A full search is slow, so first try only the settings that use the least memory. Search all
    # settings only if one of those fits with margin.
    if meshes is None:
        meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware.domain)
    configs, _ = runnable(run.config, meshes)
    lean_configs = itertools.chain.from_iterable(map(leanest, configs))
    if not any(estimate(config, run.where, run.model).has_margin for config in lean_configs):
        return None
    best = search(*run, [config.mesh.sizes for config in configs]).settings[0]
    return best if best.has_margin else None
