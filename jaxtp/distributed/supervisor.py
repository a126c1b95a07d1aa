"""Starts several processes on one machine, ends all when one fails, and restarts them if requested.

Each process writes a log, to which a later start appends. The supervisor prints the output of
process 0, and the last lines of a process that failed. This file does not import JAX.
"""

import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from jaxtp.config.entry import MISTAKE, TEMPORARY, WRONG, say, signal_name
from jaxtp.config.files import lock, open_directly
from jaxtp.distributed.environment import (
    ADDRESS,
    COUNT,
    PROCESS,
    TOKEN,
    LaunchError,
    child_environment,
    gpu_share,
    gpus_present,
    names_of_gpus,
    process_counts,
    secret,
)
from jaxtp.distributed.links import format_address, listening

GRACE = 15.0  # Seconds between SIGTERM and SIGKILL
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_LAST_LINES = 20
_NOISE = re.compile(rb"\[Gloo\]|is connected to \d+ peer ranks")
"""Matches log lines of Gloo, JAX's collectives on CPUs. They count connections, and are
misleading."""
_MARK = b"\n--- started again by jaxtp launch, %b ---\n"
_MARKED = re.compile(rb"\n--- started again by jaxtp launch, [-:\d ]+ ---\n")
_END_WITH_PARENT = """
import ctypes, os, signal, sys
try:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
except (AttributeError, OSError):
    pass
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Runs a program that receives SIGTERM when the supervisor ends (PR_SET_PDEATHSIG of Linux)."""
_POLL = 0.05
_CAUSE_SECONDS = 1.0
"""Seconds to wait for the cause of a failure: a process that lost another one may exit before the
process that failed."""


