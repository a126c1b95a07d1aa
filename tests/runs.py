"""Small training runs: their flags, outputs and processes."""

import contextlib
import json
import resource
import socket
import subprocess
import time
from pathlib import Path

from tables import read_table, write_json

TEXT = "".join(f"line {i}: the quick brown fox jumps over {i * i} lazy dogs\n" for i in range(2000))
SMALL = [
    "--model.d-model=32",
    "--model.num-layers=2",
    "--model.head-dim=4",
    "--model.d-ff=64",
    "--data.sequence-length=32",
    "--data.global-batch-size=8",
    "--train.log-every=1",
    "--checkpoint.every=5",
    "--eval.batches=2",
    "--eval.every=20",
    "--optimizer.warmup-steps=2",
]
OF_ANY_MODEL = SMALL[4:]
SMOL_LM = read_table(__file__)
"""The config.json of SmolLM2-135M, whose number of heads no power of two divides."""


def smol_lm(folder):
    """Writes a folder of SmolLM2-135M without weights."""
    folder.mkdir()
    write_json(folder / "config.json", SMOL_LM)
    return folder


def mesh(dp, fsdp, tp, cp=1):
    flags = [f"--mesh.dp={dp}", f"--mesh.fsdp={fsdp}", f"--mesh.tp={tp}"]
    return flags if cp == 1 else [*flags, f"--mesh.cp={cp}"]


def records(folder, key="loss"):
    """Returns `{step: value}` of the metrics; checks that each step occurs once, in order."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if key in row]
    steps = [row["step"] for row in rows]
    assert steps == sorted(set(steps))
    return {row["step"]: row[key] for row in rows}


@contextlib.contextmanager
def full_disk(size):
    """Limits files to `size` bytes. Compile before: JAX's compilation cache would be truncated
    too.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def contents(folder):
    """Returns the files of a folder, without locks: they name the last process, whatever it did."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def run_program(*words, timeout=240, **settings):
    """Runs a program to its end, for at most four minutes: less than a case may take."""
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, **settings)


def free_address():
    """Returns a free address for a coordinator."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def finish(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_until(happened):
    until = time.monotonic() + 180
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


def wait_for_step(folder, step, process):
    metrics = Path(folder) / "metrics.jsonl"
    while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
