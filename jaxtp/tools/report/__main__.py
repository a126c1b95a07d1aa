"""`jaxtp report`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from jaxtp.checkpoint import silence_orbax
from jaxtp.config import entry
from jaxtp.config.affects import POSITIONAL, Argument
from jaxtp.config.command_line import Command
from jaxtp.config.files import require_writable, writing
from jaxtp.config.reading import MAX_JSON, parse_json, read_bytes
from jaxtp.config.schema import ConfigError, OptionalFile, UserPath
from jaxtp.distributed.environment import accept_absent_gpus
from jaxtp.tools.report.curves import draw, panels_of, write_picture
from jaxtp.tools.report.page import page
from jaxtp.tools.report.run import read_run

PROGRAM = "jaxtp report"
DESCRIPTION = """Writes a page about a run, in one HTML file that opens without a server.

It has the curves, the settings that differ from the defaults, the mesh, where the time went, the
evaluations, samples of text, the checkpoints, and the command that resumes the run. Several runs
stand side by side. If --out is a picture (.png, .svg, .pdf), it has the curves alone.

  jaxtp report runs/tiny
  jaxtp report runs/a runs/b --metrics loss grad_norm --out curves.png
"""
Runs = Annotated[tuple[UserPath, ...], POSITIONAL, Argument("RUN ...")]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Flags of `jaxtp report`."""

    runs: Runs = ()
    """Folders of runs."""

    out: UserPath = Path("runs/report.html")
    """File to write: a page, or a picture."""

    metrics: tuple[str, ...] = ()
    """Metrics to draw: by default the loss, its speed, and the metrics of your own loss."""

    x: str = "step"
    """Metric of the x axis, such as tokens."""

    estimate: OptionalFile = None
    """File that jaxtp estimate wrote with --json, to show beside the run's time and memory."""

    verify: bool = False
    """Read the arrays of all checkpoints, and compare them with their checksums."""


COMMAND = Command(program=PROGRAM, schema=ReportConfig, description=DESCRIPTION)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0, or 2 for a mistake."""
    accept_absent_gpus()
    silence_orbax()
    return entry.attempt(PROGRAM, lambda: _report(argv))


def _report(argv: Sequence[str]) -> None:
    options, _ = COMMAND.load(argv)
    if not options.runs:
        raise ConfigError("name the folder of a run, such as runs/tiny")
    panels = panels_of(options.runs, options.metrics, options.x)
    if options.out.suffix != ".html":
        names_runs = len(options.runs) > 1
        write_picture(options.out, lambda figure: draw(panels, figure, names_runs=names_runs))
        print(options.out)
        return
    require_writable("--out", options.out)
    estimate = None if options.estimate is None else _read_estimate(options.estimate)
    runs = [read_run(folder, verify=options.verify) for folder in options.runs]
    text = page(runs, panels, estimate)
    with writing("--out", options.out):
        # Half of a surrogate pair, as a folder or a text may have, is no UTF-8.
        options.out.write_bytes(text.encode(errors="replace"))
    print(options.out)


def _read_estimate(file: Path) -> Mapping[str, Any]:
    try:
        estimate = parse_json(read_bytes(file, MAX_JSON), f"--estimate {file}")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    meshes = estimate.get("meshes")
    if not isinstance(meshes, list) or not all(isinstance(mesh, dict) for mesh in meshes):
        raise ConfigError(f"--estimate {file}: it is not what jaxtp estimate writes with --json")
    return estimate


if __name__ == "__main__":
    entry.run(PROGRAM, main)
