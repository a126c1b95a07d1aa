"""Trains with products in bfloat16 and in float8 on the same bytes, and compares their losses.

    python scripts/float8_curves.py --runs runs/float8_curves | tee scripts/results/float8_curves.txt

Two models on the sources of Python's standard library, which the interpreter has: the README's run (400 steps), and one
of 10 million parameters (300 steps). A pair of runs differs in `precision.matmul` alone, with `matmul_least` 16 because
both models are narrow. One CPU device each: float8 operands do not depend on the mesh.

loss: mean over the last 20 steps that both runs of a pair have; validation: on held-out files after the last step. Runs
in --runs are resumed, or read if they have ended. --read trains nothing.
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


def read(runs: Path, model: str, variant: str, seed: int) -> tuple[list[float], float | None]:
    """Returns the losses of a run's steps, and the validation loss once it has ended."""
    path, losses, held_out = folder_of(runs, model, variant, seed) / "metrics.jsonl", dict[int, float](), None
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if "loss" in record:
            losses[record["step"]] = record["loss"]
        elif record["step"] == MODELS[model]["train.steps"]:
            held_out = record.get("eval_loss")
    return list(losses.values()), held_out


def compare(runs: Path, seeds: int) -> tuple[str, bool]:
    """Returns the table, and whether all differences of pairs that have ended are accepted."""
    rows, differences = [], []
    for model in MODELS:
        for seed in range(seeds):
            (plain, plain_held), (float8, float8_held) = (read(runs, model, variant, seed) for variant in VARIANTS)
            steps = min(len(plain), len(float8))
            if steps < LAST:
                continue
            pairs = [tuple(statistics.fmean(losses[steps - LAST : steps]) for losses in (plain, float8))]
            if plain_held and float8_held:
                pairs.append((plain_held, float8_held))
                differences += [b / a - 1 for a, b in pairs]
            cells = [cell for a, b in pairs for cell in (f"{a:.4f}", f"{b:.4f}", f"{b / a - 1:+.2%}")]
            rows.append((model, str(seed), str(steps), *cells, *["not ended"] * (6 - len(cells))))
    header = ("model", "seed", "steps", "loss, bfloat16", "float8", "", "validation, bfloat16", "float8", "")
    good = bool(differences) and all(abs(each) <= LIMIT for each in differences)
    return columns(header, rows) + f"\n{len(differences) // 2} pairs have ended", good


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a difference exceeds the limit, or if no pair has ended, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/float8_curves"), help="folder of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--read", action="store_true", help="train nothing")
    arguments = parser.parse_args(argv)
    for seed in range(arguments.seeds if not arguments.read else 0):
        for model in MODELS:
            for variant in VARIANTS:
                if read(arguments.runs, model, variant, seed)[1] is None:
                    train(arguments.runs, model, variant, seed)
    text, good = compare(arguments.runs, arguments.seeds)
    print(text, f"all are within {LIMIT:.0%}" if good else "FAIL", sep="\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
