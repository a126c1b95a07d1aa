"""An Optax transformation with its state on the mesh, each array split like the parameter that it belongs to."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.checkpoint.logical import named_variables
from jaxtp.layers.parameter import logical_shape

Arrays = dict[str, Array]
"""Arrays by dotted path of the parameter; what the transformation sees as its parameters and gradients."""


class OptimizerState(nnx.Variable[Any]):
    """An array of an Optax state."""


class Optimizer(nnx.Module):
    """`nnx.Optimizer` for states whose arrays need not have the parameters' shapes (factored moments, for one).

    Args:
      model: whose parameters are updated.
      transformation: sees them as a dict by dotted path.
      kind: the variables that are; all others stay as they are.
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
        state = transformation.init(_arrays(params))
        self.opt_state = nnx.data(
            jax.tree_util.tree_map_with_path(lambda path, leaf: _variable(leaf, _owner(path, params)), state)
        )

    def update(self, model: nnx.Module, grads: nnx.State) -> None:
        """Applies gradients, a state like the model's parameters, to the model and to this state."""
        variables = _parameters(model, self.kind)
        params = _arrays(variables)
        state = jax.tree.map(lambda v: v[...], self.opt_state, is_leaf=_is_variable)
        updates, state = self.transformation.update(_arrays(named_variables(grads)), state, params)
        jax.tree.map(lambda v, array: v.set_value(array), self.opt_state, state, is_leaf=_is_variable)
        updated = optax.apply_updates(params, updates)
        for name, variable in variables.items():
            variable.set_value(updated[name])
        self.step.set_value(self.step[...] + 1)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, OptimizerState)


def _arrays(variables: dict[str, nnx.Variable[Any]]) -> Arrays:
    return {name: jnp.asarray(variable[...]) for name, variable in variables.items()}


def _parameters(model: nnx.Module, kind: type[nnx.Param[Any]]) -> dict[str, nnx.Variable[Any]]:
    """The model's own parameters, not copies of them, by dotted path."""
    return {
        ".".join(map(str, path)): variable for path, variable in nnx.iter_graph(model) if isinstance(variable, kind)
    }


def _owner(path: tuple[Any, ...], params: dict[str, nnx.Variable[Any]]) -> nnx.Variable[Any] | None:
    """The parameter that an array of an Optax state belongs to, by the key on its path."""
    keys = (getattr(key, "key", None) for key in path)
    return next((params[key] for key in keys if isinstance(key, str) and key in params), None)


def _variable(leaf: Array, owner: nnx.Variable[Any] | None) -> OptimizerState:
    metadata = {} if owner is None else _declaration(leaf.shape, owner)
    return OptimizerState(leaf, **metadata)


def _declaration(shape: tuple[int, ...], owner: nnx.Variable[Any]) -> dict[str, Any]:
    """The parameter's spec and logical shape, without the dim that a factored moment has averaged away."""
    stored, logical = tuple(owner.shape), logical_shape(owner)
    spec = tuple(owner.get_metadata().get("out_sharding") or ())
    spec += (None,) * (len(stored) - len(spec))
    kept = [tuple(range(len(stored)))]
    kept += [tuple(d for d in kept[0] if d != averaged) for averaged in kept[0]]
    for dims in kept:
        if tuple(stored[d] for d in dims) == shape:
            eager = owner.get_metadata().get("eager_sharding", False)
            return {
                "out_sharding": PartitionSpec(*(spec[d] for d in dims)),
                "logical_shape": tuple(logical[d] for d in dims),
                "eager_sharding": eager,
            }
    return {}
