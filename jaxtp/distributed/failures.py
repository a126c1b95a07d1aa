"""Reports a process's failure to the others of its run, which would wait for it in the next collective."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxtp.distributed.agreement import is_multiprocess

if TYPE_CHECKING:
    from jaxtp.distributed.peers import Peers

_current: "Peers | None" = None


def watch(bind: str | None = None) -> None:
    """Starts to watch the other processes, if any. All processes must call it.

    Process 0 listens at `bind`, by default on loopback if all are on one host, else at all addresses.
    """
    global _current
    if is_multiprocess() and _current is None:
        from jaxtp.distributed.peers import connect_peers

        _current = connect_peers(bind)


def working_on(what: str) -> None:
    """Records the current activity, for the message of a forced end."""
    if _current is not None:
        _current.activity = what


def report_failure(error: BaseException) -> None:
    """Reports this process's failure, before anything that may wait for the others is closed."""
    if _current is not None:
        _current.fail(error)


def run_and_report(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; after a failure ends at once, where JAX would wait for the others."""
    try:
        code = command()
    except SystemExit as error:
        if _current is None:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
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
