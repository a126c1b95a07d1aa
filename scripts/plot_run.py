"""Draws the metrics of one or several runs in one figure.

    python scripts/plot_run.py runs/a runs/d --out runs/plot.png

Each metric has a panel, with a line for its validation data; the legend names runs by folder.
"""

import argparse
import math
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from jaxtp.config import entry
from jaxtp.config.files import require_writable, writing
from jaxtp.config.schema import ConfigError
from jaxtp.train.metrics import read_metrics

CURVES = (
    "loss",
    "balance_loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "rows_per_second",
    "goodput",
)
"""Metrics that are drawn by default, if a run has them; the panel of `loss` also has
`eval_loss`."""
STYLE = Path(__file__).parent / "style.mplstyle"
EVALUATED = "eval_"  # Prefix of a metric on the validation data
_TITLES = {
    "loss": ("loss", ""),
    "balance_loss": ("balance loss of experts", ""),
    "learning_rate": ("learning rate", ""),
    "grad_norm": ("gradient norm, before clipping", "L2 norm"),
    "param_norm": ("norm of the parameters", "L2 norm"),
    "tokens_per_second": ("speed", "tokens per second"),
    "rows_per_second": ("speed", "rows per second"),
    "goodput": ("goodput", "share of the time in steps"),
    "step_seconds": ("time of a step", "seconds"),
    "mfu": ("model FLOPs utilization", "share of the peak"),
}
"""Title and unit of a panel."""
_OF_RUN = re.compile(
    r"step|(mean_)?loss|perplexity|learning_rate|(grad|param)_norm(/.*)?|(tokens|rows)(_per_second.*)?|mfu|goodput"
    r"|step_seconds.*|data_wait_seconds|lost_to_.*|memory_.*|slowest_device|balance_loss|router_z_loss|experts/.*"
)
"""Names of the metrics that a run logs itself."""


@dataclass(frozen=True)
class _Curve:
    """A metric of a run: its points on the training data, and on the validation data."""

    run: Path
    training: list[tuple[float, float]]
    validation: list[tuple[float, float]]


def draw(runs: Sequence[Path], figure: Any, metrics: Sequence[str] = (), x: str = "step") -> None:
    """Draws a panel for each metric over metric `x`, with lines for each run.

    Training and validation data have separate lines.

    Args:
      metrics: by default `CURVES`, the metrics of a user's loss, and the metrics that a user logs.

    Raises:
      ConfigError: no run has a requested metric. Missing `CURVES` are left out.
      OSError: a run has no file of metrics.
    """
    records = {run: _by_step(read_metrics(run)) for run in runs}
    # The names of all metrics, in the order of their first record
    names = list(dict.fromkeys(chain(*chain(*records.values()))))
    for name in (x, *metrics):
        if name not in names and name not in CURVES:
            raise ConfigError(f"no run has {name!r}; there are {', '.join(sorted(names))}")
    panels: dict[str, list[_Curve]] = {}
    for metric in metrics or _default_metrics(names):
        curves = [_curve(run, steps, metric, x) for run, steps in records.items()]
        curves = [curve for curve in curves if curve.training or curve.validation]
        if curves:
            panels[metric] = curves
    if not panels:
        raise ConfigError(
            f"no run has logged a step; there are {', '.join(sorted(names)) or 'no numbers'}"
        )
    axes = _panels(figure, len(panels))
    for panel, (metric, curves) in zip(axes, panels.items(), strict=True):
        for color, curve in enumerate(curves):
            _draw_curve(panel, curve, color, name_run=len(runs) > 1)
        title, unit = _TITLES.get(metric, (metric, ""))
        if metric == "loss" and "eval_perplexity" in names:
            unit = "nats per token"
        panel.set_title(title)
        panel.set_ylabel(unit)
        panel.set_xlabel(x)
        # Numbers of tokens are wide.
        panel.locator_params(axis="x", nbins=5)
        panel.grid(alpha=0.3)
        if panel is axes[0] or (len(runs) == 1 and curves[0].validation):
            panel.legend()


def _default_metrics(names: Sequence[str]) -> list[str]:
    # The loss, a user's metrics, then all other metrics. A metric that a user logs only in
    # evaluations has a panel too.
    trained = [name for name in names if not name.startswith(EVALUATED)]
    evaluated = [name.removeprefix(EVALUATED) for name in names if name.startswith(EVALUATED)]
    own = [name for name in trained + evaluated if _OF_RUN.fullmatch(name) is None]
    return list(dict.fromkeys([CURVES[0], *own, *CURVES[1:]]))


def _by_step(records: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    # Merges the records of a step: an evaluation has its own record, which lacks the number of
    # tokens.
    merged: defaultdict[float, dict[str, float]] = defaultdict(dict)
    for record in records:
        if "step" in record:
            merged[record["step"]].update(record)
    return [merged[step] for step in sorted(merged)]


def _curve(run: Path, records: Sequence[Mapping[str, float]], metric: str, x: str) -> _Curve:
    def points(name: str) -> list[tuple[float, float]]:
        return [(record[x], record[name]) for record in records if name in record and x in record]

    return _Curve(run, points(metric), points(f"{EVALUATED}{metric}"))


def _panels(figure: Any, count: int) -> list[Any]:
    # At most three panels in a row. If the last row has fewer panels, they are wider.
    columns = 2 if count in (2, 4) else min(3, count)
    rows = math.ceil(count / columns)
    figure.set_size_inches(4.8 * columns, 3.2 * rows)
    grid = figure.add_gridspec(rows, 6)
    panels = []
    for number in range(count):
        row, column = divmod(number, columns)
        width = 6 // min(columns, count - row * columns)
        panels.append(figure.add_subplot(grid[row, column * width : (column + 1) * width]))
    return panels


def _draw_curve(panel: Any, curve: _Curve, color: int, *, name_run: bool) -> None:
    # A single run has a colour for each kind of data; of several runs, each has one colour.
    prefix = ""
    second = color + 1
    if name_run:
        prefix = f"{curve.run.name}, "
        second = color
    styles = (
        ("training", curve.training, color, "-"),
        ("validation", curve.validation, second, "--"),
    )
    for kind, points, number, line in styles:
        if not points:
            continue
        # A line of one point is invisible without a marker.
        marker = "." if len(points) < 20 else ""
        xs, ys = zip(*points, strict=True)
        label = prefix + kind
        panel.plot(xs, ys, line, color=f"C{number}", label=label, linewidth=1.2, marker=marker)


def write_picture(path: Path, draw: Callable[[Any], None]) -> None:
    """Calls `draw` on a matplotlib `Figure`, and writes it to the file of --out.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written as a picture.
    """
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'jaxtp[plot]'") from None
    figure = Figure(layout="constrained")
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"--out {path}: pictures are .{', .'.join(sorted(formats))}")
    require_writable("--out", path)
    with style.context(STYLE):
        draw(figure)
        with writing("--out", path):
            figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    default = f"default: {' '.join(CURVES)}, and the metrics of your own loss"
    parser.add_argument("--metrics", nargs="+", default=(), help=default)
    parser.add_argument("--x", default="step", help="metric of the x axis: step (default), tokens")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/plot.png"), help="default: runs/plot.png"
    )
    arguments = parser.parse_args(argv)

    def write() -> None:
        write_picture(
            arguments.out,
            lambda figure: draw(arguments.runs, figure, arguments.metrics, arguments.x),
        )
        print(arguments.out)

    return entry.attempt("plot_run", write)


if __name__ == "__main__":
    sys.exit(main())
