"""Hooks: what takes part in the steps of a run.

One step is in flight while the host reads the numbers of the step before, so that devices never
wait for the host. A step has this order:

    the next batch is read
    before_step       may compute on the devices, and replace the state
    the step is dispatched to the devices
    after_step        the numbers of the step before are here
    after_dispatch    may wait for the step in flight (`Loop.finish_step`), evaluate and save
    the body of the user's loop
    between_steps     may save; not after the last step

All processes have the same hooks, in the same order, and call each method at the same step. So a
method may use collectives. If a method raises an error, the run ends, and `close` is called.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from flax import nnx
from jax import Array

from jaxtp.data.loader import Batch


@dataclass(frozen=True)
class NextStep:
    """A step that is not dispatched yet."""

    index: int
    batch: Batch
    compute: Callable[[nnx.State], tuple[nnx.State, Array]]
    """Computes the step from a state, which it donates: the next state, and the gradients'
    `device_checksums`. Only a run with verification has these checksums."""


@dataclass(frozen=True)
class FinishedStep:
    """A step whose numbers are on the host. The next step may be in flight."""

    index: int
    batch: Batch
    metrics: dict[str, float]
    """The numbers that are logged."""
    weight: float
    """The weight that divides the loss."""
    skipped: int
    """Number of steps in a row, up to this one, that were skipped because they were not finite."""
    flag: int
    """The maximum of the flags of all devices (`guards/stopping.py`)."""
    checksums: Array | None
    """The gradients' `device_checksums`, on a run with verification."""


class Loop(Protocol):
    """The part of the training loop that hooks use."""

    @property
    def step(self) -> int:
        """Number of dispatched steps of the whole run, with those that were skipped."""

    state: nnx.State
    """The state after the last dispatched step."""

    def finish_step(self) -> None:
        """Waits for the step in flight, if any, and calls `after_step`."""

    def phase(self, activity: str, cause: str) -> AbstractContextManager[None]:
        """Announces an activity; the time of the block is lost to `cause`."""

    def lost_to(self, cause: str) -> AbstractContextManager[None]:
        """Counts the time of the block as lost to `cause`."""

    def line(self, text: str) -> None:
        """Prints a line on process 0."""

    def complete_record(self, record: dict[str, float]) -> None:
        """Has all hooks add numbers to the record of a logged step (`at_log`)."""

    def save(self) -> Path:
        """Saves the last step, unless it is saved; returns the checkpoint's folder."""

    def checkpoint_info(self) -> dict[str, object]:
        """Returns the info that a checkpoint of the last step stores."""


VERIFIED = "verified"
"""Key in a checkpoint's info: the last verified step."""


class Hook:
    """Takes part in the steps of a run. Each method does nothing by default."""

    def on_activity(self) -> None:
        """Something begins that may take long: a step, a compilation, an evaluation or a save."""

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """The batch of a step is on the devices."""

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """The numbers of a step are on the host."""

    def after_dispatch(self, loop: Loop) -> None:
        """The devices compute a step."""

    def between_steps(self, loop: Loop) -> None:
        """Another step follows."""

    def at_log(self, loop: Loop, record: dict[str, float]) -> None:
        """A step is logged; the hook may add numbers to its record."""

    def at_save(self, info: dict[str, Any]) -> None:
        """A checkpoint is saved; the hook may add JSON values to its info."""

    def close(self) -> None:
        """The run ends, also after an error."""
