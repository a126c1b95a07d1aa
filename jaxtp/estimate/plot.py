"""Memory by kind and time by part over tp, as a picture."""

from dataclasses import fields
from typing import Any

from jaxtp.estimate.report import label
from jaxtp.estimate.search import Search, Setting
from jaxtp.hardware import GB
from jaxtp.mesh import TP
from jaxtp.train.memory import Memory


def draw(found: Search, title: str, figure: Any) -> None:
    """Draws two panels of stacked bars over tp for the best setting at each: memory with what there is, and seconds."""
    chosen = {setting.sizes[TP]: setting for setting in reversed(found.settings)}
    settings = [chosen[tp] for tp in sorted(chosen)]
    figure.set_size_inches(12, 6)
    memory, time = figure.subplots(1, 2)
    figure.suptitle(title)
    _memory(memory, settings)
    _time(time, settings)
    for panel in (memory, time):
        panel.set_xticks(range(len(settings)), [_label(setting) for setting in settings], fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _memory(panel: Any, settings: list[Setting]) -> None:
    parts = {label(kind.name): [getattr(s.memory, kind.name) / GB for s in settings] for kind in fields(Memory)}
    _stack(panel, parts)
    panel.axhline(settings[0].target.room / GB, color="black", linestyle="--", linewidth=1, label="for JAX")
    panel.set_title("memory of a device, GB", fontsize=10)


def _time(panel: Any, settings: list[Setting]) -> None:
    axes = list(dict.fromkeys(axes for setting in settings for axes in setting.time.communication))
    parts = {
        "products with weights": [setting.time.products for setting in settings],
        "attention": [setting.time.attention for setting in settings],
        "norms, gates, logits": [setting.time.elementwise for setting in settings],
        "update": [setting.time.update for setting in settings],
    } | {f"over {' and '.join(one)}": [s.time.communication.get(one, 0.0) for s in settings] for one in axes}
    largest = max(setting.time.serial for setting in settings)
    _stack(panel, {name: seconds for name, seconds in parts.items() if max(seconds) > largest / 500})
    panel.set_title("seconds of a step where nothing overlaps, modelled", fontsize=10)


def _stack(panel: Any, parts: dict[str, list[float]]) -> None:
    """Draws bars from the first part up."""
    below = [0.0] * len(next(iter(parts.values())))
    for number, (name, values) in enumerate(parts.items()):
        panel.bar(range(len(values)), values, bottom=below, width=0.6, label=name, color=f"C{number}", zorder=2)
        below = [bottom + value for bottom, value in zip(below, values, strict=True)]


def _label(setting: Setting) -> str:
    missing = "" if setting.fits else "does not fit"
    others = " ".join(f"{axis} {size}" for axis, size in setting.sizes.items() if size > 1 and axis != TP)
    ways = (setting.config.model.remat, f"micro-batch {setting.rows}")
    return "\n".join(filter(None, (f"tp {setting.sizes[TP]}", others, *ways, missing)))
