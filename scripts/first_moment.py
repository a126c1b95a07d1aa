"""Trains the README's run with the first moment in float32 and in bfloat16, and compares losses.

    python scripts/first_moment.py | tee scripts/results/first_moment.txt

Further flags of `jaxtp train` apply to both. Differences are between medians over seeds.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = range(3)
SHOWN = (50, 100, 200, 300, 400)


def losses(folder: Path, seed: int, dtype: str) -> dict[int, float]:
    """Returns the training loss by step, and at 0 the last validation loss."""
    run = folder / f"{dtype}{seed}"
    flags = [f"--run.dir={run}", f"--run.seed={seed}", f"--optimizer.first-moment={dtype}"]
    subprocess.run(
        [sys.executable, "-m", "jaxtp.train", *flags, *sys.argv[1:]],
        check=True,
        capture_output=True,
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    final = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    return {row["step"]: row["loss"] for row in rows if row.get("loss")} | {0: final}


with tempfile.TemporaryDirectory() as root:
    found = {
        dtype: [losses(Path(root), seed, dtype) for seed in SEEDS]
        for dtype in ("param", "bfloat16")
    }
print(
    f"{'loss':<12}{'first moment':<14}"
    + "".join(f"{f'seed {seed}':>9}" for seed in SEEDS)
    + f"{'median':>9}"
)
for step in (*SHOWN, 0):
    medians = []
    for dtype, runs in found.items():
        medians.append(statistics.median(values := [each[step] for each in runs]))
        name = f"step {step}" if step else "validation"
        row = "".join(f"{value:9.4f}" for value in (*values, medians[-1]))
        print(f"{name:<12}{'float32' if dtype == 'param' else dtype:<14}{row}")
    print(f"{'':<12}{'difference':<14}{medians[1] / medians[0] - 1:>+36.2%}")
