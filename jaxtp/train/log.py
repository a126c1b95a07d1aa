"""The record of a run: lines or a progress bar, `metrics.jsonl` and trackers."""

from typing import Any

from jaxtp.guards.hook import FinishedStep, Hook, Loop
from jaxtp.mesh import platform_of
from jaxtp.train.metrics import MEAN_LOSS, Trackers
from jaxtp.train.setup import Run


class Log(Hook):
    """Shows each step, and logs the first, the last, and each `train.log_every`-th step."""

    def __init__(self, run: Run, trackers: Trackers):
        self._run = run
        self._trackers = trackers
        self._first = run.step + 1
        self._total = run.config.train.steps
        self._per_step = run.data.train.global_batch_size * run.data.units_per_row
        self._is_cpu = platform_of(run.blueprint.mesh.devices.flat[0]) == "cpu"

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """Shows a step, and logs it if it is due."""
        run = self._run
        unit = run.data.unit
        if step.weight and not step.skipped:
            run.mean_loss.add(step.metrics["loss"], step.weight)
        rate = self._per_step / run.timing.step_seconds
        until_evaluation = self._until_evaluation(step.index)
        run.report.step(step.index, step.metrics, f"{rate:,.0f} {unit}/s", until_evaluation)
        is_first = step.index == self._first
        if step.index in (1, self._total) or step.index % run.config.train.log_every == 0:
            record: dict[str, float] = {
                "step": step.index,
                **step.metrics,
                "loss": run.mean_loss.record(step.metrics["loss"]),
                unit: self._progress(step.index),
                **self._speed(),
            }
            loop.complete_record(record)
            self._trackers.write(record)
            run.report.log(record, self._total, unit, is_first=is_first)
        elif is_first:
            # The first step is shown, but not logged: the log must equal the log of an
            # uninterrupted run.
            speed = {f"{unit}_per_second": rate, "step_seconds": run.timing.step_seconds}
            record = {"step": step.index, **step.metrics, **speed}
            run.report.log(record, self._total, unit, is_first=True)
        if is_first:
            counts = run.program_counts
            loop.line(
                f"the first step ended {run.timing.total_seconds:.1f} s after the start: "
                f"{counts.compiled} programs compiled, {counts.read} read from the cache"
            )

    def at_save(self, info: dict[str, Any]) -> None:
        """Stores the sums of the losses since the last record."""
        info[MEAN_LOSS] = self._run.mean_loss.sums

    def _until_evaluation(self, step: int) -> float | None:
        # Seconds until the next evaluation; None if it is after the last step.
        every = self._run.config.eval.every
        if self._run.data.validation is None or not every:
            return None
        num_steps = every - step % every
        if step + num_steps >= self._total:
            return None
        return num_steps * self._run.timing.step_seconds

    def _progress(self, step: int) -> int:
        # Tokens or rows up to a finished step. `run.position` already counts the step in flight.
        run = self._run
        return run.position.sample * run.data.units_per_row - (run.step - step) * self._per_step

    def _speed(self) -> dict[str, float]:
        run = self._run
        mesh = run.blueprint.mesh
        timing = run.timing.record()
        unit = run.data.unit
        rate = self._per_step / timing["step_seconds"]
        speed = {
            f"{unit}_per_second": rate,
            f"{unit}_per_second_per_device": rate / mesh.size,
            **timing,
        }
        if not self._is_cpu:
            from jaxtp.train.performance import utilization

            speed |= utilization(mesh, run.row_flops * rate / run.data.units_per_row)
        return speed
