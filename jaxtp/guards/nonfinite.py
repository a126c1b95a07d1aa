"""Steps whose numbers are not finite or spikes, or that have no weight: the run ends, or leaves
them out."""

import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from numpy.typing import NDArray

from jaxtp.checkpoint.checksum import NonFiniteError, Sums, describe_not_finite
from jaxtp.checkpoint.logical import finite_arrays, named_arrays
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config.entry import UserError
from jaxtp.data.columns import BatchError
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.guards.hook import FinishedStep, Hook, Loop


class NonFinitePolicy(Hook):
    """Ends a run whose numbers are not finite, after as many skipped steps as are allowed.

    The step itself keeps the state, if its loss or gradient is not finite or it has no weight.

    Args:
      folder: gets the state and the batch of the step that ends the run.
      may_skip: whether steps that are not finite are skipped (`train.non_finite`).
      max_skipped: maximum number of skipped steps in a row.
      checkpoints: the checkpoints of the run, for messages.
      stored: returns the part of a state that is saved.
    """

    def __init__(
        self,
        folder: Path,
        *,
        may_skip: bool,
        max_skipped: int,
        checkpoints: Checkpoints,
        mesh: Mesh,
        stored: Callable[[nnx.State], nnx.State],
    ):
        self._folder = folder
        self._may_skip = may_skip
        self._max_skipped = max_skipped
        self._checkpoints = checkpoints
        self._mesh = mesh
        self._stored = stored
        # Number of steps in a row whose loss had the weight 0
        self._without_weight = 0

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """Reports a skipped step. Raises `NonFiniteError` if the run has to end."""
        if step.weight == 0:
            self._without_weight += 1
            loop.line(
                f"step {step.index}: the weight of the loss is 0 (by default it is the number of "
                "labels), so there is no loss; the update is skipped"
            )
            return
        self._without_weight = 0
        if step.skipped:
            self._skip(loop, step)
        elif not math.isfinite(step.metrics["param_norm"]):
            raise self._update_error(loop, step)

    def between_steps(self, loop: Loop) -> None:
        """Saves and raises `BatchError` after too many steps in a row without weight."""
        if self._without_weight > self._max_skipped:
            loop.save()
            raise BatchError(
                f"step {loop.step}: the last {self._without_weight} steps had no weight, more "
                f"than train.max_skipped={self._max_skipped}; the run is saved. Look at the labels "
                "of the data and the weight that the loss returns"
            )

    def _skip(self, loop: Loop, step: FinishedStep) -> None:
        loss = step.metrics["loss"]
        norm = step.metrics["grad_norm"]
        text = f"step {step.index}: loss {loss:g}, gradient norm {norm:g}"
        # A state that is not finite makes every step fail. The next step has been dispatched, so
        # this is its result.
        if step.skipped == 1:
            self._checkpoints.require_sound(Sums(finite_arrays(loop.state)), self._mesh, text)
        allowed = self._max_skipped if self._may_skip else 0
        if step.skipped > allowed:
            problem = "a spike" if math.isfinite(loss + norm) else "not finite"
            raise self._gradient_error(loop, step, f"{text}: {problem}")
        loop.line(f"{text}; the update is skipped, {step.skipped} in a row of at most {allowed}")

    def _gradient_error(self, loop: Loop, step: FinishedStep, text: str) -> NonFiniteError:
        # Saves the unchanged state and the batch, in place of the files of an earlier failure.
        remedy = "leave such steps out with --train.non-finite skip"
        if self._may_skip:
            remedy = f"allow more than --train.max-skipped {self._max_skipped} such steps in a row"
        if math.isfinite(step.metrics["loss"] + step.metrics["grad_norm"]):
            remedy += ", or a higher limit by --train.spike-deviations"
        folder = self._folder / str(step.index)
        try:
            self._save(loop, step)
            saved = f"are in {folder}, from which a new run can start (--run.init-from)"
        except (UserError, OSError) as error:
            saved = f"could not be saved for inspection ({error})"
        return NonFiniteError(
            f"{text}. The update was not applied; the weights and the batch "
            f"{saved}. {self._resume_hint()}. Look for the cause (a learning rate too high, "
            f"a bad sample), or {remedy}"
        )

    def _update_error(self, loop: Loop, step: FinishedStep) -> NonFiniteError:
        # The weights are not saved.
        numbers = step.metrics
        rate = ""
        if "learning_rate" in numbers:
            rate = f", which was {numbers['learning_rate']:g}"
        counts = Sums(named_arrays(loop.state)).not_finite()
        where = f": {describe_not_finite(counts)}" if counts else ""
        return NonFiniteError(
            f"step {step.index}: loss {numbers['loss']:g}, gradient norm "
            f"{numbers['grad_norm']:g}, norm of the new weights {numbers['param_norm']:g}: the "
            f"update is not finite{where}. These weights are not saved. {self._resume_hint()}. "
            f"Lower the learning rate{rate}"
        )

    def _save(self, loop: Loop, step: FinishedStep) -> None:
        rows = {}
        for name, array in step.batch.items():
            for shard in array.addressable_shards:
                rows[f"{name}_{shard.index[0].start or 0}"] = np.asarray(shard.data)
        with replacing(self._folder) as new:
            checkpoints = Checkpoints(new)
            state = self._stored(loop.state)
            checkpoints.save(step.index, state, self._mesh, loop.checkpoint_info())
            checkpoints.close()
            np.savez(new / str(step.index) / f"batch_{jax.process_index()}.npz", **rows)  # type: ignore[arg-type]

    def _resume_hint(self) -> str:
        self._checkpoints.describe_newest()  # waits for a save in progress
        saved = self._checkpoints.steps()
        if not saved:
            return "The same command starts again: there is no checkpoint yet"
        return f"The same command resumes from the checkpoint at step {saved[-1]}"


