"""The suite takes CPU devices, and CI fails if it has no time for a part."""

import os
import re
import sys
from pathlib import Path

import pytest
from runs import run_program

ROOT = Path(__file__).parent.parent


@pytest.mark.journey
def test_a_part_of_ci_that_is_left_out_for_time_fails():
    environment = os.environ | {"CI_LIMIT": "0"}
    done = run_program("bash", ".ci/run", cwd=ROOT, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    for part in (
        "set up",
        "lowest versions, set up",
        "shell and Dockerfile",
        "transformers and peft",
    ):
        line = rf"^{part} +FAILED because it was left out: 0 s are over$"
        assert re.search(line, done.stdout, re.MULTILINE), part


@pytest.mark.journey
def test_the_turns_of_a_sample_are_all_cases_once():
    def collected(*options):
        command = ["-m", "pytest", "-n", "0", "--collect-only", "-q", "-m", "", *options]
        done = run_program(sys.executable, *command, "tests/test_mesh.py", cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        return {line for line in done.stdout.splitlines() if "::" in line}

    everything = collected()
    turns = [collected("--sample", "2", "--turn", turn) for turn in ("20001", "20002")]
    assert turns[0] | turns[1] == everything
    assert not turns[0] & turns[1]
    assert all(turns)


def test_on_a_machine_with_gpus_the_suite_takes_cpu_devices():
    """If `JAX_PLATFORMS` named an absent platform, each use of a device would fail."""
    code = "import environment, jax; print(jax.devices()[0].platform)"
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", code]
    done = run_program(*command, env=environment)
    assert done.stdout == "cpu\n", done.stderr
