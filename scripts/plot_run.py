"""Draws the metrics of one or several runs over each other.

    python scripts/plot_run.py runs/a runs/d --out runs/plot.png

A panel for each name given by --metrics; a run is named by its folder.
"""

import argparse
import json
import math
import sys
from pathlib import Path

DEFAULT = ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second", "goodput"]


def read(run: Path) -> list[dict]:
    """The numbers of a run, a record for each line; a line cut short by a kill, or of anything else, is left out."""
    records = []
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line, parse_int=float)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append({name: value for name, value in record.items() if isinstance(value, float)})
    return records


def draw(runs: list[Path], metrics: list[str], x: str, out: Path) -> None:
    """Writes the figure; raises KeyError for a metric that no run has."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3.2 * rows), squeeze=False)
    known: set[str] = set()
    for run in runs:
        records = read(run)
        known |= {name for record in records for name in record}
        for panel, metric in zip(axes.flat, metrics, strict=False):
            points = [(r[x], r[metric]) for r in records if metric in r and x in r]
            panel.plot(*zip(*points, strict=True), label=run.name, linewidth=1.2) if points else None
    for name in (x, *metrics):
        if name not in known:
            raise KeyError(f"no run has {name!r}; there are {', '.join(sorted(known))}")
    for panel, metric in zip(axes.flat, metrics, strict=False):
        panel.set_title(metric)
        panel.set_xlabel(x)
        panel.grid(alpha=0.3)
    for panel in axes.flat[len(metrics) :]:
        panel.axis("off")
    axes.flat[0].legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--metrics", nargs="+", default=DEFAULT, help=f"default: {' '.join(DEFAULT)}")
    parser.add_argument("--x", default="step", help="what to draw over: step (default), tokens")
    parser.add_argument("--out", type=Path, default=Path("runs/plot.png"), help="default: runs/plot.png")
    arguments = parser.parse_args(argv)
    try:
        draw(arguments.runs, arguments.metrics, arguments.x, arguments.out)
    except ModuleNotFoundError as error:
        print(f"plot_run: {error.name} is missing: pip install 'jaxtp[plot]'", file=sys.stderr)
        return 2
    except (OSError, KeyError, ValueError) as error:
        print(f"plot_run: error: {error.args[0] if isinstance(error, KeyError) else error}", file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
