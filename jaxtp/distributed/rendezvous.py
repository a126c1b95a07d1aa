"""Waits for the processes of a run started by hand, before JAX connects them.

JAX aborts if two processes share an id, and does not name missing processes. So process 0 first listens at the address
of JAX's coordinator. The others send their id and number of processes, and get the verdict.
"""

import os
import socket
import time
from collections import Counter

from jaxtp.config.entry import say
from jaxtp.config.reading import truncate
from jaxtp.distributed.environment import TOKEN, LaunchError
from jaxtp.distributed.links import HELLO_SECONDS, Link, Message, accept_links, connect, format_address, listening

PATIENCE = 20.0
"""Seconds after which a waiting process prints a line."""
_PAUSE = 0.3
_MAX_IDS = 20
_MAX_ADDRESSES = 3
_MAX_ERROR_CHARS = 1000
JOIN_SECONDS_VARIABLE = "JAXTP_JOIN_SECONDS"
JOIN_SECONDS_HINT = f"({JOIN_SECONDS_VARIABLE} is how long they wait)"
_THE_TOKEN = f"the token of this run (the same command line on all hosts, or {TOKEN})"


class Wait:
    """A wait of up to `seconds` for `count` processes; `address` is process 0's, None if only JAX knows it."""

    def __init__(self, process: int, count: int, address: tuple[str, int] | None, seconds: int):
        self.process, self.count, self.address, self.seconds = process, count, address, seconds
        self.problem = ""
        """Why the address cannot be reached."""
        self._start = time.monotonic()
        self._reported = seconds <= 2 * PATIENCE

    def __str__(self) -> str:
        return f"process {self.process} of {self.count}" + (f" at {self.where}" if self.address else "")

    @property
    def where(self) -> str:
        """The address of process 0."""
        return format_address(*self.address) if self.address else ""

    def time_left(self) -> float:
        """Returns the remaining seconds; prints a line once if the wait is long."""
        waited = time.monotonic() - self._start
        if waited > PATIENCE and not self._reported:
            self._reported = True
            because = f" ({self.problem})" if self.problem else ""
            self.print(f"still waiting for all to start, up to {self.seconds:g} s{because}")
        return self.seconds - waited

    def reach(self) -> socket.socket | None:
        """Returns a connection to process 0, or None; reports an unreachable address."""
        assert self.address is not None
        try:
            return socket.create_connection(self.address, timeout=max(0.1, min(HELLO_SECONDS, self.time_left())))
        except (socket.gaierror, UnicodeError) as error:
            why = getattr(error, "strerror", "not a valid host name")
            self.report(f"the host has no address ({why})")
        except ConnectionError:  # it may not have started yet
            self.problem = "nothing answers there"
        except OSError as error:
            self.report(f"the address cannot be reached ({error.strerror or error})")
        return None

    def report(self, problem: str) -> None:
        """Prints a problem, unless it repeats the last."""
        if problem != self.problem:
            self.print(f"{problem}; still trying")
        self.problem = problem

    def print(self, text: str) -> None:
        """Prints a line on stderr."""
        say(f"{self}: {text}")


def meet(waiting: Wait, bind: str, token: str) -> None:
    """Waits until all processes are there, each with a different id.

    Args:
      bind: address at which process 0 listens; empty for all addresses of its host.

    Raises:
      LaunchError: processes are missing, share an id, or expect different numbers.
    """
    assert waiting.address is not None
    if waiting.count == 1:
        return
    if waiting.process == 0:
        with listening(bind, waiting.address[1]) as server:
            _Meeting(waiting).hold(server, token)
    else:
        _visit({"process": waiting.process, "count": waiting.count, "host": _this_process()}, waiting, token)


def _this_process() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


class _Meeting:
    def __init__(self, waiting: Wait):
        self._count, self._waiting = waiting.count, waiting
        self._present: dict[int, tuple[Link, str]] = {}
        self._rejected: Counter[str] = Counter()

    def hold(self, server: socket.socket, token: str) -> None:
        try:
            accept_links(server, token, self._admit, self._time_left, self._rejected)
            self._check_complete()
        except LaunchError as error:
            self._finish({"error": str(error)})
            raise
        self._finish({"error": None})

    def _time_left(self) -> float:
        """Forgets ended processes, which may start again."""
        for process in [each for each, (link, _) in self._present.items() if not link.is_open()]:
            self._present.pop(process)[0].close()
        if self._rejected:
            addresses = ", ".join(truncate(address) for address, _ in self._rejected.most_common(_MAX_ADDRESSES))
            self._waiting.problem = (
                f"dropped {self._rejected.total()} connections that did not prove {_THE_TOKEN}, from {addresses}"
            )
        return 0.0 if len(self._present) == self._count - 1 else self._waiting.time_left()

    def _finish(self, verdict: Message) -> None:
        for link, _ in self._present.values():
            link.send(verdict)
            link.close()

    def _check_complete(self) -> None:
        if missing := [each for each in range(1, self._count) if each not in self._present]:
            listed = ", ".join(map(str, missing[:_MAX_IDS])) + (", ..." if missing[_MAX_IDS:] else "")
            dropped = f"; {self._waiting.problem}" if self._waiting.problem else ""
            raise LaunchError(
                f"process {listed} of {self._count} did not come within {self._waiting.seconds:g} s: does it run, with "
                f"the address {self._waiting.where} and JAX_PROCESS_ID={missing[0]}? {JOIN_SECONDS_HINT}{dropped}"
            )

    def _admit(self, link: Link, hello: Message) -> None:
        """Adds a process, or closes the link if its first message is invalid; a process in conflict gets the error."""
        process, count, host = (hello.get(name) for name in ("process", "count", "host"))
        if type(process) is not int or type(count) is not int or type(host) is not str:
            link.close()
            return
        host = truncate(host)
        self._time_left()  # forgets processes that have ended
        problem = None
        if count != self._count:
            problem = f"process {process} (on {host}) expects {count} processes, and process 0 {self._count}"
        elif not 0 <= process < count:
            problem = f"process {process} (on {host}) is none of {count}, which count from 0"
        elif process == 0 or process in self._present:
            other = _this_process() if process == 0 else self._present[process][1]
            problem = (
                f"two processes have the id {process}, one on {other} and one on {host}: set JAX_PROCESS_ID to 0 to "
                f"{count - 1}, each once"
            )
        if problem is not None:
            link.send({"error": problem})
            link.close()
            raise LaunchError(problem)
        self._present[process] = link, host


def _visit(hello: Message, waiting: Wait, token: str) -> None:
    while waiting.time_left() > 0:
        if (connection := waiting.reach()) is not None:
            if (link := connect(connection, token, hello, HELLO_SECONDS)) is None:
                waiting.report(f"what answers there does not prove {_THE_TOKEN}")
            else:
                verdict = None
                while verdict is None and link.is_open() and waiting.time_left() > -HELLO_SECONDS:
                    verdict = link.receive_within(1.0)  # sent when all are there or process 0 waits no longer
                link.close()
                if verdict is not None and "error" in verdict:
                    if verdict["error"] is not None:
                        raise LaunchError(truncate(verdict["error"], _MAX_ERROR_CHARS))
                    return
                waiting.problem = "process 0 has ended"
        time.sleep(_PAUSE)  # it may be started again, or its name become known
    raise LaunchError(
        f"{waiting}: {waiting.problem} after {waiting.seconds:g} s: process 0 has to run on that host, and its port to "
        f"be open {JOIN_SECONDS_HINT}"
    )
