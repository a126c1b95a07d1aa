"""A process of its own for a compiler that may crash, hang or print."""

import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtp.estimate.errors import TargetError

_LAST_LINES = 3
"""Of what a process has printed, without the marks under a traceback's lines."""


@dataclass(frozen=True)
class Output:
    """What a process that ended well has printed."""

    out: str
    errors: str


def run(command: Sequence[str], request: str, *, environment: Mapping[str, str], timeout_s: float) -> Output:
    """Runs a command to its end.

    Args:
      command: the program and its arguments.
      request: what it reads.
      environment: its variables.
      timeout_s: seconds after which it is ended.

    Raises:
      TargetError: it took too long, crashed or failed; with its last words.
    """
    try:
        done = subprocess.run(
            command,
            input=request,
            env=environment,
            timeout=timeout_s,
            capture_output=True,
            encoding="utf-8",
            errors="replace",  # of a crashing compiler
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TargetError(
            f"the compiler for the target was ended after its time limit of {timeout_s:g} s; allow it more, "
            f"such as --timeout {3 * timeout_s:g}"
        ) from None
    if done.returncode < 0:
        raise TargetError(
            f"the compiler for the target crashed ({_signal(-done.returncode)}){_last_words(done.stderr)}"
        )
    if done.returncode:
        raise TargetError(f"the compiler for the target failed{_last_words(done.stderr)}")
    return Output(done.stdout, done.stderr)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_words(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip(" ^~")][-_LAST_LINES:]
    return ":\n" + "\n".join(f"  {line}" for line in lines) if lines else " without a word"
