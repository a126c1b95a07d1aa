"""Checkpoints of several processes: what one of them meets, all of them know and act on alike."""

import os
from pathlib import Path

import pytest

from jaxtp.tools.launch.__main__ import main as launch

HERE = Path(__file__).parent


@pytest.fixture
def run_processes(tmp_path, monkeypatch):
    """Runs scenarios of processes.py one after the other; all processes end when one fails."""
    tests = str(HERE.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]))

    def run(scenarios, processes=4, devices=1):
        logs = tmp_path / f"logs-{processes}-{scenarios[0]}"
        flags = [
            f"--processes={processes}",
            f"--devices={devices}",
            f"--logs={logs}",
            "--",
        ]
        code = launch([*flags, str(HERE / "processes.py"), str(tmp_path), *scenarios])
        said = "\n".join(log.read_text()[-3000:] for log in logs.iterdir())
        assert code == 0, said
        assert said.count(f"{scenarios[-1]} done") == processes, said

    return run


@pytest.mark.journey
def test_what_one_process_meets_is_met_by_all(run_processes):
    run_processes(["save", "restore", "unreadable", "unshared", "unwritable", "late", "damage"])


@pytest.mark.slow
def test_saved_by_two_processes_and_restored_by_four(run_processes):
    run_processes(["save"], 2, 2)
    run_processes(["restore"], 4)
