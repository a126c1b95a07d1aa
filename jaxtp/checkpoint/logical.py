"""Converts between padded arrays on a mesh and unpadded logical arrays.

A dim that tp does not divide is padded on the mesh. Checkpoints store logical shapes, so any mesh
can read them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax import Array, ShapeDtypeStruct
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxtp.config.hints import by_dotted_path, dotted
from jaxtp.layers.parameter import Padding, logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, axes_of, mesh_sizes, parts

# Arrays by dotted path, such as `model.blocks.mlp.down.kernel`
Arrays = dict[str, Array]
AbstractArrays = dict[str, ShapeDtypeStruct]

Variable = nnx.Variable[Any]


def may_be_infinite(variable: Variable) -> bool:
    """Returns whether a variable may be infinite, such as a mask.

    It may unless its class is jaxtp's own, or it is a parameter or a statistic.
    """
    return not (
        type(variable).__module__.startswith("jaxtp.")
        or isinstance(variable, nnx.Param | nnx.BatchStat)
    )


def named_variables(state: nnx.State) -> dict[str, Variable]:
    """Returns the variables of a state by dotted path; raises `UserError` if two share a path."""
    return by_dotted_path(nnx.to_flat_state(state))


def named_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the arrays of a state by dotted path."""
    return {name: variable[...] for name, variable in named_variables(state).items()}


def finite_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the `named_arrays` that must be finite.

    Others, such as masks, may be infinite (`may_be_infinite`).
    """
    variables = named_variables(state).items()
    return {name: v[...] for name, v in variables if not may_be_infinite(v)}


def select_paths(state: nnx.State, only: Callable[[str], bool]) -> nnx.State:
    """Returns the variables of a state whose dotted path `only` accepts."""
    return nnx.filter_state(state, lambda path, _: only(dotted(path)))


def replace_arrays(state: nnx.State, arrays: Arrays) -> nnx.State:
    """Returns a copy of a state, real or abstract, with these arrays."""
    variables = zip(nnx.to_flat_state(state), named_variables(state), strict=True)
    return nnx.from_flat_state(
        [(path, variable.replace(arrays[name])) for (path, variable), name in variables]
    )


def logical_size(state: nnx.State) -> int:
    """Returns the number of elements without padding."""
    return sum(map(math.prod, map(logical_shape, named_variables(state).values())))


def to_logical(state: nnx.State, mesh: Mesh) -> Arrays:
    """Returns arrays without padding, sharded as in `abstract_logical`."""
    sizes = mesh_sizes(mesh)
    arrays = {}
    for name, variable in named_variables(state).items():
        array = variable[...]
        if array.shape != logical_shape(variable):
            sharding = NamedSharding(mesh, logical_spec(variable, sizes))
            # JAX caches programs by function, so a lambda or `partial` would be compiled each time.
            run = jax.jit(unpad, static_argnums=(1, 2), out_shardings=sharding)
            array = run(array, padding_of(variable), sizes[TP])
        arrays[name] = array
    return arrays


def abstract_logical(state: nnx.State, mesh: Mesh) -> AbstractArrays:
    """Returns the logical shape, dtype and sharding of each array."""
    sizes = mesh_sizes(mesh)
    return {
        name: ShapeDtypeStruct(
            logical_shape(v), v.dtype, sharding=NamedSharding(mesh, logical_spec(v, sizes))
        )
        for name, v in named_variables(state).items()
    }


def from_logical(arrays: Arrays, state: nnx.State, mesh: Mesh) -> nnx.State:
    """Returns `state` with logical arrays, padded and sharded for `mesh`."""
    padded = {}
    for name, variable in named_variables(state).items():
        array = arrays[name]
        if array.shape != tuple(variable.get_raw_value().shape):
            sharding = NamedSharding(mesh, spec_of(variable))
            array = pad_array(array, padding_of(variable), sharding)
        padded[name] = array
    return replace_arrays(state, padded)


def padded_shape(shape: Sequence[int], padding: Padding, tp: int) -> list[int]:
    """Returns the shape of a logical array on a mesh that has `tp` devices along tp."""
    padded = list(shape)
    for dim, split in padding:
        padded[dim] = split.padded(tp)
    return padded


def split_dims(variable: Variable) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes that split each dim of a variable."""
    axes = tuple(map(axes_of, spec_of(variable)))
    return axes + ((),) * (len(variable.get_raw_value().shape) - len(axes))


def divisible_axes(
    shape: Sequence[int], axes: Sequence[tuple[str, ...]], sizes: Mapping[str, int]
) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each dim, so that they divide it.

    Axes that do not divide their dim move to another dim that they divide, or are dropped.
    """
    result = list(axes)
    indivisible = [dim for dim, size in enumerate(shape) if size % parts(sizes, result[dim])]
    for dim in indivisible:
        moving = result[dim]
        result[dim] = ()
        for other, size in enumerate(shape):
            if other not in indivisible and size % parts(sizes, result[other] + moving) == 0:
                result[other] += moving
                break
    return tuple(result)


def logical_spec(variable: Variable, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the spec of a variable's logical shape."""
    return PartitionSpec(*divisible_axes(logical_shape(variable), split_dims(variable), sizes))


def pad_array(array: Array, padding: Padding, sharding: Sharding) -> Array:
    """Returns a logical array, padded for the mesh of `sharding`."""
    assert isinstance(sharding, NamedSharding), "without a mesh nothing is padded"
    return jax.jit(pad, static_argnums=(1, 2), out_shardings=sharding)(
        array, padding, mesh_sizes(sharding.mesh)[TP]
    )
