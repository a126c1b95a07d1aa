"""Changes that speed up the best setting or, if nothing fits, make the run fit, searched on all meshes."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtp.analysis.hardware import GB
from jaxtp.analysis.hardware_file import MAX_DEVICES
from jaxtp.config.schema import changed
from jaxtp.mesh import sized
from jaxtp.models.config import adaptable
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
from jaxtp.train.memory import with_attention
from jaxtp.train.validation import chosen_kernels, multiplies_all

MAX_FACTOR = 1024
SHORTEST = 512
"""Tokens of the shortest sequence to propose."""
LORA_RANK = 16
CHUNK = 128
"""Tokens of a memory-saving chunk of the loss; with fewer, products wait for the head to be read."""
MORE_MEMORY = f"XLA_PYTHON_CLIENT_MEM_FRACTION={CLUSTER_SHARE} (--memory-fraction {CLUSTER_SHARE})"


class Run(NamedTuple):
    """A configuration and its target."""

    config: TrainConfig
    where: Target


class Change(NamedTuple):
    """A change at little or no cost."""

    flags: str
    apply: Callable[[Run], Run | None]
    """Returns the changed run; None if it changes nothing."""


@dataclass(frozen=True)
class Alternative:
    """Changes, and the best setting with them."""

    change: str
    """Flags, or a number of devices."""
    setting: Setting
    note: str = ""

    def __str__(self) -> str:
        return f"{self.change} ({self.note})" if self.note else self.change


def faster(found: Search, model: Model) -> list[Alternative]:
    """Returns the changes that together speed up the best setting or free a GB, as a single alternative, or none."""
    best, used = found.settings[0], []
    run, meshes = Run(best.config, best.target), [setting.sizes for setting in found.settings]
    for change in FREE:
        if (other := change.apply(run)) is None:
            continue
        setting = search(*other, model, meshes, as_configured=found.as_configured).settings[0]
        ratio = best.time.expected / setting.time.expected
        frees = other.where == run.where and setting.spare - best.spare > GB and ratio > 1 / NEAR
        if setting.fits and (ratio > NEAR or frees):
            best, run = setting, other
            used.append(change.flags)
    return [Alternative(" ".join(used), best)] if used else []


def remedies(found: Search, model: Model) -> Iterator[Alternative]:
    """Yields changes that make the run fit, cheapest first; costly changes add cheap changes if needed."""
    run = Run(found.settings[0].config, found.settings[0].target)
    cheap = list(_cheap(run, model))
    yield from cheap
    yield from _shorter(*run)
    costly = [*_other_training(*run), *_more_devices(*run, model)]
    if not (cheap or costly):
        (*_, (flags, run)) = _stacked((*FREE, *SMALLER), run)
        costly = [
            dataclasses.replace(other, change=f"{flags} {other.change}")
            for other in (*_other_training(*run), *_more_devices(*run, model))
        ]
    yield from costly


def _cheap(run: Run, model: Model) -> Iterator[Alternative]:
    """Yields sufficient single changes, else the first few that suffice together."""
    alone = [(change.flags, changed) for change in (*FREE, *SMALLER) if (changed := change.apply(run)) is not None]
    enough = [Alternative(flags, fits) for flags, changed in alone if (fits := _fits(*changed, model))]
    yield from enough
    if not enough:
        stacked = ((flags, _fits(*changed, model)) for flags, changed in _stacked((*FREE, *SMALLER), run))
        yield from ([Alternative(flags, fits) for flags, fits in stacked if fits is not None][:1])


def _stacked(changes: Sequence[Change], run: Run) -> Iterator[tuple[str, Run]]:
    flags: list[str] = []
    yield "", run
    for change in changes:
        if (other := change.apply(run)) is not None:
            run = other
            flags.append(change.flags)
            yield " ".join(flags), run


def _with_more_memory(run: Run) -> Run | None:
    wider = target(run.where.hardware, run.where.devices, CLUSTER_SHARE)
    return Run(run.config, wider) if wider.room > run.where.room else None


def _with_fused_attention(run: Run) -> Run | None:
    fused = with_attention(run.config, "auto")
    now, then = (chosen_kernels(config, sized(), run.where.hardware.architecture) for config in (run.config, fused))
    return None if now.keys() == then.keys() else Run(fused, run.where)


def _with_grouped_products(run: Run) -> Run | None:
    grouped, platform = changed(run.config, {"model.grouped": "auto"}), run.where.hardware.platform
    now, then = (multiplies_all(config.model, platform) for config in (run.config, grouped))
    return Run(grouped, run.where) if now and not then else None


def _in_16_bits(run: Run) -> Run | None:
    if run.config.model.precision.compute != "float32":
        return None
    return Run(changed(run.config, {"model.precision.compute": "bfloat16"}), run.where)


def _with_smaller_chunk(run: Run) -> Run | None:
    if run.config.model.loss_chunk <= CHUNK:
        return None
    return Run(changed(run.config, {"model.loss_chunk": CHUNK}), run.where)


FREE = (
    Change("--model.precision.compute bfloat16", _in_16_bits),  # first: kernels of attention may need 16 bits
    Change("--model.attention auto", _with_fused_attention),
    Change("--model.grouped auto", _with_grouped_products),
    Change(MORE_MEMORY, _with_more_memory),
)
SMALLER = (Change(f"--model.loss-chunk {CHUNK}", _with_smaller_chunk),)
"""Changes that save memory and make nothing faster."""


def _shorter(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    length = config.data.sequence_length // 2
    while length >= SHORTEST:
        shorter = changed(config, {"data.sequence_length": length})
        if fits := _fits(shorter, where, describe_model(shorter)):
            yield Alternative(f"--data.sequence-length {length}", fits)
            return
        length //= 2


def _other_training(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    in_half = {"model.precision.param": "bfloat16"}
    can = adaptable(config.model)
    adapters = changed(config, {"model.lora.rank": LORA_RANK, "model.lora.targets": can})
    bits, lora = "--model.precision.param bfloat16", f"--model.lora.rank {LORA_RANK}"
    if can != config.model.lora.targets:
        lora += f" --model.lora.targets {' '.join(can)}"
    frozen = "frozen weights in 16 bits"
    options = [(bits, changed(config, in_half), frozen)]
    if not config.model.lora.rank:
        options = [
            (bits, changed(config, in_half), "weights lose updates smaller than 1/256 of them"),
            (lora, adapters, "trains adapters only"),
            (f"{lora} {bits}", changed(adapters, in_half), frozen),
        ]
    seen = [config]
    for change, other, note in options:
        if other not in seen and (fits := _fits(other, where, describe_model(other))):
            yield Alternative(change, fits, note)
        seen.append(other)


def _more_devices(config: TrainConfig, where: Target, model: Model) -> Iterator[Alternative]:
    factor = 2
    while factor <= MAX_FACTOR and factor * where.devices <= MAX_DEVICES:
        more = dataclasses.replace(where, devices=where.devices * factor)
        if fits := _fits(config, more, model):
            yield Alternative(f"{more.devices} x {where.hardware.name}", fits)
            return
        factor *= 2


def _fits(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    """Searches all settings only if a minimum-memory setting fits with margin."""
    able, _ = runnable(config, meshes_to_try(config, where.devices, where.hardware.domain))
    if not any(estimate(lean, where, model).has_margin for on_mesh in able for lean in leanest(on_mesh)):
        return None
    best = search(config, where, model, [on_mesh.mesh.sizes for on_mesh in able]).settings[0]
    return best if best.has_margin else None
