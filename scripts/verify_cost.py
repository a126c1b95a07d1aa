"""Times verification: a step, a step with gradient checksums, and a verified step.

    python scripts/verify_cost.py | tee scripts/results/verify_cost.txt

The measurements take turns in one run on virtual CPU devices; the table has medians and quartiles
of `--repeats`. Reading checksums is listed separately, because it takes less time than steps vary
by. So is the copy of the state to host memory and back, for which a GPU has its own link.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxtp
from jaxtp.analysis.tables import columns
from jaxtp.checkpoint.logical import named_arrays
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.collectives import batch_spec
from jaxtp.config.schema import replace_nested
from jaxtp.guards import verify
from jaxtp.mesh import describe_mesh, mesh_sizes
from jaxtp.train import optimizer
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory_check import verification_bytes
from jaxtp.train.setup import plan_step
from jaxtp.train.state import bytes_per_device, parameter_count, plan_state, trained_parameters
from jaxtp.train.step import fetch


class Bench:
    """A run's step, with and without checksums of its gradients, and its verification."""

    def __init__(self, width: int, length: int, folder: Path):
        model = {"d_model": width, "head_dim": width // 8, "d_ff": 3 * width}
        settings = {f"model.{name}": value for name, value in model.items()}
        settings |= {
            "data.sequence_length": length,
            "data.global_batch_size": 8,
            "data.packing": "concatenated",
        }
        self.config = replace_nested(
            TrainConfig(), settings | {"train.verify_every": 1, "run.dir": folder}
        )
        self.mesh = jaxtp.make_mesh(dp=2, fsdp=2, tp=2)
        tuned = optimizer.build(self.config.optimizer, self.config.train.steps)
        self.plan = plan_state(self.config.model, tuned, self.mesh)
        tokens = np.random.default_rng(0).integers(
            0, self.config.model.vocab_size, (8, length + 1), np.int32
        )
        where = jax.sharding.NamedSharding(self.mesh, batch_spec(None))
        parts = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
        self.batch = {name: jax.device_put(part, where) for name, part in parts.items()}
        self.state = self.plan.create(seed=0)
        self.plain, self.summed = (
            plan_step(self.config).trace_on(self.mesh, with_checksums=each).lower().compile()
            for each in (False, True)
        )
        self.verifier = verify.Verifier(
            self.mesh, trained_parameters(self.plan), 1, Checkpoints(folder / "checkpoints"), None
        )

    def step(self, made: Callable[..., Any]) -> Any:
        """Runs a step and waits for its numbers; returns the checksums, if any."""
        self.state, output = made(self.state, self.batch)
        fetch(output)
        return jax.block_until_ready(output.checksums)

    def noted(self) -> None:
        """Runs a step with checksums, as a run with verification does between verifications."""
        self.verifier.record(1, self.step(self.summed))

    def verified(self) -> None:
        """Verifies a step, with the step itself."""

        def compute(state: Any) -> Any:
            state, output = self.summed(state, self.batch)
            return state, output.checksums

        self.state = self.verifier.begin(1, self.state, self.batch, compute)
        checksums = self.step(self.summed)
        self.verifier.finish(1, self.state, checksums)

    def read(self, part: str = "") -> None:
        """Computes the checksums of the state's shards, or of a part of the state.

        A verification computes them four times.
        """
        arrays = named_arrays(self.state)
        jax.block_until_ready(
            verify.checksums({name: arrays[name] for name in arrays if name.startswith(part)})
        )

    def moved(self) -> None:
        """Copies the state to host memory and back."""
        arrays = named_arrays(self.state)
        held = verify.to_host(arrays)
        jax.block_until_ready(
            [verify.to_devices(held[name], array) for name, array in arrays.items()]
        )


def quartiles(actions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Returns the quartiles of each action's seconds.

    Actions take turns, so other load affects all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(repeats + 1):
        for name, action in actions.items():
            started = time.perf_counter()
            action()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.quantiles(found[1:], n=4) for name, found in times.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=128, help="the model's d_model (default 128)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a sequence (default 64)")
    parser.add_argument("--repeats", type=int, default=41)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.width, arguments.length, Path(folder))
        with jax.set_mesh(bench.mesh):
            actions: dict[str, Callable[[], object]] = {
                "a step, verification off": lambda: bench.step(bench.plain),
                "a step, with the checksums of its gradients": bench.noted,
                "a step that is verified": bench.verified,
                "  as much as its gradients, read once": lambda: bench.read("model."),
                "  the state, read once": bench.read,
                "  the state to host memory and back": bench.moved,
            }
            found = quartiles(actions, arguments.repeats)
    size = bytes_per_device(bench.plan) * bench.mesh.size
    print(
        f"jax {jax.__version__}, {os.cpu_count()} cores, {describe_mesh(mesh_sizes(bench.mesh))} "
        f"(CPU devices); {parameter_count(bench.plan):,} parameters, {size / 1e6:,.0f} MB of state "
        f"with its copies, 8 x {arguments.length} tokens in a step"
    )
    off, on, whole, gradients, *_ = (median for _, median, _ in found.values())
    rows = [
        (
            name,
            f"{median * 1e3:,.1f} ms",
            f"{low * 1e3:,.1f} to {high * 1e3:,.1f}",
            f"{median / off:.2f}",
        )
        for name, (low, median, high) in found.items()
    ]
    print(columns(("", "median", "quartiles", "of a step"), rows))
    print(
        f"the checksums in a step: {gradients / off:+.1%} by reading alone, {on / off - 1:+.1%} "
        "beside a step without"
    )
    print(
        f"a verification: {(whole - on) / off:.2f} steps more, {(whole - on) / off / 1000:.2%} of "
        "1,000 steps"
    )
    print(f"host memory meanwhile: {verification_bytes(bench.plan) / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
