"""The training loop: step, log, evaluate and save.

One step is in flight while the host reads the previous step's numbers, so that devices never wait for the host.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax

from jaxtp.config.entry import STANDARD_OUTPUT
from jaxtp.config.reading import truncate
from jaxtp.data.loader import Batch, batches
from jaxtp.data.rows import Samples
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere, working_on
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import run_folder
from jaxtp.train.metrics import MEAN_LOSS, Trackers
from jaxtp.train.run_report import next_steps
from jaxtp.train.setup import Run
from jaxtp.train.state import named_arrays
from jaxtp.train.step import Scalars, TrainStep, compiler_options, fetch, trace_step
from jaxtp.train.stopping import Stopping, Watchdog

if TYPE_CHECKING:
    from jaxtp.train.performance import Profiler, Stragglers
    from jaxtp.train.verify import Verifier


class Loop:
    """Runs the steps of a run."""

    def __init__(self, run: Run):
        self._run = run
        self._config = config = run.config
        self._mesh = run.blueprint.mesh
        self._report, self._timing = run.report, run.timing
        with raise_everywhere():
            self._trackers = Trackers(config, run.step, run.report.line)
        self._watchdog = Watchdog(config.train.stall_seconds, config.train.stall_abort_seconds)
        self._stopping = Stopping(run.interrupt, self._mesh)
        self._profiler: Profiler | None = None
        if config.profile.start:
            from jaxtp.train import performance

            folder, profile = config.run.dir / run_folder.PROFILE, config.profile
            self._profiler = performance.Profiler(folder, profile.start, profile.steps, run.timing)
        self._stragglers: Stragglers | None = None
        if is_multiprocess() or platform_of(self._mesh.devices.flat[0]) != "cpu":
            from jaxtp.train import performance

            self._stragglers = performance.Stragglers(self._mesh, run.report.line)
        self._verifier: Verifier | None = None
        if config.train.verify_every:
            from jaxtp.train import verify

            self._verifier = verify.Verifier(config, run.blueprint, run.checkpoints, run.verified)
        self._in_flight: tuple[int, Batch, Scalars, list[jax.Array]] | None = None
        self._saved_at = run.step if run.checkpoints.steps() else None
        self._first = run.step + 1

    def run_to_end(self) -> bool:
        """Trains until `train.steps` or a signal; returns whether all steps are done.

        Raises:
          NonFiniteError: a loss or gradient (unless `train.non_finite` allows it), update or state is not finite.
          CorruptionError: a verification failed.
          UnequalCopiesError: replicas differ at a save.
          ValueError: `UnwritableError`, `RunFilesError` or `TokenError`.
        """
        run, total = self._run, self._config.train.steps
        try:
            if run.step >= total:
                self._report.line(
                    f"already at step {run.step}, and train.steps={total}: raise it, or train.epochs if you give epochs"
                )
                self._evaluate(log=False)
                return True
            return self._train(total)
        except OSError as error:
            if isinstance(error, BrokenPipeError) and error.filename == STANDARD_OUTPUT:
                raise
            raise run_folder.RunFilesError(
                f"{truncate(error.filename or 'a file')}: {error.strerror or error}; {run.checkpoints.describe_disk()}"
            ) from error
        finally:
            self._watchdog.stop()
            if self._profiler is not None:
                self._profiler.close()
            self._trackers.close()

    def _train(self, total: int) -> bool:
        run = self._run
        self._require_sound_start()
        if run.step == 0:
            self._evaluate()  # the baseline; a resumed run has it in its log
        train_step = self._compile()
        self._report.begin(run.step, total)
        batches = self._batches(run.data.train, run.next_sample, total - run.step)
        while run.step < total:
            self._enter_phase(f"step {run.step + 1}")
            with self._timing.waiting_for_data():
                batch = next(batches)
            if self._profiler is not None:
                self._profiler.before(run.step + 1)
            inputs = batch | self._stopping.flags()
            verifying = self._verifier is not None and self._verifier.due(run.step + 1)
            if verifying:
                self._begin_verification(train_step, batch, inputs)
            run.state, scalars, *checksums = train_step(run.state, inputs)
            run.step += 1
            run.next_sample += self._config.data.global_batch_size
            self._finish_step()
            self._in_flight = run.step, batch, scalars, checksums
            if verifying:
                self._finish_step()
            if self._profiler is not None and (traced := self._profiler.after(run.step, scalars)) is not None:
                self._report.line(traced)
            if run.step < total:
                self._between_steps()
                if (signal := self._stopping.reason) is not None:
                    self._finish_step()
                    if self._saved_at != run.step:
                        self._save(None)
                    run.checkpoints.wait()
                    self._report.line(f"stopped by {signal} at step {run.step} and saved; the same command resumes it")
                    return False
        self._finish_step()
        self._report.line(f"step {run.step} is the last: evaluates and saves")
        self._save(self._evaluate())
        run.checkpoints.wait()
        saved = run.checkpoints.folder / str(run.step)
        for line in next_steps(self._config, saved, decoder=run.blueprint.is_decoder):
            self._report.line(line)
        return True

    def _enter_phase(self, name: str) -> None:
        self._watchdog.feed()
        working_on(name)

    @contextmanager
    def _phase(self, name: str, cause: str) -> Iterator[None]:
        # Between steps; its time is lost to `cause`.
        self._enter_phase(name)
        with self._timing.lost_to(cause):
            yield

    def _require_sound_start(self) -> None:
        # Otherwise the first step would be blamed.
        run, advice = self._run, "begin with other weights"
        if run.step:
            saved = run.checkpoints.folder / str(run.step)
            advice = f"{saved} has them: move it away, and the same command resumes from the checkpoint before it"
        what = f"step {run.step}: the run cannot start from this state"
        with self._timing.lost_to("start"):
            run.checkpoints.require_sound(named_arrays(run.state), self._mesh, what, advice)

    def _compile(self) -> TrainStep:
        started = time.perf_counter()
        with self._phase("compiling the training step", "compile"):
            traced = trace_step(self._config, self._run.blueprint, self._run.train_step, self._run.state)
            options = compiler_options(self._config, platform_of(self._mesh.devices.flat[0]))
            compiled: TrainStep = traced.lower().compile(compiler_options=options)
        self._report.line(f"compiled the training step in {time.perf_counter() - started:.1f} s")
        return compiled

    def _batches(self, rows: Samples, start: int, count: int) -> Iterator[Batch]:
        size = self._config.data.global_batch_size
        return batches(rows, self._mesh, global_batch_size=size, start=start, count=count)

    def _begin_verification(self, train_step: TrainStep, batch: Batch, inputs: Batch) -> None:
        # Computes the next step once, and restores the state.
        self._finish_step()
        run, step = self._run, self._run.step + 1
        assert self._verifier is not None
        with self._phase(f"the verification of step {step}", "verify"):
            run.state = self._verifier.begin(step, run.state, batch, lambda state: train_step(state, inputs))

    def _verify(self, verifier: "Verifier", step: int, checksums: jax.Array) -> None:
        verifier.record(step, checksums)
        if verifier.due(step):
            with self._phase(f"the verification of step {step}", "verify"):
                verifier.finish(step, self._run.state, checksums)
            self._report.line(f"step {step}: verified; copies agree on all devices, and so do two computations of it")

    def _between_steps(self) -> None:
        evaluation, saving = self._config.eval.every, self._config.checkpoint.every
        loss = None
        if evaluation and self._run.step % evaluation == 0:
            self._finish_step()
            loss = self._evaluate()
        if saving and self._run.step % saving == 0:
            self._finish_step()
            self._save(loss)

    def _finish_step(self) -> None:
        if self._in_flight is None:
            return
        (step, batch, scalars, checksums), self._in_flight = self._in_flight, None
        values = fetch(scalars)
        self._stopping.read(values)
        self._timing.tick()
        if self._verifier is not None:
            self._verify(self._verifier, step, *checksums)
        skipped = int(values.pop("skipped"))
        if skipped:
            self._handle_skip(step, skipped, values, batch)
        elif not math.isfinite(values["param_norm"]):
            from jaxtp.train.verify import nonfinite_update

            raise nonfinite_update(self._run, step, values)
        tokens = values.pop("loss_tokens")
        if not skipped:
            self._run.mean_loss.add(values["loss"], tokens)
        self._log(step, values)

    def _log(self, step: int, values: dict[str, float]) -> None:
        run, total, data = self._run, self._config.train.steps, self._config.data
        tokens_per_step = data.global_batch_size * data.sequence_length
        seconds = self._timing.step_seconds
        self._report.step(step, values, tokens_per_step / seconds)
        if step in (1, total) or step % self._config.train.log_every == 0:
            record: dict[str, float | int] = {
                "step": step,
                **values,
                "loss": run.mean_loss.record(values["loss"]),
                "tokens": run.next_sample * data.sequence_length - (run.step - step) * tokens_per_step,
                **self._speed(tokens_per_step),
            }
            if self._stragglers is not None:
                record = self._stragglers.record(step, record, run.state)
            self._trackers.write(record)
            self._report.log(record, total, is_first=step == self._first)
        elif step == self._first:  # shown, but not logged: the log must equal an uninterrupted run's
            speed = {"tokens_per_second": tokens_per_step / seconds, "step_seconds": seconds}
            self._report.log({"step": step, **values, **speed}, total, is_first=True)

    def _speed(self, tokens_per_step: int) -> dict[str, float]:
        timing, devices = self._timing.record(), self._mesh.size
        rate = tokens_per_step / timing["step_seconds"]
        speed = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / devices, **timing}
        if platform_of(self._mesh.devices.flat[0]) != "cpu" and self._run.blueprint.is_decoder:
            from jaxtp.train.performance import utilization

            speed |= utilization(self._run.blueprint, self._config.data.sequence_length, rate)
        return speed

    def _handle_skip(self, step: int, skipped: int, values: dict[str, float], batch: Batch) -> None:
        run, allowed = self._run, self._config.train.skips_allowed
        what = f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if skipped == 1:  # a bad state makes every step fail
            run.checkpoints.require_sound(named_arrays(run.state), self._mesh, what)
        if skipped > allowed:
            from jaxtp.train.verify import nonfinite_gradient

            raise nonfinite_gradient(run, what, step, batch, self._checkpoint_info())
        self._report.line(f"{what}; the update is skipped, {skipped} in a row of at most {allowed}")

    def _evaluate(self, *, log: bool = True) -> float:
        run = self._run
        with self._phase(f"the evaluation at step {run.step}", "evaluate"):
            loss = self._validation_loss()
        perplexity = math.exp(min(loss, 700))
        if log:
            self._trackers.write({"step": run.step, "eval_loss": loss, "eval_perplexity": perplexity})
        unit = run.data.corpus.unit.removesuffix("s")
        self._report.line(f"step {run.step}: validation loss {loss:.4f} nats per {unit}, perplexity {perplexity:.4g}")
        return loss

    def _validation_loss(self) -> float:
        run, size = self._run, self._config.data.global_batch_size
        rows = run.data.validation(self._config.eval.batches, size)
        results = [run.eval_step(run.state, batch) for batch in self._batches(rows, 0, len(rows) // size)]
        sums = jax.device_get(results)  # all at once
        labels = sum(float(valid) for _, valid in sums)
        return sum(float(total) for total, _ in sums) / labels if labels else math.nan

    def _save(self, eval_loss: float | None) -> None:
        run = self._run
        if eval_loss is not None and not math.isfinite(eval_loss):
            eval_loss = None  # cannot be the best
        with self._phase(f"the checkpoint at step {run.step}", "save"):
            stored = run.blueprint.stored(run.state)
            run.checkpoints.save(run.step, stored, self._mesh, self._checkpoint_info(), eval_loss=eval_loss)
        self._saved_at = run.step

    def _checkpoint_info(self) -> dict[str, object]:
        run, sizes = self._run, mesh_sizes(self._mesh)
        info = run_folder.checkpoint_info(self._config, run.data.description, run.next_sample, sizes)
        info[MEAN_LOSS] = run.mean_loss.sums
        if self._verifier is not None:
            info[run_folder.VERIFIED] = self._verifier.verified
        if run.base is not None:
            info[run_folder.BASE] = run.base
        return info
