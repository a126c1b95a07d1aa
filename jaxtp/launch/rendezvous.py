"""The processes of a run that people start by hand meet here before JAX connects them.

JAX aborts where two have one id, and where one is missing it does not say which. So process 0 first listens itself, at
the address where JAX's coordinator will: each of the others says its id and how many it expects, and learns whether all
are right.
"""

import os
import socket
import sys
import time

from jaxtp.launch.environment import LaunchError
from jaxtp.launch.links import HELLO_SECONDS, Link, Message, connect, gather, listening

PATIENCE = 20.0
"""Seconds after which a process says that it waits for others."""
_PAUSE = 0.3
_MOST_NAMED = 20
WAIT = "JAXTP_JOIN_SECONDS"
"""Variable of the seconds that processes wait for each other."""
SETTING = f"({WAIT} is how long they wait)"


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
    waiting = _Wait(process, count, f"{host}:{port}", seconds)
    if process == 0:
        with listening(host, port) as server:
            _Meeting(count, waiting).hold(server)
    else:
        _visit(host, port, {"process": process, "count": count, "host": _me()}, waiting)


def say_waiting(what: str, seconds: float) -> None:
    """Says that a process waits for others."""
    print(f"{what}: still waiting for all to start, up to {seconds:g} s", file=sys.stderr, flush=True)


def _me() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


class _Wait:
    """A wait that has an end; says once that it lasts."""

    def __init__(self, process: int, count: int, where: str, seconds: float):
        self.what, self.where, self.seconds = f"process {process} of {count} at {where}", where, seconds
        self._began = time.monotonic()
        self._told = seconds <= 2 * PATIENCE

    def left(self) -> float:
        """Returns the seconds that are left."""
        waited = time.monotonic() - self._began
        if waited > PATIENCE and not self._told:
            self._told = True
            say_waiting(self.what, self.seconds)
        return self.seconds - waited


class _Meeting:
    """Process 0 and those that have come to it."""

    def __init__(self, count: int, waiting: _Wait):
        self._count, self._waiting = count, waiting
        self._came: dict[int, tuple[Link, str]] = {}

    def hold(self, server: socket.socket) -> None:
        """Waits for the others, and tells them whether all is right.

        Raises:
          LaunchError: it is not.
        """
        try:
            gather(server, self._admit, lambda: 0.0 if self._here() == self._count - 1 else self._waiting.left())
            self._require_all()
        except LaunchError as error:
            self._end({"error": str(error)})
            raise
        self._end({"error": None})

    def _here(self) -> int:
        """Returns how many others are here; one that has ended meanwhile may be started again, and come again."""
        for process in [each for each, (link, _) in self._came.items() if not link.is_open()]:
            self._came.pop(process)[0].close()
        return len(self._came)

    def _end(self, answer: Message) -> None:
        for link, _ in self._came.values():
            link.send(answer)
            link.close()

    def _require_all(self) -> None:
        if missing := [each for each in range(1, self._count) if each not in self._came]:
            listed = ", ".join(map(str, missing[:_MOST_NAMED])) + (", ..." if missing[_MOST_NAMED:] else "")
            raise LaunchError(
                f"process {listed} of {self._count} did not come within {self._waiting.seconds:g} s: does it run, with "
                f"the address {self._waiting.where} and JAX_PROCESS_ID={missing[0]}? {SETTING}"
            )

    def _admit(self, link: Link, hello: Message) -> None:
        """Takes in a process that says who it is; one that does not is none.

        Raises:
          LaunchError: it has the id of another, or expects another number; it is told so as well.
        """
        process, count, host = (hello.get(name) for name in ("process", "count", "host"))
        if type(process) is not int or type(count) is not int or type(host) is not str:
            link.close()
            return
        self._here()  # without those that have ended
        problem = None
        if count != self._count:
            problem = f"process {process} (on {host}) expects {count} processes, and process 0 {self._count}"
        elif not 0 <= process < count:
            problem = f"process {process} (on {host}) is none of {count}, which count from 0"
        elif process == 0 or process in self._came:
            other = _me() if process == 0 else self._came[process][1]
            problem = (
                f"two processes have the id {process}, one on {other} and one on {host}: set JAX_PROCESS_ID to 0 to "
                f"{count - 1}, each once"
            )
        if problem is not None:
            link.send({"error": problem})
            link.close()
            raise LaunchError(problem)
        self._came[process] = link, host


def _visit(host: str, port: int, hello: Message, waiting: _Wait) -> None:
    """Says who this process is to process 0, once that is there, and waits for its answer."""
    problem = f"nothing answers there after {waiting.seconds:g} s"
    while (left := waiting.left()) > 0:
        try:
            link = connect(host, port, min(HELLO_SECONDS, left))
        except socket.gaierror as error:
            problem = f"the host has no address ({error.strerror})"
            time.sleep(_PAUSE)  # a name may come to be known
            continue
        except OSError:
            time.sleep(_PAUSE)
            continue
        link.send(hello)
        answer = _answer(link, waiting)
        link.close()
        if answer is not None and "error" in answer:
            if answer["error"] is not None:
                raise LaunchError(str(answer["error"]))
            return
        problem = f"what answers there is no process 0 of this run, after {waiting.seconds:g} s"
        time.sleep(_PAUSE)  # process 0 has ended, and may be started again
    raise LaunchError(
        f"{waiting.what}: {problem}: process 0 has to run on that host, and its port to be open {SETTING}"
    )


def _answer(link: Link, waiting: _Wait) -> Message | None:
    """Returns the answer of process 0, which comes once all are there, or its own time is over."""
    while link.is_open() and waiting.left() > -HELLO_SECONDS:
        if (answer := link.receive_within(1.0)) is not None:
            return answer
    return None
