"""Evaluations of a run: at step 0, every `eval.every` steps, after the last step, and on demand."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

import jax

from jaxtp.config.entry import in_thread
from jaxtp.distributed.agreement import is_multiprocess
from jaxtp.guards.hook import Hook, Loop
from jaxtp.mesh import platform_of
from jaxtp.train.loss import Objective, Terms

if TYPE_CHECKING:
    from jaxtp.train.loop import TrainingLoop

Compute = Callable[[], dict[str, float]]
"""Runs an evaluation and returns its metrics."""


class Evaluation(Hook):
    """Evaluates the parameters on the validation batches, if there are any."""

    def __init__(self, loop: "TrainingLoop"):
        self._loop = loop
        self._run = loop.run

    def after_dispatch(self, loop: Loop) -> None:
        """Evaluates after the last step, and after each `eval.every`-th."""
        run = self._run
        every = run.config.eval.every
        is_last = run.step == run.config.train.steps
        if not is_last and not (every and run.step % every == 0):
            return
        loop.finish_step()
        if is_last:
            then = "saves" if run.data.validation is None else "evaluates and saves"
            loop.line(f"step {run.step} is the last: {then}")
        self.report()

    def evaluate(self, compute: Compute | None = None) -> dict[str, float]:
        """Returns `eval_loss` and further metrics; by default of the current parameters."""
        with self._loop.phase(f"the evaluation at step {self._run.step}", "evaluate"):
            return (compute or self._begin())()

    def report(self, compute: Compute | None = None, *, is_logged: bool = True) -> None:
        """Evaluates, adds the metrics to the last step's, and prints them."""
        run = self._run
        loop = self._loop
        values = self.evaluate(compute)
        if not values:
            return
        if loop.last_step == run.step:
            loop.last_metrics = loop.last_metrics | values
        if is_logged:
            loop.trackers.write({"step": run.step, **values})
        text = f"step {run.step}: validation loss {values.pop('eval_loss'):.4f}"
        if run.objective.is_in_nats and run.data.tokens is not None:
            unit = run.data.tokens.corpus.unit.removesuffix("s")
            text += f" nats per {unit}, perplexity {values['eval_perplexity']:.4g}"
        else:
            text += "".join(f", {name} {value:.4g}" for name, value in values.items())
        loop.line(text)

    def report_during(self, block: ExitStack) -> None:
        """Evaluates in a thread during the block, and reports the result even if the block fails.

        On GPUs the evaluation comes first, because XLA times kernels while it compiles the step.
        """
        run = self._run
        if run.data.validation is None:
            return
        self._loop.line("evaluating at step 0")
        if is_multiprocess() or platform_of(run.blueprint.mesh.devices.flat[0]) != "cpu":
            self.report(lambda: in_thread(self._begin()).result())
            return
        with self._loop.phase("the evaluation at step 0", "evaluate"):
            evaluation = in_thread(self._begin())

        def finish(kind: type[BaseException] | None, *_: object) -> None:
            # A second Ctrl-C does not wait for the evaluation.
            if kind is None or issubclass(kind, Exception):
                self.report(evaluation.result)

        block.push(finish)

    def _begin(self) -> Compute:
        # Traces in the calling thread, because JAX's context is local to a thread.
        run = self._run
        state = run.state
        batches = run.data.validation_batches(run.blueprint.mesh, run.config.eval.batches)
        first = next(batches, None)
        if first is None:
            return dict
        lowered = run.eval_step.lower(state, first, 0)

        def compute() -> dict[str, float]:
            step = lowered.compile()
            results = [
                step(state, batch, number) for number, batch in enumerate(chain([first], batches))
            ]
            return evaluation_metrics(jax.device_get(results), run.objective)

        return compute


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
