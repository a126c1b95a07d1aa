"""The training step of a user's loss.

Its memory and work on a device are from a trace of one micro-batch.

State, gradients and batch are exact. Activations are the residuals of the trace: XLA keeps fewer
where it recomputes them in a fusion, and needs workspace on top.
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array

from jaxtp.analysis.collective import ALL_GATHER
from jaxtp.analysis.work import Work, work_of
from jaxtp.mesh import STORAGE, abstract_mesh, as_current, batch_parts, mesh_shape, mesh_sizes
from jaxtp.models.decoder import create_decoder
from jaxtp.models.own_decoder import builder
from jaxtp.parallelize.parallelize import abstract_model
from jaxtp.train import user_loss
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import Memory
from jaxtp.train.state import Blueprint, rng_state, shard_bytes
from jaxtp.train.task import Loss, Task

Shapes = Mapping[str, jax.ShapeDtypeStruct]  # A global batch of abstract arrays

ONE_DEVICE = abstract_mesh(mesh_shape())


def trace_step(
    config: TrainConfig, blueprint: Blueprint, loss: Loss, batch: Shapes
) -> tuple[Memory, Work]:
    """Returns the memory of a step, and the work of a micro-batch, on a device.

    The mesh may be abstract.
    """
    sizes = mesh_sizes(blueprint.mesh)
    with as_current(blueprint.mesh):
        work = _work(blueprint.abstract_model, loss, micro_batch(config, batch), sizes)
    sharded = blueprint.sharded
    summed = 0  # gradients summed over micro-batches
    trained = nnx.filter_state(sharded["model"], nnx.Param)
    parameters = shard_bytes(sharded["model"])
    if config.train.accumulation > 1:
        sum_dtype = config.model.precision.sum_dtype
        summed = shard_bytes(
            jax.tree.map(lambda each: each.update(dtype=sum_dtype(each.dtype)), trained)
        )
    gathers = [
        one.bytes
        for one in work.traffic
        if one.kind == ALL_GATHER and set(one.axes) <= set(STORAGE)
    ]
    memory = Memory(
        parameters=parameters,
        optimizer=shard_bytes(sharded) - parameters,
        gradients=shard_bytes(trained) + summed,
        whole_matrices=0,
        gathered_weights=2 * int(max(gathers, default=0)),  # the largest weight, and its gradient
        activations=int(work.saved),
        logits=0,
        batch=sum(each.size * each.dtype.itemsize for each in batch.values()) // batch_parts(sizes),
    )
    return memory, work


def micro_batch(config: TrainConfig, batch: Shapes) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a micro-batch."""
    count = config.train.accumulation
    return {
        name: each.update(shape=(each.shape[0] // count, *each.shape[1:]))
        for name, each in batch.items()
    }


def on_one_device(config: TrainConfig, task: Task) -> nnx.Module:
    """Returns the abstract model of a task, not split; under `ONE_DEVICE`."""

    def build() -> nnx.Module:
        rngs = nnx.Rngs(config.run.seed)
        return (
            builder(task.model, config.model)(rngs)
            if callable(task.model)
            else create_decoder(config.model, rngs=rngs)
        )

    return abstract_model(build)


def row_work(config: TrainConfig, task: Task, batch: Shapes) -> tuple[float, float]:
    """Returns the FLOPs of a row in the products of both passes, and the bytes that it keeps.

    These are for the backward pass.

    The model is whole, on one device. Recomputation does not count.
    """
    assert task.loss is not None
    shapes = micro_batch(config, batch)
    rows = next(iter(shapes.values())).shape[0]
    with as_current(ONE_DEVICE):
        work = _work(on_one_device(config, task), task.loss, shapes, mesh_sizes(ONE_DEVICE))
    return sum(
        product.flops for product in work.products if not product.recomputed
    ) / rows, work.saved / rows


def _work(model: nnx.Module, loss: Loss, batch: Shapes, sizes: Mapping[str, int]) -> Work:
    graph, params, rngs, others = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]

    def objective(params: nnx.State, others: nnx.State, batch: dict[str, Any]) -> Array:
        key = jax.random.key(0)
        merged = nnx.merge(graph, params, rng_state(rngs, key), others, copy=True)
        return user_loss.call(loss, merged, batch, key).loss

    return work_of(objective, sizes, params, others, dict(batch))
