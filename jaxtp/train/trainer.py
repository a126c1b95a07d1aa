"""The trainer: steps, logs, evaluates and saves.

One step is in flight while the host reads the previous step's numbers, so that devices never wait
for the host.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.checksum import Sums
from jaxtp.config.entry import STANDARD_OUTPUT, NumericsError, UserError, in_thread
from jaxtp.config.python_object import (
    describe_value,
    reference_to,
    user_code,
    user_code_error,
    users_lines,
)
from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError
from jaxtp.data.batches import Position
from jaxtp.data.columns import BatchError, EndOfDataError
from jaxtp.data.loader import Batch, split
from jaxtp.distributed.agreement import (
    is_multiprocess,
    raise_everywhere,
    report_failure,
    watch,
    working_on,
)
from jaxtp.distributed.allocator import describe_out_of_memory
from jaxtp.distributed.environment import is_launched
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import run_folder
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import Decided, decide_task
from jaxtp.train.loss import Objective, Terms
from jaxtp.train.metrics import MEAN_LOSS, Trackers, logged_numbers
from jaxtp.train.setup import Run, make_run
from jaxtp.train.state import finite_arrays
from jaxtp.train.step import StepOutput, TrainStep, compiler_options, fetch
from jaxtp.train.stopping import Stopping, Watchdog
from jaxtp.train.task import Task

if TYPE_CHECKING:
    from jaxtp.train.performance import Profiler, Stragglers
    from jaxtp.train.verify import Verifier


_ERRORS_OF_RUNS = UserError, NumericsError, OSError, jax.errors.JaxRuntimeError
"""Errors that the methods of a trainer raise, also inside a callback; any other error is the
callback's own."""


Evaluation = Callable[[], dict[str, float]]
"""Runs an evaluation and returns its metrics."""


class Step:
    """A step of a run, which the devices may still be computing."""

    def __init__(self, index: int, trainer: "Trainer"):
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


class NotStartedError(ConfigError, AttributeError):
    """A trainer is used before its `with` block; `hasattr` is then false."""


_OF_A_RUN = {"config", "mesh", "done", "step", "model"}
"""Attributes that a trainer has once it has started."""


