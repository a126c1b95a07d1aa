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
        self.first, self.last = start, start + steps - 1
        self.tracing = False

    def start(self) -> None:
        """Starts the trace, before step `first`."""
        jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
        self.tracing = True

    def stop(self, results: object) -> str:
        """Ends the trace once `results`, of step `last`, are there; says where it is."""
        jax.block_until_ready(results)
        self.close()
        return f"profile of steps {self.first} to {self.last} in {self._folder}"

    def close(self) -> None:
        """Ends a trace that a run did not live to finish."""
        if self.tracing:
            jax.profiler.stop_trace()
            self.tracing = False