SPIKES = "spikes"  # Key of the window in a checkpoint's info


class Spikes(Hook):
    """Finds limits of the loss and the gradient norm, above which a step skips its update.

    The limits of a step depend on the steps before the last one, also if the last one is finished:
    while it is in flight its numbers are unknown, and a resumed run has to have the same limits.

    Args:
      deviations: number of standard deviations from the mean to a limit.
      size: number of steps in the window.
      window: step, loss and gradient norm of the last steps with an update, from a checkpoint.
      remedy: the end of the line on a spike.
    """

    def __init__(
        self, deviations: float, size: int, window: Iterable[list[float]], remedy: str = ""
    ):
        self._deviations = deviations
        self._size = size
        self._window = list(window)
        self._remedy = remedy

    def limits(self, step: int) -> NDArray[np.float32]:
        """Returns the limits of a step, `[2]`; infinity until the window is full."""
        before = [numbers for index, *numbers in self._window if index < step - 1][-self._size :]
        if len(before) < self._size:
            return np.full(2, np.inf, np.float32)
        window = np.array(before)
        limits = window.mean(0) + self._deviations * window.std(0)
        return limits.astype(np.float32)

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """Adds a step to the window, or reports a spike."""
        loss = step.metrics["loss"]
        norm = step.metrics["grad_norm"]
        if not math.isfinite(loss + norm):
            return
        if not step.skipped:
            # The limits of the next step leave one of these out.
            self._window = [*self._window[-self._size :], [step.index, loss, norm]]
            return
        max_loss, max_norm = self.limits(step.index).tolist()
        loop.line(
            f"step {step.index}: a spike of train.spike_deviations={self._deviations:g}: loss "
            f"{loss:g} (limit {max_loss:g}), gradient norm {norm:g} (limit {max_norm:g})"
            f"{self._remedy and f'; {self._remedy} --step {step.index}'}"
        )

    def at_save(self, info: dict[str, Any]) -> None:
        """Saves the window."""
        info[SPIKES] = self._window


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that replaces `folder` if all processes succeed."""
    new = folder.with_name(f"{folder.name}.new")
    with raise_everywhere():
        if jax.process_index() == 0:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir()
    with raise_everywhere():
        yield new
    with raise_everywhere():
        if jax.process_index() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
