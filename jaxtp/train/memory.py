"""Memory of a training step per device: exact for the state, modeled for all other memory.

A step peaks in the last block's backward pass, in the loss or, with muon, in the update. The model
of activations and workspace (`analysis/layer_costs.py`) follows XLA's compiler for H100s
(`scripts/estimate_accuracy.py`). It does not cover temporaries of adafactor and dropout, and
fragmentation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import chain

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxtp.analysis.step_costs import StepCosts, described, step_costs
from jaxtp.checkpoint.logical import divisible_axes, named_variables, padded_shape, split_dims
from jaxtp.checkpoint.storage import save_host_bytes
from jaxtp.layers.parameter import Padding, padding_of
from jaxtp.mesh import STORAGE, TP, Sizes, batch_parts, parts
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import TrainState, decoder_maker, parameter_counts

MODEL = "model."
BLOCKS = "model.blocks."
_INT32 = 4


@dataclass(frozen=True)
class StoredArray:
    """An array of a train state, independent of the mesh."""

    # Dotted path
    name: str
    # Shape without padding
    shape: tuple[int, ...]
    dtype: jnp.dtype
    # Mesh axes that divide each dim
    axes: tuple[tuple[str, ...], ...]
    # Whether it has a gradient
    trained: bool
    padding: Padding
    # Parameters of the model in it, without padding and scales
    parameters: int

    @property
    def in_model(self) -> bool:
        """Whether it belongs to the model, not to the optimizer."""
        return self.name.startswith(MODEL)

    def bytes_per_device(self, sizes: Sizes, dtype: DTypeLike | None = None) -> int:
        """Returns the bytes per device, in the array's dtype or in `dtype`."""
        dims = padded_shape(self.shape, self.padding, sizes[TP])
        shards = parts(sizes, chain(*divisible_axes(dims, self.axes, sizes)))
        return (
            math.prod(dims) // shards * jnp.dtype(self.dtype if dtype is None else dtype).itemsize
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes per device at a step's peak, by kind."""

    parameters: int
    """Parameters: exact, as are `optimizer` and `batch`."""
    optimizer: int
    """Moments and counters."""
    gradients: int
    """Gradients in the parameters' dtype. With accumulation, their sums over micro-batches, and if
    the sums have a wider dtype also the gradients of a micro-batch."""
    whole_matrices: int
    """Whole matrices that muon orthogonalises, and their updates."""
    gathered_weights: int
    """Weights as layers multiply with them (cast, gathered), and their gradients before
    reduction."""
    activations: int
    """Activations saved for the backward pass, and the workspace of one branch."""
    logits: int
    """Logits of one chunk of the loss, with the head and its gradient."""
    batch: int
    """Tokens, labels and segment ids."""

    @property
    def state(self) -> int:
        """Bytes of parameters and optimizer."""
        return self.parameters + self.optimizer

    @property
    def total(self) -> int:
        """The peak."""
        return sum(getattr(self, field.name) for field in fields(self))


def stored_arrays(config: TrainConfig) -> tuple[StoredArray, ...]:
    """Returns the arrays of a run's state, which do not depend on the mesh."""
    optimizer = optimizers.build(config.optimizer, config.train.steps)
    state = nnx.state(
        nnx.eval_shape(lambda: TrainState(decoder_maker(config.model), optimizer, seed=0))
    )
    counts = parameter_counts(state["model"])
    return tuple(
        StoredArray(
            name,
            tuple(variable.shape),
            jnp.dtype(variable.dtype),
            split_dims(variable),
            trained=name.startswith(MODEL) and isinstance(variable, nnx.Param),
            padding=padding_of(variable),
            parameters=counts.get(name.removeprefix(MODEL), 0),
        )
        for name, variable in named_variables(state).items()
    )


def save_bytes(
    config: TrainConfig, sizes: Sizes, arrays: Iterable[StoredArray], devices: int
) -> int:
    """Returns the peak host memory of a save in a process of `devices` devices."""
    per_device = 0
    total = 0
    for array in arrays:
        is_frozen = config.model.lora.rank > 0 and array.in_model and not array.trained
        if not is_frozen:
            per_device += array.bytes_per_device(sizes)
            total += math.prod(array.shape) * array.dtype.itemsize
    return save_host_bytes(per_device, devices, total)


def memory_per_device(
    config: TrainConfig,
    sizes: Sizes,
    arrays: Iterable[StoredArray] | None = None,
    *,
    platform: str = "cpu",
    costs: StepCosts | None = None,
) -> Memory:
    """Returns the memory of a step per device; ignores the run's mesh.

    Args:
      arrays: `stored_arrays(config)`, if known.
      platform: from `hardware.architecture_of`.
      costs: `costs_of_step(config, sizes, platform)`, if known.
    """
    costs = costs or costs_of_step(config, sizes, platform)
    accumulates = config.train.accumulation > 1
    parameters = 0
    optimizer = 0
    # Bytes of all gradients, of their sums over micro-batches, and of the gradients of blocks
    gradients = 0
    sums = 0
    block_gradients = 0
    for array in stored_arrays(config) if arrays is None else arrays:
        size = array.bytes_per_device(sizes)
        if array.in_model:
            parameters += size
        else:
            optimizer += size
        if not array.trained:
            continue
        gradients += size
        is_returned = True
        if accumulates:
            sum_dtype = config.model.precision.sum_dtype(array.dtype)
            sums += array.bytes_per_device(sizes, sum_dtype)
            # The backward pass adds gradients to sums of the same dtype, block by block
            # (`step.py`), and returns all other gradients.
            is_returned = sum_dtype != array.dtype
        if is_returned and array.name.startswith(BLOCKS):
            block_gradients += size
    # Inputs, labels and, for packed documents, segment ids
    inputs = 3 if config.data.packed else 2
    tokens = config.data.global_batch_size // batch_parts(sizes) * config.data.sequence_length
    loss = Memory(
        parameters=parameters,
        optimizer=optimizer,
        gradients=sums,
        whole_matrices=0,
        gathered_weights=0,
        activations=costs.saved,
        logits=costs.loss + costs.head,
        batch=inputs * tokens * _INT32,
    )
    copies = replace(loss, activations=costs.saved + costs.copied, logits=costs.head)
    block = replace(
        copies,
        gradients=sums + block_gradients,
        gathered_weights=costs.weights,
        activations=costs.saved + costs.working,
    )
    # The update is in place (`step.make_train_step`); muon adds whole matrices and their updates to
    # all gradients.
    update = replace(
        loss,
        gradients=sums or gradients,
        whole_matrices=costs.owned + gradients if costs.owned else 0,
        activations=0,
        logits=0,
    )
    return max(block, loss, copies, update, key=lambda memory: memory.total)


def costs_of_step(
    config: TrainConfig, sizes: Sizes, platform: str = "cpu", *, once: bool = False
) -> StepCosts:
    """Returns the costs of a step per device; ignores the run's mesh.

    `platform` decides the kernels, which affect memory and time, but not communication. For `once`,
    see `Workload`.
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
        once=once,
    )
    if config.optimizer.name != "muon":
        return costs
    from jaxtp.train.muon import with_muon

    # The layout decides how experts are split.
    layout = (sizes[TP], parts(sizes, STORAGE)) if config.model.most_experts else ()
    model = described(config.model, *layout)
    variables = named_variables(nnx.state(model, nnx.Param)).items()
    matrices = {path: v for path, v in variables if optimizers.is_orthogonalised(path)}
    return with_muon(costs, matrices, sizes)
