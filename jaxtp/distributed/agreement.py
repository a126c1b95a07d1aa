"""Exchange of values and errors between a run's processes.

If one process raises while the others wait in a collective, they wait for ever. So
`raise_everywhere` raises a local error, for example a missing file, in all processes; `peers`
reports other failures.
"""

import itertools
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtp.config.entry import MISTAKE, UserError

if TYPE_CHECKING:
    from jaxtp.distributed.peers import Peers

PAUSES = (0.5, 1.0, 1.5, 3.0, 4.0)
"""Seconds between attempts to see another process's file; network file systems cache folder
listings."""

_SIZE = 8  # Bytes with the size of a message, before its text
_ROOM = 4096  # Bytes in which a short message is sent
_meetings = itertools.count()


class OtherProcessError(UserError):
    """A user error in another process."""

    def __init__(self, message: str, exit_code: int = MISTAKE):
        super().__init__(message)
        self.exit_code = exit_code


def is_multiprocess() -> bool:
    """Returns whether the run has several processes, without starting JAX's backend."""
    return jax.distributed.is_initialized()


def all_gather_json(value: object) -> list[Any]:
    """Returns all processes' JSON values. All processes must call it."""
    if not is_multiprocess():
        return [value]
    text = json.dumps(value).encode()
    message = len(text).to_bytes(_SIZE, "little") + text
    # JAX compiles a program for each room: one for all short messages, and few for long ones.
    rows = _gather(message, _ROOM)
    longest = max(map(_end, rows))
    if longest > _ROOM:
        rows = _gather(message, 1 << longest.bit_length())
    return [json.loads(row[_SIZE : _end(row)]) for row in rows]


def _gather(message: bytes, room: int) -> list[bytes]:
    padded = np.frombuffer(message[:room].ljust(room, b"\0"), np.uint8)
    return list(map(bytes, multihost_utils.process_allgather(padded).reshape(-1, room)))


def _end(message: bytes) -> int:
    return _SIZE + int.from_bytes(message[:_SIZE], "little")


def process_name(process: int, host: str) -> str:
    """Returns the name of a process for messages."""
    return f"process {process} (on {host})"


def meet(seconds: float) -> None:
    """Waits for all processes, longer than their collectives could; all must call it."""
    if is_multiprocess():
        # Not imported at the top: it takes a second, and one process does not need it.
        from orbax.checkpoint import multihost

        key = f"jaxtp_meeting{next(_meetings)}"
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=int(1000 * seconds))


@contextmanager
def raise_everywhere(
    before_exchange: Callable[[], None] = lambda: None, kinds: Sequence[type[UserError]] = ()
) -> Iterator[None]:
    """Runs code that each process runs by itself; if it raises in one process, all raise.

    The code must not wait for other processes without a time limit. If the class of the error is in
    `kinds`, all processes raise this class (of several classes, the first in `kinds`). Otherwise
    the other processes raise `OtherProcessError`. `before_exchange` runs after the code, even if
    the code raises.
    """
    if not is_multiprocess():
        yield
        return
    error: Exception | SystemExit | None = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        error = raised
    try:
        before_exchange()
    except UserError as later:
        if isinstance(error, UserError | SystemExit):
            raise error from None
        raise later from None
    if isinstance(error, SystemExit) and not error.code:  # --help ends all processes
        raise error
    text = str(error)
    if isinstance(error, SystemExit):
        text = "its command line is invalid, see its output"
    kind = -1
    if type(error) in kinds:
        kind = kinds.index(type(error))
    exit_code = getattr(error, "exit_code", MISTAKE)
    reports = all_gather_json(error and [kind, socket.gethostname(), text, exit_code])
    failures = [
        (report[0], process, *report[1:]) for process, report in enumerate(reports) if report
    ]
    if not failures:
        return
    if error is not None and kind < 0:
        raise error
    kind, process, host, text, exit_code = min(failures)
    if kind < 0:
        raise OtherProcessError(
            f"{process_name(process, host)} cannot continue: {text}", exit_code
        ) from error
    raise kinds[kind](f"{process_name(process, host)}: {text}") from error


def first_disagreeing(look: Callable[[], object]) -> str | None:
    """Returns the first process whose `look()` differs from process 0; None if all agree.

    All processes must call it. It retries after `PAUSES`. `look` returns a JSON value, and must not
    raise.
    """
    name = None
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        answers = all_gather_json([socket.gethostname(), look()])
        expected = answers[0][1]
        disagreeing = (
            process_name(process, host)
            for process, (host, value) in enumerate(answers)
            if value != expected
        )
        name = next(disagreeing, None)
        if name is None:
            break
    return name


@cache
def host_names() -> list[str]:
    """Returns each process's host. All processes must make the first call."""
    return all_gather_json(socket.gethostname())


_current: "Peers | None" = None


def watch(bind: str | None = None) -> None:
    """Starts watching the other processes, if any. All processes must call it.

    Process 0 listens at `bind`, by default on loopback if all processes are on one host, otherwise
    at all addresses.
    """
    global _current
    if is_multiprocess() and _current is None:
        from jaxtp.distributed.peers import connect_peers

        _current = connect_peers(bind)


def working_on(activity: str) -> None:
    """Records the current activity, for the message if another process fails."""
    if _current is not None:
        _current.activity = activity


def report_failure(error: BaseException) -> None:
    """Tells the other processes that this one failed.

    Call it before closing objects that may wait for the other processes.
    """
    if _current is not None:
        _current.fail(error)


@contextmanager
def reporting_failure() -> Iterator[None]:
    """Calls `report_failure` for an error in a block."""
    try:
        yield
    except BaseException as error:
        report_failure(error)
        raise


def run_and_report(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code.

    With several processes, a failure exits at once, because JAX would wait for the others.
    """
    try:
        code = command()
    except SystemExit as error:
        if _current is None:
            raise
        code = 1
        if error.code is None or isinstance(error.code, int):
            code = error.code or 0
    except Exception as error:
        if _current is None:
            raise
        report_failure(error)
        traceback.print_exc()
        code = 1
    if _current is not None:
        _current.leave(f"exit code {code}" if code else None, code)
        if code:
            sys.stdout.flush()
            _current.wait_for_peers()
            os._exit(code)
    return code
