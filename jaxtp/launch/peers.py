"""Notices that another process of the run has ended or hangs, names it, and ends this one.

What one process never joins, a sum or a save, keeps the others waiting. JAX ends them after a minute or more, by an
abort that names nobody. Here each process keeps a connection to process 0, on which both give signs of life, and
process 0 passes on what it learns. A process that ends is noticed at once; one that is stopped, or whose host is lost,
by its silence.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import jax

from jaxtp.entry import PASSING
from jaxtp.launch.agreement import several, share, who
from jaxtp.launch.environment import LaunchError, coordinator_host
from jaxtp.launch.hosts import hosts

SILENCE = 25.0
"""Seconds without a sign of life after which a process counts as lost; JAX's own limit is longer."""
_BEAT = 1.0
"""Seconds between signs of life."""
_CONNECT = 5.0
"""Seconds that a process tries to reach process 0."""
_GRACE = 4.0
"""Seconds that a process has to end by itself once another has said why it fails: often for the same reason."""
_MOST_BYTES = 4096
_MOST_SAID = 1000


class _Peers:
    """The connections of this process, and the thread that watches them.

    Args:
      hosts: host of each process.
      connections: to the others, by process: process 0 has all of them, any other that to process 0.
    """

    def __init__(self, hosts: list[str], connections: dict[int, Any]):
        self.doing = "the start"
        self._hosts = hosts
        self._me = jax.process_index()
        self._connections = connections
        self._sending = threading.Lock()
        self._ending = threading.Event()
        """Set once this process ends by itself."""
        self._how = ""
        self._news = threading.Event()
        """Set once another process is known to have ended too soon."""
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def leave(self, failure: str | None) -> None:
        """Tells the others that this process ends, and why if it fails."""
        if self._lost.is_set():
            self._thread.join()  # which ends the process
        if not self._ending.is_set():
            self._ending.set()
            self._tell({"process": self._me, "failure": failure and failure[:_MOST_SAID]})

    def linger(self) -> None:
        """Waits a moment for the others to end, in process 0: with it JAX's coordinator ends, and aborts them."""
        if self._me == 0:
            self._thread.join(_GRACE + 2 * _BEAT)

    def wait_for_cause(self, error: BaseException) -> None:
        """Waits for news of a process whose end may be the cause of an error; such news end this process.

        An error that the other has met too, such as a loss that is not finite, is this process's own.
        """
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._news.wait(3 * _BEAT)
        if self._news.is_set() and _described(error)[:_MOST_SAID] not in self._how:
            self._thread.join(_GRACE + 2 * _BEAT)

    def _tell(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._sending:
            for connection in list(self._connections.values()):
                try:
                    connection.send_bytes(data)
                except OSError:
                    continue  # the next reading says so

    def _watch(self) -> None:
        heard = dict.fromkeys(self._connections, time.monotonic())
        while self._connections:
            before = time.monotonic()
            ready = wait(list(self._connections.values()), _BEAT)
            now = time.monotonic()
            if now - before > SILENCE / 2:  # this process itself was stopped
                heard = dict.fromkeys(self._connections, now)
            for process, connection in list(self._connections.items()):
                if connection in ready:
                    heard[process] = now
                    self._read(process, connection)
                elif now - heard[process] > SILENCE:
                    self._end(process, f"has given no sign of life for {SILENCE:g} s")
            self._tell({})

    def _read(self, process: int, connection: Any) -> None:
        try:
            message = dict(json.loads(connection.recv_bytes(_MOST_BYTES)))
        except (EOFError, OSError, ValueError, TypeError, RecursionError):
            self._end(process, "has ended without a word")
            return
        if "how" in message:
            self._end(**message)
        elif "process" in message:  # it leaves
            del self._connections[process]
            if message["failure"] is not None:
                self._end(process, f"failed: {message['failure']}", _GRACE)

    def _end(self, process: int, how: str, grace: float = 0.0) -> None:
        """Says which process is lost, to the others too, and ends this one, unless that ends by itself."""
        self._connections.pop(process, None)
        if self._ending.is_set():
            return
        self._how = how
        self._news.set()
        self._tell({"process": process, "how": how, "grace": grace})
        if self._ending.wait(grace):
            return
        self._lost.set()
        other, this = (who(each, self._hosts[each]) for each in (process, self._me))
        _say(f"error: {other} {how}; {this} cannot go on with {self.doing} and ends (exit code {PASSING})")
        os._exit(PASSING)  # at once: after process 0 JAX aborts this one


_current: _Peers | None = None


def watch() -> None:
    """Begins to watch the other processes, if there are any; all of them have to call it.

    Where they cannot reach process 0, what JAX notices has to do: a line says so.
    """
    global _current
    if not several() or _current is not None:
        return
    try:
        jax.devices()
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise LaunchError(
            f"JAX cannot start the devices of {socket.gethostname()}: {said} (CPUs of several processes talk by Gloo, "
            "which needs this host's name to have an address, as in /etc/hosts)"
        ) from None
    names = hosts()
    if len(names) == 1:
        return
    connections = _listen(len(names)) if jax.process_index() == 0 else _connect(names)
    reached = share(bool(connections))
    if all(reached):
        _current = _Peers(names, connections)
    elif jax.process_index() == 0:
        process = reached.index(False, 1) if False in reached[1:] else 0
        pair = f"{who(process, names[process])} and process 0"
        _say(f"{pair} cannot connect on a port of their own: that a process ends is noticed later, by JAX")


def working_on(what: str) -> None:
    """Remembers what this process does, for the message with which it may have to end."""
    if _current is not None:
        _current.doing = what


def tell_failure(_kind: object, error: BaseException | None, _trace: object) -> None:
    """Tells the others that this process fails, before what it holds is closed; `ExitStack.push` takes it."""
    if _current is not None and error is not None:
        _current.wait_for_cause(error)
        _current.leave(_described(error))


def leaving(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit code, of which the other processes learn whether it failed.

    After a failure the process ends at once: JAX would have it wait until the others have ended too.
    """
    try:
        code = command()
    except Exception as error:
        if _current is None:
            raise
        tell_failure(None, error, None)
        traceback.print_exc()
        code = 1
    if _current is not None:
        _current.leave(f"exit code {code}" if code else None)
        if code:
            sys.stdout.flush()
            _current.linger()
            os._exit(code)
    return code


def _listen(count: int) -> dict[int, Any]:
    """Returns the connections of process 0, as many as come in time; empty where there is one too few."""
    token = secrets.token_bytes(32)
    try:
        listener = Listener(("0.0.0.0", 0), backlog=count, authkey=token)
    except OSError:
        share(None)
        return {}
    found: dict[int, Any] = {}

    def accept() -> None:
        while len(found) < count - 1:
            try:
                connection = listener.accept()
                found[int.from_bytes(connection.recv_bytes(8))] = connection
            except Exception:
                continue

    address: tuple[str, int] = listener.address  # type: ignore[assignment]
    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    share({"port": address[1], "token": token.hex()})
    accepting.join(2 * _CONNECT)
    return found if len(found) == count - 1 else {}


def _connect(names: list[str]) -> dict[int, Any]:
    """Returns the connection to process 0; empty where it cannot be had."""
    said = share(None)[0]
    if said is None:
        return {}
    same = ["127.0.0.1"] if names[0] == socket.gethostname() else []
    for host in (*coordinator_host(), *same, names[0]):
        try:
            socket.create_connection((host, said["port"]), timeout=_CONNECT / 3).close()
        except OSError:
            continue
        try:
            connection: Connection[Any, Any] = Client((host, said["port"]), authkey=bytes.fromhex(said["token"]))
            connection.send_bytes(jax.process_index().to_bytes(8))
        except (OSError, EOFError):
            continue
        return {0: connection}
    return {}


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
