"""Two processes that MPICH's `mpiexec`, Intel's or torchrun starts, beside one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from runs import SMALL, TEXT, mesh, records

from jaxtp.train.__main__ import main as train

pytestmark = pytest.mark.cluster
STARTS = {
    "mpiexec.hydra": ("-n", "2", sys.executable),
    "torchrun": ("--nproc-per-node=2", "--no-python", sys.executable),
}


@pytest.mark.parametrize("launcher", STARTS)
def test_two_processes_equal_one(launcher, tmp_path):
    """The launchers are packages of Python too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    program = shutil.which(launcher, path=path)
    if program is None:
        pytest.skip(f"{launcher} is not installed: pip install mpich, or torch")
    (tmp_path / "text.txt").write_text(TEXT)
    text = f"--data.path={tmp_path}/text.txt"
    arguments = [*SMALL, text, "--train.steps=4", *mesh(1, 2, 1)]
    assert train([*arguments, f"--run.dir={tmp_path}/one"]) == 0
    command = [program, *STARTS[launcher], "-m", "jaxtp.train", *arguments]
    place = {
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    started = subprocess.run(
        [*command, f"--run.dir={tmp_path}/two"],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert started.returncode == 0, started.stderr
    assert "processes (2 of 1 device: " in started.stdout
    assert records(tmp_path / "two") == pytest.approx(records(tmp_path / "one"), rel=1e-4)
