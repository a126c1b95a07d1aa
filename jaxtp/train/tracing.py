"""The two programs of a configuration: the training step, traced with the shapes of its run (what is compiled, audited
and estimated), and the evaluation."""

from typing import Any

import jax
from flax import nnx

from jaxtp.data.loader import abstract_batch
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, TrainConfig
from jaxtp.train.state import Blueprint
from jaxtp.train.step import EvalStep, StepSettings, make_eval_step, make_train_step


def step_settings(config: TrainConfig) -> StepSettings:
    """What a configuration's step does beside the model and the optimizer."""
    return StepSettings(
        accumulation=config.train.accumulation,
        z_loss=config.train.z_loss,
        seed=config.run.seed,
        max_skipped=max_skipped(config.train),
        norm_groups=config.metrics.norm_groups,
    )


def max_skipped(settings: LoopConfig) -> int:
    """Steps in a row that may be skipped."""
    return settings.max_skipped if settings.non_finite == "skip" else 0


def trace_step(config: TrainConfig, blueprint: Blueprint, state: nnx.State | None = None) -> Any:
    """The `jax.stages.Traced` step of a run on its mesh, whose devices need not be there.

    Args:
      config: the run.
      blueprint: of its state.
      state: the state; by default its description.
    """
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    step = make_train_step(blueprint, schedule, step_settings(config))
    data, mesh = config.data, blueprint.mesh
    batch = abstract_batch(mesh, data.global_batch_size, data.sequence_length, packed=data.packed)
    with jax.set_mesh(mesh):
        return step.trace(blueprint.sharded if state is None else state, batch)


def eval_step(config: TrainConfig, blueprint: Blueprint) -> EvalStep:
    """The evaluation of a run, in the micro-batches of its training step: what holds the one holds the other."""
    return make_eval_step(blueprint, config.train.accumulation)
