"""Saves and restores a run asynchronously, sharded, atomically and verified.

The mesh and the number of processes may differ between a save and a restore.

Each process writes its part in the background, through Orbax. The processes wait for each other
twice: for all parts to be written, and for process 0 to commit the checkpoint. If a process fails,
`SaveBarriers` releases the others.
"""

import copy
import itertools
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers as policies

from jaxtp.checkpoint.checksum import (
    DIAGNOSE,
    NonFiniteError,
    Sums,
    UnequalCopiesError,
    describe_devices,
    describe_not_finite,
)
from jaxtp.checkpoint.io_errors import (
    MISSING,
    CheckpointError,
    DamagedError,
    UnwritableError,
    describe_error,
    disk_full_message,
    read_on_all,
    require_shared,
    retry_io,
)
from jaxtp.checkpoint.logical import (
    Arrays,
    abstract_logical,
    from_logical,
    may_be_infinite,
    named_variables,
    to_logical,
)
from jaxtp.checkpoint.storage import (
    BoundedHandler,
    DeferredInfoHandler,
    Info,
    absolute,
    describe_arrays,
    kept_steps,
    move_aside,
    newest_checkpoint,
    read_info,
    read_info_on_all,
    read_metadata,
    read_verified,
    require_openable,
    seal,
    steps_in,
)
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.distributed.agreement import (
    all_gather_json,
    host_names,
    is_multiprocess,
    raise_everywhere,
)
from jaxtp.layers.parameter import spec_of

BARRIER_SECONDS = 1200
"""Timeout of a barrier: a process that does not write its part in this time has failed."""
# Orbax's names of a save's two barriers
_BARRIERS = ("async_write_complete", "async_commit_complete")
_FREE_SPACE = (
    "; free some space and run the same command again, which first deletes the "
    "unfinished checkpoint"
)
# How long a failing process waits for the save in progress, if there are other processes
_CLOSE_SECONDS = 3.0
_instances = itertools.count()


class PeerUnwritableError(UnwritableError):
    """Another process did not write its part of a checkpoint."""


