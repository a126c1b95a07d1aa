"""From a configuration to a run that can be stepped: the state planned, created or restored."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.manager import Checkpoints, restore_newest
from jaxtp.data.corpus import Corpus, load_corpus
from jaxtp.data.samples import Data, RowSettings
from jaxtp.hf.runs import check_base, describe_base
from jaxtp.train import folder
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig, check_vocabulary
from jaxtp.train.initialisation import check_tokenizer, given_weights, keep_files_of_origin
from jaxtp.train.memory_check import require_memory
from jaxtp.train.report import Report, summary
from jaxtp.train.state import Blueprint, plan_state, trained_parameters


@dataclass
class Run:
    """A prepared run: what the loop needs, with the state on its devices."""

    config: TrainConfig
    mesh: Mesh
    data: Data
    blueprint: Blueprint
    schedule: optax.Schedule
    checkpoints: Checkpoints
    state: nnx.State
    step: int
    """Updates made so far."""
    next_sample: int
    """Global index of the first sample of the next step."""
    base: dict[str, str] | None
    """Describes the model beside the adapters, if adapters are all that is trained."""


def plan(config: TrainConfig, mesh: Mesh) -> Blueprint:
    """Describes the state of a run; nothing is allocated or written.

    Raises:
      ConfigError: a pattern that matches no trained parameter, or more memory than there is.
    """
    optimizer = optimizers.build(config.optimizer, config.train.steps)
    blueprint = plan_state(config.model, optimizer, mesh)
    paths = list(trained_parameters(blueprint))
    optimizers.check_groups(config.optimizer, paths)
    for pattern in config.metrics.norm_groups:
        optimizers.matching("metrics.norm_groups", pattern, paths)
    require_memory(config, blueprint)
    return blueprint


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


def prepare(config: TrainConfig, blueprint: Blueprint, data: Data, report: Report) -> Run:
    """Creates or restores the state."""
    mesh = blueprint.mesh
    report.line(summary(config, mesh, data, blueprint))
    keep = config.checkpoint
    checkpoints = Checkpoints(
        config.run.dir / folder.CHECKPOINTS, keep=keep.keep, keep_every=keep.keep_every, keep_best=keep.keep_best
    )
    start = _start_or_resume(config, data.corpus, blueprint, checkpoints, report)
    if start.step < config.train.steps:
        folder.write_config(start.config)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    return Run(
        start.config,
        mesh,
        data,
        blueprint,
        schedule,
        checkpoints,
        start.state,
        start.step,
        start.next_sample,
        start.base,
    )


@dataclass
class _Start:
    """Where a run is when it begins, or goes on; see `Run`."""

    state: nnx.State
    config: TrainConfig
    """With the run's true origin."""
    base: dict[str, str] | None
    step: int = 0
    next_sample: int = 0


def _start_or_resume(
    config: TrainConfig, corpus: Corpus, blueprint: Blueprint, checkpoints: Checkpoints, report: Report
) -> _Start:
    changed: list[str] = []

    def accept(info: dict[str, Any]) -> None:
        changed[:] = folder.check_resumable(config, corpus.describe(), info)

    found = restore_newest(checkpoints, blueprint.stored(blueprint.abstract), blueprint.mesh, accept, report.line)
    if found is None:
        return _begin(config, blueprint, report, None)
    step, state, info = found
    base = None
    if config.model.lora.rank:
        start = _begin(config, blueprint, report, info)
        state, base = nnx.merge_state(start.state, state), start.base
    else:
        config = _with_origin(config, info["config"]["run"]["init_from"])
    # A row of skipped steps ends with the run that skipped them: this one may allow fewer.
    skipped: Any = state["skipped"]
    state["skipped"] = skipped.replace(jnp.zeros_like(skipped[...]))
    report.line(f"resumed from the checkpoint at step {step}")
    for line in changed:
        report.line(f"  {line}")
    return _Start(state, config, base, step, info["next_sample"])


def _begin(config: TrainConfig, blueprint: Blueprint, report: Report, resumed: dict[str, Any] | None) -> _Start:
    """A run that has not made a step; what adapters are beside must be as a resumed run's checkpoint says.

    Raises:
      CheckpointError: it is not.
    """
    given = given_weights(config, blueprint.mesh)
    if given is None:
        return _Start(blueprint.create(config.run.seed), config, None)
    weights, origin = given
    base = None
    if config.model.lora.rank:
        base = describe_base(weights, origin, blueprint.mesh)
        if resumed is not None:
            check_base(resumed, base, origin)
    state = blueprint.create(config.run.seed, weights)
    keep_files_of_origin(config)
    report.line(f"weights from {origin}")
    return _Start(state, config, base)


def _with_origin(config: TrainConfig, stored: str | None) -> TrainConfig:
    """A run that resumes began where it began, whatever it is told to begin from now."""
    init_from = None if stored is None else Path(stored)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, init_from=init_from))
