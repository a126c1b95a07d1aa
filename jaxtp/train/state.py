"""The train state: model, optimizer and counters, initialized sharded.

Optax sees parameters as a dict by dotted path. Each array of its state is sharded like the parameter at its path. A
rule that depends on shapes, such as adafactor, sees arrays without padding (`OnLogicalShapes`), so that its state and
updates are the same on every mesh.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from jaxtp.checkpoint.logical import (
    Arrays,
    Variable,
    divisible_axes,
    logical_size,
    logical_spec,
    named_variables,
    split_dims,
)
from jaxtp.collectives import axis_size, constrain
from jaxtp.config.schema import ConfigError
from jaxtp.layers.parameter import logical_shape, pad, padding_of, spec_of, unpad
from jaxtp.mesh import TP, current_mesh, mesh_sizes
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import create_decoder

OPTIMIZER_SCOPE = "optimizer"
"""Named scope of the update, which accounts for its collectives."""

MakeModel = Callable[[nnx.Rngs], nnx.Module]
"""Returns a model with random weights."""


class OptimizerState(nnx.Variable[Any]):
    """An array of an Optax state."""


class OnLogicalShapes(optax.GradientTransformationExtraArgs):
    """A transformation that sees arrays without padding."""


class Optimizer(nnx.Module):
    """`nnx.Optimizer` for states with other shapes than the parameters, such as factored moments.

    Args:
      model: only its `nnx.Param` variables are updated.
      transformation: its `update` may take `variables`, which have specs and padding.
    """

    def __init__(self, model: nnx.Module, transformation: optax.GradientTransformation):
        self.transformation = transformation
        self.step = OptimizerState(jnp.zeros((), jnp.int32))  # signed: schedules subtract from it
        params = _parameters(model)
        state = transformation.init(self._optax_arrays(params, params))
        logical = isinstance(transformation, OnLogicalShapes)

        def variable(path: tuple[Any, ...], leaf: Array) -> OptimizerState:
            owner = _parameter_at(path, params)
            return OptimizerState(leaf, **({} if owner is None else _sharding_metadata(leaf.shape, owner, logical)))

        self.opt_state = nnx.data(jax.tree_util.tree_map_with_path(variable, state))

    def update(self, model: nnx.Module, grads: nnx.State) -> None:
        """Applies gradients, with the structure of the model's parameters."""
        variables = _parameters(model)
        params = self._optax_arrays(variables, variables)
        state = jax.tree.map(lambda v: v[...], self.opt_state, is_leaf=_is_variable)
        update = optax.with_extra_args_support(self.transformation).update
        updates, state = update(
            self._optax_arrays(named_variables(grads), variables), state, params, variables=variables
        )
        jax.tree.map(lambda v, array: v.set_value(array), self.opt_state, state, is_leaf=_is_variable)
        updated = optax.apply_updates(params, updates)
        for name, variable in variables.items():
            variable.set_value(self._padded(updated[name], variable))
        self.step.set_value(self.step[...] + 1)

    def _optax_arrays(self, arrays: dict[str, Variable], owners: dict[str, Variable]) -> Arrays:
        found = {name: jnp.asarray(variable[...]) for name, variable in arrays.items()}
        if not isinstance(self.transformation, OnLogicalShapes):
            return found
        tp, sizes = axis_size(TP), mesh_sizes(current_mesh())
        return {
            name: constrain(unpad(array, padding, tp), logical_spec(owners[name], sizes))
            if (padding := padding_of(owners[name])) and array.shape != logical_shape(owners[name])
            else array
            for name, array in found.items()
        }

    def _padded(self, array: Array, owner: Variable) -> Array:
        if array.shape == tuple(owner.shape):
            return array
        return constrain(pad(array, padding_of(owner), axis_size(TP)), spec_of(owner))


class Skipped(nnx.Variable[Any]):
    """Number of non-finite steps in a row."""


class TrainState(nnx.Module):
    """Model, optimizer, and number of skipped steps in a row."""

    def __init__(
        self,
        config: ModelConfig,
        optimizer: optax.GradientTransformation,
        seed: int,
        make_model: MakeModel | None = None,
    ):
        rngs = nnx.Rngs(seed)
        self.model = create_decoder(config, rngs=rngs) if make_model is None else make_model(rngs)
        self.optimizer = Optimizer(self.model, optimizer)
        self.skipped = Skipped(jnp.zeros((), jnp.int32))


def rng_state(rngs: nnx.State, key: Array | None) -> nnx.State:
    """Returns a model's random keys, derived from `key`, and counters at zero."""
    key = jax.random.key(0) if key is None else key

    def value(path: tuple[Any, ...], variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros(variable.shape, variable.dtype))
        of_stream = jax.random.fold_in(key, zlib.crc32(".".join(map(str, path)).encode()))
        return variable.replace(jax.random.split(of_stream, variable.shape) if variable.shape else of_stream)

    return nnx.from_flat_state([(path, value(path, variable)) for path, variable in nnx.to_flat_state(rngs)])


