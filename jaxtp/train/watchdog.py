"""Shows where a run hangs, and ends one that is stuck: a step that takes too long.

An exception cannot end a process that is stuck in a collective, so it ends itself; `jaxtp launch` then ends the others.
"""

import contextlib
import faulthandler
import os
import threading
import time
from typing import NoReturn

from jaxtp.entry import PASSING

STDERR = 2
"""The file descriptor of the process, whatever `sys.stderr` has been replaced by."""


class Watchdog:
    """Watches in a thread whether it is fed, as each step does.

    The thread holds the interpreter while it prints: `faulthandler.dump_traceback_later` does not, and now and then
    crashes the process whose stacks it reads.

    Args:
      seconds: time without being fed after which the stacks of all Python threads are printed, once for each stall; 0
        never prints them.
      abort_seconds: time after which the process ends, with the exit code `PASSING`; 0 never ends it.
    """

    def __init__(self, seconds: float, abort_seconds: float = 0.0):
        self._seconds = seconds or threading.TIMEOUT_MAX
        self._abort_seconds = abort_seconds or threading.TIMEOUT_MAX
        self._watches = bool(seconds or abort_seconds)
        self._fed: float | None = None
        self._printed: float | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def feed(self) -> None:
        """Starts the time anew."""
        self._fed = time.monotonic()
        if self._watches and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def stop(self) -> None:
        """Stops watching."""
        self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(min(self._seconds, self._abort_seconds, threading.TIMEOUT_MAX) / 4):
            fed = self._fed
            stalled = 0.0 if fed is None else time.monotonic() - fed
            if stalled > self._abort_seconds:
                self._end()
            if stalled > self._seconds and fed != self._printed:
                self._printed = fed
                _show(f"no step for {self._seconds:g} s (train.stall_seconds); the run waits on:")

    def _end(self) -> NoReturn:
        _show(f"no step for {self._abort_seconds:g} s (train.stall_abort_seconds): the process ends; it waited on:")
        os._exit(PASSING)  # whatever it waits for would keep it from ending otherwise


def _show(message: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that was closed
        os.write(STDERR, f"{message}\n".encode())
    faulthandler.dump_traceback(STDERR, all_threads=True)
