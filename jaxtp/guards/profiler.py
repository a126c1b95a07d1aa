"""Traces of steps, for XProf and Perfetto."""

from collections.abc import Callable
from pathlib import Path

import jax

from jaxtp.guards.hook import Hook, Loop, NextStep


class Profiler(Hook):
    """Traces `steps` steps from `start`.

    If the trace fails, for example on a full disk, the run continues.
    """

    def __init__(self, folder: Path, start: int, steps: int):
        self._folder = folder
        self._first = start
        self._last = start + steps - 1
        self._tracing = False
        self._failure: str | None = None

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """Starts the trace before its first step."""
        if step.index == self._first:
            self._tracing = True
            with loop.lost_to("profile"):
                self._attempt(
                    lambda: jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
                )

    def after_dispatch(self, loop: Loop) -> None:
        """Ends the trace after the results of its last step; prints its location or failure."""
        if loop.step != self._last or not self._tracing:
            return
        with loop.lost_to("profile"):
            jax.block_until_ready(loop.state)
            self.close()
        profile = f"profile of steps {self._first} to {self._last}"
        if self._failure is None:
            loop.line(f"{profile} in {self._folder}")
        else:
            loop.line(f"no {profile}: {self._failure}")

    def close(self) -> None:
        """Ends an unfinished trace."""
        if self._tracing and self._failure is None:
            self._attempt(jax.profiler.stop_trace)
        self._tracing = False

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        # The file system, or another trace in this process, may fail.
        except Exception as error:
            self._failure = str(error).partition("\n")[0] or type(error).__name__
