"""Writes the numbers of a run: to `metrics.jsonl` always, and to the trackers that the configuration names."""

import contextlib
import importlib
import importlib.util
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import jax
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from jaxtp.config import ConfigError, to_plain
from jaxtp.files import write_atomically
from jaxtp.train.config import TrainConfig
from jaxtp.train.folder import writing

Record = Mapping[str, float | int]
"""Numbers by name; `step` is the one that they belong to."""

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"
_IDENTITIES = "trackers.json"
_FLUSH_SECONDS = 30.0
"""Seconds between flushes of TensorBoard's file, each of which waits for the disk."""


class Jsonl:
    """`metrics.jsonl`: an object for each record, written through at once; a number that is not finite is null.

    Raises:
      RunFolderError: it cannot be written.
    """

    def __init__(self, config: TrainConfig, logs_from: int):
        self._path = config.run.dir / METRICS
        with writing(self._path):
            before = self._path.read_text(encoding="utf-8", errors="replace") if self._path.exists() else ""
            kept = [line for line in before.splitlines() if _step(line) < logs_from]
            write_atomically(self._path, "".join(line + "\n" for line in kept).encode())
            self._file: TextIO = self._path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends one object."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        with writing(self._path):
            self._file.write(json.dumps(finite) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # that of a write that failed, which has been reported
            self._file.close()


class TensorBoard:
    """Event files in `tensorboard/`; steps that are made again are marked to be forgotten.

    The run writes them itself: tensorboardX's own thread ends where it meets a full disk, and its queue then blocks
    whoever writes.
    """

    def __init__(self, config: TrainConfig, logs_from: int):
        folder = config.run.dir / TENSORBOARD
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(str(folder / name))
        self._add(0, file_version="brain.Event:2")
        self._add(logs_from, session_log=SessionLog(status=SessionLog.START))
        self._flushed = -math.inf

    def write(self, record: Record) -> None:
        """Adds a scalar for each number that is finite."""
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                self._add(record["step"], summary=scalar(name, value))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()

    def _add(self, step: float, **what: Any) -> None:
        self._writer.write(Event(wall_time=time.time(), step=int(step), **what).SerializeToString())


class WeightsAndBiases:
    """A run of W&B, continued when this one resumes; `WANDB_MODE=offline` keeps it in the run's folder.

    Raises:
      ConfigError: W&B refuses to start, as without an account.
    """

    def __init__(self, config: TrainConfig, logs_from: int):
        wandb = importlib.import_module("wandb")
        try:
            self._run = wandb.init(
                project=config.metrics.project,
                name=config.run.dir.name,
                id=_identity(config.run.dir, "wandb", uuid.uuid4().hex[:12]),
                resume="allow",
                dir=config.run.dir,
                config=to_plain(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"metrics.trackers: wandb cannot start ({error}); run 'wandb login' first, or set WANDB_MODE=offline"
            ) from None
        self._run.define_metric("*", step_metric="step")  # its own step only counts up: a repeated one would be lost

    def write(self, record: Record) -> None:
        """Adds a row of history."""
        self._run.log(dict(record))

    def close(self) -> None:
        """Ends the run; waits for the upload."""
        self._run.finish()


class Aim:
    """A run in the Aim repository beside the run's folder, which `aim up --repo` shows; continued when it resumes."""

    def __init__(self, config: TrainConfig, logs_from: int):
        aim = importlib.import_module("aim")
        self._run = aim.Run(
            run_hash=_identity(config.run.dir, "aim", None),
            repo=str(config.run.dir.parent),
            experiment=config.metrics.project,
            system_tracking_interval=None,
            capture_terminal_logs=False,
        )
        _identity(config.run.dir, "aim", self._run.hash)
        self._run.name = config.run.dir.name
        self._run["config"] = to_plain(config)

    def write(self, record: Record) -> None:
        """Tracks each number that is finite; Aim replaces what it has of the same step."""
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                self._run.track(value, name=name, step=record["step"])

    def close(self) -> None:
        """Writes what is pending."""
        self._run.close()


Tracker = TensorBoard | WeightsAndBiases | Aim
_BY_NAME: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "aim": Aim}
_EXTRAS = {"wandb", "aim"}
"""Trackers that are packages of their own; their names are also those of pip's extras."""


def check_installed(names: Sequence[str]) -> None:
    """Checks, importing nothing, that every tracker is installed.

    Raises:
      ConfigError: one needs an extra.
    """
    for extra in (name for name in names if name in _EXTRAS):
        if importlib.util.find_spec(extra) is None:
            raise ConfigError(f"metrics.trackers: {extra} is not installed; pip install 'jaxtp[{extra}]'")


class Trackers:
    """Writes to `metrics.jsonl` and to other trackers, on process 0. One of the others that fails gets no more.

    Args:
      config: the run; `metrics.trackers` names the others.
      resumed_at: the step that the run continues from; 0 for one that begins. Later steps, logged by a run that was
        killed before its next checkpoint, are made, and logged, again: a tracker that can forgets the first record of
        them. So is the evaluation at step 0 of a run that begins again.
      warn: takes a message for one that failed.

    Raises:
      RunFolderError: a file in the run's folder cannot be written.
    """

    def __init__(self, config: TrainConfig, resumed_at: int, warn: Callable[[str], None]):
        first = jax.process_index() == 0
        logs_from = resumed_at + 1 if resumed_at else 0
        self._warn = warn
        self._log = Jsonl(config, logs_from) if first else None
        self._others: dict[str, Tracker] = {}
        try:
            for name in config.metrics.trackers if first else ():
                with writing(config.run.dir / name):
                    self._others[name] = _BY_NAME[name](config, logs_from)
        except BaseException:
            self.close()
            raise

    def write(self, record: Record) -> None:
        """Writes a record to each of them."""
        if self._log is not None:
            self._log.write(record)
        self._each(lambda tracker: tracker.write(record))

    def close(self) -> None:
        """Closes each of them."""
        self._each(lambda tracker: tracker.close())
        if self._log is not None:
            self._log.close()

    def _each(self, action: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._others.items()):
            try:
                action(tracker)
            except Exception as error:  # whatever a service's client meets
                with contextlib.suppress(Exception):
                    self._others.pop(name).close()
                self._warn(f"metrics.trackers: {name} failed ({error}) and gets no more; {METRICS} has every number")


def _identity(folder: Path, name: str, new: str | None) -> str | None:
    """Returns a service's name of the run in this folder: the one that is stored there, or `new`, which it stores."""
    path = folder / _IDENTITIES
    try:
        stored: dict[str, str] = dict(json.loads(path.read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):  # none yet, or cut short
        stored = {}
    if name not in stored and new is not None:
        stored[name] = new
        write_atomically(path, json.dumps(stored).encode())
    return stored.get(name)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut short by a kill: never kept
