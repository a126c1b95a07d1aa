"""A model of the user's that is no Decoder: how it is split over the mesh, and computed."""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import CP, TP, mesh_sizes
from jaxtp.models.own_decoder import builder
from jaxtp.parallelize.parallelize import parallelize
from jaxtp.parallelize.plan import Plan, format_style
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import MakeModel
from jaxtp.train.task import Task
from jaxtp.train.user_loss import call


def split_model(
    config: TrainConfig, mesh: Mesh, task: Task, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[MakeModel, list[str]]:
    """Returns a function that builds the model split over the mesh, and lines on its plan.

    Raises:
      ConfigError: the function that builds it does not take its arguments, or fails.
      PlanError: the plan does not fit.
    """
    assert callable(task.model)
    build = builder(task.model, config.model)
    if task.plan is None:
        plan, lines = _proposed(build, config, mesh, task, batch)
    else:
        plan, lines = task.plan, []

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = build(rngs)
        set_precision(model, config.model.precision)
        return parallelize(model, plan, mesh=mesh)

    return make, lines


def _proposed(
    build: Callable[[nnx.Rngs], nnx.Module],
    config: TrainConfig,
    mesh: Mesh,
    task: Task,
    batch: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[Plan, list[str]]:
    sizes, loss = mesh_sizes(mesh), task.loss
    if sizes[CP] > 1:
        raise ConfigError(
            f"mesh.cp={sizes[CP]} splits sequences, and no plan names their module; bring one (--model.plan) with "
            '{"": ContextParallel()}'
        )
    if sizes[TP] == 1 or loss is None:
        return {}, []
    from jaxtp.analysis.propose import propose_plan

    def create() -> nnx.Module:
        return build(nnx.Rngs(config.run.seed))

    key = jax.random.key(config.run.seed)
    proposal = propose_plan(
        create, batch, mesh=sizes, call=lambda model, batch: call(loss, model, batch, key).loss, report=None
    )
    styles = ", ".join(f"{pattern}: {format_style(style)}" for pattern, style in proposal.items()) or "no split over tp"
    return proposal, [f"plan    proposed: {styles} (jaxtp explain says why)", *map("note    {}".format, proposal.notes)]


def set_precision(model: nnx.Module, precision: Precision) -> None:
    """Makes Flax's layers compute in a dtype: those that take theirs from their inputs. Casts stored parameters."""
    default = Precision()
    if precision.compute != default.compute:
        for _, module in nnx.iter_modules(model):
            if getattr(module, "dtype", ...) is None:
                module.dtype = jnp.dtype(precision.compute)  # type: ignore[attr-defined]
    if precision.param != default.param:
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Param) and jnp.issubdtype(variable.dtype, jnp.floating):
                variable.set_value(variable[...].astype(precision.param))
