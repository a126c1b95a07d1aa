"""Between the arrays of a mesh, which may be padded, and those of a checkpoint, which are not.

A vocabulary that tp does not divide is padded on that mesh. Checkpoints hold the logical shape, so that any mesh
can read them; no array is ever whole on one device, unless none of its other dims can be divided.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import axes_of, mesh_sizes

Arrays = dict[str, Array]
"""Arrays by dotted path, such as `model.blocks.mlp.down.kernel`."""


def named_variables(state: nnx.State) -> dict[str, nnx.Variable[Any]]:
    """The variables of a state by dotted path."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def filled(state: nnx.State, arrays: Arrays) -> nnx.State:
    """Returns the variables of a state, real or abstract, with other arrays, which are given by dotted path."""
    variables = zip(nnx.to_flat_state(state), named_variables(state), strict=True)
    return nnx.from_flat_state([(path, variable.replace(arrays[name])) for (path, variable), name in variables])


def logical_size(state: nnx.State) -> int:
    """Elements of a state, padding not counted."""
    return sum(math.prod(logical_shape(variable)) for variable in named_variables(state).values())


def to_logical(state: nnx.State, mesh: Mesh) -> Arrays:
    """The arrays of a state without padding, sharded as `abstract_logical` says."""
    targets = abstract_logical(state, mesh)
    return {name: _cut(variable[...], targets[name]) for name, variable in named_variables(state).items()}


def abstract_logical(state: nnx.State, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of each array without padding; the state may be abstract."""
    return {
        name: jax.ShapeDtypeStruct(logical_shape(variable), variable.dtype, sharding=_logical_sharding(variable, mesh))
        for name, variable in named_variables(state).items()
    }


def from_logical(arrays: Arrays, state: nnx.State, mesh: Mesh) -> nnx.State:
    """Fills a state of this mesh from logical arrays: padded with zeros, split as the state declares.

    Args:
      arrays: as `to_logical` gives them.
      state: the state to fill, real or abstract; it is not changed.
      mesh: the mesh of the result.
    """
    padded = {
        name: _pad(arrays[name], variable.shape, NamedSharding(mesh, spec(variable)))
        for name, variable in named_variables(state).items()
    }
    return filled(state, padded)


def spec(variable: nnx.Variable[Any]) -> PartitionSpec:
    """The `PartitionSpec` that a variable declares; replicated if it declares none."""
    return PartitionSpec(*(variable.get_metadata().get("out_sharding") or ()))


def _logical_sharding(variable: nnx.Variable[Any], mesh: Mesh) -> NamedSharding:
    """The variable's own sharding; the axes of a padded dim move to one that they divide."""
    logical, stored = logical_shape(variable), tuple(variable.shape)
    axes = [axes_of(entry) for entry in spec(variable)]
    axes += [()] * (len(stored) - len(axes))
    padded = [dim for dim in range(len(stored)) if logical[dim] != stored[dim]]
    sizes = mesh_sizes(mesh)
    for dim in padded:
        moving, axes[dim] = axes[dim], ()
        for other in set(range(len(stored))) - set(padded):
            if logical[other] % math.prod(sizes[axis] for axis in axes[other] + moving) == 0:
                axes[other] += moving
                break
    return NamedSharding(mesh, PartitionSpec(*axes))


# JAX keeps a program by its function: a lambda or a `partial` made here would be compiled anew at each call.
def _cut(array: Array, target: jax.ShapeDtypeStruct) -> Array:
    if array.shape == target.shape:
        return array
    slice_to = jax.jit(jax.lax.slice, static_argnums=(1, 2), out_shardings=target.sharding)
    cut: Array = slice_to(array, (0,) * array.ndim, target.shape)
    return cut


def _pad(array: Array, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
    if array.shape == tuple(shape):
        return array
    widths = tuple((0, stored - logical) for stored, logical in zip(shape, array.shape, strict=True))
    padded: Array = jax.jit(jnp.pad, static_argnums=1, out_shardings=sharding)(array, widths)
    return padded
