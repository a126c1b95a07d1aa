"""Saves and restores a run: asynchronously, sharded, atomically, checked, on any mesh, by one process or several."""

import contextlib
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.damage import (
    CheckpointError,
    DamagedError,
    agreed,
    patiently,
    reason,
    require_shared,
)
from jaxtp.checkpoint.keeping import policy
from jaxtp.checkpoint.logical import abstract_logical, from_logical, named_variables, to_logical
from jaxtp.checkpoint.saving import SaveMeetings, WaitedError, in_vain
from jaxtp.checkpoint.stored import agreed_info, describe_arrays, newest, read_verified, seal, stored_info
from jaxtp.launch.agreement import agree, several, share
from jaxtp.layers.parameter import spec_of

EVAL_LOSS = "eval_loss"
_DAMAGED = "damaged"
_MOMENT = 3.0
"""Seconds that a process which fails waits for the save under way, if there are several."""


class Checkpoints:
    """The checkpoints of one run, in one folder, one subfolder for each step.

    Args:
      folder: the folder; it is created if it is missing.
      keep: number of the newest to keep.
      keep_every: also keeps those whose step is a multiple of it; 0 for none.
      keep_best: also keeps the one with the lowest validation loss.

    A save returns when the arrays have been copied to host memory, and is written by a background thread into a
    temporary folder that is renamed when complete: a run killed inside a save leaves the checkpoint before it. Arrays
    have logical, unpadded shapes, and a checksum each, which a restore compares.

    The processes of a run open it, and call each of its methods, together: what one of them cannot do, none has done.

    Raises:
      CheckpointError: the folder cannot be made or read, or the processes do not see the same in it.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, keep_best: bool = False):
        self.folder = folder
        self._losses: dict[int, float] = {}
        self._meetings = SaveMeetings()
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy(keep, keep_every, self._losses if keep_best else None),
            cleanup_tmp_directories=True,
            create=False,
            save_root_metadata=False,  # it takes a meeting of all processes, and there is none to save
            multiprocessing_options=self._meetings.processes,
            async_options=self._meetings.options,
        )
        self._manager = agreed(lambda: self._open(options))
        if several():
            require_shared(folder, self._listed)
        if keep_best:  # they decide what is deleted, so process 0 speaks for all
            self._losses.update(share(self._stored_losses() if jax.process_index() == 0 else [])[0])

    def _open(self, options: ocp.CheckpointManagerOptions) -> ocp.CheckpointManager:
        def opened() -> ocp.CheckpointManager:
            if jax.process_index() == 0:
                self.folder.mkdir(parents=True, exist_ok=True)
            return ocp.CheckpointManager(self.folder.resolve(), options=options, item_names=("state", "info"))

        try:
            return patiently(self.folder, opened)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {error.strerror}") from None

    def _listed(self) -> list[Any]:
        """Returns whether the folder is there, and the steps of the finished checkpoints in it now."""
        patiently(self.folder, self._manager.reload)
        return [self.folder.is_dir(), self.steps()]

    def _stored_losses(self) -> list[tuple[int, float]]:
        """Returns step and validation loss of the checkpoints that have one and can be read."""
        found = []
        for step in self.steps():
            with contextlib.suppress(CheckpointError):
                found.append((step, stored_info(self.folder / str(step)).get(EVAL_LOSS)))
        return [(step, loss) for step, loss in found if loss is not None]

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: nnx.State, mesh: Mesh, info: Mapping[str, Any], *, eval_loss: float | None = None
    ) -> None:
        """Starts to save; waits first for the save before it.

        Args:
          step: number of updates made so far.
          state: every variable of the run.
          mesh: the mesh that holds it.
          info: JSON values to store beside the arrays.
          eval_loss: validation loss at this step, if it was evaluated.

        Raises:
          CheckpointError: this save, or the one before it, could not be written: a full disk, a folder that is gone, a
            step that is not after the newest.
        """
        arrays = to_logical(state, mesh)
        specs = {name: str(spec_of(variable)) for name, variable in named_variables(state).items()}
        described = seal({**info, EVAL_LOSS: eval_loss, "specs": specs, **describe_arrays(arrays)})
        agreed(self._require_writable)

        self._agree_written(self._manager.wait_until_finished)
        self._meetings.begin(step)
        if eval_loss is not None:
            self._losses[step] = eval_loss
        try:
            saved = self._manager.save(
                step,
                args=ocp.args.Composite(state=ocp.args.StandardSave(arrays), info=ocp.args.JsonSave(described)),
            )
        except Exception as error:  # of this process alone, perhaps, while the others wait for it: nothing to agree on
            raise self._unwritable(error) from error
        if not saved:
            raise self._unwritable(ValueError(f"step {step} is not after the newest"))

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        self._agree_written(self._manager.wait_until_finished)

    def _require_writable(self) -> None:
        """Checks that this process can write in the folder: one that fails later is waited for by the others."""
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.write(bytes(4096))
        except OSError as error:
            raise self._unwritable(error) from None

    def _agree_written(self, write: Callable[[], None]) -> None:
        """Writes; if one process could not, all of them raise its error, rather than that they waited for it."""

        def attempt() -> None:
            try:
                write()
            except Exception as error:
                raise self._unwritable(error) from error

        agree(attempt, (CheckpointError, WaitedError))

    def info(self, step: int) -> dict[str, Any]:
        """Returns what `save` stored beside the arrays.

        Raises:
          CheckpointError: it is damaged (`DamagedError`), or cannot be read.
        """
        place = self.folder / str(step)
        return agreed_info(place, lambda: place)[1]

    def restore(self, step: int, state: nnx.State, mesh: Mesh, info: Mapping[str, Any] | None = None) -> nnx.State:
        """Reads a checkpoint into the shapes and shardings that `state` declares on `mesh`.

        Args:
          step: step of the checkpoint.
          state: an abstract (or real) state of the same model; its dtypes may be others than those stored.
          mesh: any mesh, whichever one wrote the checkpoint.
          info: what `info` returns for this checkpoint, if it has been read.

        Raises:
          DamagedError: the checkpoint is damaged.
          CheckpointError: it holds other arrays than the state, or cannot be read.
        """
        info = self.info(step) if info is None else info
        target = abstract_logical(state, mesh)
        if extra := sorted(info["checksums"].keys() - target.keys()):
            raise CheckpointError(
                f"{self.folder / str(step)} does not hold this model's state: it also holds {', '.join(extra[:3])}"
            )
        return from_logical(read_verified(self.folder / str(step), target, info), state, mesh)

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way, to `damaged/` beside the folder; returns where it is.

        Raises:
          CheckpointError: it cannot be moved.
        """
        source = self.folder / str(step)
        target = Path(share(str(agreed(lambda: self._move_aside(source))))[0])
        self._manager.reload()
        if several():
            require_shared(self.folder, self._listed)
        return target

    def _move_aside(self, source: Path) -> Path:
        target = self.folder.parent / _DAMAGED / source.name
        if jax.process_index() != 0:
            return target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            while target.exists():
                target = target.with_name(target.name + "_")
            source.rename(target)
        except OSError as error:
            raise CheckpointError(f"{source} is damaged, and cannot be moved to {target} ({error.strerror})") from None
        return target

    def close(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Closes; an error that is under way is not replaced by that of the last save.

        It may be an error of this process alone, so with several it waits for a moment only: the others end too, and
        the save under way is not finished.
        """
        if error is None:
            self.close()
            return

        def close() -> None:
            for action in (self._manager.wait_until_finished, self._manager.close):
                with contextlib.suppress(Exception):
                    action()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(_MOMENT if several() else None)

    def _unwritable(self, error: Exception) -> CheckpointError:
        last = self.steps()
        left = f"the checkpoint at step {last[-1]} is whole" if last else "there is no checkpoint yet"
        kind = WaitedError if in_vain(error) else CheckpointError
        return kind(f"{self.folder}: a checkpoint could not be written ({reason(error)}); {left}")


def restore_newest(
    checkpoints: Checkpoints,
    state: nnx.State,
    mesh: Mesh,
    accept: Callable[[dict[str, Any]], None],
    warn: Callable[[str], None],
) -> tuple[int, nnx.State, dict[str, Any]] | None:
    """Returns step, state and info of the newest checkpoint that is whole; None if there is none at all.

    Args:
      checkpoints: the checkpoints of the run.
      state: an abstract state, as `Checkpoints.restore` wants it.
      mesh: the mesh of the result.
      accept: raises if the info is that of another run, which is no damage.
      warn: takes a message for each damaged checkpoint, which is set aside.

    Raises:
      CheckpointError: there are checkpoints, and every one is damaged, or the newest that is not cannot be read, or is
        of another model; all are left as they are.
    """
    damaged: list[tuple[int, DamagedError]] = []
    for step in reversed(checkpoints.steps()):
        try:
            info = checkpoints.info(step)
            accept(info)
            found = step, checkpoints.restore(step, state, mesh, info), info
        except DamagedError as error:
            damaged.append((step, error))
            continue
        for bad, why in damaged:
            warn(f"{why}; moved to {checkpoints.set_aside(bad)}, going on from step {step}")
        return found
    if damaged:
        reasons = "; ".join(str(why) for _, why in damaged)
        raise CheckpointError(f"{reasons}; name another --run.dir to start afresh")
    return None


def load_weights(run: Path, weights: nnx.State, mesh: Mesh) -> tuple[nnx.State, Path]:
    """Reads the model's parameters in the newest checkpoint of a run, and nothing else of it.

    Args:
      run: its folder, or the folder of its checkpoints, or that of one of them.
      weights: the abstract parameters, which may have another dtype than those stored.
      mesh: the mesh of the result.

    Returns:
      The parameters, and the checkpoint that they are from.

    Raises:
      CheckpointError: there is none, or it is damaged, cannot be read, or its parameters have other names or shapes.
    """
    folder, info = agreed_info(run, lambda: newest(run))
    target = {f"model.{name}": array for name, array in abstract_logical(weights, mesh).items()}
    restored = read_verified(folder, target, info)
    return from_logical({name.removeprefix("model."): a for name, a in restored.items()}, weights, mesh), folder
