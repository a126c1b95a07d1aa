"""Saving and restoring a run: asynchronous, sharded, atomic, on any mesh."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.logical import abstract_logical, from_logical, to_logical


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or used for this run."""


class Checkpoints:
    """The checkpoints of one run, in one folder, one subfolder for each step.

    Args:
      folder: created if it is missing.
      keep: how many of the newest to keep.

    A save returns when the arrays have been copied to host memory, and is written by a background thread into a
    temporary folder that is renamed when complete: a run killed inside a save leaves the checkpoint before it.
    """

    def __init__(self, folder: Path, *, keep: int = 2):
        self.folder = folder
        try:
            self._manager = ocp.CheckpointManager(
                folder.resolve(),
                options=ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True),
                item_names=("state", "info"),
            )
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None

    def latest_step(self) -> int | None:
        """The step of the newest finished checkpoint; None if there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: nnx.State, mesh: Mesh, info: Mapping[str, Any]) -> None:
        """Starts to save; waits first for the save before it.

        Args:
          step: updates made so far.
          state: every variable of the run.
          mesh: the mesh that holds it.
          info: JSON values to store beside the arrays.
        """
        self._manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(to_logical(state, mesh)),
                info=ocp.args.JsonSave(dict(info)),
            ),
        )

    def info(self, step: int) -> dict[str, Any]:
        """What `save` stored beside the arrays.

        Raises:
          CheckpointError: the checkpoint is incomplete or damaged.
        """
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(info=ocp.args.JsonRestore()))
        except (ValueError, KeyError, OSError) as error:
            raise self._unreadable(step, error) from None
        return dict(restored["info"])

    def restore(self, step: int, state: nnx.State, mesh: Mesh) -> nnx.State:
        """Reads a checkpoint into the shapes and shardings that `state` declares on `mesh`.

        Args:
          step: which checkpoint.
          state: an abstract (or real) state of the same model.
          mesh: any mesh, whichever one wrote the checkpoint.

        Raises:
          CheckpointError: the checkpoint is damaged, or holds other arrays than the state.
        """
        target = abstract_logical(state, mesh)
        try:
            restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
        except (ValueError, KeyError, OSError) as error:
            raise self._unreadable(step, error) from None
        return from_logical(restored["state"], state, mesh)

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        older = [str(other) for other in self._manager.all_steps() if other < step]
        remedy = f"remove it to go on from step {older[-1]}" if older else "name another --run.dir to start afresh"
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        return CheckpointError(
            f"{self.folder / str(step)} is damaged or does not hold this model's state; {remedy} ({reason})"
        )

    def close(self) -> None:
        """Waits until the last save is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