@dataclass(frozen=True)
class Group:
    """The processes to start."""

    count: int
    arguments: Sequence[str]  # Python's arguments, such as -m jaxtp.train
    logs: Path  # folder of the logs
    # Virtual CPU devices of each process; None divides the GPUs among the processes
    devices: int | None = None
    gpus: Sequence[str] = field(default_factory=lambda: names_of_gpus(gpus_present()))

    def __post_init__(self) -> None:
        if self.devices is None and len(self.gpus) % self.count:
            raise LaunchError(
                f"--processes {self.count}: {len(self.gpus)} GPUs can be divided among "
                f"{process_counts(len(self.gpus))} processes"
            )

    @property
    def environments(self) -> list[dict[str, str]]:
        """Environment variables that give each process its devices."""
        if self.devices is not None:
            return [{"JAX_NUM_CPU_DEVICES": str(self.devices), "JAX_PLATFORMS": "cpu"}] * self.count
        if not self.gpus:
            return [{}] * self.count
        shares = (gpu_share(self.gpus, self.count, index) for index in range(self.count))
        return [{"CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]

    def shrunk_to_visible_gpus(self) -> "Group | None":
        """Returns the group to restart: smaller if GPUs have disappeared, None if no GPU is
        left."""
        if self.devices is not None or not self.gpus:
            return self
        gpus = names_of_gpus(gpus_present())
        if not gpus:
            return None
        count = next(count for count in range(self.count, 0, -1) if len(gpus) % count == 0)
        return replace(self, count=count, gpus=gpus)

    def log(self, index: int) -> Path:
        """Returns a process's log file."""
        return self.logs / f"process-{index}.log"


def supervise(group: Group, *, restarts: int = 0) -> int:
    """Runs processes until all succeed or one fails; returns 0, or the first failure's exit code.

    The code is 128 + N after signal N. After a failure, all processes restart, at most `restarts`
    times, except after a user error, wrong numbers, or a signal to the supervisor.
    """
    group.logs.mkdir(parents=True, exist_ok=True)
    with _locked(group.logs):
        for attempt in range(1, restarts + 2):
            last_log = f" to {group.log(group.count - 1).name}" if group.count > 1 else ""
            say(f"logs: {group.log(0)}{last_log}")
            failure, is_stopped = _run(group)
            if failure is None:
                return 0
            index, code = failure
            _report(index, code, group.log(index))
            if attempt > restarts or is_stopped or code in (MISTAKE, WRONG):  # it would fail again
                break
            next_group = group.shrunk_to_visible_gpus()
            if next_group is None:
                say("no GPU is left: no restart")
                break
            count = "all" if next_group.count == group.count else f"only {next_group.count}"
            say(f"restarts {count} processes (restart {attempt} of {restarts})")
            group = next_group
    return 128 - code if code < 0 else code


def _report(index: int, code: int, log: Path) -> None:
    reason = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    if index == 0:  # its output was printed
        say(f"process 0 {reason}; see {log}")
        return
    say(f"process {index} {reason}; the end of {log}:")
    tail = _tail(log)
    if tail:
        say(tail)


@contextmanager
def _locked(logs: Path) -> Iterator[None]:
    with open_directly(logs / ".lock", "w") as file:
        lock(file, f"--logs {logs}: another jaxtp launch writes there; name another folder")
        yield


def _run(group: Group) -> tuple[tuple[int, int] | None, bool]:
    """Runs the processes until all succeed or one fails, then ends the others.

    Returns:
      Index and exit code (-N after signal N) of the first process that failed, or None; and whether
      this process received a signal.
    """
    processes: list[subprocess.Popen[bytes]] = []
    signals: list[int] = []

    def forward(number: int, _: FrameType | None) -> None:
        signals.append(number)
        _signal_all(processes, number)

    with ExitStack() as stack:
        for number in _FORWARDED:
            handler = signal.getsignal(number)
            if handler != signal.SIG_IGN:  # SIGHUP is ignored under nohup
                signal.signal(number, forward)
                stack.callback(signal.signal, number, handler)
        for index in range(group.count):
            _begin_log(group.log(index))
        log = stack.enter_context(group.log(0).open("rb"))
        log.seek(0, os.SEEK_END)
        stack.callback(_print_new, log)
        stack.callback(_terminate, processes)
        for process in _start_all(group):
            processes.append(process)  # before the next start, so that an error or signal ends it
        failure = _first_failure(processes, log)
    return failure, bool(signals)


def _begin_log(path: Path) -> None:
    """Creates a log, or marks the beginning of another start in an existing one."""
    with open_directly(path, "ab") as log:
        if log.tell():
            log.write(_MARK % time.strftime("%Y-%m-%d %H:%M:%S").encode())


def _start_all(group: Group) -> Iterator[subprocess.Popen[bytes]]:
    cluster = {}
    if group.count > 1:
        with listening("127.0.0.1") as server:
            address = format_address(*server.getsockname())
        cluster = {
            ADDRESS: address,
            COUNT: str(group.count),
            TOKEN: secret() or secrets.token_hex(32),
        }
    for index, variables in enumerate(group.environments):
        if cluster:
            variables = {**variables, **cluster, PROCESS: str(index)}
        with open_directly(group.log(index), "ab") as log:
            yield subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, *group.arguments],
                env=child_environment(**variables, PYTHONUNBUFFERED="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process forwards signals of the terminal
            )


def _first_failure(
    processes: Sequence[subprocess.Popen[bytes]], log: BinaryIO
) -> tuple[int, int] | None:
    waited = 0.0
    while True:
        _print_new(log)
        codes = [process.poll() for process in processes]
        failed = [(index, code) for index, code in enumerate(codes) if code]
        # Processes with the code TEMPORARY only lost another process.
        causes = [(index, code) for index, code in failed if code != TEMPORARY]
        if causes or waited > _CAUSE_SECONDS:
            return (causes or failed)[0]
        if not any(codes) and None not in codes:
            return None
        if failed:
            waited += _POLL
        time.sleep(_POLL)


def _terminate(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Sends SIGTERM to all process groups, and SIGKILL after `GRACE` seconds."""
    until = time.monotonic() + GRACE
    _signal_all(processes, signal.SIGTERM)
    while None in map(subprocess.Popen.poll, processes) and time.monotonic() < until:
        time.sleep(_POLL)
    for process in processes:
        _kill(process, signal.SIGKILL)
        process.wait()


def _signal_all(processes: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            _kill(process, number)


def _print_new(log: BinaryIO) -> None:
    while line := log.readline():
        if not _NOISE.search(line):
            encoding = sys.stdout.encoding or "utf-8"
            text = line.decode(errors="replace").encode(encoding, "replace").decode(encoding)
            print(text, end="", flush=True)


def _kill(process: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # it has ended
        os.killpg(process.pid, number)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 16384))
        last_start = _MARKED.split(file.read())[-1]
    lines = []
    for line in last_start.splitlines():
        if not _NOISE.search(line):
            lines.append(f"  {line.decode(errors='replace')}")
    return "\n".join(lines[-_LAST_LINES:])
