"""Defaults that depend on the initial weights and the devices.

The defaults of `TrainConfig` suit the tiny run on a CPU: its learning rate would destroy a trained model, few models
fit its mesh, and its dtype leaves most of a GPU unused. Explicit settings, and a resumed run's, never change.

Only the command, which reads the settings, knows which are explicit. A `TrainConfig` made in Python stays as it is.
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

from jaxtp.checkpoint.storage import newest_info
from jaxtp.config.schema import ConfigError, expand, replace_nested
from jaxtp.data.manifest import DatasetError, read_manifest
from jaxtp.mesh import AXES, MeshError, check_sizes, describe_mesh, fill, mesh_shape
from jaxtp.models.config import ModelConfig, adaptable, architecture
from jaxtp.train.config import MeshConfig, TrainConfig
from jaxtp.train.devices import (
    BATCH_SIZE,
    DeviceInfo,
    best_mesh,
    fits,
    missing_bytes,
    probe_devices,
    with_divisible_batch,
)
from jaxtp.train.init_source import AnyConfig, InitSource, RunSource, resolve
from jaxtp.train.setup import load_data, progress, with_steps
from jaxtp.train.validation import violations_on

RATE, ADAPTER_RATE = 1e-5, 2e-4
"""Usual learning rates of AdamW for all weights of a trained model, and for adapters."""
LION = 1 / 3
"""Lion's rate relative to AdamW's (Chen et al., arXiv 2302.06675)."""
WARMUP = 0.03
"""Fraction of the steps."""
LENGTH = 1024
"""Tokens in a sequence, if the model supports that many."""

LEARNING_RATE, WARMUP_STEPS = "optimizer.learning_rate", "optimizer.warmup_steps"
SEQUENCE_LENGTH, COMPUTE, RUN_DIR = "data.sequence_length", "model.precision.compute", "run.dir"
PARAM, ADAPTERS_DTYPE = "model.precision.param", "model.lora.dtype"

Info = Mapping[str, Any]
"""Info of a checkpoint."""


def default_settings(config: TrainConfig) -> set[str]:
    """Returns settings whose defaults depend on devices or model; a file has to state them."""
    is_tuning = config.model.from_hf is not None or config.run.init_from is not None
    of_model = (RUN_DIR, LEARNING_RATE, WARMUP_STEPS) if is_tuning else ()
    of_adapters = (PARAM, ADAPTERS_DTYPE) if config.model.lora.rank else ()
    return {*(f"mesh.{axis}" for axis in AXES), COMPUTE, SEQUENCE_LENGTH, BATCH_SIZE, *of_model, *of_adapters}


@dataclass(frozen=True)
class Default:
    """A chosen default."""

    setting: str
    """Dotted name."""
    value: Any
    reason: str = ""
    """Empty if it needs none."""

    def __str__(self) -> str:
        """Returns a line for the console."""
        value = describe_mesh(vars(self.value)) if isinstance(self.value, MeshConfig) else self.value
        value = " ".join(value) if isinstance(value, tuple) else value
        return f"{self.setting} = {value}: {self.reason}"


def resolve_defaults(
    config: AnyConfig, explicit: Set[str], devices: DeviceInfo | None = None
) -> tuple[AnyConfig, list[str]]:
    """Fills in defaults for the initial weights and the devices.

    Args:
      explicit: dotted names of the user's settings, which stay.
      devices: the available devices if None.

    Returns:
      The configuration, and lines with reasons for defaults.

    Raises:
      HFError, CheckpointError: unreadable model.
      ConfigError, MeshError: contradicting settings or impossible sizes.
    """
    check_sizes(config.mesh.sizes)
    config, source = resolve(config, explicit)
    config, early = _with(config, (*_folder(source), *_vocabulary(config, source)), explicit)
    resumed = newest_info(config.run.dir) if source.path is not None or COMPUTE not in explicit else None
    config, of_model = _with(config, _of_model(config, source, resumed), explicit)
    config, of_devices = _with(config, _of_devices(config, explicit, source, resumed, devices), set())
    config, steps = _with(config, _steps(config, source), set())
    config, warmup = _with(config, _warmup(config, source, resumed), explicit)
    lines = [str(each) for each in early + of_model + of_devices + steps + warmup if each.reason]
    return config, lines


def _with(
    config: AnyConfig, defaults: Iterable[Default], explicit: Set[str] = frozenset()
) -> tuple[AnyConfig, list[Default]]:
    # Skips settings with an explicit part.
    chosen = [d for d in defaults if not any(f"{name}.".startswith(f"{d.setting}.") for name in explicit)]
    return replace_nested(config, {default.setting: default.value for default in chosen}), chosen


def _folder(source: InitSource) -> Iterator[Default]:
    # The default folder belongs to a run with random weights.
    if source.path is not None:
        path = Path(os.path.realpath(source.path))  # tolerates a link to itself
        name = path.parents[1].name if path.parent.name in ("snapshots", "checkpoints") else path.name
        yield Default(RUN_DIR, Path("runs") / f"{name}-tuned", f"for runs that begin with {source.path}")


def _vocabulary(config: TrainConfig, source: InitSource) -> Iterator[Default]:
    # Enlarges the vocabulary of a new model to fit its data; unreadable data is reported later.
    if source.path is not None:
        return
    folders = [path for path in (config.data.path, *map(Path, config.data.mixture)) if path is not None]
    sizes = {}
    for folder in folders:
        with suppress(DatasetError, ConfigError):
            sizes[folder] = read_manifest(expand(folder)).tokenizer.vocab_size
    if sizes and (largest := max(sizes.values())) > config.model.vocab_size:
        folder = next(folder for folder, size in sizes.items() if size == largest)
        yield Default("model.vocab_size", largest, f"the vocabulary of {folder}")


def _of_model(config: TrainConfig, source: InitSource, resumed: Info | None) -> Iterator[Default]:
    model = config.model
    if isinstance(source, RunSource):
        model = dataclasses.replace(source.model, lora=config.model.lora)
        yield from (Default(f"model.{name}", getattr(model, name)) for name in architecture(model) if name != "lora")
    yield from _targets(model)
    if source.path is None:
        return
    if config.model.lora.rank:
        yield from _dtypes(config, source, resumed)
    if resumed is not None:
        for setting in (LEARNING_RATE, WARMUP_STEPS, SEQUENCE_LENGTH, BATCH_SIZE):
            yield Default(setting, _stored(resumed, setting), f"as the run in {config.run.dir} has it")
    else:
        yield _learning_rate(config, source)
        yield _sequence_length(config, source)


def _targets(model: ModelConfig) -> Iterator[Default]:
    if model.lora.rank and (can := adaptable(model)) != model.lora.targets and can:
        others = ", ".join(target for target in model.lora.targets if target not in can)
        yield Default("model.lora.targets", can, f"{others} are of experts, which have no adapters")


def _dtypes(config: TrainConfig, source: InitSource, resumed: Info | None) -> Iterator[Default]:
    # Frozen weights keep the dtype of their files.
    if resumed is not None:
        from jaxtp.hf.runs import run_model_config

        model, reason = run_model_config(config.run.dir, resumed), f"as the run in {config.run.dir} has it"
        dtypes = {PARAM: model.precision.param, ADAPTERS_DTYPE: model.lora.dtype}
    else:
        reason = f"the frozen weights as {source.path} has them; adapters in {config.model.lora.dtype}"
        dtypes = {PARAM: source.dtype}
    for setting, dtype in dtypes.items():
        yield Default(setting, dtype, "" if dtype == "float32" else reason)


def _steps(config: TrainConfig, source: InitSource) -> Iterator[Default]:
    # From epochs; needs the sequence length and the batch size.
    if (epochs := config.train.epochs) is None:
        return
    data = load_data(config, source)
    rows, batch = sum(map(len, data.train_rows)), config.data.global_batch_size
    steps, (done, _) = with_steps(config, data).train.steps, progress(config)
    each = f", {batch:,} in a step"
    if done:  # these steps may have had another batch
        each = f"; steps done: {done:,}; left: {steps - done:,}, of {batch:,} sequences each"
    yield Default("train.steps", steps, f"{epochs:,.15g} epochs of {rows:,} sequences{each}")
    yield Default("train.epochs", None)


def _warmup(config: TrainConfig, source: InitSource, resumed: Info | None) -> Iterator[Default]:
    if source.path is not None and resumed is None:
        steps = config.train.steps
        reason = f"{WARMUP:.0%} of {steps} steps, rounded; a trained model needs no more"
        yield Default(WARMUP_STEPS, round(WARMUP * steps), reason)


def _stored(info: Info, setting: str) -> Any:
    return reduce(getitem, setting.split("."), info["config"])


def _learning_rate(config: TrainConfig, source: InitSource) -> Default:
    rate, reason = RATE, "usual for all weights of a trained model"
    if config.model.lora.rank:
        rate, reason = ADAPTER_RATE, "usual for adapters"
    elif (info := source.info) is not None:
        peak = _stored(info, LEARNING_RATE) / (LION if _stored(info, "optimizer.name") == "lion" else 1)
        rate = max(peak / 10, min(peak, RATE))
        reason = f"a tenth of the peak of {source.path}, {peak:.3g}, but no less than {RATE:.0e} or that peak"
    if config.optimizer.name == "lion":
        rate, reason = rate * LION, f"{reason}, and a third of it for lion"
    return Default(LEARNING_RATE, float(f"{rate:.2g}"), reason)


def _sequence_length(config: TrainConfig, source: InitSource) -> Default:
    if source.info is not None:
        return Default(SEQUENCE_LENGTH, _stored(source.info, SEQUENCE_LENGTH), f"as {source.path} was trained")
    longest = config.model.learned_positions or source.max_length
    if type(longest) is not int or longest < 1:
        return Default(SEQUENCE_LENGTH, config.data.sequence_length, "the model does not state its maximum")
    return Default(SEQUENCE_LENGTH, min(longest, LENGTH), f"the model was trained for {longest:,}")


def _of_devices(
    config: TrainConfig, explicit: Set[str], source: InitSource, resumed: Info | None, devices: DeviceInfo | None
) -> Iterator[Default]:
    axes = {axis for axis in AXES if f"mesh.{axis}" in explicit}
    has_model = source.path is not None
    any_batch = has_model and resumed is None and BATCH_SIZE not in explicit
    free_mesh = len(axes) < len(AXES) or any_batch
    if not free_mesh and COMPUTE in explicit:
        return
    explicit_or_one = mesh_shape(**{axis: config.mesh.sizes[axis] for axis in axes})
    smallest = {axis: max(size, 1) for axis, size in explicit_or_one.items()}
    # An explicit size that fits no mesh is refused later, by `open_mesh`, together with everything else.
    is_refused = any(violations_on(with_divisible_batch(config, smallest) if any_batch else config, smallest))
    if is_refused and has_model:  # so that no default is blamed
        yield Default("mesh", config.mesh.of_sizes(explicit_or_one))
    if is_refused and devices is None:  # before JAX's backend starts
        return
    before = resumed if has_model else None
    others = mesh_shape(**before["mesh"]) if before is not None else mesh_shape()
    mesh = {axis: size if not has_model or axis in axes else others[axis] for axis, size in config.mesh.sizes.items()}
    devices = devices or probe_devices(mesh)
    if COMPUTE not in explicit:
        computes = list(_compute(config, has_model, resumed, devices))
        config, _ = _with(config, computes)  # it changes the memory of a mesh
        yield from computes
    if free_mesh and not is_refused:
        wants_all = has_model and before is None and -1 not in mesh.values()
        reason = f"as the run in {config.run.dir} has it" if before is not None else ""
        if wants_all or not _fits_filled(config, mesh, devices):
            yield from _best_mesh(config, axes, devices, any_batch=any_batch)
        else:
            yield from _free_sizes(config, axes, mesh, reason or f"of {devices.count} {devices.kind}")


def _compute(config: TrainConfig, has_model: bool, resumed: Info | None, devices: DeviceInfo) -> Iterator[Default]:
    if resumed is not None:
        dtype, reason = _stored(resumed, COMPUTE), f"as the run in {config.run.dir} has it"
    elif devices.bfloat16:
        dtype, reason = "bfloat16", f"products are faster in it than in float32, on {devices.kind}"
    else:
        return
    if has_model or dtype != config.model.precision.compute:
        yield Default(COMPUTE, dtype, reason)


def _fits_filled(config: TrainConfig, mesh: dict[str, int], devices: DeviceInfo) -> bool:
    try:
        filled = fill(mesh, devices.count)
    except MeshError:  # these sizes do not divide the devices
        return False
    return fits(config, filled, devices) and not missing_bytes(config, filled, devices)


def _best_mesh(config: TrainConfig, axes: Set[str], devices: DeviceInfo, *, any_batch: bool) -> Iterator[Default]:
    # Counts memory as estimates and refusals do.
    found = best_mesh(config, axes, devices, any_batch=any_batch)
    if found is None:
        return
    mesh, batch, missing = found
    reason = f"of {devices.count} {devices.kind}, the mesh that fits the model and moves the least"
    if missing:
        reason = f"of {devices.count} {devices.kind}, the mesh that lacks the least memory, {missing / 1e9:,.1f} GB"
    elif devices.count == 1:
        reason = f"{devices.kind} share the cores, so one is enough" if devices.is_virtual else "the only device"
    yield from _free_sizes(config, axes, mesh, reason)
    if batch != config.data.global_batch_size:
        yield Default(BATCH_SIZE, batch, "the next that the mesh divides")


def _free_sizes(config: TrainConfig, axes: Set[str], mesh: Mapping[str, int], reason: str) -> Iterator[Default]:
    sizes = config.mesh.of_sizes({axis: size for axis, size in mesh.items() if axis not in axes})
    if sizes != config.mesh:
        yield Default("mesh", sizes, reason)
