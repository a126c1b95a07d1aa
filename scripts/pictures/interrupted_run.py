"""Trains a small model twice: undisturbed, and killed and resumed on another mesh.

    python scripts/pictures/interrupted_run.py

Writes the losses of both to `scripts/results/interrupted_run.json`, which a picture shows.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxtp.tools.report.curves import read_records

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "scripts/results/interrupted_run.json"
FIRST_MESH = "fsdp=2,tp=4"
SECOND_MESH = "dp=2,tp=2"
KILLED_AT = 45
FLAGS = (
    "--model.num-layers 2 --model.d-model 64 --model.d-ff 192 --data.sequence-length 64 "
    "--train.steps 60 --train.log-every 1 --checkpoint.every 30 "
    "--optimizer.learning-rate 0.01"
)


def start(run: Path, mesh: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "jaxtp.train", *FLAGS.split(), "--mesh", mesh]
    return subprocess.Popen([*command, f"--run.dir={run}"], cwd=ROOT, stdout=subprocess.DEVNULL)


def losses(run: Path) -> dict[int, float]:
    """Returns the loss of each step that a run has logged."""
    return {int(each["step"]): each["loss"] for each in read_records(run) if "loss" in each}


def finish(run: Path, mesh: str) -> dict[int, float]:
    if start(run, mesh).wait():
        raise SystemExit(f"the run on {mesh} has failed")
    return losses(run)


def kill(run: Path, mesh: str) -> dict[int, float]:
    """Kills a run after `KILLED_AT` steps; returns the losses until then."""
    process = start(run, mesh)
    logged = run / "metrics.jsonl"
    while not logged.exists() or KILLED_AT not in losses(run):
        if process.poll() is not None:
            raise SystemExit("the run ended before it was killed")
        time.sleep(0.01)
    process.kill()
    process.wait()
    return losses(run)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "first_mesh": FIRST_MESH,
            "second_mesh": SECOND_MESH,
            "undisturbed": finish(Path(folder, "undisturbed"), FIRST_MESH),
            "killed": kill(Path(folder, "killed"), FIRST_MESH),
        }
        checkpoints = Path(folder, "killed/checkpoints").iterdir()
        result["checkpoint"] = max(int(each.name) for each in checkpoints if each.name.isdigit())
        resumed = finish(Path(folder, "killed"), SECOND_MESH)
    result["resumed"] = {
        step: loss for step, loss in resumed.items() if step > result["checkpoint"]
    }
    RESULT.write_text(json.dumps(result) + "\n")
    print(RESULT)


if __name__ == "__main__":
    main()
