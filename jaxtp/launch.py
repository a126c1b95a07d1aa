"""Joining the processes of a multi-process run; the only reader and writer of the environment.

One process drives all GPUs of a host unless a launcher says otherwise. Three ways to start several:

- Slurm and Open MPI: `srun python -m jaxtp.train ...`, `mpirun python -m jaxtp.train ...`. JAX reads their variables.
- by hand, on each host: JAX_COORDINATOR_ADDRESS=HOST:PORT JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 (then 1).

On CPUs each process takes JAX_NUM_CPU_DEVICES virtual devices.
"""

import itertools
import os
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import jax


class LaunchError(ValueError):
    """An environment that describes only part of a multi-process run."""


_BY_HAND = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_NVIDIA = tuple(map(Path, ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))
"""Of which one is there wherever a GPU of NVIDIA is: the driver's, those of containers, that of WSL2."""


def join_processes(environment: Mapping[str, str] | None = None) -> None:
    """Connects to the other processes, if the environment says that there are any; call before any other JAX.

    Args:
      environment: default `os.environ`.

    Raises:
      LaunchError: some of the variables set by hand are missing, or what is set cannot be.
    """
    accept_absent_gpus()
    variables = os.environ if environment is None else environment
    given = [name for name in _BY_HAND if name in variables]
    if given:
        _join_by_hand(variables, given)
    elif any(_count(variables, name) > 1 for name in _LAUNCHERS):
        jax.distributed.initialize()


def _join_by_hand(variables: Mapping[str, str], given: list[str]) -> None:
    missing = [name for name in _BY_HAND if name not in given]
    if missing:
        raise LaunchError(f"{', '.join(given)} set, but not {', '.join(missing)}: a multi-process run needs all three")
    address, *numbers = (variables[name] for name in _BY_HAND)
    if not all(number.isdecimal() and len(number) < 10 for number in numbers):
        raise LaunchError(f"JAX_NUM_PROCESSES and JAX_PROCESS_ID must be numbers, found {numbers}")
    count, index = map(int, numbers)
    if index >= count:
        raise LaunchError(f"JAX_PROCESS_ID={index} of JAX_NUM_PROCESSES={count}: the first is 0, the last {count - 1}")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise LaunchError(f"JAX_COORDINATOR_ADDRESS={address!r} is not HOST:PORT, such as 10.0.0.1:1234")
    jax.distributed.initialize(address, num_processes=count, process_id=index)


def _count(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "1")
    if not (text.isdecimal() and len(text) < 10):
        raise LaunchError(f"{name}={text!r}, which a launcher sets, is not a number of processes; unset it")
    return int(text)


def accept_absent_gpus(environment: MutableMapping[str, str] | None = None, nvidia: Sequence[Path] = _NVIDIA) -> None:
    """Keeps JAX's CUDA plugin from looking for CUDA's libraries where there is no GPU; call before any other JAX.

    The extra estimate-gpu brings the plugin, to compile for GPUs that are elsewhere, without cuDNN. Wherever JAX starts
    the plugin misses it, and JAX prints a traceback before it goes on with the CPU. Without a GPU the check is of no
    use; where one is, or where the variable is set, nothing changes.

    Args:
      environment: default `os.environ`.
      nvidia: files of which one is there where a GPU is.
    """
    variables = os.environ if environment is None else environment
    if not any(path.exists() for path in nvidia):
        variables.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}


def cache_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where what can be computed again is kept: `jaxtp` in the user's cache, by the XDG base directory specification.

    Args:
      environment: default `os.environ`.
    """
    variables = os.environ if environment is None else environment
    base = variables.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "jaxtp"


def xla_flags(environment: Mapping[str, str] | None = None) -> str:
    """Returns the flags that the environment gives XLA, which the programs it compiles depend on.

    Args:
      environment: default `os.environ`.
    """
    return (os.environ if environment is None else environment).get("XLA_FLAGS", "")


def visible_gpus(present: int, environment: Mapping[str, str] | None = None) -> int:
    """How many of a machine's NVIDIA GPUs a process started from here may use.

    Args:
      present: those that the machine has.
      environment: default `os.environ`; CUDA_VISIBLE_DEVICES lists some of them, and ends where it names none.
    """
    variables = os.environ if environment is None else environment
    if "CUDA_VISIBLE_DEVICES" not in variables:
        return present
    named = [name.strip() for name in variables["CUDA_VISIBLE_DEVICES"].split(",")]
    return min(present, len(list(itertools.takewhile(lambda name: name not in ("", "-1"), named))))
