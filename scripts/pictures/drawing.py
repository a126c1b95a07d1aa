"""An SVG picture of 700 pixels' width, for light pages and for dark ones."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

ROOT = Path(__file__).parent.parent.parent
STYLE = mpl.rc_params_from_file(
    ROOT / "jaxtp/tools/report/style.mplstyle", use_default_template=False
)
PALETTE = STYLE["axes.prop_cycle"].by_key()["color"]
MOVES = PALETTE[5]
PALE = 0.55
"""Opacity of the second half over fsdp, and of what a device has of others."""
PAGES = {
    "light": {
        "ink": "#1f2328",
        "faint": "#59636e",
        "whole": "#b4b9bf",
        "box": "#eff1f3",
        "page": "#ffffff",
    },
    "dark": {
        "ink": "#e6edf3",
        "faint": "#9198a1",
        "whole": "#6e7681",
        "box": "#21262d",
        "page": "#0d1117",
    },
}
Point = tuple[float, float]


class Drawing:
    """An SVG of 700 pixels' width; y grows downwards."""

    def __init__(self, height: int, page: dict[str, str], title: str):
        self.page = page
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 {height}" width="700" '
            f'height="{height}" role="img" font-family="Helvetica, Arial, sans-serif" '
            f'font-size="13" fill="{page["ink"]}">',
            f"<title>{title}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" '
            f'fill="{page["faint"]}"/></marker></defs>',
        ]
        # Readers of a notebook may see the light picture on a dark page.
        self.box(0, 0, 700, height, page["page"])
        self.text(14, 24, title, "start", font_weight="bold", font_size=15)

    def caption(self, x: float, y: float, name: str, state: str) -> None:
        """Writes the name of a thing, and below it its state."""
        self.text(x, y, name)
        self.faint(x, y + 16, state, "middle", font_size=12)

    def faint(self, x: float, y: float, words: str, anchor: str = "start", **style: object) -> None:
        self.text(x, y, words, anchor, fill=self.page["faint"], **style)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", **style: object) -> None:
        """Writes a line whose baseline is at y."""
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.parts.append(f"<text {place}{_attributes(style)}>{words}</text>")

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, **style: object
    ) -> None:
        size = f'width="{width:g}" height="{height:g}" fill="{fill}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" {size}{_attributes(style)}/>')

    def arrow(self, path: str, both: bool = False) -> None:
        start = ' marker-start="url(#tip)"' if both else ""
        self.parts.append(
            f'<path d="{path}" fill="none" stroke="{self.page["faint"]}" stroke-width="1.5"'
            f'{start} marker-end="url(#tip)"/>'
        )

    def line(self, points: Iterable[Point], color: str, width: float, **style: object) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f'fill="none" stroke="{color}" stroke-width="{width:g}"'
        self.parts.append(f'<polyline points="{path}" {stroke}{_attributes(style)}/>')

    def shape(self, points: Iterable[Point], fill: str) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polygon points="{path}" fill="{fill}"/>')

    def disc(self, x: float, y: float, forward: bool) -> None:
        """Draws a sum over tp: a disc forward, a ring backward."""
        fill = MOVES if forward else self.page["box"]
        ink = "white" if forward else MOVES
        line = f'fill="{fill}" stroke="{MOVES}" stroke-width="2.5"'
        self.parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="12" {line}/>')
        self.text(x, y + 5, "Σ", fill=ink, font_weight="bold", font_size=14)

    def bar(
        self,
        x: float,
        y: float,
        height: float,
        widths: Mapping[str, float],
        colors: Mapping[str, str],
    ) -> float:
        """Draws a horizontal bar of parts; returns its right end."""
        for part, width in widths.items():
            if width >= 0.5:
                self.box(x, y, width, height, colors[part])
            x += width
        return x

    def legend(self, x: float, y: float, colors: Mapping[str, str], places: Sequence[int]) -> None:
        """Names colours, at horizontal places that repeat in each line."""
        for number, (name, color) in enumerate(colors.items()):
            line, column = divmod(number, len(places))
            left = x + places[column]
            self.box(left, y + 22 * line - 11, 14, 14, color)
            self.text(left + 20, y + 22 * line + 1, name, "start")

    def save(self, path: Path) -> None:
        path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def _attributes(style: Mapping[str, object]) -> str:
    # `font_size` is `font-size` in an SVG.
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())
