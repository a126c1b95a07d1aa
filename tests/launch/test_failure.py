"""A process that stops answering: the others end, by the signs of life that they miss."""

import os
import signal
import subprocess
import sys
import time

import pytest
from runs import SMALL, free_address, mesh


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])
def test_when_one_process_stops_the_other_ends_within_a_minute(stopped, tmp_path):
    address = free_address()
    flags = [*SMALL, *mesh(1, 2, 1), "--train.steps", "1000000", "--run.dir", str(tmp_path / "run")]
    logs = [tmp_path / f"{index}.log" for index in range(2)]
    processes = []
    for index, log in enumerate(logs):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index)}
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "jaxtp.train", *flags],
                    env={**os.environ, **place, "JAX_NUM_CPU_DEVICES": "1"},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        deadline = time.monotonic() + 240
        while "step 20/" not in logs[0].read_text():
            assert time.monotonic() < deadline
            time.sleep(0.2)
        processes[stopped].send_signal(signal.SIGSTOP)
        assert processes[1 - stopped].wait(60) != 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
