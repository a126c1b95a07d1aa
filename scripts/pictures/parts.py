"""Where the time of a step goes by part, and what each module sends."""

from drawing import MOVES, PALETTE, ROOT, Drawing
from facts import numbers

OUTPUT = ROOT / "scripts/results/step_beside_plain.txt"
STEP = ("dp 1 x fsdp 8 x cp 1 x tp 1; 8b with 32 layers", "jaxtp")
"""Words of the line above a program's tables, and the name of the table."""
GB = 1e9
KINDS = {
    "products": "#9A9A9A",
    "products again (remat full)": "#DEDEDE",
    "other kernels": "#6E6E6E",
    "links": PALETTE[3],
}
BLOCK = "--config configs/llama3_8b.yaml --mesh fsdp=4,tp=2 --train.accumulation 1"
SENT = {
    ("fsdp", "forward"): PALETTE[3],
    ("fsdp", "backward"): "#E8C3D9",
    ("tp", "forward"): MOVES,
    ("tp", "backward"): "#F0B48A",
}


def milliseconds() -> dict[str, dict[str, float]]:
    """Returns the time of each part of the compiled step by kind, from its table."""
    _, found, text = OUTPUT.read_text().partition(STEP[0])
    table = text.partition(f"\n{STEP[1]}\n")[2].partition("\n\n")[0]
    if not (found and table):
        raise ValueError(f"{OUTPUT} has no table {STEP}")
    _, *rows = table.splitlines()
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        # A column is right-aligned under its name; a part without products has no `least`.
        name = row[:16].strip()
        products, others, copies, links = map(float, row.split()[-4:])
        ratio = float(row.split()[-7]) if products else 1.0
        needed = products / ratio
        values = (needed, products - needed, others + copies, links)
        times[name] = dict(zip(KINDS, values, strict=True))
    return times


def draw_parts(page: dict[str, str]) -> Drawing:
    """Draws the least time of each part of a step."""
    times = milliseconds()
    parts = [name for name in times if not name.startswith(("all", "sent"))]
    drawing = Drawing(390, page, "Where a step's time goes: Llama 3 8B on eight H100, fsdp 8")
    left = 140
    longest = max(sum(times[part].values()) for part in parts)
    for number, part in enumerate(parts):
        top = 44 + 32 * number
        drawing.text(14, top + 16, part, "start")
        widths = {kind: value * 480 / longest for kind, value in times[part].items()}
        right = drawing.bar(left, top, 22, widths, KINDS)
        drawing.text(right + 6, top + 16, f"{sum(times[part].values()):.0f} ms", "start")
    drawing.legend(14, 322, KINDS, (0, 110, 320, 460))
    drawing.faint(14, 356, "Of the program that NVIDIA's compiler built, at the peaks of the card:")
    drawing.faint(
        14, 374, "the least time of each part, not a measurement. Links can overlap with the rest."
    )
    return drawing


def draw_sent(page: dict[str, str]) -> Drawing:
    """Draws the bytes that each module of a decoder sends in a step, from `explain --json`."""
    record = numbers("explain", BLOCK)
    sent: dict[str, dict[tuple[str, str], float]] = {}
    for each in record["collectives"]:
        (axis,) = each["axes"]
        kinds = sent.setdefault(each["module"], dict.fromkeys(SENT, 0.0))
        kinds[axis, each["pass"]] += each["bytes_sent"] / GB
    sent["head and loss"] = sent.pop("the model itself")
    visible = [module for module in sent if sum(sent[module].values()) > 0.1]
    title = "What each GPU sends in a step: Llama 3 8B on fsdp 4 x tp 2"
    drawing = Drawing(130 + 32 * len(visible), page, title)
    longest = max(sum(kinds.values()) for kinds in sent.values())
    for number, module in enumerate(visible):
        top = 44 + 32 * number
        drawing.text(14, top + 16, module, "start")
        widths = {kind: value * 430 / longest for kind, value in sent[module].items()}
        right = drawing.bar(176, top, 22, widths, SENT)
        drawing.text(right + 6, top + 16, f"{sum(sent[module].values()):.1f} GB", "start")
    names = {f"over {axis}, {half}": color for (axis, half), color in SENT.items()}
    drawing.legend(176, 72 + 32 * len(visible), names, (0, 180))
    return drawing
