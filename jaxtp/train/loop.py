"""The training loop: step, log, evaluate and save until it is done.

One step is in flight while the host reads the numbers of the step before it, so that the devices never wait for the
host.
"""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.data.loader import Batch, batches
from jaxtp.data.rows import Samples
from jaxtp.entry import UserError, WrongNumbersError
from jaxtp.hf.runs import BASE
from jaxtp.launch.agreement import together
from jaxtp.launch.peers import working_on
from jaxtp.mesh import mesh_sizes, platform_of
from jaxtp.train import folder
from jaxtp.train.metrics import flops_per_token, peak_flops
from jaxtp.train.profiling import Profiler
from jaxtp.train.setup import Run
from jaxtp.train.state import parameter_count
from jaxtp.train.step import Scalars, TrainStep, trace_step
from jaxtp.train.stopping import Stopping
from jaxtp.train.stragglers import Stragglers
from jaxtp.train.trackers import Trackers
from jaxtp.train.verify import VERIFIED, Verifier, compiler_options
from jaxtp.train.watchdog import Watchdog


class NonFiniteError(WrongNumbersError):
    """A loss or a gradient that is not finite, where the configuration does not allow it; or an update."""


class Loop:
    """Steps a run to its end."""

    def __init__(self, run: Run):
        self._run = run
        self._config = config = run.config
        self._mesh = run.blueprint.mesh
        self._report, self._timing = run.report, run.timing
        with together():
            self._trackers = Trackers(config, run.step, run.report.line)
        self._profiler = Profiler(config.run.dir / folder.PROFILE, config.profile.start, config.profile.steps)
        self._watchdog = Watchdog(config.train.stall_seconds, config.train.stall_abort_seconds)
        self._stragglers = Stragglers(self._mesh, run.report.line)
        self._stopping = Stopping(run.interrupt, self._mesh)
        self._verifier: Verifier | None = None
        if config.train.verify_every:
            self._verifier = Verifier(config, run.blueprint, run.checkpoints, run.verified)
        self._in_flight: tuple[int, int, Scalars, list[jax.Array]] | None = None
        self._recent: dict[int, Batch] = {}
        self._saved_at = run.step if run.checkpoints.steps() else None

    def run_to_end(self) -> bool:
        """Trains, evaluates and saves, until `train.steps` or a signal; returns whether it has come to the end.

        Raises:
          NonFiniteError: a loss or gradient was not finite, and `train.non_finite` does not allow it; or an update.
          CorruptionError: a verification found devices that do not agree.
          ValueError: a `CheckpointError` or `RunFolderError` where files cannot be written, a `TokenError` of the data.
        """
        run, total = self._run, self._config.train.steps
        try:
            if run.step >= total:
                self._report.line(f"already at step {run.step}, and train.steps={total}: raise it to go on")
                self._evaluate(log=False)
                return True
            return self._train(total)
        finally:
            self._watchdog.stop()
            self._profiler.close()
            self._trackers.close()

    def _train(self, total: int) -> bool:
        run = self._run
        if run.step == 0:
            self._evaluate()  # what the run improves on; a run that resumes has it in its log
        train_step = self._compile()
        self._report.begin(run.step, total)
        batches = self._batches(run.data.train, run.next_sample, total - run.step)
        while run.step < total:
            self._begin(f"step {run.step + 1}")
            with self._timing.waiting_for_data():
                batch = next(batches)
            if self._profiler.first == run.step + 1:
                with self._timing.lost_to("profile"):
                    self._profiler.start()
            given = batch | self._stopping.flags()
            verifying = self._verifier is not None and self._verifier.due(run.step + 1)
            if verifying:
                self._begin_verification(train_step, batch, given)
            run.state, scalars, *checksums = train_step(run.state, given)
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
        self._save(self._evaluate())
        return True

    def _begin(self, what: str) -> None:
        """Notes what is done next, for those who watch that it ends."""
        self._watchdog.feed()
        working_on(what)

    def _between_steps(self) -> None:
        """Evaluates and saves where they are due; both wait for the step in flight."""
        evaluation, saving = self._config.eval.every, self._config.checkpoint.every
        loss = None
        if evaluation and self._run.step % evaluation == 0:
            self._finish_step()
            loss = self._evaluate()
        if saving and self._run.step % saving == 0:
            self._finish_step()
            self._save(loss)

    def _begin_verification(self, train_step: TrainStep, batch: Batch, given: Batch) -> None:
        """Makes the next step for the first time, and brings back the state from before it."""
        self._finish_step()
        run = self._run
        self._begin(f"the verification of step {run.step + 1}")
        assert self._verifier is not None
        with self._timing.lost_to("verify"):
            run.state = self._verifier.begin(run.step + 1, run.state, batch, lambda state: train_step(state, given))

    def _verify(self, verifier: Verifier, step: int, checksums: jax.Array) -> None:
        """Keeps the checksums of a step's gradients, and ends the verification of the step if there is one."""
        verifier.note(step, checksums)
        if verifier.due(step):
            self._begin(f"the verification of step {step}")
            with self._timing.lost_to("verify"):
                verifier.finish(self._run.state, checksums)
            self._report.line(f"step {step}: verified; copies agree on all devices, and so do two computations of it")

    def _stop(self, signal: str) -> None:
        self._finish_step()
        if self._saved_at != self._run.step:
            self._save(None)
        self._run.checkpoints.wait()
        self._report.line(f"stopped by {signal} at step {self._run.step} and saved; the same command goes on from here")

    def _finish_step(self) -> None:
        """Waits for the step in flight, shows its loss, and logs it if that is due."""
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
            raise self._overflown(step, values)
        tokens_per_step = self._config.data.global_batch_size * self._config.data.sequence_length
        total = self._config.train.steps
        self._report.step(step, values, tokens_per_step / self._timing.step_seconds)
        if step % self._config.train.log_every == 0 or step == total:
            record: dict[str, float | int] = {
                "step": step,
                **values,
                "tokens": samples * self._config.data.sequence_length,
                **self._speed(tokens_per_step),
            }
            record = self._stragglers.record(step, record, self._run.state)
            self._trackers.write(record)
            self._report.logged(record, total)

    def _speed(self, tokens_per_step: int) -> dict[str, float]:
        """Returns the speed and the times of the steps since the last record."""
        timing, devices = self._timing.record(), self._mesh.size
        rate = tokens_per_step / timing["step_seconds"]
        speed = {"tokens_per_second": rate, "tokens_per_second_per_device": rate / devices, **timing}
        peak = peak_flops(self._mesh.devices.flat[0])
        if math.isfinite(peak):
            model, length = self._config.model, self._config.data.sequence_length
            needed = flops_per_token(model, parameter_count(self._run.blueprint), length)
            speed["mfu"] = rate / devices * needed / peak
        return speed

    def _skipped(self, step: int, skipped: int, values: dict[str, float]) -> None:
        """Says that a step was not finite, or ends the run because of it."""
        allowed = self._config.train.skips_allowed
        what = f"step {step}: loss {values['loss']:g}, gradient norm {values['grad_norm']:g}"
        if skipped <= allowed:
            self._report.line(f"{what}; the update is skipped, {skipped} in a row of at most {allowed}")
            return
        way_out = "leave such steps out with --train.non-finite skip"
        if self._config.train.non_finite == "skip":
            way_out = f"allow more than --train.max-skipped {allowed} such steps in a row"
        raise NonFiniteError(
            f"{what}: not finite. Nothing of it entered the weights; {self._inspection(step)}. This one goes on from "
            f"{self._last_saved()}. Look for the cause (a learning rate too high, a bad sample), or {way_out}"
        )

    def _overflown(self, step: int, values: dict[str, float]) -> NonFiniteError:
        """Returns the error that ends a run whose weights an update has just made useless, before they are saved."""
        loss, gradient, weights, rate = (values[n] for n in ("loss", "grad_norm", "param_norm", "learning_rate"))
        return NonFiniteError(
            f"step {step}: loss {loss:g}, gradient norm {gradient:g}, norm of the weights after it {weights:g}: the "
            "update is not finite. It is in the weights, which are not saved; this run goes on from "
            f"{self._last_saved()}. Lower the learning rate, which was {rate:g}"
        )

    def _last_saved(self) -> str:
        saved = self._run.checkpoints.steps()
        return f"the checkpoint at step {saved[-1]}" if saved else "its beginning: there is no checkpoint yet"

    def _inspection(self, step: int) -> str:
        """Keeps the state and the batch for inspection; returns a text that says where."""
        try:
            where = self._keep_for_inspection(step)
        except (UserError, OSError) as error:
            return f"they and the batch could not be kept for inspection ({error})"
        return f"they and the batch are in {where}, from which a new run can start (--run.init-from)"

    def _keep_for_inspection(self, step: int) -> Path:
        """Saves the state, which later steps have left as it was before `step`, and the batch; returns the folder.

        They replace what an earlier failure left, at whichever step it was.
        """
        run, place = self._run, self._config.run.dir / folder.NON_FINITE
        rows = {
            f"{name}_{shard.index[0].start or 0}": np.asarray(shard.data)
            for name, array in self._recent[step].items()
            for shard in array.addressable_shards
        }
        with folder.replacing(place) as new:
            kept = Checkpoints(new)
            kept.save(step, run.blueprint.stored(run.state), self._mesh, self._info())
            kept.close()
            np.savez(new / str(step) / f"batch_{jax.process_index()}.npz", **rows)  # type: ignore[arg-type]
        return place / str(step)

    def _evaluate(self, *, log: bool = True) -> float:
        """Logs, shows and returns the validation loss of the weights as they are."""
        self._begin(f"the evaluation at step {self._run.step}")
        with self._timing.lost_to("evaluate"):
            loss = self._validation_loss()
        run = self._run
        perplexity = math.exp(min(loss, 700))
        if log:
            self._trackers.write({"step": run.step, "eval_loss": loss, "eval_perplexity": perplexity})
        unit = run.data.corpus.unit.removesuffix("s")
        self._report.line(f"step {run.step}: validation loss {loss:.4f} nats per {unit}, perplexity {perplexity:.4g}")
        return loss

    def _validation_loss(self) -> float:
        run, size = self._run, self._config.data.global_batch_size
        rows = run.data.validation(self._config.eval.batches, size)
        made = [run.eval_step(run.state, batch) for batch in self._batches(rows, 0, len(rows) // size)]
        sums = jax.device_get(made)  # all of them at once
        labels = sum(float(valid) for _, valid in sums)
        return sum(float(total) for total, _ in sums) / labels if labels else math.nan

    def _save(self, eval_loss: float | None) -> None:
        run = self._run
        self._begin(f"the checkpoint at step {run.step}")
        if eval_loss is not None and not math.isfinite(eval_loss):
            eval_loss = None  # no candidate for the best
        with self._timing.lost_to("save"):
            stored = run.blueprint.stored(run.state)
            run.checkpoints.save(run.step, stored, self._mesh, self._info(), eval_loss=eval_loss)
        self._saved_at = run.step

    def _info(self) -> dict[str, Any]:
        run, sizes = self._run, mesh_sizes(self._mesh)
        info = folder.checkpoint_info(self._config, run.data.description, run.next_sample, sizes)
        verified = {} if self._verifier is None else {VERIFIED: self._verifier.verified}
        return info | verified | ({} if run.base is None else {BASE: run.base})

    def _batches(self, rows: Samples, start: int, count: int) -> Iterator[Batch]:
        size = self._config.data.global_batch_size
        return batches(rows, self._mesh, global_batch_size=size, start=start, count=count)

    def _compile(self) -> TrainStep:
        started = time.perf_counter()
        self._begin("compiling the training step")
        with self._timing.lost_to("compile"):
            traced = trace_step(self._config, self._run.blueprint, self._run.train_step, self._run.state)
            options = compiler_options(self._config, platform_of(self._mesh.devices.flat[0]))
            compiled: TrainStep = traced.lower().compile(compiler_options=options)
        self._report.line(f"compiled the training step in {time.perf_counter() - started:.1f} s")
        return compiled
