"""Defaults that depend on the initial weights and the devices.

The defaults of `TrainConfig` suit the tiny run on a CPU: their learning rate would destroy a
trained model, few models fit their mesh, and their dtype leaves most of a GPU unused. Explicit
settings and the settings of a resumed run never change.

Only code that reads settings by name knows which of them are explicit, so a `TrainConfig` made in
Python stays as it is.
"""

import math
import os
import re
from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic

import jax
from jax.sharding import Mesh

from jaxtp.checkpoint.storage import Info, newest_info
from jaxtp.config.console import size_text
from jaxtp.config.schema import (
    ConfigError,
    expand,
    leaves,
    nested,
    replace_nested,
    to_plain,
    validate,
)
from jaxtp.data.manifest import DatasetError, read_manifest
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.distributed.allocator import choose_allocator
from jaxtp.distributed.devices import bytes_limit, request_virtual_devices
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
    describe_mesh,
    fitting_meshes,
    fixed_devices,
    is_number_configured,
    mesh_shape,
    parts,
    resolve_sizes,
)
from jaxtp.models.config import padded_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.init_source import AnyConfig, InitSource, resolve
from jaxtp.train.run_data import load_tokens
from jaxtp.train.setup import progress, with_steps
from jaxtp.train.task import Task, is_replaced, with_references
from jaxtp.train.validation import problems

if TYPE_CHECKING:
    from jaxtp.train.memory import StoredArray

WARMUP = 0.03  # Warm-up of a trained model, as a fraction of the steps

BATCH_SIZE = "data.global_batch_size"
COMPUTE = "model.precision.compute"
RUN_DIR = "run.dir"
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


def resolve_defaults(
    config: AnyConfig, explicit: Set[str], devices: DeviceInfo | None = None
) -> tuple[AnyConfig, list[str]]:
    """Fills in defaults for the initial weights and the devices.

    Args:
      explicit: dotted names of the user's settings, which stay.
      devices: by default the available devices.

    Returns:
      The configuration, and lines with the reasons for the defaults.

    Raises:
      HFError, CheckpointError: the model is unreadable.
      ConfigError, MeshError: settings contradict each other, or sizes are impossible.
    """
    check_sizes(config.mesh.sizes)
    config, source = resolve(config, explicit)
    defaults = _Defaults(config, explicit)
    if config.is_foreign:
        defaults.choose_for_own_model(str(config.origin.build), devices)
        return defaults.config, defaults.lines
    if source.path is None:
        defaults.choose_vocabulary()
    else:
        defaults.choose_folder(source.path)
    resumed = None
    if source.path is not None or COMPUTE not in explicit:
        resumed = newest_info(defaults.config.run.dir)
    for name, value, reason in source.defaults(defaults.config, resumed):
        defaults.choose(name, value, reason)
    has_bias = any(block.selection_bias for block in defaults.config.model.block_kinds())
    if source.path is not None and has_bias:
        defaults.choose("train.selection_bias_rate", 0.0, "a trained model's experts are balanced")
    defaults.choose_mesh(source.path is not None, resumed, devices)
    defaults.choose_steps(source)
    if source.path is not None and resumed is None:
        steps = defaults.config.train.steps
        reason = f"{WARMUP:.0%} of {steps} steps, rounded; a trained model needs no more"
        defaults.choose("optimizer.warmup_steps", round(WARMUP * steps), reason)
    return defaults.config, defaults.lines


def settings_of_run(settings: Mapping[str, object], task: Task) -> tuple[TrainConfig, list[str]]:
    """Returns the configuration of settings by dotted name, and lines with reasons for defaults.

    Raises:
      ConfigError: a setting is unknown or invalid, or names a part that the task has too.
    """
    values = dict(settings)
    mesh = values.get("mesh")
    if isinstance(mesh, Mesh):
        raise ConfigError(_no_sizes(mesh))
    if isinstance(mesh, str):
        from jaxtp.config.command_line import parse_mesh

        values["mesh"] = parse_mesh(mesh, AXES, allow_rest=True)
    plain = nested((name.split("."), value) for name, value in values.items())
    explicit = {".".join(keys) for keys, _ in leaves(plain)}
    config = with_references(validate(TrainConfig, plain, source="settings"), task, explicit)
    # Before JAX's backend starts
    choose_allocator(config.launch.allocator)
    task_settings = {section: to_plain(part) for section, part in task.settings().items()}
    explicit |= {".".join(keys) for keys, _ in leaves(task_settings)}
    return resolve_defaults(config, explicit)


