"""Detects that another process of the run has ended or hangs, names it, and ends this process.

If one process never enters a collective, all others block; JAX aborts them after a minute or more,
and does not name it. Here each process exchanges heartbeats with process 0, which forwards
failures. A process that ends closes its socket; a stopped process or a lost host sends no
heartbeats.
"""

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import jax

from jaxtp.config.entry import MISTAKE, TEMPORARY, WRONG, UserError, say
from jaxtp.config.reading import truncate
from jaxtp.distributed.agreement import all_gather_json, host_names, process_name
from jaxtp.distributed.environment import LaunchError, coordinator_host
from jaxtp.distributed.links import (
    Link,
    Message,
    accept_links,
    connect,
    listen_address,
    listening,
    ready,
)

SILENCE = 25.0
"""Seconds without a heartbeat after which a process counts as lost; JAX's limit is longer."""
_CONNECT = 5.0  # Seconds to connect to process 0
_MAX_ERROR_CHARS = 1000
_MAX_MESSAGE_CHARS = 4000


class Peers:
    """A thread that watches links between process 0 and each other process.

    Args:
      beat: seconds between heartbeats.
      grace: seconds in which a process may exit by itself after another one reports a failure,
        because both may fail for the same reason.
      end_process: ends this process without cleanup, because JAX aborts it once process 0 has
        ended.
    """

    def __init__(
        self,
        hosts: list[str],
        links: dict[int, Link],
        *,
        beat: float = 1.0,
        grace: float = 4.0,
        end_process: Callable[[int], object] = os._exit,
    ):
        self._beat = beat
        self._grace = grace
        self._end_process = end_process
        self.activity = "the start"
        self._hosts = hosts
        self._process = jax.process_index()
        self._links = links
        self._left: list[Link] = []  # kept open: a closed link would report this process as lost
        self._sending = threading.Lock()
        self._leaving = threading.Event()  # this process exits by itself
        self._problem = ""
        self._peer_failed = threading.Event()
        self._must_exit = threading.Event()  # the thread exits this process
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    def leave(self, failure: str | None, code: int = 0) -> None:
        """Tells the others that this process exits, and the reason if it failed."""
        if self._must_exit.is_set():
            self._thread.join()  # the thread exits the process
        if not self._leaving.is_set():
            self._leaving.set()
            self._broadcast({"process": self._process, "failure": failure, "code": code})

    def fail(self, error: BaseException) -> None:
        """Tells the others that this process failed.

        If the failure of another process may be the cause, the thread exits this process instead. A
        user error, or the error that the other process reported, is always announced.
        """
        line = f"{type(error).__name__}: {error}".strip(": ").partition("\n")[0]
        failure = line[:_MAX_ERROR_CHARS]
        if isinstance(error, jax.errors.JaxRuntimeError):
            self._peer_failed.wait(3 * self._beat)
        # Read in this order, because the thread sets `_problem` before `_peer_failed`.
        if self._peer_failed.is_set():
            is_announced = isinstance(error, UserError) or failure in self._problem
            if not is_announced:
                self._thread.join(self._grace + 2 * self._beat)
        self.leave(failure, getattr(error, "exit_code", 1))

    def wait_for_peers(self) -> None:
        """In process 0, waits briefly for the others, which JAX aborts when its coordinator
        stops."""
        if self._process == 0:
            self._thread.join(self._grace + 2 * self._beat)

    def _broadcast(self, message: Message) -> None:
        with self._sending:
            for link in list(self._links.values()):
                link.send(message)

    def _watch(self) -> None:
        last_seen = dict.fromkeys(self._links, time.monotonic())
        next_beat = 0.0
        while self._links:
            before = time.monotonic()
            if before >= next_beat:
                self._broadcast({})
                next_beat = before + self._beat
            readable = ready(list(self._links.values()), max(0.0, next_beat - before))
            now = time.monotonic()
            # This process itself was suspended, so the silence proves nothing.
            if now - before > SILENCE / 2:
                last_seen = dict.fromkeys(self._links, now)
            for process, link in list(self._links.items()):
                if link in readable:
                    last_seen[process] = now
                    self._read(process, link)
                elif now - last_seen[process] > SILENCE:
                    self._exit_after_losing(process, f"has sent no heartbeat for {SILENCE:g} s")

    def _read(self, process: int, link: Link) -> None:
        while (message := link.receive()) is not None:
            if "how" in message:
                self._exit_after_losing(**message)
            elif "process" in message:  # it exits; its link stays open until this process ends
                self._left.append(self._links.pop(process, link))
                if message["failure"] is not None:
                    code = message["code"]
                    if code not in (MISTAKE, WRONG):
                        code = TEMPORARY
                    self._exit_after_losing(
                        process, f"failed: {message['failure']}", self._grace, code
                    )
        if not link.is_open and process in self._links:
            self._exit_after_losing(process, "has ended without a message")

    def _exit_after_losing(
        self, process: int, how: str, grace: float = 0.0, code: int = TEMPORARY
    ) -> None:
        """Tells the others that a process is lost; exits this process unless it leaves in time.

        Args:
          how: the end of the message about the lost process.
          grace: seconds in which this process may leave by itself.
          code: the exit code.
        """
        link = self._links.pop(process, None)
        if link is not None:
            link.close()
        if self._leaving.is_set():
            return
        self._problem = how
        self._peer_failed.set()
        self._broadcast({"process": process, "how": how, "grace": grace, "code": code})
        if self._leaving.wait(grace):
            return
        self._must_exit.set()
        problem = (
            f"error: {process_name(process, self._hosts[process])} {how}; "
            f"{process_name(self._process, self._hosts[self._process])} cannot continue with "
            f"{self.activity} and ends (exit code {code})"
        )
        say(truncate(problem, _MAX_MESSAGE_CHARS))
        self._end_process(code)


