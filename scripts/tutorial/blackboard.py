"""What the tutorial draws with; nothing here is needed to understand it."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROOT = Path(__file__).parent.parent.parent
plt.style.use(ROOT / "jaxtp/tools/report/style.mplstyle")

WHOLE = "#9a9a9a"
"""Colour of what every device has; colour number i belongs to device i."""
SUM = "#D55E00"
"""Colour of what moves."""


def jaxtp_command(line: str, keep: str = "") -> str:
    """Runs a command of jaxtp, prints its lines that match `keep`, and returns its output."""
    command = [sys.executable, "-m", "jaxtp", *shlex.split(line)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    for text in output.splitlines():
        if re.search(keep, text):
            print(text)
    return output


def split_matrix(panel: Axes, rows: int, columns: int, corner: tuple, split: str = "") -> None:
    """Draws a matrix with its top left corner at a place; `split` is `rows`, `columns` or nothing.

    Each of four devices has the part in its colour.
    """
    left, top = corner
    for row in range(rows):
        for column in range(columns):
            color = WHOLE
            if split == "rows":
                color = f"C{4 * row // rows}"
            if split == "columns":
                color = f"C{4 * column // columns}"
            place = (left + column, top - row - 1)
            panel.add_patch(Rectangle(place, 1, 1, color=color, ec="white", lw=1.2))


def three_ways() -> None:
    """Draws X W = Y with W in one piece, in columns and in rows."""
    figure, panels = plt.subplots(3, 1, figsize=(7, 6.6))
    titles = (
        "In one piece: one device has all of W",
        "In columns: each device computes some columns of Y, from all of X",
        "In rows: each device computes a summand of all of Y, from some columns of X",
    )
    splits = (("", "", ""), ("", "columns", "columns"), ("columns", "rows", ""))
    for panel, title, (x, w, y) in zip(panels, titles, splits, strict=True):
        panel.set_title(title)
        split_matrix(panel, 4, 8, (0, 6), x)
        split_matrix(panel, 8, 12, (11, 8), w)
        panel.text(9.5, 4, r"$\times$", fontsize=18, ha="center", va="center")
        panel.text(24.5, 4, "=", fontsize=18, ha="center", va="center")
        if w == "rows":
            _draw_summands(panel)
        else:
            split_matrix(panel, 4, 12, (26, 6), y)
        for place, name in ((4, "X"), (17, "W"), (32, "Y")):
            panel.text(place, -0.4, name, ha="center", va="top")
        panel.set_xlim(-0.5, 49)
        panel.set_ylim(-1.5, 8.3)
        panel.set_aspect("equal")
        panel.axis("off")
    handles = [Rectangle((0, 0), 1, 1, color=f"C{device}") for device in range(4)]
    names = [f"device {device}" for device in range(4)]
    handles.append(Rectangle((0, 0), 1, 1, color=WHOLE))
    figure.legend(handles, [*names, "every device"], loc="outside lower center", ncols=5)


def _draw_summands(panel: Axes) -> None:
    for device in range(4):
        left = 26 + device
        top = 7.4 - 0.9 * device
        panel.add_patch(Rectangle((left, top - 4), 12, 4, color=f"C{device}", ec="white", lw=1.2))
    panel.text(45, 5, "Σ", color=SUM, fontsize=20, weight="bold", ha="center", va="center")
    panel.text(45, 3.2, "a sum over\ndevices", color=SUM, fontsize=9, ha="center", va="top")


def mesh_grid(mesh: object) -> None:
    """Draws the devices of a mesh over fsdp and tp as a grid."""
    devices = np.squeeze(mesh.devices)
    _, panel = plt.subplots(figsize=(7, 2.4))
    for (row, column), device in np.ndenumerate(devices):
        place = (1.25 * column, -1.15 * row)
        panel.add_patch(FancyBboxPatch(place, 1, 0.8, "round,pad=0.02", color=f"C{column}"))
        middle = (place[0] + 0.5, place[1] + 0.4)
        ink = "black" if column else "white"
        panel.annotate(f"device {device.id}", middle, color=ink, ha="center", va="center")
    for row in range(devices.shape[0]):
        panel.text(-0.15, 0.4 - 1.15 * row, f"fsdp {row}", ha="right", va="center")
    for column in range(devices.shape[1]):
        panel.text(1.25 * column + 0.5, 1.0, f"tp {column}", ha="center", va="bottom")
    panel.set_xlim(-0.9, 1.25 * devices.shape[1])
    panel.set_ylim(-1.3, 1.4)
    panel.axis("off")


def lanes(record: dict, modules: list[str], names: list[str]) -> None:
    """Draws the forward pass to the right, and the backward pass to the left, through modules.

    A disc is an all-reduce over tp that the record of an explanation has: forward after its module,
    backward when the pass leaves it. A cross shows that the first module has none.
    """
    _, panel = plt.subplots(figsize=(7, 2.7))
    width = 2.2
    ends = [-0.6, width * len(modules) + 0.2]
    for direction, height in (("forward", 1.3), ("backward", 0.0)):
        start, end = ends if direction == "forward" else ends[::-1]
        arrow = FancyArrowPatch(
            (start, height), (end, height), arrowstyle="-|>", mutation_scale=14, color="0.45"
        )
        panel.add_patch(arrow)
        panel.text(-0.8, height, direction, ha="right", va="center", weight="bold")
        sums = {
            collective["module"]
            for collective in record["collectives"]
            if collective["pass"] == direction
        }
        for number, (module, name) in enumerate(zip(modules, names, strict=True)):
            left = width * number + 0.3
            corner = (left, height - 0.3)
            panel.add_patch(FancyBboxPatch(corner, 1, 0.6, "round,pad=0.03", color="0.85"))
            panel.text(left + 0.5, height, name, ha="center", va="center")
            place = left + 1.5 if direction == "forward" else left - 0.4
            if module in sums:
                panel.plot(place, height, "o", color=SUM, markersize=18)
                panel.text(place, height, "Σ", color="white", ha="center", va="center")
    panel.plot(-0.1, 0, "x", color=SUM, markersize=12, markeredgewidth=2.5)
    panel.text(-0.1, -0.35, "no sum: nobody asks\nfor this gradient", ha="center", va="top", size=9)
    panel.text(4.6, -0.55, "Σ  all-reduce over tp", color=SUM, ha="center", va="top")
    panel.set_xlim(-2.3, ends[1] + 0.1)
    panel.set_ylim(-1.0, 1.75)
    panel.axis("off")


def heads(weights: np.ndarray, devices: int) -> None:
    """Draws the attention weights `[N, T, T]` of each head in a frame of its device's colour."""
    count = len(weights)
    _, panels = plt.subplots(1, count, figsize=(7, 1.6))
    for head, panel in enumerate(panels):
        panel.imshow(weights[head], cmap="Greys", vmin=0, vmax=1)
        panel.set_xticks([])
        panel.set_yticks([])
        panel.set_title(f"head {head}", fontsize=8, weight="normal", loc="center")
        panel.set_xlabel(f"device {devices * head // count}", fontsize=8)
        for spine in panel.spines.values():
            spine.set(visible=True, color=f"C{devices * head // count}", linewidth=4)


