"""The training loop: step, log, evaluate and save.

One step is in flight while the host reads the previous step's numbers, so that devices never wait for the host.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxtp.checkpoint.checksum import NonFiniteError, describe_not_finite, sums
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.config.entry import STANDARD_OUTPUT, UserError
from jaxtp.config.reading import truncate
from jaxtp.data.loader import Batch, batches
from jaxtp.data.rows import Samples
from jaxtp.distributed.agreement import is_multiprocess, raise_everywhere, working_on
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import run_folder
from jaxtp.train.metrics import MEAN_LOSS, Profiler, flops_per_token, peak_flops
from jaxtp.train.run_report import next_steps
from jaxtp.train.setup import Run
from jaxtp.train.state import named_arrays, parameter_count
from jaxtp.train.step import Scalars, TrainStep, compiler_options, trace_step
from jaxtp.train.stopping import Stopping, Watchdog
from jaxtp.train.trackers import Trackers

if TYPE_CHECKING:
    from jaxtp.train.stragglers import Stragglers
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
        self._profiler = Profiler(config.run.dir / run_folder.PROFILE, config.profile.start, config.profile.steps)
        self._watchdog = Watchdog(config.train.stall_seconds, config.train.stall_abort_seconds)
        self._stragglers: Stragglers | None = None
        if is_multiprocess() or platform_of(self._mesh.devices.flat[0]) != "cpu":
            from jaxtp.train import stragglers

            self._stragglers = stragglers.Stragglers(self._mesh, run.report.line)
        self._stopping = Stopping(run.interrupt, self._mesh)
        self._verifier: Verifier | None = None
        if config.train.verify_every:
            from jaxtp.train import verify

            self._verifier = verify.Verifier(config, run.blueprint, run.checkpoints, run.verified)
        self._in_flight: tuple[int, int, Scalars, list[jax.Array]] | None = None
        self._recent: dict[int, Batch] = {}
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
            if self._profiler.first == run.step + 1:
                with self._timing.lost_to("profile"):
                    self._profiler.start()
            inputs = batch | self._stopping.flags()
            verifying = self._verifier is not None and self._verifier.due(run.step + 1)
            if verifying:
                self._begin_verification(train_step, batch, inputs)
            run.state, scalars, *checksums = train_step(run.state, inputs)
            run.step += 1
            run.next_sample += self._config.data.global_batch_size
            self._recent = {run.step - 1: self._recent.get(run.step - 1, batch), run.step: batch}
            self._finish_step()
            self._in_flight = run.step, run.next_sample, scalars, checksums
            if verifying:
                self._finish_step()
            if self._profiler.tracing and self._profiler.last == run.step:
                with self._timing.lost_to("profile"):
                    self._report.line(self._profiler.stop(scalars))
            if run.step < total:
                self._between_steps()
                if (signal := self._stopping.reason) is not None:
                    self._stop(signal)
                    return False
        self._finish_step()
        self._report.line(f"step {run.step} is the last: evaluates and saves")
        self._save(self._evaluate())
        run.checkpoints.wait()
        for line in next_steps(self._config, run.checkpoints.folder / str(run.step)):
            self._report.line(line)
        return True

    def _enter_phase(self, name: str) -> None:
        self._watchdog.feed()
        working_on(name)

    def _require_sound_start(self) -> None:
        # Otherwise the first step would be blamed.
        run, advice = self._run, "begin with other weights"
        if run.step:
            saved = run.checkpoints.folder / str(run.step)
            advice = f"{saved} has them: move it away, and the same command resumes from the checkpoint before it"
        what = f"step {run.step}: the run cannot start from this state"
        with self._timing.lost_to("start"):
            run.checkpoints.require_sound(named_arrays(run.state), self._mesh, what, advice)

    def _between_steps(self) -> None:
        evaluation, saving = self._config.eval.every, self._config.checkpoint.every
        loss = None
        if evaluation and self._run.step % evaluation == 0:
            self._finish_step()
            loss = self._evaluate()
        if saving and self._run.step % saving == 0:
            self._finish_step()
            self._save(loss)

    def _begin_verification(self, train_step: TrainStep, batch: Batch, inputs: Batch) -> None:
        # Computes the next step once, and restores the state.
        self._finish_step()
        run = self._run
        self._enter_phase(f"the verification of step {run.step + 1}")
        assert self._verifier is not None
        with self._timing.lost_to("verify"):
            run.state = self._verifier.begin(run.step + 1, run.state, batch, lambda state: train_step(state, inputs))

    def _verify(self, verifier: "Verifier", step: int, checksums: jax.Array) -> None:
        verifier.note(step, checksums)
        if verifier.due(step):
            self._enter_phase(f"the verification of step {step}")
            with self._timing.lost_to("verify"):
                verifier.finish(self._run.state, checksums)
            self._report.line(f"step {step}: verified; copies agree on all devices, and so do two computations of it")

    def _stop(self, signal: str) -> None:
        self._finish_step()
        if self._saved_at != self._run.step:
            self._save(None)
        self._run.checkpoints.wait()
        self._report.line(f"stopped by {signal} at step {self._run.step} and saved; the same command resumes it")

    def _finish_step(self) -> None:
        if self._in_flight is None:
            return
        (step, samples, scalars, checksums), self._in_flight = self._in_flight, None
        values = scalars.fetch()
        self._stopping.read(values)
        self._timing.tick()
        if self._verifier is not None:
            self._verify(self._verifier, step, *checksums)
        if skipped := int(values.pop("skipped")):
            self._skipped(step, skipped, values)
        elif not math.isfinite(values["param_norm"]):
            raise self._nonfinite_update(step, values)
        tokens_per_step = self._config.data.global_batch_size * self._config.data.sequence_length
        tokens = values.pop("loss_tokens")
        if not skipped:
            self._run.mean_loss.add(values["loss"], tokens)
        total = self._config.train.steps
        seconds = self._timing.step_seconds
        self._report.step(step, values, tokens_per_step / seconds)
        if step in (1, total) or step % self._config.train.log_every == 0:
            record: dict[str, float | int] = {
                "step": step,
                **values,
                "loss": self._run.mean_loss.record(values["loss"]),
                "tokens": samples * self._config.data.sequence_length,
                **self._speed(tokens_per_step),
            }
            if self._stragglers is not None:
                record = self._stragglers.record(step, record, self._run.state)
            self._trackers.write(record)
            self._report.logged(record, total, is_first=step == self._first)
        elif step == self._first:  # shown, but not logged: the log must equal an uninterrupted run's
            speed = {"tokens_per_second": tokens_per_step / seconds, "step_seconds": seconds}
            self._report.logged({"step": step, **values, **speed}, total, is_first=True)

    def _speed(self, tokens_per_step: int) -> dict[str, float]:
        timing, devices = self._timing.record(), self._mesh.size
        rate = tokens_per_step / timing["step_seconds"]
        speed = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / devices, **timing}
        peak = peak_flops(self._mesh.devices.flat[0])
        if math.isfinite(peak) and self._run.blueprint.make_model is None:
            model, length = self._config.model, self._config.data.sequence_length
            flops = flops_per_token(model, parameter_count(self._run.blueprint), length)
            speed["mfu"] = rate / devices * flops / peak
        return speed

    def _skipped(self, step: int, skipped: int, values: dict[str, float]) -> None:
        allowed = self._config.train.skips_allowed
        what = f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if skipped == 1:  # a bad state makes every step fail
            run = self._run
            run.checkpoints.require_sound(named_arrays(run.state), self._mesh, what)
        if skipped <= allowed:
            self._report.line(f"{what}; the update is skipped, {skipped} in a row of at most {allowed}")
            return
        remedy = "leave such steps out with --train.non-finite skip"
        if self._config.train.non_finite == "skip":
            remedy = f"allow more than --train.max-skipped {allowed} such steps in a row"
        raise NonFiniteError(
            f"{what}: not finite. Nothing of it entered the weights; {self._save_for_inspection(step)}. "
            f"{self._recovery_hint()}. Look for the cause (a learning rate too high, a bad sample), or {remedy}"
        )

    def _nonfinite_update(self, step: int, values: dict[str, float]) -> NonFiniteError:
        # The weights are lost, but not saved.
        loss, gradient, weights, rate = (values[n] for n in ("loss", "grad_norm", "param_norm", "learning_rate"))
        counts = sums(named_arrays(self._run.state)).not_finite()
        where = f": {describe_not_finite(counts)}" if counts else ""
        return NonFiniteError(
            f"step {step}: loss {loss:g}, gradient norm {gradient:g}, norm of the weights after it {weights:g}: the "
            f"update is not finite{where}. These weights are not saved. {self._recovery_hint()}. Lower the "
            f"learning rate, which was {rate:g}"
        )

    def _recovery_hint(self) -> str:
        self._run.checkpoints.describe_newest()  # waits for a save in progress
        saved = self._run.checkpoints.steps()
        if not saved:
            return "The same command starts again: there is no checkpoint yet"
        return f"The same command resumes from the checkpoint at step {saved[-1]}"

    def _save_for_inspection(self, step: int) -> str:
        try:
            where = self._save_state_and_batch(step)
        except (UserError, OSError) as error:
            return f"they and the batch could not be saved for inspection ({error})"
        return f"they and the batch are in {where}, from which a new run can start (--run.init-from)"

    def _save_state_and_batch(self, step: int) -> Path:
        # The state is still that before `step`. Replaces the files of an earlier failure.
        run, folder = self._run, self._config.run.dir / run_folder.NON_FINITE
        rows = {
            f"{name}_{shard.index[0].start or 0}": np.asarray(shard.data)
            for name, array in self._recent[step].items()
            for shard in array.addressable_shards
        }
        with run_folder.replacing(folder) as new:
            checkpoints = Checkpoints(new)
            checkpoints.save(step, run.blueprint.stored(run.state), self._mesh, self._info())
            checkpoints.close()
            np.savez(new / str(step) / f"batch_{jax.process_index()}.npz", **rows)  # type: ignore[arg-type]
        return folder / str(step)

    def _evaluate(self, *, log: bool = True) -> float:
        self._enter_phase(f"the evaluation at step {self._run.step}")
        with self._timing.lost_to("evaluate"):
            loss = self._validation_loss()
        run, perplexity = self._run, math.exp(min(loss, 700))
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
        self._enter_phase(f"the checkpoint at step {run.step}")
        if eval_loss is not None and not math.isfinite(eval_loss):
            eval_loss = None  # cannot be the best
        with self._timing.lost_to("save"):
            stored = run.blueprint.stored(run.state)
            run.checkpoints.save(run.step, stored, self._mesh, self._info(), eval_loss=eval_loss)
        self._saved_at = run.step

    def _info(self) -> dict[str, object]:
        run, sizes = self._run, mesh_sizes(self._mesh)
        info = run_folder.checkpoint_info(self._config, run.data.description, run.next_sample, sizes)
        info[MEAN_LOSS] = run.mean_loss.sums
        if self._verifier is not None:
            info[run_folder.VERIFIED] = self._verifier.verified
        if run.base is not None:
            info[run_folder.BASE] = run.base
        return info

    def _batches(self, rows: Samples, start: int, count: int) -> Iterator[Batch]:
        size = self._config.data.global_batch_size
        return batches(rows, self._mesh, global_batch_size=size, start=start, count=count)

    def _compile(self) -> TrainStep:
        started = time.perf_counter()
        self._enter_phase("compiling the training step")
        with self._timing.lost_to("compile"):
            traced = trace_step(self._config, self._run.blueprint, self._run.train_step, self._run.state)
            options = compiler_options(self._config, platform_of(self._mesh.devices.flat[0]))
            compiled: TrainStep = traced.lower().compile(compiler_options=options)
        self._report.line(f"compiled the training step in {time.perf_counter() - started:.1f} s")
        return compiled
