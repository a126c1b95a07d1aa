"""The output of the command: a progress bar, or plain lines where there is no terminal."""

import time
from typing import Self

from jaxtp.console import Display
from jaxtp.prepare.errors import Problem

_SHOWN = 5
"""Number of problems that are reported one by one."""
_SECONDS = 5.0
"""Seconds between plain lines."""


class Report(Display):
    """The console of a command. Use as a context manager: the progress bar lives inside it.

    Args:
      total: bytes of the inputs.
    """

    def __init__(self, total: int) -> None:
        super().__init__("{task.percentage:3.0f}%")
        self._total = max(total, 1)
        self._shown = 0
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        self.begin(0, self._total)
        return super().__enter__()

    def moved(self, done: int, text: str) -> None:
        """Moves the progress bar, or prints a plain line now and then.

        Args:
          done: bytes of the inputs that have been read.
          text: the result so far.
        """
        self.move(done, text)
        if not self.has_bar and time.monotonic() - self._told >= _SECONDS:
            self._told = time.monotonic()
            self.line(f"{100 * done // self._total}%  {text}")

    def left_out(self, problem: Problem) -> None:
        """Reports a problem, unless enough have been reported."""
        if problem.harmless:
            return
        self._shown += 1
        if self._shown <= _SHOWN:
            self.line(f"skipped: {problem.message}")
        if self._shown == _SHOWN:
            self.line("further ones are only counted")
