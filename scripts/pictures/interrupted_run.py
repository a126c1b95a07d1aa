"""Trains a small model twice: undisturbed, and killed and resumed on another mesh.

    python scripts/pictures/interrupted_run.py

Writes the losses of both to `scripts/results/interrupted_run.json`, which a picture shows.
"""

import argparse
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
    """Kills a run once it has logged step `KILLED_AT`; returns the losses until then."""
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULT, metavar="FILE.json")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = finish(Path(folder, "undisturbed"), FIRST_MESH)
        run = Path(folder, "killed")
        killed = kill(run, FIRST_MESH)
        folders = [each.name for each in Path(run, "checkpoints").iterdir()]
        saved = max(int(name) for name in folders if name.isdigit())
        resumed = finish(run, SECOND_MESH)
    result = {
        "first_mesh": FIRST_MESH,
        "second_mesh": SECOND_MESH,
        "checkpoint": saved,
        "undisturbed": undisturbed,
        "killed": killed,
        "resumed": {step: loss for step, loss in resumed.items() if step > saved},
    }
    out.write_text(json.dumps(result) + "\n")
    difference = max(abs(loss - undisturbed[step]) for step, loss in resumed.items())
    print(f"the losses of the resumed run differ by at most {difference:.7f}")


if __name__ == "__main__":
    main()
