"""Plain-text tables, ranges of numbers, and records for JSON."""

from collections.abc import Sequence

Cells = tuple[str, ...]  # of a row
Record = dict[str, object]


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned table; numbers flush right."""
    aligned = []
    for column in zip(header, *rows, strict=True):
        width = max(map(len, column))
        aligned.append([_align(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned, strict=True))


def about(value: float) -> str:
    """Returns a modelled number with two digits."""
    return f"{float(f'{value:.2g}'):,.10g}"


def between(low: float, high: float) -> str:
    """Returns a range of modelled numbers; equal ends are one number."""
    return " to ".join(dict.fromkeys(map(about, (low, high))))


def gigabytes(size: float) -> str:
    """Returns bytes in GB without the unit: one decimal place, or below 1 GB two digits."""
    in_gb = size / 1e9
    return f"{in_gb:,.1f}" if abs(in_gb) >= 1 else f"{in_gb:.2g}"


def _align(cell: str, width: int) -> str:
    is_number = cell.replace(",", "").replace(".", "").isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)
