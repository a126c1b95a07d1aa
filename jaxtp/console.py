"""Output of a long command: lines, and a progress bar where there is a terminal."""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import IO, Self, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jaxtp.entry import end_by_closed_pipe


class Display:
    """Lines on standard output or another stream, above a progress bar in a terminal.

    Use as a context manager: the progress bar lives inside it, from `begin` on. Where the stream fails, as a
    terminal does that was closed, the display goes silent, and the command goes on. A pipe that nobody reads any more,
    as of `| head`, ends it.

    Args:
      counter: what the bar counts, in rich's markup, such as `step {task.completed:.0f}`.
      quiet: shows nothing.
      stream: where it shows it; by default standard output.
      unread: called, in any thread, when a pipe has lost its reader; by default it ends the process, as SIGPIPE does.
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


class _Output(io.TextIOBase):
    """Standard output, until it fails: a closed terminal or pipe, a full disk. From then on it drops what is written.

    rich writes to it from a thread of its own too, so this is the one place where every error can be caught.

    Args:
      stream: None, as in Python, where standard output was closed before the command started.
      unread: called when it was a pipe that nobody reads.
    """

    def __init__(self, stream: TextIO | None, unread: Callable[[], object]) -> None:
        self._stream = stream
        self._unread = unread

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The stream's: rich draws the bar in ASCII where it must."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Returns whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def write(self, text: str) -> int:
        """Writes what the stream's encoding has, and escapes the rest."""
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:  # a ValueError if it is closed
                self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """Brings what was written to where the stream leads."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Leads the stream to nowhere, so that Python can flush at its end what could not be written."""
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
        if isinstance(error, BrokenPipeError):
            self._unread()
