"""The page of a report: HTML in one file, which loads nothing; `page.html.jinja` has its shape."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from jaxtp.config.console import size_text
from jaxtp.config.hints import dotted
from jaxtp.config.schema import ConfigError, leaves, to_plain
from jaxtp.mesh import Sizes, describe_mesh
from jaxtp.tools.report.curves import Panel, as_svg, colours
from jaxtp.tools.report.run import Run
from jaxtp.train.config import TrainConfig


def page(runs: Sequence[Run], panels: Sequence[Panel], estimate: Mapping[str, Any] | None) -> str:
    """Returns the page of one or several runs, side by side; raises ConfigError without jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader
    except ImportError:
        raise ConfigError("a report needs jinja2: pip install 'jaxtp[plot]'") from None
    environment = Environment(autoescape=True, loader=FileSystemLoader(Path(__file__).parent))
    environment.filters |= {"cell": _cell, "describe": describe_mesh}
    # A cause has the same colour in all runs.
    causes = dict.fromkeys(chain(*(run.time_shares for run in runs)))
    estimates = None
    if estimate is not None:
        estimates = [dict(_estimated(run.mesh, estimate)) for run in runs]
    return environment.get_template("page.html.jinja").render(
        runs=runs,
        curves=[as_svg(panel, names_runs=len(runs) > 1) for panel in panels],
        settings=list(_settings(runs)),
        colours=dict(zip(causes, cycle(colours()), strict=False)),
        estimates=estimates,
    )


def _cell(value: object) -> object:
    """Formats numbers: floats with four digits, integers with commas."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def _settings(runs: Sequence[Run]) -> Iterator[tuple[str, list[str], str]]:
    """Yields the name, each run's value and the default of settings that some run changes."""
    defaults = _flat(TrainConfig())
    values = [_flat(run.settings) for run in runs]
    for name in dict.fromkeys(chain(*values)):
        default = defaults.get(name, "")
        row = [flat.get(name, default) for flat in values]
        if set(row) != {default}:
            yield name, row, default


def _flat(settings: TrainConfig) -> dict[str, str]:
    return {dotted(keys): str(value) for keys, value in leaves(to_plain(settings))}


def _estimated(mesh: Sizes, estimate: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the memory and the seconds of a mesh, from the JSON of `jaxtp estimate`."""
    settings = [setting for setting in estimate["meshes"] if mesh.items() <= setting.items()]
    if not settings:
        yield describe_mesh(mesh), "is not among the meshes of the estimate"
        return
    for name, count in settings[0]["bytes_per_device"].items():
        if count:
            yield f"memory: {name.replace('_', ' ')}", size_text(count)
    seconds = dict(settings[0]["seconds"])
    messages = {f"over {axes}": time for axes, time in seconds.pop("communication").items()}
    for name, time in (seconds | messages).items():
        yield f"time: {_TIMES.get(name, name)}", f"{time:.3g} s"


_TIMES = {
    "serial": "a step, if nothing overlaps",
    "overlapped": "a step, if messages hide behind products",
}
