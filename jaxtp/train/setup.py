"""Starts a run: `make_run` makes the initial state on the devices, and the programs."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Traced, Wrapped

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.checkpoint.storage import PROGRAMS, Info, kept_steps, starts_of
from jaxtp.config import entry
from jaxtp.config.console import size_text
from jaxtp.config.entry import Interrupt
from jaxtp.config.python_object import load_object
from jaxtp.config.schema import ConfigError, replace_nested, to_plain, to_yaml
from jaxtp.data.batches import Batches, Position, SampleBatches
from jaxtp.data.columns import WEIGHTS, BatchError, layout_of
from jaxtp.data.loader import split
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere
from jaxtp.distributed.environment import enable_compilation_cache
from jaxtp.distributed.programs import ProgramCounts, SharedPrograms
from jaxtp.guards.hook import VERIFIED
from jaxtp.guards.nonfinite import SPIKES
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.models.config import ModelConfig
from jaxtp.train import optimizer as optimizers
from jaxtp.train import run_folder
from jaxtp.train.config import DataConfig, RunConfig, TrainConfig
from jaxtp.train.defaults import NOT_PLANNED, Decided, as_configured, with_steps
from jaxtp.train.loss import ONE_DEVICE, Objective, Traits
from jaxtp.train.memory_check import require_memory, verification_bytes
from jaxtp.train.metrics import MEAN_LOSS, MeanLoss, Timing, check_installed
from jaxtp.train.model_source import model_source
from jaxtp.train.parts import Parts, build_optimizer, load_parts, step_settings
from jaxtp.train.run_data import RunData, check_scored_model, open_data, reading_rows
from jaxtp.train.run_report import Report, summary
from jaxtp.train.state import Blueprint, parameter_count, plan_state, trained_parameters
from jaxtp.train.step import StepSettings, make_eval_step, make_train_step, trace_step
from jaxtp.train.task import Shapes, Task
from jaxtp.train.validation import batch_problems, check_decoder, refuse, violations_on

if TYPE_CHECKING:
    from jaxtp.checkpoint.mirror import Mirror

TASKS_OF_RUN = "jaxtp.tools.evaluate.evaluation_settings:tasks_of_run"
"""Makes the callback of `eval.tasks`."""
_NOTICE = "stops and saves after this step; a second Ctrl-C ends at once"
_NOTHING_LOST = "interrupted before the first step; nothing is lost, and the same command {}"


@dataclass(kw_only=True)
class Plan:
    """A run that is decided, before anything is allocated or written.

    It does not depend on the mesh, so that commands plan the same run on many.
    """

    # All settings, for config.yaml and checkpoints
    config: TrainConfig
    parts: Parts
    # A global batch of abstract arrays
    shapes: Shapes
    # None if the batches of the settings are known without data
    data: RunData | None = None
    traits: Traits = Traits(is_random=True)

    @property
    def step_settings(self) -> StepSettings:
        """The settings of the steps."""
        return step_settings(self.config, self.parts)

    @property
    def objective(self) -> Objective:
        """The loss with the settings of the run."""
        return self.step_settings.objective

    @property
    def yaml(self) -> str:
        """The settings, as flags and `Trainer` take them."""
        config = self.config
        if config.origin.build is not None and config.model.decoder is not None:
            # The code of the user's Decoder makes its settings.
            config = replace(config, model=ModelConfig())
        return to_yaml(config)

    def state_on(self, mesh: Mesh) -> tuple[Blueprint, list[str]]:
        """Plans the state on a mesh, which may be abstract; also returns lines on the model's plan.

        Raises:
          ConfigError: a pattern matches no trained parameter, or the model cannot be built.
          PlanError: the plan does not fit the model or the mesh.
        """
        config = self.config
        settings = self.step_settings
        make_model, lines = self.parts.model.split(
            config.model, mesh, settings.objective, settings.seed, self.shapes
        )
        optimizer = build_optimizer(config, self.parts)
        blueprint = plan_state(config.model, optimizer, mesh, make_model)
        paths = list(trained_parameters(blueprint))
        optimizers.check_patterns("optimizer.groups", config.optimizer.groups, paths)
        for pattern in settings.norm_groups:
            optimizers.matching("metrics.norm_groups", pattern, paths)
        return blueprint, lines

    def trace_on(self, mesh: Mesh, **options: Any) -> Traced:
        """Traces the training step on a mesh; the options are of `make_train_step`."""
        blueprint, _ = self.state_on(mesh)
        return trace_step(self.step_settings, blueprint, split(self.shapes, mesh), **options)


@dataclass(kw_only=True)
class RunPlan(Plan):
    """A plan that fits its mesh and the memory."""

    data: RunData
    blueprint: Blueprint
    # Lines on the loss and the plan
    lines: list[str]
    # Lines of the summary, by name
    notes: dict[str, object]
    # FLOPs of a row, for `mfu`; NaN on CPUs
    row_flops: float


@dataclass(kw_only=True)
class Run(RunPlan):
    """A run that is ready to step."""

    # The step on leaves of the state, not compiled yet
    train_step: Wrapped
    eval_step: Wrapped
    checkpoints: Checkpoints
    # The copy at a URL, if there is one
    mirror: "Mirror | None"
    report: Report
    interrupt: Interrupt
    timing: Timing
    # Programs of this process since the start
    program_counts: ProgramCounts
    # The programs of several processes, or of a run with a mirror
    programs: SharedPrograms | None
    # Leaves of the state
    leaves: list[Array]
    # Number of steps so far, with those that were skipped
    step: int
    # Position of the next batch
    position: Position
    # Steps and samples after which the batches had another size (`starts_of`)
    starts: list[list[int]]
    # Identity of the frozen model under adapters, if there are any
    base: dict[str, str] | None
    # The last verified step, if the checkpoint records one
    verified: int | None
    # The window of `Spikes`
    spikes: list[list[float]]
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
    timing = Timing(began=entry.began)
    program_counts = exit_stack.enter_context(ProgramCounts())
    with raise_everywhere():
        run_plan = plan_run(decided, task)
    config = run_plan.config
    blueprint = run_plan.blueprint
    programs = _open_programs(config.run, blueprint.mesh, exit_stack)
    lines = [*run_plan.lines, *_startup_checks(run_plan)]
    if programs is not None:
        programs.publish()
        run_plan.notes["cache"] = programs.describe()

    context.enter_context(jax.set_mesh(blueprint.mesh))
    with raise_everywhere():
        exit_stack.enter_context(run_folder.locked(config.run.dir))
    report = exit_stack.enter_context(Report(run_plan.traits.metrics))
    at_start = _NOTHING_LOST.format("resumes" if decided.before.steps else "starts again")
    interrupt = context.enter_context(Interrupt(notice=_NOTICE, at_start=at_start))
    for line in (*lines, *map("default {}".format, decided.notes)):
        report.line(line)
    report.rows(summary(run_plan, decided.before))

    if decided.older is not None:
        report.line(f"copying {decided.older}, from which the run continues in {config.run.dir}")
        with raise_everywhere():
            run_folder.copy_checkpoint(decided.older, config.run.dir)
    checkpoints, mirror = _open_checkpoints(run_plan, exit_stack, report)
    restored = None
    if checkpoints.steps():
        from jaxtp.train.resume import restore

        report.line("reading the newest checkpoint")
        restored = restore(run_plan, checkpoints, report.line)
    if mirror is not None:
        mirror.begin(-1 if restored is None else restored.step)
    if restored is None:
        report.line(f"making the initial state: {parameter_count(blueprint):,} parameters")
    initial = decided.init.create_state(config.run, blueprint, restored)
    if restored is None:
        check_scored_model(run_plan.data.tokens, initial, blueprint.mesh)
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
            run_plan.config = config
        report.line("\n  ".join([f"resumed from the checkpoint at step {step}", *restored.changed]))
    with raise_everywhere():
        if step < config.train.steps:
            run_folder.write_config(config.run.dir, run_plan.yaml)

    settings = run_plan.step_settings
    with_checksums = config.train.verify_every > 0
    timing.end_startup()
    return Run(
        **vars(run_plan),
        train_step=make_train_step(
            settings, blueprint, with_checksums=with_checksums, on_leaves=True
        ),
        eval_step=make_eval_step(settings, blueprint),
        checkpoints=checkpoints,
        mirror=mirror,
        report=report,
        interrupt=interrupt,
        timing=timing,
        program_counts=program_counts,
        programs=programs,
        leaves=jax.tree.leaves(initial.state),
        step=step,
        position=Position(step, info.get("next_sample", 0), info.get(run_folder.STREAMS)),
        starts=starts_of(info, step, config.data.global_batch_size),
        base=initial.base,
        verified=info.get(VERIFIED),
        spikes=info.get(SPIKES, []),
        mean_loss=MeanLoss(info.get(MEAN_LOSS, ())),
    )


def _open_programs(run: RunConfig, mesh: Mesh, exit_stack: ExitStack) -> SharedPrograms | None:
    fetch = None
    if run.mirror is not None:
        from jaxtp.checkpoint.mirror import fetch_programs

        fetch = partial(fetch_programs, run.mirror)
    elif not is_multiprocess():
        return None
    return exit_stack.enter_context(SharedPrograms(run.dir / PROGRAMS, mesh, fetch))


def _open_checkpoints(
    plan: RunPlan, exit_stack: ExitStack, report: Report
) -> tuple[Checkpoints, "Mirror | None"]:
    folder = plan.config.run.dir / run_folder.CHECKPOINTS
    settings = vars(plan.config.checkpoint)
    options = {name: settings[name] for name in ("keep", "keep_every", "keep_best")}
    url = plan.config.checkpoint.url
    if url is not None:
        from jaxtp.checkpoint.at_url import UrlCheckpoints

        at_url = UrlCheckpoints(url, plan.config.run.dir, report.line, **options)
        return exit_stack.enter_context(at_url), None
    mirror = None
    if plan.config.run.mirror is not None:
        from jaxtp.checkpoint.mirror import Mirror

        # Closed after the checkpoints, of which it uploads the last one
        rule = partial(kept_steps, **options)
        mirror = Mirror(plan.config.run.mirror, folder, report.line, rule)
        exit_stack.enter_context(mirror)
    return exit_stack.enter_context(Checkpoints(folder, **options)), mirror


def plan_run(decided: Decided, task: Task = Task()) -> RunPlan:
    """Plans a run on this machine's devices; raises as `make_run`."""
    config = decided.config
    source = decided.init
    source.check(config)
    mesh = model_source(config).open_mesh(config)
    is_shared = config.run.mirror is not None
    enable_compilation_cache(mesh.devices.flat[0].platform, is_shared=is_shared)
    check_installed(config.metrics.trackers)
    model = config.model
    # Imports a user's files, which may use the mesh's devices
    config, parts = load_parts(config, task)
    if config.model is not model:
        check_decoder(config, mesh)
    if config.eval.tasks:
        # Tools may import training, and not the reverse: the callback is named, as a user's is.
        tasks_of_run = load_object(TASKS_OF_RUN, "eval.tasks")
        parts = replace(parts, callbacks=(*parts.callbacks, tasks_of_run(config)))
    data = open_data(config, source, parts)
    config = with_batches(config, data, mesh)
    config, _ = with_steps(config, data.num_rows, decided.before)
    traits = check_loss_on(config, parts, data.train)
    _check_validation(config, parts, data)
    if config.model.dropout and not traits.is_random:
        raise ConfigError(
            f"model.dropout={config.model.dropout:g} has no effect: "
            f"{config.train.loss or 'the loss'} passes no "
            "dropout_keys to the model; use --model.dropout 0"
        )
    data.pad_short_batches(traits.reads_weights)
    steps = Plan(config=config, parts=parts, shapes=data.train.shapes, data=data, traits=traits)
    blueprint, lines = steps.state_on(mesh)
    if traits.warning is not None:
        lines = [traits.warning, *lines]
    settings = steps.step_settings
    notes: dict[str, object] = {
        "memory": require_memory(steps, blueprint),
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

        make_model = parts.model.maker(config.model)
        row_flops = performance.row_flops(settings, blueprint, make_model, steps.shapes)
    return RunPlan(
        **vars(steps), blueprint=blueprint, lines=lines, notes=notes, row_flops=row_flops
    )


def plan_step(config: TrainConfig) -> Plan:
    """Plans a run to analyse its step, without devices and validation.

    Raises:
      ValueError: a user's mistake, as in `make_run`.
    """
    decided = as_configured(
        replace_nested(
            config,
            {**NOT_PLANNED, "train.callbacks": (), "data.validation_batches": None},
        )
    )
    config, parts = load_parts(decided.config)
    shapes = _example_shapes(config, parts)
    if shapes is not None:
        traits = check_loss(config, parts, shapes)
        if traits.reads_weights:
            shapes[WEIGHTS] = jax.ShapeDtypeStruct((config.data.global_batch_size,), jnp.float32)
        return Plan(config=config, parts=parts, shapes=shapes, traits=traits)
    data = open_data(config, decided.init, parts)
    config = with_batches(config, data, ONE_DEVICE)
    traits = check_loss_on(config, parts, data.train)
    data.pad_short_batches(traits.reads_weights)
    shapes = dict(data.train.shapes)
    return Plan(config=config, parts=parts, shapes=shapes, data=data, traits=traits)


def _example_shapes(config: TrainConfig, parts: Parts) -> dict[str, jax.ShapeDtypeStruct] | None:
    # A decoder's batch shapes need no data. But if the dataset exists and the loss does not list
    # its columns, only the dataset knows them.
    data = config.data
    has_data = bool(data.mixture) or (data.path is not None and data.path.exists())
    lists_columns = parts.loss.attribute("example_batch", None) is not None
    example = parts.model.example(parts.loss, config)
    if example is None or parts.batches is not None or (has_data and not lists_columns):
        return None
    return {
        name: jax.ShapeDtypeStruct((data.global_batch_size, *array.shape[1:]), array.dtype)
        for name, array in example.items()
    }


def check_loss(config: TrainConfig, parts: Parts, batch: Shapes) -> Traits:
    """Inspects the loss, without devices.

    Raises:
      ConfigError: the loss fails, does not return sums, or cannot be accumulated.
    """
    traits = parts.loss.inspect(parts.model.maker(config.model), batch)
    if traits.changes and config.train.accumulation > 1:
        raise ConfigError(
            f"train.accumulation={config.train.accumulation}: a step changes "
            f"{', '.join(traits.changes[:3])}, "
            "which would depend on the micro-batches; use --train.accumulation 1"
        )
    return traits


def check_loss_on(config: TrainConfig, parts: Parts, batches: Batches) -> Traits:
    """Calls `check_loss` on batches."""
    try:
        return check_loss(config, parts, batches.shapes)
    except ConfigError as error:
        # Items can be batches only if all their arrays have as many rows.
        lengths = {array.shape[1:2] for array in batches.shapes.values()}
        may_have_batches = len(lengths) == 1 and () not in lengths
        if parts.batches is not None and isinstance(batches, SampleBatches) and may_have_batches:
            raise BatchError(f"{error}; {reading_rows(batches)}") from error
        raise


def _check_validation(config: TrainConfig, parts: Parts, data: RunData) -> None:
    # The loss has to take the columns of training and validation batches.
    validation = data.validation
    if validation is None or layout_of(validation.shapes) == layout_of(data.train.shapes):
        return
    try:
        check_loss_on(config, parts, validation)
    except (BatchError, ConfigError) as error:
        raise BatchError(f"validation batches ({validation.name}): {error}") from error


def _startup_checks(plan: RunPlan) -> list[str]:
    # Examines devices and processes, and prepares the folder; returns lines for the summary.
    config = plan.config

    def folder() -> Path:
        with raise_everywhere():
            run_folder.prepare(config.run.dir)
        return config.run.dir

    mesh = plan.blueprint.mesh
    on_accelerator = platform_of(mesh.devices.flat[0]) != "cpu"
    if not on_accelerator and not is_multiprocess():
        folder()
        return []
    from jaxtp.data.copies import identities
    from jaxtp.guards.doctor import examine
    from jaxtp.guards.finding import conclude

    settings = {
        "configuration": to_plain(config),
        "data": dict(plan.data.description),
        "copies of URLs": identities(),
    }
    stages = examine(
        mesh,
        settings,
        folder,
        is_shared=config.checkpoint.url is None,
        dtypes=(config.model.precision.compute,),
        attention=plan.parts.model.attention_cases(config, mesh),
        tp_across_hosts=config.mesh.tp_across_hosts,
        computes=on_accelerator and config.launch.self_check,
    )
    return conclude(stages)


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
