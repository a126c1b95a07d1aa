"""Agreement of the processes of a run before it computes: each learns what the others say, and why one cannot go on.

A process that ends by itself leaves the others waiting for it. So a user's mistake that one of them meets, such as a
file that is missing on its host, becomes the error of all of them.

`together` surrounds what each process does by itself; `train/preflight.py` compares the rest.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtp.entry import UserError

T = TypeVar("T")
PAUSES = (0.5, 1.0, 1.5, 3.0, 4.0)
"""Seconds between the looks at what one process has written: network file systems keep old listings for a while."""


class OtherProcessError(UserError):
    """A mistake that another process has met."""


def several() -> bool:
    """Returns whether the run has several processes; JAX's backend is not started."""
    return jax.distributed.is_initialized()


def share(value: Any) -> list[Any]:
    """Returns what each process gives, by process; all of them have to call it, and wait for each other.

    Args:
      value: what JSON can hold.
    """
    if not several():
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size], np.int32)).reshape(-1)
    padded = np.pad(text, (0, int(sizes.max()) - text.size))
    texts = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True)]


def who(process: int, host: str) -> str:
    """Returns a process in words."""
    return f"process {process} (on {host})"


@contextmanager
def together() -> Iterator[None]:
    """Surrounds what each process does by itself: if one fails in it, all of them fail, with its message.

    Raises:
      OtherProcessError: another process has met a mistake, and this one has not.
    """
    if not several():
        yield
        return
    host = socket.gethostname()
    try:
        yield
    except (Exception, SystemExit) as error:
        said = "its command line is refused, see what it said" if isinstance(error, SystemExit) else str(error)
        if not isinstance(error, SystemExit) or error.code:  # after --help all end alike
            share({"host": host, "error": said})
        raise
    for process, other in enumerate(share({"host": host, "error": None})):
        if other["error"] is not None:
            raise OtherProcessError(f"{who(process, other['host'])} cannot go on: {other['error']}")


def agree(attempt: Callable[[], T], kinds: Sequence[type[UserError]]) -> T:
    """Returns what an attempt returns in this process; if it fails in one process, all of them fail alike.

    All processes have to call it, and none goes on before all have tried. An attempt must not wait for other processes
    without a limit. If several fail, the kind that comes first counts, and of that the first process.

    Args:
      attempt: what each process does by itself.
      kinds: errors that all processes raise, with the name of the process that has met one in the message.

    Raises:
      UserError: one of those kinds; an `OtherProcessError` where another process has met any other error.
    """
    if not several():
        return attempt()
    error, answer = None, None
    try:
        answer = attempt()
    except Exception as met:
        error = met
    kind = kinds.index(type(error)) if type(error) in kinds else -1
    said = None if error is None else [kind, socket.gethostname(), str(error)]
    failed = [(each[0], process, *each[1:]) for process, each in enumerate(share(said)) if each is not None]
    if not failed:
        return answer  # type: ignore[return-value]
    kind, process, host, why = min(failed)
    if error is not None and type(error) not in kinds:
        raise error
    if kind < 0:
        raise OtherProcessError(f"{who(process, host)} cannot go on: {why}") from error
    raise kinds[kind](f"{who(process, host)}: {why}") from error


def first_other(look: Callable[[], Any]) -> str | None:
    """Returns the first process, in words, that does not see what process 0 sees; None if all see the same.

    One that does not is given some seconds, `PAUSES`. All processes have to call it.

    Args:
      look: returns what this process sees, which JSON can hold; it may not fail in one process alone.
    """
    other = None
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        seen = share([socket.gethostname(), look()])
        other = next((who(process, host) for process, (host, what) in enumerate(seen) if what != seen[0][1]), None)
        if other is None:
            break
    return other
