"""Everything that a training step changes, initialised sharded."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import logical_size, named_variables
from jaxtp.config import ConfigError
from jaxtp.layers.lora import trained
from jaxtp.models.config import ModelConfig
from jaxtp.models.decoder import Decoder
from jaxtp.train.optimizer_state import Optimizer


class Skipped(nnx.Variable[Any]):
    """Number of steps in a row whose loss or gradient was not finite."""


class TrainState(nnx.Module):
    """The model, the optimizer with its moments and its step counter, and the number of steps skipped in a row.

    Args:
      config: the model's sizes.
      optimizer: the transformation of the gradients.
      seed: seed of the initial weights.
    """

    def __init__(self, config: ModelConfig, optimizer: optax.GradientTransformation, seed: int):
        self.model = Decoder(config, rngs=nnx.Rngs(seed))
        self.optimizer = Optimizer(self.model, optimizer, trained(config.lora))
        self.skipped = Skipped(jnp.zeros((), jnp.int32))


@dataclass(frozen=True)
class Blueprint:
    """A state that is described but not allocated.

    Its first three fields are what `jax.jit` and the checkpoints need: a graph to build modules from arrays, the
    arrays' shapes and dtypes, and their shardings.
    """

    graph: nnx.GraphDef[TrainState]
    abstract: nnx.State
    shardings: Any
    mesh: Mesh
    config: ModelConfig
    optimizer: optax.GradientTransformation

    def create(self, seed: int, weights: nnx.State | None = None) -> nnx.State:
        """Returns the initial state: computed in shards, never whole on a device; the same on every mesh.

        Args:
          seed: seed of what is random.
          weights: parameters of the model to begin with; their arrays become the state's.
        """

        def init(weights: nnx.State) -> nnx.State:
            state = nnx.state(TrainState(self.config, self.optimizer, seed))
            state["model"] = nnx.merge_state(state["model"], weights)
            return state

        with jax.set_mesh(self.mesh):
            given = nnx.State({}) if weights is None else weights
            state: nnx.State = jax.jit(init, out_shardings=self.shardings, donate_argnums=0)(given)
        return state

    def stored(self, state: nnx.State) -> nnx.State:
        """Returns the part of a state that checkpoints hold: all of it, but for the model beside adapters."""
        if not self.config.lora.rank:
            return state  # with what is no parameter and changes too, such as the selection bias of experts
        return nnx.State({**state, "model": nnx.filter_state(state["model"], trained(self.config.lora))})

    @property
    def sharded(self) -> nnx.State:
        """The field `abstract`, each array with its sharding: a step is compiled for it before there is a state."""
        state: nnx.State = jax.tree.map(lambda a, s: a.update(sharding=s), self.abstract, self.shardings)
        return state


def plan_state(config: ModelConfig, optimizer: optax.GradientTransformation, mesh: Mesh) -> Blueprint:
    """Traces the construction of a `TrainState` on a mesh; nothing is computed.

    Raises:
      ConfigError: there are to be adapters, and the model has none of the projections that would get one.
    """
    with jax.set_mesh(mesh):
        abstract_state = nnx.eval_shape(lambda: TrainState(config, optimizer, seed=0))
        graph, abstract = nnx.split(abstract_state)
        shardings = nnx.get_named_sharding(abstract, mesh)
    if not nnx.to_flat_state(nnx.filter_state(abstract["model"], trained(config.lora))):
        targets = ", ".join(config.lora.targets) or "nothing"
        raise ConfigError(f"model.lora.targets={targets}: the model has no such projection, so nothing is trained")
    return Blueprint(graph, abstract, shardings, mesh, config, optimizer)


def parameters(blueprint: Blueprint) -> dict[str, nnx.Variable[Any]]:
    """Returns the model's abstract parameters by dotted path, such as `blocks.mlp.down.kernel`."""
    return named_variables(blueprint.abstract["model"])


def trained_parameters(blueprint: Blueprint) -> dict[str, nnx.Variable[Any]]:
    """Returns the `parameters` that have a gradient: the adapters alone, where there are any."""
    return named_variables(nnx.filter_state(blueprint.abstract["model"], trained(blueprint.config.lora)))


def parameter_count(blueprint: Blueprint) -> int:
    """Returns the number of parameters of the model, padding not counted."""
    return logical_size(blueprint.abstract["model"])


def total_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes of parameters and optimizer state, counted once."""
    return sum(math.prod(v.shape) * v.dtype.itemsize for v in named_variables(blueprint.abstract).values())


def bytes_per_device(blueprint: Blueprint) -> int:
    """Returns the bytes of parameters and optimizer state on each device."""
    arrays = jax.tree.leaves(blueprint.sharded)
    return sum(math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize for array in arrays)
