"""Reads the folder of a run for its page."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from jaxtp.checkpoint.io_errors import CheckpointError, files_below
from jaxtp.checkpoint.storage import CONFIG, finished_checkpoints, open_checkpoint, read_info
from jaxtp.config.console import size_text
from jaxtp.config.python_object import ALLOW_CODE, named_code
from jaxtp.config.reading import MAX_JSON, read_bytes
from jaxtp.config.schema import ConfigError, from_yaml
from jaxtp.generate.samples import SAMPLES
from jaxtp.mesh import AXES, TP, Sizes, describe_mesh, mesh_shape
from jaxtp.tools.report.curves import EVALUATED, read_records
from jaxtp.train.config import TrainConfig

_NOT_READ = "not read; --verify compares them with their checksums"
_LOST = "lost_to_"  # Prefix of metrics, as in `train.metrics.Timing`


@dataclass(frozen=True)
class Run:
    """A run as its page shows it.

    Args:
      last: the last value of each metric.
      samples: records of `sample_text`: step and text.
      checkpoints: step, size, mesh, and what a comparison of the arrays with their checksums gave.
      versions: of the libraries that wrote the newest checkpoint.
    """

    folder: Path
    settings: TrainConfig
    records: Sequence[Mapping[str, float]]
    last: Mapping[str, float]
    samples: Sequence[Mapping[str, Any]]
    checkpoints: Sequence[tuple[str, str, str, str]]
    versions: Mapping[str, str]

    @property
    def headline(self) -> dict[str, float]:
        """The numbers that a reader asks for first."""
        names = {
            "loss": "loss",
            f"{EVALUATED}loss": "validation loss",
            "tokens_per_second": "tokens per second",
            "rows_per_second": "rows per second",
        }
        return {title: self.last[name] for name, title in names.items() if name in self.last}

    @property
    def resume(self) -> str:
        """The command that resumes the run."""
        words = ["jaxtp", "train", "--config", str(self.folder / CONFIG)]
        if self.settings.run.dir != self.folder:
            words += ["--run.dir", str(self.folder)]
        if named_code(self.settings, set()):
            words.append(ALLOW_CODE)
        return shlex.join(words)

    @property
    def mesh(self) -> Sizes:
        """Number of devices along each axis."""
        return self.settings.mesh.sizes

    @property
    def groups(self) -> list[tuple[str, range]]:
        """The place on the other axes and the devices of each tp group."""
        axes = [axis for axis in AXES if axis != TP and self.mesh[axis] > 1]
        places = product(*(range(self.mesh[axis]) for axis in axes))
        size = self.mesh[TP]
        groups = []
        # tp is the axis that varies fastest, so a group's devices follow each other.
        for number, place in enumerate(places):
            names = zip(axes, place, strict=True)
            label = ", ".join(f"{axis} {index}" for axis, index in names)
            groups.append((label, range(number * size, (number + 1) * size)))
        return groups

    @property
    def time_shares(self) -> dict[str, float]:
        """Shares of the time since the last start, by what it was spent on."""
        wait = self.last.get("data_wait_seconds")
        step = self.last.get("step_seconds")
        if "goodput" not in self.last or wait is None or not step:
            return {}
        goodput = self.last["goodput"]
        waiting = goodput * wait / step
        shares = {"steps": goodput - waiting, "waiting for data": waiting}
        for name, share in self.last.items():
            if name.startswith(_LOST):
                shares[name.removeprefix(_LOST).replace("_", " ")] = share
        return shares

    @property
    def measured(self) -> dict[str, str]:
        """Memory and time that the last record has."""
        texts = {}
        if "memory_peak_bytes" in self.last:
            texts["peak of memory"] = size_text(self.last["memory_peak_bytes"])
        if "step_seconds_p50" in self.last:
            texts["median of a step"] = f"{self.last['step_seconds_p50']:.3g} s"
        return texts

    @property
    def evaluated(self) -> list[str]:
        """The metrics on the validation data."""
        return [name for name in self.last if name.startswith(EVALUATED)]

    @property
    def evaluations(self) -> list[list[float]]:
        """The step and the values of `evaluated`, of each evaluation."""
        names = self.evaluated
        rows = []
        for record in self.records:
            if any(name in record for name in names):
                rows.append([int(record["step"]), *(record.get(name, math.nan) for name in names)])
        return rows


def read_run(folder: Path, *, verify: bool) -> Run:
    """Reads a run's folder; `verify` also reads the arrays of each checkpoint.

    Raises ConfigError if the folder is not a run's.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: no {CONFIG} there; name the folder of a run")
    settings = from_yaml(TrainConfig, folder / CONFIG)
    records = read_records(folder)
    last: dict[str, float] = {}
    for record in records:
        last |= record
    checkpoints = []
    versions: Mapping[str, str] = {}
    for path in finished_checkpoints(folder):
        mesh = "unknown"
        try:
            info = read_info(path)
            arrays = _verify(path) if verify else _NOT_READ
            versions = info.get("versions", {})
            mesh = describe_mesh(mesh_shape(**info["mesh"]))
        except CheckpointError as error:
            arrays = str(error)
        size = sum(file.stat().st_size for file in files_below(path))
        checkpoints.append((path.name, size_text(size), mesh, arrays))
    return Run(folder, settings, records, last, _samples(folder), checkpoints, versions)


def _verify(folder: Path) -> str:
    stored = open_checkpoint(folder)
    problems = []
    for name in stored.arrays:
        problem = stored.verify(name)
        if problem is not None:
            problems.append(f"{name} {problem}")
    return "; ".join(problems) or f"{len(stored.arrays)} equal their checksums"


def _samples(folder: Path) -> list[Mapping[str, Any]]:
    """Reads the texts of `sample_text`; a resumed run repeats steps, whose texts count once."""
    if not (folder / SAMPLES).is_file():
        return []
    samples = {}
    for line in read_bytes(folder / SAMPLES, MAX_JSON).decode(errors="replace").splitlines():
        try:
            sample = json.loads(line)
            step = sample["step"]
            text = sample["text"]
        # A kill cut the line short, or no run wrote it.
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
        if isinstance(step, int) and isinstance(text, str):
            samples[step, text] = sample
    return list(samples.values())
