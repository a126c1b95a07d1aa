"""Output of commands: sizes, times and styles; lines, and in a terminal a progress bar."""

import contextlib
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, Self, TextIO

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
_STYLES = {"bold": 1, "dim": 2, "green": 32}
_NUMBER = re.compile(r"(?<![\w.,/;\[-])[-+]?\d+(?:[,.:/]\d+)*(?:e[-+]?\d+)?%?(?![\w/-])")
"""A number or a time, but no part of a name, a path or an escape sequence."""
_NAME_WIDTH = 8  # Columns for the name of a row
_MIN_WIDTH = 30  # A narrower terminal folds lines itself
folded = partial(textwrap.fill, break_on_hyphens=False, break_long_words=False)


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


def duration(seconds: float) -> str:
    """Returns a time as minutes and seconds, or with hours: `1:40`, `27:46:40`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_terminal(stream: TextIO | None) -> bool:
    """Returns whether the stream is a terminal that a person may watch."""
    has_terminal = stream is not None and stream.isatty()
    return has_terminal and os.environ.keys().isdisjoint(_RANKS)


def has_colour(stream: TextIO | None) -> bool:
    """Returns whether the stream is a terminal that shows colours (see no-color.org)."""
    is_plain = os.environ.get("TERM") == "dumb" or bool(os.environ.get("NO_COLOR"))
    return is_terminal(stream) and not is_plain


def styled(text: str, style: Literal["bold", "dim", "green"], has_colour: bool) -> str:
    """Returns a text in a style, or unchanged where there are no colours."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if text and has_colour else text


def with_bold_numbers(text: str, has_colour: bool) -> str:
    """Returns a text with its numbers bold where there are colours."""
    return _NUMBER.sub(lambda number: styled(number[0], "bold", has_colour), text)


def for_terminal(text: str, stream: TextIO | None) -> str:
    """Returns lines that begin with a name.

    In a terminal, names are dim and numbers bold, and lines are folded to its width.
    """
    if not is_terminal(stream):
        return text
    is_styled = has_colour(stream)
    width = max(columns_of(stream), _MIN_WIDTH)
    lines = []
    for line in text.split("\n"):
        line = folded(line, width, subsequent_indent=" " * _NAME_WIDTH)
        name = line[:_NAME_WIDTH].rstrip()
        description = with_bold_numbers(line[len(name) :], is_styled)
        lines.append(f"{styled(name, 'dim', is_styled)}{description}")
    return "\n".join(lines)


def columns_of(stream: TextIO | None) -> int:
    """Returns the columns of a terminal, or a very large number if they are unknown."""
    if stream is None:
        return sys.maxsize
    try:
        return os.get_terminal_size(stream.fileno()).columns or sys.maxsize
    except (OSError, ValueError):
        return sys.maxsize


def printable(text: str, stream: TextIO) -> str:
    """Returns a text with the characters escaped that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


class Display:
    """Prints lines, above a progress bar in a terminal, which shows numbers bold.

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
        self._has_colour = has_colour(stream)
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
        text = with_bold_numbers(text, self._has_colour)
        self._write(f"{_CLEAR}{text}\n{self._bar}" if self._bar else f"{text}\n")

    def rows(self, text: str) -> None:
        """Prints lines that begin with a name (`for_terminal`)."""
        self.line(for_terminal(text, self._stream))

    def begin(self, position: int, total: int) -> None:
        """Starts the progress bar."""
        self._drawn = 0.0
        self._first = position
        self._total = total
        self._start = time.monotonic()
        self.move(position)

    def move(self, position: int, *texts: str) -> None:
        """Updates the progress bar and its texts; a narrow terminal shows those that fit."""
        now = time.monotonic()
        if not (self.has_bar and self._total):
            return
        if position < self._total and now < self._drawn + _REDRAW_SECONDS:
            return
        left = ""
        if position > self._first:
            seconds = (now - self._start) * (self._total - position) / (position - self._first)
            left = f"  {duration(seconds)} left"
        label = self._counter.format(done=position, total=self._total)
        bar = self._fitted(label, position, texts, left)
        self._bar = _UNWRAPPED.format(with_bold_numbers(bar, self._has_colour))
        self._drawn = now
        self._write(_CLEAR + self._bar)

    def _fitted(self, label: str, position: int, texts: Sequence[str], left: str) -> str:
        """Returns the label, bar, texts and remaining time.

        A narrow terminal gets a shorter bar, then fewer texts, and at last a part of the first.
        """
        columns = columns_of(self._stream)
        text, *further_texts = texts or ("",)
        for other in further_texts:
            longer = f"{text}  {other}"
            if len(f"{label} {longer}{left}") <= columns:
                text = longer
        width = min(_BAR_WIDTH, columns - len(f"{label} [] {text}{left}"))
        if width >= _MIN_BAR_WIDTH:
            filled = "#" * (width * position // self._total)
            return f"{label} [{filled:.<{width}}] {text}{left}"
        room = columns - len(f"{label} {left}")
        if len(text) > room:
            text = text[: max(0, room - len(_CUT))] + _CUT
        return f"{label} {text}{left}"

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
