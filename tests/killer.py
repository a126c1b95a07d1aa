"""Runs the command again and again, killed at random instants, until it is through; prints how often it was killed.

    python tests/killer.py SEED BATCH OUT ARGUMENT...

Each run is a fork of this process, so that it is killed at its work rather than while it imports. Batches are of BATCH
documents, and every one is saved. An instant is some number of saves after the start, so that there is progress however
slow the machine is, and then a few milliseconds; or now and then so soon that nothing is saved.
"""

import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

from jaxtp.data.prepare import batches
from jaxtp.data.prepare.__main__ import main

warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)


def saves(journal):
    """What changes with every save."""
    try:
        status = journal.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def live(process, journal, count, seconds):
    """Waits for so many saves, and then so many seconds; the exit code if it ends before, else None."""
    last, until = saves(journal), None
    while until is None or time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        now = saves(journal)
        count, last = count - (now != last), now
        if count <= 0 and until is None:
            until = time.monotonic() + seconds
        time.sleep(0.0005)
    return None


def killed_until_done(seed, out, arguments):
    numbers = random.Random(seed)
    kills = 0
    while True:
        process = os.fork()
        if process == 0:
            os._exit(main([*arguments, "--out", str(out)]))
        instant = (0, numbers.uniform(0, 0.3)) if kills % 4 == 3 else (numbers.randint(1, 40), numbers.uniform(0, 0.01))
        code = live(process, out / "journal.json", *instant)
        if code is not None:
            assert code == 0, code
            return kills
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1


if __name__ == "__main__":
    batches.BATCH_DOCUMENTS = int(sys.argv[2])
    print("killed", killed_until_done(int(sys.argv[1]), Path(sys.argv[3]), [*sys.argv[4:], "--save-seconds", "0"]))
