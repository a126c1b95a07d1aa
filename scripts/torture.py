"""Repeatedly kills a training run, and compares its metrics with an uninterrupted run.

    python scripts/torture.py

Half of the rounds stay on one mesh; their joined metrics must equal the uninterrupted run's metrics
bit for bit. The other half changes the mesh in each round; losses must agree within 1e-4. A round
ends with SIGKILL or SIGTERM at a random instant. The run saves every third step, so many signals
arrive during a save. The metrics must have each step exactly once, with the right number of tokens.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

MESHES = [(1, 2, 4), (2, 2, 2), (1, 1, 8), (2, 1, 2), (1, 4, 1), (1, 1, 1)]
SMALL = {
    "model.d-model": 32,
    "model.num-layers": 2,
    "model.head-dim": 4,
    "model.d-ff": 64,
    "data.sequence-length": 32,
    "data.global-batch-size": 8,
    "train.log-every": 1,
    "checkpoint.every": 3,
    "eval.every": 25,
    "eval.batches": 2,
    "optimizer.warmup-steps": 2,
}
COMPARED = ("loss", "grad_norm", "param_norm", "tokens")


@dataclass
class Round:
    """The end of a round."""

    mesh: tuple[int, int, int]
    signal: str
    reached: int
    during_save: bool


def start(folder: Path, text: Path, steps: int, mesh: tuple[int, int, int]) -> subprocess.Popen:
    """Starts a training run in its own process."""
    flags = SMALL | {"run.dir": folder, "data.path": text, "train.steps": steps}
    flags |= dict(zip(("mesh.dp", "mesh.fsdp", "mesh.tp"), mesh, strict=True))
    command = [
        sys.executable,
        "-m",
        "jaxtp.train",
        *(str(part) for k, v in flags.items() for part in (f"--{k}", v)),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read(folder: Path) -> dict[int, dict]:
    """Returns the logged steps of a run, and checks that each occurs once."""
    path = folder / "metrics.jsonl"
    steps = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the line is being written
        if "loss" in record:
            assert record["step"] not in steps, f"step {record['step']} twice"
            steps[record["step"]] = record
    return steps


def disturb(process: subprocess.Popen, folder: Path, chance: random.Random) -> tuple[str, bool]:
    """Waits for a new step and a random time, then kills the run.

    Returns the signal, and whether a save was active.
    """
    before = max(read(folder), default=0)
    while process.poll() is None and max(read(folder), default=0) <= before:
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.8))
    number = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM])
    process.send_signal(number)
    saving = any(
        ".orbax-checkpoint-tmp" in path.name for path in (folder / "checkpoints").glob("*")
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode in (0, -number), output
    return signal.Signals(number).name, saving


def torture(
    folder: Path, text: Path, steps: int, rounds: int, same_mesh: bool, chance: random.Random
) -> list[Round]:
    """Runs `rounds` rounds that end by a signal, then one to the last step."""
    done = []
    for _ in range(rounds):
        mesh = MESHES[0] if same_mesh else chance.choice(MESHES)
        process = start(folder, text, steps, mesh)
        name, saving = disturb(process, folder, chance)
        done.append(Round(mesh, name, max(read(folder), default=0), saving))
        print(
            f"  {mesh} {name} at step {done[-1].reached}{' in a save' if saving else ''}",
            flush=True,
        )
    last = start(folder, text, steps, MESHES[0])
    output, _ = last.communicate(timeout=900)
    assert last.returncode == 0, output
    return done


def differences(whole: Path, joined: Path) -> dict[str, float]:
    """Returns the largest difference of each metric over the steps.

    Both runs must have the same steps.
    """
    expected = read(whole)
    actual = read(joined)
    assert list(actual) == list(expected), "steps are missing"
    return {
        key: max(abs(actual[step][key] - expected[step][key]) for step in expected)
        for key in COMPARED
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=26, help="total number of rounds (default 26)"
    )
    parser.add_argument("--steps", type=int, default=150, help="steps of the run (default 150)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the instants and meshes")
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text.txt"
        text.write_text(
            "".join(
                f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(9000)
            )
        )
        whole = start(folder / "whole", text, arguments.steps, MESHES[0])
        output, _ = whole.communicate(timeout=900)
        assert whole.returncode == 0, output
        failed = 0
        changing = {"loss": 1e-4, "tokens": 0.0}
        for label, same_mesh, allowed in (
            ("the same mesh", True, dict.fromkeys(COMPARED, 0.0)),
            ("changing meshes", False, changing),
        ):
            print(f"{arguments.rounds // 2} rounds on {label}", flush=True)
            run = folder / label.replace(" ", "_")
            torture(run, text, arguments.steps, arguments.rounds // 2, same_mesh, chance)
            worst = differences(folder / "whole", run)
            good = all(worst[key] <= bound for key, bound in allowed.items())
            failed += not good
            print(
                f"{'ok' if good else 'FAIL'}: largest differences {worst}, allowed {allowed}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
