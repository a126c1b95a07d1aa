"""The defaults that depend on what a run begins with, and on the devices that are there.

The defaults of `TrainConfig` are those of the tiny run on a CPU, whose rate destroys a trained model, whose mesh few
models fit, and whose dtype leaves most of a GPU unused. What a flag or a YAML file gives is never touched, and a run
that goes on keeps what it has.

They are chosen once, where the command reads its settings (`config.load`), because only that place knows which ones
were given. A `TrainConfig` made in Python is taken as it is.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from jaxtp.checkpoint.stored import newest, newest_info, stored_info
from jaxtp.config import ConfigError, changed, expand
from jaxtp.data.manifest import DatasetError, read_manifest
from jaxtp.data.tokenizer_files import LONGEST
from jaxtp.hf.folder import read_attributes
from jaxtp.hf.runs import model_of
from jaxtp.mesh import AXES, MeshError, check_sizes, describe_mesh, fill, sized
from jaxtp.models.config import ModelConfig, adaptable, architecture
from jaxtp.train.config import MeshConfig, TrainConfig, violations_on
from jaxtp.train.initialisation import AnyConfig, with_model
from jaxtp.train.place import BATCH_SIZE, Place, fits, fitting_mesh, place_for, with_batch

RATE, ADAPTER_RATE = 1e-5, 2e-4
"""Usual learning rates of AdamW for all weights of a trained model, and for adapters beside it."""
LION = 1 / 3
"""Lion's rate as a part of AdamW's (Chen et al., arXiv 2302.06675)."""
WARMUP = 0.03
"""Share of the steps."""
LENGTH = 1024
"""Number of tokens in a sequence, if the model reaches so far."""

LEARNING_RATE, WARMUP_STEPS = "optimizer.learning_rate", "optimizer.warmup_steps"
SEQUENCE_LENGTH, COMPUTE, RUN_DIR = "data.sequence_length", "model.precision.compute", "run.dir"


@dataclass(frozen=True)
class Choice:
    """A default."""

    setting: str
    """Dotted name of the setting."""

    value: Any

    reason: str = ""
    """Reason for the value; empty for what needs none."""

    def __str__(self) -> str:
        """Returns a line for people."""
        value = describe_mesh(vars(self.value)) if isinstance(self.value, MeshConfig) else self.value
        value = " ".join(value) if isinstance(value, tuple) else value
        return f"{self.setting} = {value}: {self.reason}"


def fit(config: AnyConfig, given: Set[str], place: Place | None = None) -> tuple[AnyConfig, list[str]]:
    """Returns the configuration with defaults that fit the model that it begins with, and the devices.

    Args:
      config: the configuration that was asked for.
      given: the dotted names of the settings that were given, which stay.
      place: the devices; by default those that are there.

    Returns:
      The configuration, and a line for each default that was chosen, with its reason.

    Raises:
      HFError, CheckpointError: the model cannot be read.
      ConfigError, MeshError: settings that contradict it, or sizes that no mesh has.
    """
    check_sizes(config.mesh.sizes)
    config = with_model(config, given)
    config, folder = _with(config, (*_folder(config), *_vocabulary(config)), given)
    before = newest_info(config.run.dir) if _has_model(config) or COMPUTE not in given else None
    config, chosen = _with(config, _of_model(config, before), given)
    config, others = _with(config, _of_devices(config, given, before, place), set())
    return config, [str(choice) for choice in folder + chosen + others if choice.reason]


def _with(
    config: AnyConfig, choices: Iterable[Choice], given: Set[str] = frozenset()
) -> tuple[AnyConfig, list[Choice]]:
    """Returns the configuration with the choices for settings of which no part was given, and these choices."""
    chosen = [c for c in choices if not any(f"{name}.".startswith(f"{c.setting}.") for name in given)]
    return changed(config, {choice.setting: choice.value for choice in chosen}), chosen


def _has_model(config: TrainConfig) -> bool:
    return config.model.from_hf is not None or config.run.init_from is not None


def _folder(config: TrainConfig) -> Iterator[Choice]:
    """Yields a folder for runs that begin with this model, if there is one: the default folder is another run's."""
    origin = config.model.from_hf or config.run.init_from
    if origin is not None:
        place = Path(os.path.realpath(origin))  # a link to itself is no error
        name = place.parents[1].name if place.parent.name in ("snapshots", "checkpoints") else place.name
        yield Choice(RUN_DIR, Path("runs") / f"{name}-tuned", f"for runs that begin with {origin}")