class SaveBarriers:
    """The barriers of a save: Orbax calls this object wherever processes wait for each other.

    They wait twice at the start of a save, at `_BARRIERS`, and twice at the end. A process that
    reaches the end without passing `_BARRIERS` has failed, and releases the others.
    """

    def __init__(self) -> None:
        everyone = set(range(jax.process_count()))
        # All processes have the same number here, because they open folders in the same order.
        self._prefix = f"jaxtp{next(_instances)}"
        self.processes = ocp.options.MultiprocessingOptions(
            primary_host=0, active_processes=everyone, barrier_sync_key_prefix=self._prefix
        )
        self.options = ocp.AsyncOptions(timeout_secs=BARRIER_SECONDS, barrier_sync_fn=self)
        self._barrier = ocp.multihost.get_barrier_sync_fn()
        # If a process arrives at a barrier with another list of members, JAX's coordinator fails
        # the barrier for all processes at once.
        self._poison_barrier = ocp.multihost.get_barrier_sync_fn(
            processes=everyone | {len(everyone)}
        )
        self._unpassed: list[str] = []
        self._start_calls = 0

    def start(self, step: int) -> None:
        """Prepares for the save of a step."""
        self._unpassed = [f"{self._prefix}_{name}.{step}" for name in _BARRIERS]
        self._start_calls = 2

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all processes; raises `PeerUnwritableError` if one of them failed or is
        late."""
        starts = key not in self._unpassed and self._start_calls > 0
        self._start_calls -= starts
        if self._unpassed and not starts and key not in self._unpassed:
            # This is the end of a failed save. Fails the barriers at which other processes wait; no
            # process waits at the end.
            for skipped in self._unpassed:
                with suppress(jax.errors.JaxRuntimeError):
                    self._poison_barrier(key=skipped, timeout_ms=timeout_ms)
            return
        try:
            self._barrier(key=key, timeout_ms=timeout_ms)
        except jax.errors.JaxRuntimeError as error:
            reason = "another process failed"
            if late := re.search(r"timed out task names:\s*(\d+)", str(error)):
                reason = f"process {late[1]} did not write its part within {BARRIER_SECONDS} s"
            raise PeerUnwritableError(reason) from error
        if key in self._unpassed:
            self._unpassed.remove(key)


class _Preservation(policies.PreservationPolicy):
    """Keeps the steps that `rule` returns for losses by step, which are None if unknown.

    Orbax's policy keeps losses in memory, so a resumed run would delete the best checkpoint so far.
    """

    def __init__(
        self, rule: Callable[[Mapping[int, float | None]], set[int]], losses: Mapping[int, float]
    ):
        self._rule = rule
        self._losses = losses

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> Sequence[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        selection = self._rule({step: self._losses.get(step) for step in steps})
        return [step in selection for step in steps]


class Checkpoints:
    """The checkpoints of one run: a folder with a subfolder for each step.

    A save returns when the arrays are copied to host memory; a folder appears when it is complete.
    Arrays are stored without padding, with checksums that a restore verifies. All processes must
    call the constructor and each method together, and they fail together.

    Args:
      keep: number of newest checkpoints to keep.
      keep_every: also keeps the steps that it divides; 0 for none.
      keep_best: also keeps the checkpoint with the lowest validation loss.
    """

    setting = "run.dir"
    """The setting of a run with its folder."""
    # How Orbax marks a finished checkpoint; by default as its folder needs
    _marking: type[ocp.path.atomicity_types.TemporaryPath] | None = None

    def __init__(
        self, folder: Path, *, keep: int = 2, keep_every: int = 0, keep_best: bool = False
    ):
        self.folder = folder
        self._losses: dict[int, float] = {}
        self._unconfirmed: Callable[[], Sums] | None = None
        # All processes must make the first call together, and a save may need the names in the
        # background.
        host_names()
        self._barriers = SaveBarriers()
        rule = partial(kept_steps, keep=keep, keep_every=keep_every, keep_best=keep_best)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=_Preservation(rule, self._losses),
            cleanup_tmp_directories=True,
            create=False,
            # This file would be empty, and need a barrier.
            save_root_metadata=False,
            multiprocessing_options=self._barriers.processes,
            async_options=self._barriers.options,
            temporary_path_class=self._marking,
        )
        open_manager = partial(self._open, options)
        self._manager = read_on_all(partial(retry_io, folder, open_manager))
        if is_multiprocess():
            require_shared(folder, self._visible_steps)
        if keep_best:
            # Process 0 decides for all which checkpoints are deleted.
            losses = self._stored_losses() if jax.process_index() == 0 else []
            self._losses.update(all_gather_json(losses)[0])

    def _open(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
        handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
        handlers.add("state", ocp.args.PyTreeSave, BoundedHandler())
        handlers.add("info", ocp.args.JsonSave, DeferredInfoHandler())
        try:
            self._prepare()
            return ocp.CheckpointManager(
                absolute(self.folder), options=options, handler_registry=handlers
            )
        except MISSING as error:
            raise CheckpointError(f"{self.folder}: {error.strerror}") from None

    def _prepare(self) -> None:
        if jax.process_index() == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        require_openable(self.folder)

    def _visible_steps(self) -> tuple[bool, list[int]]:
        retry_io(self.folder, self._manager.reload)
        return self._exists(), self.steps()

    def _stored_losses(self) -> list[tuple[int, float]]:
        losses = []
        for step in self.steps():
            with suppress(CheckpointError):
                loss = read_info(self.folder / str(step)).get("eval_loss")
                if loss is not None:
                    losses.append((step, loss))
        return losses

    def steps(self) -> list[int]:
        """Returns the steps of finished checkpoints on disk, oldest first."""
        return retry_io(self.folder, self._listed)

    def _listed(self) -> list[int]:
        return steps_in(self.folder)

    def save(
        self,
        step: int,
        state: nnx.State,
        mesh: Mesh,
        info: Mapping[str, Any],
        *,
        eval_loss: float | None = None,
    ) -> None:
        """Starts to save `state` and `info` (JSON values), after the previous save has finished.

        Meanwhile the devices compute the checksums of the arrays.

        Raises:
          UnwritableError: this save or the previous one failed, or the newest checkpoint has
            this step or a later one.
          NonFiniteError, UnequalCopiesError: the previous state is corrupt (`confirm`).
        """
        self.wait()
        # A copy, because the info is written in the background.
        info = copy.deepcopy(info)
        with raise_everywhere(kinds=(UnwritableError,)):
            self._require_writable()
        arrays = to_logical(state, mesh)
        specs = {}
        exempt = []
        for name, variable in named_variables(state).items():
            specs[name] = str(spec_of(variable))
            if may_be_infinite(variable):
                exempt.append(name)
        pending: Future[Sums] = Future()

        def sound_sums() -> Sums:
            sums = pending.result(BARRIER_SECONDS)
            self.require_sound(
                sums, mesh, f"step {step} is not saved", exempt=exempt, newest=self.describe_disk
            )
            return sums

        def describe() -> Info:
            described = describe_arrays(sound_sums())
            return seal({**info, "eval_loss": eval_loss, "specs": specs, **described})

        self._barriers.start(step)
        if eval_loss is not None:
            self._losses[step] = eval_loss
        try:
            saved = self._start_save(step, arrays, describe)
            self._unconfirmed = sound_sums
        finally:
            # The sums come after the copies to the host, which they would delay.
            _sum_into(pending, arrays)
        if not saved:
            raise self._unwritable(ValueError(f"step {step} is not after the newest"))

    def _start_save(self, step: int, arrays: Arrays, describe: Callable[[], Info]) -> bool:
        """Copies the arrays to the host, and starts to write them and what `describe` returns."""
        state = ocp.args.PyTreeSave(arrays)
        args = ocp.args.Composite(state=state, info=ocp.args.JsonSave(describe))
        try:
            return self._manager.save(step, args=args)
        except Exception as error:
            # Exchanges no errors here, because other processes may wait at a barrier.
            raise self._unwritable(error) from error

    def confirm(self) -> None:
        """Waits for the sums of the last state that `save` was given.

        If the state is corrupt, it is not saved, and all processes raise the error.
        """
        confirm = self._unconfirmed
        self._unconfirmed = None
        if confirm is not None:
            try:
                confirm()
            except NumericsError:
                # The writing thread has the same error.
                with suppress(Exception):
                    self._manager.wait_until_finished()
                raise

    def wait(self) -> None:
        """Waits until the last save is on disk.

        If it failed, all processes raise the failed process's error.
        """
        self.confirm()
        with raise_everywhere(kinds=(UnwritableError, PeerUnwritableError)):
            try:
                self._manager.wait_until_finished()
            except Exception as error:
                raise self._unwritable(error) from error

    def _require_writable(self) -> None:
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            raise self._unwritable(error) from None

    def info(self, step: int) -> Info:
        """Returns the info of a checkpoint."""
        folder = self.folder / str(step)
        return read_info_on_all(folder, lambda: folder)[1]

    def restore(
        self, step: int, state: nnx.State, mesh: Mesh, info: Info | None = None
    ) -> nnx.State:
        """Reads a checkpoint into the shapes and shardings of `state` on `mesh`.

        Raises `CheckpointError`.
        """
        info = self.info(step) if info is None else info
        target = abstract_logical(state, mesh)
        extra = sorted(info["checksums"].keys() - target.keys())
        if extra:
            raise CheckpointError(
                f"{self.folder / str(step)} does not hold this model's state: it also holds "
                f"{', '.join(extra[:3])}"
            )
        return from_logical(read_verified(self.folder / str(step), target, info), state, mesh)

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint to `damaged/` next to the folder; returns its new place.

        Raises `CheckpointError` if the move fails.
        """

        def move() -> str:
            return self._move_aside(step) if jax.process_index() == 0 else ""

        moved = type(self.folder)(all_gather_json(read_on_all(move))[0])
        self._manager.reload()
        if is_multiprocess():
            require_shared(self.folder, self._visible_steps)
        return moved

    def _move_aside(self, step: int) -> str:
        return str(move_aside(self.folder / str(step)))

    def close(self) -> None:
        """Calls `wait`, then closes."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Closes; if there is an error, keeps it and waits only briefly for the other processes."""
        if error is None:
            self.close()
            return

        def close() -> None:
            for action in (self._manager.wait_until_finished, self._manager.close):
                with suppress(Exception):
                    action()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS if is_multiprocess() else None)

    def require_sound(
        self,
        summed: Sums,
        mesh: Mesh,
        result: str,
        advice: str = "",
        exempt: Sequence[str] = (),
        newest: Callable[[], str] | None = None,
    ) -> None:
        """Raises in all processes if elements of arrays are not finite, or replicas differ.

        Args:
          result: the beginning of the message.
          advice: the end of the message about elements that are not finite.
          exempt: names of arrays that need not be finite.
          newest: replaces `describe_newest`, which waits for a save.
        """
        newest = newest or self.describe_newest
        counts = summed.not_finite()
        for name in exempt:
            counts.pop(name, None)
        if counts:
            raise NonFiniteError(f"{result}: {describe_not_finite(counts)}; {advice or newest()}")
        positions = summed.unequal_replicas()
        if positions:
            where = describe_devices(positions, list(mesh.devices.flat), host_names())
            raise UnequalCopiesError(
                f"{result}: silent corruption: copies differ: {where}. {DIAGNOSE}; {newest()}"
            )

    def describe_newest(self) -> str:
        """Waits for the current save, then describes the newest checkpoint."""
        with suppress(CheckpointError, NumericsError):
            self.wait()
        return self.describe_disk()

    def describe_disk(self) -> str:
        """Describes the newest checkpoint on disk."""
        try:
            steps = self._listed()
        except OSError as error:
            return f"{self.folder} cannot be listed ({error.strerror})"
        if not steps:
            return "there is no checkpoint"
        return f"the checkpoint at step {steps[-1]} is complete"

    def _exists(self) -> bool:
        return self.folder.is_dir()

    def _unwritable(self, error: Exception) -> UserError:
        timeout = isinstance(error, TimeoutError) and error.errno is None
        peer = timeout or isinstance(error, PeerUnwritableError | jax.errors.JaxRuntimeError)
        kind = PeerUnwritableError if peer else UnwritableError
        # If the folder is missing, Orbax's message is about its own internals.
        reason = "the folder no longer exists"
        if self._exists():
            reason = describe_error(error)
        message = f"{self.folder}: a checkpoint could not be written ({reason}); "
        message += self.describe_disk()
        if disk_full_message(error) is not None:
            message += _FREE_SPACE
        return kind(message)


