"""`parallelize`: any Flax NNX model on a mesh, by a plan; and back (`as_written`).

Nothing is changed before all of the plan is known to fit.

A parallel model gives back its classes and its plan (`as_written`), which can then be put on an abstract mesh of any
size: `jaxtp explain` needs no other code for meshes that are not there.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.mesh import AXES, MeshError, mesh_sizes
from jaxtp.parallel.calls import Model, original_class, set_class
from jaxtp.parallel.fitting import decide, declarations
from jaxtp.parallel.initialisation import Creation, Placeholder, abstract_model
from jaxtp.parallel.modules import find_modules
from jaxtp.parallel.plan import Plan
from jaxtp.parallel.styles import Style
from jaxtp.parallel.swap import role_of, swap_class


def parallelize(
    model: Model | Callable[[], Model],
    plan: Plan | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    fsdp: bool = True,
) -> Model:
    """Splits a Flax NNX model over a mesh, by a plan, and leaves its code as it is.

    The model goes on seeing global arrays, and any mesh gives the numbers of one device. Modules keep their places, and
    parameters their paths; the classes of modules become subclasses of their own. Call it under `jax.set_mesh(mesh)`;
    without a mesh in context it computes as it did.

    Args:
      model: the model, which is changed in place; or a function that makes it, which is then compiled so that every
        parameter is initialised sharded and no device ever holds the whole model.
      plan: styles by pattern of module paths (`plan.py`), such as `{"blocks.*.mlp.up": Colwise()}`. What no pattern
        matches computes as it did, on its part of the batch. With more than one device along cp it has to say whose
        sequences are divided: `{"": ContextParallel()}`.
      mesh: default the one in context. An abstract mesh does for an abstract model (`nnx.eval_shape`).
      fsdp: stores each parameter split over fsdp and cp too, in its largest dim that they divide, and gathers it before
        use.

    Returns:
      The model.

    Raises:
      PlanError: the plan does not fit the model or the mesh: which pattern, which module, which sizes, what would.
      MeshError: there is no mesh.
    """
    mesh = _mesh(mesh)
    if not isinstance(model, nnx.Module):
        return _initialise_sharded(model, plan or {}, mesh, fsdp)
    _swap(model, plan or {}, mesh_sizes(mesh), fsdp)
    state = nnx.state(model)
    nnx.update(model, jax.tree.map(_put, state, _shardings(state, mesh)))
    return cast(Model, model)


def as_written(model: nnx.Module | Callable[[], nnx.Module]) -> tuple[nnx.Module, dict[str, Style], bool]:
    """Returns an abstract copy of a model as its author wrote it, and the plan that `parallelize` was given for it.

    Args:
      model: parallel or not, real or abstract, or a function that makes one.

    Returns:
      The copy; the style of each module that has one, by its dotted path; and whether its parameters are split over
      fsdp, which those of a model that is not parallel are to be.
    """
    copy = abstract_model(model)
    parallel = [(found, role) for found in find_modules(copy) if (role := role_of(found.module)) is not None]
    for found, _ in parallel:
        set_class(found.module, original_class(found.module))
        for parameter in found.parameters.values():
            parameter.set_metadata(out_sharding=None)
    styles = {found.path: role.style for found, role in parallel if role.style is not None}
    return copy, styles, not parallel or any(role.fsdp for _, role in parallel)


def _mesh(mesh: Mesh | AbstractMesh | None) -> Mesh | AbstractMesh:
    if mesh is None:
        concrete = jax.sharding.get_mesh()
        mesh = jax.sharding.get_abstract_mesh() if concrete.empty else concrete
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f"parallelize takes a mesh, as jaxtp.make_mesh(fsdp=2, tp=4) makes, not {mesh!r}")
    if mesh.empty:
        raise MeshError("parallelize needs a mesh: call it under jax.set_mesh(jaxtp.make_mesh(...)), or give mesh=")
    if missing := [axis for axis in AXES if axis not in mesh.axis_names]:
        raise MeshError(f"the mesh has axes {mesh.axis_names} and lacks {missing}; build it with jaxtp.make_mesh")
    return mesh


def _swap(model: nnx.Module, plan: Plan, sizes: Mapping[str, int], fsdp: bool) -> None:
    """Gives modules their classes, and parameters their declarations."""
    decisions = decide(find_modules(model), plan, sizes, fsdp)
    for decision in decisions:
        if decision.role is not None:
            swap_class(decision.found.module, decision.role)
    for parameter, spec in declarations(decisions):
        parameter.set_metadata(out_sharding=spec)


def _shardings(state: nnx.State, mesh: Mesh | AbstractMesh) -> nnx.State:
    """Returns the sharding of every array: as its variable declares; whole, if it does not."""

    def declared(leaf: Any) -> Any:
        metadata = leaf.get_metadata() if isinstance(leaf, nnx.Variable) else {}
        sharding = NamedSharding(mesh, PartitionSpec(*(metadata.get("out_sharding") or ())))
        return jax.tree.map(lambda _: sharding, leaf)

    return jax.tree.map(declared, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _put(value: Any, sharding: NamedSharding) -> Any:
    """Returns an array, abstract or traced or real, in its parts."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    if isinstance(value, Placeholder):
        return value
    if isinstance(value, jax.core.Tracer):
        return jax.lax.with_sharding_constraint(value, sharding)
    return jax.device_put(value, sharding)


def _initialise_sharded(build: Callable[[], Model], plan: Plan, mesh: Mesh | AbstractMesh, fsdp: bool) -> Model:
    creation = Creation(build)
    abstract = creation.abstract()
    _swap(abstract, plan, mesh_sizes(mesh), fsdp)
    graph, state = nnx.split(abstract)
    arrays = creation.run(tuple(jax.tree.leaves(_shardings(state, mesh))))
    return cast(Model, nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), arrays)))
