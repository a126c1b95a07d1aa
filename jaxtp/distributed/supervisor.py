"""Starts several processes on one machine, ends all when one fails, and restarts them if requested.

Each process writes a log; process 0's output is also shown, and the last lines of a failed process. The others would
wait for it for ever. This file does not import JAX.
"""

import fcntl
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any, Self

from jaxtp.config.entry import MISTAKE, PASSING, WRONG, UserError
from jaxtp.config.interrupt import signal_name
from jaxtp.distributed.environment import (
    ADDRESS,
    COUNT,
    PROCESS,
    TOKEN,
    child_environment,
    gpus_present,
    names_of_gpus,
    shared,
    sharing,
)

GRACE = 15.0
"""Seconds between SIGTERM and SIGKILL."""
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}  # logs are then up to date
_LAST_LINES = 20
_NOISE = re.compile(rb"\[Gloo\]|is connected to \d+ peer ranks")
"""Matches log lines of Gloo, which connects CPUs. They number connections, not processes."""
_END_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except (AttributeError, OSError):
    pass
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs another program that gets SIGTERM when the supervisor ends (PR_SET_PDEATHSIG of Linux)."""
_POLL = 0.05
_CAUSE_SECONDS = 1.0
"""Seconds to wait for the process that failed first, if one ends because another is lost."""


class SupervisorError(UserError):
    """Processes that cannot start."""


@dataclass(frozen=True)
class Group:
    """The processes to start."""

    count: int

    arguments: Sequence[str]
    """Arguments of Python, such as -m jaxtp.train."""

    logs: Path
    """Folder of the logs."""

    devices: int | None = None
    """Virtual CPU devices of each process; None divides the GPUs among the processes."""

    environments: Sequence[Mapping[str, str]] = field(init=False)
    """Variables of each process, added to our environment and the coordinator's address."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "environments", [self._environment(index) for index in range(self.count)])

    def _environment(self, index: int) -> dict[str, str]:
        if self.devices is not None:
            return {**_UNBUFFERED, "JAX_NUM_CPU_DEVICES": str(self.devices), "JAX_PLATFORMS": "cpu"}
        gpus = names_of_gpus(gpus_present())
        if len(gpus) % self.count:
            able = sharing(len(gpus))
            raise SupervisorError(f"--processes {self.count}: {len(gpus)} GPUs can be divided among {able} processes")
        share = ",".join(shared(gpus, self.count, index))
        return {**_UNBUFFERED, **({"CUDA_VISIBLE_DEVICES": share} if share else {})}

    def shrunk_to_visible_gpus(self) -> "Group | None":
        """Returns the group to restart, with fewer processes if GPUs are gone; None without GPUs."""
        if not any("CUDA_VISIBLE_DEVICES" in variables for variables in self.environments):
            return self
        gpus = len(names_of_gpus(gpus_present()))
        counts = [count for count in range(1, self.count + 1) if gpus and gpus % count == 0]
        return replace(self, count=counts[-1]) if counts else None

    def log(self, index: int) -> Path:
        """Returns a process's log file."""
        return self.logs / f"process-{index}.log"


@dataclass(frozen=True)
class Failure:
    """The first process that failed."""

    index: int
    code: int
    """Exit code; minus the number of a signal that killed it."""

    def __str__(self) -> str:
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"process {self.index} {how}"

    @property
    def exit_code(self) -> int:
        """Exit code as in shells: 128 + N for signal N."""
        return 128 - self.code if self.code < 0 else self.code


def supervise(group: Group, *, restarts: int = 0) -> int:
    """Runs processes until all succeed or one fails; returns the first failure's exit code, else 0.

    Restarts failures at most `restarts` times, except user errors, wrong numbers, and after a signal.
    """
    group.logs.mkdir(parents=True, exist_ok=True)
    with _locked(group.logs):
        return _supervise(group, restarts)


@contextmanager
def _locked(logs: Path) -> Iterator[None]:
    with (logs / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SupervisorError(f"--logs {logs}: the processes of another start write there; name another") from None
        except OSError:
            pass  # a file system without locks
        yield


def _supervise(group: Group, restarts: int) -> int:
    turn = 0
    while True:
        turn += 1
        _say(f"logs: {group.log(0)}" + (f" to {group.log(group.count - 1).name}" if group.count > 1 else ""))
        with _Running(group, again=turn > 1) as running:
            failure = running.wait()
        if failure is None:
            return 0
        log = group.log(failure.index)
        _say(f"{failure}; see {log}" if failure.index == 0 else f"{failure}; the end of {log}:")
        _say(*(_tail(log) if failure.index else ()))  # the output of process 0 is shown already
        if turn > restarts or running.stop_requested or failure.code in (MISTAKE, WRONG):  # it would fail again
            return failure.exit_code
        left = group.shrunk_to_visible_gpus()
        if left is None:
            _say("no GPU is left: nothing is started again")
            return failure.exit_code
        count = "all" if left.count == group.count else f"only {left.count}"
        _say(f"{count} are started again (restart {turn} of {restarts})")
        group = left


class _Running:
    def __init__(self, group: Group, *, again: bool):
        self.stop_requested = False  # by a signal
        self._group = group
        self._again = again
        self._processes: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}
        self._shown: IO[bytes] | None = None

    def __enter__(self) -> Self:
        # nohup ignores SIGHUP.
        numbers = [number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._forward) for number in numbers}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        address, token = f"127.0.0.1:{_free_port()}", secrets.token_hex(32)
        for index, variables in enumerate(self._group.environments):
            cluster = {
                ADDRESS: address,
                COUNT: str(self._group.count),
                PROCESS: str(index),
                TOKEN: token,
            }
            with self._group.log(index).open("ab" if self._again else "wb") as log:
                if index == 0:
                    self._shown = self._group.log(0).open("rb")
                    self._shown.seek(0, os.SEEK_END)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *self._group.arguments],
                        env=child_environment(**(cluster if self._group.count > 1 else {}), **variables),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # this process forwards signals of the terminal
                    )
                )

    def __exit__(self, *_: object) -> None:
        self._end()
        self._show()
        if self._shown:
            self._shown.close()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self) -> Failure | None:
        waited = 0.0
        while True:
            self._show()
            codes = [process.poll() for process in self._processes]
            failed = [Failure(index, code) for index, code in enumerate(codes) if code]
            causes = [failure for failure in failed if failure.code != PASSING]  # the others lost one of these
            if causes or waited > _CAUSE_SECONDS:
                return (causes or failed)[0]
            if all(code == 0 for code in codes):
                return None
            waited += _POLL if failed else 0.0
            time.sleep(_POLL)

    def _end(self) -> None:
        """Sends SIGTERM to all, then SIGKILL to their process groups."""
        until = time.monotonic() + GRACE
        for process in self._processes:
            if process.poll() is None:
                _send(process, signal.SIGTERM)
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
            time.sleep(_POLL)
        for process in self._processes:
            _send(process, signal.SIGKILL)
            process.wait()

    def _forward(self, number: int, _: FrameType | None) -> None:
        self.stop_requested = True
        for process in self._processes:
            if process.poll() is None:
                _send(process, signal.Signals(number))

    def _show(self) -> None:
        while self._shown and (line := self._shown.readline()):
            if not _NOISE.search(line):
                encoding = sys.stdout.encoding or "utf-8"
                sys.stdout.write(line.decode(errors="replace").encode(encoding, "replace").decode(encoding))
                sys.stdout.flush()


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        lines = [line.decode(errors="replace") for line in file.read().splitlines() if not _NOISE.search(line)]
    return [f"  {line}" for line in lines[-_LAST_LINES:]]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
