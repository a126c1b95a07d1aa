"""Converts between the arrays of a mesh, which may be padded, and those of a checkpoint, which are not.

A size that tp does not divide is padded on that mesh. Checkpoints hold the logical shape, so that any mesh
can read them; no array is ever whole on one device, unless none of its other dims can be divided.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxtp.layers.parameter import Padding, cut, logical_shape, pad, padding_of, spec_of
from jaxtp.mesh import TP, axes_of, mesh_sizes, parts

Arrays = dict[str, Array]
"""Arrays by dotted path, such as `model.blocks.mlp.down.kernel`."""


def named_variables(state: nnx.State) -> dict[str, nnx.Variable[Any]]:
    """Returns the variables of a state by dotted path."""
    return {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}


def filled(state: nnx.State, arrays: Arrays) -> nnx.State:
    """Returns the variables of a state, real or abstract, with other arrays, which are given by dotted path."""
    variables = zip(nnx.to_flat_state(state), named_variables(state), strict=True)
    return nnx.from_flat_state([(path, variable.replace(arrays[name])) for (path, variable), name in variables])


def logical_size(state: nnx.State) -> int:
    """Returns the number of elements of a state, padding not counted."""
    return sum(math.prod(logical_shape(variable)) for variable in named_variables(state).values())


def to_logical(state: nnx.State, mesh: Mesh) -> Arrays:
    """Returns the arrays of a state without padding, sharded as `abstract_logical` says."""
    targets = abstract_logical(state, mesh)
    return {name: without_padding(variable, targets[name]) for name, variable in named_variables(state).items()}


def abstract_logical(state: nnx.State, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape, dtype and sharding of each array without padding; the state may be abstract."""
    return {name: _logical(variable, mesh) for name, variable in named_variables(state).items()}


def from_logical(arrays: Arrays, state: nnx.State, mesh: Mesh) -> nnx.State:
    """Fills a state of this mesh from logical arrays: padded with zeros, split as the state declares.

    Args:
      arrays: as `to_logical` gives them.
      state: the state to fill, real or abstract; it is not changed.
      mesh: the mesh of the result.
    """
    variables = named_variables(state)
    return filled(state, {name: with_padding(arrays[name], variables[name], mesh) for name in variables})


def split_dims(variable: nnx.Variable[Any]) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that a variable declares for each of its dims."""
    axes = [axes_of(entry) for entry in spec_of(variable)]
    return (*axes, *[()] * (len(variable.shape) - len(axes)))


def divided(
    shape: Sequence[int], axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each dim of an array; those that do not divide theirs move to one that they divide."""
    over = [tuple(names) for names in axes]
    odd = [dim for dim, size in enumerate(shape) if size % parts(sizes, over[dim])]
    for dim in odd:
        moving, over[dim] = over[dim], ()
        for other in (dim for dim in range(len(shape)) if dim not in odd):
            if shape[other] % parts(sizes, over[other] + moving) == 0:
                over[other] += moving
                break
    return tuple(over)


def logical_spec(variable: nnx.Variable[Any], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns how a variable is split once it has no padding."""
    return PartitionSpec(*divided(logical_shape(variable), split_dims(variable), sizes))


def _logical(variable: nnx.Variable[Any], mesh: Mesh) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, logical_spec(variable, mesh_sizes(mesh)))
    return jax.ShapeDtypeStruct(logical_shape(variable), variable.dtype, sharding=sharding)


# JAX keeps a program by its function: a lambda or a `partial` made here would be compiled anew at each call.
def without_padding(variable: nnx.Variable[Any], target: jax.ShapeDtypeStruct) -> Array:
    """Returns the array of a variable without padding, sharded as the target is."""
    array: Array = variable[...]
    if array.shape == target.shape:
        return array
    cut_to = jax.jit(cut, static_argnums=(1, 2), out_shardings=target.sharding)
    kept: Array = cut_to(array, padding_of(variable), mesh_sizes(target.sharding.mesh)[TP])
    return kept


def with_padding(array: Array, variable: nnx.Variable[Any], mesh: Mesh) -> Array:
    """Returns a logical array as a variable of this mesh holds it."""
    if array.shape == tuple(variable.shape):
        return array
    return padded(array, padding_of(variable), NamedSharding(mesh, spec_of(variable)))


def padded(array: Array, padding: Padding, sharding: Sharding) -> Array:
    """Returns a logical array with the padding of the mesh of a sharding, split by it."""
    assert isinstance(sharding, NamedSharding), "without a mesh nothing is padded"
    pad_to = jax.jit(pad, static_argnums=(1, 2), out_shardings=sharding)
    with_zeros: Array = pad_to(array, padding, mesh_sizes(sharding.mesh)[TP])
    return with_zeros
