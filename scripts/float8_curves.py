"""Trains with products in bfloat16 and in float8 on the same bytes, and compares their losses.

    python scripts/float8_curves.py --runs runs/float8_curves | tee scripts/results/float8_curves.txt

Two models on the sources of Python's standard library, which the interpreter has: the README's run (400 steps), and one
of 10 million parameters (300 steps). A pair of runs differs in `precision.matmul` alone, with `matmul_least` 16 because
both models are narrow. One CPU device each: float8 operands do not depend on the mesh.

loss: mean over the last 20 steps; validation: on held-out files after the last step. Runs that have ended in --runs are
read, not repeated, so an interrupted script goes on; --read prints only what is there.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from jaxtp.analysis.tables import columns

LAST = 20  # steps of the mean
MODELS: dict[str, dict[str, object]] = {
    "README, 0.9M": {"train.steps": 400},
    "10M": {
        **{f"model.{name}": size for name, size in {"d-model": 384, "num-layers": 6, "num-heads": 6}.items()},
        **{f"model.{name}": size for name, size in {"num-kv-heads": 6, "head-dim": 64, "d-ff": 1024}.items()},
        "data.global-batch-size": 4,
        "data.sequence-length": 64,
        "optimizer.learning-rate": 1e-3,
        "train.steps": 300,
    },
}
EVERY = {"model.remat": "none", "model.precision.compute": "bfloat16", "train.log-every": 1, "eval.every": 1000}
FLOAT8 = {"model.precision.matmul": "float8", "model.precision.matmul-least": 16}
VARIANTS: dict[str, dict[str, object]] = {"bfloat16": {}, "float8": FLOAT8}
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
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model}, {variant}, seed {seed}:\n{done.stdout}{done.stderr}")


def losses(runs: Path, model: str, variant: str, seed: int) -> tuple[float, float] | None:
    """Returns the losses of a run that has ended, or None."""
    path, steps = folder_of(runs, model, variant, seed) / "metrics.jsonl", MODELS[model]["train.steps"]
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    held_out = [record["eval_loss"] for record in records if "eval_loss" in record and record["step"] == steps]
    trained = {record["step"]: record["loss"] for record in records if "loss" in record}
    return (statistics.fmean(list(trained.values())[-LAST:]), held_out[-1]) if held_out else None


def table(runs: Path, seeds: int) -> tuple[str, bool, int]:
    """Returns the table of pairs that have ended, whether all differences are accepted, and the number of pairs."""
    rows, differences = [], []
    for model in MODELS:
        for seed in range(seeds):
            plain, float8 = (losses(runs, model, variant, seed) for variant in VARIANTS)
            if plain and float8:
                relative = [b / a - 1 for a, b in zip(plain, float8, strict=True)]
                differences += relative
                cells = [f"{value:.4f}" for pair in zip(plain, float8, strict=True) for value in pair]
                rows.append((model, str(seed), *cells[:2], f"{relative[0]:+.2%}", *cells[2:], f"{relative[1]:+.2%}"))
            else:
                rows.append((model, str(seed), *["not run"] * 6))
    header = ("model", "seed", "loss bfloat16", "float8", "", "validation bfloat16", "float8", "")
    return columns(header, rows), all(abs(each) <= LIMIT for each in differences), len(differences) // 2


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a difference exceeds the limit, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/float8_curves"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--read", action="store_true", help="train nothing")
    arguments = parser.parse_args(argv)
    every = [(model, variant, seed) for seed in range(arguments.seeds) for model in MODELS for variant in VARIANTS]
    for model, variant, seed in every:
        if not arguments.read and losses(arguments.runs, model, variant, seed) is None:
            train(arguments.runs, model, variant, seed)
    text, good, pairs = table(arguments.runs, arguments.seeds)
    print(text)
    print(f"{pairs} pairs, {'all' if good else 'NOT all'} within {LIMIT:.0%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
