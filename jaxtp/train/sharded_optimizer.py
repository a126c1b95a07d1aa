"""Applies any Optax transformation to a sharded model.

Optax sees parameters as a flat dict by dotted path, such as `blocks.mlp.up.kernel`; masks and
labels take this dict. A stack of layers is one array `[layers, ...]`. Arrays have their logical
shapes, or norms, factored moments and orthogonalization would depend on the mesh, which pads some
dims. Only `OnPaddedArrays` sees the stored arrays.

An array of the state is sharded like the parameter whose path is among its keys, dim by dim. Other
arrays, such as the state of `optax.flatten`, are replicated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath, keystr, tree_leaves_with_path, tree_map_with_path

from jaxtp.checkpoint.logical import (
    Arrays,
    Variable,
    divisible_axes,
    logical_spec,
    named_variables,
    split_dims,
)
from jaxtp.collectives import axis_size, constrain
from jaxtp.config.entry import UserError
from jaxtp.config.hints import by_dotted_path
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, current_mesh, mesh_sizes


class OptimizerState(Variable):
    """An array of an Optax state, as a checkpoint stores it.

    A typed PRNG key is its data, with the metadata `key_impl`; an empty array is a zero, with
    `empty_shape`.
    """


class OnPaddedArrays(optax.GradientTransformationExtraArgs):
    """A transformation whose updates padding does not change. It sees arrays as they are stored.

    Its `update` may take `variables`, the parameters with their specs and padding.
    """


class Optimizer(nnx.Module):
    """`nnx.Optimizer` for sharded and padded parameters.

    `update` passes `value` and `grad` to transformations with extra arguments. Transformations that
    evaluate the loss themselves (`value_fn` of line searches, `obj_fn` of Sophia) are refused.

    Args:
      model: only its `nnx.Param` variables are updated.
      transformation: or an `optax.MultiSteps`.

    Raises:
      ConfigError: the transformation cannot update this model; also while `__init__` is only
        traced.
    """

    def __init__(
        self, model: nnx.Module, transformation: optax.GradientTransformation | optax.MultiSteps
    ):
        if isinstance(transformation, optax.MultiSteps):
            transformation = transformation.gradient_transformation()
        if not isinstance(transformation, optax.GradientTransformation):
            raise ConfigError(
                f"the optimizer is {transformation!r}: should be an Optax transformation, such as "
                "optax.adamw(3e-4)"
            )
        self.transformation = transformation
        self.sees_padding = isinstance(transformation, OnPaddedArrays)
        self.step = OptimizerState(jnp.zeros((), jnp.int32))  # signed: schedules subtract from it
        variables = _parameters(model)
        params = self._optax_arrays(variables, variables)

        def variable(path: KeyPath, leaf: Any) -> OptimizerState:
            array = _as_array(path, leaf)
            metadata = _sharding_metadata(
                array.shape, _parameter_at(path, variables), self.sees_padding
            )
            if _is_key(leaf):
                metadata["key_impl"] = jax.random.key_impl(leaf)
            elif not jnp.size(leaf):
                metadata["empty_shape"] = jnp.shape(leaf)
            return OptimizerState(array, **metadata)

        with _explained("init"):
            self.opt_state = nnx.data(tree_map_with_path(variable, transformation.init(params)))
        if not self.sees_padding:  # an error of the first step comes before anything is allocated
            with _explained("update"):
                jax.eval_shape(
                    lambda: self._transform(params, params, value=jnp.zeros(()), grad=params)
                )

    def update(self, model: nnx.Module, grads: nnx.State, value: Array) -> None:
        """Applies gradients, a state like the model's parameters; `value` is the mean loss."""
        variables = _parameters(model)
        params = self._optax_arrays(variables, variables)
        gradients = self._optax_arrays(named_variables(grads), variables)
        extra = (
            {"variables": variables} if self.sees_padding else {"value": value, "grad": gradients}
        )
        updates, state = self._transform(gradients, params, **extra)
        jax.tree.map(
            lambda v, array: v.set_value(array), self.opt_state, state, is_leaf=_is_variable
        )
        self._write(optax.apply_updates(params, updates), variables)
        self.step.set_value(self.step[...] + 1)

    def optax_state(self) -> optax.OptState:
        """Returns the state in the transformation's structure."""
        return jax.tree.map(_leaf, self.opt_state, is_leaf=_is_variable)

    def _transform(
        self, gradients: Arrays, params: Arrays, **extra: object
    ) -> tuple[Arrays, optax.OptState]:
        # Returns updates and the new state as arrays, checked: Optax and JAX would broadcast and
        # promote.
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(gradients, self.optax_state(), params, **extra)
        state = tree_map_with_path(_as_array, state)
        _require_same("the optimizer's update of", updates, params, jnp.shape)
        what = "after an update the optimizer's state at"

        def kind(array: Array) -> str:
            return f"{array.dtype}{list(array.shape)}"

        _require_same(what, state, self.opt_state, kind)
        return updates, state

    def _optax_arrays(self, arrays: dict[str, Variable], owners: dict[str, Variable]) -> Arrays:
        found = {name: jnp.asarray(variable[...]) for name, variable in arrays.items()}
        for name, array in found.items() if not self.sees_padding else ():
            owner = owners[name]
            if array.shape != logical_shape(owner):
                whole = unpad(array, padding_of(owner), axis_size(TP))
                found[name] = constrain(whole, logical_spec(owner, mesh_sizes(current_mesh())))
        return found

    def _write(self, params: Arrays, variables: dict[str, Variable]) -> None:
        for name, variable in variables.items():
            array = params[name]
            if array.shape != tuple(variable.shape):
                array = constrain(
                    pad(array, padding_of(variable), axis_size(TP)), spec_of(variable)
                )
            variable.set_value(array)


