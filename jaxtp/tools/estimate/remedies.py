"""Changes that speed up the best setting or, if nothing fits, make the run fit.

They are searched on all meshes.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtp.analysis.hardware import GB, MAX_DEVICES
from jaxtp.config.schema import replace_nested
from jaxtp.mesh import batch_parts, mesh_shape
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
"""Tokens of a memory-saving chunk of the loss; with fewer, products wait for the head to be
read."""


class Run(NamedTuple):
    """A configuration and its target."""

    config: TrainConfig
    where: Target


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
"""The same, and settings that save memory and make nothing faster."""


def changed(run: Run, flags: str) -> Run | None:
    """Returns the run with a change of `CHEAP`.

    It is None if its kernels and its memory stay as they are.
    """
    where = run.where
    if flags == MORE_MEMORY:
        where = max(
            where, target(where.hardware, where.devices, CLUSTER_SHARE), key=lambda one: one.room
        )
    other = Run(replace_nested(run.config, CHEAP[flags]), where)
    return None if _facts(other) == _facts(run) else other


def _facts(run: Run) -> tuple[object, ...]:
    model = run.config.model
    hardware = run.where.hardware
    kernels = chosen_kernels(run.config, mesh_shape(), hardware.architecture).keys()
    chunk = max(model.loss_chunk, CHUNK)
    in_float32 = model.precision.compute == "float32"
    return in_float32, kernels, multiplies_all(model, hardware.platform), chunk, run.where.room


def faster(found: Search, model: Model) -> list[Alternative]:
    """Returns the free changes that together speed up the best setting or free a GB, or none."""
    best = found.settings[0]
    used = []
    run = Run(best.config, best.target)
    meshes = [setting.sizes for setting in found.settings]
    for flags in FREE:
        if (other := changed(run, flags)) is None:
            continue
        setting = search(*other, model, meshes, as_configured=found.as_configured).settings[0]
        ratio = best.time.expected / setting.time.expected
        frees = other.where == run.where and setting.spare - best.spare > GB and ratio > 1 / NEAR
        if setting.fits and (ratio > NEAR or frees):
            best = setting
            run = other
            used.append(flags)
    return [Alternative(" ".join(used), best)] if used else []


def remedies(found: Search, model: Model) -> Iterator[Alternative]:
    """Yields changes that make the run fit, cheapest first.

    Costly changes add the cheap ones if needed.
    """
    run = Run(found.settings[0].config, found.settings[0].target)
    single = {flags: other for flags in CHEAP if (other := changed(run, flags))}
    together = _stacked(run)
    cheap = [
        Alternative(flags, fits) for flags, other in single.items() if (fits := _fits(other, model))
    ]
    cheap = cheap or _first((flags, other, model) for flags, other in together.items())
    yield from cheap
    yield from _without_accumulation(run, model)
    yield from _shorter(run)
    costly = [*_other_training(run), *_more_devices(run, model)]
    if together and not (cheap or costly):
        flags, run = list(together.items())[-1]
        costly = [*_other_training(run), *_more_devices(run, model)]
        costly = [dataclasses.replace(other, change=f"{flags} {other.change}") for other in costly]
    yield from costly


def _first(candidates: Iterable[tuple[str, Run, Model]]) -> list[Alternative]:
    fitting = (
        Alternative(change, fits)
        for change, run, model in candidates
        if (fits := _fits(run, model))
    )
    return list(itertools.islice(fitting, 1))


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


def _without_accumulation(run: Run, model: Model) -> list[Alternative]:
    # The largest batch of one sequence on each device: gradients are not summed in a wider dtype,
    # and a mesh that the run's batch cannot be split over may be the one that fits.
    meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware.domain)
    sizes = sorted({batch_parts(mesh) for mesh in meshes}, reverse=True)
    note = "a batch without accumulation"
    for size in (size for size in sizes if size < run.config.data.global_batch_size):
        smaller = {"data.global_batch_size": size, "train.accumulation": 1}
        once = Run(replace_nested(run.config, smaller), run.where)
        fits = _fits(once, model, [mesh for mesh in meshes if batch_parts(mesh) == size])
        if fits:
            return [
                Alternative(f"--data.global-batch-size {size} --train.accumulation 1", fits, note)
            ]
    return []


def _shorter(run: Run) -> list[Alternative]:
    lengths = (run.config.data.sequence_length // 2**halvings for halvings in range(1, 64))
    shorter = (
        (
            f"--data.sequence-length {length}",
            replace_nested(run.config, {"data.sequence_length": length}),
        )
        for length in itertools.takewhile(lambda length: length >= SHORTEST, lengths)
    )
    return _first(
        (flags, Run(config, run.where), describe_model(config)) for flags, config in shorter
    )


def _other_training(run: Run) -> Iterator[Alternative]:
    bits = "--model.precision.param bfloat16"
    lora = f"--model.lora.rank {LORA_RANK}"
    in_half: Change = {"model.precision.param": "bfloat16"}
    adapters: Change = {"model.lora.rank": LORA_RANK}
    float8: Change = {"model.lora.base": "float8"}
    in_float8 = "--model.lora.base float8", float8, "frozen kernels in 8 bits"
    options = [(bits, in_half, "frozen weights in 16 bits"), in_float8]
    if not run.config.model.lora.rank:
        moment: Change = {"optimizer.first_moment": "bfloat16"}
        options = [
            ("--optimizer.first-moment bfloat16", moment, "rounded stochastically"),
            (bits, in_half, "weights lose updates smaller than 1/256 of them"),
            (lora, adapters, "trains adapters only"),
            (f"{lora} {bits}", adapters | in_half, "frozen weights in 16 bits"),
            (f"{lora} {bits} {in_float8[0]}", adapters | in_half | float8, in_float8[2]),
        ]
    for flags, change, note in options:
        config = replace_nested(run.config, change)
        if config != run.config and (fits := _fits(Run(config, run.where), describe_model(config))):
            yield Alternative(flags, fits, note)


def _more_devices(run: Run, model: Model) -> list[Alternative]:
    counts = (run.where.devices * 2**doublings for doublings in range(1, MAX_DOUBLINGS + 1))
    more = (
        dataclasses.replace(run.where, devices=count) for count in counts if count <= MAX_DEVICES
    )
    return _first(
        (f"{where.devices} x {where.hardware.name}", Run(run.config, where), model)
        for where in more
    )


def _fits(
    run: Run, model: Model, meshes: Sequence[Mapping[str, int]] | None = None
) -> Setting | None:
    # A full search is slow, so first try only the settings that use the least memory. Search all
    # settings only if one of those fits with margin.
    if meshes is None:
        meshes = meshes_to_try(run.config, run.where.devices, run.where.hardware.domain)
    able, _ = runnable(run.config, meshes)
    if not any(
        estimate(lean, run.where, model).has_margin for on_mesh in able for lean in leanest(on_mesh)
    ):
        return None
    best = search(*run, model, [on_mesh.mesh.sizes for on_mesh in able]).settings[0]
    return best if best.has_margin else None
