"""The processes of a run that people start by hand meet here before JAX connects them.

JAX aborts where two have one id, and where one is missing it does not say which. So process 0 first listens itself, at
the address where JAX's coordinator will: each of the others says its id and how many it expects, and learns whether all
are right.
"""

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from jaxtp.launch.environment import LaunchError

PATIENCE = 20.0
"""Seconds after which a process says that it waits for others."""
_HELLO = 5.0
"""Seconds in which one that connects has to say who it is."""
_PAUSE = 0.3
_SETTING = "(JAXTP_JOIN_SECONDS is how long they wait)"
_MOST_BYTES = 4096


def meet(host: str, port: int, count: int, process: int, seconds: float) -> None:
    """Waits until all processes are there, each with its own id.

    Args:
      host: host of process 0.
      port: its port, which is free again afterwards.
      count: number of processes.
      process: id of this one.
      seconds: time that they wait for each other.

    Raises:
      LaunchError: some are missing, two have one id, they expect different numbers, or process 0 is not there.
    """
    if count == 1:
        return
    waiting = _Wait(f"process {process} of {count} at {host}:{port}", seconds)
    if process == 0:
        _gather(port, count, waiting)
    else:
        _visit(host, port, {"process": process, "count": count, "host": socket.gethostname()}, waiting)


class _Wait:
    """A wait that has an end; says once that it lasts."""

    def __init__(self, what: str, seconds: float):
        self.what, self.seconds = what, seconds
        self._began = time.monotonic()
        self._told = seconds <= 2 * PATIENCE

    def left(self) -> float:
        """Returns the seconds that are left."""
        waited = time.monotonic() - self._began
        if waited > PATIENCE and not self._told:
            self._told = True
            say_waiting(self.what, self.seconds)
        return self.seconds - waited


def say_waiting(what: str, seconds: float) -> None:
    """Says that a process waits for others."""
    print(f"{what}: still waiting for all to start, up to {seconds:g} s", file=sys.stderr, flush=True)


def _gather(port: int, count: int, waiting: _Wait) -> None:
    """Waits for the others, as process 0, and tells them whether all is right."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    came: dict[int, tuple[socket.socket, str]] = {}
    with contextlib.ExitStack() as held:
        try:
            server = held.enter_context(socket.create_server(("", port), family=family, dualstack_ipv6=both))
        except OSError as error:
            raise LaunchError(
                f"{waiting.what}: this host cannot listen there ({os.strerror(error.errno or 0)})"
            ) from None
        try:
            while len(came) < count - 1:
                server.settimeout(min(1.0, max(waiting.left(), 0.01)))
                with contextlib.suppress(TimeoutError):
                    _admit(held.enter_context(server.accept()[0]), count, came)
                if waiting.left() <= 0:
                    missing = ", ".join(str(each) for each in range(1, count) if each not in came)
                    raise LaunchError(
                        f"{waiting.what}: not all came within {waiting.seconds:g} s, process {missing} is missing: "
                        f"does it run, with this address and an id of its own? {_SETTING}"
                    )
        except LaunchError as error:
            _tell(came, {"error": str(error)})
            raise
        _tell(came, {"error": None})


def _admit(connection: socket.socket, count: int, came: dict[int, tuple[socket.socket, str]]) -> None:
    """Takes in a process that says who it is; one that does not is none.

    Raises:
      LaunchError: it has the id of another, or expects another number; it is told so as well.
    """
    connection.settimeout(_HELLO)
    said = _receive(connection)
    process, its_count, host = (said.get(name) for name in ("process", "count", "host"))
    if type(process) is not int or type(its_count) is not int or type(host) is not str:
        connection.close()
        return
    problem = None
    if its_count != count:
        problem = f"process {process} (on {host}) expects {its_count} processes, and process 0 {count}"
    elif not 0 <= process < count:
        problem = f"process {process} (on {host}) is none of {count}, which count from 0"
    elif process == 0 or (process in came and _is_open(came[process][0])):
        other = socket.gethostname() if process == 0 else came[process][1]
        problem = f"two processes have the id {process}, one on {other} and one on {host}: each needs its own"
    if problem is not None:
        _tell({process: (connection, host)}, {"error": problem})
        raise LaunchError(problem)
    came[process] = connection, host


def _is_open(connection: socket.socket) -> bool:
    """Returns whether the process at the other end is still there; one that was started again comes again."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _visit(host: str, port: int, hello: Mapping[str, Any], waiting: _Wait) -> None:
    """Says who this process is to process 0, once that is there, and waits for its answer."""
    reached = False
    while (left := waiting.left()) > 0:
        try:
            connection = socket.create_connection((host, port), timeout=min(_HELLO, left))
        except OSError:
            time.sleep(_PAUSE)
            continue
        with connection:
            reached = True
            _tell({0: (connection, host)}, hello)
            connection.settimeout(max(waiting.left(), 0.01) + _HELLO)
            answer = _receive(connection)
        if "error" in answer:
            if answer["error"] is not None:
                raise LaunchError(str(answer["error"]))
            return
        time.sleep(_PAUSE)  # process 0 has ended, and may be started again
    problem = "nothing answers there"
    if reached:
        problem = "what answers there is no process 0 of this run"
    raise LaunchError(
        f"{waiting.what}: {problem} after {waiting.seconds:g} s: process 0 has to run on that host, and its port to be "
        f"open {_SETTING}"
    )


def _tell(connections: Mapping[int, tuple[socket.socket, str]], message: Mapping[str, Any]) -> None:
    for connection, _ in connections.values():
        with contextlib.suppress(OSError):
            connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Returns a message; empty where none comes, or something else."""
    data = b""
    try:
        while not data.endswith(b"\n") and len(data) < _MOST_BYTES:
            if not (more := connection.recv(_MOST_BYTES)):
                break
            data += more
        return dict(json.loads(data))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
