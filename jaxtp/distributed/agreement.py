"""Exchange of values and errors between a run's processes, and their hosts.

If a process raises while others wait in a collective, they wait for ever. So local errors, for example a missing file,
are raised in all processes.
"""

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxtp.config.entry import MISTAKE, UserError

T = TypeVar("T")
PAUSES = (0.5, 1.0, 1.5, 3.0, 4.0)
"""Seconds between attempts to see a file of another process: network file systems cache listings."""


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
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array([text.size], np.int32)).reshape(-1)
    padded = np.pad(text, (0, int(sizes.max()) - text.size))
    texts = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [json.loads(bytes(row[:size])) for row, size in zip(texts, sizes, strict=True)]


def process_name(process: int, host: str) -> str:
    """Names a process in messages."""
    return f"process {process} (on {host})"


@contextmanager
def raise_everywhere(cleanup: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Runs code that each process runs alone; if it raises in one process, the others raise `OtherProcessError`.

    `cleanup` is called after the code, or its error, before the processes exchange results.
    """
    if not is_multiprocess():
        yield
        return
    host = socket.gethostname()
    try:
        yield
    except (Exception, SystemExit) as error:
        try:
            cleanup()
        except UserError as later:
            raise (error if isinstance(error, (UserError, SystemExit)) else later) from None
        text = "its command line is refused, see its output" if isinstance(error, SystemExit) else str(error)
        if not isinstance(error, SystemExit) or error.code:  # --help ends all processes
            all_gather_json({"host": host, "error": text, "code": getattr(error, "exit_code", MISTAKE)})
        raise
    cleanup()
    for process, other in enumerate(all_gather_json({"host": host, "error": None})):
        if other["error"] is not None:
            raise OtherProcessError(
                f"{process_name(process, other['host'])} cannot go on: {other['error']}", other["code"]
            )


def call_everywhere(function: Callable[[], T], kinds: Sequence[type[UserError]]) -> T:
    """Calls a function in every process; if it raises in one process, all raise the same error.

    All processes must call it. `function` must not wait for other processes without a limit. Errors of `kinds` are
    raised everywhere, with the process's name; the first of `kinds` counts, then the first process. Of other errors the
    other processes raise an `OtherProcessError`.
    """
    if not is_multiprocess():
        return function()
    error, result = None, None
    try:
        result = function()
    except Exception as raised:
        error = raised
    kind = kinds.index(type(error)) if type(error) in kinds else -1
    report = None if error is None else [kind, socket.gethostname(), str(error)]
    failed = [(other[0], process, *other[1:]) for process, other in enumerate(all_gather_json(report)) if other]
    if not failed:
        return result  # type: ignore[return-value]
    kind, process, host, why = min(failed)
    if error is not None and type(error) not in kinds:
        raise error
    if kind < 0:
        raise OtherProcessError(f"{process_name(process, host)} cannot go on: {why}") from error
    raise kinds[kind](f"{process_name(process, host)}: {why}") from error


def first_disagreeing(look: Callable[[], object]) -> str | None:
    """Returns the first process whose `look()` differs from process 0; None if all agree.

    All processes must call it; it retries after `PAUSES`. `look` returns JSON, and must not raise in one process only.
    """
    name = None
    for pause in (0.0, *PAUSES):
        time.sleep(pause)
        seen = all_gather_json([socket.gethostname(), look()])
        other = ((process, host) for process, (host, value) in enumerate(seen) if value != seen[0][1])
        name = next((process_name(process, host) for process, host in other), None)
        if name is None:
            break
    return name


@cache
def host_names() -> list[str]:
    """Returns each process's host. All processes must make the first call."""
    return all_gather_json(socket.gethostname())


def by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """Sorts devices by host, even if a scheduler deals processes out over the hosts.

    The last mesh axes then stay inside a host as far as they fit. JAX's `create_hybrid_device_mesh` has this order too,
    but knows processes and TPU slices, not hosts.
    """
    first = {host: process for process, host in reversed(list(enumerate(hosts)))}
    return sorted(devices, key=lambda each: (first[hosts[each.process_index]], each.process_index, each.id))


def draw_hosts(mesh: Mesh, hosts: Sequence[str], most: int = 8) -> list[str]:
    """Returns a line for each of the first `most` hosts: its devices (1.3: the third of process 1) by coordinates."""
    lines: dict[str, list[str]] = {}
    number: Counter[int] = Counter()
    names = {}
    for device in sorted(mesh.devices.flat, key=lambda each: each.id):
        names[device] = f"{device.process_index}.{number[device.process_index]}"
        number[device.process_index] += 1
    *outer, _ = mesh.devices.shape
    for index in np.ndindex(*outer):
        coordinates = " ".join(f"{axis} {i}" for axis, i in zip(mesh.axis_names, index, strict=False))
        rows: dict[str, list[str]] = {}
        for device in mesh.devices[index]:
            rows.setdefault(hosts[device.process_index], []).append(names[device])
        for host, ids in rows.items():
            lines.setdefault(host, []).append(f"{coordinates}: {' '.join(ids)}")
    drawn = [f"{host}   {' | '.join(rows)}" for host, rows in lines.items()]
    return drawn if len(drawn) <= most else [*drawn[:most], f"... {len(drawn) - most} more hosts"]
