"""Checkpoints of several processes: what one of them meets, all of them know and act on alike."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import free_address

HERE = Path(__file__).parent


def run_processes(folder, scenarios, processes=4, devices=1, seconds=300):
    """Runs scenarios of processes.py one after the other; ends all processes when one fails."""
    logs = [folder / f"{processes}-{index}.log" for index in range(processes)]
    place = {"JAX_COORDINATOR_ADDRESS": free_address(), "JAX_NUM_PROCESSES": str(processes)}
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *sys.path])
    started = []
    try:
        for index, log in enumerate(logs):
            with log.open("w") as file:
                command = [sys.executable, str(HERE / "processes.py"), str(folder), *scenarios]
                own = {**environment, **place, "JAX_PROCESS_ID": str(index)} if processes > 1 else environment
                started.append(subprocess.Popen(command, env=own, stdout=file, stderr=subprocess.STDOUT))
        until = time.monotonic() + seconds
        while any(each.poll() is None for each in started):
            failed = [each.args for each in started if each.poll()]
            if failed or time.monotonic() > until:
                break
            time.sleep(0.1)
    finally:
        for each in started:
            each.kill()
            each.wait()
    said = "\n".join(log.read_text()[-3000:] for log in logs)
    assert all(each.returncode == 0 for each in started), said
    assert said.count(f"{scenarios[-1]} done") == processes, said


@pytest.mark.journey
def test_what_one_process_meets_is_met_by_all(tmp_path):
    run_processes(tmp_path, ["save", "restore", "unreadable", "unshared", "unwritable", "late", "some damage"])


@pytest.mark.slow
def test_each_file_of_each_process_damaged(tmp_path):
    run_processes(tmp_path, ["save", "damage"], seconds=900)


@pytest.mark.slow
def test_saved_by_four_processes_and_restored_by_one_two_and_eight(tmp_path):
    run_processes(tmp_path, ["save"])
    for processes, devices in ((1, 1), (1, 4), (2, 2), (8, 1)):
        run_processes(tmp_path, ["restore"], processes, devices)
