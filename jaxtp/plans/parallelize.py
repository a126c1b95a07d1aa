"""`parallelize`: splits any Flax NNX model over a mesh by a plan.

A function that builds the model is traced and compiled, which initialises its arrays sharded.
`original_model` undoes `parallelize` on an abstract copy, so that `jaxtp explain` can apply the
plan on any other mesh.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.config.hints import by_dotted_path, dotted
from jaxtp.config.python_object import signature_of
from jaxtp.mesh import MeshError, MeshLike, Sizes, as_mesh, describe_mesh, mesh_sizes
from jaxtp.plans.module_wrappers import (
    Model,
    find_modules,
    original_class,
    set_class,
)
from jaxtp.plans.plan import Plan, PlanError
from jaxtp.plans.run_styles import role_of, swap_class
from jaxtp.plans.styles import Style
from jaxtp.plans.validate_plan import parameter_specs, validate_plan

Build = Callable[[], nnx.Module]

DECLARED = "declared_sharding"
"""Metadata of a split parameter: the spec that its model declares, or None."""

_LINEN = (
    "linen keeps parameters outside of its modules, so there is nothing to split: port it to "
    "Flax NNX"
)


def parallelize(
    model: Model | Callable[[], Model],
    plan: Plan | None = None,
    *,
    mesh: MeshLike = None,
) -> Model:
    """Splits a Flax NNX model over a mesh by a plan, without changing its code.

    The model still works on global arrays, and every mesh computes the same numbers. Paths of
    modules and parameters stay; modules get subclasses. Call the model under `jax.set_mesh(mesh)`;
    without a mesh it runs its original code.

    Args:
      model: a model, changed in place; or a function that returns one, which is compiled, so no
        device ever holds the whole model.
      plan: styles by pattern of module paths (`plan.py`): `{"blocks.*.mlp.up": Colwise()}`. Other
        modules run unchanged on their shard of the batch. Splits that parameters declare
        (`out_sharding`) stay if the mesh divides them.
      mesh: by default the mesh in context; also sizes, `{"fsdp": 2, "tp": 4}` or `"fsdp=2,tp=4"`.
        An abstract mesh is for abstract models (`nnx.eval_shape`). fsdp and cp split each
        parameter, along the largest dim divisible by fsdp * cp; it is gathered before use.

    Raises:
      PlanError: the plan does not fit the model or the mesh; the model is unchanged.
      MeshError: the mesh is abstract, and the model is not.
      UserError: two modules or variables of the model have the same dotted path.
    """
    placed_on = as_mesh(mesh, "parallelize")
    if not isinstance(model, nnx.Module):
        return _initialise_sharded(model, plan or {}, placed_on)
    if isinstance(placed_on, AbstractMesh):
        _refuse_arrays(nnx.state(model), placed_on)
    _apply_plan(model, plan or {}, mesh_sizes(placed_on))
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(_put, state, _shardings(state, placed_on)))
    return cast(Model, model)


def original_model(model: nnx.Module | Build) -> tuple[nnx.Module, dict[str, Style]]:
    """Undoes `parallelize` on an abstract copy of a model, or of the model that a function returns.

    Returns the copy, and the styles by module path.
    """
    copy = abstract_model(model)
    styles: dict[str, Style] = {}
    for info in find_modules(copy):
        role = role_of(info.module)
        if role is not None:
            set_class(info.module, original_class(info.module))
            if role.style is not None:
                styles[info.path] = role.style
        for parameter in info.parameters.values():
            if parameter.has_metadata(DECLARED):
                parameter.set_metadata(out_sharding=parameter.get_metadata(DECLARED))
    return copy, styles


def _apply_plan(model: nnx.Module, plan: Plan, sizes: Sizes) -> None:
    by_dotted_path(nnx.to_flat_state(nnx.state(model)))  # refuses two variables with one path
    module_plans = validate_plan(find_modules(model), plan, sizes)
    for module_plan in module_plans:
        if module_plan.role is not None:
            swap_class(module_plan.info.module, module_plan.role)
    for parameter, spec in parameter_specs(module_plans):
        declared = parameter.get_metadata().get("out_sharding")
        if declared != spec:  # eager_sharding: `nnx.Optimizer` splits moments like their parameters
            parameter.set_metadata(**{DECLARED: declared}, out_sharding=spec, eager_sharding=True)


def _refuse_arrays(tree: object, mesh: AbstractMesh) -> None:
    """Raises a `MeshError` for arrays outside of a trace: the mesh has no devices for them."""
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
            raise MeshError(
                f"parallelize: the mesh {describe_mesh(mesh_sizes(mesh))} is abstract, and has no "
                "devices for the model's arrays; pass nnx.eval_shape(build), a model without "
                "arrays, or a mesh of jaxtp.make_mesh"
            )


def _shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    def declared(leaf: object) -> Any:
        spec = leaf.get_metadata().get("out_sharding") if isinstance(leaf, nnx.Variable) else None
        sharding = NamedSharding(mesh, PartitionSpec(*(spec or ())))
        return jax.tree.map(lambda _: sharding, leaf)

    return jax.tree.map(declared, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _put(value: object, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, AbstractArray):
        return value
    if isinstance(value, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding)


def _initialise_sharded(build: Callable[[], Model], plan: Plan, mesh: Mesh | AbstractMesh) -> Model:
    abstract = abstract_model(build)
    _apply_plan(abstract, plan, mesh_sizes(mesh))
    graph, state = nnx.split(abstract)
    shardings = tuple(jax.tree.leaves(_shardings(state, mesh)))
    if isinstance(mesh, AbstractMesh):
        _refuse_arrays(jnp.zeros(()), mesh)  # an array outside of a trace, a tracer inside
    arrays = jax.jit(partial(arrays_of, build), out_shardings=shardings)()
    sharded = jax.tree.unflatten(jax.tree.structure(state), arrays)
    return cast(Model, nnx.merge(graph, sharded))


def abstract_model(model: nnx.Module | Build) -> nnx.Module:
    """Returns a copy of a model, or the model that a function builds, without arrays.

    Raises:
      PlanError: the function takes arguments, draws from outside RNG state, needs an array's value,
        or hides an array from Flax.
    """
    if isinstance(model, nnx.Module):
        return _merge_abstract(*nnx.split(model))
    _check_build(model)
    graphs = []

    def create() -> nnx.State:
        graph, state = nnx.split(_build(model))
        graphs.append(graph)
        return state

    try:
        state = jax.eval_shape(create)
    except TraceContextError as error:
        raise PlanError(
            "the function that builds the model draws from RNG state outside of it; create that "
            f"state inside: parallelize(lambda: Model(nnx.Rngs(0)), plan) ({error})"
        ) from None
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise PlanError(
            "the function that builds the model needs the value of an array while it is traced; "
            "compute it with NumPy, or build the model first and pass it to parallelize "
            f"({str(error).splitlines()[0]})"
        ) from error
    return _merge_abstract(graphs[-1], state)


def arrays_of(build: Build) -> tuple[Any, ...]:
    """Returns the arrays of the model that a function builds, in the order of its state.

    Call it under `jax.jit`.
    """
    return tuple(jax.tree.leaves(nnx.state(_build(build))))


def _check_build(build: object) -> None:
    cls = build if isinstance(build, type) else type(build)
    if issubclass(cls, linen.Module):
        raise PlanError(f"{cls.__name__} is a linen module; {_LINEN}")
    if not callable(build):
        raise PlanError(f"expected an nnx.Module, or a function that returns one, not {build!r}")
    signature = signature_of(build) or inspect.Signature()
    try:
        signature.bind()
    except TypeError as error:
        raise PlanError(
            f"a function that builds a model is called without arguments, and {build!r} is "
            f"{error}; write lambda: Model(..., rngs=nnx.Rngs(0))"
        ) from None


def _build(build: Build) -> nnx.Module:
    eager = nnx.using_eager_sharding()
    with nnx.use_eager_sharding(False):  # specs that the model declares may not fit the mesh
        model: Any = build()
    if not isinstance(model, nnx.Module):
        problem = f"the function must return an nnx.Module, not a {type(model).__name__}"
        if isinstance(model, linen.Module):
            problem += f"; {_LINEN}"
        raise PlanError(problem)
    mark_arrays_as_data(model)
    if eager:
        for _, variable in nnx.iter_graph(model):
            if isinstance(variable, nnx.Variable):
                variable.set_metadata(eager_sharding=True)
    return model


class AbstractArray(np.ndarray):
    """An array outside any variable, with shape and dtype but no memory.

    Flax would treat a `jax.ShapeDtypeStruct` in a container as a constant.
    """


def _merge_abstract(graph: Any, state: nnx.State) -> nnx.Module:
    def abstract(leaf: Any) -> Any:
        if isinstance(leaf, nnx.Variable) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), leaf)
        return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape).view(AbstractArray)

    leaves = jax.tree.map(abstract, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    return nnx.merge(graph, leaves, copy=True)


def mark_arrays_as_data(model: nnx.Module) -> None:
    """Marks arrays in module attributes as data.

    Otherwise Flax treats traced arrays as constants.
    """
    for _, node in list(nnx.iter_graph(model)):
        if not isinstance(node, nnx.Pytree):
            continue
        for name, value in list(vars(node).items()):
            if isinstance(value, jax.Array | np.ndarray):  # also tracers
                setattr(node, name, nnx.data(value))
    data = {*map(id, jax.tree.leaves(nnx.state(model)))}
    for path, node in nnx.iter_graph(model):
        if not data.issuperset(map(id, _tracers(node))):
            raise PlanError(
                f"the function builds a model in which {dotted(path)} contains an array that Flax "
                "treats as a constant. Wrap containers of arrays in nnx.data(...). If a function "
                "captures an array, store it as an attribute of the module instead"
            )


def _tracers(node: object) -> Iterator[jax.core.Tracer]:
    values: Any = [node]
    if isinstance(node, partial):
        values = jax.tree.leaves((node.args, node.keywords))
        yield from _tracers(node.func)
    elif isinstance(node, types.FunctionType):
        cells = node.__closure__ or ()
        # An empty cell has no contents.
        values = (cell.cell_contents for cell in cells if cell != types.CellType())
    for value in values:
        if isinstance(value, jax.core.Tracer):
            yield value
