"""The training loop: prepare a run, then step, log, evaluate and save until it is done."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.data.corpus import Corpus, load_corpus, require_length
from jaxtp.data.loader import Batch, abstract_batch, batches, shuffled_samples
from jaxtp.mesh import make_mesh, mesh_sizes
from jaxtp.train import folder
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig, check, check_platform, planned_mesh
from jaxtp.train.report import Report, summary
from jaxtp.train.state import Blueprint, parameter_names, plan_state
from jaxtp.train.step import EvalStep, Scalars, StepSettings, TrainStep, make_eval_step, make_train_step


@dataclass
class Run:
    """A prepared run: what the loop needs, with the state on its devices."""

    config: TrainConfig
    mesh: Mesh
    corpus: Corpus
    blueprint: Blueprint
    schedule: optax.Schedule
    checkpoints: Checkpoints
    state: nnx.State
    step: int
    """Updates made so far."""
    next_sample: int
    """Global index of the first sample of the next step."""


def train(config: TrainConfig) -> float:
    """Trains until `config.train.steps`, from the newest checkpoint in `config.run.dir` if there is one.

    Returns:
      The final validation loss, in nats per token.

    Raises:
      ValueError: a user's mistake (`ConfigError`, `MeshError`, `CorpusError`, `RunFolderError`,
        `CheckpointError`), before anything in the folder is changed.
    """
    if (sizes := planned_mesh(config.mesh)) is not None:
        check(config, sizes)
    mesh = make_mesh(config.mesh.dp, config.mesh.fsdp, config.mesh.tp)
    check(config, mesh_sizes(mesh))
    check_platform(config.model, mesh.devices.flat[0].platform)
    with jax.set_mesh(mesh), Report() as report:
        run = prepare(config, mesh, report)
        try:
            return Loop(run, report).run_to_end()
        finally:
            run.checkpoints.close()


def prepare(config: TrainConfig, mesh: Mesh, report: Report) -> Run:
    """Reads the data, plans the state, and creates or restores it."""
    corpus = load_corpus(config.data.path)
    require_length(corpus, config.data.sequence_length)
    folder.prepare(config.run.dir)
    checkpoints = Checkpoints(config.run.dir / folder.CHECKPOINTS, keep=config.checkpoint.keep)
    latest = checkpoints.latest_step()
    info = {"next_sample": 0} if latest is None else checkpoints.info(latest)
    changed = [] if latest is None else folder.check_resumable(config, corpus.describe(), info)

    optimizer = optimizers.build(config.optimizer, config.train.steps)
    blueprint = plan_state(config.model, optimizer, mesh)
    optimizers.check_groups(config.optimizer, parameter_names(blueprint))
    report.line(summary(config, mesh, corpus, blueprint))
    if latest is None:
        state = blueprint.create(config.run.seed)
    else:
        state = checkpoints.restore(latest, blueprint.abstract, mesh)
        report.line(f"resumed from the checkpoint at step {latest}")
        for line in changed:
            report.line(f"  changed since: {line}")
    folder.write_config(config)
    schedule = optimizers.learning_rate(config.optimizer, config.train.steps)
    return Run(config, mesh, corpus, blueprint, schedule, checkpoints, state, latest or 0, info["next_sample"])


class Loop:
    """Steps a prepared run to its end.

    Args:
      run: what to train.
      report: where to show it.

    One step is in flight while the numbers of the step before it are read: the devices never wait for the host.
    """

    def __init__(self, run: Run, report: Report):
        self._run = run
        self._config = run.config
        self._report = report
        self._metrics = folder.MetricsFile(run.config.run.dir / folder.METRICS, resumed_at=run.step)
        self._clock = StepClock()
        self._in_flight: tuple[int, int, Scalars] | None = None
        self._eval_step: EvalStep | None = None

    def run_to_end(self) -> float:
        """Trains, then evaluates and saves; returns the final validation loss in nats per token."""
        run, total = self._run, self._config.train.steps
        try:
            if run.step >= total:
                self._report.line(f"already at step {run.step} of {total}: raise --train.steps to go on")
            else:
                self._train(total)
            return self._evaluate()
        finally:
            self._metrics.close()

    def _train(self, total: int) -> None:
        run = self._run
        train_step = self._compile()
        self._report.start(run.step, total)
        self._clock.skip()
        for batch in self._batches(total - run.step):
            run.state, scalars = train_step(run.state, batch)
            run.step += 1
            run.next_sample += self._config.data.global_batch_size
            self._finish_step()
            self._in_flight = run.step, run.next_sample, scalars
            self._between_steps(last=run.step == total)

    def _between_steps(self, *, last: bool) -> None:
        """Evaluates and saves where they are due; both wait for the step in flight."""
        evaluation, saving = self._config.eval.every, self._config.checkpoint.every
        if not last and evaluation and self._run.step % evaluation == 0:
            self._finish_step()
            self._evaluate()
            self._clock.skip()
        if last or (saving and self._run.step % saving == 0):
            self._finish_step()
            self._save()
            self._clock.skip()

    def _finish_step(self) -> None:
        """Waits for the step in flight, shows its loss, and logs it if that is due."""
        if self._in_flight is None:
            return
        (step, samples, scalars), self._in_flight = self._in_flight, None
        values = {name: float(value) for name, value in scalars.items()}
        self._clock.tick()
        tokens_per_step = self._config.data.global_batch_size * self._config.data.sequence_length
        total = self._config.train.steps
        self._report.step(step, values["loss"], tokens_per_step / self._clock.step_seconds)
        if step % self._config.train.log_every == 0 or step == total:
            record = {
                "step": step,
                **values,
                "tokens": samples * self._config.data.sequence_length,
                "tokens_per_second": tokens_per_step / self._clock.step_seconds,
                "step_seconds": self._clock.step_seconds,
            }
            self._metrics.write(record)
            self._report.logged(record, total)
            self._clock.restart()

    def _evaluate(self) -> float:
        """The validation loss of the weights as they are: logged, shown and returned."""
        run, settings = self._run, self._config.eval
        if self._eval_step is None:
            self._eval_step = make_eval_step(run.blueprint)
        samples = shuffled_samples(run.corpus.validation, self._config.data.sequence_length, seed=0)
        sums = [
            self._eval_step(run.state, batch)
            for batch in batches(
                samples,
                run.mesh,
                global_batch_size=self._config.data.global_batch_size,
                start=0,
                count=settings.batches,
            )
        ]
        loss = sum(float(total) for total, _ in sums) / sum(float(valid) for _, valid in sums)
        self._metrics.write({"step": run.step, "eval_loss": loss})
        self._report.line(f"step {run.step}: validation loss {loss:.4f} nats per byte")
        return loss

    def _save(self) -> None:
        run = self._run
        info = folder.checkpoint_info(self._config, run.corpus.describe(), run.next_sample)
        run.checkpoints.save(run.step, run.state, run.mesh, info)

    def _batches(self, count: int) -> Iterator[Batch]:
        data = self._config.data
        return batches(
            shuffled_samples(self._run.corpus.train, data.sequence_length, self._config.run.seed),
            self._run.mesh,
            global_batch_size=data.global_batch_size,
            start=self._run.next_sample,
            count=count,
        )

    def _compile(self) -> TrainStep:
        run, data = self._run, self._config.data
        started = time.perf_counter()
        settings = StepSettings(
            accumulation=self._config.train.accumulation, z_loss=self._config.train.z_loss, seed=self._config.run.seed
        )
        step = make_train_step(run.blueprint, run.schedule, settings)
        batch = abstract_batch(run.mesh, data.global_batch_size, data.sequence_length)
        compiled: TrainStep = step.lower(run.state, batch).compile()
        self._report.line(f"compiled the training step in {time.perf_counter() - started:.1f} s")
        return compiled


class StepClock:
    """The mean time of a step since `restart`, not counting what is skipped."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.restart()

    def restart(self) -> None:
        """Starts a new mean."""
        self._seconds, self._steps = 0.0, 0

    def skip(self) -> None:
        """Leaves out the time since the last tick: an evaluation, a save."""
        self._last = time.perf_counter()

    def tick(self) -> None:
        """Counts a step that has just finished."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._steps += 1
        self._last = now

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step, after at least one tick."""
        return self._seconds / self._steps
