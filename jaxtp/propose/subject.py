"""Model, call and mesh for which a plan is proposed, tried and explained; none of them needs devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from jaxtp.mesh import AXES, MeshError, check_sizes, describe_mesh, mesh_sizes, sized
from jaxtp.parallel.calls import with_calls
from jaxtp.parallel.initialisation import abstract_model

Meant = Mesh | AbstractMesh | Mapping[str, int] | None
"""A mesh, its sizes by axis, or None for the mesh in context."""

Program = Callable[[nnx.State, list[Any]], Any]
"""A function of the state of a model and the arrays among its inputs."""


@dataclass(frozen=True)
class Subject:
    """An abstract model and one call of it."""

    model: nnx.Module
    """Is never changed."""

    arrays: list[jax.ShapeDtypeStruct]
    """The arrays among the inputs."""

    run: Callable[[nnx.Module, list[Any]], Any]
    """The call, of a model and the arrays."""

    def program(self, model: nnx.Module, wrap: Callable[..., Any] | None = None) -> tuple[Program, nnx.State]:
        """Returns the call as a function of a model's state and the arrays, and this state.

        Args:
          model: the subject's, parallel or not. What is run is a copy, with variables of its own, which may change.
          wrap: wraps the calls of its modules, as in `with_calls`.
        """
        graph, state = nnx.split(model)

        def program(state: nnx.State, arrays: list[Any]) -> Any:
            copy = nnx.merge(graph, state, copy=True)
            return self.run(with_calls(copy, wrap) if wrap else copy, arrays)

        return program, state


def subject_of(model: Any, inputs: tuple[Any, ...], call: Callable[..., Any] | None) -> Subject:
    """Returns the subject of `call(model, *inputs)`.

    Args:
      model: an `nnx.Module`, real or abstract, or a function of no arguments that makes one.
      inputs: pytrees of arrays, `jax.ShapeDtypeStruct`s, and anything else, which is passed as it is.
      call: by default `model(*inputs)`.

    Raises:
      PlanError: `model` is neither.
    """
    leaves, tree = jax.tree.flatten(inputs)

    def run(model: Any, arrays: list[Any]) -> Any:
        given = iter(arrays)
        filled = jax.tree.unflatten(tree, [next(given) if _is_array(leaf) else leaf for leaf in leaves])
        return call(model, *filled) if call else model(*filled)

    arrays = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves if _is_array(leaf)]
    return Subject(abstract_model(model), arrays, run)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") and hasattr(value, "dtype")


def sizes_of(mesh: Meant, caller: str) -> dict[str, int]:
    """Returns the devices along each axis of the mesh that is meant; an axis that is left out has one.

    Args:
      mesh: what the caller was given.
      caller: its name, for messages.

    Raises:
      MeshError: there is no mesh, or a size is no positive number of devices.
    """
    if mesh is None and (mesh := jax.sharding.get_abstract_mesh()).empty:
        raise MeshError(f'{caller} needs a mesh: call it under jax.set_mesh(...), or say mesh={{"tp": 8}}')
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping):
        raise MeshError(f'{caller} takes a mesh, or its sizes as in mesh={{"fsdp": 2, "tp": 4}}, not {mesh!r}')
    sizes = {**sized(), **mesh} if isinstance(mesh, Mapping) else mesh_sizes(mesh)
    if unknown := sorted(map(str, sizes.keys() - set(AXES))):
        raise MeshError(f"{', '.join(unknown)}: no axis of a mesh; there are {', '.join(AXES)}")
    if odd := [f"{axis}={size!r}" for axis, size in sizes.items() if type(size) is not int]:
        raise MeshError(f"{', '.join(odd)}: a mesh axis is a whole number of devices")
    check_sizes(sizes)
    if -1 in sizes.values():
        raise MeshError(f"{describe_mesh(sizes)}: -1 is what is left of some devices, and here there need be none")
    return sizes
