"""What the command shows: a progress bar, or plain lines where there is no terminal."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from jaxtp.prepare.errors import Problem

_SHOWN = 5
"""Problems that are told one by one."""
_SECONDS = 5.0
"""Between plain lines."""


class Report:
    """The console of a command. Use as a context manager: the progress bar lives inside it.

    Args:
      total: bytes of the inputs.
    """

    def __init__(self, total: int) -> None:
        self._console = Console(soft_wrap=True, highlight=False)
        self._progress = Progress(
            TextColumn("{task.percentage:3.0f}%"),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._total = max(total, 1)
        self._task = self._progress.add_task("", total=self._total)
        self._shown = 0
        self._told = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self._console.print(text, markup=False)

    def moved(self, done: int, text: str) -> None:
        """Moves the progress bar, or prints a plain line now and then.

        Args:
          done: bytes of the inputs that have been read.
          text: what has come of them.
        """
        self._progress.update(self._task, completed=done, description=text)
        if not self._console.is_terminal and time.monotonic() - self._told >= _SECONDS:
            self._told = time.monotonic()
            self.line(f"{100 * done // self._total}%  {text}")

    def left_out(self, problem: Problem) -> None:
        """Tells of a problem, unless enough have been told of."""
        if problem.harmless:
            return
        self._shown += 1
        if self._shown <= _SHOWN:
            self.line(f"skipped: {problem.message}")
        if self._shown == _SHOWN:
            self.line("further ones are only counted")
