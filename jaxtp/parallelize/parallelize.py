"""`parallelize`: splits any Flax NNX model over a mesh by a plan.

`original_model` undoes it, so that the plan can be put on an abstract mesh of any size (`jaxtp explain`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.mesh import AXES, MeshError, mesh_sizes
from jaxtp.parallelize.class_swap import role_of, swap_class
from jaxtp.parallelize.initialisation import AbstractArray, abstract_model, arrays_of
from jaxtp.parallelize.module_wrappers import Model, find_modules, original_class, set_class
from jaxtp.parallelize.plan import Plan
from jaxtp.parallelize.styles import Style
from jaxtp.parallelize.validate_plan import parameter_specs, validate_plan


def parallelize(
    model: Model | Callable[[], Model],
    plan: Plan | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    fsdp: bool = True,
) -> Model:
    """Splits a Flax NNX model over a mesh by a plan, without changing its code.

    The model still works on global arrays, and every mesh computes the same numbers. Paths of modules and parameters
    stay; module classes become subclasses. Call the model under `jax.set_mesh(mesh)`; without a mesh it runs its
    original code.

    Args:
      model: a model, changed in place; or a function that returns one, which is compiled, so no device ever holds the
        whole model.
      plan: styles by pattern of module paths (`plan.py`): `{"blocks.*.mlp.up": Colwise()}`. Other modules run unchanged
        on their part of the batch.
      mesh: by default the mesh in context; an abstract mesh for abstract models (`nnx.eval_shape`).
      fsdp: also split stored parameters over fsdp and cp, in the largest dim that they divide, and gather before use.

    Raises:
      PlanError: the plan does not fit the model or the mesh; then nothing has changed.
    """
    mesh = _mesh(mesh)
    if not isinstance(model, nnx.Module):
        return _initialise_sharded(model, plan or {}, mesh, fsdp)
    _apply_plan(model, plan or {}, mesh_sizes(mesh), fsdp)
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(_put, state, _shardings(state, mesh)))
    return cast(Model, model)


def original_model(model: nnx.Module | Callable[[], nnx.Module]) -> tuple[nnx.Module, dict[str, Style], bool]:
    """Undoes `parallelize` on an abstract copy of a model, or of the model that a function returns.

    Returns the copy, the styles by module path, and whether fsdp split parameters (True for other models).
    """
    copy = abstract_model(model)
    parallel = [(info, role) for info in find_modules(copy) if (role := role_of(info.module)) is not None]
    for info, _ in parallel:
        set_class(info.module, original_class(info.module))
        for parameter in info.parameters.values():
            parameter.set_metadata(out_sharding=None)
    styles = {info.path: role.style for info, role in parallel if role.style is not None}
    return copy, styles, not parallel or any(role.fsdp for _, role in parallel)


def _mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    if mesh is None:
        concrete = jax.sharding.get_mesh()
        mesh = jax.sharding.get_abstract_mesh() if concrete.empty else concrete
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f"parallelize takes a mesh, such as jaxtp.make_mesh(fsdp=2, tp=4), not {mesh!r}")
    if mesh.empty:
        raise MeshError("parallelize needs a mesh: call it under jax.set_mesh(jaxtp.make_mesh(...)), or pass mesh=")
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise MeshError(f"the mesh has axes {mesh.axis_names} and lacks {missing}; build it with jaxtp.make_mesh")
    return mesh


def _apply_plan(model: nnx.Module, plan: Plan, sizes: Mapping[str, int], fsdp: bool) -> None:
    module_plans = validate_plan(find_modules(model), plan, sizes, fsdp=fsdp)
    for module_plan in module_plans:
        if module_plan.role is not None:
            swap_class(module_plan.info.module, module_plan.role)
    for parameter, spec in parameter_specs(module_plans):
        parameter.set_metadata(out_sharding=spec)


def _shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    def declared(leaf: Any) -> Any:
        metadata = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
        sharding = NamedSharding(mesh, PartitionSpec(*(metadata.get("out_sharding") or ())))
        return jax.tree.map(lambda _: sharding, leaf)

    return jax.tree.map(declared, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _put(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, AbstractArray):
        return value
    if isinstance(value, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding)


def _initialise_sharded(build: Callable[[], Model], plan: Plan, mesh: Mesh | AbstractMesh, fsdp: bool) -> Model:
    abstract = abstract_model(build)
    _apply_plan(abstract, plan, mesh_sizes(mesh), fsdp)
    graph, state = nnx.split(abstract)
    shardings = tuple(jax.tree.leaves(_shardings(state, mesh)))
    arrays = jax.jit(partial(arrays_of, build), out_shardings=shardings)()
    return cast(Model, nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays)))
