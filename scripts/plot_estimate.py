"""Draws what jaxtp estimate wrote with --json: memory and time of the best setting of each tp.

    jaxtp estimate --config configs/llama3_8b.yaml --hardware h100x8 --json runs/llama3_8b.json
    python scripts/plot_estimate.py runs/llama3_8b.json --out runs/llama3_8b.png

Bars have the memory by kind and the seconds of a step by part; the best setting of all is marked.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, cycle
from pathlib import Path
from typing import Any

from jaxtp.analysis.hardware import GB
from jaxtp.config import entry
from jaxtp.config.reading import parse_json
from jaxtp.config.schema import ConfigError
from jaxtp.mesh import AXES, TP, describe_split
from jaxtp.tools.report.curves import write_picture

Numbers = Mapping[str, Any]

PARTS = {
    "products": "products with weights",
    "attention": "attention",
    "elementwise": "elementwise",
    "update": "update",
}
"""The label of each part of a step that computes."""
COLORS = {
    "parameters": "#0072B2",
    "optimizer": "#E69F00",
    "gradients": "#009E73",
    "gathered weights": "#CC79A7",
    "activations": "#56B4E9",
    "head and logits": "#D55E00",
    "products with weights": "#9A9A9A",
    "attention": "#C4C4C4",
    "elementwise": "#6E6E6E",
    "update": "#DEDEDE",
    "over fsdp": "#7A3E60",
    "over tp": "#004766",
}
"""Memory has the colours of `style.mplstyle`; time is grey where a device computes."""
OTHER_COLORS = ("#8A5F00", "#005C43", "#B58FBF", "#803800", "#2F6B8A", "#B8B04A", "black")


def draw(estimate: Numbers, figure: Any) -> None:
    """Draws the bars of an estimate, from its JSON."""
    ranked = estimate["meshes"]
    by_tp: dict[int, Numbers] = {}
    for setting in ranked:
        by_tp.setdefault(setting[TP], setting)
    settings = [by_tp[tp] for tp in sorted(by_tp)]
    devices = f"{estimate['devices']} x {estimate['hardware']['name']}"
    figure.set_size_inches(7.6, 4.9)
    figure.suptitle(f"{estimate['parameters']:,} parameters on {devices}, modelled", fontsize=13)
    memory_panel, time_panel = figure.subplots(1, 2)
    memory = list(map(_gigabytes, settings))
    seconds = list(map(_seconds, settings))
    colors = _part_colors([*memory, *seconds])
    _draw_bars(memory_panel, memory, colors, "{:.1f}")
    memory_panel.set_title("Memory of each device", fontsize=11)
    memory_panel.set_ylabel("GB")
    _draw_bars(time_panel, seconds, colors, "{:.2f}")
    time_panel.set_title("Time of a step, without overlap", fontsize=11)
    time_panel.set_ylabel("seconds")
    for panel in (memory_panel, time_panel):
        _name_bars(panel, settings, best=ranked[0])
    room = estimate["bytes_for_jax"] / GB
    memory_panel.axhline(room, color="black", linestyle="--", linewidth=1)
    memory_panel.annotate(
        f"limit {room:.1f} GB",
        xy=(0.99, room),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        fontsize=9,
    )


def _gigabytes(setting: Numbers) -> dict[str, float]:
    sizes = {}
    for kind, size in setting["bytes_per_device"].items():
        if kind != "total":
            label = "head and logits" if kind == "logits" else kind.replace("_", " ")
            sizes[label] = size / GB
    return sizes


def _seconds(setting: Numbers) -> dict[str, float]:
    seconds = setting["seconds"]
    parts = {label: seconds[part] for part, label in PARTS.items()}
    for axes, value in seconds["communication"].items():
        parts[f"over {axes.replace('+', ' and ')}"] = value
    return parts


def _part_colors(bars: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Returns a colour for each part, so that no colour has two meanings in a picture."""
    parts = dict[str, None]()
    for bar in bars:
        parts |= dict.fromkeys(part for part, value in bar.items() if value)
    others = parts.keys() - COLORS.keys()
    return COLORS | dict(zip(sorted(others), cycle(OTHER_COLORS), strict=False))


def _draw_bars(
    panel: Any, bars: Sequence[Mapping[str, float]], colors: Mapping[str, str], total: str
) -> None:
    below = [0.0] * len(bars)
    visible = max(sum(bar.values()) for bar in bars) / 200
    for part in dict.fromkeys(chain(*bars)):
        values = [bar.get(part, 0.0) for bar in bars]
        if max(values) < visible:
            continue
        panel.bar(
            range(len(values)), values, bottom=below, width=0.6, label=part, color=colors[part]
        )
        below = [bottom + value for bottom, value in zip(below, values, strict=True)]
    for place, bar in enumerate(bars):
        height = sum(bar.values())
        panel.annotate(
            total.format(height),
            xy=(place, height),
            xytext=(0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    panel.margins(y=0.12)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(
        frameon=False, fontsize=9, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.22)
    )


def _name_bars(panel: Any, settings: Sequence[Numbers], best: Numbers) -> None:
    names = []
    for setting in settings:
        mark = "does not fit"
        if setting["fits"]:
            mark = "best" if setting is best else ""
        mesh = describe_split({axis: setting[axis] for axis in AXES})
        names.append(f"{mesh}\n{setting['remat']}\n{mark}".replace(" x ", "\n"))
    panel.set_xticks(range(len(settings)), names, fontsize=9)
    for text, setting in zip(panel.get_xticklabels(), settings, strict=True):
        if not setting["fits"]:
            text.set_color("#B00020")
        elif setting is best:
            text.set_fontweight("bold")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("estimate", type=Path, metavar="FILE.json", help="an estimate's --json")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/estimate.png"), help="default: runs/estimate.png"
    )
    arguments = parser.parse_args(argv)
    file = arguments.estimate

    def write() -> None:
        try:
            estimate = parse_json(file.read_bytes(), str(file))
            write_picture(arguments.out, lambda figure: draw(estimate, figure))
        except (KeyError, TypeError):
            raise ConfigError(f"{file} is not an estimate of a decoder") from None
        except ValueError as error:
            raise ConfigError(str(error)) from None
        print(arguments.out)

    return entry.attempt("plot_estimate", write)


if __name__ == "__main__":
    sys.exit(main())
