"""Pictures of tokens: packed into rows, split over cp, and multiplied with experts."""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from drawing import MOVES, PALETTE, Drawing
from facts import bytes_sent, numbers
from meshes import BLOCK

from jaxtp.data.packing import pack
from jaxtp.layers.context import halo, to_natural
from jaxtp.layers.experts.dispatch import Rows

ROOM = 2048
DOCUMENTS = (1530, 240, 980, 410, 2048, 120, 760, 1290, 330, 640, 180, 1010, 520, 290)
"""Lengths of documents."""
CP = 4
WINDOW = 4096
LONG = (
    f"--config configs/llama31_8b_128k.yaml --mesh fsdp=2,cp={CP} --data.global-batch-size 2 "
    "--train.accumulation 1 --mesh.context "
)
LENGTH = 131_072
BLOCKS = 32
WIDTH, HEIGHT = 152, 92
"""Of all heads and tokens, in pixels."""
PLACES = (0, 94, 188, 282)
TOKENS, EXPERTS, CHOSEN = 8, 8, 2
TP = 4
MIXTURE = f"{BLOCK} --model.num-experts {EXPERTS} --model.d-ff 192"


def draw_packing(page: dict[str, str]) -> Drawing:
    """Draws documents, one in each row and packed, and the attention in a row."""
    sizes = np.array(DOCUMENTS)
    pieces = np.stack([np.arange(len(sizes)), np.zeros_like(sizes)], axis=1)
    ordered, counts = pack(pieces, sizes, ROOM)
    bounds = pairwise(np.cumsum([0, *counts]))
    packed = [ordered[first:last, 0].tolist() for first, last in bounds]
    single = [[number] for number in range(len(sizes))]
    drawing = Drawing(384, page, f"{len(sizes)} documents in rows of {ROOM:,} tokens")
    width = 322
    for left, rows, words in ((14, single, "one in each row"), (364, packed, "packed")):
        padding = 1 - sizes.sum() / (len(rows) * ROOM)
        drawing.text(left, 52, f"{words}: {len(rows)} rows, {padding:.0%} padding", "start")
        for number, documents in enumerate(rows):
            top = 64 + 22 * number
            drawing.box(left, top, width, 18, page["box"], stroke=page["whole"])
            ends = left + np.cumsum(sizes[documents]) / ROOM * width
            for document, end in zip(documents, ends, strict=True):
                size = sizes[document] / ROOM * width
                drawing.box(end - size, top, size - 1, 18, color_of(document))
                ink = "white" if document % 7 == 0 else "black"
                drawing.text(end - size / 2, top + 14, str(document + 1), fill=ink)
    top = 84 + 22 * len(packed)
    side = 364 - top
    fullest = max(packed, key=len)
    drawing.box(364, top, side, side, page["box"], stroke=page["whole"])
    at = 0.0
    for document in fullest:
        size = sizes[document] / ROOM * side
        corners = [(at, at), (at, at + size), (at + size, at + size)]
        drawing.shape([(364 + x, top + y) for x, y in corners], color_of(document))
        at += size
    lines = (
        "Attention in the row",
        "of most documents:",
        "each token sees only",
        "earlier tokens of its",
        "own document.",
    )
    for number, words in enumerate(lines):
        drawing.text(378 + side, top + 38 + 20 * number, words, "start")
    return drawing


def color_of(document: int) -> str:
    """Returns a colour that the neighbours in a row do not have."""
    return PALETTE[document % 7]


def draw_order(page: dict[str, str]) -> Drawing:
    """Draws the work of causal attention of each device along cp, in order and in zigzag order."""
    drawing = Drawing(396, page, "Attention over cp 4: the scores that each device computes")
    holders = np.repeat(np.arange(CP), 2)
    side = 30
    top = 72
    for left, name, order in (
        (40, "in order", holders),
        (390, "zigzag order", to_natural(holders, CP, 0)),
    ):
        drawing.text(left, 54, name, "start", font_weight="bold")
        scores = np.zeros(CP)
        for query, device in enumerate(order):
            color = PALETTE[device]
            y = top + side * query
            corner = left + side * query
            drawing.box(left, y, side * query, side, color)
            drawing.shape([(corner, y), (corner, y + side), (corner + side, y + side)], color)
            # The last chunk of keys that a chunk of queries sees is its own, of which it sees half.
            scores[device] += query + 0.5
        bottom = top + side * len(order)
        drawing.faint(left, bottom + 18, "keys, in eight chunks")
        drawing.faint(left - 10, bottom, "queries", transform=f"rotate(-90 {left - 10} {bottom})")
        shares = scores / scores.sum()
        for device, share in enumerate(shares):
            y = top + 20 * device
            drawing.box(left + 150, y, 14, 14, PALETTE[device])
            drawing.text(left + 170, y + 12, f"device {device}: {share:.0%}", "start")
    drawing.faint(
        14, 364, "A token sees the tokens before it. In order, the device with the last tokens"
    )
    drawing.faint(14, 382, "works longest, and all others wait. In zigzag order each does as much.")
    return drawing


