"""One update, and one evaluation, compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.data.loader import Batch
from jaxtp.models.decoder import Decoder
from jaxtp.train.state import Blueprint

Scalars = dict[str, Array]
TrainStep = Callable[[nnx.State, Batch], tuple[nnx.State, Scalars]]
JittedTrainStep = Any
"""`jax.jit`'s result has no public type; it is a `TrainStep` that can also be lowered."""
EvalStep = Callable[[nnx.State, Batch], tuple[Array, Array]]


def mean_loss(model: Decoder, batch: Batch) -> Array:
    """Cross-entropy in nats, averaged over the valid tokens of the global batch; a float32 scalar."""
    loss_sum, num_valid = model.loss(batch["inputs"], batch["labels"])
    return loss_sum / num_valid


def make_train_step(blueprint: Blueprint, schedule: optax.Schedule) -> JittedTrainStep:
    """Compiles `state, batch -> state, {loss, grad_norm, learning_rate}`.

    The state is donated: its memory becomes that of the new one. `loss` and `grad_norm` (the global L2 norm,
    before clipping) are of the parameters before the update.
    """

    def step(state: nnx.State, batch: Batch) -> tuple[nnx.State, Scalars]:
        train_state = nnx.merge(blueprint.graph, state)
        loss, grads = nnx.value_and_grad(mean_loss)(train_state.model, batch)
        scalars = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(train_state.optimizer.step[...])),
        }
        train_state.optimizer.update(train_state.model, grads)
        return nnx.state(train_state), scalars

    return jax.jit(step, donate_argnums=0, out_shardings=(blueprint.shardings, _replicated(blueprint)))


def make_eval_step(blueprint: Blueprint) -> EvalStep:
    """Compiles `state, batch -> summed loss, number of valid tokens`."""

    def step(state: nnx.State, batch: Batch) -> tuple[Array, Array]:
        return nnx.merge(blueprint.graph, state).model.loss(batch["inputs"], batch["labels"])

    return jax.jit(step, out_shardings=_replicated(blueprint))


def _replicated(blueprint: Blueprint) -> NamedSharding:
    """For scalars: every process can read them."""
    return NamedSharding(blueprint.mesh, PartitionSpec())
