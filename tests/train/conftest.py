import os
import signal
import subprocess
import sys

import pytest


@pytest.fixture
def start():
    """Starts a run in a process of its own; whatever is left of it at the end of the test is
    killed.
    """
    processes = []
    # a child inherits what is ignored, as in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def start_process(command, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtp.train", *command],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()
