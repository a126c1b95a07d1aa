"""Memory and work of a user's loss on a device, from a trace of one micro-batch.

State, gradients and batch are exact. Activations are the residuals of the trace: XLA keeps fewer,
because it recomputes some of them in fusions, but also needs workspace.
"""

from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxtp.analysis.collective import ALL_GATHER
from jaxtp.analysis.work import Work, work_of
from jaxtp.mesh import (
    STORAGE,
    Sizes,
    abstract_mesh,
    as_current,
    batch_parts,
    mesh_shape,
    mesh_sizes,
)
from jaxtp.models.decoder import create_decoder
from jaxtp.models.own_decoder import builder
from jaxtp.plans.parallelize import abstract_model
from jaxtp.train.config import TrainConfig
from jaxtp.train.loss import call
from jaxtp.train.memory import Memory
from jaxtp.train.state import Blueprint, rng_state, shard_bytes
from jaxtp.train.task import Loss, Shapes, Task

ONE_DEVICE = abstract_mesh(mesh_shape())


def trace_step(
    config: TrainConfig, blueprint: Blueprint, loss: Loss, batch: Shapes
) -> tuple[Memory, Work]:
    """Returns the memory of a step, and the work of a micro-batch, on a device.

    The blueprint's mesh may be abstract.
    """
    sizes = mesh_sizes(blueprint.mesh)
    with as_current(blueprint.mesh):
        work = _work(blueprint.abstract_model, loss, micro_batch(config, batch), sizes)
    sharded = blueprint.sharded
    parameters = shard_bytes(sharded["model"])
    trained = nnx.filter_state(sharded["model"], nnx.Param)
    gradients = shard_bytes(trained)
    # With accumulation, there are also the sums over micro-batches.
    if config.train.accumulation > 1:
        sum_dtype = config.model.precision.sum_dtype
        sums = jax.tree.map(lambda array: array.update(dtype=sum_dtype(array.dtype)), trained)
        gradients += shard_bytes(sums)
    gathers = [
        gather.bytes
        for gather in work.traffic
        if gather.kind == ALL_GATHER and set(gather.axes) <= set(STORAGE)
    ]
    batch_bytes = sum(array.size * array.dtype.itemsize for array in batch.values())
    memory = Memory(
        parameters=parameters,
        optimizer=shard_bytes(sharded) - parameters,
        gradients=gradients,
        whole_matrices=0,
        # The largest weight, and its gradient
        gathered_weights=2 * int(max(gathers, default=0)),
        activations=int(work.saved),
        logits=0,
        batch=batch_bytes // batch_parts(sizes),
    )
    return memory, work


def micro_batch(config: TrainConfig, batch: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a micro-batch."""
    count = config.train.accumulation
    return {
        name: array.update(shape=(array.shape[0] // count, *array.shape[1:]))
        for name, array in batch.items()
    }


def on_one_device(config: TrainConfig, task: Task) -> nnx.Module:
    """Returns the abstract model of a task, not split; call it under `ONE_DEVICE`."""

    def build() -> nnx.Module:
        rngs = nnx.Rngs(config.run.seed)
        if callable(task.model):
            return builder(task.model, config.origin)(rngs)
        return create_decoder(config.model, rngs=rngs)

    return abstract_model(build)


def row_work(config: TrainConfig, task: Task, batch: Shapes) -> tuple[float, float]:
    """Returns the FLOPs of a row's products, forward and backward, and the bytes of its residuals.

    The model is on one device, not split. Recomputation does not count.
    """
    assert task.loss is not None
    shapes = micro_batch(config, batch)
    rows = next(iter(shapes.values())).shape[0]
    with as_current(ONE_DEVICE):
        work = _work(on_one_device(config, task), task.loss, shapes, mesh_sizes(ONE_DEVICE))
    flops = sum(product.flops for product in work.products if not product.recomputed)
    return flops / rows, work.saved / rows


def _work(model: nnx.Module, loss: Loss, batch: Shapes, sizes: Sizes) -> Work:
    graph, params, rngs, frozen = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]

    def objective(params: nnx.State, frozen: nnx.State, batch: dict[str, Any]) -> Array:
        key = jax.random.key(0)
        merged = nnx.merge(graph, params, rng_state(rngs, key), frozen, copy=True)
        return call(loss, merged, batch, key).loss

    return work_of(objective, sizes, params, frozen, dict(batch))
