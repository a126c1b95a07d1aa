"""The rows of an evaluation: each held-out row at most once, so that its loss is that of the rows alone.

It is the same for every batch size.
"""

from collections.abc import Sequence
from typing import SupportsIndex

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.data.rows import IGNORE, Row, Samples
from jaxtp.files import fingerprint

ALGORITHM = "by weight 1"
"""Name of the order, and its version: one that gives other rows for the same sources is another."""
SEED = 0
"""Seed of the order, whatever that of the run: evaluations of several runs read the same rows."""


def held_out(sources: Sequence[Sequence[Row]], weights: Sequence[float], *, batches: int, batch_size: int) -> Samples:
    """Returns so many batches, or as many as there are rows for; in the last one rows beyond the end count nothing.

    Args:
      sources: rows, at least one in each.
      weights: share of the rows that each source gives, as long as it has some left.
      batches: number of batches at most.
      batch_size: number of rows in each.

    Returns:
      A multiple of `batch_size` rows.
    """
    order = _order([len(rows) for rows in sources], weights, batches * batch_size)
    shuffled = [grain.MapDataset.source(rows).seed(SEED).shuffle() for rows in sources]
    return grain.MapDataset.source(_HeldOut(shuffled, order, -len(order) % batch_size))


def order_identity(lengths: Sequence[int], weights: Sequence[float]) -> str:
    """Returns a hash of the order of the first 1000 rows before each source is shuffled, in hexadecimal digits."""
    return fingerprint(_order(lengths, weights, 1000).tolist())


class _HeldOut(Sequence[Row]):
    """Rows in a given order, `[n, 2]` of source and index, and after them so many that count nothing."""

    def __init__(self, sources: Sequence[Samples], order: NDArray[np.int64], filling: int):
        self._sources, self._order, self._filling = sources, order, filling

    def __len__(self) -> int:
        return len(self._order) + self._filling

    def __getitem__(self, index: SupportsIndex) -> Row:  # type: ignore[override]
        beyond = int(index) >= len(self._order)
        source, position = self._order[0 if beyond else int(index)].tolist()
        row: Row = self._sources[source][position]
        if beyond:  # padding of the same shapes, no label of which counts
            row = {name: np.full_like(array, IGNORE if name == "labels" else 0) for name, array in row.items()}
        return row

    def __repr__(self) -> str:
        return f"HeldOut({len(self._order)} rows)"  # Grain prints its sources in errors


def _order(lengths: Sequence[int], weights: Sequence[float], count: int) -> NDArray[np.int64]:
    """Returns the first `count` rows of all sources, `[n, 2]`: row k of a source is due at (k + 1/2) / weight."""
    counts = [min(length, count) for length in lengths]
    source = np.repeat(np.arange(len(counts)), counts)
    position = np.concatenate([np.arange(n) for n in counts])
    due = (position + 0.5) / np.asarray(weights)[source]
    return np.stack([source, position], axis=1)[np.argsort(due, kind="stable")[:count]]
