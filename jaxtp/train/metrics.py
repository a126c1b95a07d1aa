"""Step times, mean loss, `metrics.jsonl` and trackers of a run."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import re
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import jax
import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter

from jaxtp.config.files import open_directly, write_atomically
from jaxtp.config.python_object import describe_value
from jaxtp.config.reading import MAX_JSON, read_bytes
from jaxtp.config.schema import ConfigError
from jaxtp.train.run_folder import writing

MEAN_LOSS = "mean_loss"  # Key of `MeanLoss.sums` in a checkpoint's info
Record = Mapping[str, float | int]  # Metrics by name

METRICS = "metrics.jsonl"
_MAX_BYTES = 2**30  # Maximum bytes of `metrics.jsonl`
TENSORBOARD = "tensorboard"
_TRACKER_IDS = "trackers.json"
_FLUSH_SECONDS = 30.0  # Between flushes of TensorBoard's file, which wait for the disk

OWN = re.compile(
    r"step|(eval_)?loss|eval_perplexity|learning_rate|(grad|param)_norm(/.*)?|skipped|loss_tokens"
    r"|loss_weight|tokens|rows|(tokens|rows)_per_second.*|step_seconds.*|data_wait_seconds"
    r"|slowest_device|goodput|mfu|lost_to_.*|memory_bytes|memory_peak_bytes"
)
"""Names of the metrics that a run logs itself, and that no user's metric may have."""


class Timing:
    """Measures step times, waits for data, and time lost between steps, in seconds.

    A step lasts from the end of the previous step to its own end, both as the host sees them,
    except for time `lost_to` a cause.

    Args:
      clock: returns seconds since an arbitrary instant.
      began: the time when the command began; now by default.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, began: float | None = None
    ) -> None:
        self._clock = clock
        self._last = clock()
        self._started = self._last if began is None else began
        self._useful = 0.0
        self._lost: defaultdict[str, float] = defaultdict(float)
        self._steps: list[float] = []
        self._waited = 0.0

    @contextmanager
    def lost_to(self, cause: str) -> Iterator[None]:
        """Counts the time of the block as lost to `cause`."""
        started = self._clock()
        try:
            yield
        finally:
            self._last = self._clock()
            self._lost[cause] += self._last - started

    def end_startup(self) -> None:
        """Counts the time until now as lost to the start."""
        self._last = self._clock()
        self._lost["start"] = self._last - self._started

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measures a wait inside a step."""
        started = self._clock()
        yield
        self._waited += self._clock() - started

    def tick(self) -> None:
        """Ends a step."""
        now = self._clock()
        self._steps.append(now - self._last)
        self._useful += now - self._last
        self._last = now

    @property
    def step_seconds(self) -> float:
        """Mean step time since the last `record`; needs a step."""
        return sum(self._steps) / len(self._steps)

    @property
    def total_seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    def record(self) -> dict[str, float]:
        """Returns statistics of the steps since the last record.

        Times are in seconds. `goodput` and `lost_to_CAUSE` are fractions of the time since the
        start.
        """
        steps = np.array(self._steps)
        waited = self._waited
        self._steps = []
        self._waited = 0.0
        p50, p90 = np.percentile(steps, (50, 90)).tolist()
        wall = self.total_seconds
        return {
            "step_seconds": float(steps.mean()),
            "step_seconds_p50": p50,
            "step_seconds_p90": p90,
            "step_seconds_max": float(steps.max()),
            "data_wait_seconds": waited / len(steps),
            "goodput": self._useful / wall,
            **{f"lost_to_{cause}": seconds / wall for cause, seconds in self._lost.items()},
        }


class MeanLoss:
    """Mean loss per token since the last record. A checkpoint stores its `sums`."""

    def __init__(self, sums: Sequence[float] = ()):
        # Summed loss, and number of tokens
        self.sums = list(sums) or [0.0, 0.0]

    def add(self, loss: float, tokens: float) -> None:
        """Adds a step's mean loss over its tokens."""
        self.sums = [self.sums[0] + loss * tokens, self.sums[1] + tokens]

    def record(self, loss: float) -> float:
        """Returns the mean, or `loss` if no step was added, and starts again."""
        total, tokens = self.sums
        self.sums = [0.0, 0.0]
        return total / tokens if tokens else loss


