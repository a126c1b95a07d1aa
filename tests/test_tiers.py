"""The test suite requests CPU devices, and CI runs every tier or fails."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TIERS = [
    line.split(":")[0]
    for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
]


def test_ci_runs_the_tiers_that_the_default_suite_leaves_out():
    script = (ROOT / ".ci/run").read_text()
    default, newest = re.findall(r"^ *check \S+ \S+ \d(.*)$", script, re.MULTILINE)
    (apart,) = re.findall(r'^ *part "Slurm and Open MPI" .* -m (\w+)$', script, re.MULTILINE)
    assert [*default.split(), apart] == TIERS
    marked = [path.parent for path in ROOT.glob("tests/**/*.py") if f"mark.{apart}" in path.read_text()]
    assert set(marked) == {ROOT / "tests/distributed"}
    assert newest.split() == [], "the others are sweeps that depend on no version"
    journeys = (
        re.search(r"-m journey --sample \d ((?:tests\S+|\\\n|\s)+)$", script, re.MULTILINE)[1].replace("\\", "").split()
    )
    assert "tests/distributed" in journeys
    assert all((ROOT / path).exists() for path in journeys), "of several processes and of a run that is killed"
    left_out = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["addopts"]
    assert all(f"not {tier}" in left_out for tier in TIERS)


@pytest.mark.journey
def test_a_part_of_ci_that_is_left_out_for_time_fails(tmp_path):
    (tmp_path / ".ci").mkdir()
    copy = tmp_path / ".ci/run"
    copy.write_text((ROOT / ".ci/run").read_text().replace("limit=5000 ", "limit=0 "))
    done = subprocess.run(["bash", str(copy)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(re.match(r"3\.\d+ set up +FAILED because it was left out: 0 s are over", line) for line in lines), lines
    assert any(re.match(r"aim +FAILED because it was left out", line) for line in lines), lines


@pytest.mark.journey
def test_where_there_are_gpus_the_suite_takes_cpu_devices():
    """If `JAX_PLATFORMS` names an absent platform, each use of a device fails."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-k", "fitting_meshes or axes", "tests/test_mesh.py"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
