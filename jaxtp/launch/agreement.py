"""Agreement of the processes of a run before it computes: each learns what the others say, and why one cannot go on.

A process that ends by itself leaves the others waiting for it. So a user's mistake that one of them meets, such as a
file that is missing on its host, becomes the error of all of them.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxtp.entry import UserError


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
        said = f"exit code {error.code}" if isinstance(error, SystemExit) else str(error)
        if not isinstance(error, SystemExit) or error.code:  # after --help all end alike
            share({"host": host, "error": said})
        raise
    for process, other in enumerate(share({"host": host, "error": None})):
        if other["error"] is not None:
            raise OtherProcessError(f"{who(process, other['host'])} cannot go on: {other['error']}")
