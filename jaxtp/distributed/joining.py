"""Connects this process to the others of its run, and selects its GPUs.

Slurm and Open MPI (`srun jaxtp train ...`), an indexed Job of Kubernetes, `jaxtp launch` and users by hand set the
variables that this file reads (see README.md). GPUs are selected before JAX starts, which would give each Slurm or Open
MPI process one GPU, even a host's only process. Processes that see the same GPUs share them evenly.
"""

import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax

from jaxtp.config.entry import MISTAKE, say
from jaxtp.distributed.environment import (
    ADDRESS,
    BY_HAND,
    COUNT,
    OPEN_MPI,
    PROCESS,
    SLURM,
    LaunchError,
    accept_absent_gpus,
    gpus_present,
    names_of_gpus,
    number,
    scheduled_count,
    shared,
    sharing,
    token,
)
from jaxtp.distributed.links import format_address, listen_address, listening
from jaxtp.distributed.rendezvous import JOIN_SECONDS_HINT, JOIN_SECONDS_VARIABLE, Wait, meet

_POD = "JOB_COMPLETION_INDEX"
"""Index of a pod in an indexed Job of Kubernetes."""
JOIN_SECONDS = 60
"""Default of JAXTP_JOIN_SECONDS."""
_HEARTBEAT = 80
"""Seconds without a heartbeat after which JAX ends the other processes, at the earliest after half of them; `peers`
notices it before, if its processes can connect."""
_MARGIN = 20
"""Seconds that JAX waits longer than JAXTP_JOIN_SECONDS."""
_MAX_SECONDS = 24 * 60 * 60
_CHECK_SECONDS = 1.0
"""Seconds between attempts to reach process 0."""
_PORT = "JAX_COORDINATOR_PORT"
_NUM_PORTS = 2**12
"""JAX chooses a port among this many, the highest."""

