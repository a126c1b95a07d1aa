"""The mesh that something is planned for, whose devices need not be there."""

from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtp.mesh import AXES, MeshError, check_sizes, describe_mesh, mesh_sizes

Meant = Mesh | AbstractMesh | Mapping[str, int] | None
"""A mesh, its sizes by axis, or None for the mesh in context."""


def sizes_of(mesh: Meant, caller: str) -> dict[str, int]:
    """Devices along each axis of the mesh that is meant; an axis that is left out has one.

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
    sizes = dict.fromkeys(AXES, 1) | dict(mesh) if isinstance(mesh, Mapping) else mesh_sizes(mesh)
    if unknown := sorted(map(str, sizes.keys() - set(AXES))):
        raise MeshError(f"{', '.join(unknown)}: no axis of a mesh; there are {', '.join(AXES)}")
    if odd := [f"{axis}={size!r}" for axis, size in sizes.items() if type(size) is not int]:
        raise MeshError(f"{', '.join(odd)}: a mesh axis is a whole number of devices")
    check_sizes(sizes)
    if -1 in sizes.values():
        raise MeshError(f"{describe_mesh(sizes)}: -1 is what is left of some devices, and here there need be none")
    return sizes


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """A mesh of these sizes without devices."""
    return AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
