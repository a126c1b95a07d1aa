"""Runs `scripts/gpu_acceptance.py` small on the CPU: its parts, omitted parts, and parts that it skips."""

import importlib
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
    done = accept(
        tmp_path,
        "devices",
        "attention",
        "experts",
        "allocators",
        "step-1b",
        "ceiling",
        "several",
        "float8",
        "float8-step",
    )
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
    assert "several         left out  there is one device" in done.stdout
    assert "1 x cpu, " in done.stdout
    assert results["attention"]["wrong"] == "none"
    assert results["float8"]["gate, up in float8"] > 0
    assert results["float8"]["largest error"] < 0.05
    assert results["float8-step"]["loss_off"] < 1e-2
    assert results["float8-step"]["tokens/s in float8"] > 0
    assert len(results["step-1b"]["losses"]) > 1
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
    assert "step-1b         FAILED    IsADirectoryError" in done.stdout


@pytest.mark.journey
def test_parts_run_at_the_same_time_and_are_ended_if_they_take_too_long(tmp_path):
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--seconds", "1", "--only", "devices", "ceiling"]
    done = subprocess.run([*command, "--together", "devices", "ceiling"], capture_output=True, text=True)
    assert done.returncode == 1
    results = parts(tmp_path)
    assert {name: result["failed"] for name, result in results.items()} == dict.fromkeys(
        ("devices", "ceiling"), "it took more than 1 s"
    )


def test_a_trace_of_a_gpu_is_summed_over_its_streams(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    summed = importlib.import_module("gpu_acceptance").summed
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #13(Compute)"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Modules"}},
        {"ph": "X", "name": "nvjet_hsh", "pid": 1, "tid": 7, "ts": 0, "dur": 5, "args": {"hlo_op": "gemm.1"}},
        {"ph": "X", "name": "loop_add", "pid": 1, "tid": 7, "ts": 5, "dur": 2, "args": {"name": "jit(step)/norm/add"}},
        {"ph": "X", "name": "MemcpyD2D", "pid": 1, "tid": 7, "ts": 9, "dur": 1},
        {"ph": "X", "name": "jit_step", "pid": 1, "tid": 8, "ts": 0, "dur": 10, "args": {"hlo_module": "jit_step"}},
        {"ph": "X", "name": "call", "pid": 2, "tid": 7, "ts": 0, "dur": 10, "args": {"hlo_op": "gemm.1"}},
    ]
    found = summed(events, {"gemm.1": "jit(step)/mlp/dot_general"})
    assert found["microseconds"] == {"mlp": 5, "norm": 2, "other": 1}
    assert found["kernels"] == {"product": 5 / 8, "other": 2 / 8, "copy": 1 / 8}
    assert found["busy"] == 8 / 10
