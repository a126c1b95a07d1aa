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
from jaxtp.mesh import STORAGE, Sizes, as_current, batch_parts, mesh_sizes
from jaxtp.train.loss import ONE_DEVICE, call, on_one_device
from jaxtp.train.memory import Memory
from jaxtp.train.state import Blueprint, MakeModel, rng_state, shard_bytes
from jaxtp.train.step import StepSettings
from jaxtp.train.task import Loss, Shapes


def trace_step(settings: StepSettings, blueprint: Blueprint, batch: Shapes) -> tuple[Memory, Work]:
    """Returns the memory of a step, and the work of a micro-batch, on a device.

    The blueprint's mesh may be abstract.
    """
    sizes = mesh_sizes(blueprint.mesh)
    with as_current(blueprint.mesh):
        shapes = micro_batch(batch, settings.accumulation)
        work = _work(blueprint.abstract_model, settings.objective, shapes, sizes)
    sharded = blueprint.sharded
    parameters = shard_bytes(sharded["model"])
    trained = nnx.filter_state(sharded["model"], nnx.Param)
    gradients = shard_bytes(trained)
    # With accumulation, there are also the sums over micro-batches.
    if settings.accumulation > 1:
        sum_dtype = settings.precision.sum_dtype
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


def micro_batch(batch: Shapes, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of one of `count` micro-batches."""
    return {
        name: array.update(shape=(array.shape[0] // count, *array.shape[1:]))
        for name, array in batch.items()
    }


def row_work(settings: StepSettings, make_model: MakeModel, batch: Shapes) -> tuple[float, float]:
    """Returns the FLOPs of a row's products, forward and backward, and the bytes of its residuals.

    The model is on one device, not split. Recomputation does not count.
    """
    shapes = micro_batch(batch, settings.accumulation)
    rows = next(iter(shapes.values())).shape[0]
    with as_current(ONE_DEVICE):
        model = on_one_device(make_model)
        work = _work(model, settings.objective, shapes, mesh_sizes(ONE_DEVICE))
    flops = sum(product.flops for product in work.products if not product.recomputed)
    return flops / rows, work.saved / rows


def _work(model: nnx.Module, loss: Loss, batch: Shapes, sizes: Sizes) -> Work:
    graph, params, rngs, frozen = nnx.split(model, nnx.Param, nnx.RngState, ...)  # type: ignore[misc]

    def objective(params: nnx.State, frozen: nnx.State, batch: dict[str, Any]) -> Array:
        key = jax.random.key(0)
        merged = nnx.merge(graph, params, rng_state(rngs, key), frozen, copy=True)
        return call(loss, merged, batch, key).loss

    return work_of(objective, sizes, params, frozen, dict(batch))
