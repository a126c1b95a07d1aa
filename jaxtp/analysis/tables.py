"""Plain-text tables."""

from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns an aligned table; numbers flush right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    return "\n".join(
        "  ".join(_align(cell, width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def _align(cell: str, width: int) -> str:
    is_number = cell.replace(",", "").replace(".", "").isdigit()
    return cell.rjust(width) if is_number else cell.ljust(width)
