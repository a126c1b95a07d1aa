"""Where the time of a step goes by part, and what a plan sends by module."""

from drawing import MOVES, PALETTE, ROOT, Drawing
from facts import numbers

OUTPUT = ROOT / "scripts/results/step_beside_plain.txt"
STEP = ("dp 1 x fsdp 8 x cp 1 x tp 1; 8b with 32 layers", "jaxtp")
"""Words of the line above a program's tables, and the name of the table."""
KINDS = {
    "products": "#9A9A9A",
    "products again (remat full)": "#DEDEDE",
    "other kernels": "#6E6E6E",
    "links": PALETTE[3],
}
VIT = "scripts/examples/vit.py"
PLAN = (
    f"--model.build={VIT}:build --model.plan={VIT}:PLAN --train.loss={VIT}:loss "
    f"--data.batches={VIT}:batches --data.global-batch-size 64 --mesh fsdp=2,tp=4"
)
PASSES = {"forward": PALETTE[0], "backward": MOVES}


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
    drawing.faint(14, 374, "the least time of each part, not a measurement. Links overlap with the rest.")
    return drawing


def draw_plan(page: dict[str, str]) -> Drawing:
    """Draws the bytes that each module sends over tp in a step."""
    record = numbers("explain", PLAN)
    sent: dict[str, dict[str, float]] = {}
    for each in record["collectives"]:
        if each["axes"] == ["tp"] and each["bytes_sent"]:
            passes = sent.setdefault(each["module"], dict.fromkeys(PASSES, 0.0))
            passes[each["pass"]] += each["bytes_sent"]
    modules = sorted(sent, key=lambda module: -sum(sent[module].values()))
    drawing = Drawing(108 + 32 * len(modules), page, "What a plan sends over tp: a ViT on fsdp 2 x tp 4")
    longest = max(sum(passes.values()) for passes in sent.values())
    for number, module in enumerate(modules):
        top = 44 + 32 * number
        drawing.text(14, top + 16, module, "start")
        widths = {kind: value * 330 / longest for kind, value in sent[module].items()}
        right = drawing.bar(240, top, 22, widths, PASSES)
        total = sum(sent[module].values())
        drawing.text(right + 6, top + 16, f"{total / 1e3:,.0f} kB", "start")
    drawing.legend(240, 76 + 32 * len(modules), PASSES, (0, 110))
    return drawing
