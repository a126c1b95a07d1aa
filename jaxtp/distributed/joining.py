"""Connects this process to the other processes of its run, and selects its GPUs.

A launcher or the user sets the variables that this file reads (see README.md). It selects GPUs
before JAX starts, because JAX would give each Slurm or Open MPI process one GPU, even to the only
process of a host. Processes that see the same GPUs share them evenly.

Processes that were started by hand, by `jaxtp launch` or by an indexed Job of Kubernetes first meet
at the coordinator's address, where process 0 checks their ids and counts. JAX would abort at a
duplicate id, and would not name missing processes.
"""

import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import jax

from jaxtp.config.entry import MISTAKE, say
from jaxtp.config.reading import truncate
from jaxtp.distributed.environment import (
    ADDRESS,
    BY_HAND,
    COUNT,
    HYDRA,
    JAX_JOB,
    OPEN_MPI,
    PROCESS,
    SLURM,
    TOKEN,
    TORCHRUN,
    LaunchError,
    accept_absent_gpus,
    bypass_proxy,
    gpu_share,
    gpus_present,
    is_launched,
    names_of_gpus,
    process_counts,
    read_number,
    scheduled_count,
    token,
)
from jaxtp.distributed.hydra import share
from jaxtp.distributed.links import (
    HELLO_SECONDS,
    Link,
    accept_links,
    connect,
    format_address,
    listen_address,
    listening,
)

_POD = "JOB_COMPLETION_INDEX"  # A pod's index in an indexed Job of Kubernetes
JOIN_SECONDS = 60  # Default of JAXTP_JOIN_SECONDS
_SECONDS_VARIABLE = "JAXTP_JOIN_SECONDS"
_SECONDS_HINT = f"({_SECONDS_VARIABLE} sets the time limit)"
_THE_TOKEN = f"the token of this run (the same command line on all hosts, or {TOKEN})"
LONG_WAIT = 20.0  # Seconds after which a waiting process says that it waits
_HEARTBEAT_SECONDS = 80
"""JAX ends the other processes after 40 to 80 seconds without a heartbeat; `peers` detects the loss
earlier, if its processes can connect."""
# Seconds by which JAX's time limit exceeds JAXTP_JOIN_SECONDS, so that jaxtp reports first
_MARGIN = 20
_MAX_SECONDS = 24 * 60 * 60
PAUSE = 0.3
CHECK_SECONDS = 1.0
"""Seconds between attempts to reach process 0: at the rendezvous, and while JAX connects."""
_MAX_IDS = 20
_MAX_ADDRESSES = 3
_MAX_ERROR_CHARS = 1000
_CPU_THREADS = "NPROC"  # XLA's number of threads on CPUs; by default one for each core
# A collective among processes blocks its thread. With a thread for each of two cores, two processes
# of two devices waited for each other forever, each in two other reductions of the same step.
_MIN_CPU_THREADS = 32
_PORT = "JAX_COORDINATOR_PORT"
_NUM_PORTS = 2**12  # JAX chooses one of this many highest ports

Variables = Mapping[str, str]