def vocabulary(logits: np.ndarray, label: int, devices: int) -> None:
    """Draws the logits of one token, in the colour of the device that computes each."""
    _, panel = plt.subplots(figsize=(7, 2.4))
    size = len(logits) // devices
    for device in range(devices):
        own = range(size * device, size * (device + 1))
        panel.bar(own, logits[own], color=f"C{device}", label=f"device {device}")
    panel.annotate(
        "label",
        (label, max(0, logits[label])),
        (label, logits.max() + 0.9),
        ha="center",
        arrowprops={"arrowstyle": "->"},
    )
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_ylim(top=logits.max() + 1.6)
    panel.set_ylabel("logit")
    panel.set_xlabel("token of the vocabulary")
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1))


def bars(panels: dict[str, dict[str, float]], label: str = "") -> None:
    """Draws a panel of bars for each title, with a number for each name, above a label."""
    _, all_axes = plt.subplots(1, len(panels), figsize=(7, 2.7), squeeze=False)
    for panel, (title, values) in zip(all_axes[0], panels.items(), strict=True):
        color = SUM if title.startswith("Sent") else WHOLE
        drawn = panel.bar(list(values), list(values.values()), width=0.55, color=color)
        panel.bar_label(drawn, [f"{value:,.0f}" for value in values.values()], padding=2)
        panel.set_title(title)
        panel.set_xlabel(label)
        panel.set_yticks([])
        panel.spines["left"].set_visible(False)
        panel.margins(y=0.15)


def curves(lines: dict[str, tuple], x: str, y: str, logarithmic: bool = False) -> None:
    """Draws lines `(xs, ys, style)` by name."""
    _, panel = plt.subplots(figsize=(7, 3.2))
    for name, (xs, ys, style) in lines.items():
        panel.plot(xs, ys, style, label=name)
    if logarithmic:
        panel.loglog()
    panel.set_xlabel(x)
    panel.set_ylabel(y)
    panel.grid()
    panel.legend()
