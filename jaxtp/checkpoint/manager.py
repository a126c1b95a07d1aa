"""Saving and restoring a run: asynchronous, sharded, atomic, checked, on any mesh."""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import Mesh
from orbax.checkpoint import checkpoint_managers as policies

from jaxtp.checkpoint.checksum import checksums
from jaxtp.checkpoint.logical import Arrays, abstract_logical, from_logical, named_variables, spec, to_logical

EVAL_LOSS = "eval_loss"
_DAMAGED = "damaged"


class CheckpointError(ValueError):
    """A checkpoint that cannot be written, read, or used for this run."""


class Checkpoints:
    """The checkpoints of one run, in one folder, one subfolder for each step.

    Args:
      folder: created if it is missing.
      keep: how many of the newest to keep.
      keep_every: also keeps those whose step is a multiple of it; 0 for none.
      keep_best: also keeps the one with the lowest validation loss.

    A save returns when the arrays have been copied to host memory, and is written by a background thread into a
    temporary folder that is renamed when complete: a run killed inside a save leaves the checkpoint before it. Arrays
    have logical, unpadded shapes, and a checksum each, which a restore compares.
    """

    def __init__(self, folder: Path, *, keep: int = 2, keep_every: int = 0, keep_best: bool = False):
        self.folder = folder
        try:
            self._manager = ocp.CheckpointManager(
                folder.resolve(),
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_policy(keep, keep_every, keep_best), cleanup_tmp_directories=True
                ),
                item_names=("state", "info"),
            )
        except OSError as error:
            raise CheckpointError(f"{folder}: {error.strerror}") from None

    def steps(self) -> list[int]:
        """The steps of the finished checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, state: nnx.State, mesh: Mesh, info: Mapping[str, Any], *, eval_loss: float | None = None
    ) -> None:
        """Starts to save; waits first for the save before it.

        Args:
          step: updates made so far.
          state: every variable of the run.
          mesh: the mesh that holds it.
          info: JSON values to store beside the arrays.
          eval_loss: validation loss at this step, if it was evaluated.

        Raises:
          CheckpointError: this save, or the one before it, could not be written: a full disk, a folder that is gone.
        """
        arrays = to_logical(state, mesh)
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(arrays),
                    info=ocp.args.JsonSave(_sealed({**info, "specs": _specs(state), "checksums": checksums(arrays)})),
                ),
                metrics=None if eval_loss is None else {EVAL_LOSS: eval_loss},
            )
        except Exception as error:
            raise self._unwritable(error) from error

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._unwritable(error) from error

    def info(self, step: int) -> dict[str, Any]:
        """What `save` stored beside the arrays.

        Raises:
          CheckpointError: it is damaged.
        """
        try:
            return stored_info(self.folder / str(step))
        except Exception as error:
            raise self._unreadable(step, error) from None

    def restore(self, step: int, state: nnx.State, mesh: Mesh, info: Mapping[str, Any] | None = None) -> nnx.State:
        """Reads a checkpoint into the shapes and shardings that `state` declares on `mesh`.

        Args:
          step: which checkpoint.
          state: an abstract (or real) state of the same model; its dtypes may be others than those stored.
          mesh: any mesh, whichever one wrote the checkpoint.
          info: of this checkpoint, if it has been read.

        Raises:
          CheckpointError: the checkpoint is damaged, or holds other arrays than the state.
        """
        expected = (self.info(step) if info is None else info)["checksums"]
        target = abstract_logical(state, mesh)
        try:
            if extra := expected.keys() - target.keys():
                raise CheckpointError(f"it also holds {', '.join(sorted(extra)[:3])}")
            restored = _read_verified(self.folder / str(step), target, expected)
        except Exception as error:
            raise self._unreadable(step, error) from None
        return from_logical(restored, state, mesh)

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint out of the way, to `damaged/` beside the folder; returns where it is."""
        target = self.folder.parent / _DAMAGED / str(step)
        if jax.process_index() == 0:
            target.parent.mkdir(parents=True, exist_ok=True)
            while target.exists():
                target = target.with_name(target.name + "_")
            (self.folder / str(step)).rename(target)
        self._manager.reload()
        return target

    def close(self) -> None:
        """Waits until the last save is on disk."""
        self.wait()
        self._manager.close()

    def _unreadable(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.folder / str(step)} is damaged, or does not hold this model's state ({reason(error)})"
        )

    def _unwritable(self, error: Exception) -> CheckpointError:
        last = self.steps()
        left = f"the checkpoint at step {last[-1]} is whole" if last else "there is no checkpoint yet"
        return CheckpointError(f"{self.folder}: a checkpoint could not be written ({reason(error)}); {left}")


def restore_newest(
    checkpoints: Checkpoints,
    state: nnx.State,
    mesh: Mesh,
    accept: Callable[[dict[str, Any]], None],
    warn: Callable[[str], None],
) -> tuple[int, nnx.State, dict[str, Any]] | None:
    """The newest checkpoint that is whole: its step, state and info; None if there is none at all.

    Args:
      checkpoints: where to look.
      state: abstract, as `Checkpoints.restore` wants it.
      mesh: where to put it.
      accept: raises if the info is that of another run, which is no damage.
      warn: told of each damaged checkpoint; it is set aside.

    Raises:
      CheckpointError: there are checkpoints, and every one is damaged; they are left as they are.
    """
    damaged: list[tuple[int, CheckpointError]] = []
    for step in reversed(checkpoints.steps()):
        try:
            info = checkpoints.info(step)
            accept(info)
            found = step, checkpoints.restore(step, state, mesh, info), info
        except CheckpointError as error:
            damaged.append((step, error))
            continue
        for bad, reason in damaged:
            warn(f"{reason}; moved to {checkpoints.set_aside(bad)}, going on from step {step}")
        return found
    if damaged:
        reasons = "; ".join(str(reason) for _, reason in damaged)
        raise CheckpointError(f"{reasons}; name another --run.dir to start afresh")
    return None