class _TensorBoard:
    # Event files in `tensorboard/`. Events from step `logs_from` on replace a killed run's.

    def __init__(self, run: Path, settings: Mapping[str, Any], logs_from: int):
        folder = run / TENSORBOARD
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        # tensorboardX's own writer has a thread that dies on a full disk; its queue then blocks
        # forever.
        self._writer = RecordWriter(str(folder / name))
        self._add(0, file_version="brain.Event:2")
        self._add(logs_from, session_log=SessionLog(status=SessionLog.START))
        self._flushed = -math.inf
        self.close = self._writer.close

    def write(self, step: int, values: Record) -> None:
        summary = Summary()
        for name, value in values.items():
            tag = re.sub(r"[^-/\w.]", "_", name).lstrip("/")
            summary.value.add(tag=tag, simple_value=value)
        self._add(step, summary=summary)
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def _add(self, step: int, **content: object) -> None:
        self._writer.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())


class _WeightsAndBiases:
    # A W&B run, which resumes with this run; `WANDB_MODE=offline` keeps it in the run's folder.

    def __init__(self, run: Path, settings: Mapping[str, Any], logs_from: int):
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=settings["metrics"]["project"],
                name=run.name,
                id=run_id(run / _TRACKER_IDS, "wandb", lambda: uuid.uuid4().hex[:12]),
                resume="allow",
                dir=run,
                config=settings,
            )
        except wandb.Error as error:
            raise ConfigError(
                f"metrics.trackers: wandb cannot start ({error}); run 'wandb login' first, or set "
                "WANDB_MODE=offline"
            ) from None
        # W&B's own step may only increase, but a resumed run repeats steps.
        self._run.define_metric("*", step_metric="step")
        # Waits for the upload
        self.close = self._run.finish

    def write(self, step: int, values: Record) -> None:
        self._run.log({"step": step, **values})


class _MLflow:
    # An MLflow run, which resumes with this run, at `MLFLOW_TRACKING_URI`.

    def __init__(self, run: Path, settings: Mapping[str, Any], logs_from: int):
        mlflow = importlib.import_module("mlflow")
        self._metric = mlflow.entities.Metric
        project = settings["metrics"]["project"]

        def create() -> str:
            experiment = client.get_experiment_by_name(project)
            number = experiment.experiment_id if experiment else client.create_experiment(project)
            created: str = client.create_run(number, run_name=run.name).info.run_id
            return created

        try:
            self._client = client = mlflow.MlflowClient()
            self._run = run_id(run / _TRACKER_IDS, "mlflow", create)
            client.update_run(self._run, "RUNNING")
            client.log_dict(self._run, dict(settings), "config.json")
        except mlflow.MlflowException as error:
            raise ConfigError(
                f"metrics.trackers: mlflow cannot start ({error}); name a server by "
                "MLFLOW_TRACKING_URI=http://HOST:PORT"
            ) from None
        self.close: Callable[[], object] = partial(client.set_terminated, self._run)

    def write(self, step: int, values: Record) -> None:
        milliseconds = int(1000 * time.time())
        # MLflow refuses other characters, such as those of patterns.
        metrics = [
            self._metric(re.sub(r"[^\w\-./ ]", "_", name), value, milliseconds, step)
            for name, value in values.items()
        ]
        self._client.log_batch(self._run, metrics)


class Tracker(Protocol):
    """A tracker on process 0.

    If its constructor fails, the run ends; if `write` fails, only the tracker is closed.
    """

    close: Callable[[], object]

    def write(self, step: int, values: Record) -> None:
        """Logs the finite metrics of a step, which a killed run may have logged before."""


TRACKERS: dict[str, Callable[[Path, Mapping[str, Any], int], Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "mlflow": _MLflow,
}
"""Trackers by name: a `TrackerName`, a package, and an extra of jaxtp. The arguments are the folder
and all settings of the run, as plain values, and the first step that is logged."""


def check_installed(names: Sequence[str]) -> None:
    """Raises ConfigError if a tracker is not installed; imports nothing."""
    # The package for tensorboard, tensorboardX, is a dependency of jaxtp.
    for name in names:
        if name != "tensorboard" and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"metrics.trackers: {name} is not installed; pip install 'jaxtp[{name}]'"
            )