def _vocabulary(config: TrainConfig) -> Iterator[Choice]:
    """Yields the vocabulary of a new model whose data have a larger one; what is wrong with these is said later."""
    if _has_model(config):
        return
    folders = [path for path in (config.data.path, *map(Path, config.data.mixture)) if path is not None]
    sizes = {}
    for folder in folders:
        with suppress(DatasetError, ConfigError):
            sizes[folder] = read_manifest(expand(folder)).tokenizer.vocab_size
    if sizes and (largest := max(sizes.values())) > config.model.vocab_size:
        place = next(folder for folder, size in sizes.items() if size == largest)
        yield Choice("model.vocab_size", largest, f"the vocabulary of {place}")


def _of_model(config: TrainConfig, before: Mapping[str, Any] | None) -> Iterator[Choice]:
    """Yields the settings that follow from the model alone, or from the run that goes on."""
    begun = _begun(config)
    if begun is not None:
        model = model_of(Path(str(config.run.init_from)), begun)
        yield from (Choice(f"model.{name}", getattr(model, name)) for name in architecture(model) if name != "lora")
        yield from _targets(dataclasses.replace(model, lora=config.model.lora))
    else:
        yield from _targets(config.model)
    if not _has_model(config):
        return
    if before is not None:
        for setting in (LEARNING_RATE, WARMUP_STEPS, SEQUENCE_LENGTH, BATCH_SIZE):
            yield Choice(setting, _value(before, setting), f"as the run in {config.run.dir} has it")
    else:
        yield _learning_rate(config, begun)
        warmup = round(WARMUP * config.train.steps)
        yield Choice(
            WARMUP_STEPS, warmup, f"{WARMUP:.0%} of {config.train.steps} steps, rounded; a trained model needs no more"
        )
        yield _sequence_length(config, begun)


def _targets(model: ModelConfig) -> Iterator[Choice]:
    """Yields the projections that get adapters, where some of the default ones can have none."""
    if model.lora.rank and (can := adaptable(model)) != model.lora.targets and can:
        others = ", ".join(target for target in model.lora.targets if target not in can)
        yield Choice("model.lora.targets", can, f"{others} are of experts, which have no adapters")


def _begun(config: TrainConfig) -> dict[str, Any] | None:
    """Returns the description in the checkpoint that a run begins with, if it begins with one."""
    return None if config.run.init_from is None else stored_info(newest(config.run.init_from))


def _value(info: Mapping[str, Any], setting: str) -> Any:
    """Returns a setting of the run that wrote a checkpoint."""
    return reduce(getitem, setting.split("."), info["config"])


def _learning_rate(config: TrainConfig, begun: Mapping[str, Any] | None) -> Choice:
    """Returns the rate of fine-tuning; for all weights of a run, a tenth of the rate that it was trained with."""
    rate, reason = RATE, "usual for all weights of a trained model"
    if config.model.lora.rank:
        rate, reason = ADAPTER_RATE, "usual for adapters"
    elif begun is not None:
        peak = _value(begun, LEARNING_RATE) / (LION if _value(begun, "optimizer.name") == "lion" else 1)
        rate = max(peak / 10, min(peak, RATE))
        reason = f"a tenth of the peak of {config.run.init_from}, {peak:.3g}, but no less than {RATE:.0e} or that peak"
    if config.optimizer.name == "lion":
        rate, reason = rate * LION, f"{reason}, and a third of it for lion"
    return Choice(LEARNING_RATE, float(f"{rate:.2g}"), reason)


