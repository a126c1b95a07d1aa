"""The user's cache folder and environment variables.

Only this folder and `config/console.py` read environment variables.
"""

import contextlib
import errno
import itertools
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from jaxtp.config.entry import UserError

_T = TypeVar("_T")

ADDRESS = "JAX_COORDINATOR_ADDRESS"
COUNT = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
"""JAX's variables: address of process 0, number of processes, and id of this process."""
BY_HAND = (ADDRESS, COUNT, PROCESS)
OPEN_MPI = "OMPI_COMM_WORLD_SIZE"
HYDRA = "PMI_SIZE"
SLURM = "SLURM_STEP_NUM_TASKS"
TORCHRUN = "WORLD_SIZE"
JAX_JOB = "NUM_PROCESSES"
"""Variables in which launchers give the number of processes."""
_LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    # Processes of an mpirun that runs inside of Slurm also have Slurm's variables, of its daemon.
    OPEN_MPI: (),
    HYDRA: ("MPI_LOCALNRANKS",),
    SLURM: (),
    TORCHRUN: ("TORCHELASTIC_RUN_ID",),
    JAX_JOB: ("COORDINATOR_ADDRESS", "COORDINATOR_PORT", "PROCESS_ID"),
}
"""These variables in the order in which they count, and others that only this launcher sets too:
Hydra is the process manager of MPICH and Intel MPI, JAXJob a resource of Kubeflow."""
TOKEN = "JAXTP_TOKEN"  # Variable with the secret that the processes of a run share
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_GRPC_PROXY = "grpc_proxy"
_PROXIES = (_GRPC_PROXY, "https_proxy", "http_proxy")
"""gRPC connects the processes through the proxy in the first of these variables that is set; it
does not read upper-case names."""


class LaunchError(UserError):
    """Invalid variables of a multi-process run, or processes that do not connect."""


@dataclass(frozen=True)
class _OtherLauncher:
    """A launcher whose processes jaxtp does not join, and the variables that it sets."""

    name: str
    process: str
    count: str
    is_per_host: bool = False
    """Whether `count` is the number of processes on this host; more may run on other hosts."""


def _is_above(text: str, limit: int) -> bool:
    # A longer text is not a count of processes, and Python refuses to convert thousands of digits.
    return text.isdecimal() and len(text) < 10 and int(text) > limit


