"""What a long command shows: lines, and a progress bar where there is a terminal."""

import os
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Display:
    """Lines on standard output, above a progress bar in a terminal.

    Use as a context manager: the progress bar lives inside it, from `begin` on.

    Args:
      counter: what the bar counts, in rich's markup, such as `step {task.completed:.0f}`.
      quiet: shows nothing.
    """

    def __init__(self, counter: str, *, quiet: bool = False) -> None:
        self._console = _Console(soft_wrap=True, highlight=False, quiet=quiet)
        self._progress = Progress(
            TextColumn(counter),
            BarColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    @property
    def has_bar(self) -> bool:
        """Whether there is a terminal, and so a progress bar."""
        return self._console.is_terminal

    def line(self, text: str) -> None:
        """Prints a line, above the progress bar if there is one."""
        self._console.print(text, markup=False)

    def begin(self, done: int, total: int) -> None:
        """Starts the progress bar."""
        self._task = self._progress.add_task("", completed=done, total=total)
        self._progress.start()

    def move(self, done: int, text: str) -> None:
        """Moves the progress bar, and says something beside it."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, description=text)


class _Console(Console):
    """Goes quiet where nobody reads it any more, as in `| head`; rich would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
