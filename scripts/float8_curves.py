"""Trains with products in bfloat16 and in float8 on the same bytes, and compares their losses.

    python scripts/float8_curves.py --runs runs/float8_curves | tee
    scripts/results/float8_curves.txt

Two models are trained on the sources of Python's standard library: the README's run (400 steps),
and a model of 10 million parameters (300 steps). Runs in bfloat16 and in float8 differ only in
`precision.matmul`, with `matmul_least` 16 because both models are narrow. A run in float32 is the
control: it shows how much other rounding, even finer, changes the loss of a short run. Each run has
one CPU device, because float8 operands do not depend on the mesh.

loss: mean over the last 20 steps that a run and the run in bfloat16 both have; validation: loss on
held-out files after the last step. Differences are relative to bfloat16. Runs in --runs are
resumed, or read if they have ended.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jaxtp.analysis.tables import columns

LAST = 20  # steps of the mean
MODELS: dict[str, dict[str, object]] = {
    "README, 0.9M": {"train.steps": 400},
    "10M": {
        **{
            f"model.{name}": size
            for name, size in {"d-model": 384, "num-layers": 6, "num-heads": 6}.items()
        },
        **{
            f"model.{name}": size
            for name, size in {"num-kv-heads": 6, "head-dim": 64, "d-ff": 1024}.items()
        },
        "data.global-batch-size": 4,
        "data.sequence-length": 64,
        "optimizer.learning-rate": 1e-3,
        "train.steps": 300,
    },
}
EVERY = {
    "model.remat": "none",
    "model.precision.compute": "bfloat16",
    "train.log-every": 1,
    "eval.every": 1000,
}
FLOAT8 = {"model.precision.matmul": "float8", "model.precision.matmul-least": 16}
BASELINE = "bfloat16"
PAIR: dict[str, dict[str, object]] = {BASELINE: {}, "float8": FLOAT8}
CONTROL: dict[str, dict[str, object]] = {"float32": {"model.precision.compute": "float32"}}
VARIANTS = PAIR | CONTROL
LIMIT = 0.01  # relative difference that is accepted


def folder_of(runs: Path, model: str, variant: str, seed: int) -> Path:
    """Returns the folder of a run."""
    return runs / f"{list(MODELS).index(model)}-{variant}-{seed}"


def train(runs: Path, model: str, variant: str, seed: int) -> None:
    """Trains, or resumes an existing run."""
    flags = EVERY | MODELS[model] | VARIANTS[variant]
    flags |= {"run.seed": seed, "run.dir": folder_of(runs, model, variant, seed)}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "jaxtp.train", "--mesh", "dp=1,fsdp=1,tp=1", *words]
    # Several runs share a GPU.
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(
            f"FAILED: {model}, {variant}, seed {seed}:\n{done.stdout}{done.stderr}",
            file=sys.stderr,
            flush=True,
        )


def read(runs: Path, model: str, variant: str, seed: int) -> tuple[list[float], float | None]:
    """Returns the losses of a run's steps, and the validation loss once it has ended."""
    path = folder_of(runs, model, variant, seed) / "metrics.jsonl"
    losses = dict[int, float]()
    held_out = None
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if "loss" in record:
            losses[record["step"]] = record["loss"]
        elif record["step"] == MODELS[model]["train.steps"]:
            held_out = record.get("eval_loss")
    return list(losses.values()), held_out


def compare(runs: Path, seeds: int) -> tuple[str, bool]:
    """Returns the table of finished runs, and whether float8's mean differences are accepted."""
    rows = []
    good = True
    for model in MODELS:
        differences: dict[str, list[float]] = {}
        for seed in range(seeds):
            plain, plain_held = read(runs, model, BASELINE, seed)
            for variant in VARIANTS:
                losses, held = read(runs, model, variant, seed)
                if (steps := min(len(plain), len(losses))) < LAST:
                    continue
                loss, other = (
                    statistics.fmean(each[steps - LAST : steps]) for each in (losses, plain)
                )
                cells = [f"{loss:.4f}", f"{loss / other - 1:+.2%}"]
                if held and plain_held:
                    cells += [f"{held:.4f}", f"{held / plain_held - 1:+.2%}"]
                    differences.setdefault(variant, []).append(held / plain_held - 1)
                rows.append(
                    (model, str(seed), variant, str(steps), *cells, *["running"] * (4 - len(cells)))
                )
        means = {variant: statistics.fmean(each) for variant, each in differences.items()}
        for variant, mean in means.items():
            count = f"of {len(differences[variant])}"
            rows += [(model, "mean", variant, count, "", "", "", f"{mean:+.2%}")] * (
                variant != BASELINE
            )
        good &= abs(means.get("float8", math.inf)) <= LIMIT
    return columns(("model", "seed", "products", "steps", "loss", "", "validation", ""), rows), good


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a mean difference exceeds the limit, or no pair of a model has ended, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/float8_curves"), help="folder of the runs"
    )
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--read", action="store_true", help="train nothing, print what is there")
    arguments = parser.parse_args(argv)
    order = [
        (m, v, seed)
        for half in (PAIR, CONTROL)
        for seed in range(arguments.seeds)
        for m in MODELS
        for v in half
    ]
    missing = [run for run in order if read(arguments.runs, *run)[1] is None]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(lambda run: train(arguments.runs, *run), [] if arguments.read else missing))
    text, good = compare(arguments.runs, arguments.seeds)
    print(text)
    print(
        f"the mean validation loss in float8 is {'' if good else 'NOT '}within {LIMIT:.0%} of "
        "bfloat16's"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
