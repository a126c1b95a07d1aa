"""Output of commands: sizes; lines, and in a terminal a progress bar."""

import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self, TextIO

from jaxtp.config.entry import end_by_closed_pipe, silence

_RANKS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
"""Variables that schedulers set. `mpirun` and `srun --pty` give a process a terminal, but log its
output."""
_CLEAR = "\r\x1b[2K"
_UNWRAPPED = "\x1b[?7l{}\x1b[?7h"
"""Escape sequences: clear the current line, and print a text without wrapping it."""
_BAR_WIDTH = 30
_CUT = "..."
_MIN_BAR_WIDTH = 5  # Columns; a narrower bar is left out
_REDRAW_SECONDS = 0.1


_DECIMAL = ("B", "KB", "MB", "GB")
_BINARY = ("B", "KiB", "MiB", "GiB")


def size_text(size: float, *, binary: bool = False) -> str:
    """Returns a number of bytes in a fitting unit, up to GB: `1.3 MB`."""
    step = 1024 if binary else 1000
    *smaller, largest = _BINARY if binary else _DECIMAL
    for unit in smaller:
        if abs(size) < step:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= step
    return f"{size:,.1f} {largest}"


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether the stream is a terminal that a person may watch."""
    has_terminal = stream is not None and stream.isatty()
    return has_terminal and os.environ.keys().isdisjoint(_RANKS)


def has_colour(stream: TextIO | None) -> bool:
    """Returns whether the stream is a terminal that shows colours (see no-color.org)."""
    is_plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return is_terminal(stream) and not is_plain


def printable(text: str, stream: TextIO) -> str:
    """Returns a text with the characters escaped that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Display:
    """Prints lines, above a progress bar in a terminal.

    After an error of the stream (a closed terminal, a full disk) it prints nothing more, and the
    command continues.

    Args:
      counter: format of the bar's label (`step {done}/{total}`).
      quiet: prints nothing.
      stream: standard output by default.
      unread: called when the stream is a pipe whose reader has exited (`| head`); by default ends
        the process, as SIGPIPE does.
    """

    def __init__(
        self,
        counter: str,
        *,
        quiet: bool = False,
        stream: TextIO | None = None,
        unread: Callable[[], object] = end_by_closed_pipe,
    ) -> None:
        stream = stream or sys.stdout
        self.has_bar = is_terminal(stream) and os.environ.get("TERM") != "dumb"
        self._counter = counter
        self._unread = unread
        self._stream = None if quiet else stream
        self._bar = ""
        self._first = self._total = 0
        self._start = self._drawn = 0.0

    def __enter__(self) -> Self:
        return self

    def end(self, *_: object) -> None:
        """Ends the progress bar; later lines follow it."""
        if self._bar:
            self._write("\n")
        self._bar = ""
        self._total = 0

    __exit__ = end

    def line(self, text: str) -> None:
        """Prints a line, above any progress bar."""
        self._write(f"{_CLEAR}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def begin(self, position: int, total: int) -> None:
        """Starts the progress bar."""
        self._drawn = 0.0
        self._first = position
        self._total = total
        self._start = time.monotonic()
        self.move(position, "")

    def move(self, position: int, text: str) -> None:
        """Updates the progress bar and its text."""
        now = time.monotonic()
        if not (self.has_bar and self._total):
            return
        if position < self._total and now < self._drawn + _REDRAW_SECONDS:
            return
        left = ""
        if position > self._first:
            seconds = (now - self._start) * (self._total - position) / (position - self._first)
            left = f"  {timedelta(seconds=round(seconds))} left"
        label = self._counter.format(done=position, total=self._total)
        self._bar = _UNWRAPPED.format(self._fitted(label, position, text, left))
        self._drawn = now
        self._write(_CLEAR + self._bar)

    def _fitted(self, label: str, position: int, text: str, left: str) -> str:
        """Returns the label, bar, text and remaining time.

        A narrow terminal gets a shorter bar, or a shorter text.
        """
        columns = self._columns()
        width = min(_BAR_WIDTH, columns - len(f"{label} [] {text}{left}"))
        if width >= _MIN_BAR_WIDTH:
            filled = "#" * (width * position // self._total)
            return f"{label} [{filled:.<{width}}] {text}{left}"
        room = columns - len(f"{label} {left}")
        if len(text) > room:
            text = text[: max(0, room - len(_CUT))] + _CUT
        return f"{label} {text}{left}"

    def _columns(self) -> int:
        """Returns the width of the terminal, or a very large number if it is unknown."""
        if self._stream is None:
            return sys.maxsize
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or sys.maxsize
        except (OSError, ValueError):
            return sys.maxsize

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(printable(text, self._stream))
            self._stream.flush()
        except (OSError, ValueError) as error:  # a ValueError if it is closed
            stream = self._stream
            self._stream = None
            with contextlib.suppress(OSError, ValueError):
                silence(stream.fileno())
            if isinstance(error, BrokenPipeError):
                self._unread()
