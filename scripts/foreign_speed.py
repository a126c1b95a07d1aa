"""Times a step of a Flax model under the trainer, and in a plain loop of Flax.

    python scripts/foreign_speed.py 2>/dev/null | tee scripts/results/foreign_speed.txt

Both train the vision transformer of `examples/vit.py`, parallel by the same plan, on the same
batches in host memory. Blocks of steps take turns in one process. A block ends when its last loss
is on the host, and the ratio is the median over pairs of neighbouring blocks.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxtp

sys.path.insert(0, str(Path(__file__).parent / "examples"))
import vit
from textures import generated

Columns = dict[str, np.ndarray]


def plain_loop(
    build: Callable[[], nnx.Module], batches: Callable[[int], Columns]
) -> Iterator[float]:
    """Yields the loss of each step of a plain Flax loop, under the mesh in context."""
    model = jaxtp.parallelize(build, vit.PLAN)
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Columns) -> jax.Array:
        def mean(model: vit.VisionTransformer) -> jax.Array:
            total, weight, _ = vit.loss(model, batch, jax.random.key(0))
            return total / weight

        loss, grads = nnx.value_and_grad(mean)(model)
        optimizer.update(model, grads)
        return loss

    step = 0
    while True:
        yield float(train_step(model, optimizer, batches(step)))
        step += 1


def seconds(steps: Iterator[Any], count: int) -> float:
    """Returns the time of `count` steps, each."""
    started = time.perf_counter()
    for _ in range(count):
        last = next(steps)
    loss = last if isinstance(last, float) else last.metrics["loss"]  # waits for it
    assert np.isfinite(loss)
    return (time.perf_counter() - started) / count


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mesh", default="dp=2,fsdp=2,tp=2")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--rows", type=int, default=64, help="of a batch (default 64)")
    parser.add_argument("--blocks", type=int, default=21, help="of each loop (default 21)")
    parser.add_argument("--steps", type=int, default=10, help="in a block (default 10)")
    arguments = parser.parse_args(argv)
    data = generated(8 * arguments.rows).reshape(8, arguments.rows)

    def batches(step: int) -> Columns:
        return {name: data[name][step % 8] for name in ("images", "labels")}

    def build() -> vit.VisionTransformer:
        return vit.VisionTransformer(arguments.width, rngs=nnx.Rngs(0))

    total = (arguments.blocks + 1) * arguments.steps + 1
    settings = {"checkpoint.every": 0, "metrics.trackers": []}
    with (
        contextlib.redirect_stdout(sys.stderr),
        tempfile.TemporaryDirectory() as folder,
        jaxtp.Trainer(
            model=build,
            plan=vit.PLAN,
            loss=vit.loss,
            batches=batches,
            optimizer=optax.adamw(3e-3),
            mesh=arguments.mesh,
            folder=folder,
            steps=total,
            settings=settings,
        ) as trainer,
    ):
        loops: dict[str, Iterator[Any]] = {
            "a plain loop": plain_loop(build, batches),
            "the trainer": iter(trainer),
        }
        found = [
            [seconds(loop, arguments.steps) for loop in loops.values()]
            for _ in range(arguments.blocks + 1)
        ][1:]
        count = sum(
            variable.size for variable in jax.tree.leaves(nnx.state(trainer.model, nnx.Param))
        )
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, {arguments.mesh} (CPU devices); {count:,} "
        f"parameters, {arguments.rows} rows in a step; {arguments.blocks} blocks of "
        f"{arguments.steps} steps of each"
    )
    for name, times in zip(loops, zip(*found, strict=True), strict=True):
        low, median, high = statistics.quantiles(times, n=4)
        print(
            f"{name:14}{median * 1e3:8.1f} ms a step, quartiles {low * 1e3:.1f} to {high * 1e3:.1f}"
        )
    low, median, high = statistics.quantiles([trained / plain for plain, trained in found], n=4)
    print(
        f"the trainer takes {median:.3f} of a plain loop's time, quartiles {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