def draw_context(page: dict[str, str]) -> Drawing:
    """Draws what each device along cp holds, and what moves in attention, by method."""
    drawing = Drawing(570, page, f"Attention over cp {CP}: what each device holds, and what moves")
    in_order = list(range(CP))
    zigzag = to_natural(np.repeat(in_order, 2), CP, 0)
    reach = halo(LENGTH, CP, WINDOW, zigzag=False) or 0
    methods = {
        "ulysses": ("ulysses: a device attends with some heads, over all tokens", in_order),
        "gather": ("gather: a device attends with its own tokens, to the keys of all", zigzag),
        f"gather --model.sliding-window {WINDOW}": (
            f"gather in a window of {WINDOW:,} tokens: a device fetches the keys that it lacks",
            in_order,
        ),
    }
    for number, (flags, (words, holders)) in enumerate(methods.items()):
        top = 72 + 160 * number
        [(kind, sent)] = bytes_sent(
            numbers("explain", LONG + flags), "blocks.attention", "cp"
        ).items()
        drawing.text(14, top - 16, words, "start", font_size=14)
        drawing.text(686, top - 16, f"sends {sent / BLOCKS / 1e6:,.0f} MB", "end", font_size=14)
        draw_parts(drawing, 14, top, holders)
        middle = top + HEIGHT / 2
        drawing.text(218, middle - 10, kind)
        drawing.arrow(f"M174 {middle:g}H262")
        names = ["keys and values", "for attention"]
        if flags == "ulysses":
            draw_parts(drawing, 270, top, in_order, by_head=True)
            drawing.text(474, middle - 10, kind)
            drawing.arrow(f"M430 {middle:g}H518")
            draw_parts(drawing, 526, top, holders)
            names = ["queries, keys, values", "for attention", "results"]
        elif flags == "gather":
            drawing.box(270, top, WIDTH, HEIGHT, page["whole"])
            drawing.text(270 + WIDTH / 2, middle + 5, "all, on each device", fill="black")
        else:
            draw_halos(drawing, 270, top, reach)
        for place, name in enumerate(names):
            drawing.faint(14 + 256 * place + WIDTH / 2, top + HEIGHT + 18, name, "middle")
    drawing.legend(14, 530, {f"device {device}": PALETTE[device] for device in in_order}, PLACES)
    drawing.text(400, 531, "Width: all tokens. Height: all heads.", "start")
    words = f"What a device sends in the forward pass of a block: Llama 3.1 8B, {LENGTH:,} tokens."
    drawing.faint(14, 558, words)
    return drawing


def draw_parts(
    drawing: Drawing, x: float, y: float, holders: Sequence[int], by_head: bool = False
) -> None:
    """Draws all heads and tokens, whose parts devices hold."""
    count = len(holders)
    for place, device in enumerate(holders):
        color = PALETTE[device]
        if by_head:
            drawing.box(x, y + place * HEIGHT / count, WIDTH, HEIGHT / count, color)
        else:
            drawing.box(x + place * WIDTH / count, y, WIDTH / count, HEIGHT, color)


def draw_halos(drawing: Drawing, x: float, y: float, reach: int) -> None:
    """Draws the keys of each device: its own, and those of the device before it."""
    chunk = WIDTH / CP
    height = HEIGHT / CP
    for device in range(CP):
        left = x + device * chunk
        top = y + device * height
        drawing.box(x, top, WIDTH, height - 3, drawing.page["box"])
        drawing.box(left, top, chunk, height - 3, PALETTE[device])
        if device:
            width = chunk * reach * CP / LENGTH
            drawing.box(left - width, top, width, height - 3, PALETTE[device - 1])


def draw_experts(page: dict[str, str]) -> Drawing:
    """Draws the rows that each device along tp computes for its experts."""
    drawing = Drawing(398, page, f"{EXPERTS} experts over tp {TP}: no token has to move")
    scores = jax.random.normal(jax.random.key(2), (TOKENS, EXPERTS))
    _, choices = jax.lax.top_k(scores, CHOSEN)
    per_device = EXPERTS // TP
    width = 158
    words = (
        f"Each token chooses {CHOSEN} experts. A device has all tokens, and takes those that "
        "chose its experts."
    )
    drawing.text(14, 50, words, "start")
    for device, color in enumerate(PALETTE[:TP]):
        left = 14 + 171 * device
        middle = left + width / 2
        drawing.box(left, 64, width, 196, page["box"], rx=8)
        drawing.text(middle, 84, f"device {device}", font_weight="bold")
        draw_tokens(drawing, middle, 94)
        drawing.arrow(f"M{middle} 118V136")
        local = choices - device * per_device
        is_own = (local >= 0) & (local < per_device)
        rows = Rows.of(jnp.where(is_own, local, per_device), per_device)
        tokens = iter((np.asarray(rows.choice_of_row) // CHOSEN).tolist())
        for expert, count in enumerate(rows.sizes.tolist()):
            x = left + 12 + 70 * expert
            drawing.text(x + 32, 154, f"expert {device * per_device + expert}")
            for place in range(count):
                drawing.box(x + 8, 164 + 24 * place, 48, 20, color, rx=3)
                ink = "white" if device == 0 else "black"
                drawing.text(x + 32, 179 + 24 * place, str(next(tokens)), fill=ink)
        drawing.arrow(f"M{middle} 264V290")
    drawing.line([(93, 300), (607, 300)], MOVES, 3)
    drawing.disc(350, 300, forward=True)
    drawing.arrow("M350 314V330")
    draw_tokens(drawing, 350, 336)
    passes = ("forward", "backward")
    sent = bytes_sent(numbers("explain", MIXTURE), "blocks.mlp", "tp", passes)
    dense = bytes_sent(numbers("explain", BLOCK), "blocks.mlp", "tp", passes)
    drawing.text(372, 324, f"sum over tp, by {' and '.join(sent)}", "start")
    ratio = sum(sent.values()) / sum(dense.values())
    words = f"A dense MLP has this sum too: over tp, experts send {ratio:.2f} times as much."
    drawing.faint(14, 384, words)
    return drawing


def draw_tokens(drawing: Drawing, middle: float, top: float) -> None:
    for token in range(TOKENS):
        x = middle + 17 * (token - TOKENS / 2)
        drawing.box(x, top, 15, 18, drawing.page["whole"])
        drawing.text(x + 7.5, top + 14, str(token), fill="black")
