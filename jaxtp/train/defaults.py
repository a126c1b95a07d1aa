"""Decides the settings of a run: defaults that depend on the initial weights and the devices.

The defaults of `TrainConfig` suit the tiny run on a CPU: their learning rate would destroy a
trained model, few models fit their mesh, and their dtype leaves most of a GPU unused. Explicit
settings and the settings of a resumed run never change.

Only code that reads settings by name knows which of them are explicit, so a `TrainConfig` made in
Python stays as it is (`as_configured`).
"""

import math
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxtp.checkpoint.storage import (
    Info,
    is_of_run,
    kept_checkpoint,
    newest_with_info,
    read_info,
)
from jaxtp.config.console import size_text
from jaxtp.config.hints import dotted
from jaxtp.config.schema import (
    ConfigError,
    leaves,
    nested,
    replace_nested,
    to_plain,
    validate,
)
from jaxtp.data.manifest import DatasetError, read_manifest
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.distributed.devices import bytes_limit, choose_allocator, request_virtual_devices
from jaxtp.layers.kernels.select import architecture_of
from jaxtp.mesh import (
    AXES,
    CONTEXT,
    REPLICAS,
    TP,
    MeshError,
    Sizes,
    batch_parts,
    check_sizes,
    fitting_meshes,
    fixed_devices,
    is_number_configured,
    mesh_shape,
    mesh_sizes,
    parse_mesh,
    parts,
    resolve_sizes,
)
from jaxtp.models.config import padded_sizes
from jaxtp.train.config import LoopConfig, TrainConfig, training_of
from jaxtp.train.init_source import InitSource, resolve
from jaxtp.train.model_source import model_source
from jaxtp.train.parts import Parts
from jaxtp.train.run_data import load_tokens
from jaxtp.train.run_folder import CHECKPOINTS
from jaxtp.train.task import Task, is_replaced, with_references
from jaxtp.train.validation import problems

if TYPE_CHECKING:
    from jaxtp.train.memory import StoredArray

AnyConfig = TypeVar("AnyConfig", bound=TrainConfig)

WARMUP = 0.03  # Warm-up of a trained model, as a fraction of the steps

BATCH_SIZE = "data.global_batch_size"
COMPUTE = "model.precision.compute"
RUN_DIR = "run.dir"
NOT_PLANNED = {"run.mirror": None, "run.resume_at": None, "checkpoint.url": None}
"""Settings without which a run is planned: a plan contacts no URL, and copies no checkpoint."""
VIRTUAL_KIND = "virtual CPU devices"
_ONE_IS_ENOUGH = f"{VIRTUAL_KIND} share the cores, so one is enough"


@dataclass(frozen=True)
class DeviceInfo:
    """The devices available to a run."""

    count: int
    per_process: int
    # Whether bfloat16 products are faster than float32 products
    bfloat16: bool
    # Name for messages
    kind: str
    # Bytes of each device that JAX may allocate; None if unknown, as on CPUs
    memory: float | None = None
    # As returned by `architecture_of`; decides the kernels
    platform: str = "cpu"


def default_settings(config: TrainConfig) -> set[str]:
    """Returns the settings whose defaults depend on the devices or the model.

    A file has to state these settings.
    """
    names = {*(f"mesh.{axis}" for axis in AXES), COMPUTE, "data.sequence_length", BATCH_SIZE}
    if config.origin.from_hf is not None or config.run.init_from is not None:
        names |= {RUN_DIR, "optimizer.learning_rate", "optimizer.warmup_steps"}
    if config.model.lora.rank:
        names |= {"model.precision.param", "model.lora.dtype"}
    return names


class Progress(NamedTuple):
    """Steps that a run has finished, and rows that it has read."""

    steps: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Decided:
    """A run whose settings are decided, before its data and a user's code are read."""

    config: TrainConfig
    init: InitSource
    # Info of the newest checkpoint, if the run is resumed
    resumed: Info | None
    before: Progress
    # Reasons for defaults
    notes: list[str] = field(default_factory=list)
    # A checkpoint of another folder, which the run copies and resumes (`run.resume_at`)
    older: Path | None = None


@dataclass
class Decider:
    """Decides the run of a command; `Command.load` calls it."""

    devices: DeviceInfo | None = None
    decided: Decided = field(init=False)

    def __call__(self, config: AnyConfig, explicit: Set[str]) -> tuple[AnyConfig, list[str]]:
        """Returns the command's configuration with the run's settings, and the notes."""
        self.decided = decide(training_of(config), explicit, self.devices)
        return replace(config, **vars(self.decided.config)), self.decided.notes


