"""Changes that would be faster where something fits, or would fit where nothing does: each is searched."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from jaxtp.config import changed
from jaxtp.estimate.search import (
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
from jaxtp.hardware import GB
from jaxtp.hardware_file import MAX_DEVICES
from jaxtp.mesh import sized
from jaxtp.models.config import adaptable
from jaxtp.train.config import TrainConfig, kernels, multiplies_all
from jaxtp.train.memory import with_attention

ALL_BUT_A_TENTH = 0.9
"""Share of memory that JAX can be given, with room left for communication buffers."""

MAX_FACTOR = 1024
SHORTEST = 512
"""Tokens: no shorter sequence is proposed."""

LORA_RANK = 16
CHUNK = 128
"""Tokens of a chunk of the loss that saves memory; products with so few wait for the head to be read."""
HALF = "--model.precision.compute bfloat16"
FUSED = "--model.attention auto"
OWN_EXPERTS = "--model.grouped auto"
MORE_MEMORY = f"XLA_PYTHON_CLIENT_MEM_FRACTION={ALL_BUT_A_TENTH} (--memory-fraction {ALL_BUT_A_TENTH})"

Run = tuple[TrainConfig, Target]


@dataclass(frozen=True)
class Change:
    """A change that costs nothing but a setting, or little."""

    flags: str
    meaning: str
    """Effect of the flags, as a verb and its object; empty where the flags name it."""

    apply: Callable[[TrainConfig, Target], Run | None]
    """Gives the changed run; None where it is as it was, or cannot be."""


@dataclass(frozen=True)
class Alternative:
    """A change, or several at once, and the best setting with it."""

    change: str
    """The flags, or the devices."""

    setting: Setting
    meaning: str = ""
    """Effect of the flags, as a relative clause."""

    def __str__(self) -> str:
        """Returns the change with its meaning, up to a verb."""
        return f"{self.change}, {self.meaning}," if self.meaning else self.change


def faster(found: Search, model: Model) -> Iterator[Alternative]:
    """Yields what would be faster than the best, or free much memory, the fastest first.

    All changes are searched together too: what computes in 16 bits can have a kernel that needs them. Several at once
    are told of where they are faster than each of them with fewer.

    Args:
      found: a search in which something fits.
      model: what it was about.
    """
    best = found.settings[0]
    meshes = [setting.sizes for setting in found.settings]
    tried: dict[tuple[Change, ...], Setting] = {(): best}
    for changes, (config, where) in _together(FREE, (best.config, best.target)):
        tried[changes] = search(config, where, model, meshes, as_configured=found.as_configured).settings[0]
    told = [changes for changes in tried if changes and _is_better(changes, tried)]
    for changes in sorted(told, key=lambda changes: tried[changes].time.expected):
        yield _alternative(changes, tried[changes])


def _is_better(changes: tuple[Change, ...], tried: Mapping[tuple[Change, ...], Setting]) -> bool:
    """Returns whether they fit and are faster than fewer of them; a single change may free memory instead."""
    with_all = tried[changes]
    fewer = [setting for some, setting in tried.items() if set(some) < set(changes)]
    as_fast = any(setting.fits and setting.time.expected <= NEAR * with_all.time.expected for setting in fewer)
    frees = len(changes) == 1 and with_all.target == tried[()].target and with_all.spare - tried[()].spare > GB
    return with_all.fits and (not as_fast or frees)


def _together(changes: Sequence[Change], run: Run) -> Iterator[tuple[tuple[Change, ...], Run]]:
    """Yields the run with each of the changes, with two of them, and so on, as far as they can be made."""
    for count in range(1, len(changes) + 1):
        for some in itertools.combinations(changes, count):
            changed: Run | None = run
            for change in some:
                changed = changed and change.apply(*changed)
            if changed is not None:
                yield some, changed


def _alternative(changes: Sequence[Change], setting: Setting) -> Alternative:
    meanings = " and ".join(change.meaning for change in changes if change.meaning)
    return Alternative(" ".join(change.flags for change in changes), setting, meanings and f"which {meanings}")


def remedies(found: Search, model: Model) -> Iterator[Alternative]:
    """Yields what would fit, the cheapest first; what costs more goes with all that costs nothing, if it must.

    Args:
      found: a search in which nothing fits.
      model: what it was about.
    """
    run = found.settings[0].config, found.settings[0].target
    cheap = list(_cheap(run, model))
    yield from cheap
    yield from _shorter(*run)
    training = list(_other_training(*run))
    more = list(_more_devices(*run, model))
    if not (cheap or training or more):
        all_changes, run = list(_together((*FREE, *SMALLER), run))[-1]
        flags = " ".join(change.flags for change in all_changes)
        training, more = (
            [dataclasses.replace(other, change=f"{flags} {other.change}") for other in others]
            for others in (_other_training(*run), _more_devices(*run, model))
        )
    yield from training
    yield from more


def _cheap(run: Run, model: Model) -> Iterator[Alternative]:
    """Yields what costs nothing but a setting, or several; none that contains another that would do."""
    enough: list[set[Change]] = []
    for changes, (config, where) in _together((*FREE, *SMALLER), run):
        if not any(some <= set(changes) for some in enough) and (fits := _fits(config, where, model)):
            enough.append(set(changes))
            yield _alternative(changes, fits)


def _with_more_memory(config: TrainConfig, where: Target) -> Run | None:
    wider = target(where.hardware, where.devices, ALL_BUT_A_TENTH)
    return (config, wider) if wider.room > where.room else None


def _with_fused_attention(config: TrainConfig, where: Target) -> Run | None:
    fused = with_attention(config, "auto")
    now, then = (kernels(run, sized(), where.hardware.platform) for run in (config, fused))
    return None if now.keys() == then.keys() else (fused, where)


def _with_own_experts(config: TrainConfig, where: Target) -> Run | None:
    own, platform = changed(config, {"model.grouped": "auto"}), where.hardware.platform
    now, then = (multiplies_all(run.model, platform) for run in (config, own))
    return (own, where) if now and not then else None


def _in_half(config: TrainConfig, where: Target) -> Run | None:
    if config.model.precision.compute != "float32":
        return None
    return changed(config, {"model.precision.compute": "bfloat16"}), where


def _with_smaller_chunk(config: TrainConfig, where: Target) -> Run | None:
    if config.model.loss_chunk <= CHUNK:
        return None
    return changed(config, {"model.loss_chunk": CHUNK}), where


FREE = (
    Change(HALF, "computes in 16 bits", _in_half),
    Change(FUSED, "never holds the scores", _with_fused_attention),
    Change(OWN_EXPERTS, "multiplies each row with its own expert alone", _with_own_experts),
    Change(MORE_MEMORY, "", _with_more_memory),
)
SMALLER = (Change(f"--model.loss-chunk {CHUNK}", "", _with_smaller_chunk),)
"""Changes that save memory and make nothing faster."""


def _shorter(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    """Yields the longest of half the sequence, a quarter, and so on, that fits."""
    length = config.data.sequence_length // 2
    while length >= SHORTEST:
        shorter = changed(config, {"data.sequence_length": length})
        if fits := _fits(shorter, where, describe_model(shorter)):
            yield Alternative(f"--data.sequence-length {length}", fits)
            return
        length //= 2


def _other_training(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    """Yields ways to store less: weights and moments in 16 bits, or few that are trained."""
    in_half = {"model.precision.param": "bfloat16"}
    adapted = config.model.lora.targets
    can = adaptable(config.model)
    adapters = changed(config, {"model.lora.rank": LORA_RANK, "model.lora.targets": can})
    bits, lora = "--model.precision.param bfloat16", f"--model.lora.rank {LORA_RANK}"
    if can != adapted:
        lora += f" --model.lora.targets {' '.join(can)}"
    frozen = "which keeps the frozen weights in 16 bits too"
    if config.model.lora.rank:
        changes = [(bits, changed(config, in_half), frozen)]
    else:
        changes = [
            (bits, changed(config, in_half), "whose weights lose updates of less than a 256th of them"),
            (lora, adapters, "which fine-tunes by adapters alone"),
            (f"{lora} {bits}", changed(adapters, in_half), frozen),
        ]
    told = [config]
    for change, other, meaning in changes:
        if other not in told and (fits := _fits(other, where, describe_model(other))):
            yield Alternative(change, fits, meaning)
        told.append(other)


def _more_devices(config: TrainConfig, where: Target, model: Model) -> Iterator[Alternative]:
    """Yields the smallest multiple of the devices, by powers of two, that fits."""
    factor = 2
    while factor <= MAX_FACTOR and factor * where.devices <= MAX_DEVICES:
        more = dataclasses.replace(where, devices=where.devices * factor)
        if fits := _fits(config, more, model):
            yield Alternative(f"{more.devices} x {where.hardware.name}", fits)
            return
        factor *= 2


def _fits(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    """Returns the best setting that fits with the margin, if any; searches all only where the leanest of one fits."""
    able, _ = runnable(config, meshes_to_try(config, where.devices, where.hardware.domain))
    if not any(estimate(lean, where, model).has_margin for on_mesh in able for lean in leanest(on_mesh)):
        return None
    best = search(config, where, model, [on_mesh.mesh.sizes for on_mesh in able]).settings[0]
    return best if best.has_margin else None
