"""The variables of the environment, which this room alone reads and writes, and the user's cache."""

import contextlib
import errno
import itertools
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TypeVar

from jaxtp.entry import UserError

_T = TypeVar("_T")

ADDRESS, COUNT, PROCESS = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""Variables of JAX that say where the processes of a run meet, how many they are, and which one this is."""


class LaunchError(UserError):
    """An environment that describes only part of a multi-process run, or processes that do not find each other."""


DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder of NVIDIA's driver with an entry for each GPU of the machine."""
_NVIDIA = tuple(map(Path, ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")))
"""Files of which one is there wherever a GPU of NVIDIA is: the driver's, those of containers, that of WSL2."""
_MOST_KEPT = 4 * 2**30
"""Bytes of compiled programs that are kept, and of plans of rows; a training step for GPUs takes some MB."""


@contextlib.contextmanager
def columns(least: int, environment: MutableMapping[str, str] = os.environ) -> Iterator[int]:
    """Has libraries write text of `least` columns or more meanwhile; yields the number of columns."""
    before, found = environment.get("COLUMNS"), shutil.get_terminal_size().columns
    try:
        if found < least:
            environment["COLUMNS"] = str(least)
        yield max(found, least)
    finally:
        if found < least:
            environment.pop("COLUMNS")
            environment.update({} if before is None else {"COLUMNS": before})


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


def coordinator_host(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the host where the processes meet; empty if no variable says it."""
    return environment.get(ADDRESS, "").rpartition(":")[0].strip("[]")


def child_environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with changes, for a process that it starts."""
    return {**os.environ, **changes}


def cache_folder() -> Path:
    """Returns the folder in the user's cache (XDG base directory specification) for what can be computed again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "jaxtp"


def keep_programs(platform: str) -> None:
    """Keeps the programs that JAX compiles from here on in the user's cache, and takes from it what is there already.

    Does nothing where JAX's configuration says something of its cache; an empty JAX_COMPILATION_CACHE_DIR turns it off.
    Nor on CPUs: their programs hold instructions of the very CPU that compiled them, so that another one that shares
    the home refuses or dies of them. Nor with several processes, of which only the first would write: where they share
    no disk it would not compile the next time, and the others would wait for its part of the autotuning. A folder that
    cannot be used is said on stderr, in one line.

    Args:
      platform: JAX's name of the devices that programs are compiled for.
    """
    import jax  # the supervisor of processes does without it

    asked = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if asked == "":
        jax.config.update("jax_enable_compilation_cache", False)  # else XLA's own files come to the current folder
    if asked is not None or platform == "cpu" or jax.process_count() > 1:
        return
    try:
        folder = cache_folder() / "programs"
        make_private(folder)
        forget_oldest(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        print(f"compiled programs are not kept for the next run: {error}", file=sys.stderr)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_enable_xla_caches", "")  # their size has no bound, and damage is an error


def make_private(folder: Path) -> None:
    """Makes a folder for programs or plans, which whoever can write there can replace.

    Raises:
      OSError: it cannot be made or written, or others can write there.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(errno.EPERM, "others can write there", str(folder))
    tempfile.TemporaryFile(dir=folder).close()


def _unlink(path: Path) -> None:
    path.unlink(missing_ok=True)


def forget_oldest(folder: Path, most: int = _MOST_KEPT, forget: Callable[[Path], None] = _unlink) -> None:
    """Deletes the files that were used the longest ago, until the others take at most so many bytes.

    Args:
      folder: place of the files, whatever they are called.
      most: bytes that may stay.
      forget: deletes a file.
    """
    found: list[tuple[os.stat_result, Path]] = []
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process has deleted it meanwhile, or renamed it
            if stat.S_ISREG((of_file := path.stat()).st_mode):
                found.append((of_file, path))
    found.sort(key=lambda file: max(file[0].st_atime_ns, file[0].st_mtime_ns), reverse=True)
    sizes = itertools.accumulate(of_file.st_size for of_file, _ in found)
    for (_, path), total in zip(found, sizes, strict=True):
        if total > most:
            forget(path)


def xla_flags() -> str:
    """Returns the flags that the environment gives XLA, which the programs it compiles depend on."""
    return os.environ.get("XLA_FLAGS", "")


def visible_gpus(present: int, environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of a machine's NVIDIA GPUs that a process started from here may use.

    Args:
      present: number of GPUs that the machine has.
      environment: its CUDA_VISIBLE_DEVICES lists some of them, and ends where it names none.
    """
    return len(names_of_gpus(present, environment))


def names_of_gpus(present: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the visible GPUs as CUDA_VISIBLE_DEVICES names them; arguments as of `visible_gpus`."""
    if "CUDA_VISIBLE_DEVICES" not in environment:
        return [str(index) for index in range(present)]
    named = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), named))[:present]


def gpus_present(driver: Path = DRIVER) -> int:
    """Returns the number of NVIDIA GPUs of this machine, as their driver says; none of them is woken."""
    return len(list(driver.glob("*/information")))


def shared(gpus: Sequence[_T], processes: int, index: int) -> Sequence[_T]:
    """Returns the GPUs of a process, of those that several share evenly."""
    each = len(gpus) // processes
    return gpus[index * each : (index + 1) * each]


def sharing(gpus: int) -> str:
    """Returns the numbers of processes that can share so many GPUs evenly, for a message."""
    return ", ".join(str(count) for count in range(1, gpus + 1) if gpus % count == 0)