@dataclass(frozen=True)
class Blueprint:
    """A train state without arrays: graph, shapes, dtypes and shardings."""

    graph: nnx.GraphDef[TrainState]
    abstract: nnx.State
    rngs: nnx.State  # random keys and counters of the model, no part of the state
    shardings: Any
    mesh: Mesh
    config: ModelConfig
    optimizer: optax.GradientTransformation
    make_model: MakeModel | None = None  # None for the `Decoder` of `config`

    @property
    def is_decoder(self) -> bool:
        """Whether `config` describes the model."""
        return self.make_model is None

    def merge(self, state: nnx.State, key: Array | None = None) -> TrainState:
        """Returns a copy of the modules with these arrays; `key` seeds the model's random keys."""
        merged: TrainState = nnx.merge(self.graph, state, rng_state(self.rngs, key), copy=True)
        return merged

    def create(self, seed: int, weights: nnx.State | None = None) -> nnx.State:
        """Returns the initial state, sharded, with equal values on every mesh.

        Args:
          seed: of the random weights.
          weights: initial parameters, donated; others are random.
        """

        def init(weights: nnx.State) -> nnx.State:
            made = TrainState(self.config, self.optimizer, seed, self.make_model)
            state = nnx.state(made, nnx.Not(nnx.RngState))
            state["model"] = nnx.merge_state(state["model"], weights)
            return state

        with jax.set_mesh(self.mesh):
            weights = nnx.State({}) if weights is None else weights
            state: nnx.State = jax.jit(init, out_shardings=self.shardings, donate_argnums=0)(weights)
        return state

    def stored(self, state: nnx.State) -> nnx.State:
        """Returns the saved part of a state: all but weights frozen under adapters."""
        if not self.config.lora.rank:
            return state  # also variables that are not parameters, such as the selection bias of experts
        return nnx.State({**state, "model": nnx.filter_state(state["model"], nnx.Param)})

    @property
    def sharded(self) -> nnx.State:
        """`abstract` with shardings, to compile a step before a state exists."""
        state: nnx.State = jax.tree.map(lambda a, s: a.update(sharding=s), self.abstract, self.shardings)
        return state


def plan_state(
    config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh, make_model: MakeModel | None = None
) -> Blueprint:
    """Traces a `TrainState` on a mesh; computes nothing.

    Raises:
      ConfigError: nothing is trained.
    """
    with jax.set_mesh(mesh):
        abstract_state = nnx.eval_shape(lambda: TrainState(config, optimizer, 0, make_model))
        graph, rngs, abstract = nnx.split(abstract_state, nnx.RngState, ...)  # type: ignore[misc]
        shardings = nnx.get_named_sharding(abstract, mesh)
    if not nnx.to_flat_state(nnx.filter_state(abstract["model"], nnx.Param)):
        if make_model is not None:
            raise ConfigError("the model has no nnx.Param, so nothing is trained")
        targets = ", ".join(config.lora.targets) or "nothing"
        raise ConfigError(f"model.lora.targets={targets}: the model has no such projection, so nothing is trained")
    return Blueprint(graph, abstract, rngs, shardings, mesh, config, optimizer, make_model)


def parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the abstract parameters by dotted path (`blocks.mlp.down.kernel`)."""
    return named_variables(blueprint.abstract["model"])


def trained_parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the `parameters` with gradients: only the adapters, if any."""
    return named_variables(nnx.filter_state(blueprint.abstract["model"], nnx.Param))


def parameter_count(blueprint: Blueprint) -> int:
    """Returns the number of parameters without padding."""
    return logical_size(blueprint.abstract["model"])


def total_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes of the state, each array counted once."""
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in named_variables(blueprint.abstract).values())


def bytes_per_device(blueprint: Blueprint) -> int:
    """Returns the bytes of the state per device."""
    arrays = jax.tree.leaves(blueprint.sharded)
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)


def named_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the arrays of a state by dotted path."""
    return {name: variable[...] for name, variable in named_variables(state).items()}


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, OptimizerState)


def _parameters(model: nnx.Module) -> dict[str, Variable]:
    # The variables themselves, not copies.
    return {
        ".".join(map(str, path)): variable
        for path, variable in nnx.iter_graph(model)
        if isinstance(variable, nnx.Param)
    }


def _parameter_at(path: tuple[Any, ...], params: dict[str, Variable]) -> Variable | None:
    keys = (getattr(key, "key", None) for key in path)
    return next((params[key] for key in keys if isinstance(key, str) and key in params), None)


def _sharding_metadata(shape: tuple[int, ...], owner: Variable, logical: bool) -> dict[str, Any]:
    # The parameter's spec and padding, without the dim that a factored moment has averaged away: `nnx.Optimizer` would
    # give the moment the full spec, which does not fit.
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
                "out_sharding": PartitionSpec(*divisible_axes(shape, kept, mesh_sizes(current_mesh()))),
                "eager_sharding": owner.get_metadata().get("eager_sharding", False),
                **({"padding": padding} if padding else {}),
            }
    return {}
