"""The processes of one machine: started together, ended together, and started again when asked.

Each writes to a log of its own; what process 0 says is shown too. When one fails the others cannot go on: they would
wait for it for ever, so they are ended, and what the first that failed said last is shown.

It does without JAX. A process that is stuck can end itself (`train/watchdog.py`).
"""

import fcntl
import os
import re
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

from jaxtp.entry import MISTAKE, PASSING, WRONG, UserError
from jaxtp.interrupt import signal_name
from jaxtp.launch.environment import (
    ADDRESS,
    COUNT,
    PROCESS,
    child_environment,
    gpus_present,
    names_of_gpus,
    shared,
    sharing,
)

GRACE = 15.0
"""Seconds that processes have to end once they are asked to, before they are killed."""
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_UNBUFFERED = {"PYTHONUNBUFFERED": "1"}
"""So that a log has what its process has printed."""
_LAST_LINES = 20
_NOISE = re.compile(rb"\[Gloo\]|is connected to \d+ peer ranks")
"""Lines of the library by which CPUs of several processes talk, in numbers that are no processes."""
_END_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except (AttributeError, OSError):
    pass
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""A program that becomes another one, and has Linux ask it to end (PR_SET_PDEATHSIG) when the supervisor has ended."""
_POLL = 0.05
_CAUSE = 1.0
"""Seconds in which the process that others have lost is seen to have ended."""


class SupervisorError(UserError):
    """Processes that cannot be started so."""


@dataclass(frozen=True)
class Group:
    """The processes to start."""

    count: int
    """Number of processes."""

    arguments: Sequence[str]
    """Arguments of Python, such as -m jaxtp.train."""

    logs: Path
    """Folder of their logs."""

    devices: int | None = None
    """Virtual CPU devices of each; None leaves it to JAX, and GPUs are divided among the processes."""

    environments: Sequence[Mapping[str, str]] = field(init=False)
    """Variables of each process, beside those of this one and where they meet."""

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

    def on_what_is_left(self) -> "Group | None":
        """Returns the processes to start again: fewer, where those GPUs that are still there cannot be divided so.

        Returns None where there were GPUs, and none is left.
        """
        if not any("CUDA_VISIBLE_DEVICES" in own for own in self.environments):
            return self
        gpus = len(names_of_gpus(gpus_present()))
        able = [count for count in range(1, self.count + 1) if gpus and gpus % count == 0]
        return replace(self, count=able[-1]) if able else None

    def log(self, index: int) -> Path:
        """Returns the log of a process."""
        return self.logs / f"process-{index}.log"


@dataclass(frozen=True)
class Failure:
    """The first process that failed."""

    index: int
    code: int
    """Exit code; of a signal, minus its number."""

    def __str__(self) -> str:
        """Returns how it ended."""
        how = f"was killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"
        return f"process {self.index} {how}"

    @property
    def exit_code(self) -> int:
        """Exit code, as shells have it."""
        return 128 - self.code if self.code < 0 else self.code


def supervise(group: Group, *, restarts: int = 0) -> int:
    """Runs processes to their end, and again after a failure, if it was no mistake and nobody has asked for an end.

    Args:
      group: the processes.
      restarts: most times that they are started again.

    Returns:
      The exit code: 0 if all ended well, else that of the first that failed.
    """
    group.logs.mkdir(parents=True, exist_ok=True)
    with _locked(group.logs):
        return _supervise(group, restarts)


@contextmanager
def _locked(logs: Path) -> Iterator[None]:
    """Keeps the processes of another start out of a folder of logs.

    Raises:
      SupervisorError: they are in it.
    """
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
        _say(*(_tail(log) if failure.index else ()))  # what process 0 said is shown already
        if turn > restarts or running.asked or failure.code in (MISTAKE, WRONG):  # it would fail again
            return failure.exit_code
        left = group.on_what_is_left()
        if left is None:
            _say("no GPU is left: nothing is started again")
            return failure.exit_code
        count = "all" if left.count == group.count else f"only {left.count}"
        _say(f"{count} are started again (restart {turn} of {restarts})")
        group = left


class _Running:
    """Processes that run; as a context manager it leaves none behind."""

    def __init__(self, group: Group, *, again: bool):
        self.asked = False
        """Whether a signal has asked for an end."""
        self._group = group
        self._again = again
        self._processes: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}
        self._shown: IO[bytes] | None = None

    def __enter__(self) -> Self:
        heard = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
        self._before = {number: signal.signal(number, self._pass_on) for number in heard}
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        address = f"127.0.0.1:{_free_port()}"
        for index, own in enumerate(self._group.environments):
            joined = {
                ADDRESS: address,
                COUNT: str(self._group.count),
                PROCESS: str(index),
            }
            with self._group.log(index).open("ab" if self._again else "wb") as log:
                if index == 0:
                    self._shown = self._group.log(0).open("rb")
                    self._shown.seek(0, os.SEEK_END)
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *self._group.arguments],
                        env=child_environment(**(joined if self._group.count > 1 else {}), **own),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # signals of the terminal come by way of this process
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
        """Waits until all have ended well, or one has failed."""
        waited = 0.0
        while True:
            self._show()
            codes = [process.poll() for process in self._processes]
            failed = [Failure(index, code) for index, code in enumerate(codes) if code]
            causes = [failure for failure in failed if failure.code != PASSING]  # the others have lost such a one
            if causes or waited > _CAUSE:
                return (causes or failed)[0]
            if all(code == 0 for code in codes):
                return None
            waited += _POLL if failed else 0.0
            time.sleep(_POLL)

    def _end(self) -> None:
        """Asks those that still run to end, and kills those that do not, with whatever any of them has started."""
        until = time.monotonic() + GRACE
        for process in self._processes:
            if process.poll() is None:
                _send(process, signal.SIGTERM)
        while any(process.poll() is None for process in self._processes) and time.monotonic() < until:
            time.sleep(_POLL)
        for process in self._processes:
            _send(process, signal.SIGKILL)
            process.wait()

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.asked = True
        for process in self._processes:
            if process.poll() is None:
                _send(process, signal.Signals(number))

    def _show(self) -> None:
        """Shows what process 0 has written since."""
        while self._shown and (line := self._shown.readline()):
            if not _NOISE.search(line):
                encoding = sys.stdout.encoding or "utf-8"
                sys.stdout.write(line.decode(errors="replace").encode(encoding, "replace").decode(encoding))
                sys.stdout.flush()


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has ended meanwhile


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _tail(path: Path) -> list[str]:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        lines = [line.decode(errors="replace") for line in file.read().splitlines() if not _NOISE.search(line)]
    return [f"  {line}" for line in lines[-_LAST_LINES:]]


def _say(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)