def load_weights(run: Path, weights: nnx.State, mesh: Mesh) -> tuple[nnx.State, Path]:
    """The model's parameters of the newest checkpoint of a run, and nothing else of it.

    Args:
      run: its folder, or the folder of its checkpoints, or that of one of them.
      weights: the abstract parameters, which may have another dtype than those stored.
      mesh: where to put them.

    Returns:
      The parameters, and the checkpoint that they are from.

    Raises:
      CheckpointError: there is none, or it is damaged, or its parameters have other names or shapes.
    """
    folder = newest(run)
    target = {f"model.{name}": array for name, array in abstract_logical(weights, mesh).items()}
    try:
        restored = _read_verified(folder, target, stored_info(folder)["checksums"])
    except Exception as error:
        raise CheckpointError(f"{folder} is damaged, or of another model ({reason(error)})") from None
    return from_logical({name.removeprefix("model."): a for name, a in restored.items()}, weights, mesh), folder


def _read_verified(folder: Path, target: dict[str, jax.ShapeDtypeStruct], expected: Mapping[str, str]) -> Arrays:
    """Some of the arrays of a checkpoint: read in the dtypes that they are stored in, checked, and cast.

    Raises:
      CheckpointError: there are none of that name or shape, or they are not what was written.
    """
    stored = stored_arrays(folder)
    shapes = {name: tuple(array.shape) for name, array in stored.items()}
    wrong = [f"{n} is {shapes.get(n)}, not {a.shape}" for n, a in target.items() if shapes.get(n) != a.shape]
    if wrong:
        raise CheckpointError(f"another model: {'; '.join(wrong[:3])}")
    as_stored = {n: jax.ShapeDtypeStruct(a.shape, stored[n].dtype, sharding=a.sharding) for n, a in target.items()}
    arrays = read_arrays(folder, as_stored)
    _compare(checksums(arrays), expected)
    return {name: arrays.pop(name).astype(array.dtype) for name, array in target.items()}


def stored_info(folder: Path) -> dict[str, Any]:
    """What was stored beside the arrays in the folder of a checkpoint.

    Raises:
      CheckpointError: it was changed since.
    """
    return _open_sealed(ocp.JsonCheckpointHandler().restore((folder / "info").resolve()))


def stored_arrays(folder: Path) -> dict[str, Any]:
    """Shapes and dtypes of the arrays in the folder of a checkpoint, by name."""
    found: dict[str, Any] = ocp.PyTreeCheckpointer().metadata((folder / "state").resolve()).item_metadata.tree
    return found


def read_arrays(folder: Path, target: dict[str, jax.ShapeDtypeStruct]) -> Arrays:
    """Some of the arrays in the folder of a checkpoint, in the shardings and dtypes that `target` gives them."""
    arguments = ocp.checkpoint_utils.construct_restore_args(target)
    arrays: Arrays = ocp.PyTreeCheckpointer().restore(
        (folder / "state").resolve(),
        ocp.args.PyTreeRestore(item=target, restore_args=arguments, partial_restore=True),
    )
    return arrays


def newest(run: Path) -> Path:
    """The folder of the newest checkpoint of a run, or the folder itself if it is one.

    Raises:
      CheckpointError: there is none.
    """
    if (run / "state").is_dir():
        return run
    for folder in (run / "checkpoints", run):
        steps = [int(path.parent.name) for path in folder.glob("*/state") if path.parent.name.isdecimal()]
        if steps:
            return folder / str(max(steps))
    raise CheckpointError(f"{run}: no finished checkpoint there; name the folder of a run")


def _specs(state: nnx.State) -> dict[str, str]:
    """How each array is split on the mesh that writes it."""
    return {name: str(spec(variable)) for name, variable in named_variables(state).items()}


def _policy(keep: int, keep_every: int, keep_best: bool) -> policies.PreservationPolicy:
    kept: list[Any] = [policies.LatestN(keep)]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    if keep_best:
        lowest = policies.BestN(
            get_metric_fn=lambda metrics: -metrics[EVAL_LOSS], n=1, keep_checkpoints_without_metrics=False
        )
        kept.append(lowest)
    return policies.AnyPreservationPolicy(kept)


def _sealed(info: Mapping[str, Any]) -> dict[str, Any]:
    return {**info, "sha256": _digest(info)}


def _open_sealed(sealed: Mapping[str, Any]) -> dict[str, Any]:
    """What was stored beside the arrays, if it is as it was stored.

    Raises:
      CheckpointError: it is not.
    """
    info = dict(sealed)
    if info.pop("sha256", None) != _digest(info):
        raise CheckpointError("its description was changed")
    return info


def _digest(info: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()


def _compare(found: Mapping[str, str], expected: Mapping[str, str]) -> None:
    wrong = [name for name in found if found[name] != expected.get(name)]
    if wrong:
        raise CheckpointError(f"checksums differ: {', '.join(wrong[:3])}" + (", ..." if len(wrong) > 3 else ""))


def reason(error: Exception) -> str:
    """What an error of Orbax or TensorStore says, in one line."""
    text = str(error).split("See full TensorStore details")[0].strip()
    return text.splitlines()[0][:400] if text else type(error).__name__