class Trainer:
    """Trains a task in a folder, and resumes it from there.

    `with Trainer(...) as trainer: for step in trainer: ...` runs all steps. The body of the loop
    may read `step.metrics`, and call `log`, `evaluate`, `save` or `stop`. All processes of a run
    must make the same calls.

    Args:
      task: the parts that replace settings.
      mesh: devices along each axis, such as `fsdp=2,tp=4`.
      folder: the run's folder (`run.dir`).
      steps: number of updates in the whole run (`train.steps`).
      settings: other settings by dotted name, as on the command line: `{"checkpoint.every": 100}`;
        or a `TrainConfig`.

    Raises:
      ConfigError: a setting is unknown, invalid, or without effect. The start of the `with` block
        raises all other errors (`setup.make_run`).
    """

    def __init__(
        self,
        task: Task = Task(),
        *,
        mesh: str | None = None,
        folder: str | Path | None = None,
        steps: int | None = None,
        settings: Mapping[str, object] | TrainConfig | None = None,
    ):
        if not isinstance(task, Task):
            raise ConfigError(_no_task(task))
        arguments = {"mesh": mesh, "run.dir": folder, "train.steps": steps}
        values = {name: value for name, value in arguments.items() if value is not None}
        if isinstance(settings, TrainConfig):
            if values:
                raise ConfigError(
                    f"settings are a whole TrainConfig, which also has {', '.join(values)}; leave "
                    "these arguments out"
                )
        else:
            settings = {**(settings or {}), **values}
        self._task = task
        self._settings = settings
        self._decided: Decided | None = None
        self._exit_stack = ExitStack()
        self._has_ended = False
        self._run: Run

    def __repr__(self) -> str:
        settings = vars(self).get("config", self._settings)
        folder = settings.run.dir if isinstance(settings, TrainConfig) else settings.get("run.dir")
        run = vars(self).get("_run")
        text = "not started"
        if run is not None:
            text = f"ended at step {run.step}" if self._has_ended else f"at step {run.step}"
        if folder is not None:
            text = f"folder={str(folder)!r}, {text}"
        return f"<Trainer {text}>"

    # Hidden from type checkers, which would otherwise accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Called for missing attributes; the `with` block sets the attributes of a run."""
            if name in _OF_A_RUN or (name.startswith("_") and not name.startswith("__")):
                message = (
                    "the trainer has not started; write: with jaxtp.Trainer(...) as trainer: ..."
                )
                raise NotStartedError(message) from None
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, decided: Decided) -> "Trainer":
        """Returns a trainer for decided settings."""
        trainer = cls(settings=decided.config)
        trainer._decided = decided
        return trainer

    def __enter__(self) -> Self:
        decided = self._decided
        if decided is None:
            if is_launched() and not is_multiprocess():
                from jaxtp.distributed.joining import join_processes

                join_processes()
            with raise_everywhere(watch):
                decided = decide_task(self._settings, self._task)
        self.config: TrainConfig = decided.config
        """All settings of the run."""
        with ExitStack() as exit_stack, self._reporting():
            run = make_run(decided, exit_stack, self._task)
            self._start(run, exit_stack)
            self._exit_stack = exit_stack.pop_all()
        return self

    def _start(self, run: Run, exit_stack: ExitStack) -> None:
        self._run = run
        self.config = config = run.config
        self.mesh: Mesh = run.blueprint.mesh
        """The mesh of the run."""
        self._platform = platform_of(self.mesh.devices.flat[0])
        self._report = run.report
        self._timing = run.timing
        self._watchdog = Watchdog(config.train.stall_seconds, config.train.stall_abort_seconds)
        exit_stack.callback(self._watchdog.stop)
        self._stopping = Stopping(run.interrupt, self.mesh)
        with raise_everywhere():
            self._trackers = Trackers(config, run.step, run.report.line)
        exit_stack.callback(self._trackers.close)
        self._profiler: Profiler | None = None
        if config.profile.start:
            from jaxtp.train import performance

            folder = config.run.dir / run_folder.PROFILE
            self._profiler = performance.Profiler(
                folder, config.profile.start, config.profile.steps, run.timing
            )
            exit_stack.callback(self._profiler.close)
        self._stragglers: Stragglers | None = None
        if is_multiprocess() or self._platform != "cpu":
            from jaxtp.train import performance

            self._stragglers = performance.Stragglers(self.mesh, run.report.line)
        self._verifier: Verifier | None = None
        if config.train.verify_every:
            from jaxtp.train import verify

            self._verifier = verify.Verifier(config, run.blueprint, run.checkpoints, run.verified)
        self._in_flight: tuple[int, Batch, StepOutput] | None = None
        # The last finished step, with its training and evaluation metrics
        self._last: tuple[int, dict[str, float]] = 0, {}
        # Number of steps in a row whose loss had the weight 0
        self._without_weight = 0
        self._saved_at = run.step if run.checkpoints.steps() else None
        self._first = run.step + 1
        self._steps = self._train()
        self._stop_reason: str | None = None
        self._has_ended = False
        self.done = False
        """Whether all steps are done."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._exit_stack:
                if error is None:
                    with self._reporting():
                        # The loop was left early.
                        if not self.done and self._run.step >= self._first:
                            self.save()
                else:
                    self._report_failure(error)
                    self._exit_stack.__exit__(kind, error, trace)
        finally:
            self._has_ended = True

    def _require_open(self) -> None:
        step = self._run.step
        if self._has_ended:
            raise ConfigError(
                f"the trainer is closed at step {step}: its with block has ended; enter the "
                "trainer again (with trainer: ...) to continue from the last checkpoint"
            )

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._report_failure(error)
            raise

    def _report_failure(self, error: BaseException) -> None:
        # Before anything is closed, because closing may wait for the other processes.
        if isinstance(error, jax.errors.JaxRuntimeError):
            note = describe_out_of_memory(error, self.config.launch.allocator)
            if note:
                error.add_note(note)
        report_failure(error)

    def __iter__(self) -> Iterator[Step]:
        self._require_open()
        return self._steps

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
    def step(self) -> int:
        """Number of steps so far, with those that were skipped."""
        return self._run.step

    @property
    def model(self) -> Any:
        """The model with the current parameters, until the next step replaces them."""
        return self._run.blueprint.merge(self._run.state).model

    def metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the last step; waits until it is finished."""
        self._finish_step()
        last, values = self._last
        if step != last:
            raise ConfigError(
                f"the metrics of step {step} are gone, because step {last} followed; read them "
                "before the next step"
            )
        return values

    def log(self, values: Mapping[str, float]) -> None:
        """Writes values of the current step to `metrics.jsonl` and the trackers, from process 0.

        Raises:
          ConfigError: the run logs a metric of that name itself, a value is not a number, or the
            `with` block has ended.
        """
        self._require_open()
        self._trackers.write({"step": self._run.step, **logged_numbers(values, "trainer.log has")})

    def line(self, text: str) -> None:
        """Prints a line, from process 0, above the progress bar."""
        self._report.line(text)

    @contextmanager
    def paused(self, cause: str) -> Iterator[None]:
        """Waits for the last step, then counts the time of the block as lost to `cause`."""
        self._finish_step()
        with self._phase(f"{cause} at step {self._run.step}", cause):
            yield

    def stop(self, reason: str) -> None:
        """Saves and ends the run after this step.

        With several processes, a call in one of them suffices, and the run ends after the next
        step.
        """
        self._require_open()
        self._run.interrupt.received = self._stop_reason = reason

    def save(self) -> Path:
        """Saves a checkpoint of the current step, unless there is one; returns its folder."""
        self._save()
        self._run.checkpoints.wait()
        return self._run.checkpoints.folder / str(self._run.step)

    def _train(self) -> Iterator[Step]:
        run = self._run
        total = self.config.train.steps
        try:
            if run.step >= total:
                self._report.line(
                    f"already at step {run.step}, and train.steps={total}: to train on, raise "
                    "train.steps (or train.epochs, if you set that)"
                )
                self._evaluate(log=False)
                self.done = True
            else:
                yield from self._train_steps(total)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT:
                raise
            raise run_folder.RunFilesError(
                f"{truncate(error.filename or 'a file')}: {error.strerror or error}; "
                f"{run.checkpoints.describe_disk()}"
            ) from error

    def _train_steps(self, total: int) -> Iterator[Step]:
        run = self._run
        self._require_sound_start()
        train_step = self._compile()
        self._report.begin(run.step, total)
        batches = run.data.batches(self.mesh, run.position, total - run.step)
        while run.step < total:
            self._enter_phase(f"step {run.step + 1}")
            with self._timing.waiting_for_data():
                batch, position = self._next_batch(batches)
            if self._profiler is not None:
                self._profiler.before(run.step + 1)
            if run.step + 1 == self._first and not run.objective.is_by_row:
                from jaxtp.train.loss_checks import require_sums

                with self._timing.lost_to("start"):
                    accumulation = self.config.train.accumulation
                    warning = require_sums(
                        run.objective, run.blueprint, run.state, batch, accumulation
                    )
                    if warning:
                        self._report.line(warning)
            flags = self._stopping.flags()
            run.interrupt.defer()
            verifying = self._verifier is not None and self._verifier.due(run.step + 1)
            if verifying:
                self._begin_verification(train_step, batch, flags)
            run.leaves, output = train_step(run.leaves, batch, **flags)
            run.step += 1
            run.position = position
            self._finish_step()
            self._in_flight = run.step, batch, output
            if verifying:
                self._finish_step()
            if self._profiler is not None:
                profile = self._profiler.after(run.step, output)
                if profile is not None:
                    self._report.line(profile)
            self._evaluate_if_due(total)
            step = Step(run.step, self)
            self._call_back(step)
            yield step
            self._require_open()
            if run.step < total:
                self._require_weight()
                if _is_due(run.step, self.config.checkpoint.every):
                    self._save()
                if self._stopping.reason is not None:
                    self._stop_early(self._stopping.reason)
                    return
        saved = self.save()
        self._report.end()
        pairs = run.data.tokens is not None and run.data.tokens.corpus.has_pairs
        first, *commands = run.parts.model.next_steps(self.config, pairs=pairs)
        for line in (f"saved in {saved}; {first}", *commands):
            self._report.line(line)
        self.done = True

    def _stop_early(self, reason: str) -> None:
        self.save()
        text = f"stopped by {reason} at step {self.step} and saved; the same command resumes it"
        if reason == self._stop_reason:
            text = f"stopped and saved at step {self.step}: {reason}"
        self._report.end()
        self._report.line(text)

    def _call_back(self, step: Step) -> None:
        for callback in self._run.parts.callbacks:
            with user_code(f"callback {reference_to(callback)}", *_ERRORS_OF_RUNS):
                callback(self, step)

    def _next_batch(self, batches: Iterator[tuple[Batch, Position]]) -> tuple[Batch, Position]:
        try:
            return next(batches)
        except BatchError as error:
            # Saves, so that bad data costs no step. But with several processes it may be bad for
            # one of them only, and a save needs all; data ends for all of them at the same step.
            if self._run.step >= self._first and (
                isinstance(error, EndOfDataError) or not is_multiprocess()
            ):
                self.save()
            raise

    def _enter_phase(self, name: str) -> None:
        self._watchdog.feed()
        working_on(name)

    @contextmanager
    def _phase(self, name: str, cause: str) -> Iterator[None]:
        # Work between steps, whose time is lost to `cause`
        self._enter_phase(name)
        with self._timing.lost_to(cause):
            yield

    def _require_sound_start(self) -> None:
        # Without this check, the first step would be blamed for a non-finite initial state.
        run = self._run
        advice = "begin with other weights"
        if run.step:
            saved = run.checkpoints.folder / str(run.step)
            advice = (
                f"{saved} has them: move it away, and the same command resumes from the "
                "checkpoint before it"
            )
        error = f"step {run.step}: the run cannot start from this state"
        self._report.line("checking that the state is finite")
        with self._timing.lost_to("start"):
            run.checkpoints.require_sound(Sums(finite_arrays(run.state)), self.mesh, error, advice)

    def _evaluate_during(self, block: ExitStack) -> None:
        # Evaluates in a thread during the block, and reports the result even if the block fails. On
        # GPUs the evaluation comes first, because XLA times kernels while it compiles the step.
        if self._run.data.validation is None:
            return
        self._report.line("evaluating at step 0")
        if is_multiprocess() or self._platform != "cpu":
            self._evaluate(lambda: in_thread(self._begin_evaluation()).result())
            return
        with self._phase("the evaluation at step 0", "evaluate"):
            evaluation = in_thread(self._begin_evaluation())

        def finish(kind: type[BaseException] | None, *_: object) -> None:
            # A second Ctrl-C does not wait for the evaluation.
            if kind is None or issubclass(kind, Exception):
                self._evaluate(evaluation.result)

        block.push(finish)

    def _compile(self) -> TrainStep:
        run = self._run
        with ExitStack() as block:
            # The log of a resumed run has this evaluation already.
            if run.step == 0:
                self._evaluate_during(block)
            self._report.line("compiling the training step")
            block.enter_context(self._phase("compiling the training step", "compile"))
            started = time.perf_counter()
            batch = split(run.data.train.shapes, self.mesh)
            try:
                lowered = run.train_step.lower(run.leaves, batch, **self._stopping.flags())
                options = compiler_options(
                    self.config.model,
                    self._platform,
                    deterministic=self.config.train.excludes_nondeterministic,
                )
                compiled: TrainStep = in_thread(
                    lambda: lowered.compile(compiler_options=options)
                ).result()
            except Exception as error:
                is_of_jaxtp = run.objective.is_by_row and not users_lines(error)
                if is_of_jaxtp or isinstance(error, UserError | jax.errors.JaxRuntimeError):
                    raise
                raise user_code_error(
                    f"compiling the training step for {self._platform}", error
                ) from error
            seconds = time.perf_counter() - started
        self._report.line(f"compiled the training step in {seconds:.1f} s")
        return compiled

    def _begin_verification(
        self, train_step: TrainStep, batch: Batch, flags: Mapping[str, jax.Array]
    ) -> None:
        # Computes the next step once, and restores the state.
        self._finish_step()
        run = self._run
        step = run.step + 1
        assert self._verifier is not None

        def compute(state: nnx.State) -> tuple[nnx.State, StepOutput]:
            leaves, output = train_step(jax.tree.leaves(state), batch, **flags)
            return run.blueprint.unflatten(leaves), output

        with self._phase(f"the verification of step {step}", "verify"):
            run.state = self._verifier.begin(step, run.state, batch, compute)

    def _verify(self, verifier: "Verifier", step: int, checksums: jax.Array) -> None:
        verifier.record(step, checksums)
        if verifier.due(step):
            with self._phase(f"the verification of step {step}", "verify"):
                verifier.finish(step, self._run.state, checksums)
            self._report.line(
                f"step {step}: verified; copies agree on all devices, and so do two "
                "computations of the step"
            )

    def _evaluate_if_due(self, total: int) -> None:
        step = self._run.step
        if step == total or _is_due(step, self.config.eval.every):
            self._finish_step()
            if step == total:
                then = "saves" if self._run.data.validation is None else "evaluates and saves"
                self._report.line(f"step {step} is the last: {then}")
            self._evaluate()

    def _finish_step(self) -> None:
        if self._in_flight is None:
            return
        step, batch, output = self._in_flight
        self._in_flight = None
        values = fetch(output)
        self._run.checkpoints.confirm()
        self._stopping.read(output.scalars.flag)
        self._timing.tick()
        if self._verifier is not None:
            assert output.checksums is not None
            self._verify(self._verifier, step, output.checksums)
        skipped = int(values.pop("skipped"))
        weight = values.pop("loss_tokens")
        if weight == 0:
            self._handle_no_weight(step)
        elif skipped:
            self._handle_skip(step, skipped, values, batch)
        elif not math.isfinite(values["param_norm"]):
            from jaxtp.train.verify import nonfinite_update

            raise nonfinite_update(self._run, step, values)
        else:
            self._run.mean_loss.add(values["loss"], weight)
        if weight:
            self._without_weight = 0
        self._last = step, values
        self._log(step, values)

    def _log(self, step: int, values: dict[str, float]) -> None:
        run = self._run
        total = self.config.train.steps
        unit = run.data.unit
        per_step = run.data.train.global_batch_size * run.data.units_per_row
        rate = per_step / self._timing.step_seconds
        self._report.step(step, values, f"{rate:,.0f} {unit}/s")
        if step in (1, total) or step % self.config.train.log_every == 0:
            record: dict[str, float | int] = {
                "step": step,
                **values,
                "loss": run.mean_loss.record(values["loss"]),
                unit: run.position.sample * run.data.units_per_row - (run.step - step) * per_step,
                **self._speed(per_step),
            }
            if self._stragglers is not None:
                record = self._stragglers.record(step, record)
            self._trackers.write(record)
            self._report.log(record, total, unit, is_first=step == self._first)
        elif step == self._first:
            # The first step is shown, but not logged: the log must equal the log of an
            # uninterrupted run.
            speed = {f"{unit}_per_second": rate, "step_seconds": self._timing.step_seconds}
            self._report.log({"step": step, **values, **speed}, total, unit, is_first=True)

    def _speed(self, per_step: int) -> dict[str, float]:
        timing = self._timing.record()
        devices = self.mesh.size
        unit = self._run.data.unit
        rate = per_step / timing["step_seconds"]
        speed = {
            f"{unit}_per_second": rate,
            f"{unit}_per_second_per_device": rate / devices,
            **timing,
        }
        if self._platform != "cpu":
            from jaxtp.train.performance import utilization

            speed |= utilization(
                self.mesh, self._run.row_flops * rate / self._run.data.units_per_row
            )
        return speed

    def _handle_no_weight(self, step: int) -> None:
        self._without_weight += 1
        self._report.line(
            f"step {step}: the weight of the loss is 0 (by default it is the number of labels), so "
            "there is no loss; the update is skipped"
        )

    def _require_weight(self) -> None:
        max_skipped = self.config.train.max_skipped
        if self._without_weight > max_skipped:
            self.save()
            raise BatchError(
                f"step {self._run.step}: the last {self._without_weight} steps had no weight, more "
                f"than train.max_skipped={max_skipped}; the run is saved. Look at the labels of "
                "the data and the weight that the loss returns"
            )

    def _handle_skip(self, step: int, skipped: int, values: dict[str, float], batch: Batch) -> None:
        run = self._run
        allowed = self.config.train.skips_allowed
        text = f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        # A state that is not finite makes every step fail. The next step has been dispatched, so
        # `run.state` is its result.
        if skipped == 1:
            run.checkpoints.require_sound(Sums(finite_arrays(run.state)), self.mesh, text)
        if skipped > allowed:
            from jaxtp.train.verify import nonfinite_gradient

            raise nonfinite_gradient(run, text, step, batch, self._checkpoint_info())
        self._report.line(f"{text}; the update is skipped, {skipped} in a row of at most {allowed}")

    def evaluate(self) -> dict[str, float]:
        """Returns `eval_loss` and further metrics of the parameters on the validation batches."""
        self._finish_step()
        return self._evaluated()

    def _evaluated(self, evaluation: Evaluation | None = None) -> dict[str, float]:
        with self._phase(f"the evaluation at step {self._run.step}", "evaluate"):
            return (evaluation or self._begin_evaluation())()

    def _begin_evaluation(self) -> Evaluation:
        # Traces in the calling thread, because JAX's context is local to a thread.
        run = self._run
        state = run.state
        batches = run.data.validation_batches(self.mesh, self.config.eval.batches)
        first = next(batches, None)
        if first is None:
            return dict
        lowered = run.eval_step.lower(state, first, 0)

        def evaluate() -> dict[str, float]:
            step = lowered.compile()
            results = [
                step(state, batch, number) for number, batch in enumerate(chain([first], batches))
            ]
            return evaluation_metrics(jax.device_get(results), run.objective)

        return evaluate

    def _evaluate(self, evaluation: Evaluation | None = None, *, log: bool = True) -> None:
        run = self._run
        values = self._evaluated(evaluation)
        if not values:
            return
        if self._last[0] == run.step:
            self._last = run.step, self._last[1] | values
        if log:
            self._trackers.write({"step": run.step, **values})
        text = f"step {run.step}: validation loss {values.pop('eval_loss'):.4f}"
        if run.objective.is_in_nats and run.data.tokens is not None:
            unit = run.data.tokens.corpus.unit.removesuffix("s")
            text += f" nats per {unit}, perplexity {values['eval_perplexity']:.4g}"
        else:
            text += "".join(f", {name} {value:.4g}" for name, value in values.items())
        self._report.line(text)

    def _save(self) -> None:
        self._finish_step()
        run = self._run
        if self._saved_at == run.step:
            return
        self._require_open()
        eval_loss = None
        if self._last[0] == run.step and math.isfinite(self._last[1].get("eval_loss", math.nan)):
            eval_loss = self._last[1]["eval_loss"]
        with self._phase(f"the checkpoint at step {run.step}", "save"):
            stored = run.blueprint.stored(run.state)
            run.checkpoints.save(
                run.step, stored, self.mesh, self._checkpoint_info(), eval_loss=eval_loss
            )
        self._saved_at = run.step

    def _checkpoint_info(self) -> dict[str, object]:
        run = self._run
        sizes = mesh_sizes(self.mesh)
        info = run_folder.checkpoint_info(
            self.config, run.data.description, run.position.sample, sizes
        )
        streams = run.position.gathered().streams
        if streams is not None:
            info[run_folder.STREAMS] = streams
        info[MEAN_LOSS] = run.mean_loss.sums
        if self._verifier is not None:
            info[run_folder.VERIFIED] = self._verifier.verified
        if run.base is not None:
            info[run_folder.BASE] = run.base
        return info


def _no_task(argument: object) -> str:
    if isinstance(argument, TrainConfig):
        return "the first argument of Trainer is a jaxtp.Task; pass a TrainConfig as settings="
    name = getattr(argument, "__name__", None)
    form = f"jaxtp.Task(model={name or 'MODEL'}, loss=..., batches=..., optimizer=...)"
    return f"Trainer takes a jaxtp.Task, not {name or describe_value(argument)}: {form}"


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def evaluation_metrics(results: Sequence[Terms], objective: Objective) -> dict[str, float]:
    """Returns the metrics of an evaluation: sums over all batches, divided by their weights."""
    metrics = {}
    for name in results[0].pairs:
        totals, weights = zip(*(terms.pairs[name] for terms in results), strict=True)
        weight = sum(map(float, weights))
        total = sum(map(float, totals))
        metrics[f"eval_{name}"] = total / weight if weight else math.nan
    if objective.is_in_nats:
        metrics["eval_perplexity"] = math.exp(min(metrics["eval_loss"], 700))
    return metrics
