"""Charts of memory, of time, and of a run that was interrupted."""

import json

from drawing import MOVES, PALETTE, ROOT, Drawing
from facts import Record, numbers

GB = 1e9
LLAMA = "--config=configs/llama3_8b.yaml --hardware=h100x8"
REMATS = ("full", "save_reduced", "save_gathered", "save_dots", "none")
MESHES = ("fsdp=8", "fsdp=4,tp=2", "fsdp=2,tp=4", "tp=8")
KINDS = {
    "parameters": "parameters",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gathered_weights": "gathered weights",
    "activations": "activations",
    "logits": "head and logits",
}
"""The label of each kind of memory, in the order of the style's colours."""
COMPUTING = {
    "products": "products with weights",
    "attention": "attention",
    "elementwise": "elementwise",
    "update": "update",
}
GREYS = ("#9A9A9A", "#C4C4C4", "#6E6E6E", "#DEDEDE")
AXES = ("dp", "fsdp", "cp", "tp")
CURVES = ("undisturbed", "killed", "resumed")
MOVING = {"over fsdp": PALETTE[3], "over tp": MOVES}


def seconds(setting: Record) -> str:
    """Returns the range of a step's time, from full overlap to none."""
    time = setting["seconds"]
    return f"{time['overlapped']:.2f} to {time['serial']:.2f} s"


def draw_memory(page: dict[str, str]) -> Drawing:
    """Draws the memory of a device by remat policy, with the limit."""
    drawing = Drawing(352, page, "Memory of each GPU by remat: Llama 3 8B on eight H100, fsdp 8")
    fixed = f"{LLAMA} --mesh fsdp=8 --as-configured --train.accumulation=1"
    records = {remat: numbers("estimate", f"{fixed} --model.remat={remat}") for remat in REMATS}
    room = records["full"]["bytes_for_jax"]
    settings = {remat: record["meshes"][0] for remat, record in records.items()}
    largest = max(setting["bytes_per_device"]["total"] for setting in settings.values())
    left = 126
    scale = 380 / largest
    colors = dict(zip(KINDS.values(), PALETTE, strict=False))
    drawing.faint(686, 58, "a step takes", "end")
    for number, (remat, setting) in enumerate(settings.items()):
        top = 68 + 40 * number
        sizes = setting["bytes_per_device"]
        drawing.text(14, top + 18, remat, "start", font_size=14)
        widths = {label: sizes[kind] * scale for kind, label in KINDS.items()}
        right = drawing.bar(left, top, 26, widths, colors)
        drawing.text(right + 6, top + 18, f"{sizes['total'] / GB:.1f} GB", "start")
        fits = setting["fits"]
        words = seconds(setting) if fits else "does not fit"
        drawing.text(686, top + 18, words, "end", **({} if fits else {"font_weight": "bold"}))
    limit = left + room * scale
    ends = [(limit, 62), (limit, 68 + 40 * len(REMATS) - 8)]
    drawing.line(ends, page["ink"], 1.5, stroke_dasharray="5 4")
    drawing.text(limit, 56, f"limit {room / GB:.1f} GB")
    drawing.legend(126, 290, colors, (0, 150, 300))
    drawing.faint(14, 340, "What a block does not save, its backward pass computes again.")
    return drawing


