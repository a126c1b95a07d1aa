"""Entry and exit of commands.

Mistakes, Ctrl-C, closed pipes and full disks print one line instead of a traceback.

A command's `__main__.py` defines `main(argv)`, which calls `attempt`, and ends with
`run(PROGRAM, main)` under `if __name__ == "__main__"`. `jaxtp` and `jaxtp.train`, the two that are
started as programs, begin with `start`, before their other imports.
"""

import contextlib
import errno
import gc
import importlib
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")

STANDARD_OUTPUT = "standard output"  # The `filename` of errors in writing to standard output
MISTAKE = 2  # The exit code after a user's mistake
WRONG = 3
"""The exit code if numbers are not finite, or differ between devices: a retry would fail again."""
FILES = 74
"""The exit code if files can no longer be written or read (EX_IOERR of sysexits.h): a retry may
succeed."""
TEMPORARY = 75
"""The exit code of a process that was stuck or lost another process of its run (EX_TEMPFAIL of
sysexits.h)."""
INTERRUPTED = 130  # The exit code after Ctrl-C: 128 plus the number of the signal, as in shells
began: float | None = None
"""The time (`time.perf_counter`) at which the command began; None in someone else's program."""
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")  # Control characters, except for newlines
_AGAIN_SECONDS = 0.05  # until Ctrl-C is sent again, if Python ignored its exception
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class BriefError(Exception):
    """An error whose message suffices: notebooks show it without the lines of libraries."""

    def _render_traceback_(self) -> list[str]:
        # IPython calls this method of an exception, and prints its lines instead of a traceback.
        places = importlib.import_module("jaxtp.config.python_object").users_lines(self)
        return [*places, f"{type(self).__name__}: {self}", *getattr(self, "__notes__", ())]


class NumericsError(BriefError, ArithmeticError):
    """Numbers are not finite or differ between devices, so a run cannot continue."""

    exit_code = WRONG


class UserError(BriefError, ValueError):
    """A mistake that the user can fix; its message is printed without a traceback."""

    exit_code = MISTAKE


def attempt(
    program: str, action: Callable[[], int | None], interrupted: str = "interrupted"
) -> int:
    """Runs a command and returns its exit code.

    It is the code of the action, the `exit_code` of a `UserError` or `NumericsError`, or 2 for a
    full disk or an unusable file. A closed pipe on standard output (`| head`) ends the process
    silently.

    Args:
      program: prefix of messages on stderr.
      action: returns an exit code, or None for 0.
      interrupted: message after Ctrl-C (exit code 130), unless the exception has one.
    """
    try:
        return action() or 0
    except UserError as error:
        fail(program, error)
        return error.exit_code
    except NumericsError as error:
        say(f"{program}: {error}")
        return error.exit_code
    except KeyboardInterrupt as error:
        say(f"\n{program}: {str(error) or interrupted}")
        return INTERRUPTED
    except OSError as error:
        if error.filename == STANDARD_OUTPUT and isinstance(error, BrokenPipeError):
            return end_by_closed_pipe()
        if not error.filename and error.errno not in _FULL:
            raise  # the error names no file, so the user cannot fix it
        place = f"{error.filename}: " if error.filename else ""
        return fail(program, f"{place}{error.strerror}")


def shown(text: str) -> str:
    """Returns a model's text for standard output.

    In a terminal, control characters are escaped, except newlines and tabs.
    """
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return escaped(text) if is_terminal else text


def escaped(text: str) -> str:
    """Returns a text with its control characters escaped, except newlines and tabs."""
    return "\t".join(map(_escaped, text.split("\t")))


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def fail(program: str, error: Exception | str) -> int:
    """Prints a mistake on stderr and returns exit code 2."""
    say(f"{program}: error: {_escaped(str(error))}")
    return MISTAKE


def start(program: str = "") -> None:
    """Starts a command before its imports, which take seconds; `run` runs it.

    Until then Ctrl-C prints one line, and no garbage is collected. Only programs call it, before
    anything else: `import jaxtp` changes nothing in the process of someone else's program.

    Args:
      program: prefix of messages on stderr; by default `jaxtp` and the command that follows it.
    """
    global began
    began = time.perf_counter()
    if not program:
        program = "jaxtp" + "".join(f" {word}" for word in sys.argv[1:2] if word.isidentifier())
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, partial(_exit_during_import, program))


def _exit_during_import(program: str, number: int, frame: FrameType | None) -> None:
    # Exits at once: a library that tries an import could swallow a `KeyboardInterrupt`.
    say(f"\n{program}: interrupted")
    os._exit(INTERRUPTED)


def script() -> NoReturn:
    """Runs the installed script `jaxtp`."""
    start()
    run("jaxtp", importlib.import_module("jaxtp.__main__").main)