def decide(config: TrainConfig, explicit: Set[str], devices: DeviceInfo | None = None) -> Decided:
    """Fills in defaults for the initial weights and the devices.

    Args:
      explicit: dotted names of the user's settings, which stay.
      devices: by default the available devices.

    Raises:
      HFError, CheckpointError: the model, or the run's newest checkpoint, is unreadable.
      ConfigError, MeshError: settings contradict each other, or sizes are impossible.
    """
    check_sizes(config.mesh.sizes)
    if devices is None:
        # Before JAX's backend starts
        choose_allocator(config.launch.allocator)
    defaults = Defaults(config, explicit, devices)
    model_source(config).choose(defaults)
    return replace(defaults.decided, config=defaults.config, notes=defaults.lines)


def as_configured(config: TrainConfig, explicit: Set[str] = frozenset()) -> Decided:
    """Decides a run whose settings stay, except for the sizes of its trained model.

    Raises as `decide`.
    """
    resumed = None
    before = Progress()
    older = None
    run = config.run.dir
    step = config.run.resume_at
    if step is not None:
        if config.checkpoint.url is not None:
            raise ConfigError(
                f"run.resume_at={step} copies a checkpoint from run.dir, but this run saves to "
                f"checkpoint.url={config.checkpoint.url}; leave run.resume_at out"
            )
        folder = run.with_name(f"{run.name}-at-{step}")
        config = replace_nested(config, {RUN_DIR: folder, "run.resume_at": None})
    local = newest_with_info(config.run.dir / CHECKPOINTS)
    newest = local
    if config.checkpoint.url is not None:
        newest = _newest_at_url(config, local)
    elif config.run.mirror is not None:
        from jaxtp.checkpoint.commits import newer_info
        from jaxtp.data.object_store import ObjectStore

        newest = newer_info(ObjectStore(config.run.mirror), local)
    if step is not None and local is None and not _is_of_folder(newest, config.run.dir):
        older = kept_checkpoint(run, step)
        if newest is not None and int(newest[0].name) > step:
            raise ConfigError(
                f"run.mirror={config.run.mirror} has a checkpoint at step {newest[0].name}, which "
                f"is newer than run.resume_at={step}; name an empty place for {config.run.dir}"
            )
        newest = older, read_info(older)
    if newest is not None:
        folder, info = newest
        before = Progress(int(folder.name), info.get("next_sample", 0))
        resumed = info if is_of_run(info) else None
    config, init = resolve(config, explicit, resumed)
    return Decided(config, init, resumed, before, older=older)


def _newest_at_url(config: TrainConfig, local: object) -> tuple[Path, Info] | None:
    from jaxtp.checkpoint.at_url import open_store
    from jaxtp.checkpoint.commits import newer_info

    url = config.checkpoint.url
    assert url is not None
    if config.run.mirror is not None:
        raise ConfigError(f"checkpoint.url={url} is the only copy; leave run.mirror out")
    if local is not None:
        raise ConfigError(
            f"checkpoint.url={url}: {config.run.dir} has checkpoints of its own; leave "
            "checkpoint.url out, or name another --run.dir"
        )
    return newer_info(open_store(url), None)


def _is_of_folder(checkpoint: tuple[Path, Info] | None, folder: Path) -> bool:
    # A run whose disk was lost has its folder's name, maybe below another parent.
    if checkpoint is None or not is_of_run(checkpoint[1]):
        return False
    return Path(checkpoint[1]["config"]["run"]["dir"]).name == folder.name


def read_settings(settings: Mapping[str, object], task: Task) -> tuple[TrainConfig, set[str]]:
    """Returns a configuration from settings by dotted name, and the names that are explicit.

    Raises:
      ConfigError: a setting is unknown or invalid, or names a part that the task has too.
      MeshError: a text is no mesh.
    """
    values = dict(settings)
    mesh = values.get("mesh")
    if isinstance(mesh, Mesh | AbstractMesh):
        # A run makes its own mesh of these sizes.
        values["mesh"] = mesh_sizes(mesh)
    if isinstance(mesh, str):
        values["mesh"] = parse_mesh(mesh)
    plain = nested((name.split("."), value) for name, value in values.items())
    explicit = set(map(dotted, dict(leaves(plain))))
    config = with_references(validate(TrainConfig, plain, source="settings"), task, explicit)
    sections = task.settings().keys()
    explicit |= {dotted(keys) for keys, _ in leaves(to_plain(config)) if keys[0] in sections}
    return config, explicit


