"""The train state: model, optimizer and counters, initialized sharded."""

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.logical import (
    Variable,
    logical_size,
    may_be_infinite,
    named_variables,
    select_paths,
)
from jaxtp.config.entry import in_thread
from jaxtp.config.hints import by_dotted_path, dotted
from jaxtp.config.schema import ConfigError, CountOrZero, validate
from jaxtp.layers.lora import float8_kernels
from jaxtp.mesh import as_current
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import create_decoder
from jaxtp.train.sharded_optimizer import Optimizer

OPTIMIZER_SCOPE = "optimizer"  # Named scope of the update, which accounts for its collectives
MakeModel = Callable[[nnx.Rngs], nnx.Module]  # Returns a model with random weights

CONSTANTS = "constants"
"""Key in a checkpoint's info: `Blueprint.record_of_constants`."""

STORED = nnx.All(nnx.Variable, nnx.Not(nnx.RngState))
"""Filter of the variables that are the state of a run."""


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
        model: nnx.Module
        if make_model is None:
            model = create_decoder(config, rngs=rngs)
        else:
            from jaxtp.plans.parallelize import mark_arrays_as_data

            model = make_model(rngs)
            mark_arrays_as_data(model)
        self.model = model
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
    # None for the `Decoder` of `config`
    make_model: MakeModel | None = None
    # The seed of `constants`
    seed: int = 0

    @property
    def is_decoder(self) -> bool:
        """Whether `config` describes the model."""
        return self.make_model is None

    @property
    def abstract_model(self) -> Any:
        """A model of abstract arrays."""
        return nnx.merge(self.graph, self.abstract, self.rngs, self.constants, copy=True).model

    def merge(self, state: nnx.State, key: Array | None = None) -> TrainState:
        """Returns a copy of the modules with the arrays of `state`.

        `key` seeds the model's random keys.
        """
        return nnx.merge(self.graph, state, rng_state(self.rngs, key), self.constants, copy=True)

    def model_of(self, weights: nnx.State) -> nnx.Module:
        """Returns the model with these weights."""
        state = nnx.State({**self.abstract, "model": weights})
        return self.merge(state).model

    def create(self, seed: int, weights: nnx.State | None = None) -> nnx.State:
        """Returns the initial state, sharded, with equal values on every mesh.

        Args:
          seed: the seed of the random weights.
          weights: initial parameters, donated; the other parameters are random.

        Raises:
          ConfigError: all weights are random, and the constants have another seed.
        """
        names = list(by_dotted_path(nnx.to_flat_state(self.constants)))
        if weights is None and names and seed != self.seed:
            raise ConfigError(
                f"the weights would have seed {seed}, but {names[0]}, an attribute and not a "
                f"variable, has seed {self.seed}; call plan_state(..., seed={seed})"
            )

        def init(weights: nnx.State) -> nnx.State:
            state = nnx.state(
                TrainState(self.config, self.optimizer, seed, self.make_model), STORED
            )
            state["model"] = nnx.merge_state(state["model"], weights)
            return state

        with jax.set_mesh(self.mesh):
            weights = nnx.State({}) if weights is None else weights
            lowered = jax.jit(init, out_shardings=self.shardings, donate_argnums=0).lower(weights)
            return in_thread(lowered.compile).result()(weights)

    def record_of_constants(self) -> dict[str, object]:
        """Returns the seed and sums of the constants, as JSON; empty without constants.

        Checkpoints have this record instead of the constants themselves.
        """
        arrays = by_dotted_path(nnx.to_flat_state(self.constants))
        sums = {name: _sums_of_constant(array) for name, array in arrays.items()}
        return {"seed": self.seed, "sums": sums} if sums else {}

    def with_constants_of(self, info: Mapping[str, object]) -> tuple["Blueprint", list[str]]:
        """Returns the blueprint with a checkpoint's constants, and a line for each that changed.

        The constants are made again, from the seed of the run that wrote the checkpoint.

        Args:
          info: the checkpoint's info. If it has no record, the constants have seed 0.
        """
        if not nnx.to_flat_state(self.constants):
            return self, []
        stored = info.get(CONSTANTS)
        record = _RecordOfConstants()
        if isinstance(stored, dict):
            record = validate(_RecordOfConstants, stored, source=f"the checkpoint's {CONSTANTS}")
        blueprint = self
        if record.seed != self.seed:
            values = _values(
                self.constants, self.config, self.optimizer, self.mesh, self.make_model, record.seed
            )
            blueprint = replace(self, constants=values, seed=record.seed)
        lines = []
        for name, array in by_dotted_path(nnx.to_flat_state(blueprint.constants)).items():
            before = record.sums.get(name)
            if before is not None and not np.allclose(
                _sums_of_constant(array), before, rtol=1e-4, atol=before[0] * 1e-4
            ):
                lines.append(
                    f"changed since: the values of {name}, an attribute and not a variable: the "
                    "code that creates it has changed, or JAX's random numbers have"
                )
        return blueprint, lines

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