def run(program: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a command with `sys.argv` and exits with its code."""

    def flushed() -> int:
        try:
            return main(sys.argv[1:])
        finally:  # also after --help; errors at the interpreter's exit cannot be handled
            sys.stdout.flush()

    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, partial) and handler.func is _exit_during_import:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (stays open)
    elif isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = text_output(sys.stdout.fileno(), sys.stdout)
    gc.freeze()  # later collections skip what the imports made
    gc.enable()
    code = attempt(program, flushed)
    if code == INTERRUPTED:
        if "multiprocessing" in sys.modules:
            for child in sys.modules["multiprocessing"].active_children():
                child.terminate()
        os._exit(code)  # at the interpreter's exit, threads in which XLA still compiles would crash
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # There is no message for Ctrl-C while libraries shut down.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses garbage collection, which can take half of the time while many objects are made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Output(io.FileIO):
    """Standard output. Errors have `filename = STANDARD_OUTPUT`; later output is discarded."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        """Writes data, and marks errors."""
        try:
            return super().write(data)
        except OSError as error:
            error.filename = STANDARD_OUTPUT
            silence(self.fileno())
            raise


def text_output(descriptor: int, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """Wraps an `Output` for text, with the encoding and buffering of `like`."""
    raw = Output(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        raw if like.write_through else io.BufferedWriter(raw),  # type: ignore[type-var, arg-type]
        like.encoding,
        like.errors,
        line_buffering=like.line_buffering,
        write_through=like.write_through,
    )


def silence(descriptor: int) -> None:
    """Redirects a descriptor to /dev/null, so that Python's flush at its exit cannot fail."""
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), descriptor)


def end_by_closed_pipe() -> int:
    """Ends the process by SIGPIPE; returns an exit code if the signal is blocked."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.raise_signal(signal.SIGPIPE)
    return 128 + signal.SIGPIPE


def say(text: str) -> None:
    """Prints a line on stderr, if stderr is open."""
    if sys.stderr is not None:  # `print` with `file=None` would use standard output
        with contextlib.suppress(OSError):
            print(text, file=sys.stderr, flush=True)


_SECOND_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_IGN,
    signal.SIGUSR1: signal.SIG_IGN,
}
"""Handlers of a second signal. Repeated SIGHUP and SIGUSR1 are ignored: the kernel and the shell
each send SIGHUP when a terminal closes, and a scheduler may repeat SIGUSR1."""
SIGNALS = tuple(_SECOND_HANDLERS)  # Signals that request a stop


def signal_name(number: int) -> str:
    """Returns a signal's name (SIGKILL), or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class InterruptError(KeyboardInterrupt):
    """A request to stop, raised where the work can be saved, or if there is nothing to save."""


class Interrupt:
    """A context manager that records signals; it has no effect outside of the main thread.

    It may be entered again.

    `check` raises after the first signal; a second one ends the process. Signals that are ignored,
    such as SIGHUP under nohup, stay ignored. A terminal shows `notice` after the first Ctrl-C.

    Args:
      at_start: message of the `InterruptError` that Ctrl-C raises at once until `defer`; empty if
        there is work to save from the start.
    """

    def __init__(self, *signals: signal.Signals, notice: str = "", at_start: str = "") -> None:
        self._notice = notice
        self._at_start = at_start
        self.received: str | None = None  # name of the first signal
        self._signals = signals or SIGNALS
        self._before: dict[signal.Signals, Any] = {}
        self._hook_before: Callable[[sys.UnraisableHookArgs], object] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python sets handlers only there
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    handler = self._record if self.received is None else _SECOND_HANDLERS[number]
                    self._before[number] = signal.signal(number, handler)
            self._hook_before = sys.unraisablehook
            sys.unraisablehook = self._ignored
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, InterruptError):
            # The caller has been told, and may enter it again.
            self.received = None
        if self._hook_before is not None:
            sys.unraisablehook = self._hook_before
            self._hook_before = None
        # It may be entered again in another thread, which has no handlers to restore.
        while self._before:
            signal.signal(*self._before.popitem())

    def defer(self) -> None:
        """Ends the start: from now on there is work to save, and Ctrl-C is only recorded."""
        if self._at_start and self.received == signal.SIGINT.name:
            # A destructor may have swallowed the first error.
            raise InterruptError(self._at_start)
        self._at_start = ""

    def check(self) -> None:
        """Raises `InterruptError` if a signal was received."""
        if self.received is not None:
            raise InterruptError

    def _record(self, number: int, frame: FrameType | None) -> None:
        # After the start it raises nothing, because a callback, such as JAX's during garbage
        # collection, could swallow an exception.
        self.received = signal.Signals(number).name
        if number == signal.SIGINT and self._at_start:
            raise InterruptError(self._at_start)
        for signal_number in self._before:
            signal.signal(signal_number, _SECOND_HANDLERS[signal_number])
        if number == signal.SIGINT and self._notice and os.isatty(2):
            with contextlib.suppress(OSError):
                # A handler cannot use `sys.stderr`, which may be busy.
                os.write(2, f"\n{self._notice}\n".encode())

    def _ignored(self, unraisable: "sys.UnraisableHookArgs") -> None:
        # Python ignores an exception in a destructor, and in a callback of a weak reference or of
        # the garbage collector, where tracing spends much of its time.
        if issubclass(unraisable.exc_type, InterruptError):
            _send_ctrl_c_again()
        elif self._hook_before is not None:
            self._hook_before(unraisable)


def _send_ctrl_c_again() -> None:
    """Sends SIGINT to the main thread in a moment."""
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(_AGAIN_SECONDS, signal.pthread_kill, (main, signal.SIGINT))
    timer.daemon = True
    timer.start()


def in_thread(work: Callable[[], T]) -> "Future[T]":
    """Starts work in a thread, so that Ctrl-C can end the wait for its result.

    While XLA compiles in the main thread, which can take minutes, Python runs no signal handlers.
    """
    # Not imported at the top, because it imports logging, which changes the process of a program
    # that imports jaxtp.
    from concurrent.futures import Future

    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
