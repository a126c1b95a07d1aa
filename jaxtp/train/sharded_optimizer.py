"""Applies any Optax transformation to a sharded model.

Optax sees parameters as a flat dict by dotted path, such as `blocks.mlp.up.kernel`; masks and
labels get this dict. A stack of layers is one array `[layers, ...]`. Arrays have their logical
shapes: the mesh pads some dims, and norms, factored moments and orthogonalization must not depend
on the mesh. Only `OnPaddedArrays` sees the padded arrays.

An array of the state is sharded like the parameter whose path is among its keys: from the last dim
on, each dim is split like the parameter's next dim of its size, so factored moments keep the shards
of their dims. Other dims and arrays, such as the state of `optax.flatten`, are replicated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from jaxtp.config.hints import by_dotted_path, dotted
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, current_mesh, mesh_sizes

Variables = dict[str, Variable]  # Variables by dotted path


class OptimizerState(Variable):
    """An array of an Optax state, as a checkpoint stores it.

    A typed PRNG key is stored as its data, with the metadata `key_impl`. An empty array is stored
    as a zero, with `empty_shape`.
    """


class OnPaddedArrays(optax.GradientTransformationExtraArgs):
    """A transformation that padding cannot affect, so it runs on the padded arrays.

    Its `update` may take `variables`, the parameters with their specs and padding.
    """


class Optimizer(nnx.Module):
    """`nnx.Optimizer` for sharded and padded parameters.

    `update` passes `value` and `grad` to transformations with extra arguments. Transformations that
    evaluate the loss themselves (`value_fn` of line searches, `obj_fn` of Sophia) are refused.

    Args:
      model: the model whose `nnx.Param` variables are updated.
      transformation: an Optax transformation, or an `optax.MultiSteps`.

    Raises:
      ConfigError: the transformation cannot update this model; a trace of `__init__` raises it too.
    """

    def __init__(
        self, model: nnx.Module, transformation: optax.GradientTransformation | optax.MultiSteps
    ):
        if isinstance(transformation, optax.MultiSteps):
            transformation = transformation.gradient_transformation()
        if not isinstance(transformation, optax.GradientTransformation):
            raise ConfigError(
                "the optimizer must be an Optax transformation, such as optax.adamw(3e-4), not "
                f"{transformation!r}"
            )
        self.transformation = transformation
        self.sees_padding = isinstance(transformation, OnPaddedArrays)
        # Signed, because schedules subtract from the step
        self.step = OptimizerState(jnp.zeros((), jnp.int32))
        variables = _parameters(model)
        params = self._optax_arrays(variables, variables)

        def variable(path: KeyPath, leaf: Any) -> OptimizerState:
            array = _as_array(path, leaf)
            keys = [getattr(key, "key", None) for key in path]
            owner = _parameter_at(keys, variables)
            metadata = _sharding_metadata(array.shape, owner, self.sees_padding)
            if _is_key(leaf):
                metadata["key_impl"] = jax.random.key_impl(leaf)
            elif not jnp.size(leaf):
                metadata["empty_shape"] = jnp.shape(leaf)
            return OptimizerState(array, **metadata)

        with _explained("init"):
            self.opt_state = nnx.data(tree_map_with_path(variable, transformation.init(params)))
        if not self.sees_padding:
            # Raises an error of the first step before anything is allocated.
            with _explained("update"):
                jax.eval_shape(
                    lambda: self._transform(params, params, value=jnp.zeros(()), grad=params)
                )

    def update(self, model: nnx.Module, grads: nnx.State, value: Array) -> None:
        """Updates the model's parameters, given their gradients and the mean loss, `value`."""
        variables = _parameters(model)
        params = self._optax_arrays(variables, variables)
        gradients = self._optax_arrays(named_variables(grads), variables)
        extra: dict[str, object] = {"value": value, "grad": gradients}
        if self.sees_padding:
            extra = {"variables": variables}
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
        # Checks shapes and dtypes, because Optax and JAX would broadcast and promote.
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(gradients, self.optax_state(), params, **extra)
        state = tree_map_with_path(_as_array, state)
        _require_same("the optimizer's update of", updates, params, jnp.shape)

        def kind(array: Array) -> str:
            return f"{array.dtype}{list(array.shape)}"

        _require_same("after an update the optimizer's state at", state, self.opt_state, kind)
        return updates, state

    def _optax_arrays(self, arrays: Variables, owners: Variables) -> Arrays:
        return {name: self._optax_array(arrays[name], owners[name]) for name in arrays}

    def _optax_array(self, variable: Variable, owner: Variable) -> Array:
        array = jnp.asarray(variable[...])
        if self.sees_padding or array.shape == logical_shape(owner):
            return array
        logical = unpad(array, padding_of(owner), axis_size(TP))
        return constrain(logical, logical_spec(owner, mesh_sizes(current_mesh())))

    def _write(self, params: Arrays, variables: Variables) -> None:
        for name, variable in variables.items():
            array = params[name]
            if array.shape != tuple(variable.shape):
                padded = pad(array, padding_of(variable), axis_size(TP))
                array = constrain(padded, spec_of(variable))
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
    # As `OptimizerState` stores it
    try:
        array = jnp.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    except (TypeError, ValueError):
        raise _not_an_array(path, repr(leaf)) from None
    if array.dtype.itemsize > 4:
        raise _not_an_array(path, f"a {array.dtype} array")
    # The cast removes a weak type, with which the second step would compile again.
    return array.astype(array.dtype) if array.size else jnp.zeros((), array.dtype)


