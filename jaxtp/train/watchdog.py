"""Shows where a run hangs: a step that takes too long prints the stacks of all Python threads."""

import contextlib
import faulthandler
import os
import threading
import time

STDERR = 2
"""The file descriptor of the process, whatever `sys.stderr` has been replaced by."""


class Watchdog:
    """Watches in a thread whether it is fed, as each step does.

    The thread holds the interpreter while it prints: `faulthandler.dump_traceback_later` does not, and now and then
    crashes the process whose stacks it reads.

    Args:
      seconds: time without being fed after which the stacks are printed, once for each stall; 0 never prints them.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._fed: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def feed(self) -> None:
        """Starts the time anew."""
        self._fed = time.monotonic()
        if self._seconds and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._seconds / 4, threading.TIMEOUT_MAX)):
            if self._fed is not None and time.monotonic() - self._fed > self._seconds:
                self._fed = None
                message = f"no step for {self._seconds:g} s (train.stall_seconds); the run waits on:\n"
                with contextlib.suppress(OSError):  # a terminal that was closed
                    os.write(STDERR, message.encode())
                faulthandler.dump_traceback(STDERR, all_threads=True)
