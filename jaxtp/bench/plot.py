"""Bandwidth over message size, and computing beside communication over tp, as a picture."""

from typing import Any

from jaxtp.bench.measured import VIRTUAL, Measured
from jaxtp.bench.moving import KINDS

MARKS = dict(zip(KINDS, "osvD^", strict=True))


def draw(measured: Measured, figure: Any) -> None:
    """Draws two panels: GB/s that each device sends, by axis and kind; microseconds of a pair of layers."""
    figure.set_size_inches(12, 5)
    moving, computing = figure.subplots(1, 2)
    note = f"\n{VIRTUAL}" if measured.place.virtual else ""
    figure.suptitle(f"{measured.place}{note}", fontsize=10)
    _moving(moving, measured)
    _computing(computing, measured)
    for panel in (moving, computing):
        panel.spines[["top", "right"]].set_visible(False)
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8)


def _moving(panel: Any, measured: Measured) -> None:
    axes = list(dict.fromkeys(message.axis for message in measured.messages))
    for number, axis in enumerate(axes):
        for kind, mark in MARKS.items():
            shown = [one for one in measured.messages if (one.axis, one.collective.kind) == (axis, kind)]
            sizes, speeds = zip(*((one.collective.bytes, one.speed / 1e9) for one in shown), strict=True)
            label = f"{kind} over {axis}, {shown[0].collective.group} devices"
            panel.plot(sizes, speeds, color=f"C{number}", marker=mark, label=label)
    panel.set(xscale="log", yscale="log", xlabel="bytes of a message")
    panel.set_title("GB/s that each device sends", fontsize=10)


def _computing(panel: Any, measured: Measured) -> None:
    places = range(len(measured.pairs))
    computing = [pair.computing * 1e6 for pair in measured.pairs]
    panel.bar(places, computing, width=0.6, label="computing")
    panel.bar(places, [p.moving * 1e6 for p in measured.pairs], bottom=computing, width=0.6, label="communication")
    panel.set_xticks(places, [f"tp {pair.tp}" for pair in measured.pairs])
    panel.set_title("microseconds of a column and a row layer, forward and backward", fontsize=10)