def draw_time(page: dict[str, str]) -> Drawing:
    """Draws what a step computes and what it moves, on meshes of eight devices."""
    drawing = Drawing(406, page, "Time of a step, modelled: Llama 3 8B on eight H100")
    record = numbers("estimate", f"{LLAMA} --mesh {' '.join(MESHES)}")
    settings = {name_of(setting): setting for setting in record["meshes"]}
    left = 186
    drawing.faint(686, 40, "a step takes", "end")
    longest = max(setting["seconds"]["overlapped"] for setting in settings.values())
    scale = 370 / longest
    greys = dict(zip(COMPUTING.values(), GREYS, strict=True))
    for number, mesh in enumerate(MESHES):
        top = 48 + 64 * number
        setting = settings[mesh]
        time = setting["seconds"]
        drawing.text(14, top + 18, in_words(mesh), "start", font_size=14)
        drawing.faint(14, top + 38, setting["remat"])
        computing = {label: time[part] * scale for part, label in COMPUTING.items()}
        drawing.bar(left, top, 22, computing, greys)
        moving = {f"over {axis}": value * scale for axis, value in time["communication"].items()}
        drawing.bar(left, top + 24, 22, moving, MOVING)
        drawing.text(686, top + 22, seconds(setting), "end")
        for label, height in (("computes", 16), ("sends", 40)):
            drawing.faint(left - 6, top + height, label, "end", font_size=12)
    drawing.legend(126, 322, greys | MOVING, (0, 180, 300, 420))
    drawing.faint(
        14, 374, "If sending overlaps fully with computing, a step takes as long as the longer"
    )
    drawing.faint(14, 392, "of its two bars; if nothing overlaps, as long as both together.")
    return drawing


def name_of(setting: Record) -> str:
    """Returns the mesh of a setting, as `fsdp=4,tp=2`."""
    return ",".join(f"{axis}={setting[axis]}" for axis in AXES if setting[axis] > 1)


def in_words(mesh: str) -> str:
    """Returns `fsdp 4 x tp 2` for `fsdp=4,tp=2`."""
    return mesh.replace("=", " ").replace(",", " x ")


def draw_interrupted(page: dict[str, str]) -> Drawing:
    """Draws the losses of a run that was killed and resumed on another mesh, and undisturbed."""
    run = json.loads((ROOT / "scripts/results/interrupted_run.json").read_text())
    drawing = Drawing(356, page, "A run that was killed, and resumed on another mesh")
    undisturbed, killed, resumed = (points(run[name]) for name in CURVES)
    steps = len(undisturbed)
    low = int(min(loss for _, loss in undisturbed))
    high = max(loss for _, loss in undisturbed)

    def place(step: float, loss: float) -> tuple[float, float]:
        return 48 + 634 * step / steps, 304 - 252 * (loss - low) / (high - low)

    for loss in range(low, int(high) + 1):
        height = place(0, loss)[1]
        drawing.line([(48, height), (682, height)], page["whole"], 0.5)
        drawing.faint(40, height + 5, str(loss), "end")
    for step in range(0, steps + 1, 10):
        drawing.faint(place(step, low)[0], 324, str(step), "middle")
    drawing.faint(40, 52, "loss", "end")
    drawing.faint(365, 344, "step", "middle")
    drawing.box(270, 48, 340, 104, page["page"])
    last_step, last_loss = killed[-1]
    difference = max(abs(loss - run["undisturbed"][str(step)]) for step, loss in resumed)
    words = (
        f"undisturbed, on {in_words(run['first_mesh'])}",
        f"killed after step {last_step}",
        f"resumed from step {run['checkpoint']}, on {in_words(run['second_mesh'])}",
    )
    lines = ((page["whole"], 11), (PALETTE[1], 5), (page["ink"], 2))
    for number, (curve, (color, width)) in enumerate(
        zip((undisturbed, killed, resumed), lines, strict=True)
    ):
        drawing.line([place(*point) for point in curve], color, width, stroke_linejoin="round")
        top = 64 + 24 * number
        drawing.line([(280, top), (312, top)], color, width)
        drawing.text(322, top + 5, words[number], "start")
    x, y = place(last_step, last_loss)
    for slope in (-1, 1):
        drawing.line([(x - 7, y - 7 * slope), (x + 7, y + 7 * slope)], MOVES, 3)
    drawing.text(322, 141, f"The losses differ by at most {difference:.7f}.", "start")
    return drawing


def points(losses: dict[str, float]) -> list[tuple[int, float]]:
    """Returns the steps and losses of a curve."""
    return [(int(step), loss) for step, loss in losses.items()]
