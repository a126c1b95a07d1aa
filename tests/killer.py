"""Runs the command again and again, killed at random instants, until it is through; prints how often it was killed.

    python tests/killer.py SEED SECONDS BATCH ARGUMENT...

Each run is a fork of this process, so that it is killed at its work rather than while it imports. Batches are of BATCH
documents, every one is saved, and the disk is slow, so that the work takes longer than SECONDS, which no run outlives.
"""

import os
import random
import signal
import sys
import time
import warnings

from jaxtp.prepare import batches
from jaxtp.prepare.__main__ import main

warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)


def ended(process, seconds):
    """Its exit code; None if it is still running after so many seconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def slow(fsync):
    def wait_and_fsync(descriptor):
        time.sleep(0.001)
        fsync(descriptor)

    return wait_and_fsync


def killed_until_done(seed, seconds, arguments):
    numbers = random.Random(seed)
    kills = 0
    while True:
        process = os.fork()
        if process == 0:
            os._exit(main(arguments))
        # After a while it is left to finish: a run that is always killed before it saves would never end.
        code = ended(process, 60 if kills >= 40 else numbers.uniform(0, seconds))
        if code is not None:
            assert code == 0, code
            return kills
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1


if __name__ == "__main__":
    batches.BATCH_DOCUMENTS = int(sys.argv[3])
    os.fsync = slow(os.fsync)
    print("killed", killed_until_done(int(sys.argv[1]), float(sys.argv[2]), [*sys.argv[4:], "--save-seconds", "0"]))
