"""A block on a mesh, and a mesh on two hosts."""

from collections.abc import Sequence

from drawing import PALE, PALETTE, Drawing
from facts import Record, numbers

FSDP, TP = 2, 4
BLOCK = f"--mesh fsdp={FSDP},tp={TP} --model.sequence-parallel false --model.remat none"
HOSTS = (
    "--config configs/llama3_8b.yaml --mesh fsdp=4,tp=4 --model.remat save_gathered "
    "--data.sequence-length 8192 --data.global-batch-size 8 --train.accumulation 1"
)
DEVICES = PALETTE[:TP]


def draw_tensor(
    drawing: Drawing, x: float, y: float, width: float, height: float, split: Sequence[str]
) -> None:
    """Draws a matrix whose rows and columns are split over an axis each, or over none.

    Colours are places along tp; the second half over fsdp is paler.
    """
    rows, columns = (parts_of(axis) for axis in split)
    for row in range(rows):
        for column in range(columns):
            places = dict(zip(split, (row, column), strict=True))
            fill = DEVICES[places["tp"]] if "tp" in places else drawing.page["whole"]
            drawing.box(
                x + column * width / columns,
                y + row * height / rows,
                width / columns - 1,
                height / rows - 1,
                fill,
                opacity=PALE if places.get("fsdp") else 1,
            )


def parts_of(axis: str) -> int:
    """Returns the number of parts that an axis of the block's mesh cuts."""
    return {"fsdp": FSDP, "tp": TP}.get(axis, 1)


def splits(record: Record) -> dict[str, list[str]]:
    """Returns the axis that splits each dim of each module's first parameter."""
    result = {}
    for module in record["modules"]:
        # The first dim counts the blocks.
        dims = module["parameters"][0]["split"][1:]
        used = [[axis for axis in axes if record["mesh"][axis] > 1] for axes in dims]
        result[module["module"]] = [axes[0] if axes else "" for axes in used]
    return result


def sums(record: Record) -> dict[tuple[str, str], float]:
    """Returns the bytes of each all-reduce over tp in one block, by module and pass."""
    return {
        (each["module"], each["pass"]): each["bytes_sent"] / each["count"]
        for each in record["collectives"]
        if each["axes"] == ["tp"] and each["module"].startswith("blocks.")
    }


def draw_block(page: dict[str, str]) -> Drawing:
    """Draws the two branches of a block: what is split how, and where sums over tp are."""
    record = numbers("explain", BLOCK)
    split = splits(record)
    moved = sums(record)
    drawing = Drawing(484, page, "One block on eight devices: fsdp 2 x tp 4")
    branches = (
        ("attention", 128, ("attention.qkv", "attention.out"), ("q", "k", "v"), "heads"),
        ("MLP", 308, ("mlp.gate_up", "mlp.down"), ("gate", "up"), "hidden features"),
    )
    for name, middle, (first, second), outputs, inside in branches:
        column_layer = f"blocks.{first}"
        row_layer = f"blocks.{second}"
        drawing.box(8, middle - 84, 684, 172, page["box"], rx=8)
        drawing.text(24, middle - 62, name, "start", font_weight="bold")
        draw_tensor(drawing, 34, middle - 28, 44, 56, ("fsdp", ""))
        drawing.caption(56, middle + 46, "tokens", "whole over tp")
        drawing.arrow(f"M80 {middle}H104")
        if (column_layer, "backward") in moved:
            drawing.disc(120, middle, forward=False)
        drawing.arrow(f"M134 {middle}H158")
        side = 40 if len(outputs) == 3 else 54
        long_side = side if len(outputs) == 3 else 1.8 * side
        for number, output in enumerate(outputs):
            top = middle + (number - len(outputs) / 2) * (side + 4) + 2
            draw_tensor(drawing, 170, top, long_side, side, split[f"{column_layer}.kernels"])
            drawing.text(176 + long_side, top + side / 2 + 4, output, "start", fill=page["faint"])
        drawing.text(170 + long_side / 2, middle + 80, "in columns", font_size=12)
        after_names = 186 + long_side + 8 * len(outputs[0])
        drawing.arrow(f"M{after_names:g} {middle}H340")
        draw_tensor(drawing, 350, middle - 28, 72, 56, ("fsdp", "tp"))
        drawing.caption(386, middle + 46, inside, "split over tp")
        drawing.arrow(f"M428 {middle}H460")
        left = 498 - side / 2
        draw_tensor(drawing, left, middle - long_side / 2, side, long_side, split[row_layer])
        drawing.text(498, middle - long_side / 2 - 7, second.partition(".")[2], fill=page["faint"])
        drawing.text(498, middle + 80, "in rows", font_size=12)
        drawing.arrow(f"M532 {middle}H556")
        if (row_layer, "forward") in moved:
            drawing.disc(572, middle, forward=True)
        drawing.arrow(f"M588 {middle}H612")
        draw_tensor(drawing, 622, middle - 28, 44, 56, ("fsdp", ""))
        drawing.caption(644, middle + 46, "tokens", "whole over tp")
    _draw_legend(drawing, 420)
    return drawing


