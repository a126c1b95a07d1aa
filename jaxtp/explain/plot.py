"""A picture of how a model's parameters are split."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtp.explain.explanation import Explanation, Split
from jaxtp.mesh import STORAGE, TP, axes_of, describe_mesh, parts
from jaxtp.parallel.layouts import dim_over

_COLUMNS = 6
_MOST_PARTS = 16
"""Most parts of an axis that are drawn; more would be a grey square."""


def draw(found: Explanation, figure: Any) -> None:
    """Draws every matrix as a rectangle, cut as it is split; one for modules that differ in a number only.

    A colour is a place along tp, and a shade one along the axes that divide storage; where a matrix is whole along an
    axis, all devices of that axis hold what is drawn. Of more than two dims, those on one side are drawn as one.
    """
    drawn = list(_matrices(found))
    rows = max(1, math.ceil(len(drawn) / _COLUMNS))
    figure.set_size_inches(2.6 * _COLUMNS, 2.3 * rows)
    panels = figure.subplots(rows, _COLUMNS, squeeze=False)
    for panel in panels.flat:
        panel.axis("off")
    for panel, (title, split) in zip(panels.flat, drawn, strict=False):
        _draw_matrix(panel, title, split, found.sizes)
    figure.suptitle(
        f"mesh {describe_mesh(found.sizes)}: colour = place along tp, shade = place along {' and '.join(STORAGE)}",
        fontsize=10,
    )


def _matrices(found: Explanation) -> Iterator[tuple[str, Split]]:
    for pattern, (row, *_) in found.groups.items():
        for split in row.parameters:
            if len(split.shape) > 1:
                style = f"\n{type(row.style).__name__}" if row.style else ""
                yield f"{pattern}.{split.name}{style}" if pattern else split.name, split


def _draw_matrix(panel: Any, title: str, split: Split, sizes: Mapping[str, int]) -> None:
    from matplotlib.colors import hsv_to_rgb

    rows = _rows(split)
    height, width = math.prod(split.shape[:rows]), math.prod(split.shape[rows:])
    image = [
        [hsv_to_rgb(_colour(split, sizes, i / _MOST_PARTS, j / _MOST_PARTS)) for j in range(_MOST_PARTS)]
        for i in range(_MOST_PARTS)
    ]
    aspect = max(0.4, min(2.5, (height / width) ** 0.5))
    panel.imshow(image, extent=(0, 1, 0, aspect), interpolation="nearest")
    panel.set_title(title, fontsize=6)
    panel.text(0.5, -0.08, f"{'x'.join(map(str, split.shape))}", ha="center", va="top", fontsize=6)


def _rows(split: Split) -> int:
    """Returns the number of dims drawn downwards: those up to the first that is split; the others go to the right."""
    first = next((dim for dim, entry in enumerate(split.spec) if axes_of(entry)), 0)
    return min(first + 1, len(split.shape) - 1)


def _colour(split: Split, sizes: Mapping[str, int], row: float, column: float) -> tuple[float, float, float]:
    """Returns hue, saturation and value at a point of the rectangle."""
    shards = parts(sizes, STORAGE)
    tp, stored = _place(split, TP, sizes[TP], row, column), _place(split, STORAGE, shards, row, column)
    hue = 0.0 if tp is None else tp / sizes[TP]
    shade = 0.0 if stored is None else stored / (shards - 1)
    return (hue, 0.0, 0.85 - 0.4 * shade) if tp is None else (hue, 0.55, 0.95 - 0.45 * shade)


def _place(split: Split, axes: str | tuple[str, ...], count: int, row: float, column: float) -> int | None:
    """Returns which of `count` parts along some axes a point belongs to; None if the matrix is whole along them."""
    dim = dim_over(axes, split.spec)
    if dim is None or count == 1:
        return None
    return int((row if dim < _rows(split) else column) * min(count, _MOST_PARTS)) * count // min(count, _MOST_PARTS)