class Defaults:
    """A configuration whose defaults are chosen one by one; `lines` has the reasons."""

    def __init__(self, config: TrainConfig, explicit: Set[str], devices: DeviceInfo | None):
        self.config = config
        self.explicit = explicit
        self.devices = devices
        self.lines: list[str] = []
        # The setting's default is for a new decoder.
        folder = model_source(config).default_folder(config)
        if folder is not None:
            self.choose(RUN_DIR, *folder)
        settings = {name: attrgetter(name)(self.config) for name in NOT_PLANNED}
        if devices is not None:
            self.config = replace_nested(self.config, NOT_PLANNED)
        self.decided = as_configured(self.config, explicit)
        self.config = self.decided.config
        if devices is not None:
            # A file that the command writes has all settings.
            self.config = replace_nested(self.config, settings)
        self.resumed = self.decided.resumed
        self.has_model = self.decided.init.path is not None

    def choose(self, name: str, value: object, reason: str = "") -> None:
        """Sets a setting, unless the user set any of it, or the task replaces it."""
        is_explicit = any(f"{setting}.".startswith(f"{name}.") for setting in self.explicit)
        if not is_explicit and not is_replaced(self.config, name):
            self.override(name, value, reason)

    def override(self, name: str, value: object, reason: str = "") -> None:
        """Sets a setting."""
        self.config = replace_nested(self.config, {name: value})
        if reason:
            text = " ".join(value) if isinstance(value, tuple) else value
            self.lines.append(f"{name} = {text}: {reason}")

    @property
    def fixed(self) -> dict[str, int]:
        """The explicit sizes of the mesh; -1 means any size."""
        sizes = self.config.mesh.sizes
        return {axis: sizes[axis] for axis in AXES if f"mesh.{axis}" in self.explicit}

    @property
    def as_before(self) -> str:
        """The reason for a resumed run's value."""
        return f"as the run in {self.config.run.dir} has it"

    def choose_for_own_model(self) -> None:
        """Chooses the mesh of a user's model, whose sizes are unknown."""
        fixed = self.fixed
        if len(fixed) == len(AXES):
            return
        sizes = mesh_shape(**fixed)
        reason = "axes that you left out are 1"
        if not fixed and self.resumed is not None:
            sizes = mesh_shape(**self.resumed["mesh"])
            reason = self.as_before
        elif not fixed:
            devices = self.devices or probe_devices(sizes)
            reason = _ONE_IS_ENOUGH
            if devices.kind != VIRTUAL_KIND:
                sizes = mesh_shape(fsdp=devices.count)
                reason = f"all {devices.kind}"
        self.override("mesh", self.config.mesh.of_sizes(sizes), reason)

    def choose_for_decoder(self) -> None:
        """Chooses the settings of a run of jaxtp's decoder."""
        if not self.has_model:
            self.choose_vocabulary()
        for name, value, reason in self.decided.init.defaults(self.config, self.resumed):
            self.choose(name, value, reason)
        has_bias = any(block.selection_bias for block in self.config.model.block_kinds())
        if self.has_model and has_bias:
            self.choose("train.selection_bias_rate", 0.0, "a trained model's experts are balanced")
        self.choose_mesh()
        self.choose_steps()
        if self.has_model and self.resumed is None:
            steps = self.config.train.steps
            reason = f"{WARMUP:.0%} of {steps} steps, rounded; a trained model needs no more"
            self.choose("optimizer.warmup_steps", round(WARMUP * steps), reason)

    def choose_vocabulary(self) -> None:
        """Enlarges the vocabulary of a new model to fit its data.

        Unreadable data is reported later.
        """
        from jaxtp.data.copies import local

        sizes = {}
        data = self.config.data
        for folder in filter(None, (data.path, *map(Path, data.mixture))):
            # Not under `suppress`: if a URL cannot be fetched, all processes must stop.
            path = local(folder)
            with suppress(DatasetError):
                sizes[folder] = read_manifest(path).tokenizer.vocab_size
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is not None and sizes[largest] > self.config.model.vocab_size:
            self.choose("model.vocab_size", sizes[largest], f"the vocabulary of {largest}")

    def choose_mesh(self) -> None:
        """Chooses the mesh of a decoder.

        Also chooses the compute dtype, on which the memory of a step depends, and the batch size,
        which the mesh has to divide.
        """
        fixed = self.fixed
        begins_with_model = self.has_model and self.resumed is None
        any_batch = (
            begins_with_model
            and BATCH_SIZE not in self.explicit
            and self.config.data.batches is None
        )
        free_mesh = len(fixed) < len(AXES) or any_batch
        if not free_mesh and COMPUTE in self.explicit:
            return
        smallest = {axis: max(size, 1) for axis, size in mesh_shape(**fixed).items()}
        smallest_run = with_divisible_batch(self.config, smallest) if any_batch else self.config
        if any(problems(smallest_run, smallest)):
            # `ModelSource.open_mesh` then blames only the explicit sizes.
            if self.has_model:
                self.override("mesh", self.config.mesh.of_sizes(mesh_shape(**fixed)))
            # Before JAX's backend starts
            if self.devices is None:
                return
        mesh = self.config.mesh.sizes
        if self.has_model:
            before = {} if self.resumed is None else self.resumed["mesh"]
            mesh = mesh_shape(**before) | fixed
        devices = self.devices or probe_devices(mesh)
        self.choose_compute(devices)
        if not free_mesh:
            return
        available = f"of {devices.count} {devices.kind}"
        batch = self.config.data.global_batch_size
        reason = self.as_before if self.has_model and self.resumed else available
        use_all = begins_with_model and -1 not in mesh.values()
        if use_all or not fits(self.config, mesh, devices):
            best = best_mesh(self.config, fixed, devices, any_batch=any_batch)
            if best is None:
                return
            mesh, batch, missing = best
            reason = f"{available}, the mesh that fits the model and moves the least"
            if missing:
                reason = f"{available}, the mesh that lacks the least memory, {size_text(missing)}"
            elif devices.count == 1:
                reason = _ONE_IS_ENOUGH if devices.kind == VIRTUAL_KIND else "the only device"
        chosen = self.config.mesh.of_sizes(mesh | fixed)
        if chosen != self.config.mesh:
            self.override("mesh", chosen, reason)
        if batch != self.config.data.global_batch_size:
            self.override(BATCH_SIZE, batch, "the next size that the mesh divides")

    def choose_compute(self, devices: DeviceInfo) -> None:
        """Chooses the compute dtype of a decoder."""
        if self.resumed is not None:
            dtype = self.resumed["config"]["model"]["precision"]["compute"]
            reason = self.as_before
        elif devices.bfloat16:
            dtype = "bfloat16"
            reason = f"products are faster in it than in float32, on {devices.kind}"
        else:
            return
        if self.has_model or dtype != self.config.model.precision.compute:
            self.choose(COMPUTE, dtype, reason)

    def choose_steps(self) -> None:
        """Computes steps from epochs; needs the sequence length and the batch size."""
        if self.config.train.epochs is None or self.config.data.batches is not None:
            return
        tokens = load_tokens(self.config, self.decided.init, Parts())
        rows = sum(map(len, tokens.train_rows))
        self.config, reason = with_steps(self.config, rows, self.decided.before)
        self.lines.append(f"train.steps = {self.config.train.steps}: {reason}")


