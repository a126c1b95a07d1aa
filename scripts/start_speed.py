"""Measures what a command does before its first step, and a step's cost beside the devices' work.

    python scripts/start_speed.py --beside OTHER_CHECKOUT | tee scripts/results/start_speed.txt

0. From the start of a process to the end of its first step, where the cache has all programs: a new
   run, and the same run restarted from its checkpoint of step 1. `--restarts` measures only this
   (results/restart_speed.txt).
1. Imports, help and an estimate, each in a fresh process.
2. From the start of a process to the end of step 1 of the default run, without and with a
   compilation cache. "plain" plans the same state and compiles the same initialisation and step,
   and does nothing else: it steps on zeros, reads no data, checks and evaluates nothing. It has the
   run's imports except tensorboardX: the batch's shapes come from a module that imports Grain, and
   Grain imports Orbax, which a trainer in pure JAX would not have.
3. The programs that are compiled before step 1: `init` makes the state, and `_sum_parts` checks it.
4. A tiny step on one device: the jitted step called on the leaves of the state, on the state, on
   batches of the loader, and by the trainer, which also logs.

With `--beside` the same is measured with another checkout of this repository. All take turns in one
run, so that other load affects all; the table has medians and quartiles.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent.parent
ESTIMATE = [
    "-m",
    "jaxtp",
    "estimate",
    "--config",
    str(HERE / "configs/llama3_8b.yaml"),
    "--hardware",
    "h100x8",
]
COMMANDS = {
    "import jaxtp": ["-c", "import jaxtp"],
    "import jax": ["-c", "import jax"],
    "jaxtp --help": ["-m", "jaxtp", "--help"],
    "jaxtp train --help": ["-m", "jaxtp", "train", "--help"],
    "python -m jaxtp.train --help": ["-m", "jaxtp.train", "--help"],
    "jaxtp train --help-all": ["-m", "jaxtp", "train", "--help-all"],
    "jaxtp estimate, 8B on 8 H100s": ESTIMATE,
}
TINY = {
    "d_model": 16,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "d_ff": 16,
}
SHORT = {
    "data.sequence_length": 16,
    "data.global_batch_size": 2,
    "eval.every": 0,
    "checkpoint.every": 0,
}
LOOP = "the step on leaves, and the loader"
BLOCK = 50
"""Steps of a block."""

Times = dict[str, list[float]]


def first_step(folder: Path, *, plain: bool) -> dict[str, object]:
    """Runs one step; returns the time of its end and the compiled programs: name and seconds."""
    import jax

    compiled: list[tuple[str, float]] = []
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event]))

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if found := re.match(
                r"Finished XLA compilation of (.*) in ([\d.]+) sec", record.getMessage()
            ):
                compiled.append((found[1], float(found[2])))

    logger = logging.getLogger("jax._src.dispatch")
    logger.addHandler(Recorder())
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    if plain:
        plain_step()
    else:
        import jaxtp

        with contextlib.redirect_stdout(io.StringIO()), jaxtp.Trainer(folder=folder) as trainer:
            for step in trainer:
                assert step.metrics["loss"] > 0
                break
            read = events["/jax/compilation_cache/cache_hits"]
            return {"ended": time.time(), "compiled": list(compiled), "read": read}
    return {"ended": time.time(), "compiled": compiled}


def plain_step() -> None:
    """Runs the default run's first step on zeros."""
    import jax
    import jax.numpy as jnp

    import jaxtp
    from jaxtp.data.loader import abstract_batch
    from jaxtp.train import optimizer
    from jaxtp.train.config import TrainConfig
    from jaxtp.train.setup import plan_step
    from jaxtp.train.state import plan_state

    config = TrainConfig()
    mesh = jaxtp.make_mesh(**({"fsdp": 2, "tp": 4} if jax.device_count() == 8 else {}))
    plan = plan_state(config.model, optimizer.build(config.optimizer, config.train.steps), mesh)
    state = plan.create(seed=0)
    step = plan_step(config).trace_on(mesh).lower().compile()
    data = config.data
    batch = abstract_batch(mesh, data.global_batch_size, data.sequence_length, packed=data.packed)
    zeros = {
        name: jax.device_put(jnp.zeros(each.shape, each.dtype), each.sharding)
        for name, each in batch.items()
    }
    jax.block_until_ready(step(state, zeros))


def tiny_step(folder: Path, repeats: int) -> Times:
    """Returns milliseconds of a step by each way, a value for each block."""
    import jax

    import jaxtp
    from jaxtp.train.step import make_train_step

    settings = {f"model.{name}": value for name, value in TINY.items()} | SHORT
    times: Times = {}
    with (
        contextlib.redirect_stdout(io.StringIO()),
        jaxtp.Trainer(folder=folder, steps=10**6, settings=settings, mesh="tp=1") as trainer,
    ):
        run = trainer._session.loop.run
        steps = iter(trainer)
        for _ in range(BLOCK):
            next(steps)
        batches = run.data.batches(trainer.mesh, run.position, 10**6)
        batch, _ = next(batches)
        step = make_train_step(run.step_settings, run.blueprint)
        on_state = step.trace(run.state, batch).lower().compile()
        leaves = [leaf + 0 for leaf in run.leaves]
        step = make_train_step(run.step_settings, run.blueprint, on_leaves=True)
        on_leaves = step.trace(leaves, batch).lower().compile()
        state = run.blueprint.unflatten([leaf + 0 for leaf in leaves])

        def block(way: str) -> None:
            nonlocal leaves, state
            waiting: jax.Array | None = None
            for _ in range(BLOCK):
                if way == "the trainer":
                    next(steps)
                    continue
                inputs = next(batches)[0] if way == LOOP else batch
                if way.startswith("the step on leaves"):
                    leaves, output = on_leaves(leaves, inputs)
                else:
                    state, output = on_state(state, inputs)
                values = output.scalars.values
                if waiting is not None:  # one step in flight, as in the trainer
                    np.asarray(waiting).tolist()
                waiting = values

        for _ in range(repeats):
            for way in (
                "the step on leaves",
                "the step on the state",
                LOOP,
                "the trainer",
            ):
                started = time.perf_counter()
                block(way)
                times.setdefault(way, []).append((time.perf_counter() - started) / BLOCK * 1e3)
    return times


