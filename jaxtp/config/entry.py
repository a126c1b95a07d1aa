"""Entry and exit of commands: one line, no traceback, for mistakes, Ctrl-C, closed pipes and full disks.

`attempt` turns these into a line and an exit code. `run` tells errors of standard output from errors of files, and
flushes its buffer while an error can still be reported. A command's `__main__.py` defines `main(argv)`, which calls
`attempt`, and ends with `run(PROGRAM, main)`.
"""

import contextlib
import errno
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NoReturn

STANDARD_OUTPUT = "standard output"
"""The `filename` of an error of writing to it."""

MISTAKE = 2
"""The exit code after a user's mistake."""

WRONG = 3
"""The exit code where numbers are wrong, not finite or not those of other devices: the same again is no use."""

FILES = 74
"""The exit code where files cannot be written or read any more after the start; it may pass. EX_IOERR of sysexits.h."""

PASSING = 75
"""The exit code of a process of several that was stuck, or has lost another: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal, as shells have it."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal may obey, but for the end of a line."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WrongNumbersError(ArithmeticError):
    """Numbers are not finite or differ between devices, so a run cannot continue."""

    exit_code = WRONG


class UserError(ValueError):
    """A mistake that the user can fix; its message is printed without a traceback."""

    exit_code = MISTAKE


def attempt(program: str, action: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Runs a command and returns its exit code.

    The code is 0, `exit_code` of a `UserError` or `WrongNumbersError`, or 2 for a full disk or unusable file. A closed
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
    except WrongNumbersError as error:
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
        from jaxtp.config.reading import shown  # by now the libraries are imported

        return fail(program, f"{shown(error.filename)}: {error.strerror}" if error.filename else f"{error.strerror}")


def fail(program: str, error: Exception | str) -> int:
    """Prints a mistake on stderr and returns exit code 2."""
    say(f"{program}: error: {_CONTROL.sub(lambda found: found[0].encode('unicode_escape').decode(), str(error))}")
    return MISTAKE


def run(program: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a command with `sys.argv` and exits with its code."""
    if signal.getsignal(signal.SIGINT) is _interrupted_import:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _tell_output_apart()
    code = attempt(program, lambda: _flushed(main))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no message for Ctrl-C while libraries shut down
    sys.exit(code)


def _flushed(main: Callable[[Sequence[str]], int]) -> int:
    # Also after `--help`: at interpreter exit it is too late to handle errors.
    try:
        return main(sys.argv[1:])
    finally:
        sys.stdout.flush()


class Output(io.FileIO):
    """Standard output; its `OSError`s have `filename = STANDARD_OUTPUT`."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Writes as `FileIO` does, and silences the descriptor after an error.

        Raises:
          OSError: a full disk or closed pipe.
        """
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            # To /dev/null, which silences later flushes.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
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


def _tell_output_apart() -> None:
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = text_output(sys.stdout.fileno(), sys.stdout)


def end_by_closed_pipe() -> int:
    """Ends the process by SIGPIPE; returns an exit code if the signal is blocked."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    return 128 + signal.SIGPIPE


def say(text: str) -> None:
    """Prints a line on stderr, if open."""
    # `print` with `file=None` would use standard output.
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _watch_imports() -> None:
    # The package imports this module first, and this module imports only the standard library, so that Ctrl-C during
    # the other imports, which take seconds, also ends in one line. Other programs are left alone.
    starting = sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") == "jaxtp"
    if starting and _command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted_import)


def _interrupted_import(number: int, frame: FrameType | None) -> None:
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


_watch_imports()
