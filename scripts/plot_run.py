"""Draws the metrics of one or several runs in one figure.

    python scripts/plot_run.py runs/a runs/d --out runs/plot.png

Each metric has a panel, with a line for its validation data; the legend names runs by folder.
`jaxtp train --plot FILE.png` draws one run.
"""

import argparse
import sys
from pathlib import Path

from jaxtp.config.files import require_picture, write_picture
from jaxtp.config.schema import ConfigError
from jaxtp.train.metrics import CURVES, draw


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
    try:
        require_picture("--out", arguments.out)
        write_picture(
            "--out",
            arguments.out,
            lambda figure: draw(arguments.runs, figure, arguments.metrics, arguments.x),
        )
    except (OSError, ConfigError) as error:
        print(f"plot_run: error: {error}", file=sys.stderr)
        return 2
    print(arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
