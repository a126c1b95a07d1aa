"""The training loop of the examples: a model of plain Flax and its plan, on a mesh."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxtp
from jaxtp.config.command_line import parse_mesh
from jaxtp.mesh import AXES


def train(
    build: Callable[[], Any],
    loss: Callable[..., jax.Array],
    batch: Callable[[np.random.Generator, int], tuple[np.ndarray, ...]],
    plan: Mapping[str, Any],
    mesh: jax.sharding.Mesh,
    steps: int,
    batch_size: int = 64,
) -> list[float]:
    """Trains with AdamW and returns the loss of each step."""
    losses, random = [], np.random.default_rng(0)
    with jax.set_mesh(mesh):
        model = jaxtp.parallelize(build, plan)
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

        @nnx.jit
        def step(model: nnx.Module, optimizer: nnx.Optimizer, *arrays: np.ndarray) -> jax.Array:
            value, gradients = nnx.value_and_grad(loss)(model, *arrays)
            optimizer.update(model, gradients)
            return value

        for _ in range(steps):
            losses.append(float(step(model, optimizer, *batch(random, batch_size))))
            if len(losses) % 10 == 0:
                print(f"step {len(losses)}/{steps}  loss {np.mean(losses[-10:]):.4f}", flush=True)
    return losses


def main(build: Any, loss: Any, batch: Any, plan: Any, argv: list[str] | None = None) -> None:
    """Runs the command of an example."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="fsdp=2,tp=4", help="sizes of dp, fsdp, cp, tp")
    parser.add_argument("--steps", type=int, default=60, help="1 or more")
    parser.add_argument("--propose", action="store_true", help="print and use the plan from jaxtp.propose_plan")
    arguments = parser.parse_args(argv)
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: should be 1 or more")
    try:
        mesh = jaxtp.make_mesh(**parse_mesh(arguments.mesh, AXES))
        if arguments.propose:
            with jax.set_mesh(mesh):
                plan = jaxtp.propose_plan(build, *batch(np.random.default_rng(0), 64), call=loss)
        train(build, loss, batch, plan, mesh, arguments.steps)
    except ValueError as error:
        parser.error(str(error))
