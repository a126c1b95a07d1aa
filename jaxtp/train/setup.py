"""Starts a run: `start` goes from a configuration to a state on its devices and the programs that step it.

It reads from top to bottom in the order in which things happen. What a run may begin with (nothing, another run, a
Hugging Face model) is checked in `train/initialisation.py`, and whether it may go on in `train/resume.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtp.checkpoint.damage import CheckpointError
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.data.corpus import load_corpus
from jaxtp.data.samples import Data, RowSettings
from jaxtp.hf.peft_load import read_peft
from jaxtp.hf.runs import check_base, describe_base, load_base
from jaxtp.interrupt import Interrupt
from jaxtp.launch.agreement import together
from jaxtp.launch.environment import keep_programs
from jaxtp.train import folder
from jaxtp.train import optimizer as optimizers
from jaxtp.train.attention_check import check_attention
from jaxtp.train.config import TrainConfig, check_vocabulary
from jaxtp.train.initialisation import (
    changes_since,
    check_origin,
    check_tokenizer,
    keep_files_of_origin,
    open_adapters,
    with_model,
)
from jaxtp.train.memory_check import require_memory
from jaxtp.train.metrics import Timing
from jaxtp.train.place import open_mesh
from jaxtp.train.preflight import preflight
from jaxtp.train.report import Report, summary
from jaxtp.train.resume import restore, with_origin
from jaxtp.train.state import Blueprint, plan_state, trained_parameters
from jaxtp.train.step import EvalStep, JittedTrainStep, make_eval_step, make_train_step
from jaxtp.train.trackers import check_installed
from jaxtp.train.verify import VERIFIED


@dataclass
class Run:
    """A run that has started, with its state on its devices."""

    config: TrainConfig
    data: Data
    blueprint: Blueprint
    train_step: JittedTrainStep
    """Not compiled yet."""
    eval_step: EvalStep
    checkpoints: Checkpoints
    report: Report
    interrupt: Interrupt
    timing: Timing
    state: nnx.State
    step: int
    """Number of updates made so far."""
    next_sample: int
    """Global index of the first sample of the next step."""
    base: dict[str, str] | None
    """Describes the model beside the adapters, if adapters are all that is trained."""
    verified: int | None
    """The last step that was verified, if the checkpoint knows of one."""


def start(config: TrainConfig, notes: Sequence[str], held: ExitStack) -> Run:
    """Starts a run, or goes on with it from the newest whole checkpoint in `config.run.dir`.

    Args:
      config: the run.
      notes: lines to begin with, on how the configuration came to be.
      held: closes what the run holds until it ends: the mesh in context, its folder, screen, signals and checkpoints.

    Raises:
      ValueError: a user's mistake (`ConfigError`, `MeshError`, `CorpusError`, `DatasetError`, `HFError`,
        `RunFolderError`, `CheckpointError`), before anything in the folder is changed.
    """
    timing = Timing()
    with together():
        config = with_model(config)
        check_origin(config)
        mesh = open_mesh(config)
        keep_programs(mesh.devices.flat[0].platform)
        check_installed(config.metrics.trackers)
        data = load_data(config)
        blueprint = plan(config, mesh)
        check_attention(config, mesh)
        folder.prepare(config.run.dir)
    alike = preflight(config, mesh, data.description)

    held.enter_context(jax.set_mesh(mesh))
    with together():
        held.enter_context(folder.locked(config.run.dir))
    report, interrupt = held.enter_context(Report()), held.enter_context(Interrupt())
    for line in (*alike, *(f"default {note}" for note in notes), summary(config, data, blueprint)):
        report.line(line)

    checkpoints = held.enter_context(_checkpoints(config))
    found = restore(config, data.description, blueprint, checkpoints, report.line)
    if found is None:
        state, base = _begin(config, blueprint, report)
    elif config.model.lora.rank:  # their checkpoint does not hold the model beside the adapters
        state, base = _begin(config, blueprint, report, found.info)
        state = nnx.merge_state(state, found.state)
    else:
        config, state, base = with_origin(config, found.info), found.state, None
    if found is not None:
        report.line("\n  ".join([f"resumed from the checkpoint at step {found.step}", *found.changed]))
    step, next_sample = (0, 0) if found is None else (found.step, found.info["next_sample"])
    with together():
        if step < config.train.steps:
            folder.write_config(config)

    train_step = make_train_step(config, blueprint, with_checksums=config.train.verify_every > 0)
    steps = train_step, make_eval_step(blueprint, config.train.accumulation, config.mesh.context)
    timing.begun()
    verified = None if found is None else found.info.get(VERIFIED)
    made = config, data, blueprint, *steps, checkpoints
    return Run(*made, report, interrupt, timing, state, step, next_sample, base, verified)


def load_data(config: TrainConfig) -> Data:
    """Opens the data of a run and lays out its rows.

    Raises:
      ValueError: a user's mistake (`CorpusError`, `DatasetError`, `LongDocumentError`, `ConfigError`).
    """
    data = config.data
    corpus = load_corpus(data.path, data.mixture, data.validation)
    check_vocabulary(config.model, corpus.tokenizer.vocab_size, corpus.description)
    check_tokenizer(config, corpus.tokenizer)
    settings = RowSettings(data.sequence_length, config.model.vocab_size, data.packing, data.long_documents)
    return Data(corpus, settings, config.run.seed)


def plan(config: TrainConfig, mesh: jax.sharding.Mesh) -> Blueprint:
    """Describes the state of a run; nothing is allocated or written.

    Raises:
      ConfigError: a pattern that matches no trained parameter, or more memory than there is.
    """
    blueprint = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    paths = list(trained_parameters(blueprint))
    optimizers.check_groups(config.optimizer, paths)
    for pattern in config.metrics.norm_groups:
        optimizers.matching("metrics.norm_groups", pattern, paths)
    require_memory(config, blueprint)
    return blueprint


def _checkpoints(config: TrainConfig) -> Checkpoints:
    keep, place = config.checkpoint, config.run.dir / folder.CHECKPOINTS
    return Checkpoints(place, keep=keep.keep, keep_every=keep.keep_every, keep_best=keep.keep_best)


def _begin(
    config: TrainConfig, blueprint: Blueprint, report: Report, resumed: Mapping[str, Any] | None = None
) -> tuple[nnx.State, dict[str, str] | None]:
    """Creates the state of a run before its first step, with the weights that it begins with, if it is given some.

    Args:
      config: the run.
      blueprint: the description of its state.
      report: shows where weights are from.
      resumed: the info of a checkpoint of adapters, which describes the model beside them.

    Returns:
      The state, and a description of the model beside the adapters, if there are any.

    Raises:
      HFError, CheckpointError: the weights cannot be read, or are of another model than the checkpoint says.
    """
    origin, base = config.model.from_hf or config.run.init_from, None
    if origin is None:
        return blueprint.create(config.run.seed), None
    changes = changes_since(config)
    try:
        weights, origin = load_base(origin, config.model, blueprint.mesh)
    except CheckpointError as error:
        raise CheckpointError("; ".join([str(error), *changes])) from None
    if config.model.lora.rank:
        base = describe_base(weights, origin, blueprint.mesh)
        if resumed is not None:
            check_base(resumed, base, origin)
    lines = [f"weights from {origin}", *changes]
    if config.model.lora.from_peft is not None and resumed is None:
        with together():
            found = open_adapters(config)
            begun = read_peft(found, blueprint.abstract["model"], blueprint.mesh)
        weights = nnx.merge_state(weights, begun)
        lines += [f"adapters from {found.path}", *found.notes]
    state = blueprint.create(config.run.seed, weights)
    with together():
        keep_files_of_origin(config)
    report.line("; ".join(lines))
    return state, base
