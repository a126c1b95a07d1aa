"""Runs `scripts/gpu_acceptance.py` small on the CPU: its parts, omitted parts, and parts that it
skips.
"""

import json
import subprocess
import sys
from pathlib import Path

import gpu_acceptance
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/gpu_acceptance.py"


def accept(out, *parts, options=(), code=0):
    """Runs parts of the script, which ends with an exit code; returns what it prints and its
    results.
    """
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options, "--only", *parts]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((out / "results.json").read_text())["parts"]


@pytest.mark.journey
def test_parts_run_by_themselves_and_are_not_run_twice(tmp_path):
    said, results = accept(tmp_path, "devices", "experts", "step-8b-float8", "decode", "several")
    assert results["devices"]["right"]
    assert results["experts"]["right"]
    assert set(results["experts"]["products"]) == {"xla float32", "xla bfloat16"}
    rows = {what: measured for what, measured, _ in results["step-8b-float8"]["rows"]}
    assert min(rows["MLP"], rows["attention"], rows["a step, ms"]) > 0
    assert all(least >= 0 for _, _, least in results["step-8b-float8"]["rows"])
    assert results["step-8b-float8"]["tokens/s"] > 0
    assert [least > 0 for _, _, least in results["decode"]["rows"]] == [True] * 4
    assert results["several"]["left_out"] == "there is one device"
    assert "several         left out  there is one device" in said
    assert "1 x cpu, " in said
    _, again = accept(tmp_path, "devices", "decode")
    assert again == results


@pytest.mark.slow
def test_attention_is_compared_and_the_step_runs_beside_the_plain_one(tmp_path):
    _, found = accept(tmp_path, "attention", "step-8b")
    assert {name.split()[0] for name in found["attention"]["kernels"]} == {"blockwise", "xla"}
    assert found["step-8b"]["time / plain"] > 0


@pytest.mark.slow
def test_several_devices_are_measured_with_and_without_rings(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    _, results = accept(tmp_path, "several")
    found = results["several"]
    assert found["hardware"]["link"] > 0
    assert found["time / plain at tp 2, jaxtp"] > 0
    assert found["time / plain at tp 2, model.overlap=ring"] > 0


@pytest.mark.slow
def test_checkpoints_are_measured_by_their_script(tmp_path):
    _, found = accept(tmp_path, "checkpoint")
    assert found["checkpoint"]["restore / Orbax, restore"] > 0


@pytest.mark.journey
def test_a_part_that_fails_is_named_and_run_again(tmp_path):
    said, failed = accept(tmp_path, "devices", options=("--seconds", "1"), code=1)
    assert "devices         FAILED    it took more than 1 s" in said
    assert "failed" in failed["devices"]
    _, results = accept(tmp_path, "devices")
    assert results["devices"]["right"]


def test_results_of_other_devices_and_damaged_ones_are_not_used(tmp_path):
    file = tmp_path / "results.json"
    machine = {"kind": "cpu", "count": 1, "versions": {}}
    parts = {"devices": {"right": True}}
    file.write_text(json.dumps({"machine": machine, "parts": parts}))
    assert gpu_acceptance.earlier(file, machine) == parts
    assert gpu_acceptance.earlier(file, machine | {"kind": "another"}) == {}
    for damaged in ("{", "[]"):
        file.write_text(damaged)
        assert gpu_acceptance.earlier(file, machine) == {}


TRACE = """{"traceEvents": [
 {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "/device:GPU:0"}},
 {"ph": "M", "name": "process_sort_index", "pid": 1, "args": {"sort_index": 1}},
 {"ph": "M", "name": "process_name", "pid": 2, "args": {"name": "/host:CPU"}},
 {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": "Stream #13(Compute)"}},
 {"ph": "M", "name": "thread_name", "pid": 1, "tid": 8, "args": {"name": "XLA Modules"}},
 {"ph": "X", "name": "nvjet_hsh", "pid": 1, "tid": 7, "ts": 0, "dur": 5,
  "args": {"hlo_op": "gemm.1"}},
 {"ph": "X", "name": "loop_add", "pid": 1, "tid": 7, "ts": 5, "dur": 2,
  "args": {"name": "jit(step)/norm/add"}},
 {"ph": "X", "name": "MemcpyD2D", "pid": 1, "tid": 7, "ts": 9, "dur": 1},
 {"ph": "X", "name": "jit_step", "pid": 1, "tid": 8, "ts": 0, "dur": 10,
  "args": {"hlo_module": "jit_step"}},
 {"ph": "X", "name": "call", "pid": 2, "tid": 7, "ts": 0, "dur": 10,
  "args": {"hlo_op": "gemm.1"}}
]}"""
"""Two kernels and a copy on a stream. Events of XLA and of the host about them take no time."""


def test_a_trace_of_a_gpu_is_summed_over_its_streams():
    found = gpu_acceptance.summed(
        json.loads(TRACE)["traceEvents"], {"gemm.1": "jit(step)/mlp/dot_general"}
    )
    assert found == {"MLP": 5, "norms": 2, "other": 1}
