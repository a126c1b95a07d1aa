"""The trainer: a run as an object in Python, over the cells of a notebook or in a `with` block."""

# Signatures then show names instead of what they stand for.
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from jax.sharding import Mesh

from jaxtp.config.entry import NumericsError, UserError
from jaxtp.config.python_object import describe_value, reference_to, user_code
from jaxtp.config.schema import ConfigError
from jaxtp.guards.hook import Hook, Loop
from jaxtp.mesh import MeshLike
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import Decided
from jaxtp.train.metrics import logged_numbers
from jaxtp.train.session import Session
from jaxtp.train.task import Callback, Loss, ModelPart, OptimizerPart, Task

_ERRORS_OF_RUNS = UserError, NumericsError, OSError, jax.errors.JaxRuntimeError
"""Errors that the methods of a trainer raise, also inside a callback; any other error is the
callback's own."""


class Step:
    """A step of a run, which the devices may still be computing."""

    def __init__(self, index: int, trainer: Trainer):
        self.index = index
        """Number of steps so far, from 1, with those that were skipped."""
        self._trainer = trainer

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step; waits until it is finished.

        They are `loss`, `grad_norm`, the metrics that a user's loss returns, and `eval_loss` after
        an evaluation.
        """
        return self._trainer.metrics_of(self.index)


class Trainer:
    """Trains a model in a folder, and resumes it from there.

    `with Trainer(...) as trainer: for step in trainer: ...` runs all steps. The body of the loop
    may read `step.metrics`, and call `log`, `evaluate`, `save` or `stop`. All processes of a run
    must make the same calls.

    Without `with`, as in the cells of a notebook, a trainer starts at its first use, and `close`
    ends it. Then the mesh of the run is the current one, and signals are recorded, only within its
    methods. After `close`, an interrupt or an error, what has been computed can still be read, and
    iteration, `log`, `stop` and `save` start the run again, from its last checkpoint.

    Args:
      model: a function that returns a Flax NNX model, or a model's class; a parameter `rngs` gets
        `nnx.Rngs(run.seed)`. Or the settings of jaxtp's decoder (`ModelConfig`).
      loss: `(model, batch, key) -> (sum, weight)`, or with a dict of metrics as third result. By
        default the cross-entropy of the decoder's next token.
      batches: a function of the step that returns a dict of all rows in NumPy, a dataset with
        `__len__` and `__getitem__`, an iterable of such dicts, a list of iterables, or a function
        that returns one of these (`data/sources.py`).
      optimizer: an Optax transformation, or a function that returns one; a parameter `steps` gets
        the number of updates in the whole run. It sees the parameters as a dict by dotted path.
      plan: styles by pattern of module paths, as for `parallelize`. By default the model's specs,
        or the plan of `propose_plan` if it has none.
      validation: batches to evaluate on, as `batches`.
      callbacks: functions `(trainer, step)`, called after each step.
      mesh: devices along each axis: `"fsdp=2,tp=4"`, `{"fsdp": 2, "tp": 4}`, or a mesh of these
        sizes. By default the run decides.
      folder: the run's folder (`run.dir`).
      steps: number of updates in the whole run (`train.steps`).
      settings: other settings by dotted name, as on the command line: `{"checkpoint.every": 100}`;
        or a `TrainConfig`. A part that is None comes from them.

    Raises:
      ConfigError: an argument has no effect. The start raises all other errors (`make_run`).
    """

    def __init__(
        self,
        *old: object,
        model: ModelPart | None = None,
        loss: Loss | None = None,
        batches: object = None,
        optimizer: OptimizerPart | None = None,
        plan: Mapping[str, Any] | None = None,
        validation: object = None,
        callbacks: Sequence[Callback] = (),
        mesh: MeshLike = None,
        folder: str | Path | None = None,
        steps: int | None = None,
        settings: Mapping[str, object] | TrainConfig | None = None,
    ):
        if old:
            raise ConfigError(
                "Trainer takes its parts by name, without a Task: jaxtp.Trainer(model=..., "
                "loss=..., batches=..., optimizer=..., folder=..., settings=...)"
            )
        arguments = {"mesh": mesh, "run.dir": folder, "train.steps": steps}
        values = {name: value for name, value in arguments.items() if value is not None}
        if not isinstance(settings, TrainConfig | Mapping | None):
            raise ConfigError(
                'settings are a dict by dotted name, such as {"checkpoint.every": 100}, or a '
                f"TrainConfig, not {describe_value(settings)}"
            )
        if not isinstance(settings, TrainConfig):
            settings = {**(settings or {}), **values}
        elif values:
            raise ConfigError(
                f"settings are a whole TrainConfig, which also has {', '.join(values)}; leave "
                "these arguments out"
            )
        task = Task(model, loss, batches, optimizer, plan, validation, callbacks)
        self._settings = settings
        self._session = Session(settings, task, partial(_Callbacks, self))

    @classmethod
    def of(cls, decided: Decided) -> Trainer:
        """Returns a trainer for decided settings."""
        trainer = cls(settings=decided.config)
        trainer._session.decided = decided
        return trainer

    def __repr__(self) -> str:
        loop = self._session.loop
        settings = self._settings if loop is None else loop.run.config
        folder = settings.run.dir if isinstance(settings, TrainConfig) else settings.get("run.dir")
        parts = [] if folder is None else [f"folder={str(folder)!r}"]
        if loop is None:
            parts.append("not started")
        else:
            parts.append(f"{'at' if loop.is_open else 'closed at'} step {loop.step}")
            if "loss" in loop.last_metrics:
                parts.append(f"loss {loop.last_metrics['loss']:.4f} at step {loop.last_step}")
        return f"<Trainer {', '.join(parts)}>"

    def __enter__(self) -> Self:
        self._session.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._session.exit(error)

    def close(self) -> None:
        """Saves the last step, and ends the run: its folder may be used by another trainer."""
        self._session.close()

    def __iter__(self) -> Iterator[Step]:
        """Yields the steps that are left."""
        for index in self._session.steps():
            yield Step(index, self)

    def run_to_end(self) -> bool:
        """Trains until `train.steps`, a signal or `stop`; returns whether all steps are done.

        Raises:
          NonFiniteError: a loss or gradient (unless `train.non_finite` allows it), update or state
            is not finite.
          CorruptionError: a verification failed.
          UnequalCopiesError: replicas differ at a save.
          ValueError: `UnwritableError`, `RunFilesError`, `TokenError` or `BatchError`.
        """
        for _ in self:
            pass
        return self.done

    @property
    def config(self) -> TrainConfig:
        """All settings of the run."""
        return self._session.started().run.config

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run."""
        return self._session.started().mesh

    @property
    def step(self) -> int:
        """Number of steps so far, with those that were skipped."""
        return self._session.started().step

    @property
    def done(self) -> bool:
        """Whether all steps are done."""
        return self._session.started().done

    @property
    def model(self) -> Any:
        """The model with the current parameters, until the next step replaces them."""
        with self._session.reading() as loop:
            return loop.run.blueprint.merge(loop.state).model

    def metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the last step; waits until it is finished."""
        with self._session.reading() as loop:
            loop.finish_step()
        if step != loop.last_step:
            raise ConfigError(
                f"the metrics of step {step} are gone, because step {loop.last_step} followed; "
                "read them before the next step"
            )
        return loop.last_metrics

    def evaluate(self) -> dict[str, float]:
        """Returns `eval_loss` and further metrics of the parameters on the validation batches."""
        with self._session.reading() as loop:
            loop.finish_step()
            return loop.evaluation.evaluate()

    def log(self, values: Mapping[str, float]) -> None:
        """Writes values of the current step to `metrics.jsonl` and the trackers, from process 0.

        Raises:
          ConfigError: the run logs a metric of that name itself, or a value is not a number.
        """
        loop = self._session.running()
        numbers = logged_numbers(values, "trainer.log has")
        loop.trackers.write({"step": loop.step, **numbers})
        loop.run.report.logged |= numbers

    def line(self, text: str) -> None:
        """Prints a line, from process 0, above the progress bar."""
        self._session.started().line(text)

    @contextmanager
    def paused(self, cause: str) -> Iterator[Callable[[], None]]:
        """Waits for the last step, then counts the time of the block as lost to `cause`.

        A block that may take as long as `train.stall_seconds` calls the yielded function now and
        then: it has not stalled.
        """
        with self._session.reading() as loop:
            loop.finish_step()
            with loop.phase(f"{cause} at step {loop.step}", cause):
                yield loop.watchdog.on_activity

    @property
    def info(self) -> dict[str, Any]:
        """The info that a checkpoint of the current step stores, as JSON values."""
        with self._session.reading() as loop:
            return loop.checkpoint_info()

    def stop(self, reason: str) -> None:
        """Saves and ends the run after this step.

        With several processes, a call in one of them suffices, and the run ends after the next
        step.
        """
        self._session.running().stop(reason)

    def save(self) -> Path:
        """Saves a checkpoint of the current step, unless there is one; returns its folder."""
        loop = self._session.started()
        if not loop.is_saved:
            loop = self._session.running()
        with self._session.inside(loop):
            return loop.save()


class _Callbacks(Hook):
    """Calls a user's callbacks after each step, which may do all that a trainer does."""

    def __init__(self, trainer: Trainer, callbacks: Sequence[Callback]):
        self._trainer = trainer
        self._callbacks = callbacks

    def after_dispatch(self, loop: Loop) -> None:
        """Calls them in their order."""
        step = Step(loop.step, self._trainer)
        for callback in self._callbacks:
            with user_code(f"callback {reference_to(callback)}", *_ERRORS_OF_RUNS):
                callback(self._trainer, step)
