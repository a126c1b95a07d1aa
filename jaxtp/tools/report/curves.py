"""Curves of the metrics of runs, drawn by matplotlib."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtp.config.files import require_writable, writing
from jaxtp.config.schema import ConfigError
from jaxtp.train.metrics import OWN, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_OF_RUN = re.compile(rf"{OWN.pattern}|mean_loss|perplexity|balance_loss|router_z_loss|experts/.*")
"""Names of the metrics that a run or a loss of jaxtp logs."""
_STYLE = Path(__file__).with_name("style.mplstyle")
_INK = "#010203"  # stands for the text colour of the page, light or dark
_INK_SETTINGS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


@dataclass(frozen=True)
class Curve:
    """A metric of a run: its points on the training data, and on the validation data."""

    run: Path
    training: list[tuple[float, float]]
    validation: list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """A metric of one or several runs."""

    title: str
    unit: str
    x: str
    curves: list[Curve]

    def draw(self, axes: "Axes", *, names_runs: bool) -> None:
        """Draws the curves; `names_runs` tells whether the legend names them by folder."""
        for number, curve in enumerate(self.curves):
            # A single run has a colour for each kind of data; of several runs, each has one.
            second = number if names_runs else number + 1
            prefix = f"{curve.run.name}, " if names_runs else ""
            _draw_line(axes, curve.training, number, "-", f"{prefix}training")
            _draw_line(axes, curve.validation, second, "--", f"{prefix}validation")
        # Names of metrics and of runs are no formulas, whatever dollar signs they have.
        axes.set_title(self.title, parse_math=False)
        axes.set_ylabel(self.unit)
        axes.set_xlabel(self.x, parse_math=False)
        # Numbers of tokens are wide.
        axes.locator_params(axis="x", nbins=5)
        axes.grid()

    @property
    def has_validation(self) -> bool:
        """Whether any run has points on the validation data."""
        return any(curve.validation for curve in self.curves)


def panels_of(runs: Sequence[Path], metrics: Sequence[str] = (), x: str = "step") -> list[Panel]:
    """Returns a panel for each metric over metric `x`, with the curves of each run.

    Args:
      metrics: by default `CURVES`, the metrics of a user's loss, and the metrics that a user logs.

    Raises:
      ConfigError: no run has a requested metric. Missing `CURVES` are left out.
    """
    records = {run: _by_step(read_records(run)) for run in runs}
    # The names of all metrics, in the order of their first record
    names = list(dict.fromkeys(chain(*chain(*records.values()))))
    for name in (x, *metrics):
        if name not in names and name not in CURVES:
            raise ConfigError(f"no run has {name!r}; there are {', '.join(sorted(names))}")
    panels = []
    for metric in metrics or _default_metrics(names):
        curves = [_curve(run, steps, metric, x) for run, steps in records.items()]
        curves = [curve for curve in curves if curve.training or curve.validation]
        if not curves:
            continue
        title, unit = _TITLES.get(metric, (metric, ""))
        if metric == "loss" and "eval_perplexity" in names:
            unit = "nats per token"
        panels.append(Panel(title, unit, x, curves))
    if not panels:
        raise ConfigError(
            f"no run has logged a step; there are {', '.join(sorted(names)) or 'no numbers'}"
        )
    return panels


def read_records(run: Path) -> list[dict[str, float]]:
    """Returns the records of a run that have a step; raises ConfigError if there is no file."""
    try:
        records = read_metrics(run)
    except FileNotFoundError:
        raise ConfigError(f"{run}: no run has logged there; name the folder of a run") from None
    return [record for record in records if math.isfinite(record.get("step", math.nan))]


def draw(panels: Sequence[Panel], figure: "Figure", *, names_runs: bool) -> None:
    """Draws panels in rows of two; a panel alone in its row is as wide as the row."""
    count = len(panels)
    columns = min(2, count)
    rows = math.ceil(count / columns)
    # Words are legible where the picture is shown 700 pixels wide.
    figure.set_size_inches(4.2 * columns, 2.8 * rows)
    grid = figure.add_gridspec(rows, columns)
    for number, panel in enumerate(panels):
        row, column = divmod(number, columns)
        end = columns if number == count - 1 else column + 1
        axes = figure.add_subplot(grid[row, column:end])
        panel.draw(axes, names_runs=names_runs)
        if number == 0 or (not names_runs and panel.has_validation):
            _draw_legend(axes)


def as_svg(panel: Panel, *, names_runs: bool) -> str:
    """Returns a panel as an SVG element, whose text has the font and colour of its page."""
    matplotlib = require_matplotlib()
    ink = dict.fromkeys(_INK_SETTINGS, _INK)
    # Text stays text, and the ids are the same each time.
    style = {
        **ink,
        "svg.fonttype": "none",
        "svg.hashsalt": panel.title,
        "font.family": "sans-serif",
    }
    with matplotlib.rc_context(style, _STYLE):
        figure = matplotlib.figure.Figure(figsize=(4.8, 3.2), layout="constrained")
        axes = figure.add_subplot()
        panel.draw(axes, names_runs=names_runs)
        if names_runs or panel.has_validation:
            _draw_legend(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    _, start, svg = text.getvalue().partition("<svg")
    return (start + svg).replace(_INK, "currentColor")


def require_matplotlib():  # type: ignore[no-untyped-def]  # the module, which may not be installed
    """Returns matplotlib; raises ConfigError if it is missing."""
    try:
        import matplotlib.figure
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install 'jaxtp[plot]'") from None
    return matplotlib


def colours() -> list[str]:
    """Returns the colours of the pictures' style, as in `#0072B2`."""
    style = require_matplotlib().rc_params_from_file(_STYLE, use_default_template=False)
    return [f"#{colour.lstrip('#')}" for colour in style["axes.prop_cycle"].by_key()["color"]]


def write_picture(path: Path, draw: "Callable[[Figure], None]") -> None:
    """Calls `draw` on a matplotlib `Figure`, and writes it to the file of --out.

    Raises:
      ConfigError: matplotlib is missing, or the file cannot be written as a picture.
    """
    matplotlib = require_matplotlib()
    with matplotlib.rc_context(fname=_STYLE):
        figure = matplotlib.figure.Figure(layout="constrained")
        formats = figure.canvas.get_supported_filetypes()
        if path.suffix.removeprefix(".") not in formats:
            raise ConfigError(f"--out {path}: pictures are .{', .'.join(sorted(formats))}")
        require_writable("--out", path)
        draw(figure)
        with writing("--out", path):
            figure.savefig(path, dpi=120)


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
        merged[record["step"]].update(record)
    return [merged[step] for step in sorted(merged)]


def _curve(run: Path, records: Sequence[Mapping[str, float]], metric: str, x: str) -> Curve:
    def points(name: str) -> list[tuple[float, float]]:
        return [(record[x], record[name]) for record in records if name in record and x in record]

    return Curve(run, points(metric), points(f"{EVALUATED}{metric}"))


def _draw_legend(axes: "Axes") -> None:
    for text in axes.legend().get_texts():
        text.set_parse_math(False)


def _draw_line(
    axes: "Axes", points: Sequence[tuple[float, float]], number: int, line: str, label: str
) -> None:
    if not points:
        return
    # A line of one point is invisible without a marker.
    marker = "." if len(points) < 20 else ""
    xs, ys = zip(*points, strict=True)
    axes.plot(xs, ys, line, color=f"C{number}", label=label, marker=marker)
