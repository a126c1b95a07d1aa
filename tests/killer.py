"""Repeats a `jaxtp prepare` command that it kills at random instants, until it ends; prints the
number of kills.

    python tests/killer.py SEED BATCH OUT ARGUMENT...

Each run is a fork of this process, so a kill does not hit its imports. Batches have BATCH
documents, and each batch is saved. A kill comes a few milliseconds after some number of saves, so
there is progress on slow machines too; sometimes it comes before the first save.
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
    """Returns a value that changes with every save."""
    try:
        status = journal.stat()
    except FileNotFoundError:
        return None
    return status.st_ino, status.st_mtime_ns


def live(process, journal, count, seconds):
    """Waits for `count` saves, then `seconds`; returns the exit code if the process ends before,
    else None.
    """
    last = saves(journal)
    until = None
    while until is None or time.monotonic() < until:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        now = saves(journal)
        count -= now != last
        last = now
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
            os._exit(main([*arguments, f"--out={out}"]))
        instant = (
            (0, numbers.uniform(0, 0.3))
            if kills % 4 == 3
            else (numbers.randint(1, 40), numbers.uniform(0, 0.01))
        )
        code = live(process, out / "journal.json", *instant)
        if code is not None:
            assert code == 0, code
            return kills
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        kills += 1


if __name__ == "__main__":
    batches.BATCH_DOCUMENTS = int(sys.argv[2])
    print(
        "killed",
        killed_until_done(int(sys.argv[1]), Path(sys.argv[3]), [*sys.argv[4:], "--save-seconds=0"]),
    )
