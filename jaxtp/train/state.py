"""The train state: model, optimizer and counters, initialized sharded."""

import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import Variable, named_variables
from jaxtp.config.entry import in_thread
from jaxtp.config.hints import by_dotted_path, dotted
from jaxtp.config.schema import ConfigError
from jaxtp.layers.forms import MXFP4
from jaxtp.layers.lora import stored_kernels
from jaxtp.layers.parameter import logical_shape
from jaxtp.mesh import as_current
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import create_decoder
from jaxtp.train.sharded_optimizer import Optimizer

OPTIMIZER_SCOPE = "optimizer"  # Named scope of the update, which accounts for its collectives
MakeModel = Callable[[nnx.Rngs], nnx.Module]  # Returns a model with random weights

_NO_VARIABLE = (
    "but an attribute and not a variable, so no checkpoint would have it; make it a variable: "
    "class Buffer(nnx.Variable)"
)

STORED = nnx.All(nnx.Variable, nnx.Not(nnx.RngState))
"""Filter of the variables that are the state of a run."""


class Skipped(nnx.Variable[Any]):
    """Number of non-finite steps in a row."""


class TrainState(nnx.Module):
    """Model, optimizer, and number of non-finite steps in a row."""

    def __init__(self, make_model: MakeModel, optimizer: optax.GradientTransformation, seed: int):
        self.model = make_model(nnx.Rngs(seed))
        self.optimizer = Optimizer(self.model, optimizer)
        self.skipped = Skipped(jnp.zeros((), jnp.int32))


def rng_state(rngs: nnx.State, key: Array | None) -> nnx.State:
    """Returns a model's random keys, derived from `key`, and counters at zero."""
    key = jax.random.key(0) if key is None else key

    def value(path: tuple[Any, ...], variable: Any) -> Any:
        if not isinstance(variable, nnx.RngKey):
            return variable.replace(jnp.zeros(variable.shape, variable.dtype))
        stream_key = jax.random.fold_in(key, zlib.crc32(dotted(path).encode()))
        if variable.shape:
            stream_key = jax.random.split(stream_key, variable.shape)
        return variable.replace(stream_key)

    return nnx.map_state(value, rngs)


@dataclass(frozen=True)
class Blueprint:
    """A train state without arrays: graph, shapes, dtypes and shardings."""

    graph: nnx.GraphDef[TrainState]
    abstract: nnx.State
    # The model's random keys and counters, which are not part of the state
    rngs: nnx.State
    # Arrays that are plain attributes of modules, instead of variables
    constants: nnx.State
    shardings: Any
    mesh: Mesh
    config: ModelConfig
    optimizer: optax.GradientTransformation
    make_model: MakeModel

    @property
    def abstract_model(self) -> Any:
        """A model of abstract arrays."""
        return nnx.merge(self.graph, self.abstract, self.rngs, self.constants, copy=True).model

    def merge(self, state: nnx.State, key: Array | None = None) -> TrainState:
        """Returns a copy of the modules with the arrays of `state`.

        `key` seeds the model's random keys.
        """
        return nnx.merge(self.graph, state, rng_state(self.rngs, key), self.constants, copy=True)

    def unflatten(self, leaves: Sequence[Array]) -> nnx.State:
        """Returns the state with these leaves."""
        return jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)

    def model_of(self, weights: nnx.State) -> nnx.Module:
        """Returns the model with these weights."""
        state = nnx.State({**self.abstract, "model": weights})
        return self.merge(state).model

    def create(self, seed: int, weights: nnx.State | None = None) -> nnx.State:
        """Returns the initial state, sharded, with equal values on every mesh.

        Args:
          seed: the seed of the random weights.
          weights: initial parameters, donated; the other parameters are random.
        """

        def init(weights: nnx.State) -> nnx.State:
            state = nnx.state(TrainState(self.make_model, self.optimizer, seed), STORED)
            state["model"] = nnx.merge_state(state["model"], weights)
            return state

        with jax.set_mesh(self.mesh):
            weights = nnx.State({}) if weights is None else weights
            lowered = jax.jit(init, out_shardings=self.shardings, donate_argnums=0).lower(weights)
            return in_thread(lowered.compile).result()(weights)

    def stored(self, state: nnx.State) -> nnx.State:
        """Returns the part of a state that is saved: all of it, except weights under adapters."""
        if not self.config.lora.rank:
            # The state also has variables that are not parameters, such as the selection bias of
            # experts.
            return state
        return nnx.State({**state, "model": nnx.filter_state(state["model"], nnx.Param)})

    @property
    def sharded(self) -> nnx.State:
        """`abstract` with its shardings, to compile a step before a state exists."""
        return jax.tree.map(lambda a, s: a.update(sharding=s), self.abstract, self.shardings)