def with_steps(
    config: TrainConfig, rows: int | None, before: tuple[int, int]
) -> tuple[TrainConfig, str]:
    """Replaces epochs, if any, by steps, and returns the reason for their number.

    A resumed run counts remaining samples, whatever its batch size was.

    Args:
      rows: the number of rows in an epoch, if known.
      before: steps and rows so far.

    Raises:
      ConfigError: both are set, there would be too many steps, or the number of rows is unknown.
    """
    epochs = config.train.epochs
    steps = config.train.steps
    if epochs is None:
        return config, ""
    if steps != LoopConfig().steps:
        raise ConfigError(
            f"train.steps={steps} and train.epochs={epochs:,.15g} exclude each other: leave one of "
            "them out"
        )
    if rows is None:
        raise ConfigError(
            f"train.epochs={epochs:,.15g}: the batches have an unknown number of rows; set "
            "train.steps"
        )
    batch = config.data.global_batch_size
    finished, read = before
    # Rounds, because in floating point 1.1 is a little more than 11/10.
    left = max(math.ceil(round((epochs * rows - read) / batch, 6)), 0)
    if finished + left >= 2**31:
        raise ConfigError(f"train.epochs={epochs:,.15g}: a run has fewer than {2**31:,} steps")
    reason = f"{epochs:,.15g} epochs of {rows:,} sequences"
    # The finished steps may have had another batch size.
    if finished:
        reason += f"; steps done: {finished:,}; left: {left:,}, of {batch:,} sequences each"
    else:
        reason += f", {batch:,} in a step"
    return replace_nested(config, {"train.steps": finished + left, "train.epochs": None}), reason


