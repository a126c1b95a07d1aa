"""Compiled programs: how many a process compiles or reads, and a cache that processes share.

On GPUs the processes of a run divide the search for the fastest kernels of a program and wait for
each other's results, and two compilations of a program may order its collectives differently. So
either all processes read a program from the cache, or all compile it. JAX finds a program by a key,
and only process 0 writes.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from jaxtp.config.entry import UserError
from jaxtp.config.reading import read_bytes
from jaxtp.distributed.agreement import all_gather_json, first_disagreeing, is_multiprocess
from jaxtp.distributed.environment import evict_oldest, make_private, use_cache

_READ = "/jax/compilation_cache/cache_hits"
_COMPILED_OR_READ = "/jax/core/compile/backend_compile_duration"
_MIN_SECONDS = "jax_persistent_cache_min_compile_time_secs"
_MARK = ".mark"
_SEAL = ".seal"
"""A file in the folder of programs, and the file with the status of the first."""
_MAX_SEAL = 100  # Bytes
OWN_KEYS = ("cpu",)
"""Platforms on which each process has its own keys, because JAX leaves the process's devices out of
them on GPUs only."""


class ProgramCounts:
    """Counts the programs that this process compiles, or reads from JAX's cache, in a block."""

    def __init__(self) -> None:
        self._events: list[str] = []

    def __enter__(self) -> Self:
        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_listener(self._count)
        jax.monitoring.unregister_event_duration_listener(self._count)

    def _count(self, event: str, duration_secs: float | str = 0.0, **kwargs: str | int) -> None:
        if event in (_READ, _COMPILED_OR_READ):
            self._events.append(event)  # in one operation, because programs compile in threads

    @property
    def read(self) -> int:
        """Number of programs that the cache had."""
        return self._events.count(_READ)

    @property
    def compiled(self) -> int:
        """Number of programs that were compiled."""
        return self._events.count(_COMPILED_OR_READ) - self.read


def _seal(folder: Path) -> None:
    # Programs are code, and a run's folder may come from someone else. Nobody can choose the time
    # at which a file's status changed, so a seal is not valid in a copy of the folder.
    (folder / _MARK).unlink(missing_ok=True)
    (folder / _MARK).touch()
    (folder / _SEAL).write_bytes(_status(folder))


def _is_sealed(folder: Path) -> bool:
    try:
        return read_bytes(folder / _SEAL, _MAX_SEAL) == _status(folder)
    except OSError:
        return False


def _status(folder: Path) -> bytes:
    status = (folder / _MARK).lstat()
    return f"{status.st_ino} {status.st_ctime_ns}".encode()


class SharedPrograms:
    """The compilation cache of a run of several processes, or with a mirror.

    It is in the run's folder, or where the user configured one. All processes must call each
    method.

    Args:
      folder: made by `publish`, unless it exists.
      fetch: downloads the programs of an earlier start to a folder.
    """

    def __init__(self, folder: Path, mesh: Mesh, fetch: Callable[[Path], None] | None = None):
        self._folder = folder
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._staging: tempfile.TemporaryDirectory[str] | None = None
        self._configured: str | None = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
        self._place = self._configured or str(folder)
        self._is_shared = False
        self.problem = ""
        """The reason why the run's cache is off."""
        if self._configured == "" or mesh.devices.flat[0].platform in OWN_KEYS:
            if self._configured is None and is_multiprocess():
                self.problem = "on CPUs each process would look for other programs"
        elif self._configured is not None:
            self._test()
        elif all(all_gather_json(folder.is_dir() and not folder.is_symlink())):
            self._open()
        else:
            # Programs that examine the devices precede the run's folder.
            self._staging = tempfile.TemporaryDirectory(prefix="jaxtp-programs-")
            if fetch is not None:
                self._fill(Path(self._staging.name), fetch)
            use_cache(self._staging.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.cleanup()
        if jax.config.jax_compilation_cache_dir != self._configured:  # type: ignore[attr-defined]
            use_cache(self._configured)

    def _fill(self, staging: Path, fetch: Callable[[Path], None]) -> None:
        # All processes have the same programs, or none.
        names = None
        with suppress(OSError, UserError):
            fetch(staging)
            names = sorted(path.name for path in staging.iterdir())
        reports = all_gather_json(names)
        if None in reports or reports.count(names) < len(reports):
            shutil.rmtree(staging)
            make_private(staging)

    def publish(self) -> None:
        """Makes the folder, with the programs so far. Call it once the run's folder is made."""
        if self._staging is not None:
            self._open()

    def describe(self) -> str | None:
        """Returns where the programs are, or why there is no cache; None if the user turned it
        off."""
        if self.problem:
            return f"off: {self.problem}"
        return self._place if self._is_shared else None

    def accept(self, lowered: Lowered, warn: Callable[[str], None]) -> None:
        """Turns the cache off unless all processes are about to compile the same program."""
        if not self._is_shared:
            return
        digest = hashlib.sha256(lowered.as_text().encode()).hexdigest()
        other = first_disagreeing(lambda: digest)
        if other is not None:
            self._turn_off(f"{other} compiles another training step than process 0")
            warn(f"the cache of programs is off: {self.problem}")

    def _open(self) -> None:
        problem = None
        # Process 0 comes first, because it may remove the folder.
        for takes_part in (jax.process_index() == 0, True):
            reports = all_gather_json(self._prepare() if takes_part else None)
            problem = problem or next(filter(None, reports), None)
        if problem is None:
            blind = first_disagreeing(self._sizes)
            if blind is not None:
                problem = f"{blind} sees other programs in {self._folder} than process 0"
        if problem is not None:
            self._turn_off(problem)
            return
        use_cache(str(self._folder))
        self._test()

    def _prepare(self) -> str | None:
        try:
            make_private(self._folder)
            if jax.process_index() == 0:
                if not _is_sealed(self._folder):
                    shutil.rmtree(self._folder)
                    make_private(self._folder)
                if self._staging is not None:
                    shutil.copytree(self._staging.name, self._folder, dirs_exist_ok=True)
                evict_oldest(self._folder)
                _seal(self._folder)
        except OSError as error:
            return str(error)
        return None

    def _sizes(self) -> dict[str, int] | str:
        try:
            return {path.name: path.stat().st_size for path in sorted(self._folder.iterdir())}
        except OSError as error:
            return str(error)

    def _test(self) -> None:
        # All processes have to read a program that process 0 has compiled. It has no kernels to
        # search, so that process 0 does not wait for the others.
        if jax.process_index() == 0:
            self._reads_a_program()
        all_gather_json(None)
        readers = all_gather_json(self._reads_a_program())
        self._is_shared = all(readers)
        if not self._is_shared:
            reader = f"process {readers.index(False)}"
            self._turn_off(f"{reader} does not find what process 0 wrote in {self._place}")

    def _reads_a_program(self) -> bool:
        usual = jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
        jax.config.update(_MIN_SECONDS, 0.0)
        with ProgramCounts() as counts:
            # JAX would find the program of the same function in memory.
            jax.jit(lambda: jnp.zeros(()), out_shardings=self._everywhere).lower().compile()
        jax.config.update(_MIN_SECONDS, usual)
        return counts.read > 0

    def _turn_off(self, problem: str) -> None:
        self._is_shared = False
        self.problem = problem
        use_cache(None)