def _no_sizes(mesh: Mesh) -> str:
    # A run chooses its devices, so it cannot use a mesh of given devices.
    used = [f"{axis}={size}" for axis, size in mesh.shape.items() if axis in AXES and size > 1]
    return (
        "mesh is a jax.sharding.Mesh, but a run makes its own mesh, of given sizes: "
        f'mesh="{",".join(used) or "dp=1"}"'
    )


class _Defaults(Generic[AnyConfig]):
    """A configuration whose defaults are chosen one by one; `lines` has the reasons."""

    def __init__(self, config: AnyConfig, explicit: Set[str]):
        self.config = config
        self.explicit = explicit
        self.lines: list[str] = []

    def choose(self, name: str, value: object, reason: str = "") -> None:
        """Sets a setting, unless the user set any of it, or the task replaces it."""
        is_explicit = any(f"{setting}.".startswith(f"{name}.") for setting in self.explicit)
        if not is_explicit and not is_replaced(self.config, name):
            self.override(name, value, reason)

    def override(self, name: str, value: object, reason: str = "") -> None:
        self.config = replace_nested(self.config, {name: value})
        if reason:
            text = " ".join(value) if isinstance(value, tuple) else value
            self.lines.append(f"{name} = {text}: {reason}")

    def choose_folder(self, source: Path) -> None:
        # The default folder belongs to a run with random weights.
        # The function realpath tolerates a link to itself.
        path = Path(os.path.realpath(source))
        if path.parent.name in ("snapshots", "checkpoints"):
            path = path.parents[1]
        folder = Path("runs") / f"{path.name}-tuned"
        self.choose(RUN_DIR, folder, f"for runs that begin with {source}")

    def choose_for_own_model(self, build: str, devices: DeviceInfo | None) -> None:
        name = re.sub(r"\W+", "-", build.rpartition(":")[2]).strip("-").lower() or "model"
        self.choose(RUN_DIR, Path("runs") / name, "for the model of your own")
        axes = {axis for axis in AXES if f"mesh.{axis}" in self.explicit}
        if axes == set(AXES):
            return
        resumed = newest_info(self.config.run.dir)
        sizes = mesh_shape(**{axis: self.config.mesh.sizes[axis] for axis in axes})
        reason = "other axes are 1"
        if not axes and resumed is not None:
            sizes = mesh_shape(**resumed["mesh"])
            reason = f"as the run in {self.config.run.dir} has it"
        elif not axes:
            devices = devices or probe_devices(sizes)
            reason = _ONE_IS_ENOUGH
            if devices.kind != VIRTUAL_KIND:
                sizes = mesh_shape(fsdp=devices.count)
                reason = f"all {devices.kind}"
        self.override("mesh", self.config.mesh.of_sizes(sizes))
        self.lines.append(f"mesh = {describe_mesh(sizes)}: {reason}")

    def choose_vocabulary(self) -> None:
        # Enlarges the vocabulary of a new model to fit its data; unreadable data is reported later.
        sizes = {}
        data = self.config.data
        for folder in filter(None, (data.path, *map(Path, data.mixture))):
            with suppress(DatasetError, ConfigError):
                sizes[folder] = read_manifest(expand(folder)).tokenizer.vocab_size
        largest = max(sizes, key=sizes.__getitem__, default=None)
        if largest is not None and sizes[largest] > self.config.model.vocab_size:
            self.choose("model.vocab_size", sizes[largest], f"the vocabulary of {largest}")

    def choose_mesh(
        self, has_model: bool, resumed: Info | None, devices: DeviceInfo | None
    ) -> None:
        # Also chooses the compute dtype, on which the memory of a step depends, and the batch size,
        # which the mesh has to divide.
        axes = {axis for axis in AXES if f"mesh.{axis}" in self.explicit}
        any_batch = (
            has_model
            and resumed is None
            and BATCH_SIZE not in self.explicit
            and self.config.data.batches is None
        )
        free_mesh = len(axes) < len(AXES) or any_batch
        if not free_mesh and COMPUTE in self.explicit:
            return
        sizes = self.config.mesh.sizes
        explicit_or_one = mesh_shape(**{axis: sizes[axis] for axis in axes})
        smallest = {axis: max(size, 1) for axis, size in explicit_or_one.items()}
        smallest_run = with_divisible_batch(self.config, smallest) if any_batch else self.config
        if any(problems(smallest_run, smallest)):
            # `open_mesh` then blames only the explicit sizes.
            if has_model:
                self.override("mesh", self.config.mesh.of_sizes(explicit_or_one))
            # Before JAX's backend starts
            if devices is None:
                return
        mesh = dict(sizes)
        if has_model:
            defaults = {} if resumed is None else resumed["mesh"]
            mesh = mesh_shape(**defaults) | {axis: sizes[axis] for axis in axes}
        devices = devices or probe_devices(mesh)
        self.choose_compute(has_model, resumed, devices)
        if not free_mesh:
            return
        available = f"of {devices.count} {devices.kind}"
        batch = None
        reason = available
        if has_model and resumed is not None:
            reason = f"as the run in {self.config.run.dir} has it"
        use_all = has_model and resumed is None and -1 not in mesh.values()
        if use_all or not fits(self.config, mesh, devices):
            best = best_mesh(self.config, axes, devices, any_batch=any_batch)
            if best is None:
                return
            mesh, batch, missing = best
            reason = f"{available}, the mesh that fits the model and moves the least"
            if missing:
                reason = f"{available}, the mesh that lacks the least memory, {size_text(missing)}"
            elif devices.count == 1:
                reason = _ONE_IS_ENOUGH if devices.kind == VIRTUAL_KIND else "the only device"
        chosen = self.config.mesh.of_sizes(
            {axis: size for axis, size in mesh.items() if axis not in axes}
        )
        if chosen != self.config.mesh:
            self.override("mesh", chosen)
            self.lines.append(f"mesh = {describe_mesh(chosen.sizes)}: {reason}")
        if batch is not None and batch != self.config.data.global_batch_size:
            self.override(BATCH_SIZE, batch, "the next size that the mesh divides")

    def choose_compute(self, has_model: bool, resumed: Info | None, devices: DeviceInfo) -> None:
        if resumed is not None:
            dtype = resumed["config"]["model"]["precision"]["compute"]
            reason = f"as the run in {self.config.run.dir} has it"
        elif devices.bfloat16:
            dtype = "bfloat16"
            reason = f"products are faster in it than in float32, on {devices.kind}"
        else:
            return
        if has_model or dtype != self.config.model.precision.compute:
            self.choose(COMPUTE, dtype, reason)

    def choose_steps(self, source: InitSource) -> None:
        # Computes steps from epochs; needs the sequence length and the batch size.
        if self.config.train.epochs is None or self.config.data.batches is not None:
            return
        rows = sum(map(len, load_tokens(self.config, source).train_rows))
        self.config, reason = with_steps(self.config, rows, progress(self.config))
        self.lines.append(f"train.steps = {self.config.train.steps}: {reason}")


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
    # TPUs, and NVIDIA GPUs from compute capability 8.0 on, are fast in bfloat16. CPUs emulate it.
    major, _, _ = str(getattr(first, "compute_capability", "")).partition(".")
    return DeviceInfo(
        count=count,
        per_process=per_process,
        bfloat16=not is_cpu and not (major.isdecimal() and int(major) < 8),
        kind=VIRTUAL_KIND if is_cpu else first.device_kind,
        memory=bytes_limit(jax.local_devices()[0]),
        platform=architecture_of(first),
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
    config: TrainConfig, axes: Set[str], devices: DeviceInfo, *, any_batch: bool
) -> tuple[dict[str, int], int, float] | None:
    """Returns the best mesh of as many devices as possible, its batch size and `missing_bytes`.

    It is None if the run can use no mesh.

    Args:
      axes: axes whose configured size is fixed; -1 means any size.
      any_batch: the batch may be larger than configured.
    """
    from jaxtp.train.memory import costs_of_step, stored_arrays

    # cp only on request
    free_axes = [axis for axis in AXES if axis not in CONTEXT or axis in axes]
    fixed = {axis: size for axis, size in config.mesh.sizes.items() if axis in axes and size != -1}
    arrays = () if devices.memory is None else stored_arrays(config)
    use_all = devices.per_process < devices.count or len(fixed) < len(axes)
    for count in (devices.count,) if use_all else range(devices.count, 0, -1):
        candidates = []
        for mesh in fitting_meshes(count, free_axes):
            # Tensor parallelism stays inside a process.
            if not fixed.items() <= mesh.items() or devices.per_process % mesh[TP]:
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
