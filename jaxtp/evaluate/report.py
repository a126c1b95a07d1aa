"""The output of an evaluation: its progress, and its numbers as a table and as JSON."""

import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from jaxtp.config import ConfigError
from jaxtp.console import Display
from jaxtp.evaluate.config import LENGTH, SOURCE
from jaxtp.evaluate.measure import Measured, Totals
from jaxtp.files import require_writable, write_json
from jaxtp.generate.config import STDOUT

FLAG = "--json"
_SECONDS = 5.0
"""Seconds between plain lines."""
_COLUMNS = ("documents", "tokens", "bytes", "loss", "perplexity", "bits/byte", "accuracy")


class Report(Display):
    """The console of an evaluation, on standard error; silent on all processes but the first.

    Use as a context manager: the progress bar lives inside it.

    Args:
      total: bytes of the documents.
    """

    def __init__(self, total: int) -> None:
        super().__init__("{task.percentage:3.0f}%", quiet=jax.process_index() != 0, stream=sys.stderr)
        self._total = max(total, 1)
        self._begun = self._told = time.monotonic()

    def __enter__(self) -> Self:
        self.begin(0, self._total)
        return super().__enter__()

    def moved(self, done: int, totals: Totals) -> None:
        """Moves the progress bar, or prints a plain line now and then.

        Args:
          done: bytes of the documents that have been read.
          totals: sums so far.
        """
        now = time.monotonic()
        text = f"loss {totals.loss:.4f}  {totals.tokens / (now - self._begun):,.0f} tokens/s" if totals.tokens else ""
        done = min(done, self._total)
        self.move(done, text)
        if not self.has_bar and now - self._told >= _SECONDS and done:
            self._told = now
            left = (now - self._begun) * (self._total - done) / done
            self.line(f"{100 * done // self._total}%  {text}  {left:,.0f} s left")


def require_json(path: Path | None) -> None:
    """Checks that the file that --json asks for can be written.

    Raises:
      ConfigError: it cannot.
    """
    if path != STDOUT and jax.process_index() == 0:
        require_writable(FLAG, path)


def give(table: str, path: Path | None, record: Mapping[str, Any]) -> None:
    """Prints a table, and writes the record of it where --json says: on standard output instead of the table.

    Raises:
      ConfigError: the file cannot be written; the table is printed all the same.
    """
    if jax.process_index() != 0:
        return
    print(json.dumps(record, indent=2) if path == STDOUT else table, flush=True)
    if path != STDOUT:
        try:
            write_json(FLAG, path, record)
        except ConfigError as error:
            raise ConfigError(f"{error}; the numbers are above") from None


def as_table(measured: Measured, by: Sequence[str]) -> str:
    """Returns the numbers for people: a line for all documents, and before it one for each part that is asked for."""
    rows = [["", *_COLUMNS], *([name, *_cells(part)] for name, part in _parts(measured, by))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in cells).rstrip()
        for cells in (list(enumerate(zip(row, widths, strict=True))) for row in rows)
    )


def as_record(measured: Measured, by: Sequence[str], about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers for machines.

    Args:
      measured: the sums.
      by: parts that are asked for.
      about: description of the model and of how it was measured.
    """
    record: dict[str, Any] = {**about, "all": _plain(measured.whole())}
    if SOURCE in by:
        record["by_source"] = [{"source": name, **_plain(part)} for name, part in measured.by_source().items()]
    if LENGTH in by:
        record["by_length"] = [
            {"tokens_from": least, "tokens_to": 2 * least - 1, **_plain(part)}
            for least, part in measured.by_length().items()
        ]
    return record


def _parts(measured: Measured, by: Sequence[str]) -> Iterator[tuple[str, Totals]]:
    if SOURCE in by:
        yield from measured.by_source().items()
    if LENGTH in by:
        for least, part in measured.by_length().items():
            yield f"{least:,} tokens" if least == 1 else f"{least:,} to {2 * least - 1:,} tokens", part
    yield "all", measured.whole()


def _cells(part: Totals) -> list[str]:
    counts = [f"{count:,}" for count in (part.documents, part.tokens, part.num_bytes)]
    if not part.tokens:
        return [*counts, *["-"] * 4]
    bits = "-" if part.bits_per_byte is None else f"{part.bits_per_byte:.5f}"
    return [*counts, f"{part.loss:.6f}", f"{part.perplexity:.5g}", bits, f"{part.accuracy:.2%}"]


def _plain(part: Totals) -> dict[str, Any]:
    """Returns the numbers of some documents as JSON has them: what is infinite or of no token is null."""
    numbers = (
        {name: getattr(part, name) for name in ("loss", "perplexity", "bits_per_byte", "accuracy")}
        if part.tokens
        else dict.fromkeys(("loss", "perplexity", "bits_per_byte", "accuracy"))
    )
    counts = {"documents": part.documents, "tokens": part.tokens, "bytes": part.num_bytes}
    return counts | {k: v if v is not None and math.isfinite(v) else None for k, v in numbers.items()}