Variables = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A process that a scheduler started."""

    process: int
    index: int
    """Among the processes of this host."""
    tasks: int
    """Number of processes of this host."""
    host: str | None
    """Host of the first process; None if only JAX can find it."""
    job: str
    """Number from which JAX derives the port."""


def join_processes(environment: Variables = os.environ, gpus: int | None = None, bind: str | None = None) -> None:
    """Connects to the other processes, if the environment names any, before any other use of JAX.

    Args:
      gpus: number of GPUs of this machine; by default the driver's.
      bind: address at which process 0 listens; by default loopback if they meet there, else all.
    """
    accept_absent_gpus()
    if count := scheduled_count(environment):
        task = _TASKS[count](environment)
        _join_scheduled(task, number(environment, count), environment, gpus_present() if gpus is None else gpus, bind)
    elif names := [name for name in BY_HAND if name in environment]:
        _join_by_hand(environment, names, bind)


def _slurm_task(variables: Variables) -> _Task:
    # Tasks per node, such as 8(x2),4, and a list of nodes, such as node[001-002,7],other.
    name, node = "SLURM_STEP_TASKS_PER_NODE", number(variables, "SLURM_NODEID")
    counts: list[int] = []
    for part in variables.get(name, "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise LaunchError(f"{name}={variables.get(name, '')[:100]}: should be a list such as 8(x2),4")
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}: {name}={variables[name][:100]} has {len(counts)} nodes")
    first = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", variables.get("SLURM_STEP_NODELIST", "")).partition(",")[0]
    return _Task(
        process=number(variables, "SLURM_PROCID"),
        index=number(variables, "SLURM_LOCALID"),
        tasks=counts[node],
        host=first or None,
        job=variables.get("SLURM_JOB_ID", ""),
    )


def _open_mpi_task(variables: Variables) -> _Task:
    # The URI of the first process: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911.
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    host, job = re.search(r"tcp://([^,:]+)", uri), re.match(r"(\d{1,19})\.", uri)
    return _Task(
        process=number(variables, "OMPI_COMM_WORLD_RANK"),
        index=number(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
        tasks=number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        host=host[1] if host else None,
        job=str(int(job[1]) // _NUM_PORTS) if job else "",
    )


_TASKS: Mapping[str, Callable[[Variables], _Task]] = {SLURM: _slurm_task, OPEN_MPI: _open_mpi_task}


def _join_scheduled(task: _Task, count: int, variables: Variables, present: int, bind: str | None) -> None:
    """Joins at JAX_COORDINATOR_ADDRESS, else at JAX's address, derived here to report it if unreachable.

    Processes of one host meet on loopback.
    """
    address: tuple[str, int] | None = None
    if ADDRESS in variables:
        address = _parse_address(variables)
    else:
        host = "127.0.0.1" if task.tasks == count else task.host
        port = None
        if _PORT in variables:
            port = number(variables, _PORT)
        elif re.fullmatch(r"\d{1,19}", task.job):
            port = 2**16 - _NUM_PORTS + int(task.job) % _NUM_PORTS
        address = None if host is None or port is None else (host, port)
    waiting = Wait(task.process, count, address, _join_seconds(variables))
    _join(waiting, gpus_of_process(variables, task.tasks, task.index, present), bind)


def _parse_address(variables: Variables) -> tuple[str, int]:
    host, _, port = variables[ADDRESS].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise LaunchError(f"{ADDRESS}={variables[ADDRESS][:100]}: should be HOST:PORT, a port from 1 to {2**16 - 1}")
    return host.strip("[]"), int(port)


def gpus_of_process(variables: Variables, tasks: int, index: int, present: int) -> list[int] | None:
    """Returns the indices of the visible GPUs that process `index` of a host's `tasks` drives; None without GPUs.

    Processes share GPUs that they all see; a process that sees only some of the `present` GPUs drives these.
    """
    visible = len(names_of_gpus(present, variables))
    if not visible:
        return None
    allotted = variables.get("SLURM_GPUS_ON_NODE", "")
    total = int(allotted) if allotted.isdecimal() and len(allotted) < 6 else present
    if tasks == 1 or visible < total:  # for example by --gpus-per-task
        return list(range(visible))
    if visible % tasks:
        raise LaunchError(
            f"{visible} GPUs are not divisible among the {tasks} processes of this host; "
            f"start {sharing(visible)} on each host"
        )
    return list(shared(range(visible), tasks, index))


def _join_by_hand(variables: Variables, names: list[str], bind: str | None) -> None:
    pod = PROCESS if PROCESS in variables else _POD
    missing = [name for name in BY_HAND if name not in names and not (name == PROCESS and pod in variables)]
    if missing:
        raise LaunchError(f"{', '.join(names)} set, but not {', '.join(missing)}: a multi-process run needs all three")
    count, process = number(variables, COUNT), number(variables, pod)
    if not process < count:
        raise LaunchError(f"{pod}={process} of {COUNT}={count}: processes count from 0 to {count - 1}")
    host, port = _parse_address(variables)
    arguments = process, count, (host, port), _join_seconds(variables)
    meet(Wait(*arguments), listen_address(bind, host), token(variables))
    _join(Wait(*arguments), None, bind)


def _join_seconds(variables: Variables) -> int:
    name = JOIN_SECONDS_VARIABLE
    seconds = number(variables, name) if name in variables else JOIN_SECONDS
    if not 0 < seconds <= _MAX_SECONDS:
        raise LaunchError(f"{name}={seconds}: should be a number of seconds from 1 to {_MAX_SECONDS}")
    return seconds


def _join(waiting: Wait, gpus: list[int] | None, bind: str | None) -> None:
    host, port = waiting.address or ("", 0)
    address = listen_address(bind, host)
    if bind and waiting.process == 0:
        with listening(bind, port):
            pass  # JAX would not say why it cannot listen there
    joined = threading.Event()
    watcher = threading.Thread(target=_watch, args=(waiting, joined), daemon=True)
    watcher.start()
    try:
        jax.distributed.initialize(
            format_address(host, port) if host else None,
            num_processes=waiting.count,
            process_id=waiting.process,
            local_device_ids=gpus,
            coordinator_bind_address=format_address(address, port) if host and address else None,
            initialization_timeout=waiting.seconds + _MARGIN,
            heartbeat_timeout_seconds=_HEARTBEAT,
        )
    except ValueError as error:  # JAX does not find the address
        raise LaunchError(f"{waiting}: {error}; set {ADDRESS}=HOST:PORT, of the first process") from None
    except RuntimeError as error:
        raise LaunchError(f"{waiting}: cannot join the others: {str(error).splitlines()[0]}") from None
    finally:
        joined.set()


def _watch(waiting: Wait, joined: threading.Event) -> None:
    """Reports a long wait or unreachable address; ends the process before JAX would abort it."""
    reached = waiting.address is None
    while (left := waiting.time_left()) > 0:
        if not reached and (connection := waiting.reach()) is not None:
            connection.close()
            reached, waiting.problem = True, ""
        if joined.wait(min(_CHECK_SECONDS, left)):
            return
    problem = f"{waiting.problem}; {ADDRESS}=HOST:PORT names another" if waiting.problem else "does each of them run?"
    reason = f"not all came within {waiting.seconds:g} s: {problem} {JOIN_SECONDS_HINT}"
    say(f"error: {waiting}: {reason}")
    os._exit(MISTAKE)