class Trackers:
    """Writes metrics to `metrics.jsonl` and to trackers, on process 0.

    Non-finite metrics are null in the file. A tracker that fails is closed.

    Args:
      run: the run's folder.
      settings: all settings of the run, as plain values.
      resumed_at: step of the checkpoint, or 0.

    Raises:
      RunFolderError: a file in the run's folder cannot be written.
    """

    def __init__(
        self,
        run: Path,
        settings: Mapping[str, Any],
        resumed_at: int,
        warn: Callable[[str], None],
    ):
        self._warn = warn
        self._path = run / METRICS
        self._file: IO[str] | None = None
        self._trackers: dict[str, Tracker] = {}
        if jax.process_index() != 0:
            return
        # A killed run may have logged steps after its last checkpoint. This run repeats them, so
        # their records are removed.
        logs_from = resumed_at + 1 if resumed_at else 0
        with writing(self._path):
            before = _lines(self._path) if self._path.exists() else []
            earlier = [line for line in before if _numbers(line).get("step", math.inf) < logs_from]
            write_atomically(self._path, "".join(line + "\n" for line in earlier).encode())
            self._file = open_directly(self._path, "a")
        try:
            for name in settings["metrics"]["trackers"]:
                with writing(run / name):
                    self._trackers[name] = TRACKERS[name](run, settings, logs_from)
        except BaseException:
            self.close()
            raise

    def write(self, record: Record) -> None:
        """Writes a record with its `step` to the file, which is flushed, and to each tracker."""
        if self._file is None:
            return
        finite = {name: value for name, value in record.items() if math.isfinite(value)}
        with writing(self._path):
            self._file.write(json.dumps(dict.fromkeys(record) | finite) + "\n")
            self._file.flush()
        step = int(finite.pop("step"))
        self._for_each(lambda tracker: tracker.write(step, finite))

    def close(self) -> None:
        """Closes the trackers and the file; later records are dropped."""
        self._for_each(lambda tracker: tracker.close())
        if self._file is not None:
            # A failed write, which was reported, may fail again here.
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _for_each(self, action: Callable[[Tracker], object]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            # A service's client may raise anything.
            except Exception as error:
                with contextlib.suppress(Exception):
                    self._trackers.pop(name).close()
                self._warn(
                    f"metrics.trackers: {name} failed ({error}) and is closed; {METRICS} has "
                    "every number"
                )


def run_id(path: Path, tracker: str, create: Callable[[], str]) -> str:
    """Returns the id of a tracker's run that the file stores; creates one if it has none yet."""
    ids: dict[str, str] = {}
    # There is no file yet, or a kill cut it short.
    with contextlib.suppress(FileNotFoundError, ValueError, TypeError):
        ids = dict(json.loads(read_bytes(path, MAX_JSON)))
    if tracker not in ids:
        ids[tracker] = create()
        write_atomically(path, json.dumps(ids).encode())
    return ids[tracker]


def _lines(path: Path) -> list[str]:
    return read_bytes(path, _MAX_BYTES).decode(errors="replace").splitlines()


def _numbers(line: str) -> dict[str, float]:
    try:
        record = json.loads(line, parse_int=float)
    # A kill cut the line short, or no run wrote it.
    except (ValueError, RecursionError):
        record = {}
    items = record.items() if isinstance(record, dict) else ()
    return {name: value for name, value in items if isinstance(value, float)}


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Returns a run's complete records; raises OSError if there is no file."""
    return list(filter(None, map(_numbers, _lines(run / METRICS))))


def last_values(run: Path) -> dict[str, float]:
    """Returns the last value of each metric."""
    values: dict[str, float] = {}
    for record in read_metrics(run):
        values |= record
    return values


def check_names(metrics: Iterable[object], who: str) -> None:
    """Raises ConfigError if a metric has the name of a metric that a run logs itself."""
    for name in metrics:
        if not isinstance(name, str):
            raise ConfigError(f"{who} a metric named {name!r}; a name must be a string")
        if OWN.fullmatch(name):
            raise ConfigError(
                f"{who} a metric named {name!r}, which a run logs itself; give it another name"
            )


def logged_numbers(metrics: object, who: str) -> dict[str, float]:
    """Returns a user's metrics as floats; raises ConfigError unless they are numbers by name."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{who} {describe_value(metrics)}; metrics are a dict of numbers by name")
    check_names(metrics, who)
    return {name: _number(name, value, who) for name, value in metrics.items()}


def _number(name: str, value: Any, who: str) -> float:
    is_text = isinstance(value, str | bytes)
    if not is_text and tuple(getattr(value, "shape", ())) == ():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value)
    text = f"{describe_value(value)}, a {type(value).__name__}" if is_text else describe_type(value)
    raise ConfigError(
        f"{who} a metric {name!r} that is {text}; it should be a number, or an array of shape ()"
    )


def describe_type(value: object) -> str:
    """Returns what kind of value something is: `an array float32[3]`."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {value.dtype}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"{len(value)} values"
    return f"a {type(value).__name__}"