def probe_devices(mesh: Sizes) -> DeviceInfo:
    """Describes the available devices; starts JAX's backend, with virtual CPU devices if needed.

    Raises:
      MeshError: the mesh has more devices than the machine can have.
    """
    requested = fixed_devices(mesh)
    request_virtual_devices(requested)
    first = jax.devices()[0]
    is_cpu = first.platform == "cpu"
    count = jax.device_count()
    per_process = jax.local_device_count()
    if is_cpu and not is_number_configured() and not is_multiprocess() and -1 not in mesh.values():
        # Further virtual devices exist for other meshes; a default mesh would be slower with them.
        count = min(requested, count)
        per_process = count
    platform = architecture_of(first)
    _, _, capability = platform.partition(" ")
    return DeviceInfo(
        count=count,
        per_process=per_process,
        # TPUs, and NVIDIA GPUs from compute capability 8.0 on, are fast in it. CPUs emulate it.
        bfloat16=not is_cpu and float(capability or 8) >= 8,
        kind=VIRTUAL_KIND if is_cpu else first.device_kind,
        memory=bytes_limit(jax.local_devices()[0]),
        platform=platform,
    )


def fits(config: TrainConfig, mesh: Sizes, devices: DeviceInfo) -> bool:
    """Returns whether the run can use the mesh, and a step fits the memory.

    One size of the mesh may be -1.
    """
    # Raises MeshError if the sizes do not divide the number of devices.
    try:
        sizes = resolve_sizes(mesh, devices.count)
    except MeshError:
        return False
    return _can_use(config, sizes, devices) and not missing_bytes(config, sizes, devices)


def _can_use(config: TrainConfig, mesh: Sizes, devices: DeviceInfo) -> bool:
    count = math.prod(mesh.values())
    # Only a single process can leave devices unused.
    in_one_process = devices.per_process == devices.count
    if count > devices.count or (count < devices.count and not in_one_process):
        return False
    return not any(problems(config, mesh))


def missing_bytes(
    config: TrainConfig,
    mesh: Sizes,
    devices: DeviceInfo,
    arrays: Iterable["StoredArray"] | None = None,
) -> float:
    """Returns the bytes that a step lacks on each device, or 0.

    `arrays` are `stored_arrays(config)`, if known.
    """
    if devices.memory is None:
        return 0.0
    from jaxtp.train.memory import memory_per_device

    memory = memory_per_device(config, mesh, arrays, platform=devices.platform)
    return max(0.0, memory.total - devices.memory)


def with_divisible_batch(config: TrainConfig, mesh: Sizes) -> TrainConfig:
    """Rounds the batch size up so that the mesh divides it."""
    divisor = batch_parts(mesh) * config.train.accumulation
    size = -(-config.data.global_batch_size // divisor) * divisor
    return replace_nested(config, {BATCH_SIZE: size})


def best_mesh(
    config: TrainConfig, fixed: Sizes, devices: DeviceInfo, *, any_batch: bool
) -> tuple[dict[str, int], int, float] | None:
    """Returns the best mesh of as many devices as possible, its batch size and `missing_bytes`.

    It is None if the run can use no mesh.

    Args:
      fixed: sizes that stay; -1 means any size.
      any_batch: the batch may be larger than configured.
    """
    from jaxtp.train.memory import costs_of_step, stored_arrays

    # cp only on request
    free_axes = [axis for axis in AXES if axis not in CONTEXT or axis in fixed]
    arrays = () if devices.memory is None else stored_arrays(config)
    use_all = devices.per_process < devices.count or -1 in fixed.values()
    for count in (devices.count,) if use_all else range(devices.count, 0, -1):
        candidates = []
        for mesh in fitting_meshes(count, free_axes):
            differs = any(size not in (-1, mesh[axis]) for axis, size in fixed.items())
            # Tensor parallelism stays inside a process.
            if differs or devices.per_process % mesh[TP]:
                continue
            run = with_divisible_batch(config, mesh) if any_batch else config
            if _can_use(run, mesh, devices):
                missing = missing_bytes(run, mesh, devices, arrays)
                pads = bool(padded_sizes(config.model, mesh[TP]))
                sent = sum(costs_of_step(run, mesh).budget.values())
                candidates.append(
                    (missing, pads, parts(mesh, REPLICAS), run.data.global_batch_size, sent, mesh)
                )
        if candidates:
            # Prefers, in order: fewest missing bytes, no padding, most shards of parameters,
            # smallest batch, fewest bytes sent.
            missing, *_, batch, _, best = min(candidates, key=lambda candidate: candidate[:5])
            return best, batch, missing
    return None