@dataclass
class Wait:
    """A wait of up to `seconds` for `count` processes.

    `address` of process 0 is None if only JAX knows it.
    """

    process: int
    count: int
    address: tuple[str, int] | None
    seconds: int
    problem: str = field(default="", init=False)
    """The reason why process 0 was not reached."""
    _start: float = field(default_factory=time.monotonic, init=False)
    _reported: bool = field(default=False, init=False)

    def __str__(self) -> str:
        where = f" at {format_address(*self.address)}" if self.address else ""
        return f"process {self.process} of {self.count}{where}"

    def time_left(self) -> float:
        """Returns the remaining seconds; prints one line after a long wait."""
        waited = time.monotonic() - self._start
        if waited > LONG_WAIT and self.seconds > 2 * LONG_WAIT and not self._reported:
            self._reported = True
            reason = f" ({self.problem})" if self.problem else ""
            self.print(f"still waiting for all to start, up to {self.seconds:g} s{reason}")
        return self.seconds - waited

    def reach(self) -> socket.socket | None:
        """Connects to process 0; if it cannot, reports the reason and returns None."""
        assert self.address is not None
        timeout = max(0.1, min(HELLO_SECONDS, self.time_left()))
        try:
            return socket.create_connection(self.address, timeout=timeout)
        except (socket.gaierror, UnicodeError) as error:
            reason = getattr(error, "strerror", "not a valid host name")
            self.report(f"the host has no address ({reason})")
        except ConnectionError:  # it may not have started yet
            self.problem = "nothing answers there"
        except OSError as error:
            self.report(f"the address cannot be reached ({error.strerror or error})")
        return None

    def report(self, problem: str) -> None:
        """Prints a problem, unless it was the last one printed."""
        if problem != self.problem:
            self.print(f"{problem}; still trying")
        self.problem = problem

    def print(self, text: str) -> None:
        """Prints a line on stderr."""
        say(f"{self}: {text}")


@dataclass(frozen=True, kw_only=True)
class _Task:
    """A process that a scheduler started."""

    process: int
    index: int  # Index of the process on its host
    tasks: int  # Number of processes on its host
    host: str | None  # Host of process 0; None if only JAX can find it
    port: int | None  # Port of process 0; likewise


def join_processes(
    environment: Variables = os.environ, gpus: int | None = None, bind: str | None = None
) -> None:
    """Connects to the other processes, if the environment names any.

    Call it before any other use of JAX.

    Args:
      gpus: number of GPUs of this machine; by default the driver reports it.
      bind: address at which process 0 listens; by default loopback if the others connect to
        loopback, otherwise all addresses.
    """
    accept_absent_gpus()
    variable = scheduled_count(environment)
    if variable is not None:
        task = _TASKS[variable](environment)
        count = read_number(environment, variable)
        address = _scheduled_address(task, count, environment)
        waiting = Wait(task.process, count, address, _join_seconds(environment))
        if gpus is None:
            gpus = gpus_present()
        _join(waiting, gpus_of_process(environment, task.tasks, task.index, gpus), bind)
    elif is_launched(environment):
        waiting = _wait_by_hand(environment)
        rendezvous(waiting, bind, token(environment))
        _join(replace(waiting), None, bind)  # the time limit starts again


