"""The start of the training loop: checks of state and loss, and the compilation."""

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import jax

from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.logical import finite_arrays
from jaxtp.config.entry import UserError, in_thread
from jaxtp.config.python_object import user_code_error, users_lines
from jaxtp.data.loader import split
from jaxtp.guards.hook import Hook, Loop, NextStep
from jaxtp.mesh import platform_of
from jaxtp.train.setup import Run
from jaxtp.train.step import TrainStep, compiler_options

if TYPE_CHECKING:
    from jaxtp.train.loop import TrainingLoop


def require_sound_start(loop: Loop, run: Run) -> None:
    """Raises `NonFiniteError` if the initial state is not finite, which the first step would be
    blamed for."""
    advice = "begin with other weights"
    if run.step:
        saved = run.checkpoints.folder / str(run.step)
        advice = (
            f"{saved} has them: move it away, and the same command resumes from the checkpoint "
            "before it"
        )
    error = f"step {run.step}: the run cannot start from this state"
    loop.line("checking that the state is finite")
    with loop.lost_to("start"):
        sums = Sums(finite_arrays(run.state))
        run.checkpoints.require_sound(sums, run.blueprint.mesh, error, advice)


def compile_step(loop: "TrainingLoop", run: Run) -> TrainStep:
    """Compiles the training step; a new run is evaluated meanwhile."""
    platform = platform_of(run.blueprint.mesh.devices.flat[0])
    with ExitStack() as block:
        # The log of a resumed run has this evaluation already.
        if run.step == 0:
            loop.evaluation.report_during(block)
        loop.line("compiling the training step")
        block.enter_context(loop.phase("compiling the training step", "compile"))
        started = time.perf_counter()
        batch = split(run.data.train.shapes, run.blueprint.mesh)
        try:
            lowered = run.train_step.lower(run.leaves, batch, **loop.stopping.flags())
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
            raise user_code_error(f"compiling the training step for {platform}", error) from error
        seconds = time.perf_counter() - started
    loop.line(f"compiled the training step in {seconds:.1f} s")
    return compiled


class SumsCheck(Hook):
    """Checks before the first step that a user's loss is a sum over rows."""

    def __init__(self, run: Run):
        self._run = run
        self._first = run.step + 1

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """Raises ConfigError if the loss is a mean, or depends on the micro-batches."""
        run = self._run
        if step.index != self._first or run.objective.is_by_row:
            return
        from jaxtp.train.loss_checks import require_sums

        with loop.lost_to("start"):
            warning = require_sums(
                run.objective, run.blueprint, run.state, step.batch, run.config.train.accumulation
            )
        if warning:
            loop.line(warning)