def _draw_legend(drawing: Drawing, top: float) -> None:
    for place, color in enumerate(DEVICES):
        drawing.box(20 + 62 * place, top - 11, 14, 14, color)
        drawing.text(38 + 62 * place, top, f"tp {place}", "start")
    drawing.box(20, top + 17, 14, 14, drawing.page["whole"])
    drawing.text(38, top + 28, "every tp", "start")
    drawing.box(118, top + 17, 7, 14, DEVICES[0])
    drawing.box(125, top + 17, 7, 14, DEVICES[0], opacity=PALE)
    drawing.text(138, top + 28, "fsdp 0 and 1", "start")
    drawing.disc(318, top - 5, forward=True)
    drawing.text(338, top, "sum over tp in the forward pass", "start")
    drawing.disc(318, top + 24, forward=False)
    drawing.text(338, top + 29, "sum over tp in the backward pass", "start")
    words = "fsdp stores half of each matrix, and gathers the other half just before its product."
    drawing.text(20, top + 54, words, "start", fill=drawing.page["faint"])


def draw_hosts(page: dict[str, str]) -> Drawing:
    """Draws a mesh on two hosts of eight devices, and what moves along its axes."""
    record = numbers("explain", HOSTS)
    mesh = record["mesh"]
    drawing = Drawing(376, page, "Sixteen GPUs on two hosts: fsdp 4 x tp 4")
    for row in range(mesh["fsdp"]):
        host, place = divmod(row, 2)
        top = 84 + 156 * host + 62 * place
        if not place:
            drawing.box(76, top - 14, 374, 138, page["box"], rx=8)
            drawing.text(16, top + 60, f"host {host}", "start", font_weight="bold")
        for column, color in enumerate(DEVICES):
            left = 90 + 88 * column
            drawing.box(left, top, 82, 50, color, rx=5)
            ink = "white" if column == 0 else "black"
            drawing.text(left + 41, top + 22, f"GPU {TP * row + column}", fill=ink)
            drawing.text(left + 41, top + 40, f"fsdp {row}, tp {column}", fill=ink, font_size=11)
    drawing.arrow("M92 58H434", both=True)
    drawing.text(263, 50, "tp: one row, inside a host")
    drawing.arrow("M466 86V348", both=True)
    sent = {axis: round(size / 1e9) for axis, size in record["bytes_sent"].items()}
    lines = {
        152: "fsdp: one column,",
        170: "also between hosts",
        214: "In a step of Llama 3 8B",
        232: "each GPU sends",
        254: f"{sent['tp']} GB of activations over tp",
        274: f"{sent['fsdp']} GB of weights over fsdp",
    }
    for height, words in lines.items():
        drawing.text(482, height, words, "start")
    return drawing
