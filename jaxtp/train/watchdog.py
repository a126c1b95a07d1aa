"""Says where a run hangs: a step that takes too long prints the stacks of all Python threads."""

import faulthandler

STDERR = 2
"""The process's own, whatever Python's has been replaced by."""


class Watchdog:
    """Armed before a step, fed by it.

    Args:
      seconds: without being fed after which the stacks are printed, again and again; 0 never does.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds

    def feed(self) -> None:
        """Starts the time anew."""
        if self._seconds:
            faulthandler.dump_traceback_later(self._seconds, repeat=True, file=STDERR)

    def stop(self) -> None:
        """Stops watching."""
        faulthandler.cancel_dump_traceback_later()