_OTHER_LAUNCHERS = (
    _OtherLauncher("Kubeflow's PyTorchJob or a similar launcher", "RANK", "WORLD_SIZE"),
    _OtherLauncher("a launcher with PMI", "PMI_RANK", "PMI_SIZE"),
    _OtherLauncher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    _OtherLauncher("Cray PALS", "PALS_RANKID", "PALS_LOCAL_SIZE", is_per_host=True),
    _OtherLauncher("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    _OtherLauncher("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    _OtherLauncher("SkyPilot", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"),
    _OtherLauncher("Kubeflow's Trainer", "PET_NODE_RANK", "PET_NNODES"),
    _OtherLauncher("Kubeflow's JAXJob", "PROCESS_ID", "NUM_PROCESSES"),
    _OtherLauncher("Volcano", "VC_TASK_INDEX", "VC_WORKER_NUM"),
)


DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder in which NVIDIA's driver has an entry for each GPU."""
NVIDIA = tuple(map(Path, ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))
"""On a machine with an NVIDIA GPU, one of these paths exists; the first may be absent in containers
and in WSL2."""
# Maximum size of the compilation cache; a training step for GPUs takes some MB
_MAX_CACHE_BYTES = 4 * 2**30
_YES = ("1", "true", "on", "yes", "y")  # As obstore reads a variable


def has_nvidia_gpu() -> bool:
    """Returns whether this machine has an NVIDIA GPU."""
    return any(map(Path.exists, NVIDIA))


def accept_absent_gpus(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets JAX's CUDA plugin skip its check of CUDA's libraries on a machine without a GPU.

    Call it before JAX starts. The extra estimate-gpu installs the plugin without cuDNN, to compile
    for absent GPUs, and the failed check would print a traceback.
    """
    if not has_nvidia_gpu():
        environment.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def scheduled_count(variables: Mapping[str, str]) -> str | None:
    """Returns the name of the launcher's variable with the number of processes.

    Returns None without a launcher, or if variables that are set by hand override it.
    """
    if COUNT in variables or PROCESS in variables:
        return None
    for name, companions in _LAUNCHERS.items():
        if variables.keys() >= {name, *companions} and read_number(variables, name) > 1:
            return name
    return None


def is_launched(variables: Mapping[str, str] = os.environ) -> bool:
    """Returns whether the environment describes a run of several processes."""
    by_hand = variables.keys() & set(BY_HAND)
    return scheduled_count(variables) is not None or bool(by_hand and not _is_single(variables))


def _is_single(variables: Mapping[str, str]) -> bool:
    # JAX_NUM_PROCESSES=1 alone says that a launcher's variables mean nothing.
    return variables.keys() & set(BY_HAND) == {COUNT} and variables[COUNT] == "1"


def require_joinable(variables: Mapping[str, str] = os.environ) -> None:
    """Raises `LaunchError` if a launcher started several processes that jaxtp does not join.

    Each process would train the whole run by itself.
    """
    if is_launched(variables) or _is_single(variables):
        return
    for launcher in _OTHER_LAUNCHERS:
        process = variables.get(launcher.process, "")
        count = variables.get(launcher.count, "")
        is_later = launcher.is_per_host and _is_above(process, 0)
        if is_later or (process.isdecimal() and _is_above(count, 1)):
            raise LaunchError(_describe_launcher(launcher, variables))


def _describe_launcher(launcher: _OtherLauncher, variables: Mapping[str, str]) -> str:
    values = ", ".join(
        f"{name}={variables[name][:100]}"
        for name in (launcher.process, launcher.count)
        if name in variables
    )
    return (
        f"{launcher.name} started this process as one of several ({values}), and jaxtp does not "
        f"join them: each would run alone. Set {ADDRESS}=HOST:PORT of process 0, {COUNT} and "
        f"{PROCESS} (the value of {launcher.process}) in each process, or start them by jaxtp "
        f"launch, srun, mpirun or torchrun; for a single process, set {COUNT}=1"
    )


def bypass_proxy(environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes gRPC connect the processes directly, even if a proxy is set."""
    if any(map(environment.get, _PROXIES)):
        environment[_GRPC_PROXY] = ""


def num_processes(variables: Mapping[str, str] = os.environ) -> int:
    """Returns the number of processes, from the environment.

    `jax.process_count()` would start JAX's backend.
    """
    name = scheduled_count(variables) or COUNT
    if name not in variables:
        return 1
    return read_number(variables, name)


def read_number(variables: Mapping[str, str], name: str) -> int:
    """Returns the number in a variable, or raises `LaunchError`."""
    text = variables.get(name)
    if text is None:
        raise LaunchError(f"{name} is not set: the launcher of the processes should set it")
    try:
        return int(text if text.isdecimal() else "")
    except ValueError:  # also for thousands of digits
        raise LaunchError(f"{name}={text[:100]}: should be a number") from None


def coordinator_host() -> str:
    """Returns the host in JAX_COORDINATOR_ADDRESS, or an empty string."""
    return os.environ.get(ADDRESS, "").rpartition(":")[0].strip("[]")


def token(environment: Mapping[str, str] = os.environ) -> str:
    """Returns a text that all processes of a run share.

    It is `JAXTP_TOKEN`, the scheduler's job id, or the command line. Other users can guess the job
    id and the command line. It does not cover configuration files, which the preflight compares.
    """
    for name in (TOKEN, *_JOB_IDS):
        if environment.get(name):
            return f"{name} {environment[name]}"
    return json.dumps(sys.argv[1:])


def secret() -> str | None:
    """Returns `JAXTP_TOKEN`, if it is set: nobody else should know it."""
    return os.environ.get(TOKEN)


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment for a child process."""
    return {**os.environ, **changes}


def enable_compilation_cache(platform: str, *, is_shared: bool = False) -> None:
    """Turns on JAX's compilation cache in the user's cache folder, for a platform's programs.

    A cache that the user configured stays; an empty JAX_COMPILATION_CACHE_DIR turns the cache off.
    It is off on CPUs, because a program may crash on another CPU that has the same home folder. It
    is off with several processes and for `is_shared`: these have `programs.SharedPrograms`.
    """
    import jax  # not at the top: the supervisor does not need it

    configured = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if configured == "":
        # Otherwise XLA writes files into the current folder.
        jax.config.update("jax_enable_compilation_cache", False)
    if configured is not None or platform == "cpu" or is_shared or jax.process_count() > 1:
        return
    try:
        folder = user_cache() / "programs"
        make_private(folder)
        evict_oldest(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        print(f"the compilation cache is off: {error}", file=sys.stderr)
        return
    use_cache(str(folder))


def user_cache() -> Path:
    """Returns jaxtp's folder in the user's cache; raises RuntimeError without a home folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "jaxtp"


def cache_gigabytes() -> str:
    """Returns the limit of the copies of URLs in the user's cache, as the user wrote it."""
    return os.environ.get("JAXTP_CACHE_GB", "200")


def has_public_buckets() -> bool:
    """Returns whether S3 is read without credentials (AWS_SKIP_SIGNATURE, which obstore reads)."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in _YES


def use_cache(folder: str | None) -> None:
    """Makes JAX use a folder of compiled programs from now on; None turns its cache off."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    jax.config.update("jax_compilation_cache_dir", folder)
    # A start compiles many small programs.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # XLA's own caches grow without limit, and a damaged entry is an error.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")
    compilation_cache.reset_cache()  # JAX keeps the first folder that it uses


def make_private(folder: Path) -> None:
    """Creates a folder that only this user can write; raises an `OSError` if others can."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(folder))
    tempfile.TemporaryFile(dir=folder).close()


def evict_oldest(folder: Path, limit: int = _MAX_CACHE_BYTES) -> None:
    """Removes a folder's least recently used files, down to `limit` bytes."""
    files: list[tuple[int, int, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process may delete or rename it
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                last_use = max(status.st_atime_ns, status.st_mtime_ns)
                files.append((last_use, status.st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > limit:
            path.unlink(missing_ok=True)


def names_of_gpus(present: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the names of the visible GPUs.

    CUDA ignores CUDA_VISIBLE_DEVICES from the first invalid name on.
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return list(map(str, range(present)))
    names = map(str.strip, environment["CUDA_VISIBLE_DEVICES"].split(","))
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))[:present]


def gpus_present() -> int:
    """Returns this machine's number of NVIDIA GPUs, without starting CUDA."""
    return len(list(DRIVER.glob("*/information")))


def gpu_share(gpus: Sequence[_T], processes: int, index: int) -> Sequence[_T]:
    """Returns the GPUs of process `index` if `processes` share them evenly."""
    share = len(gpus) // processes
    return gpus[index * share : (index + 1) * share]


def process_counts(gpus: int) -> str:
    """Returns the numbers of processes that divide the GPUs evenly: "1, 2 or 4"."""
    *counts, last = [str(count) for count in range(1, gpus + 1) if gpus % count == 0]
    return f"{', '.join(counts)} or {last}" if counts else last
