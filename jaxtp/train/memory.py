"""Bytes that a training step takes on each device, by kind: the state exactly, the rest modelled; arithmetic only.

A step holds most between forward and backward pass: there are the gradients of all blocks (XLA makes room for them
before the forward pass), what the blocks keep, and the working sets of the loss and of the last block. The update is
made in place (`step.make_train_step`) and holds less, but for muon's, which has whole matrices and updates beside all
gradients (`train/muon.py`): the larger of the two is the peak. An evaluation holds less too: it is the forward pass
alone, of the same micro-batches.

What blocks and head hold is what their layers declare (`models/costs.py`): arrays that XLA's compiler for GPUs was seen
to hold for dense Llama shapes, in the sizes that they have on one device.

Not modelled: temporaries of adafactor and of dropout; small arrays; gaps in XLA's block of temporaries.
`scripts/estimate_accuracy.py` compares with XLA's compiler for GPUs.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxtp.checkpoint.logical import divided, named_variables, split_dims
from jaxtp.layers.kernels import Implementation
from jaxtp.layers.lora import trained
from jaxtp.layers.parameter import Padding, padding_of
from jaxtp.mesh import STORAGE, TP, batch_parts, parts
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import StepCosts, described, step_costs
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.muon import MUON, owned
from jaxtp.train.optimizer_state import OPTIMIZER_SCOPE
from jaxtp.train.state import TrainState

MODEL, BLOCKS = "model.", "model.blocks."
OVERLAP = 3
"""Divisor of the smaller of the working sets of the loss and of the last block; the larger counts whole. XLA's schedule
begins the one before the other has ended, sometimes all of it, sometimes none."""

_INT32 = 4


@dataclass(frozen=True)
class StoredArray:
    """One array of a train state, as it is declared, on no mesh in particular."""

    name: str
    """Dotted path."""

    shape: tuple[int, ...]
    """Shape without padding."""

    dtype: jnp.dtype

    axes: tuple[tuple[str, ...], ...]
    """Mesh axes that divide each dim."""

    trained: bool
    """Whether it has a gradient."""

    padding: Padding
    """Dims that are padded."""

    def bytes_per_device(self, sizes: Mapping[str, int], dtype: DTypeLike | None = None) -> int:
        """Returns the bytes on each device of a mesh, in its own dtype or another."""
        dims = list(self.shape)
        for dim, split in self.padding:
            dims[dim] = split.padded(sizes[TP])
        among = parts(sizes, chain(*divided(dims, self.axes, sizes)))
        return math.prod(dims) // among * jnp.dtype(self.dtype if dtype is None else dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device when a step holds most, by kind."""

    parameters: int
    """Bytes of the parameters; exact."""

    optimizer: int
    """Moments and counters; exact."""

    gradients: int
    """Gradients in the parameters' dtype, and their sums over micro-batches, which may be in a wider one; modelled, as
    all that follows but the batch."""

    whole_matrices: int
    """Matrices that muon works on whole, and the updates that it makes of them beside the parameters."""

    gathered_weights: int
    """Weights as layers multiply with them: cast, gathered, in another layout; and their gradients before reduction."""

    activations: int
    """Activations that blocks keep for the backward pass, and those that one of them works on."""

    logits: int
    """Logits of the loss's chunk, with the head and the gradient that it sums up."""

    batch: int
    """Tokens, labels and segments; exact."""

    @property
    def state(self) -> int:
        """Bytes that stay between steps: parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))


def stored_arrays(config: TrainConfig) -> tuple[StoredArray, ...]:
    """Returns every array of a run's state, which depends on model and optimizer alone: one trace for all meshes."""
    optimizer = optimizers.build(config.optimizer, config.train.steps)
    state = nnx.state(nnx.eval_shape(lambda: TrainState(config.model, optimizer, seed=0)))
    kind = trained(config.model.lora)
    return tuple(_stored(name, variable, kind) for name, variable in named_variables(state).items())


def memory_per_device(
    config: TrainConfig,
    sizes: Mapping[str, int],
    arrays: Iterable[StoredArray] | None = None,
    *,
    platform: str = "cpu",
    costs: StepCosts | None = None,
) -> Memory:
    """Returns the bytes that a training step takes on each device.

    Args:
      config: the run; its own mesh is not looked at.
      sizes: devices along each axis, of a mesh that can hold it.
      arrays: `stored_arrays(config)`, where they are known already.
      platform: kind of device, which decides the kernels: cpu, cuda, rocm or tpu.
      costs: `costs_of_step(config, sizes, platform)`, where they are known already.
    """
    held = _Held.of(config, stored_arrays(config) if arrays is None else arrays, sizes)
    costs = costs or costs_of_step(config, sizes, platform)
    moments = (_backward(config, sizes, held, costs), _update(config, sizes, held, costs))
    return max(moments, key=lambda memory: memory.total)


