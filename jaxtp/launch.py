"""Joining the processes of a multi-process run; the only reader and writer of the environment.

One process drives all GPUs of a host unless a launcher says otherwise. Three ways to start several:

- Slurm and Open MPI: `srun python -m jaxtp.train ...`, `mpirun python -m jaxtp.train ...`. JAX reads their variables.
- by hand, on each host: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 (then 1).

On CPUs each process takes JAX_NUM_CPU_DEVICES virtual devices.
"""

import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path

import jax

from jaxtp.entry import UserError


class LaunchError(UserError):
    """An environment that describes only part of a multi-process run."""


_BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_PATIENCE = 20.0
"""Seconds after which a process says that it waits for others."""
_NVIDIA = tuple(map(Path, ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))
"""Files of which one is there wherever a GPU of NVIDIA is: the driver's, those of containers, that of WSL2."""


def join_processes(environment: Mapping[str, str] = os.environ) -> None:
    """Connects to the other processes, if the environment says that there are any; call before any other JAX.

    Raises:
      LaunchError: some of the variables are missing or say what cannot be, or the processes do not find each other.
    """
    accept_absent_gpus()
    given = [name for name in _BY_HAND if name in environment]
    if given:
        _join_by_hand(environment, given)
    elif any(_number(environment, name) > 1 for name in _LAUNCHERS if name in environment):
        _join("the processes of the launcher", jax.distributed.initialize)


def _join_by_hand(variables: Mapping[str, str], given: list[str]) -> None:
    missing = [name for name in _BY_HAND if name not in given]
    if missing:
        raise LaunchError(f"{', '.join(given)} set, but not {', '.join(missing)}: a multi-process run needs all three")
    address = variables[_BY_HAND[0]]
    count, process = (_number(variables, name) for name in _BY_HAND[1:])
    if not process < count:
        raise LaunchError(
            f"JAX_PROCESS_ID={process} of JAX_NUM_PROCESSES={count}: processes count from 0 to {count - 1}"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise LaunchError(f"JAX_COORDINATOR_ADDRESS={address}: should be HOST:PORT, a port from 1 to {2**16 - 1}")
    join = partial(jax.distributed.initialize, address, num_processes=count, process_id=process)
    _join(f"process {process} of {count} at {address}", join)


def _join(waiting: str, join: Callable[[], None]) -> None:
    """Joins the others, which may take minutes; says so where it does.

    Raises:
      LaunchError: they do not come.
    """
    patience = threading.Timer(_PATIENCE, print, [f"{waiting}: still waiting for all to start"], {"file": sys.stderr})
    patience.daemon = True
    patience.start()
    try:
        join()
    except RuntimeError as error:
        raise LaunchError(f"{waiting}: cannot join the others: {str(error).splitlines()[0]}") from None
    finally:
        patience.cancel()


def _number(variables: Mapping[str, str], name: str) -> int:
    """Returns a number that a variable says.

    Raises:
      LaunchError: it says none.
    """
    try:
        return int(variables[name] if variables[name].isdecimal() else "")
    except ValueError:  # also of thousands of digits
        raise LaunchError(f"{name}={variables[name][:100]}: should be a number") from None


def accept_absent_gpus(environment: MutableMapping[str, str] = os.environ, nvidia: Sequence[Path] = _NVIDIA) -> None:
    """Keeps JAX's CUDA plugin from looking for CUDA's libraries where there is no GPU; call before any other JAX.

    The extra estimate-gpu brings the plugin, to compile for GPUs that are elsewhere, without cuDNN. Wherever JAX starts
    the plugin misses it, and JAX prints a traceback before it goes on with the CPU. Without a GPU the check is of no
    use; where one is, or where the variable is set, nothing changes.

    Args:
      environment: the variables, one of which may be set.
      nvidia: files of which one is there where a GPU is.
    """
    if not any(path.exists() for path in nvidia):
        environment.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def child_environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}


def cache_folder() -> Path:
    """Returns the folder in the user's cache (XDG base directory specification) for what can be computed again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxtp"


def xla_flags() -> str:
    """Returns the flags that the environment gives XLA, which the programs it compiles depend on."""
    return os.environ.get("XLA_FLAGS", "")


def visible_gpus(present: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of a machine's NVIDIA GPUs that a process started from here may use.

    Args:
      present: number of GPUs that the machine has.
      environment: its CUDA_VISIBLE_DEVICES lists some of them, and ends where it names none.
    """
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return present
    named = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
    return min(present, len(list(itertools.takewhile(lambda name: name not in ("", "-1"), named))))
