"""Joining the processes of one run: which they are, where they meet, and which GPUs of its host each of them drives.

One process drives all GPUs of a host, or as many processes share them as whoever starts them says:

- Slurm and Open MPI: `srun jaxtp train ...`, `mpirun jaxtp train ...`. JAX reads where they meet.
- Kubernetes, an indexed Job or a JobSet: JAX_COORDINATOR_ADDRESS and JAX_NUM_PROCESSES in the pod's template; the id is
  that of the pod, JOB_COMPLETION_INDEX.
- several on one machine: `jaxtp launch --processes 4 -- -m jaxtp.train ...`.
- by hand, on each host: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 (then 1).

On CPUs each process takes JAX_NUM_CPU_DEVICES virtual devices. JAXTP_JOIN_SECONDS is how long they wait for each other.

Which GPUs a process drives is settled before JAX starts: left to itself JAX gives each process of Slurm and Open MPI
one GPU, even where it is the only one of its host. Processes that see the same GPUs share them evenly.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import jax

from jaxtp.entry import MISTAKE
from jaxtp.launch.environment import (
    ADDRESS,
    COUNT,
    PROCESS,
    LaunchError,
    accept_absent_gpus,
    gpus_present,
    shared,
    sharing,
    visible_gpus,
)
from jaxtp.launch.rendezvous import PATIENCE, SETTING, WAIT, meet, say_waiting

_BY_HAND = (ADDRESS, COUNT, PROCESS)
_POD = "JOB_COMPLETION_INDEX"
"""Kubernetes gives it to each pod of an indexed Job."""
JOIN_SECONDS = 60
"""Seconds that the processes wait for each other, by default."""
_HEARTBEAT = 80
"""Seconds after which JAX ends the others of a process that gives no sign of life, at the earliest after half of them;
`peers` notices it before, where it can connect."""
_MARGIN = 20
"""Seconds that JAX waits longer than that."""
_MOST_SECONDS = 24 * 60 * 60


@dataclass(frozen=True)
class _Launcher:
    """A launcher that gives each process its place in variables."""

    name: str
    count: str
    """Variable of the number of processes."""
    process: str
    """Variable of the id."""
    local: str
    """Variable of the index among the processes of a host."""
    tasks: Callable[[Mapping[str, str]], int]
    """Returns the number of processes of this host."""


def join_processes(environment: Mapping[str, str] = os.environ, gpus: int | None = None) -> None:
    """Connects to the other processes, if the environment says that there are any; call before any other JAX.

    Args:
      environment: the variables.
      gpus: number of GPUs of this machine; by default as the driver says.

    Raises:
      LaunchError: some of the variables are missing or say what cannot be, or the processes do not find each other.
    """
    accept_absent_gpus()
    present = gpus_present() if gpus is None else gpus
    launcher = next((each for each in _LAUNCHERS if _several(environment, each.count)), None)
    given = [name for name in _BY_HAND if name in environment]
    if given and (launcher is None or given != [ADDRESS]):
        _join_by_hand(environment, given)
    elif launcher is not None:
        _join_launched(launcher, environment, present)


def _several(environment: Mapping[str, str], name: str) -> bool:
    return name in environment and _number(environment, name) > 1


def _slurm_tasks(variables: Mapping[str, str]) -> int:
    """Returns the number of the step's tasks on this node, of a list such as `8(x2),4` of all nodes.

    Raises:
      LaunchError: Slurm's variables do not say it.
    """
    name, node = "SLURM_STEP_TASKS_PER_NODE", _number(variables, "SLURM_NODEID")
    counts: list[int] = []
    for part in variables.get(name, "").split(","):
        found = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if found is None:
            raise LaunchError(f"{name}={variables.get(name, '')[:100]}: should be a list such as 8(x2),4")
        counts += [int(found[1])] * int(found[2] or 1)
    if node >= len(counts):
        raise LaunchError(f"SLURM_NODEID={node}: {name}={variables[name][:100]} has {len(counts)} nodes")
    return counts[node]


def _join_launched(launcher: "_Launcher", variables: Mapping[str, str], present: int) -> None:
    """Joins the processes of a launcher. JAX finds out where they meet, if no JAX_COORDINATOR_ADDRESS says it."""
    index = _number(variables, launcher.local)
    join = partial(
        jax.distributed.initialize,
        variables.get(ADDRESS),
        num_processes=_number(variables, launcher.count),
        process_id=_number(variables, launcher.process),
        local_device_ids=gpus_of_process(variables, launcher.tasks(variables), index, present),
    )
    _join(f"the processes of {launcher.name}", join, variables)


def gpus_of_process(variables: Mapping[str, str], tasks: int, index: int, present: int) -> list[int] | None:
    """Returns the GPUs that a process drives, of those that it sees; None where there are none.

    Where the processes of a host see the same GPUs they share them; where each sees some of its own it takes those.

    Args:
      variables: the environment.
      tasks: number of processes of this host.
      index: of this one, from 0.
      present: number of GPUs of this host.

    Raises:
      LaunchError: the GPUs that the processes share cannot be divided among them.
    """
    visible = visible_gpus(present, variables)
    if not visible:
        return None
    allotted = variables.get("SLURM_GPUS_ON_NODE", "")
    total = int(allotted) if allotted.isdecimal() and len(allotted) < 6 else present
    if tasks == 1 or visible < total:  # its own, by --gpus-per-task or the like
        return list(range(visible))
    if visible % tasks:
        raise LaunchError(
            f"{visible} GPUs are not divisible among the {tasks} processes of this host; "
            f"start {sharing(visible)} on each host"
        )
    return list(shared(range(visible), tasks, index))


def _join_by_hand(variables: Mapping[str, str], given: list[str]) -> None:
    pod = PROCESS if PROCESS in variables else _POD
    missing = [name for name in _BY_HAND if name not in given and not (name == PROCESS and pod in variables)]
    if missing:
        raise LaunchError(f"{', '.join(given)} set, but not {', '.join(missing)}: a multi-process run needs all three")
    address = variables[ADDRESS]
    count, process = _number(variables, COUNT), _number(variables, pod)
    if not process < count:
        raise LaunchError(f"{pod}={process} of {COUNT}={count}: processes count from 0 to {count - 1}")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise LaunchError(f"{ADDRESS}={address[:100]}: should be HOST:PORT, a port from 1 to {2**16 - 1}")
    meet(host.strip("[]"), int(port), count, process, _seconds(variables))
    join = partial(jax.distributed.initialize, address, num_processes=count, process_id=process)
    _join(f"process {process} of {count} at {address}", join, variables)


def _seconds(variables: Mapping[str, str]) -> int:
    """Returns how long the processes wait for each other.

    Raises:
      LaunchError: it is no such number.
    """
    seconds = _number(variables, WAIT) if WAIT in variables else JOIN_SECONDS
    if not 0 < seconds <= _MOST_SECONDS:
        raise LaunchError(f"{WAIT}={seconds}: should be a number of seconds from 1 to {_MOST_SECONDS}")
    return seconds


def _join(waiting: str, join: Callable[..., None], variables: Mapping[str, str]) -> None:
    """Joins the others, which may take a while; says so where it does.

    Raises:
      LaunchError: they do not come.
    """
    seconds = _seconds(variables)
    met = threading.Event()
    watching = threading.Thread(target=_watch, args=(waiting, seconds, met), daemon=True)
    watching.start()
    try:
        join(initialization_timeout=seconds + _MARGIN, heartbeat_timeout_seconds=_HEARTBEAT)
    except ValueError as error:  # JAX does not find it out
        raise LaunchError(f"{waiting}: {error}; set {ADDRESS}=HOST:PORT, of the first process") from None
    except RuntimeError as error:
        raise LaunchError(f"{waiting}: cannot join the others: {str(error).splitlines()[0]}") from None
    finally:
        met.set()


def _watch(waiting: str, seconds: int, met: threading.Event) -> None:
    """Says that a process waits, and ends it when it has waited long enough: JAX would abort it with a C++ trace."""
    until = time.monotonic() + seconds
    if met.wait(min(PATIENCE, seconds / 2)):
        return
    if seconds > 2 * PATIENCE:
        say_waiting(waiting, seconds)
    if met.wait(until - time.monotonic()):
        return
    print(
        f"error: {waiting}: not all came within {seconds} s: does each of them run? {SETTING}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(MISTAKE)


_LAUNCHERS = (
    _Launcher("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", _slurm_tasks),
    _Launcher(
        "Open MPI",
        *("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        lambda variables: _number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
)


def _number(variables: Mapping[str, str], name: str) -> int:
    """Returns a number that a variable says.

    Raises:
      LaunchError: it says none.
    """
    said = variables.get(name)
    if said is None:
        raise LaunchError(f"{name} is not set: whoever started the processes should say it")
    try:
        return int(said if said.isdecimal() else "")
    except ValueError:  # also of thousands of digits
        raise LaunchError(f"{name}={said[:100]}: should be a number") from None
