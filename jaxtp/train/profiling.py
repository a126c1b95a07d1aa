"""A trace of a few steps, for XProf and Perfetto."""

from pathlib import Path

import jax


class Profiler:
    """Traces `steps` steps from step `start` on, into a folder.

    Args:
      folder: created when the trace starts.
      start: the first step to trace, counted from the start of training; 0 traces none.
      steps: how many.
    """

    def __init__(self, folder: Path, start: int, steps: int):
        self._folder = folder
        self._first, self._last = start, start + steps - 1
        self._tracing = False

    def before(self, step: int) -> None:
        """Starts the trace, if this is its first step."""
        if self._first and step == self._first:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._tracing = True

    def after(self, step: int, results: object) -> str | None:
        """Ends the trace once its last step has finished; says where it is."""
        if not self._tracing or step < self._last:
            return None
        jax.block_until_ready(results)
        self.close()
        return f"profile of steps {self._first} to {self._last} in {self._folder}"

    def close(self) -> None:
        """Ends a trace that a run did not live to finish."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False
