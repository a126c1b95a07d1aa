"""An Optax transformation with its state on the mesh, each array split like the parameter that it belongs to.

Optax sees the parameters as a dict by dotted path. Each array of its state is split like the parameter under whose path
it is, without the dim that a factored moment has averaged away; `nnx.Optimizer` would give such a moment the
parameter's own spec, which does not fit. A rule whose result depends on shapes, as adafactor's means do, sees arrays
without padding (`OnLogicalShapes`), so that its state and its updates are the same on every mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.checkpoint.logical import divided, logical_spec, named_variables, split_dims
from jaxtp.collectives import axis_size, constrain
from jaxtp.layers.parameter import cut, logical_shape, pad, padding_of, spec_of
from jaxtp.mesh import TP, current_mesh, mesh_sizes

OPTIMIZER_SCOPE = "optimizer"
"""Name of the module that the update's collectives belong to."""

Arrays = dict[str, Array]
"""Arrays by dotted path of the parameter, as the transformation sees its parameters and gradients."""


class OptimizerState(nnx.Variable[Any]):
    """An array of an Optax state."""


class OnLogicalShapes(optax.GradientTransformationExtraArgs):
    """A transformation whose results depend on shapes, such as one that averages over rows: it sees arrays without
    padding, so that they are the same on every mesh."""


class Optimizer(nnx.Module):
    """`nnx.Optimizer` for states whose arrays need not have the parameters' shapes (factored moments, for one).

    Args:
      model: the model whose parameters are updated.
      transformation: sees the parameters as a dict by dotted path; its `update` may take them as `variables`, which
        say how they are split and padded.
      kind: type of the variables that are updated; all others stay as they are.
    """

    def __init__(
        self,
        model: nnx.Module,
        transformation: optax.GradientTransformation,
        kind: type[nnx.Param[Any]] = nnx.Param,
    ):
        self.transformation = transformation
        self.kind = kind
        self.step = OptimizerState(jnp.zeros((), jnp.int32))  # signed: schedules subtract from it
        params = _parameters(model, kind)
        state = transformation.init(self._seen(params, params))
        logical = isinstance(transformation, OnLogicalShapes)
        self.opt_state = nnx.data(
            jax.tree_util.tree_map_with_path(lambda path, leaf: _variable(leaf, _owner(path, params), logical), state)
        )

    def update(self, model: nnx.Module, grads: nnx.State) -> None:
        """Applies gradients, a state like the model's parameters, to the model and to this state."""
        variables = _parameters(model, self.kind)
        params = self._seen(variables, variables)
        state = jax.tree.map(lambda v: v[...], self.opt_state, is_leaf=_is_variable)
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(self._seen(named_variables(grads), variables), state, params, variables=variables)
        jax.tree.map(lambda v, array: v.set_value(array), self.opt_state, state, is_leaf=_is_variable)
        updated = optax.apply_updates(params, updates)
        for name, variable in variables.items():
            variable.set_value(self._stored(updated[name], variable))
        self.step.set_value(self.step[...] + 1)

    def _seen(self, arrays: dict[str, nnx.Variable[Any]], owners: dict[str, nnx.Variable[Any]]) -> Arrays:
        """Returns the arrays of parameters, or of their gradients, as the transformation sees them."""
        found = {name: jnp.asarray(variable[...]) for name, variable in arrays.items()}
        if not isinstance(self.transformation, OnLogicalShapes):
            return found
        tp, sizes = axis_size(TP), mesh_sizes(current_mesh())
        return {
            name: constrain(cut(array, padding, tp), logical_spec(owners[name], sizes))
            if (padding := padding_of(owners[name])) and array.shape != logical_shape(owners[name])
            else array
            for name, array in found.items()
        }

    def _stored(self, array: Array, owner: nnx.Variable[Any]) -> Array:
        """Returns an updated parameter as its variable holds it."""
        if array.shape == tuple(owner.shape):
            return array
        return constrain(pad(array, padding_of(owner), axis_size(TP)), spec_of(owner))


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, OptimizerState)


def _parameters(model: nnx.Module, kind: type[nnx.Param[Any]]) -> dict[str, nnx.Variable[Any]]:
    """Returns the model's own parameters, not copies of them, by dotted path."""
    return {
        ".".join(map(str, path)): variable for path, variable in nnx.iter_graph(model) if isinstance(variable, kind)
    }


def _owner(path: tuple[Any, ...], params: dict[str, nnx.Variable[Any]]) -> nnx.Variable[Any] | None:
    """Returns the parameter that an array of an Optax state belongs to, by the key on its path."""
    keys = (getattr(key, "key", None) for key in path)
    return next((params[key] for key in keys if isinstance(key, str) and key in params), None)


def _variable(leaf: Array, owner: nnx.Variable[Any] | None, logical: bool) -> OptimizerState:
    metadata = {} if owner is None else _declaration(leaf.shape, owner, logical)
    return OptimizerState(leaf, **metadata)


def _declaration(shape: tuple[int, ...], owner: nnx.Variable[Any], logical: bool) -> dict[str, Any]:
    """Returns the parameter's spec and padding, without the dim that a factored moment has averaged away."""
    whole = logical_shape(owner) if logical else tuple(owner.shape)
    axes, every = split_dims(owner), tuple(range(len(whole)))
    for dims in (every, *(tuple(d for d in every if d != averaged) for averaged in every)):
        if tuple(whole[d] for d in dims) == shape:
            kept = [axes[d] for d in dims]
            padding = tuple(
                (dims.index(len(whole) + dim) - len(dims), split)
                for dim, split in padding_of(owner)
                if not logical and len(whole) + dim in dims
            )
            return {
                "out_sharding": PartitionSpec(*divided(shape, kept, mesh_sizes(current_mesh()))),
                "eager_sharding": owner.get_metadata().get("eager_sharding", False),
                **({"padding": padding} if padding else {}),
            }
    return {}
