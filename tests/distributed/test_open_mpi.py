"""`mpirun jaxtp train`, with Open MPI itself."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from runs import SMALL, TEXT, mesh, records, wait_for_step
from slurm import processes_with

from jaxtp.train.__main__ import main as train

PACED = Path(__file__).parent.parent / "paced.py"
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed"),
]


@pytest.fixture
def arguments(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [
        *SMALL,
        f"--data.path={tmp_path}/text.txt",
        "--train.steps=40",
        *mesh(1, 2, 2),
    ]


@pytest.fixture
def mpirun(tmp_path):
    """Starts four processes of one device."""
    started = []

    def start(*command, pace=0.25):
        (tmp_path / "pace").write_text(str(pace))
        place = {
            "PACE": str(tmp_path / "pace"),
            "JAX_NUM_CPU_DEVICES": "1",
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "TMPDIR": "/tmp",
            "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        }
        with (tmp_path / "log").open("w") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            started.append(
                subprocess.Popen(["mpirun", "-n", "4", *command], env=os.environ | place, **streams)
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    for left in processes_with(PACE=str(tmp_path / "pace")):
        os.kill(left, signal.SIGKILL)


def test_four_processes_equal_one_and_signal_to_mpirun_saves(tmp_path, arguments, mpirun):
    one = tmp_path / "one"
    four = tmp_path / "four"
    log = tmp_path / "log"
    assert train([*arguments, f"--run.dir={one}"]) == 0
    paced = [sys.executable, str(PACED), "-m", "jaxtp.train", *arguments, f"--run.dir={four}"]
    process = mpirun(*paced)
    wait_for_step(four, 3, process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 0, log.read_text()
    assert "processes (4 of 1 device: " in log.read_text()
    stopped = max(records(four))
    assert f"stopped by SIGUSR1 at step {stopped} and saved" in log.read_text()

    # mpirun waits so long before it passes SIGTERM on, and as long again before it kills.
    process = mpirun("--mca", "odls_base_sigkill_timeout", "15", *paced, pace=1)
    wait_for_step(four, stopped + 3, process)
    assert f"resumed from the checkpoint at step {stopped}\n" in log.read_text().replace(
        "\r\n", "\n"
    )
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    assert f"stopped by SIGTERM at step {max(records(four))} and saved" in log.read_text()
    whole = records(one)
    assert records(four) == pytest.approx({step: whole[step] for step in records(four)}, rel=1e-4)
