"""Start and end of every command: one line, no traceback, for mistakes, Ctrl-C, closed pipes and full disks.

`attempt` turns a `UserError`, Ctrl-C, a closed pipe or a full disk into one line and an exit code. `run` tells errors
of standard output from those of files, and writes what its buffer holds while there is still somebody to report to.

A command's `__main__.py` has a `main(argv)` that calls `attempt`, and ends in `run(PROGRAM, main)`. This module is the
first that the package imports, and imports the standard library alone: Ctrl-C while the rest is imported, which takes
seconds, ends in one line too.
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

PASSING = 75
"""The exit code of a process of several that was stuck, or has lost another: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 and the number of the signal, as shells have it."""

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
"""Control characters, which a terminal may obey, but for the end of a line."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WrongNumbersError(ArithmeticError):
    """Numbers that are not finite, or not those of other devices, so that a run cannot go on; exit code `WRONG`."""


class UserError(ValueError):
    """A mistake that a user can put right, complete in its message; commands report it without a traceback."""


def attempt(program: str, action: Callable[[], int | None], interrupted: str = "interrupted") -> int:
    """Runs what a command does; returns its exit code: 2 for a `UserError`, a full disk and a file that cannot be used,
    3 for a `WrongNumbersError`.

    A closed pipe under standard output ends the process in silence, as it ends other commands before `| head`.

    Args:
      program: how it is called, for messages on stderr.
      action: gives an exit code, or None for 0.
      interrupted: said after Ctrl-C: exit code 130.
    """
    try:
        return action() or 0
    except UserError as error:
        return fail(program, error)
    except WrongNumbersError as error:
        say(f"{program}: {error}")
        return WRONG
    except KeyboardInterrupt:
        say(f"\n{program}: {interrupted}")
        return INTERRUPTED
    except OSError as error:
        if error.filename == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
            return end_by_closed_pipe()
        if not error.filename and error.errno not in _FULL:
            raise  # of no file, so nothing that a user can put right
        from jaxtp.reading import shown  # by now the libraries are imported

        return fail(program, f"{shown(error.filename)}: {error.strerror}" if error.filename else f"{error.strerror}")


def fail(program: str, error: Exception | str) -> int:
    """Prints a user's mistake on stderr; returns the exit code, 2."""
    say(f"{program}: error: {_CONTROL.sub(lambda found: found[0].encode('unicode_escape').decode(), str(error))}")
    return MISTAKE


def run(program: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a command as a process: with the arguments of its command line, to its exit code.

    Args:
      program: how it is called, for messages on stderr.
      main: takes the arguments; returns the exit code.
    """
    if signal.getsignal(signal.SIGINT) is _interrupted_import:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    _tell_output_apart()
    code = attempt(program, lambda: _flushed(main))
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while the libraries end says nothing
    sys.exit(code)


def _flushed(main: Callable[[Sequence[str]], int]) -> int:
    """Calls it, and writes what is left in the buffer, after `--help` too: at the interpreter's end it is too late."""
    try:
        return main(sys.argv[1:])
    finally:
        sys.stdout.flush()


class Output(io.FileIO):
    """A file descriptor as standard output; its errors are told from those of files by their `filename`."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Writes as `FileIO` does; after an error the descriptor leads nowhere, so what is left in buffers is silent.

        Raises:
          OSError: it cannot be written, as of a full disk or a closed pipe.
        """
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise


def text_output(descriptor: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """Returns an `Output` for text, with encoding and buffering of another stream."""
    raw = Output(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if like.write_through else io.BufferedWriter(raw),  # type: ignore[type-var, arg-type]
        like.encoding,
        like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def _tell_output_apart() -> None:
    """Makes standard output an `Output`; one that was closed from the start leads nowhere."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for as long as the process lives)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = text_output(sys.stdout.fileno(), sys.stdout)


def end_by_closed_pipe() -> int:
    """Ends the process in silence, as SIGPIPE ends others; returns an exit code where the signal is blocked."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    return 128 + signal.SIGPIPE


def say(text: str) -> None:
    """Prints a line on standard error, if there is one: where it was closed, Python prints on standard output."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _watch_imports() -> None:
    """Ends a command in one line where Ctrl-C comes before `run`; other programs stay as they are.

    While Python looks for the packages of a module, the first argument is `-m`.
    """
    starting = sys.argv[:1] == ["-m"] or os.path.basename(sys.argv[0] if sys.argv else "") == "jaxtp"
    if starting and _command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted_import)


def _interrupted_import(number: int, frame: FrameType | None) -> None:
    """Ends the process: a `KeyboardInterrupt` could be lost in a library that tries an import."""
    say(f"\n{_command()}: interrupted")
    os._exit(INTERRUPTED)


def _command() -> str:
    """Returns the command that Python was started with, such as `jaxtp train`; empty if it is another program's."""
    found = re.search(r"\bjaxtp(?:\.(\w+))?$", sys.orig_argv[-len(sys.argv)])
    if found is None:
        return ""
    name = found[1] or next((word for word in sys.argv[1:2] if word.isidentifier()), "")
    return f"jaxtp {name}".strip()


_watch_imports()