def _not_an_array(path: KeyPath, description: str) -> ConfigError:
    return ConfigError(
        f"the optimizer's state at {_name(path)} is {description}; it must be a number, a random "
        "key, or an array of at most 4 bytes per element, so that checkpoints can hold it"
    )


def _leaf(variable: OptimizerState) -> Array:
    array: Array = variable[...]
    metadata = variable.get_metadata()
    if "key_impl" in metadata:
        return jax.random.wrap_key_data(array, impl=metadata["key_impl"])
    if "empty_shape" in metadata:
        return jnp.zeros(metadata["empty_shape"], array.dtype)
    return array


def _name(path: KeyPath) -> str:
    return keystr(path, simple=True, separator=".")


def _require_same(
    subject: str, actual: object, expected: object, describe: Callable[[Any], object]
) -> None:
    def described(tree: object) -> dict[KeyPath, object]:
        leaves = tree_leaves_with_path(tree, is_leaf=_is_variable)
        return {path: describe(leaf) for path, leaf in leaves}

    after = described(actual)
    before = described(expected)
    for path in before | after:
        now = after.get(path, "absent")
        was = before.get(path, "absent")
        if now != was:
            raise ConfigError(f"{subject} {_name(path)} is {now}, not {was}")


def _parameters(model: nnx.Module) -> Variables:
    # Returns the variables themselves, not copies.
    return by_dotted_path(
        (path, value) for path, value in nnx.iter_graph(model) if isinstance(value, nnx.Param)
    )


def _parameter_at(path: Sequence[object], params: Variables) -> Variable | None:
    # Takes the innermost key, because a group of `optax.multi_transform` may have the name of a
    # parameter.
    return next(
        (params[key] for key in reversed(path) if isinstance(key, str) and key in params), None
    )


def _sharding_metadata(
    shape: tuple[int, ...], owner: Variable | None, padded: bool
) -> dict[str, Any]:
    # `nnx.Optimizer` would give every array the parameter's spec, which does not fit factored
    # moments.
    metadata: dict[str, Any] = {"eager_sharding": current_mesh() is not None}
    if owner is None:
        return metadata | {"out_sharding": PartitionSpec()}
    owner_shape = tuple(owner.shape) if padded else logical_shape(owner)
    if padded and shape == owner_shape and padding_of(owner):
        metadata["padding"] = padding_of(owner)
    owner_axes = split_dims(owner)
    axes: list[tuple[str, ...]] = [()] * len(shape)
    end = len(owner_shape)
    for dim in reversed(range(len(shape))):
        same_size = [place for place in range(end) if owner_shape[place] == shape[dim]]
        if same_size:
            end = same_size[-1]
            axes[dim] = owner_axes[end]
    spec = PartitionSpec(*divisible_axes(shape, axes, mesh_sizes(current_mesh())))
    return metadata | {"out_sharding": spec}


def replicated_bytes(state: nnx.State) -> dict[str, int]:
    """Returns the bytes of the optimizer's arrays that are replicated, unlike their parameters.

    Args:
      state: an abstract `TrainState`, with its shardings.
    """
    params = named_variables(state["model"])
    any_split = any(map(_is_split, params.values()))
    replicated = {}
    for path, variable in nnx.to_flat_state(state["optimizer"]):
        owner = _parameter_at(path, params)
        is_owner_split = any_split if owner is None else _is_split(owner)
        if variable.size > 1 and is_owner_split and not _is_split(variable):
            replicated[dotted(path[1:])] = variable.size * variable.dtype.itemsize
    return replicated


def _is_split(variable: Variable) -> bool:
    shape = tuple(variable.shape)
    return variable.sharding.shard_shape(shape) != shape