@contextmanager
def _frequent_switches() -> Iterator[None]:
    # Each launch of a program releases the interpreter lock, and one of Orbax's writing threads
    # then holds it for a switch interval, by default 5 ms.
    interval = sys.getswitchinterval()
    short = 0.0005
    sys.setswitchinterval(min(interval, short))
    try:
        yield
    finally:
        # If the interval was short already, another thread's save restores it.
        if interval > short:
            sys.setswitchinterval(interval)


def _sum_into(pending: Future[Sums], arrays: Arrays) -> None:
    """Sums the arrays; the thread that waits for `pending` gets the sums or the error."""
    try:
        with _frequent_switches():
            pending.set_result(Sums(arrays))
    except BaseException as error:
        pending.set_exception(error)
        raise


def restore_newest(
    checkpoints: Checkpoints,
    state: nnx.State,
    mesh: Mesh,
    accept: Callable[[Info], None],
    warn: Callable[[str], None],
) -> tuple[int, nnx.State, Info] | None:
    """Restores the newest undamaged checkpoint: step, state and info, or None without checkpoints.

    Args:
      accept: raises if the info is not this run's.
      warn: called with a message for each damaged checkpoint, which is moved away.

    Raises:
      CheckpointError: all checkpoints are damaged, or the newest undamaged one is unreadable or
        belongs to another model.
    """
    damaged: dict[int, DamagedError] = {}
    for step in reversed(checkpoints.steps()):
        try:
            info = checkpoints.info(step)
            accept(info)
            restored = step, checkpoints.restore(step, state, mesh, info), info
        except DamagedError as error:
            damaged[step] = error
            continue
        for damaged_step, damage in damaged.items():
            moved = checkpoints.set_aside(damaged_step)
            warn(f"{damage}; moved to {moved}, resuming from step {step}")
        return restored
    if damaged:
        reasons = "; ".join(map(str, damaged.values()))
        raise CheckpointError(f"{reasons}; name another --{checkpoints.setting} to start a new run")
    return None