def _slurm_task(variables: Variables) -> _Task:
    # Parses tasks per node, such as 8(x2),4, and a list of nodes, such as node[001-002,7],other.
    name = "SLURM_STEP_TASKS_PER_NODE"
    node = read_number(variables, "SLURM_NODEID")
    counts: list[int] = []
    for part in variables.get(name, "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise LaunchError(
                f"{name}={variables.get(name, '')[:100]}: should be a list such as 8(x2),4"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if node >= len(counts):
        raise LaunchError(
            f"SLURM_NODEID={node}: {name}={variables[name][:100]} has {len(counts)} nodes"
        )
    nodes = variables.get("SLURM_STEP_NODELIST", "")
    first_node = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", nodes).partition(",")[0]
    return _Task(
        process=read_number(variables, "SLURM_PROCID"),
        index=read_number(variables, "SLURM_LOCALID"),
        tasks=counts[node],
        host=first_node or None,
        port=_port_of(variables.get("SLURM_JOB_ID", "")),
    )


def _open_mpi_task(variables: Variables) -> _Task:
    # Parses the URI of process 0: 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911. Open MPI 5 has
    # none, but names the host and the process of mpirun: prterun-node1-2271@1.
    uri = variables.get("OMPI_MCA_orte_hnp_uri", "")
    host = re.search(r"tcp://([^,:]+)", uri)
    job = re.match(r"(\d{1,19})\.", uri)
    job_number = str(int(job[1]) // _NUM_PORTS) if job else ""
    if version_5 := re.match(r"prterun-(.+)-(\d{1,19})@", variables.get("PMIX_NAMESPACE", "")):
        host = version_5
        job_number = version_5[2]
    return _Task(
        process=read_number(variables, "OMPI_COMM_WORLD_RANK"),
        index=read_number(variables, "OMPI_COMM_WORLD_LOCAL_RANK"),
        tasks=read_number(variables, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        host=host[1] if host else None,
        port=_port_of(job_number),
    )


def _hydra_task(variables: Variables) -> _Task:
    host = socket.gethostname()
    job = str(os.getpid())
    if ADDRESS not in variables:
        host, _, job = share(variables, f"{host}:{job}").rpartition(":")
    return _Task(
        process=read_number(variables, "PMI_RANK"),
        index=read_number(variables, "MPI_LOCALRANKID"),
        tasks=read_number(variables, "MPI_LOCALNRANKS"),
        host=host,
        port=_port_of(job),
    )


def _torchrun_task(variables: Variables) -> _Task:
    # torchrun's agent listens on MASTER_PORT itself.
    restarts = variables.get("TORCHELASTIC_RESTART_COUNT", "0")
    job = read_number(variables, "MASTER_PORT") + int(restarts if restarts.isdecimal() else 0)
    return _Task(
        process=read_number(variables, "RANK"),
        index=read_number(variables, "LOCAL_RANK"),
        tasks=read_number(variables, "LOCAL_WORLD_SIZE"),
        host=variables.get("MASTER_ADDR"),
        port=_port_of(str(job)),
    )


def _jax_job_task(variables: Variables) -> _Task:
    return _Task(
        process=read_number(variables, "PROCESS_ID"),
        index=0,
        tasks=1,
        host=variables["COORDINATOR_ADDRESS"],
        port=read_number(variables, "COORDINATOR_PORT"),
    )


_TASKS: Mapping[str, Callable[[Variables], _Task]] = {
    OPEN_MPI: _open_mpi_task,
    HYDRA: _hydra_task,
    SLURM: _slurm_task,
    TORCHRUN: _torchrun_task,
    JAX_JOB: _jax_job_task,
}


def _port_of(job: str) -> int | None:
    """Returns the port that JAX derives from the number of a job."""
    if not re.fullmatch(r"\d{1,19}", job):
        return None
    return 2**16 - _NUM_PORTS + int(job) % _NUM_PORTS


def _scheduled_address(task: _Task, count: int, variables: Variables) -> tuple[str, int] | None:
    """Returns JAX_COORDINATOR_ADDRESS, or the address that JAX derives; loopback on one host."""
    if ADDRESS in variables:
        return _parse_address(variables)
    host = "127.0.0.1" if task.tasks == count else task.host
    port = read_number(variables, _PORT) if _PORT in variables else task.port
    return (host, port) if host and port else None


def _parse_address(variables: Variables) -> tuple[str, int]:
    host, _, port = variables[ADDRESS].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise LaunchError(
            f"{ADDRESS}={variables[ADDRESS][:100]}: should be HOST:PORT, a port from 1 to "
            f"{2**16 - 1}"
        )
    return host.strip("[]"), int(port)


def gpus_of_process(variables: Variables, tasks: int, index: int, present: int) -> list[int] | None:
    """Returns the GPUs of process `index` among a host's `tasks` processes; None without GPUs.

    If the scheduler shows each process only some of the `present` GPUs, the process uses all that
    it sees; otherwise the processes share the GPUs evenly.
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
            f"start {process_counts(visible)} on each host"
        )
    return list(gpu_share(range(visible), tasks, index))


def _wait_by_hand(variables: Variables) -> Wait:
    names = [name for name in BY_HAND if name in variables]
    missing = [name for name in BY_HAND if name not in variables]
    process_variable = PROCESS
    if PROCESS in missing and _POD in variables:
        process_variable = _POD
        missing.remove(PROCESS)
    if missing:
        raise LaunchError(
            f"{', '.join(names)} set, but not {', '.join(missing)}: a multi-process run needs "
            "all three"
        )
    count = read_number(variables, COUNT)
    process = read_number(variables, process_variable)
    if process >= count:
        raise LaunchError(
            f"{process_variable}={process} of {COUNT}={count}: processes count from 0 to "
            f"{count - 1}"
        )
    return Wait(process, count, _parse_address(variables), _join_seconds(variables))


def _join_seconds(variables: Variables) -> int:
    seconds = JOIN_SECONDS
    if _SECONDS_VARIABLE in variables:
        seconds = read_number(variables, _SECONDS_VARIABLE)
    if not 0 < seconds <= _MAX_SECONDS:
        raise LaunchError(
            f"{_SECONDS_VARIABLE}={seconds}: should be a number of seconds from 1 to {_MAX_SECONDS}"
        )
    return seconds


def _join(waiting: Wait, gpus: list[int] | None, bind: str | None) -> None:
    host, port = waiting.address or ("", 0)
    listened = listen_address(bind, host)
    if bind and waiting.process == 0:
        with listening(bind, port):
            pass  # raises an error with a reason, which an error of JAX would lack
    address = bind_address = None
    if host:
        address = format_address(host, port)
        if listened:
            bind_address = format_address(listened, port)
    bypass_proxy()
    # JAX warns of every variable with `proxy` in its name.
    jax.config.update("jax_check_proxy_envs", False)
    joined = threading.Event()
    threading.Thread(target=_watch, args=(waiting, joined), daemon=True).start()
    os.environ.setdefault(_CPU_THREADS, str(max(os.cpu_count() or 1, _MIN_CPU_THREADS)))
    try:
        jax.distributed.initialize(
            address,
            num_processes=waiting.count,
            process_id=waiting.process,
            local_device_ids=gpus,
            coordinator_bind_address=bind_address,
            initialization_timeout=waiting.seconds + _MARGIN,
            heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        )
    except ValueError as error:  # JAX does not find the address
        raise LaunchError(f"{waiting}: {error}; set {ADDRESS}=HOST:PORT of process 0") from None
    except RuntimeError as error:
        raise LaunchError(
            f"{waiting}: cannot join the others: {str(error).splitlines()[0]}"
        ) from None
    finally:
        joined.set()


def _watch(waiting: Wait, joined: threading.Event) -> None:
    """Reports a long wait or an unreachable address; exits before JAX would abort."""
    reached = waiting.address is None
    while (left := waiting.time_left()) > 0:
        connection = None if reached else waiting.reach()
        if connection is not None:
            connection.close()
            reached = True
            waiting.problem = ""
        if joined.wait(min(CHECK_SECONDS, left)):
            return
    problem = "are all of them running?"
    if waiting.problem:
        problem = f"{waiting.problem}; {ADDRESS}=HOST:PORT names another"
    reason = f"not all processes joined within {waiting.seconds:g} s: {problem} {_SECONDS_HINT}"
    say(f"error: {waiting}: {reason}")
    os._exit(MISTAKE)


def rendezvous(waiting: Wait, bind: str | None, token: str) -> None:
    """Waits until all processes have connected to process 0.

    Raises:
      LaunchError: processes are missing, share an id, or expect different numbers of processes.
    """
    assert waiting.address is not None
    host, port = waiting.address
    address = listen_address(bind, host)
    if waiting.process:
        _join_rendezvous(waiting, token)
    elif waiting.count > 1:
        with listening(address, port) as server:
            _serve_rendezvous(server, waiting, token)


def _this_process() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def _serve_rendezvous(server: socket.socket, waiting: Wait, token: str) -> None:
    links: dict[int, Link] = {}
    hosts = {0: _this_process()}
    rejected: Counter[str] = Counter()
    problem: str | None = None

    def drop_ended() -> None:
        for process, link in list(links.items()):
            if link.receive() is None and not link.is_open:
                link.close()
                del links[process], hosts[process]  # it may restart

    def time_left() -> float:
        drop_ended()
        if rejected:
            addresses = map(truncate, dict(rejected.most_common(_MAX_ADDRESSES)))
            waiting.problem = (
                f"dropped {rejected.total()} connections that did not prove "
                f"{_THE_TOKEN}, from {', '.join(addresses)}"
            )
        if len(hosts) == waiting.count:
            return 0.0
        return waiting.time_left()

    for link, hello in accept_links(server, token, time_left, rejected):
        process, count, host = map(hello.get, ("process", "count", "host"))
        if type(process) is not int or type(count) is not int or type(host) is not str:
            link.close()
            continue
        host = truncate(host)
        drop_ended()
        problem = _conflict(process, count, host, waiting.count, hosts)
        if problem is not None:
            link.send({"error": problem})
            link.close()
            break
        links[process] = link
        hosts[process] = host
    else:
        problem = _describe_missing(waiting, hosts)
    for link in links.values():
        link.send({"error": problem})
        link.close()
    if problem is not None:
        raise LaunchError(problem)


def _describe_missing(waiting: Wait, hosts: Mapping[int, str]) -> str | None:
    missing = sorted(set(range(waiting.count)) - hosts.keys())
    if not missing:
        return None
    assert waiting.address is not None
    ids = ", ".join(map(str, missing[:_MAX_IDS]))
    more = ", ..." if missing[_MAX_IDS:] else ""
    reason = f"; {waiting.problem}" if waiting.problem else ""
    return (
        f"process {ids}{more} of {waiting.count} did not join within {waiting.seconds:g} s: is it "
        f"running, with the address {format_address(*waiting.address)} and "
        f"JAX_PROCESS_ID={missing[0]}? {_SECONDS_HINT}{reason}"
    )


def _conflict(
    process: int, count: int, host: str, expected_count: int, hosts: Mapping[int, str]
) -> str | None:
    if count != expected_count:
        return (
            f"process {process} (on {host}) expects {count} processes, but process 0 expects "
            f"{expected_count}"
        )
    if not 0 <= process < count:
        return (
            f"process {process} (on {host}) has no valid id: {count} processes have the ids 0 "
            f"to {count - 1}"
        )
    if process in hosts:
        return (
            f"two processes have the id {process}, one on {hosts[process]} and one on {host}: set "
            f"JAX_PROCESS_ID to 0 to {count - 1}, each once"
        )
    return None


def _join_rendezvous(waiting: Wait, token: str) -> None:
    hello = {"process": waiting.process, "count": waiting.count, "host": _this_process()}
    while waiting.time_left() > 0:
        connection = waiting.reach()
        if connection is not None:
            link = connect(connection, token, hello, HELLO_SECONDS)
            if link is None:
                waiting.report(f"the program that answers there does not prove {_THE_TOKEN}")
            elif _wait_for_verdict(link, waiting):
                return
            else:
                waiting.problem = "process 0 has ended"
        time.sleep(PAUSE)  # process 0 may restart, or its host name may resolve
    raise LaunchError(
        f"{waiting}: {waiting.problem} after {waiting.seconds:g} s: process 0 must run on that "
        f"host, and its port must be open {_SECONDS_HINT}"
    )


def _wait_for_verdict(link: Link, waiting: Wait) -> bool:
    """Returns whether process 0 has sent its verdict; raises `LaunchError` if it is an error."""
    verdict = None
    while verdict is None and link.is_open and waiting.time_left() > -HELLO_SECONDS:
        # The verdict is sent when all have connected or process 0 stops waiting.
        verdict = link.receive(1.0)
    link.close()
    if verdict is None or "error" not in verdict:
        return False
    if verdict["error"] is not None:
        raise LaunchError(truncate(verdict["error"], _MAX_ERROR_CHARS))
    return True
