"""Starts a run: `make_run` makes the initial state on the devices, and the programs."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Wrapped

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.checkpoint.storage import Info
from jaxtp.config.console import size_text
from jaxtp.config.entry import Interrupt
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.batches import Batches, Position, SampleBatches
from jaxtp.data.columns import WEIGHTS, BatchError, layout_of
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere
from jaxtp.distributed.environment import enable_compilation_cache
from jaxtp.guards.hook import VERIFIED
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train import run_folder
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.defaults import Decided, as_configured, with_steps
from jaxtp.train.loss import Objective, Traits, attribute, example_batch, objective_of
from jaxtp.train.memory_check import require_memory, verification_bytes
from jaxtp.train.metrics import MEAN_LOSS, MeanLoss, Timing, check_installed
from jaxtp.train.run_data import (
    RunData,
    check_scored_model,
    open_data,
    reading_rows,
)
from jaxtp.train.run_report import Report, summary
from jaxtp.train.state import Blueprint, MakeModel, parameter_count, plan_state, trained_parameters
from jaxtp.train.step import make_eval_step, make_train_step
from jaxtp.train.task import Shapes, Task, load_task, transformation, with_parts
from jaxtp.train.validation import batch_problems, check_decoder, open_mesh, refuse, violations_on

_NOTICE = "stops and saves after this step; a second Ctrl-C ends at once"
_NOTHING_LOST = "interrupted before the first step; nothing is lost, and the same command {}"


@dataclass(kw_only=True)
class _Setup:
    """A run that fits its mesh and memory, before anything is allocated or written."""

    config: TrainConfig
    task: Task
    data: RunData
    blueprint: Blueprint
    # Lines on the loss and the plan
    lines: list[str]
    # Lines of the summary, by name
    notes: Mapping[str, object]
    # Names of the metrics of a user's loss
    own_metrics: tuple[str, ...]
    # FLOPs of a row, for `mfu`; NaN on CPUs
    row_flops: float


@dataclass(kw_only=True)
class Run(_Setup):
    """A run that is ready to step."""

    objective: Objective
    # The step on leaves of the state, not compiled yet
    train_step: Wrapped
    eval_step: Wrapped
    checkpoints: Checkpoints
    report: Report
    interrupt: Interrupt
    timing: Timing
    # Leaves of the state
    leaves: list[Array]
    # Number of steps so far, with those that were skipped
    step: int
    # Position of the next batch
    position: Position
    # Identity of the frozen model under adapters, if there are any
    base: dict[str, str] | None
    # The last verified step, if the checkpoint records one
    verified: int | None
    # Mean loss since the last record, which may precede the checkpoint
    mean_loss: MeanLoss

    @property
    def state(self) -> nnx.State:
        """The current state."""
        return self.blueprint.unflatten(self.leaves)

    @state.setter
    def state(self, state: nnx.State) -> None:
        self.leaves = jax.tree.leaves(state)


def make_run(
    decided: Decided, exit_stack: ExitStack, context: ExitStack, task: Task = Task()
) -> Run:
    """Starts a run, or resumes it from the newest undamaged checkpoint in its folder.

    Args:
      exit_stack: closes the lock of the run's folder, the console and the checkpoints.
      context: ends the mesh context and restores the signal handlers.
      task: parts that replace settings.

    Raises:
      ValueError: a user's mistake (`ConfigError`, `MeshError`, `PlanError`, `CorpusError`,
        `DatasetError`, `BatchError`, `HFError`, `RunFolderError`, `CheckpointError`), before the
        folder is changed.
    """
    timing = Timing()
    with raise_everywhere():
        setup = _check(decided, task)
    config = setup.config
    data = setup.data
    blueprint = setup.blueprint
    lines = [*setup.lines, *_startup_checks(config, blueprint, data)]

    context.enter_context(jax.set_mesh(blueprint.mesh))
    with raise_everywhere():
        exit_stack.enter_context(run_folder.locked(config.run.dir))
    report = exit_stack.enter_context(Report(setup.own_metrics))
    at_start = _NOTHING_LOST.format("resumes" if decided.before.steps else "starts again")
    interrupt = context.enter_context(Interrupt(notice=_NOTICE, at_start=at_start))
    for line in (*lines, *map("default {}".format, decided.notes)):
        report.line(line)
    report.line(summary(config, data, blueprint, setup.notes, decided.before))

    keeping = config.checkpoint
    checkpoints = exit_stack.enter_context(
        Checkpoints(
            config.run.dir / run_folder.CHECKPOINTS,
            keep=keeping.keep,
            keep_every=keeping.keep_every,
            keep_best=keeping.keep_best,
        )
    )
    restored = None
    if checkpoints.steps():
        from jaxtp.train.resume import restore

        report.line("reading the newest checkpoint")
        restored = restore(config, data.description, blueprint, checkpoints, report.line)
    if restored is None:
        report.line(f"making the initial state: {parameter_count(blueprint):,} parameters")
    initial = decided.init.create_state(config, blueprint, restored)
    if restored is None:
        check_scored_model(data.tokens, initial, blueprint.mesh)
    if initial.description:
        report.line(initial.description)
    step = 0
    info: Info = {}
    if restored is not None:
        step = restored.step
        info = restored.info
        if not config.model.lora.rank:
            stored = info["config"]["run"]["init_from"]
            config = replace_nested(config, {"run.init_from": stored and Path(stored)})
            setup.config = config
        report.line("\n  ".join([f"resumed from the checkpoint at step {step}", *restored.changed]))
    with raise_everywhere():
        if step < config.train.steps:
            run_folder.write_config(config)

    with_checksums = config.train.verify_every > 0
    timing.end_startup()
    return Run(
        **vars(setup),
        objective=objective_of(setup.task.loss, config),
        train_step=make_train_step(
            config, blueprint, with_checksums=with_checksums, on_leaves=True, task=setup.task
        ),
        eval_step=make_eval_step(config, blueprint, setup.task.loss),
        checkpoints=checkpoints,
        report=report,
        interrupt=interrupt,
        timing=timing,
        leaves=jax.tree.leaves(initial.state),
        step=step,
        position=Position(step, info.get("next_sample", 0), info.get(run_folder.STREAMS)),
        base=initial.base,
        verified=info.get(VERIFIED),
        mean_loss=MeanLoss(info.get(MEAN_LOSS, ())),
    )


def _check(decided: Decided, task: Task) -> _Setup:
    config = decided.config
    source = decided.init
    source.check(config)
    mesh = open_mesh(config)
    enable_compilation_cache(mesh.devices.flat[0].platform)
    check_installed(config.metrics.trackers)
    # Imports a user's files, which may use the mesh's devices
    task = load_task(config, task)
    model = config.model
    config = with_parts(config, task)
    if config.model is not model:
        check_decoder(config, mesh)
    data = open_data(config, source, task)
    config = with_batches(config, data, mesh)
    config, _ = with_steps(config, data.num_rows, decided.before)
    traits = check_loss_on(config, task, data.train)
    _check_validation(config, task, data)
    if config.model.dropout and not traits.is_random:
        raise ConfigError(
            f"model.dropout={config.model.dropout:g} has no effect: "
            f"{config.train.loss or 'the loss'} passes no "
            "dropout_keys to the model; use --model.dropout 0"
        )
    data.pad_short_batches(traits.reads_weights)
    blueprint, lines = plan(config, mesh, task, data.train.shapes)
    if traits.warning is not None:
        lines = [traits.warning, *lines]
    notes = {
        "memory": require_memory(config, blueprint, task.loss, data.train.shapes),
        "length": source.length_warning(config),
    }
    if config.train.verify_every:
        notes["verify"] = (
            f"every {config.train.verify_every:,} steps: an extra step, and in each process "
            f"{size_text(verification_bytes(blueprint), binary=True)} of host memory, for "
            "the state before the step"
        )
    row_flops = math.nan
    if platform_of(mesh.devices.flat[0]) != "cpu":
        from jaxtp.train import performance

        row_flops = performance.row_flops(config, blueprint, task, data.train.shapes)
    return _Setup(
        config=config,
        task=task,
        data=data,
        blueprint=blueprint,
        lines=lines,
        notes=notes,
        row_flops=row_flops,
        own_metrics=traits.metrics,
    )


def check_loss_on(config: TrainConfig, task: Task, batches: Batches) -> Traits:
    """Calls `check_loss` on batches."""
    try:
        return check_loss(config, task, batches.shapes)
    except ConfigError as error:
        # Items can be batches only if all their arrays have as many rows.
        lengths = {array.shape[1:2] for array in batches.shapes.values()}
        may_have_batches = len(lengths) == 1 and () not in lengths
        if task.batches is not None and isinstance(batches, SampleBatches) and may_have_batches:
            raise BatchError(f"{error}; {reading_rows(batches)}") from error
        raise


def _check_validation(config: TrainConfig, task: Task, data: RunData) -> None:
    # The loss has to take the columns of training and validation batches.
    validation = data.validation
    if validation is None or layout_of(validation.shapes) == layout_of(data.train.shapes):
        return
    try:
        check_loss_on(config, task, validation)
    except (BatchError, ConfigError) as error:
        raise BatchError(f"validation batches ({validation.name}): {error}") from error


def _startup_checks(config: TrainConfig, blueprint: Blueprint, data: RunData) -> list[str]:
    # Checks devices and processes, and prepares the folder; returns lines for the summary.
    mesh = blueprint.mesh
    on_accelerator = platform_of(mesh.devices.flat[0]) != "cpu"
    lines = []
    self_check = on_accelerator and config.launch.self_check
    with raise_everywhere():
        if self_check:
            from jaxtp.train.self_check import (
                check_attention,
                check_devices,
                check_outside_of_jit,
            )

            check_outside_of_jit(mesh, config.model.precision.compute)
            if blueprint.is_decoder:
                check_attention(config, mesh)
        run_folder.prepare(config.run.dir)
    if on_accelerator:
        from jaxtp.train.known_versions import version_warnings

        lines += version_warnings()
    if is_multiprocess():
        from jaxtp.train.preflight import preflight

        lines += preflight(config, mesh, data.description)
    if self_check:
        lines.append(check_devices(mesh, config.model.precision.compute))
    return lines


def with_batches(config: TrainConfig, data: RunData, mesh: Mesh | AbstractMesh) -> TrainConfig:
    """Returns the configuration with the batch size of a user's batches.

    Raises ConfigError if this size does not fit the settings or the mesh.
    """
    size = data.train.global_batch_size
    if config.data.global_batch_size not in (size, DataConfig().global_batch_size):
        raise ConfigError(
            f"data.global_batch_size={config.data.global_batch_size}, but the batches have {size} "
            "rows; leave data.global_batch_size out"
        )
    config = replace_nested(config, {"data.global_batch_size": size})
    have_own_rows = config.data.batches is not None and not isinstance(data.train, SampleBatches)
    sizes = mesh_sizes(mesh)
    find = partial(batch_problems, have_own_rows=have_own_rows)
    refuse(violations_on(config, sizes, math.prod(sizes.values()), find))
    return config


def plan(
    config: TrainConfig,
    mesh: Mesh,
    task: Task = Task(),
    batch: Mapping[str, jax.ShapeDtypeStruct] = {},
) -> tuple[Blueprint, list[str]]:
    """Plans the state of a run on a mesh, which may be abstract; also returns lines on the plan.

    Allocates and writes nothing.

    Args:
      batch: an abstract training batch, needed to split a user's model.

    Raises:
      ConfigError: a pattern matches no trained parameter, or the model cannot be built.
      PlanError: the plan does not fit the model or the mesh.
    """
    make_model: MakeModel | None = None
    lines: list[str] = []
    if task.has_own_model:
        from jaxtp.train.own_model import split_model

        make_model, lines = split_model(config, mesh, task, batch)
    optimizer = transformation(task, config.train.steps) or optimizers.build(
        config.optimizer, config.train.steps
    )
    blueprint = plan_state(config.model, optimizer, mesh, make_model)
    paths = list(trained_parameters(blueprint))
    optimizers.check_patterns("optimizer.groups", config.optimizer.groups, paths)
    for pattern in config.metrics.norm_groups:
        optimizers.matching("metrics.norm_groups", pattern, paths)
    return blueprint, lines


def check_loss(config: TrainConfig, task: Task, batch: Shapes) -> Traits:
    """Inspects a task's loss, without devices.

    Raises:
      ConfigError: the loss fails, does not return sums, or cannot be accumulated.
    """
    traits = objective_of(task.loss, config).inspect(config, task, batch)
    if traits.changes and config.train.accumulation > 1:
        raise ConfigError(
            f"train.accumulation={config.train.accumulation}: a step changes "
            f"{', '.join(traits.changes[:3])}, "
            "which would depend on the micro-batches; use --train.accumulation 1"
        )
    return traits


def open_task(config: TrainConfig) -> tuple[TrainConfig, Task, dict[str, jax.ShapeDtypeStruct]]:
    """Opens a task to analyse its step, without devices and validation.

    Returns:
      The configuration with the batch size, the task with a loss, and an abstract batch.

    Raises:
      ValueError: a user's mistake, as in `make_run`.
    """
    from jaxtp.train.user_step import ONE_DEVICE

    decided = as_configured(config)
    config = decided.config
    task = load_task(
        replace_nested(config, {"train.callbacks": (), "data.validation_batches": None})
    )
    config = with_parts(config, task)
    task = replace(task, loss=task.loss or objective_of(None, config))
    shapes = _example_shapes(config, task)
    if shapes is not None:
        if check_loss(config, task, shapes).reads_weights:
            shapes[WEIGHTS] = jax.ShapeDtypeStruct((config.data.global_batch_size,), jnp.float32)
        return config, task, shapes
    data = open_data(config, decided.init, task)
    config = with_batches(config, data, ONE_DEVICE)
    data.pad_short_batches(check_loss_on(config, task, data.train).reads_weights)
    return config, task, data.train.shapes


def _example_shapes(config: TrainConfig, task: Task) -> dict[str, jax.ShapeDtypeStruct] | None:
    # A decoder's batch shapes need no data. But if the dataset exists and the loss does not list
    # its columns, only the dataset knows them.
    data = config.data
    has_data = bool(data.mixture) or (data.path is not None and data.path.exists())
    lists_columns = attribute(task.loss, "example_batch", None) is not None
    if task.has_own_model or task.batches is not None or (has_data and not lists_columns):
        return None
    return {
        name: jax.ShapeDtypeStruct((data.global_batch_size, *array.shape[1:]), array.dtype)
        for name, array in example_batch(task.loss, config, 1).items()
    }
