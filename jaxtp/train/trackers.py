"""Where the numbers of a run go: `metrics.jsonl` always, and whatever else the configuration names."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TextIO

import jax
from tensorboardX import SummaryWriter

Record = Mapping[str, float | int]
"""Numbers by name; `step` is the one that they belong to."""

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class Tracker(Protocol):
    """One place that records go to."""

    def write(self, record: Record) -> None:
        """Takes the numbers of one step."""

    def close(self) -> None:
        """Makes sure that all of them are written."""


class Jsonl:
    """`metrics.jsonl`: an object for each record, written through at once; a number that is not finite is null.

    Args:
      folder: of the run.
      resumed_at: the step that the run continues from. Records of later steps, written by a run that was killed
        before its next checkpoint, are dropped: those steps are made, and logged, again.
    """

    def __init__(self, folder: Path, resumed_at: int):
        path = folder / METRICS
        kept = [line for line in _lines(path) if _step(line) <= resumed_at]
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        os.replace(temporary, path)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, record: Record) -> None:
        """Appends one object."""
        finite = {name: value if math.isfinite(value) else None for name, value in record.items()}
        self._file.write(json.dumps(finite) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class TensorBoard:
    """Event files in `tensorboard/`; steps after `resumed_at` are marked to be forgotten.

    Args: as `Jsonl`.
    """

    def __init__(self, folder: Path, resumed_at: int):
        self._writer = SummaryWriter(str(folder / TENSORBOARD), purge_step=resumed_at + 1, write_to_disk=True)

    def write(self, record: Record) -> None:
        """Adds a scalar for each number that is finite."""
        for name, value in record.items():
            if name != "step" and math.isfinite(value):
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Flushes and closes the file."""
        self._writer.close()


BY_NAME: dict[str, Callable[[Path, int], Tracker]] = {"tensorboard": TensorBoard}


class Trackers:
    """`metrics.jsonl` and the others, on process 0.

    Args:
      names: of the others.
      folder: of the run.
      resumed_at: the step that the run continues from.
    """

    def __init__(self, names: tuple[str, ...], folder: Path, resumed_at: int):
        first = jax.process_index() == 0
        makers = [Jsonl, *(BY_NAME[name] for name in dict.fromkeys(names))] if first else []
        self._trackers: list[Tracker] = [make(folder, resumed_at) for make in makers]

    def write(self, record: Record) -> None:
        """To each of them."""
        for tracker in self._trackers:
            tracker.write(record)

    def close(self) -> None:
        """Each of them."""
        for tracker in self._trackers:
            tracker.close()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut short by a kill: never kept