@dataclass(frozen=True)
class _RecordOfConstants:
    """A `Blueprint.record_of_constants` in the info of a checkpoint."""

    seed: CountOrZero = 0
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)


def _sums_of_constant(array: Array) -> tuple[float, float]:
    # The sum of absolute values, and a sum weighted by position: rounding on other devices changes
    # neither by much, but other random numbers do. Reads at most about 2**17 elements.
    values = np.asarray(array).reshape(-1)
    values = values[:: max(values.size // 2**16, 1)]
    parts = np.concatenate([values.real, values.imag]) if np.iscomplexobj(values) else values
    finite = np.nan_to_num(parts.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    places = np.cos(np.arange(finite.size))
    return float(np.abs(finite).sum()), float(finite @ places)


def plan_state(
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    make_model: MakeModel | None = None,
    seed: int = 0,
) -> Blueprint:
    """Traces a `TrainState` on a mesh, which may be abstract.

    Args:
      seed: the seed of the constants; the seed of the variables is an argument of
        `Blueprint.create`.

    Raises:
      ConfigError: nothing is trained, or a Decoder has an array that is not a variable.
      UserError: two variables have the same dotted path.
    """
    with as_current(mesh):
        abstract_state = nnx.eval_shape(lambda: TrainState(config, optimizer, 0, make_model))
        # This refuses two variables with one path.
        by_dotted_path(nnx.to_flat_state(nnx.state(abstract_state)))
        graph, rngs, abstract, constants = nnx.split(abstract_state, nnx.RngState, STORED, ...)  # type: ignore[misc]
        shardings = nnx.get_named_sharding(abstract, mesh)
    if "model" not in abstract or not nnx.to_flat_state(
        nnx.filter_state(abstract["model"], nnx.Param)
    ):
        if make_model is not None:
            raise ConfigError("the model has no nnx.Param, so nothing is trained")
        targets = ", ".join(config.lora.targets) or "nothing"
        raise ConfigError(
            f"model.lora.targets={targets}: the model has no such projection, so nothing is trained"
        )
    _check_dtypes(abstract["model"])
    names = list(by_dotted_path(nnx.to_flat_state(constants)))
    if names:
        if make_model is None:
            raise ConfigError(
                f"{names[0]} is an array of a jaxtp.Decoder, but an attribute and not a variable, "
                "so no checkpoint would have it; make it a variable: class Buffer(nnx.Variable)"
            )
        constants = _values(constants, config, optimizer, mesh, make_model, seed)
    return Blueprint(
        graph, abstract, rngs, constants, shardings, mesh, config, optimizer, make_model, seed
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
    config: ModelConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    make_model: MakeModel | None,
    seed: int,
) -> nnx.State:
    # On an abstract mesh only shapes matter.
    if not isinstance(mesh, Mesh):
        return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype), constants)

    def create() -> nnx.State:
        state = TrainState(config, optimizer, seed, make_model)
        return nnx.split(state, nnx.RngState, STORED, ...)[3]  # type: ignore[misc]

    with jax.set_mesh(mesh):
        values = jax.jit(create, out_shardings=NamedSharding(mesh, PartitionSpec()))()
    # NumPy arrays become constants of compiled programs.
    return jax.tree.map(np.asarray, values)


def parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the abstract parameters by dotted path (`blocks.mlp.down.kernel`)."""
    return named_variables(blueprint.abstract["model"])


def trained_parameters(blueprint: Blueprint) -> dict[str, Variable]:
    """Returns the `parameters` with gradients: only the adapters, if any."""
    return named_variables(nnx.filter_state(blueprint.abstract["model"], nnx.Param))


def parameter_count(blueprint: Blueprint) -> int:
    """Returns the number of parameters, without padding and the scales of float8 kernels."""
    model = blueprint.abstract["model"]
    scales = {f"{kernel}.scale" for kernel in float8_kernels(model)}
    return logical_size(select_paths(model, lambda path: path not in scales))


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


def finite_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the `named_arrays` that must be finite.

    Others, such as masks, may be infinite (`may_be_infinite`).
    """
    variables = named_variables(state).items()
    return {name: v[...] for name, v in variables if not may_be_infinite(v)}


def named_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the arrays of a state by dotted path."""
    return {name: variable[...] for name, variable in named_variables(state).items()}
