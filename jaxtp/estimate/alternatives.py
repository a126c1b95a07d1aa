"""What would be faster where something fits, and what would fit where nothing does: each change is searched."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from jaxtp.config import ConfigError
from jaxtp.estimate.config import check_attention
from jaxtp.estimate.search import NEAR, Model, Search, Setting, Target, all_meshes, describe_model, search, target
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import with_attention

GB = 1e9
ALL_BUT_A_TENTH = 0.9
"""Share of memory that JAX can be given, with room left for communication buffers."""

MAX_FACTOR = 1024
SHORTEST = 512
"""Tokens: no shorter sequence is proposed."""

LORA_RANK = 16
FUSED = "--model.attention cudnn"
MORE_MEMORY = f"XLA_PYTHON_CLIENT_MEM_FRACTION={ALL_BUT_A_TENTH} (--memory-fraction {ALL_BUT_A_TENTH})"


@dataclass(frozen=True)
class Alternative:
    """A change, and the best setting with it."""

    change: str
    """The flags, or the devices."""

    setting: Setting
    meaning: str = ""
    """What the flags do, as a relative clause."""

    def __str__(self) -> str:
        """The change with its meaning, up to a verb."""
        return f"{self.change}, {self.meaning}," if self.meaning else self.change


def faster(found: Search, model: Model) -> Iterator[Alternative]:
    """What would be faster than the best, or free much memory, and costs nothing else.

    Args:
      found: a search in which something fits.
      model: what it was about.
    """
    best = found.settings[0]
    meshes = [setting.sizes for setting in found.settings]

    def best_of(config: TrainConfig, where: Target) -> Setting:
        return search(config, where, model, meshes, as_configured=found.as_configured).settings[0]

    if (fused := _fused(best.config, best.target)) is not None:
        other = best_of(fused, best.target)
        freed = other.spare - best.spare
        if other.fits and (best.time.expected > NEAR * other.time.expected or freed > GB):
            yield Alternative(FUSED, other, "which never holds the scores")
    if (wider := _wider(best.target)) is not None:
        other = best_of(best.config, wider)
        if other.fits and best.time.expected > NEAR * other.time.expected:
            yield Alternative(MORE_MEMORY, other)


def remedies(found: Search, model: Model) -> Iterator[Alternative]:
    """What would fit, the cheapest first.

    Args:
      found: a search in which nothing fits.
      model: what it was about.
    """
    config, where = found.settings[0].config, found.settings[0].target
    yield from _cheap(config, where, model)
    yield from _shorter(config, where)
    yield from _other_training(config, where)
    yield from _more_devices(config, where, model)


def _cheap(config: TrainConfig, where: Target, model: Model) -> Iterator[Alternative]:
    """What costs nothing but a setting."""
    if (wider := _wider(where)) and (fits := _fits(config, wider, model)):
        yield Alternative(MORE_MEMORY, fits)
    if (fused := _fused(config, where)) and (fits := _fits(fused, where, model)):
        yield Alternative(FUSED, fits, "which never holds the scores")
    chunk = max(1, min(config.model.loss_chunk, 256) // 2)
    smaller = dataclasses.replace(config, model=dataclasses.replace(config.model, loss_chunk=chunk))
    if fits := _fits(smaller, where, model):
        yield Alternative(f"--model.loss-chunk {chunk}", fits)


def _wider(where: Target) -> Target | None:
    """The same devices, with more of their memory for JAX; None if that is no more."""
    wider = target(where.hardware, where.devices, ALL_BUT_A_TENTH)
    return wider if wider.room > where.room else None


def _fused(config: TrainConfig, where: Target) -> TrainConfig | None:
    """The run with cuDNN's attention; None if it has that already, or cannot."""
    fused = with_attention(config, "cudnn")
    try:
        check_attention(fused.model, where.hardware)
    except ConfigError:
        return None
    return fused if fused != config else None


def _shorter(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    """Half the sequence, or a quarter."""
    length = config.data.sequence_length // 2
    while length >= SHORTEST:
        shorter = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
        if fits := _fits(shorter, where, describe_model(shorter)):
            yield Alternative(f"--data.sequence-length {length}", fits)
            return
        length //= 2


def _other_training(config: TrainConfig, where: Target) -> Iterator[Alternative]:
    """Less to store: weights and moments in 16 bits, or few that are trained."""
    half = _stored_in_half(config)
    adapters = dataclasses.replace(
        config, model=dataclasses.replace(config.model, lora=dataclasses.replace(config.model.lora, rank=LORA_RANK))
    )
    bits, lora = "--model.precision.param bfloat16", f"--model.lora.rank {LORA_RANK}"
    changes = [(bits, half, "whose weights lose updates of less than a 256th of them")]
    if not config.model.lora.rank:
        changes += [
            (lora, adapters, "which fine-tunes by adapters alone"),
            (f"{lora} {bits}", _stored_in_half(adapters), "which keeps the frozen weights in 16 bits too"),
        ]
    for change, changed, meaning in changes:
        if changed != config and (fits := _fits(changed, where, describe_model(changed))):
            yield Alternative(change, fits, meaning)


def _stored_in_half(config: TrainConfig) -> TrainConfig:
    precision = dataclasses.replace(config.model.precision, param="bfloat16")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, precision=precision))


def _more_devices(config: TrainConfig, where: Target, model: Model) -> Iterator[Alternative]:
    """Twice as many, and so on; with a batch that they divide."""
    factor = 2
    while factor <= MAX_FACTOR:
        more = dataclasses.replace(where, devices=where.devices * factor)
        if fits := _fits(config, more, model):
            yield Alternative(f"{more.devices} x {where.hardware.name}", fits)
            return
        factor *= 2


def _fits(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    """The best setting that fits with the margin, if one does."""
    try:
        best = search(config, where, model, all_meshes(where.devices)).settings[0]
    except ConfigError:
        return None  # no mesh of so many devices can run it
    return best if best.has_margin else None
