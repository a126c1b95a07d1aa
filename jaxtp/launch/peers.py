"""Notices that another process of the run has ended or hangs, names it, and ends this one.

What one process never joins, a sum or a save, keeps the others waiting. JAX ends them after a minute or more, by an
abort that names nobody. Here each process keeps a connection to process 0, on which both give signs of life, and
process 0 passes on what it learns. A process that ends is noticed at once; one that is stopped, or whose host is lost,
by its silence.
"""

import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable

import jax

from jaxtp.entry import MISTAKE, PASSING, WRONG, UserError, WrongNumbersError
from jaxtp.launch.agreement import several, share, who
from jaxtp.launch.environment import LaunchError, coordinator_host
from jaxtp.launch.hosts import hosts
from jaxtp.launch.links import Link, Message, connect, gather, listening, ready

SILENCE = 25.0
"""Seconds without a sign of life after which a process counts as lost; JAX's own limit is longer."""
_BEAT = 1.0
"""Seconds between signs of life."""
_CONNECT = 5.0
"""Seconds that a process tries to reach process 0."""
_GRACE = 4.0
"""Seconds that a process has to end by itself once another has said why it fails: often for the same reason."""
_MOST_SAID = 1000


class _Peers:
    """The links of this process, and the thread that watches them.

    Args:
      hosts: host of each process.
      links: to the others, by process: process 0 has all of them, any other that to process 0.
    """

    def __init__(self, hosts: list[str], links: dict[int, Link]):
        self.doing = "the start"
        self._hosts = hosts
        self._me = jax.process_index()
        self._links = links
        self._left: list[Link] = []
        self._sending = threading.Lock()
        self._ending = threading.Event()
        """Set once this process ends by itself."""
        self._how = ""
        self._news = threading.Event()
        """Set once another process is known to have ended too soon."""
        self._lost = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def leave(self, failure: str | None, code: int = 0) -> None:
        """Tells the others that this process ends, and if it fails why, and with which exit code."""
        if self._lost.is_set():
            self._thread.join()  # which ends the process
        if not self._ending.is_set():
            self._ending.set()
            self._tell({"process": self._me, "failure": failure and failure[:_MOST_SAID], "code": code})

    def linger(self) -> None:
        """Waits a moment for the others to end, in process 0: with it JAX's coordinator ends, and aborts them."""
        if self._me == 0:
            self._thread.join(_GRACE + 2 * _BEAT)

    def wait_for_cause(self, error: BaseException) -> None:
        """Waits for news of a process whose end may be the cause of an error; such news end this process.

        A mistake says what is wrong by itself; and an error that the other has met too, such as a loss that is not
        finite, is this process's own.
        """
        if isinstance(error, UserError):
            return
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._news.wait(3 * _BEAT)
        if self._news.is_set() and _described(error)[:_MOST_SAID] not in self._how:
            self._thread.join(_GRACE + 2 * _BEAT)

    def _tell(self, message: Message) -> None:
        with self._sending:
            for link in list(self._links.values()):
                link.send(message)

    def _watch(self) -> None:
        heard = dict.fromkeys(self._links, time.monotonic())
        beat = 0.0
        while self._links:
            before = time.monotonic()
            if before >= beat:
                self._tell({})
                beat = before + _BEAT
            readable = ready(list(self._links.values()), max(0.0, beat - before))
            now = time.monotonic()
            if now - before > SILENCE / 2:  # this process itself was stopped
                heard = dict.fromkeys(self._links, now)
            for process, link in list(self._links.items()):
                if link in readable:
                    heard[process] = now
                    self._read(process, link)
                elif now - heard[process] > SILENCE:
                    self._end(process, f"has given no sign of life for {SILENCE:g} s")

    def _read(self, process: int, link: Link) -> None:
        messages = link.receive()
        for message in messages or []:
            if "how" in message:
                self._end(**message)
            elif "process" in message:  # it leaves, and sees by the link when this process has ended
                self._left.append(self._links.pop(process, link))
                if message["failure"] is not None:
                    code = message["code"] if message["code"] in (MISTAKE, WRONG) else PASSING
                    self._end(process, f"failed: {message['failure']}", _GRACE, code)
        if messages is None and process in self._links:
            self._end(process, "has ended without a word")

    def _drop(self, process: int) -> None:
        """Closes the link to a process, if there is one."""
        if link := self._links.pop(process, None):
            link.close()

    def _end(self, process: int, how: str, grace: float = 0.0, code: int = PASSING) -> None:
        """Says which process is lost, to the others too, and ends this one, unless that ends by itself."""
        self._drop(process)
        if self._ending.is_set():
            return
        self._how = how
        self._news.set()
        self._tell({"process": process, "how": how, "grace": grace, "code": code})
        if self._ending.wait(grace):
            return
        self._lost.set()
        other, this = (who(each, self._hosts[each]) for each in (process, self._me))
        _say(f"error: {other} {how}; {this} cannot go on with {self.doing} and ends (exit code {code})")
        os._exit(code)  # at once: after process 0 JAX aborts this one