def show(title: str, found: Times, unit: str, base: str | None = None) -> None:
    """Prints medians and quartiles, and medians of the ratios to `base`."""
    print(f"\n{title}")
    for name, values in found.items():
        low, median, high = np.percentile(values, (25, 50, 75))
        ratio = (
            ""
            if base is None
            else format(
                statistics.median(a / b for a, b in zip(values, found[base], strict=True)), "8.2f"
            )
        )
        print(f"  {name:<52}{median:9.2f} {unit}  ({low:.2f} to {high:.2f}){ratio}")


def child(checkout: Path, words: list[str], **variables: str) -> tuple[float, str]:
    """Runs Python in a checkout; returns its start and its output."""
    environment = os.environ | {"PYTHONPATH": str(checkout)} | variables
    # Where this variable is set, each process compiles the sources anew.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    started = time.time()
    done = subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=checkout,
        check=True,
        capture_output=True,
        text=True,
    )
    return started, done.stdout


def start(
    checkout: Path, kind: str, folder: Path, *, here: bool
) -> tuple[float, dict[str, object]]:
    """Returns the seconds of a process to the end of its first step, and what it says."""
    words = [str(Path(__file__).resolve()), "--inner", kind, "--folder", str(folder)]
    variables = {"JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache")}
    if not here:
        variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    started, said = child(checkout, words, **variables)
    result = json.loads(said.splitlines()[-1])
    return result["ended"] - started, result


def restarts(repeats: int, *, here: bool) -> None:
    """Shows a restarted run beside a new one that finds its programs in the cache."""
    times: Times = {"a new run, warm cache": [], "a restarted run": []}
    with tempfile.TemporaryDirectory() as name:
        start(HERE, "run", Path(name) / "cold", here=here)
        for repeat in range(repeats):
            for values in times.values():
                seconds, result = start(HERE, "run", Path(name) / f"run{repeat}", here=here)
                values.append(seconds)
                found = [program for program, _ in result["compiled"]]
                print(f"  {len(found) - result['read']} compiled, read: {', '.join(found)}")
    title = "from the process to the end of its first step; ratios to the new run"
    show(title, times, "s", next(iter(times)))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--here", action="store_true", help="on the devices of this machine, not on 8 virtual ones"
    )
    parser.add_argument("--restarts", action="store_true", help="measure only restarts")
    parser.add_argument("--inner", choices=("run", "plain", "tiny"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.inner == "tiny":
        print(json.dumps(tiny_step(arguments.folder, arguments.repeats)))
        return
    if arguments.inner:
        print(json.dumps(first_step(arguments.folder, plain=arguments.inner == "plain")))
        return
    checkouts = {"": HERE} | ({", before": arguments.beside.resolve()} if arguments.beside else {})
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; medians of {arguments.repeats}, "
        "and quartiles"
    )

    print("\na new run with a warm cache and a restarted run, in turns")
    restarts(arguments.repeats, here=arguments.here)
    if arguments.restarts:
        return

    commands: Times = {}
    for _ in range(arguments.repeats):
        for name, words in COMMANDS.items():
            for suffix, checkout in checkouts.items():
                started, _ = child(checkout, words)
                commands.setdefault(f"{name}{suffix}", []).append(time.time() - started)
    show("commands", commands, "s")

    starts: Times = {}
    programs: list[list[tuple[str, float]]] = []
    for _ in range(arguments.repeats):
        for suffix, checkout in checkouts.items():
            for kind in ("plain", "run"):
                with tempfile.TemporaryDirectory() as name:
                    for cache in ("cold", "warm"):
                        folder = Path(name) / cache
                        seconds, result = start(checkout, kind, folder, here=arguments.here)
                        starts.setdefault(f"{cache}, {kind}{suffix}", []).append(seconds)
                        if (kind, cache, suffix) == ("run", "cold", ""):
                            programs.append(result["compiled"])
    for suffix in checkouts:
        for cache in ("cold", "warm"):
            found = {
                name: starts[name] for name in (f"{cache}, plain{suffix}", f"{cache}, run{suffix}")
            }
            title = "from the process to the end of step 1; ratios to plain"
            show(f"{title}, {cache} cache{suffix}", found, "s", f"{cache}, plain{suffix}")

    print("\nprograms compiled before the end of step 1, and their seconds in the last run")
    for name in dict.fromkeys(name for name, _ in programs[-1]):
        times = [seconds for other, seconds in programs[-1] if other == name]
        print(f"  {len(times):3} {name:<40}{sum(times):8.2f} s")

    for suffix, checkout in checkouts.items():
        with tempfile.TemporaryDirectory() as folder:
            words = [
                str(Path(__file__).resolve()),
                "--inner",
                "tiny",
                "--folder",
                f"{folder}/run",
                "--repeats",
                str(4 * arguments.repeats),
            ]
            _, said = child(checkout, words)
        show(
            f"a tiny step on one device{suffix}; ratios to the loop that only reads batches "
            "and steps",
            json.loads(said),
            "ms",
            LOOP,
        )


if __name__ == "__main__":
    main()