def decoder_maker(config: ModelConfig) -> MakeModel:
    """Returns a function that makes a decoder.

    It raises ConfigError if an array of the decoder is an attribute and not a variable.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = create_decoder(config, rngs=rngs)
        _, _, arrays = nnx.split(model, nnx.Variable, ...)  # type: ignore[misc]
        for path, _ in nnx.to_flat_state(arrays):
            name = f"model.{dotted(path)}"
            raise ConfigError(f"{name} is an array of a jaxtp.Decoder, {_NO_VARIABLE}")
        return model

    return make


def plan_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    make_model: MakeModel | None = None,
) -> Blueprint:
    """Traces a `TrainState` on a mesh, which may be abstract.

    Args:
      config: the settings of the model; of a user's model only the precision has an effect.
      make_model: by default makes the decoder of `config`.

    Raises:
      ConfigError: nothing is trained; or a random array, or any array of a Decoder, is an attribute
        and not a variable. On an abstract mesh, no array is known to be random.
      UserError: two variables have the same dotted path.
    """
    make_model = make_model or decoder_maker(config)
    with as_current(mesh):
        abstract_state = nnx.eval_shape(lambda: TrainState(make_model, optimizer, 0))
        # This refuses two variables with one path.
        by_dotted_path(nnx.to_flat_state(nnx.state(abstract_state)))
        graph, rngs, abstract, constants = nnx.split(abstract_state, nnx.RngState, STORED, ...)  # type: ignore[misc]
        shardings = nnx.get_named_sharding(abstract, mesh)
    if "model" not in abstract or not nnx.to_flat_state(
        nnx.filter_state(abstract["model"], nnx.Param)
    ):
        problem = "the model has no nnx.Param"
        if config.lora.rank:
            targets = ", ".join(config.lora.targets) or "nothing"
            problem = f"model.lora.targets={targets}: the model has no such projection"
        raise ConfigError(f"{problem}, so nothing is trained")
    _check_dtypes(abstract["model"])
    if nnx.to_flat_state(constants):
        constants = _values(constants, optimizer, mesh, make_model)
    return Blueprint(
        graph, abstract, rngs, constants, shardings, mesh, config, optimizer, make_model
    )


def _check_dtypes(model: nnx.State) -> None:
    for name, variable in named_variables(model).items():
        dtype = variable.dtype
        is_real = any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, np.bool_))
        if not is_real or dtype.itemsize > 4 or dtype in (jnp.int4, jnp.uint4):
            raise ConfigError(
                f"{name} is {dtype}, but a run's variables must be real numbers of 1 to 4 bytes"
            )
        if not math.prod(variable.shape):
            raise ConfigError(
                f"{name} has no elements (shape {tuple(variable.shape)}), so no checkpoint "
                "can have it"
            )


def _values(
    constants: nnx.State,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    make_model: MakeModel,
) -> nnx.State:
    # On an abstract mesh only shapes matter.
    if not isinstance(mesh, Mesh):
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), constants)

    def create(seed: int) -> nnx.State:
        state = TrainState(make_model, optimizer, seed)
        return nnx.split(state, nnx.RngState, STORED, ...)[3]  # type: ignore[misc]

    def values_of(seed: int) -> nnx.State:
        replicated = NamedSharding(mesh, PartitionSpec())
        with jax.set_mesh(mesh):
            values = jax.jit(partial(create, seed), out_shardings=replicated)()
        # NumPy arrays become constants of compiled programs.
        return jax.tree.map(np.asarray, values)

    # JAX's random numbers differ between seeds, NumPy's between any two calls.
    values = values_of(0)
    reseeded = by_dotted_path(nnx.to_flat_state(values_of(1)))
    for name, array in by_dotted_path(nnx.to_flat_state(values)).items():
        if array.tobytes() != reseeded[name].tobytes():
            raise ConfigError(f"{name} is random, {_NO_VARIABLE}")
    return values


def parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the abstract parameters by dotted path (`blocks.mlp.down.kernel`)."""
    return named_variables(blueprint.abstract["model"])


def trained_parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the `parameters` with gradients: only the adapters, if any."""
    return named_variables(nnx.filter_state(blueprint.abstract["model"], nnx.Param))


def parameter_count(blueprint: Blueprint) -> int:
    """Returns the number of parameters, without padding and scales."""
    return sum(parameter_counts(blueprint.abstract["model"]).values())


def parameter_counts(model: nnx.State) -> dict[str, int]:
    """Returns the number of parameters in each variable, without padding and scales."""
    forms = stored_kernels(model)
    counts = {}
    for path, variable in named_variables(model).items():
        kernel, _, field = path.rpartition(".")
        form = forms.get(kernel)
        if form is None or field != "scale":
            # A byte of MXFP4 has two.
            counts[path] = math.prod(logical_shape(variable)) * (2 if form is MXFP4 else 1)
    return counts


def total_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes of the state, each array counted once."""
    return sum(v.size * v.dtype.itemsize for v in jax.tree.leaves(blueprint.abstract))


def bytes_per_device(blueprint: Blueprint) -> int:
    """Returns the bytes of the state per device."""
    return shard_bytes(blueprint.sharded)


def shard_bytes(state: nnx.State) -> int:
    """Returns the bytes per device of abstract arrays with shardings."""
    arrays = jax.tree.leaves(state)
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays
    )
