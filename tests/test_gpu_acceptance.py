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
    done = accept(tmp_path, "devices", "experts", "step-8b-float8", "decode", "several")
    assert done.returncode == 0, done.stdout + done.stderr
    results = parts(tmp_path)
    assert results["devices"]["right"]
    assert results["experts"]["right"]
    assert set(results["experts"]["products"]) == {"xla float32", "xla bfloat16"}
    rows = {what: measured for what, measured, _ in results["step-8b-float8"]["rows"]}
    assert min(rows["MLP"], rows["attention"], rows["a step, ms"]) > 0
    assert all(least >= 0 for _, _, least in results["step-8b-float8"]["rows"])
    assert results["step-8b-float8"]["tokens/s"] > 0
    assert [least > 0 for _, _, least in results["decode"]["rows"]] == [True] * 4
    assert results["several"]["left_out"] == "there is one device"
    assert "several         left out  there is one device" in done.stdout
    assert "1 x cpu, " in done.stdout
    again = accept(tmp_path, "devices", "decode")
    assert parts(tmp_path) == results
    assert again.returncode == 0


@pytest.mark.slow
def test_attention_is_compared_and_the_step_runs_beside_the_plain_one(tmp_path):
    assert accept(tmp_path, "attention", "step-8b").returncode == 0
    found = parts(tmp_path)
    assert {name.split()[0] for name in found["attention"]["kernels"]} == {"blockwise", "xla"}
    assert found["step-8b"]["time / plain"] > 0


@pytest.mark.slow
def test_several_devices_are_measured_with_and_without_rings(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    assert accept(tmp_path, "several").returncode == 0
    found = parts(tmp_path)["several"]
    assert found["hardware"]["link"] > 0
    assert found["time / plain at tp 2, jaxtp"] > 0
    assert found["time / plain at tp 2, model.overlap=ring"] > 0


@pytest.mark.slow
def test_the_start_and_checkpoints_are_measured_by_their_scripts(tmp_path):
    assert accept(tmp_path, "start", "checkpoint").returncode == 0
    found = parts(tmp_path)
    assert found["start"]["warm, run"] > 0
    assert found["start"]["the trainer"] > 0
    assert found["checkpoint"]["restore / Orbax, restore"] > 0


@pytest.mark.journey
def test_a_part_that_fails_is_named_and_run_again(tmp_path):
    assert accept(tmp_path, "devices").returncode == 0
    file = tmp_path / "results.json"
    stored = json.loads(file.read_text())
    machine, right = stored["machine"], stored["parts"]["devices"]
    for damaged in (
        json.dumps({"machine": machine, "parts": {"devices": {"failed": "out of memory"}}}),
        json.dumps({"machine": machine | {"kind": "another"}, "parts": {"devices": right}}),
        "{",
        "[]",
    ):
        file.write_text(damaged)
        assert accept(tmp_path, "devices").returncode == 0
        assert parts(tmp_path)["devices"]["seconds"] != right["seconds"]
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--seconds", "1", "--again", "--only", "devices"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "devices         FAILED    it took more than 1 s" in done.stdout


def test_a_trace_of_a_gpu_is_summed_over_its_streams(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    summed = importlib.import_module("gpu_acceptance").summed
    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
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
    assert found == {"MLP": 5, "norms": 2, "other": 1}
