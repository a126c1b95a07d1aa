"""A model of the user's: how it is built, split over the mesh, and computed."""

import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.config.python_object import user_code_error
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import CP, TP, mesh_sizes
from jaxtp.parallelize.parallelize import abstract_model, parallelize
from jaxtp.parallelize.plan import Plan
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import MakeModel
from jaxtp.train.task import Task
from jaxtp.train.user_loss import call, inspect_loss


def builder(task: Task, config: TrainConfig) -> Callable[[nnx.Rngs], nnx.Module]:
    """Returns a function that builds the task's model with the arguments of the settings.

    Raises:
      ConfigError: the function does not take these arguments.
    """
    function, arguments = task.model, dict(config.model.arguments)
    assert callable(function)
    name = config.model.build or repr(function)
    # `inspect` would read the `__call__` of NNX's metaclass.
    is_class = isinstance(function, type)
    try:
        signature = inspect.signature(function.__init__ if is_class else function)
    except ValueError:  # a C function
        signature = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)])
    takes_rngs = "rngs" in signature.parameters
    try:
        signature.bind(*([None] if is_class else []), **({"rngs": None} if takes_rngs else {}) | arguments)
    except TypeError as error:
        takes = ", ".join(each for each in list(signature.parameters)[is_class:] if each != "rngs") or "none"
        raise ConfigError(f"{name}: {error}; model.arguments can give {takes}") from None

    def build(rngs: nnx.Rngs) -> nnx.Module:
        try:
            model = function(**({"rngs": rngs} if takes_rngs else {}) | arguments)
        except Exception as error:
            raise user_code_error(name, error) from error
        if not isinstance(model, nnx.Module):
            raise ConfigError(f"{name} returns {model!r:.100}, and should return an nnx.Module")
        return model

    return build


def split_model(
    config: TrainConfig, mesh: Mesh, task: Task, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[MakeModel, list[str]]:
    """Returns a function that builds the model split over the mesh, and lines on its plan.

    Raises:
      ConfigError: the function that builds it does not take its arguments, or fails.
      PlanError: the plan does not fit.
    """
    build = builder(task, config)
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
    lines: list[str] = []
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

    inspect_loss(loss, abstract_model(create), batch)  # reports mistakes of the loss
    key = jax.random.key(config.run.seed)
    plan = propose_plan(
        create,
        dict(batch),
        mesh=sizes,
        call=lambda model, batch: call(loss, model, batch, key).loss,
        report=lines.append,
    )
    return plan, [f"plan    {line}" for line in lines]


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
