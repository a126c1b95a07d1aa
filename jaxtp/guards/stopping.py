"""Early end of a run: a signal to one process stops all, and a watchdog ends a stuck process.

Each process passes a flag for each device to the step, which returns the maximum of all flags. So
all processes stop after the same step, without an extra exchange.
"""

import contextlib
import faulthandler
import math
import os
import threading
import time

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.config.entry import TEMPORARY, Interrupt
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.guards.hook import FinishedStep, Hook, Loop, NextStep
from jaxtp.mesh import AXES

STOP = "stop"  # Name of the step's argument that takes the flags
STDERR = 2  # File descriptor, even if `sys.stderr` is replaced


class Stopping(Hook):
    """Agrees with all processes on the step after which the run stops."""

    def __init__(self, interrupt: Interrupt, mesh: Mesh):
        def flags(number: int) -> dict[str, Array]:
            if not is_multiprocess():
                return {}
            sharding = NamedSharding(mesh, PartitionSpec(AXES))
            local = np.full(len(mesh.local_devices), number, np.float32)
            return {STOP: jax.make_array_from_process_local_data(sharding, local, (mesh.size,))}

        self.requested: str | None = None
        """Why the user stops the run."""
        self._interrupt = interrupt
        # The process that received a signal, counted from 1; 0 if none did
        self._process = 0
        # Flags by whether this process received a signal
        self._flags = {False: flags(0), True: flags(jax.process_index() + 1)}

    def flags(self) -> dict[str, Array]:
        """Returns the argument of the next step."""
        return self._flags[self._received is not None]

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """Ends the start of the run: from the first step on, there is work to save."""
        self._interrupt.defer()

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """Takes the maximum of all processes' flags, which is a result of the step."""
        self._process = step.flag

    @property
    def reason(self) -> str | None:
        """The signal or request that stops the run, or None."""
        if not is_multiprocess():
            return self._received
        if not self._process:
            return None
        return self._received or f"a signal to process {self._process - 1}"

    @property
    def _received(self) -> str | None:
        return self._interrupt.received or self.requested


class Watchdog(Hook):
    """Reports, or ends, a process in which no step finishes.

    Args:
      seconds: time without an activity after which it prints the stacks of all Python threads, once
        per stall; 0 is never.
      abort_seconds: time without an activity after which it ends the process with exit code
        `TEMPORARY`; 0 is never.
    """

    def __init__(self, seconds: float, abort_seconds: float = 0.0):
        self._seconds = min(seconds or math.inf, threading.TIMEOUT_MAX)
        self._abort_seconds = min(abort_seconds or math.inf, threading.TIMEOUT_MAX)
        self._watches = bool(seconds or abort_seconds)
        self._fed = 0.0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def on_activity(self) -> None:
        """Restarts the time."""
        self._fed = time.monotonic()
        if self._watches and not self._thread.is_alive() and not self._stopped.is_set():
            self._thread.start()

    def rest(self) -> None:
        """Stops watching until the next activity."""
        self._fed = math.inf

    def close(self) -> None:
        """Stops watching."""
        self._stopped.set()

    def _watch(self) -> None:
        printed = 0.0
        while not self._stopped.wait(min(self._seconds, self._abort_seconds) / 4):
            fed = self._fed
            stalled = time.monotonic() - fed
            if stalled > self._abort_seconds:
                limit = f"{self._abort_seconds:g} s (train.stall_abort_seconds)"
                _show(f"no step for {limit}: the process ends; it waited on:")
                # Neither an exception nor a normal exit ends a process stuck in a collective.
                # `jaxtp launch` then ends the other processes.
                os._exit(TEMPORARY)
            if stalled > self._seconds and fed != printed:
                printed = fed
                _show(f"no step for {self._seconds:g} s (train.stall_seconds); the run waits on:")


def _show(message: str) -> None:
    # The terminal may be closed.
    with contextlib.suppress(OSError):
        os.write(STDERR, f"{message}\n".encode())
    # This holds the interpreter lock; `dump_traceback_later` does not, and sometimes crashes.
    faulthandler.dump_traceback(STDERR, all_threads=True)