def connect_peers(bind: str | None) -> Peers | None:
    """Connects process 0 to each other process; returns None if one cannot connect.

    All processes must call it. Process 0 listens at `bind`, by default on loopback if all processes
    are on one host, otherwise at all addresses.
    """
    try:
        counts = Counter(device.process_index for device in jax.devices())
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LaunchError(
            f"JAX cannot start the devices of {socket.gethostname()}: {reason} (on CPUs, processes "
            "communicate by Gloo, which needs an address for this host's name, for example in "
            "/etc/hosts)"
        ) from None
    for process, count in counts.items():
        if count != counts[0]:
            raise LaunchError(
                f"process {process} has {count} devices, and process 0 has {counts[0]}: every "
                "process needs the same number. Possible causes: a device is missing; "
                f"JAX_NUM_CPU_DEVICES or the mesh differs between processes; process {process} "
                "rejected its settings (see its output)"
            )
    hosts = host_names()
    if len(hosts) == 1:
        return None
    this = jax.process_index()
    links = reach_peer(hosts) if this else accept_peers(hosts, bind)
    connected = all_gather_json(sorted(links))
    for process in range(1, len(hosts)):
        if process not in connected[0] or not connected[process]:
            if this == 0:
                say(
                    f"{truncate(process_name(process, hosts[process]))} cannot connect to process "
                    "0, so jaxtp's heartbeats are off: if a process ends, JAX aborts the others "
                    "after 40 to 80 s, without naming it"
                )
            return None
    if this:
        print(f"{process_name(this, hosts[this])} has joined; process 0 reports", flush=True)
    return Peers(hosts, links)


def accept_peers(hosts: list[str], bind: str | None) -> dict[int, Link]:
    """Returns links to the processes that connect in time and have the token that JAX sends
    them."""
    token = secrets.token_hex(32)
    links = dict[int, Link]()
    rejected = Counter[str]()
    until = time.monotonic() + 2 * _CONNECT

    def time_left() -> float:
        if len(links) == len(hosts) - 1:
            return 0.0
        return until - time.monotonic()

    host = coordinator_host() or ("localhost" if len(set(hosts)) == 1 else "")
    with listening(listen_address(bind, host)) as server:
        all_gather_json([server.getsockname()[1], token])
        for link, hello in accept_links(server, token, time_left, rejected):
            links[hello["process"]] = link
    if rejected:
        say(f"dropped {rejected.total()} connections that did not come from processes of this run")
    return links


def reach_peer(hosts: list[str]) -> dict[int, Link]:
    """Returns the link to process 0, if it answers in time."""
    port, token = all_gather_json(None)[0]
    loopback = "127.0.0.1" if hosts[0] == socket.gethostname() else ""
    for host in filter(None, (coordinator_host(), loopback, hosts[0])):
        try:
            connection = socket.create_connection((host, port), timeout=_CONNECT / 3)
        except (OSError, UnicodeError):
            continue
        link = connect(connection, token, {"process": jax.process_index()}, _CONNECT)
        if link is not None:
            return {0: link}
    return {}