def load_weights(
    run: Path, weights: nnx.State, mesh: Mesh, prefix: str = "model."
) -> tuple[nnx.State, Path]:
    """Returns the parameters in a checkpoint, or a run's newest checkpoint, and its folder.

    `prefix` begins the names of their arrays in the checkpoint (`weight_average`).
    """
    folder, info = read_info_on_all(run, lambda: newest_checkpoint(run))
    target = {prefix + name: array for name, array in abstract_logical(weights, mesh).items()}
    restored = read_verified(folder, target, info)
    arrays = dict(zip(named_variables(weights), restored.values(), strict=True))
    return from_logical(arrays, weights, mesh), folder


def weight_average(folder: Path, weights: nnx.State, mesh: Mesh) -> str:
    """Returns the prefix of the moving average of parameters in a checkpoint's optimizer state.

    It is the mapping in a field such as `ema` (of `optax.EmaState`) that has an array of the shape
    of each parameter.

    Raises:
      CheckpointError: there is none, or there are several.
    """
    saved = {name: tuple(array.shape) for name, array in read_metadata(folder).items()}
    shapes = {name: array.shape for name, array in abstract_logical(weights, mesh).items()}
    first = next(iter(shapes))
    mappings = [name.removesuffix(first) for name in saved if name.endswith(f".{first}")]
    averages = []
    for prefix in mappings:
        field = prefix.rstrip(".").rpartition(".")[2]
        has_all = all(saved.get(prefix + name) == shape for name, shape in shapes.items())
        if "ema" in field.split("_") and has_all:
            averages.append(prefix)
    if len(averages) == 1:
        return averages[0]
    problem = "no moving average of all weights"
    if averages:
        problem = f"several moving averages ({', '.join(averages)})"
    raise CheckpointError(
        f"{folder}: the optimizer's state has {problem}; it needs one mapping named ema, as "
        "scripts/examples/ema.py shows"
    )
