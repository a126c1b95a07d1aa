"""Runs `scripts/gpu_acceptance.py` small on the CPU: its parts, omitted parts, and parts that it skips."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/gpu_acceptance.py"


def accept(out, *parts):
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--only", *parts]
    return subprocess.run(command, capture_output=True, text=True)


def parts(folder):
    return json.loads((folder / "results.json").read_text())["parts"]


@pytest.mark.journey
def test_parts_run_by_themselves_and_are_not_run_twice(tmp_path):
    done = accept(tmp_path, "devices", "attention", "experts", "allocators", "step-1b", "ceiling", "several")
    assert done.returncode == 0, done.stdout + done.stderr
    results = parts(tmp_path)
    assert results["devices"]["right"]
    assert results["devices"]["check_seconds"] > 0
    assert results["allocators"]["loss_off"] == 0
    assert results["allocators"]["tokens/s with cuda_async"] > 0
    assert results["attention"]["right"]
    assert {name.split()[0] for name in results["attention"]["kernels"]} == {"blockwise", "xla"}
    assert results["experts"]["right"]
    assert set(results["experts"]["products"]) == {"xla float32", "xla bfloat16"}
    assert results["step-1b"]["tokens_per_second"] > 0
    assert results["step-1b"]["estimated_bytes"] > 0
    assert results["several"]["left_out"] == "there is one device"
    assert "several     left out  there is one device" in done.stdout
    assert "1 x cpu, " in done.stdout
    again = accept(tmp_path, "attention", "ceiling")
    assert parts(tmp_path) == results
    assert again.returncode == 0


@pytest.mark.slow
def test_several_devices_are_measured_with_and_without_rings(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert accept(tmp_path, "several").returncode == 0
    found = parts(tmp_path)["several"]
    assert found["hardware"]["link"] > 0
    assert found["tokens/s at tp 2"] > 0
    assert found["tokens/s at tp 2 with rings"] > 0


@pytest.mark.journey
def test_a_part_that_fails_is_told_and_tried_again(tmp_path):
    assert accept(tmp_path, "ceiling").returncode == 0
    file = tmp_path / "results.json"
    kept = json.loads(file.read_text())
    machine, right = kept["machine"], kept["parts"]["ceiling"]
    for stored in (
        json.dumps({"machine": machine, "parts": {"ceiling": {"failed": "out of memory"}}}),
        json.dumps({"machine": machine | {"kind": "another"}, "parts": {"ceiling": right}}),
        "{",
        "[]",
    ):
        file.write_text(stored)
        assert accept(tmp_path, "ceiling").returncode == 0
        assert parts(tmp_path)["ceiling"]["seconds"] != right["seconds"]
    (tmp_path / "step-1b.yaml").mkdir()  # nothing can be written there
    done = accept(tmp_path, "step-1b")
    assert done.returncode == 1
    assert "step-1b     FAILED    IsADirectoryError" in done.stdout
