"""Changes that speed up the best setting or, if nothing fits, make the run fit, searched on all meshes."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxtp.analysis.hardware import GB
from jaxtp.analysis.hardware_file import MAX_DEVICES
from jaxtp.config.schema import replace_nested
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import adapter_targets
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

MAX_DOUBLINGS = 10  # of the devices
SHORTEST = 512
"""Tokens of the shortest sequence to propose."""
LORA_RANK = 16
CHUNK = 128
"""Tokens of a memory-saving chunk of the loss; with fewer, products wait for the head to be read."""


class Run(NamedTuple):
    """A configuration and its target."""

    config: TrainConfig
    where: Target


@dataclass(frozen=True)
class Alternative:
    """Changes, and the best setting with them."""

    change: str
    """Flags, or a number of devices."""
    setting: Setting
    note: str = ""

    def __str__(self) -> str:
        return f"{self.change} ({self.note})" if self.note else self.change


def in_16_bits(run: Run) -> Run:
    """Computes in bfloat16."""
    if run.config.model.precision.compute != "float32":
        return run
    return run._replace(config=replace_nested(run.config, {"model.precision.compute": "bfloat16"}))


def with_fused_attention(run: Run) -> Run:
    """Takes the hardware's own kernel of attention, if another one is configured."""
    fused = with_attention(run.config, "auto")
    now, then = (
        chosen_kernels(config, mesh_shape(), run.where.hardware.architecture) for config in (run.config, fused)
    )
    return run if now.keys() == then.keys() else run._replace(config=fused)


def with_grouped_products(run: Run) -> Run:
    """Multiplies each row with its own expert only, where a kernel can."""
    grouped, platform = replace_nested(run.config, {"model.grouped": "auto"}), run.where.hardware.platform
    now, then = (multiplies_all(config.model, platform) for config in (run.config, grouped))
    return run._replace(config=grouped) if now and not then else run


def with_more_memory(run: Run) -> Run:
    """Gives JAX a larger share of the memory."""
    wider = target(run.where.hardware, run.where.devices, CLUSTER_SHARE)
    return run._replace(where=wider) if wider.room > run.where.room else run


def with_smaller_chunk(run: Run) -> Run:
    """Computes the loss by smaller chunks, which saves memory and makes nothing faster."""
    if run.config.model.loss_chunk <= CHUNK:
        return run
    return run._replace(config=replace_nested(run.config, {"model.loss_chunk": CHUNK}))


FREE = {
    "--model.precision.compute bfloat16": in_16_bits,  # first: kernels of attention may need 16 bits
    "--model.attention auto": with_fused_attention,
    "--model.grouped auto": with_grouped_products,
    f"XLA_PYTHON_CLIENT_MEM_FRACTION={CLUSTER_SHARE} (--memory-fraction {CLUSTER_SHARE})": with_more_memory,
}
CHEAP = {**FREE, f"--model.loss-chunk {CHUNK}": with_smaller_chunk}
"""Changes with no or little cost, by their flags."""


def faster(found: Search, model: Model) -> list[Alternative]:
    """Returns the free changes that together speed up the best setting or free a GB, or none."""
    best, used = found.settings[0], []
    run, meshes = Run(best.config, best.target), [setting.sizes for setting in found.settings]
    for flags, change in FREE.items():
        if (other := change(run)) == run:
            continue
        setting = search(*other, model, meshes, as_configured=found.as_configured).settings[0]
        ratio = best.time.expected / setting.time.expected
        frees = other.where == run.where and setting.spare - best.spare > GB and ratio > 1 / NEAR
        if setting.fits and (ratio > NEAR or frees):
            best, run = setting, other
            used.append(flags)
    return [Alternative(" ".join(used), best)] if used else []


def remedies(found: Search, model: Model) -> Iterator[Alternative]:
    """Yields changes that make the run fit, cheapest first; costly changes add the cheap ones if needed."""
    run = Run(found.settings[0].config, found.settings[0].target)
    single = {flags: other for flags, change in CHEAP.items() if (other := change(run)) != run}
    together = _stacked(run)
    cheap = [Alternative(flags, fits) for flags, other in single.items() if (fits := _fits(other, model))]
    cheap = cheap or _first((flags, other, model) for flags, other in together.items())
    yield from cheap
    yield from _shorter(run)
    costly = [*_other_training(run), *_more_devices(run, model)]
    if together and not (cheap or costly):
        flags, run = list(together.items())[-1]
        costly = [*_other_training(run), *_more_devices(run, model)]
        costly = [dataclasses.replace(other, change=f"{flags} {other.change}") for other in costly]
    yield from costly


def _first(candidates: Iterable[tuple[str, Run, Model]]) -> list[Alternative]:
    fitting = (Alternative(change, fits) for change, run, model in candidates if (fits := _fits(run, model)))
    return list(itertools.islice(fitting, 1))


def _stacked(run: Run) -> dict[str, Run]:
    # The first cheap change, the first two, ...
    flags, stacked = "", {}
    for flag, change in CHEAP.items():
        if (other := change(run)) != run:
            flags, run = f"{flags} {flag}".strip(), other
            stacked[flags] = run
    return stacked


def _shorter(run: Run) -> list[Alternative]:
    lengths = (run.config.data.sequence_length // 2**halvings for halvings in range(1, 64))
    shorter = (
        (f"--data.sequence-length {length}", replace_nested(run.config, {"data.sequence_length": length}))
        for length in itertools.takewhile(lambda length: length >= SHORTEST, lengths)
    )
    return _first((flags, Run(config, run.where), describe_model(config)) for flags, config in shorter)


def _other_training(run: Run) -> Iterator[Alternative]:
    in_half = {"model.precision.param": "bfloat16"}
    targets = adapter_targets(run.config.model)
    adapters = replace_nested(run.config, {"model.lora.rank": LORA_RANK, "model.lora.targets": targets})
    bits, lora = "--model.precision.param bfloat16", f"--model.lora.rank {LORA_RANK}"
    if targets != run.config.model.lora.targets:
        lora += f" --model.lora.targets {' '.join(targets)}"
    options = [(bits, replace_nested(run.config, in_half), "frozen weights in 16 bits")]
    if not run.config.model.lora.rank:
        options = [
            (bits, replace_nested(run.config, in_half), "weights lose updates smaller than 1/256 of them"),
            (lora, adapters, "trains adapters only"),
            (f"{lora} {bits}", replace_nested(adapters, in_half), "frozen weights in 16 bits"),
        ]
    seen = [run.config]
    for flags, config, note in options:
        if config not in seen and (fits := _fits(Run(config, run.where), describe_model(config))):
            yield Alternative(flags, fits, note)
        seen.append(config)


def _more_devices(run: Run, model: Model) -> list[Alternative]:
    counts = (run.where.devices * 2**doublings for doublings in range(1, MAX_DOUBLINGS + 1))
    more = (dataclasses.replace(run.where, devices=count) for count in counts if count <= MAX_DEVICES)
    return _first((f"{where.devices} x {where.hardware.name}", Run(run.config, where), model) for where in more)


def _fits(run: Run, model: Model) -> Setting | None:
    # Searches all settings only if one with the least memory fits with margin.
    able, _ = runnable(run.config, meshes_to_try(run.config, run.where.devices, run.where.hardware.domain))
    if not any(estimate(lean, run.where, model).has_margin for on_mesh in able for lean in leanest(on_mesh)):
        return None
    best = search(*run, model, [on_mesh.mesh.sizes for on_mesh in able]).settings[0]
    return best if best.has_margin else None
