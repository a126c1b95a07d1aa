"""A trace of a few steps, for XProf and Perfetto."""

from collections.abc import Callable
from pathlib import Path

import jax


class Profiler:
    """Traces `steps` steps from step `start` on, into a folder.

    Args:
      folder: folder of the trace, which is created when it starts.
      start: the first step to trace, counted from the start of training; 0 traces none.
      steps: number of steps to trace.

    A trace that fails, as on a full disk, is reported and never touches the run.
    """

    def __init__(self, folder: Path, start: int, steps: int):
        self._folder = folder
        self.first, self.last = start, start + steps - 1
        self.tracing = False
        self._failure: str | None = None

    def start(self) -> None:
        """Starts the trace, before step `first`."""
        self.tracing = True
        self._attempt(lambda: jax.profiler.start_trace(self._folder, create_perfetto_trace=True))

    def stop(self, results: object) -> str:
        """Ends the trace once the results of step `last` are there; returns where it is, or why there is none."""
        jax.block_until_ready(results)
        self.close()
        steps = f"profile of steps {self.first} to {self.last}"
        return f"{steps} in {self._folder}" if self._failure is None else f"no {steps}: {self._failure}"

    def close(self) -> None:
        """Ends a trace that a run did not live to finish."""
        if self.tracing:
            self.tracing = False
            if self._failure is None:
                self._attempt(jax.profiler.stop_trace)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # that of the file system, or of another trace in this process
            self._failure = str(error).partition("\n")[0] or type(error).__name__
