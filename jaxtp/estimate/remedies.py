"""What would fit where nothing does: each change is searched, and told only if it helps."""

import dataclasses
from collections.abc import Iterator

from jaxtp.config import ConfigError
from jaxtp.estimate.search import Model, Search, Setting, Target, all_meshes, describe_model, search, target
from jaxtp.train.config import TrainConfig

GB = 1e9
ALL_BUT_A_TENTH = 0.9
"""Share of memory that JAX can be given, with room left for communication buffers."""

MAX_FACTOR = 1024
SHORTEST = 512
"""Tokens: no shorter sequence is proposed."""

LORA_RANK = 16


def what_would_fit(found: Search, model: Model) -> list[str]:
    """Sentences: what the least of all lacks, and each change that makes something fit.

    Args:
      found: a search in which nothing fits.
      model: what it was about.
    """
    least = found.settings[0]
    kinds = {name: getattr(least.memory, name) for name in kinds_of(least)}
    largest = max(kinds, key=lambda name: kinds[name])
    return [
        f"Nothing fits. The least is {least} with remat {least.config.model.remat} and micro-batches of {least.rows}: "
        f"{least.memory.total / GB:,.1f} GB, {kinds[largest] / GB:,.1f} of it {label(largest)}, where "
        f"{least.target.room / GB:,.1f} are there.",
        *_without_update(least),
        *(_remedies(least, model) or ["No more of these devices would help: look at the sequence and the loss chunk."]),
    ]


def _without_update(least: Setting) -> list[str]:
    if least.update_is_modelled:
        return []
    return [f"What the update by {least.config.optimizer.name} holds is not in these numbers: it is not modelled."]


def kinds_of(setting: Setting) -> list[str]:
    """The names of the kinds of memory."""
    return [field.name for field in dataclasses.fields(setting.memory)]


def label(kind: str) -> str:
    """The name of a kind of memory as it is printed."""
    return {"logits": "head and logits"}.get(kind, kind.replace("_", " "))


def _remedies(least: Setting, model: Model) -> list[str]:
    """Each that works, the cheapest first."""
    config, where = least.config, least.target
    each = (
        *_cheap(config, where, model),
        *_shorter(config, where),
        *_other_training(config, where),
        *_more_devices(config, where, model),
    )
    return [f"{words}: {_found(setting)}." for words, setting in each]


def _cheap(config: TrainConfig, where: Target, model: Model) -> Iterator[tuple[str, Setting]]:
    """What costs nothing but a setting."""
    wider = target(where.hardware, where.devices, ALL_BUT_A_TENTH)
    if wider.room > where.room and (fits := _fits(config, wider, model)):
        yield f"XLA_PYTHON_CLIENT_MEM_FRACTION={ALL_BUT_A_TENTH} would do (--memory-fraction {ALL_BUT_A_TENTH})", fits
    if where.hardware.platform == "cuda" and config.model.attention == "xla":
        fused = dataclasses.replace(config, model=dataclasses.replace(config.model, attention="cudnn"))
        if config.model.precision.compute != "float32" and (fits := _fits(fused, where, model)):
            yield "--model.attention cudnn, which never holds the scores, would do", fits
    chunk = min(config.model.loss_chunk, 256) // 2
    smaller = dataclasses.replace(config, model=dataclasses.replace(config.model, loss_chunk=max(1, chunk)))
    if fits := _fits(smaller, where, model):
        yield f"--model.loss-chunk {smaller.model.loss_chunk} would do", fits


def _shorter(config: TrainConfig, where: Target) -> Iterator[tuple[str, Setting]]:
    """Half the sequence, or a quarter."""
    length = config.data.sequence_length // 2
    while length >= SHORTEST:
        shorter = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
        if fits := _fits(shorter, where, describe_model(shorter)):
            yield f"--data.sequence-length {length} would do", fits
            return
        length //= 2


def _other_training(config: TrainConfig, where: Target) -> Iterator[tuple[str, Setting]]:
    """Less to store: weights and moments in 16 bits, or few that are trained."""
    model = config.model
    half = dataclasses.replace(model, precision=dataclasses.replace(model.precision, param="bfloat16"))
    adapters = dataclasses.replace(model, lora=dataclasses.replace(model.lora, rank=model.lora.rank or LORA_RANK))
    for words, smaller in {
        "--model.precision.param bfloat16, weights and moments of 16 bits, would do": half,
        f"fine-tuning with --model.lora.rank {LORA_RANK}, which trains adapters alone, would do": adapters,
    }.items():
        changed = dataclasses.replace(config, model=smaller)
        if smaller != model and (fits := _fits(changed, where, describe_model(changed))):
            yield words, fits


def _more_devices(config: TrainConfig, where: Target, model: Model) -> Iterator[tuple[str, Setting]]:
    """Twice as many, and so on; with a batch that they divide."""
    factor = 2
    while factor <= MAX_FACTOR:
        more = dataclasses.replace(where, devices=where.devices * factor)
        if fits := _fits(config, more, model):
            yield f"{more.devices} x {where.hardware.name} would do", fits
            return
        factor *= 2


def _fits(config: TrainConfig, where: Target, model: Model) -> Setting | None:
    """The best setting that fits with the margin, if one does."""
    try:
        best = search(config, where, model, all_meshes(where.devices)).settings[0]
    except ConfigError:
        return None  # no mesh of so many devices can run it
    return best if best.has_margin else None


def _found(setting: Setting) -> str:
    memory = f"{setting.memory.total / GB:,.1f} of {setting.target.room / GB:,.1f} GB"
    return f"{setting} with remat {setting.config.model.remat} and micro-batches of {setting.rows}, {memory}"
