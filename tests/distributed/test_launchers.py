"""Two processes that MPICH's `mpiexec`, Intel's, torchrun or Ray starts, beside one."""

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
TRAIN = (sys.executable, "-m", "jaxtp.train")
RAY = str(Path(__file__).parent.parent.parent / "scripts/cluster/ray_hosts.py")
STARTS = {
    "mpiexec.hydra": ("mpiexec.hydra", "-n", "2", *TRAIN),
    "torchrun": ("torchrun", "--nproc-per-node=2", "--no-python", *TRAIN),
    "ray": (sys.executable, RAY, "--gpus=0", "--strategy=SPREAD", "--"),
}


@pytest.mark.parametrize("launcher", STARTS)
def test_two_processes_equal_one(launcher, tmp_path):
    """The launchers are packages of Python too."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if shutil.which(launcher, path=path) is None:
        pytest.skip(f"{launcher} is not installed: pip install mpich, torch or ray")
    (tmp_path / "text.txt").write_text(TEXT)
    text = f"--data.path={tmp_path}/text.txt"
    arguments = [*SMALL, text, "--train.steps=4", *mesh(1, 2, 1)]
    assert train([*arguments, f"--run.dir={tmp_path}/one"]) == 0
    place = {
        "PATH": path,
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    started = subprocess.run(
        [*STARTS[launcher], *arguments, f"--run.dir={tmp_path}/two"],
        env=os.environ | place,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert started.returncode == 0, started.stderr
    assert "processes (2 of 1 device: " in started.stdout
    assert records(tmp_path / "two") == pytest.approx(records(tmp_path / "one"), rel=1e-4)
