"""The training loop: one step in flight, and hooks around it (`guards/hook.py`)."""

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.logical import finite_arrays
from jaxtp.checkpoint.storage import STARTS
from jaxtp.config.entry import STANDARD_OUTPUT, UserError, in_thread
from jaxtp.config.python_object import user_code_error, users_lines
from jaxtp.config.reading import truncate
from jaxtp.config.schema import ConfigError, to_plain
from jaxtp.data.batches import Position
from jaxtp.data.columns import BatchError, EndOfDataError
from jaxtp.data.loader import Batch, split
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere, working_on
from jaxtp.guards.hook import FinishedStep, Hook, NextStep
from jaxtp.guards.nonfinite import NonFinitePolicy, Spikes
from jaxtp.guards.stopping import Stopping, Watchdog
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import run_folder
from jaxtp.train.evaluation import Evaluation
from jaxtp.train.log import Log
from jaxtp.train.metrics import Trackers
from jaxtp.train.setup import Run
from jaxtp.train.state import trained_parameters
from jaxtp.train.step import StepOutput, TrainStep, compiler_options, fetch


class TrainingLoop:
    """Runs the steps of a run, which `steps` yields by number.

    Args:
      callbacks: calls a user's callbacks.
    """

    def __init__(self, run: Run, callbacks: Hook):
        self.run = run
        self.mesh: Mesh = run.blueprint.mesh
        self.resources = ExitStack()
        """Closes the hooks and the trackers."""
        loop = run.config.train
        self.watchdog = Watchdog(loop.stall_seconds, loop.stall_abort_seconds)
        self.resources.callback(self.watchdog.close)
        with raise_everywhere():
            self.trackers = Trackers(
                run.config.run.dir, to_plain(run.config), run.step, run.report.line
            )
        self.resources.callback(self.trackers.close)
        self._callbacks = callbacks
        # The number and the metrics of the last finished step
        self.last_step = 0
        self.last_metrics: dict[str, float] = {}
        self.first = run.step + 1
        self.total = run.config.train.steps
        # Whether all steps are done
        self.done = False
        self.is_open = True
        self.steps = self._converting_errors()
        self._in_flight: tuple[NextStep, StepOutput] | None = None
        self._saved_at = run.step if run.checkpoints.steps() else None

    # What is made at its first use, before the first step

    @cached_property
    def stopping(self) -> Stopping:
        """Stops all processes after the same step."""
        return Stopping(self.run.interrupt, self.mesh)

    @cached_property
    def evaluation(self) -> Evaluation:
        """Evaluates the parameters."""
        return Evaluation(self)

    @cached_property
    def spikes(self) -> Spikes | None:
        """The limits of the steps, if spikes are skipped."""
        loop = self.run.config.train
        if loop.spike != "skip":
            return None
        remedy = ""
        if self.run.data.tokens is not None:
            remedy = f"its documents: jaxtp checkpoint rows {self.run.config.run.dir}"
        return Spikes(loop.spike_deviations, loop.spike_window, self.run.spikes, remedy)

    @cached_property
    def hooks(self) -> list[Hook]:
        """The hooks in the order of their calls.

        A corrupt or non-finite step is not logged, a trace has no verification in front, and
        callbacks see the metrics of an evaluation.
        """
        hooks = list(self._make_hooks())
        for hook in hooks:
            self.resources.callback(hook.close)
        return hooks

    def _make_hooks(self) -> Iterator[Hook]:
        run = self.run
        config = run.config
        yield self.watchdog
        if not run.objective.is_by_row:
            from jaxtp.train.loss_checks import SumsCheck

            yield SumsCheck(run)
        yield self.stopping
        if config.train.verify_every:
            from jaxtp.guards.verify import Verifier

            trained = trained_parameters(run.blueprint)
            every = config.train.verify_every
            yield Verifier(self.mesh, trained, every, run.checkpoints, run.verified)
        if self.spikes is not None:
            yield self.spikes
        yield NonFinitePolicy(
            config.run.dir / run_folder.NON_FINITE,
            may_skip=config.train.non_finite == "skip",
            max_skipped=config.train.max_skipped,
            checkpoints=run.checkpoints,
            mesh=self.mesh,
            stored=run.blueprint.stored,
        )
        yield Log(run, self.trackers)
        if is_multiprocess() or platform_of(self.mesh.devices.flat[0]) != "cpu":
            from jaxtp.guards.stragglers import Stragglers

            yield Stragglers(self.mesh)
        if config.profile.start:
            from jaxtp.guards.profiler import Profiler

            folder = config.run.dir / run_folder.PROFILE
            yield Profiler(folder, config.profile.start, config.profile.steps)
        yield self.evaluation
        yield self._callbacks

    def _train(self) -> Iterator[int]:
        run = self.run
        self._require_sound_start()
        train_step = self._compile()
        run.report.begin(run.step, self.total)
        batches = run.data.batches(self.mesh, run.position, self.total - run.step)
        while run.step < self.total:
            self._enter(f"step {run.step + 1}")
            with run.timing.waiting_for_data():
                batch, position = self._next_batch(batches)
            flags = self._flags()
            step = NextStep(run.step + 1, batch, partial(self._compute, train_step, batch, flags))
            for hook in self.hooks:
                hook.before_step(self, step)
            run.leaves, output = train_step(run.leaves, batch, **flags)
            run.step += 1
            run.position = position
            # The devices compute this step while the host reads the numbers of the step before.
            self.finish_step()
            self._in_flight = step, output
            for hook in self.hooks:
                hook.after_dispatch(self)
            yield run.step
            self.require_open()
            if run.step < self.total:
                for hook in self.hooks:
                    hook.between_steps(self)
                every = run.config.checkpoint.every
                if every and run.step % every == 0:
                    self.start_save()
                if self.stopping.reason is not None:
                    self._stop(self.stopping.reason)
                    return
        self._end(self.save())

    def _require_sound_start(self) -> None:
        # The first step would be blamed for an initial state that is not finite.
        run = self.run
        advice = "begin with other weights"
        if run.step:
            saved = run.checkpoints.folder / str(run.step)
            advice = (
                f"{saved} has them: move it away, and the same command resumes from the "
                "checkpoint before it"
            )
        error = f"step {run.step}: the run cannot start from this state"
        self.line("checking that the state is finite")
        with self.lost_to("start"):
            sums = Sums(finite_arrays(run.state))
            run.checkpoints.require_sound(sums, self.mesh, error, advice)

    def _compile(self) -> TrainStep:
        # A new run is evaluated meanwhile.
        run = self.run
        platform = platform_of(self.mesh.devices.flat[0])
        with ExitStack() as block:
            # The log of a resumed run has this evaluation already.
            if run.step == 0:
                self.evaluation.report_during(block)
            self.line("compiling the training step")
            block.enter_context(self.phase("compiling the training step", "compile"))
            started = time.perf_counter()
            batch = split(run.data.train.shapes, self.mesh)
            try:
                lowered = run.train_step.lower(run.leaves, batch, **self._flags())
                if run.programs is not None:
                    run.programs.accept(lowered, self.line)
                options = compiler_options(
                    run.config.model,
                    platform,
                    deterministic=run.config.train.excludes_nondeterministic,
                )
                compiled: TrainStep = in_thread(
                    lambda: lowered.compile(compiler_options=options)
                ).result()
            except Exception as error:
                is_of_jaxtp = run.objective.is_by_row and not users_lines(error)
                if is_of_jaxtp or isinstance(error, UserError | jax.errors.JaxRuntimeError):
                    raise
                place = f"compiling the training step for {platform}"
                raise user_code_error(place, error) from error
            seconds = time.perf_counter() - started
        self.line(f"compiled the training step in {seconds:.1f} s")
        return compiled

    def _flags(self) -> dict[str, Any]:
        # Further arguments of the next step
        flags: dict[str, Any] = dict(self.stopping.flags())
        if self.spikes is not None:
            flags["limits"] = self.spikes.limits(self.run.step + 1)
        return flags

    def finish_step(self) -> None:
        """Waits for the step in flight, if any, and tells the hooks its numbers."""
        if self._in_flight is None:
            return
        step, output = self._in_flight
        self._in_flight = None
        metrics = fetch(output)
        self.run.checkpoints.confirm()
        if self.run.mirror is not None:
            self.run.mirror.check()
        self.run.timing.tick()
        finished = FinishedStep(
            step.index,
            step.batch,
            metrics,
            weight=metrics.pop("loss_tokens"),
            skipped=int(metrics.pop("skipped")),
            flag=output.scalars.flag,
            checksums=output.checksums,
        )
        for hook in self.hooks:
            hook.after_step(self, finished)
        self.last_step = step.index
        self.last_metrics = metrics

    def _compute(
        self,
        train_step: TrainStep,
        batch: Batch,
        flags: Mapping[str, jax.Array],
        state: nnx.State,
    ) -> tuple[nnx.State, Array]:
        leaves, output = train_step(jax.tree.leaves(state), batch, **flags)
        assert output.checksums is not None
        return self.run.blueprint.unflatten(leaves), output.checksums

    def _converting_errors(self) -> Iterator[int]:
        run = self.run
        try:
            if run.step < self.total:
                yield from self._train()
                return
            self.line(
                f"already at step {run.step}, and train.steps={self.total}: to train on, raise "
                "train.steps (or train.epochs, if you set that)"
            )
            self.evaluation.report(is_logged=False)
            self.done = True
        except OSError as error:
            if isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT:
                raise
            raise run_folder.RunFilesError(
                f"{truncate(error.filename or 'a file')}: {error.strerror or error}; "
                f"{run.checkpoints.describe_disk()}"
            ) from error

    def _next_batch(self, batches: Iterator[tuple[Batch, Position]]) -> tuple[Batch, Position]:
        try:
            return next(batches)
        except BatchError as error:
            # Saves, so that bad data costs no step. But with several processes it may be bad for
            # one of them only, and a save needs all; data ends for all of them at the same step.
            if self.run.step >= self.first and (
                isinstance(error, EndOfDataError) or not is_multiprocess()
            ):
                self.save()
            raise

    def stop(self, reason: str) -> None:
        """Saves and ends the run after this step."""
        self.stopping.requested = reason

    def _stop(self, reason: str) -> None:
        self.save()
        step = self.run.step
        text = f"stopped by {reason} at step {step} and saved; started again, it resumes there"
        if reason == self.stopping.requested:
            text = f"stopped and saved at step {step}: {reason}"
        self.run.report.end()
        self.line(text)

    def _end(self, saved: Path) -> None:
        run = self.run
        run.report.end()
        pairs = run.data.tokens is not None and run.data.tokens.corpus.has_pairs
        first, *commands = run.parts.model.next_steps(run.config, pairs=pairs)
        for text in (f"saved in {saved}; {first}", *commands):
            self.line(text)
        self.done = True

    # What hooks use

    @property
    def step(self) -> int:
        """Number of dispatched steps."""
        return self.run.step

    @property
    def state(self) -> nnx.State:
        """The state after the last dispatched step."""
        return self.run.state

    @state.setter
    def state(self, state: nnx.State) -> None:
        self.run.state = state

    def line(self, text: str) -> None:
        """Prints a line, from process 0, above the progress bar."""
        self.run.report.line(text)

    def lost_to(self, cause: str) -> AbstractContextManager[None]:
        """Counts the time of the block as lost to `cause`."""
        return self.run.timing.lost_to(cause)

    @contextmanager
    def phase(self, activity: str, cause: str) -> Iterator[None]:
        """Announces an activity between steps, whose time is lost to `cause`."""
        self._enter(activity)
        with self.lost_to(cause):
            yield

    def _enter(self, activity: str) -> None:
        working_on(activity)
        for hook in self.hooks:
            hook.on_activity()

    def complete_record(self, record: dict[str, float]) -> None:
        """Has the hooks add numbers to the record of a logged step."""
        for hook in self.hooks:
            hook.at_log(self, record)

    def require_open(self) -> None:
        """Raises ConfigError if the run is closed."""
        if not self.is_open:
            raise ConfigError(
                f"these steps ended at step {self.run.step}, where the trainer was closed; "
                "iterate over the trainer again to continue from the last checkpoint"
            )

    @property
    def is_saved(self) -> bool:
        """Whether there is a checkpoint of the last step."""
        return self._saved_at == self.run.step

    def save(self) -> Path:
        """Saves the last step, unless it is saved; returns the checkpoint's folder."""
        self.start_save()
        self.run.checkpoints.wait()
        return self.run.checkpoints.folder / str(self.run.step)

    def start_save(self) -> None:
        """Starts to save the last step, unless it is saved."""
        self.finish_step()
        run = self.run
        if self.is_saved:
            return
        self.require_open()
        eval_loss = None
        if self.last_step == run.step and math.isfinite(
            self.last_metrics.get("eval_loss", math.nan)
        ):
            eval_loss = self.last_metrics["eval_loss"]
        with self.phase(f"the checkpoint at step {run.step}", "save"):
            stored = run.blueprint.stored(run.state)
            info = self.checkpoint_info()
            run.checkpoints.save(run.step, stored, self.mesh, info, eval_loss=eval_loss)
        self._saved_at = run.step

    def checkpoint_info(self) -> dict[str, Any]:
        """Returns the info that a checkpoint of the last step stores."""
        run = self.run
        info = run_folder.checkpoint_info(
            to_plain(run.config), run.data.description, run.position.sample, mesh_sizes(self.mesh)
        )
        info[STARTS] = run.starts
        streams = run.position.gathered().streams
        if streams is not None:
            info[run_folder.STREAMS] = streams
        if run.base is not None:
            info[run_folder.BASE] = run.base
        for hook in self.hooks:
            hook.at_save(info)
        return info