def _sequence_length(config: TrainConfig, begun: Mapping[str, Any] | None) -> Choice:
    if begun is not None:
        return Choice(SEQUENCE_LENGTH, _value(begun, SEQUENCE_LENGTH), f"as {config.run.init_from} was trained")
    reach = config.model.learned_positions or read_attributes(Path(str(config.model.from_hf))).get(LONGEST)
    if type(reach) is not int or reach < 1:
        return Choice(
            SEQUENCE_LENGTH, config.data.sequence_length, "the model does not say how many it was trained for"
        )
    return Choice(SEQUENCE_LENGTH, min(reach, LENGTH), f"the model was trained for {reach:,}")


def _of_devices(
    config: TrainConfig, given: Set[str], before: Mapping[str, Any] | None, place: Place | None
) -> Iterator[Choice]:
    """Yields the settings that follow from the devices; a given size that fits no mesh is refused later."""
    axes = {axis for axis in AXES if f"mesh.{axis}" in given}
    is_new_tuning = _has_model(config) and before is None
    any_batch = is_new_tuning and BATCH_SIZE not in given
    free_mesh = len(axes) < len(AXES) or any_batch
    if not free_mesh and COMPUTE in given:
        return
    given_or_one = sized(**{axis: config.mesh.sizes[axis] for axis in axes})
    alone = {axis: max(size, 1) for axis, size in given_or_one.items()}
    is_refused = any(violations_on(with_batch(config, alone) if any_batch else config, alone))
    if is_refused and _has_model(config):  # for what was given, and for no default beside it
        yield Choice("mesh", config.mesh.of_sizes(given_or_one))
    if is_refused and place is None:  # before JAX's backend starts
        return
    as_before = before if _has_model(config) else None
    mesh = _first_mesh(config, axes, as_before)
    place = place or place_for(mesh)
    if COMPUTE not in given:
        yield from _compute(config, before, place)
    if free_mesh and not is_refused:
        yield from _mesh(config, axes, as_before, mesh, place, any_batch=any_batch)


def _compute(config: TrainConfig, before: Mapping[str, Any] | None, place: Place) -> Iterator[Choice]:
    """Yields the dtype of products, where it is another than the configuration's or a run's that goes on."""
    if before is not None:
        dtype, reason = _value(before, COMPUTE), f"as the run in {config.run.dir} has it"
    elif place.bfloat16:
        dtype, reason = "bfloat16", f"products are faster in it than in float32, on {place.kind}"
    else:
        return
    if _has_model(config) or dtype != config.model.precision.compute:
        yield Choice(COMPUTE, dtype, reason)


def _first_mesh(config: TrainConfig, axes: Set[str], before: Mapping[str, Any] | None) -> dict[str, int]:
    """Returns the mesh to try first: the given sizes, and for the other axes the run's, or else the least."""
    others = sized(**before["mesh"]) if before is not None else sized()
    is_own = not _has_model(config)
    return {axis: size if is_own or axis in axes else others[axis] for axis, size in config.mesh.sizes.items()}


def _mesh(
    config: TrainConfig,
    axes: Set[str],
    before: Mapping[str, Any] | None,
    first: dict[str, int],
    place: Place,
    *,
    any_batch: bool,
) -> Iterator[Choice]:
    """Yields the first mesh if it fits and no larger one is wanted; else the one that fits best."""
    reason = f"as the run in {config.run.dir} has it" if before is not None else f"of {place.devices} {place.kind}"
    batch = config.data.global_batch_size
    filled = None
    with suppress(MeshError):  # the devices cannot be divided so
        filled = fill(first, place.devices)
    wants_all = _has_model(config) and before is None and -1 not in first.values()
    if wants_all or filled is None or not fits(config, filled, place):
        found = fitting_mesh(config, axes, place, any_batch=any_batch)
        if found is None:
            return
        first, batch = found
        reason = f"of {place.devices} {place.kind}, the mesh that fits the model and moves the least"
        if place.devices == 1:
            reason = f"{place.kind} share the cores, so one is enough" if place.is_virtual else "the only device"
    mesh = config.mesh.of_sizes({axis: size for axis, size in first.items() if axis not in axes})
    if mesh != config.mesh:
        yield Choice("mesh", mesh, reason)
    if batch != config.data.global_batch_size:
        yield Choice(BATCH_SIZE, batch, "the next that the mesh divides")