@contextmanager
def _explained(function: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ConfigError(
            f"the optimizer's {function} raises {type(error).__name__}: {error}\nIt sees the "
            "parameters as a flat dict by path. Its extra arguments are value, the mean loss, and "
            "grad, its gradient; there is no value_fn."
        ) from error


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, OptimizerState)


def _is_key(leaf: object) -> bool:
    return isinstance(leaf, Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_array(path: KeyPath, leaf: Any) -> Array:
    # As `OptimizerState` stores it; not weakly typed, or the second step would compile again.
    try:
        array = jnp.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    except (TypeError, ValueError):
        array = None
    if array is None or array.dtype.itemsize > 4:
        what = repr(leaf) if array is None else f"a {array.dtype} array"
        raise ConfigError(
            f"the optimizer's state at {_name(path)} is {what}: should be a number, a random key, "
            "or an array of at most 4 bytes per element, so that checkpoints hold it"
        )
    return array.astype(array.dtype) if array.size else jnp.zeros((), array.dtype)


def _leaf(variable: OptimizerState) -> Array:
    array: Array = variable[...]
    metadata = variable.get_metadata()
    if "key_impl" in metadata:
        return jax.random.wrap_key_data(array, impl=metadata["key_impl"])
    return jnp.zeros(metadata["empty_shape"], array.dtype) if "empty_shape" in metadata else array


def _name(path: KeyPath) -> str:
    return keystr(path, simple=True, separator=".")


def _require_same(
    what: str, actual: object, expected: object, describe: Callable[[Any], object]
) -> None:
    found, wanted = (
        {path: describe(leaf) for path, leaf in tree_leaves_with_path(tree, is_leaf=_is_variable)}
        for tree in (actual, expected)
    )
    for path in wanted | found:
        if (is_now := found.get(path, "absent")) != (was := wanted.get(path, "absent")):
            raise ConfigError(f"{what} {_name(path)} is {is_now}, not {was}")


def _parameters(model: nnx.Module) -> dict[str, Variable]:
    # The variables themselves, not copies.
    return by_dotted_path(
        (path, value) for path, value in nnx.iter_graph(model) if isinstance(value, nnx.Param)
    )


def _parameter_at(path: KeyPath, params: dict[str, Variable]) -> Variable | None:
    # The innermost key: a group of `optax.multi_transform` may have the name of a parameter.
    keys = (getattr(key, "key", None) for key in reversed(path))
    return next((params[key] for key in keys if isinstance(key, str) and key in params), None)


def _sharding_metadata(
    shape: tuple[int, ...], owner: Variable | None, padded: bool
) -> dict[str, Any]:
    # `nnx.Optimizer` would give every array the parameter's spec, which does not fit factored
    # moments.
    whole: tuple[int, ...] = (
        () if owner is None else tuple(owner.shape) if padded else logical_shape(owner)
    )
    axes = () if owner is None else split_dims(owner)
    shared = _shared_dims(shape, whole)
    kept = [axes[shared[dim]] if dim in shared else () for dim in range(len(shape))]
    # A dim that the parameter lacks, as in statistics [n, n] of a matrix [m, n], takes the axes
    # that are left.
    left = [names for dim, names in enumerate(axes) if dim not in shared.values()]
    for dim in reversed(range(len(shape))):
        if left and dim not in shared:
            kept[dim] = left.pop()
    spec = PartitionSpec(*divisible_axes(shape, kept, mesh_sizes(current_mesh())))
    padding = padding_of(owner) if owner is not None and padded and shape == whole else ()
    metadata = {"out_sharding": spec, "eager_sharding": current_mesh() is not None}
    return metadata | ({"padding": padding} if padding else {})


def _shared_dims(shape: tuple[int, ...], whole: tuple[int, ...]) -> dict[int, int]:
    # The longest common subsequence, the last of several: the dim in `whole` for each of its dims
    # in `shape`.
    dims = range(len(shape))[::-1]
    others = range(len(whole))[::-1]
    for length in range(min(len(shape), len(whole)), 0, -1):
        for here, there in product(combinations(dims, length), combinations(others, length)):
            if all(shape[dim] == whole[other] for dim, other in zip(here, there, strict=True)):
                return dict(zip(here, there, strict=True))
    return {}
