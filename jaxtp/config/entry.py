"""Entry and exit of commands: one line, no traceback, for mistakes, Ctrl-C, closed pipes and full disks.

A command's `__main__.py` defines `main(argv)`, which calls `attempt`, and ends with `run(PROGRAM, main)`.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn, Self

STANDARD_OUTPUT = "standard output"
"""The `filename` of an error of writing to it."""

MISTAKE = 2
"""The exit code after a user's mistake."""
WRONG = 3
"""The exit code where numbers are not finite or differ between devices: a retry is no use."""
FILES = 74
"""The exit code where files can no longer be written or read (EX_IOERR of sysexits.h): a retry may succeed."""
PASSING = 75
"""The exit code of a process of several that was stuck, or has lost another (EX_TEMPFAIL of sysexits.h)."""
INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal, as in shells."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Characters that a terminal may obey, except for the end of a line."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NumericsError(ArithmeticError):
    """Numbers are not finite or differ between devices, so a run cannot continue."""

    exit_code = WRONG


class UserError(ValueError):
    """A mistake that the user can fix; its message is printed without a traceback."""

    exit_code = MISTAKE


def attempt(program: str, action: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Runs a command and returns its exit code.

    The code is 0, `exit_code` of a `UserError` or `NumericsError`, or 2 for a full disk or unusable file. A closed
    pipe on standard output (`| head`) ends the process silently.

    Args:
      program: prefix of messages on stderr.
      action: returns an exit code, or None for 0.
      interrupted: message after Ctrl-C (exit code 130).
    """
    try:
        return action() or 0
    except UserError as error:
        fail(program, error)
        return error.exit_code
    except NumericsError as error:
        say(f"{program}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        say(f"\n{program}: {interrupted}")
        return INTERRUPTED
    except OSError as error:
        if error.filename == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
            return end_by_closed_pipe()
        if not error.filename and error.errno not in _FULL:
            raise  # names no file, so the user cannot fix it
        return fail(program, f"{error.filename}: {error.strerror}" if error.filename else f"{error.strerror}")


def fail(program: str, error: Exception | str) -> int:
    """Prints a mistake on stderr and returns exit code 2."""
    escaped = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), str(error))
    say(f"{program}: error: {escaped}")
    return MISTAKE


def run(program: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a command with `sys.argv` and exits with its code."""

    def flushed() -> int:
        try:
            return main(sys.argv[1:])
        finally:  # also after --help: at the interpreter's exit it is too late to handle errors
            sys.stdout.flush()

    if signal.getsignal(signal.SIGINT) is _end_import:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = text_output(sys.stdout.fileno(), sys.stdout)
    code = attempt(program, flushed)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no message for Ctrl-C while libraries shut down
    sys.exit(code)


class Output(io.FileIO):
    """Standard output, whose errors have `filename = STANDARD_OUTPUT`; silent after the first."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Writes as `FileIO` does."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            silence(self.fileno())
            raise


def text_output(descriptor: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """Wraps an `Output` for text, with encoding and buffering of `like`."""
    raw = Output(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if like.write_through else io.BufferedWriter(raw),  # type: ignore[type-var, arg-type]
        like.encoding,
        like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def silence(descriptor: int) -> None:
    """Sends all further output to /dev/null, so that Python's flush at exit cannot fail."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def end_by_closed_pipe() -> int:
    """Ends the process by SIGPIPE; returns an exit code if the signal is blocked."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    return 128 + signal.SIGPIPE


def say(text: str) -> None:
    """Prints a line on stderr, if open."""
    if sys.stderr is not None:  # `print` with `file=None` would use standard output
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


_SECOND: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_IGN,
    signal.SIGUSR1: signal.SIG_IGN,
}
"""Handlers after the first signal. A closed terminal sends several SIGHUPs, from its kernel and from its shell, and a
scheduler may repeat SIGUSR1: they are no second request."""
SIGNALS = tuple(_SECOND)
"""Signals that ask for an end."""


def signal_name(number: int) -> str:
    """Returns a signal's name (SIGKILL), or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class InterruptError(KeyboardInterrupt):
    """Request to stop, raised where all work can be saved."""


class Interrupt:
    """Context manager that records signals; inactive outside the main thread.

    The first signal waits until work can be saved, the second ends the process. Signals already ignored stay ignored,
    such as SIGHUP under nohup.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.received: str | None = None
        """Name of the first signal."""
        self._signals = signals or SIGNALS
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's condition for handling signals
            heard = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._first) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `InterruptError` if a signal was received."""
        if self.received is not None:
            raise InterruptError

    def _first(self, number: int, _: FrameType | None) -> None:
        # An exception here could be lost in a callback, such as JAX's during garbage collection.
        self.received = signal.Signals(number).name
        for each in self._before:
            signal.signal(each, _SECOND[each])


def _end_import(number: int, frame: FrameType | None) -> None:
    # A library that tries an import could swallow a `KeyboardInterrupt`.
    say(f"\n{_command()}: interrupted")
    os._exit(INTERRUPTED)


def _command() -> str:
    # The running command, such as `jaxtp train`; empty for other programs.
    found = re.search(r"\bjaxtp(?:\.(?:\w+\.)*(\w+))?$", sys.orig_argv[-len(sys.argv)])
    if found is None:
        return ""
    name = found[1] or next((word for word in sys.argv[1:2] if word.isidentifier()), "")
    return f"jaxtp {name}".strip()


# The package imports this module first, and this module imports only the standard library, so that Ctrl-C during the
# other imports, which take seconds, also ends in one line. Other programs are left alone.
_starting = sys.argv[:1] == ["-m"] or os.path.basename(next(iter(sys.argv), "")) == "jaxtp"
if _starting and _command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end_import)