_current: _Peers | None = None


def watch() -> None:
    """Begins to watch the other processes, if there are any; all of them have to call it.

    Where they cannot reach process 0, what JAX notices has to do: a line says so.
    """
    global _current
    if not several() or _current is not None:
        return
    try:
        counts = Counter(device.process_index for device in jax.devices())
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise LaunchError(
            f"JAX cannot start the devices of {socket.gethostname()}: {said} (CPUs of several processes talk by Gloo, "
            "which needs this host's name to have an address, as in /etc/hosts)"
        ) from None
    if uneven := [process for process, count in counts.items() if count != counts[0]]:
        process = uneven[0]
        raise LaunchError(
            f"process {process} has {counts[process]} devices, and process 0 {counts[0]}: all need as many; is a "
            "device missing on a host, or JAX_NUM_CPU_DEVICES another there?"
        )
    names = hosts()
    if len(names) == 1:
        return
    links = _listen(len(names)) if jax.process_index() == 0 else _connect(names)
    reached = share(sorted(links))
    me = who(jax.process_index(), names[jax.process_index()])
    if missing := [process for process in range(1, len(names)) if process not in reached[0] or not reached[process]]:
        if jax.process_index() == 0:
            named = who(missing[0], names[missing[0]])
            _say(f"{named} and process 0 cannot connect on a port of their own: that one ends is noticed later, by JAX")
        return
    _current = _Peers(names, links)
    if jax.process_index():
        print(f"{me} has joined; process 0 reports", flush=True)


def working_on(what: str) -> None:
    """Remembers what this process does, for the message with which it may have to end."""
    if _current is not None:
        _current.doing = what


def tell_failure(error: BaseException) -> None:
    """Tells the others that this process fails, before what it holds is closed, which may wait for them."""
    if _current is not None:
        _current.wait_for_cause(error)
        code = MISTAKE if isinstance(error, UserError) else WRONG if isinstance(error, WrongNumbersError) else 1
        _current.leave(_described(error), code)


def leaving(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit code, of which the other processes learn whether it failed.

    After a failure the process ends at once: JAX would have it wait until the others have ended too.
    """
    try:
        code = command()
    except SystemExit as error:
        if _current is None:
            raise
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception as error:
        if _current is None:
            raise
        tell_failure(error)
        traceback.print_exc()
        code = 1
    if _current is not None:
        _current.leave(f"exit code {code}" if code else None, code)
        if code:
            sys.stdout.flush()
            _current.linger()
            os._exit(code)
    return code


def _listen(count: int) -> dict[int, Link]:
    """Returns the links of process 0 to those that come in time."""
    token, came = secrets.token_hex(32), dict[int, Link]()
    until = time.monotonic() + 2 * _CONNECT

    def admit(link: Link, hello: Message) -> None:
        if hello.get("token") == token and hello.get("process") in range(1, count):
            link.send({"welcome": True})
            came[hello["process"]] = link

    with listening(coordinator_host()) as server:
        share([server.getsockname()[1], token])
        gather(server, admit, lambda: until - time.monotonic() if len(came) < count - 1 else 0.0)
    return came


def _connect(names: list[str]) -> dict[int, Link]:
    """Returns the link to process 0; empty where it cannot be had."""
    port, token = share(None)[0]
    same = "127.0.0.1" if names[0] == socket.gethostname() else ""
    for host in filter(None, (coordinator_host(), same, names[0])):
        try:
            link = connect(host, port, _CONNECT / 3)
        except (OSError, LaunchError):
            continue
        link.send({"process": jax.process_index(), "token": token})
        if link.receive_within(_CONNECT) == {"welcome": True}:
            return {0: link}
        link.close()
    return {}


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
