"""Output of long commands: lines, and a progress bar in a terminal."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from typing import IO, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jaxtp.config.entry import end_by_closed_pipe, silence

_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
"""Variables of processes that a scheduler started. `mpirun` and `srun --pty` give them terminals that are logs."""


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether a person may be watching the stream."""
    try:
        return stream is not None and stream.isatty() and not any(name in os.environ for name in _RANKS)
    except ValueError:  # closed
        return False


class Display:
    """Prints lines, above a progress bar in a terminal.

    If the stream fails (a closed terminal), the display goes silent and the command continues.

    Args:
      counter: the bar's label in rich's markup (`step {task.completed:.0f}`).
      quiet: prints nothing.
      stream: standard output by default.
      unread: called, in any thread, when a pipe loses its reader (`| head`); by default ends the process, as SIGPIPE
        does.
    """

    def __init__(
        self,
        counter: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        unread: Callable[[], object] = end_by_closed_pipe,
    ) -> None:
        output = cast(IO[str], _Output(stream or sys.stdout, unread))
        self._console = Console(file=output, soft_wrap=True, highlight=False, quiet=quiet)
        self._progress = Progress(
            TextColumn(counter),
            BarColumn(),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def has_bar(self) -> bool:
        """Whether the output is a terminal."""
        return self._console.is_terminal

    def line(self, text: str) -> None:
        """Prints a line, above any progress bar."""
        self._console.print(text, markup=False)

    def begin(self, done: int, total: int) -> None:
        """Starts the progress bar."""
        self._task = self._progress.add_task("", completed=done, total=total)
        self._progress.start()

    def move(self, done: int, text: str) -> None:
        """Updates the progress bar and its text."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, description=text)


class _Output(io.TextIOBase):
    """Drops text after the first error: a closed terminal or pipe, a full disk."""

    def __init__(self, stream: TextIO | None, unread: Callable[[], object]) -> None:
        self._stream = stream
        self._unread = unread

    @property
    def encoding(self) -> str:  # type: ignore[override]
        # rich draws an ASCII bar if the encoding requires it.
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return is_terminal(self._stream)

    def write(self, text: str) -> int:
        # rich also writes from a thread of its own, so only here can every error be caught.
        if self._stream is not None:
            self._try(self._stream.write, text.encode(self.encoding, "backslashreplace").decode(self.encoding))
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            self._try(self._stream.flush)

    def _try(self, action: Callable[..., object], *arguments: str) -> None:
        try:
            action(*arguments)
        except (OSError, ValueError) as error:  # a ValueError if it is closed
            stream, self._stream = self._stream, None  # another thread may fail as well
            if stream is not None:
                with contextlib.suppress(OSError, ValueError):
                    silence(stream.fileno())
            if isinstance(error, BrokenPipeError):
                self._unread()
