"""The metrics of runs, read back: their last values for machines, and their curves as a picture."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxtp.config import ConfigError
from jaxtp.train.trackers import METRICS

SHOWN = ("loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "goodput")
"""Metrics that are drawn where none are named."""


def read_metrics(run: Path) -> list[dict[str, float]]:
    """Returns the records of a run's metrics, in their order; lines that are cut short are left out.

    Raises:
      OSError: there are none.
    """
    records = []
    for line in (run / METRICS).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line, parse_int=float)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append({name: value for name, value in record.items() if isinstance(value, float)})
    return records


def last_values(run: Path) -> dict[str, float]:
    """Returns each metric of a run as it was logged last."""
    values: dict[str, float] = {}
    for record in read_metrics(run):
        values |= record
    return values


def draw(runs: Sequence[Path], figure: Any, metrics: Sequence[str] = SHOWN, x: str = "step") -> None:
    """Draws a panel for each metric, with a line for each run, which is named by its folder.

    Args:
      runs: their folders.
      figure: of matplotlib.
      metrics: names of metrics; those of `SHOWN` that no run has are left out.
      x: the metric to draw them over.

    Raises:
      ConfigError: no run has one that is named.
      OSError: a run has no metrics.
    """
    records = {run: read_metrics(run) for run in runs}
    known = {name for found in records.values() for record in found for name in record}
    if missing := [name for name in (x, *metrics) if name not in known and name not in SHOWN]:
        raise ConfigError(f"no run has {missing[0]!r}; there are {', '.join(sorted(known))}")
    metrics = [name for name in metrics if name in known]
    if not metrics:
        raise ConfigError(f"no run has logged a step; there are {', '.join(sorted(known)) or 'no numbers'}")
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure.set_size_inches(4.5 * columns, 3.2 * rows)
    panels = figure.subplots(rows, columns, squeeze=False).flat
    for panel, metric in zip(panels, metrics, strict=False):
        for run, found in records.items():
            points = [(record[x], record[metric]) for record in found if metric in record and x in record]
            if points:
                panel.plot(*zip(*points, strict=True), label=run.name, linewidth=1.2)
        panel.set_title(metric)
        panel.set_xlabel(x)
        panel.grid(alpha=0.3)
    for panel in panels[len(metrics) :]:
        panel.axis("off")
    panels[0].legend()