def with_attention(config: TrainConfig, implementation: Implementation) -> TrainConfig:
    """Returns the run with another kernel of attention."""
    model = replace(config.model, attention=implementation)
    return replace(config, model=model)


@dataclass(frozen=True)
class _Held:
    """Bytes of parts of the state on a device."""

    parameters: int
    optimizer: int
    trained: int
    """Bytes of the parameters that have gradients."""
    trained_blocks: int
    """Bytes of those of the blocks."""
    summed: int
    """Bytes of the sums of gradients over micro-batches; 0 without them."""

    @classmethod
    def of(cls, config: TrainConfig, arrays: Iterable[StoredArray], sizes: Mapping[str, int]) -> "_Held":
        held = [(array, array.bytes_per_device(sizes)) for array in arrays]
        summed = (a for a, _ in held if a.trained and config.train.accumulation > 1)
        sum_dtype = config.model.precision.sum_dtype
        return cls(
            parameters=sum(size for a, size in held if a.name.startswith(MODEL)),
            optimizer=sum(size for a, size in held if not a.name.startswith(MODEL)),
            trained=sum(size for a, size in held if a.trained),
            trained_blocks=sum(size for a, size in held if a.trained and a.name.startswith(BLOCKS)),
            summed=sum(a.bytes_per_device(sizes, sum_dtype(a.dtype)) for a in summed),
        )


def costs_of_step(config: TrainConfig, sizes: Mapping[str, int], platform: str = "cpu") -> StepCosts:
    """Returns what a run's training step costs each device of a mesh; its own mesh is not looked at.

    The platform decides the kernels, and so memory and time, and nothing of what is sent.
    """
    costs = step_costs(
        config.model,
        sizes,
        batch_size=config.data.global_batch_size,
        sequence_length=config.data.sequence_length,
        accumulation=config.train.accumulation,
        packed=config.data.packed,
        platform=platform,
        context=config.mesh.context,
    )
    return costs if config.optimizer.name != MUON else _with_muon(costs, config.model, sizes)


def _with_muon(costs: StepCosts, model: ModelConfig, sizes: Mapping[str, int]) -> StepCosts:
    """Returns the costs of a step with those of orthogonalising the matrices of a model on a mesh."""
    as_split = described(model, sizes[TP] if model.most_experts else 1)  # tp decides how experts are split
    variables = named_variables(nnx.state(as_split, trained(model.lora)))
    matrices = {path: variable for path, variable in variables.items() if optimizers.is_orthogonalised(path)}
    kinds = owned(matrices, sizes)
    module = f"{OPTIMIZER_SCOPE}/{MUON}"
    moved = Counter(costs.traffic)
    for kind in kinds:
        moved.update(dict(kind.moves(module, sizes)))
    return replace(
        costs,
        traffic=moved,
        update=tuple(product for kind in kinds for product in kind.products()),
        owned=max((kind.working for kind in kinds), default=0),
    )


def _backward(config: TrainConfig, sizes: Mapping[str, int], held: _Held, costs: StepCosts) -> Memory:
    weights, working, logits = costs.weights, costs.working, costs.loss
    if logits < weights + working:
        logits //= OVERLAP
    else:
        weights, working = weights // OVERLAP, working // OVERLAP
    return Memory(
        parameters=held.parameters,
        optimizer=held.optimizer,
        gradients=held.trained_blocks + held.summed,
        whole_matrices=0,
        gathered_weights=weights + (costs.transposed if parts(sizes, STORAGE) > 1 else 0),
        activations=costs.kept + working,
        logits=logits,
        batch=_batch_bytes(config, sizes),
    )


def _update(config: TrainConfig, sizes: Mapping[str, int], held: _Held, costs: StepCosts) -> Memory:
    return Memory(
        parameters=held.parameters,
        optimizer=held.optimizer,
        gradients=held.summed or held.trained,
        whole_matrices=costs.owned + held.trained if costs.owned else 0,
        gathered_weights=0,
        activations=0,
        logits=0,
        batch=_batch_bytes(config, sizes),
    )


def _batch_bytes(config: TrainConfig, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of inputs, labels and, for packed documents, segments: of the whole step, int32."""
    arrays = 3 if config.data.packed else 2
    rows = config.data.global_batch_size // batch_parts(sizes)
    return arrays * rows * config.data.sequence_length * _INT32


def _stored(name: str, variable: nnx.Variable[Any], kind: type[nnx.Variable[Any]]) -> StoredArray:
    shape, dtype = tuple(variable.shape), jnp.dtype(variable.dtype)
    own = name.startswith(MODEL) and isinstance(variable, kind)
    return StoredArray(name, shape, dtype, split_dims(variable), own, padding_of(variable))
