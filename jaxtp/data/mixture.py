"""Interleaves sources by weight: endlessly for training, each row once for evaluation.

At any point of a cycle each source is less than one sample from its share: the schedule of
Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). In any window of
samples, the number of a source's samples is exact to within one for two sources, and to within less
than two for more, which is the best possible for general weights. In Grain's mixtures the shares
drift, because Grain rounds weights.
"""

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import SupportsIndex, TypeVar

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.config.files import fingerprint
from jaxtp.data.rows import IGNORE, Row, Samples

T = TypeVar("T")

ALGORITHM = "Tijdeman 1"
"""Name and version of the training schedule: a change of its cycles needs another version."""
VALIDATION_ALGORITHM = "by weight 1"  # Name and version of the order of an evaluation
PARTS = 10_000
"""Maximum number of samples in a cycle: weights are rounded to multiples of 1 / `PARTS` of their
sum."""
_VALIDATION_SEED = 0


class Mixture(Sequence[T]):
    """Samples of endless sources; only the ratios of the weights matter, to four digits."""

    def __init__(self, sources: Sequence[Sequence[T]], weights: Sequence[float]):
        self._sources = sources
        self.counts = cycle_counts(weights)
        self._cycle = schedule(self.counts)
        self.identity = fingerprint(self._cycle.tolist())
        chosen = self._cycle[:, None] == np.arange(len(sources))
        # The index of each sample within its source and cycle
        self._ranks = np.cumsum(chosen, axis=0)[chosen] - 1

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: SupportsIndex) -> T:  # type: ignore[override]
        source, position = self.locate(int(index))
        return self._sources[source][position]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns a sample's source and its index there."""
        cycle, offset = divmod(index, len(self._cycle))
        source = int(self._cycle[offset])
        return source, cycle * self.counts[source] + int(self._ranks[offset])


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """Returns the number of samples of each source in a cycle.

    They are the smallest integers in the ratio of the weights, rounded to 1 / `PARTS`.
    """
    total = sum(map(Fraction, weights))
    parts = [max(round(Fraction(weight) / total * PARTS), 1) for weight in weights]
    return [part // int(np.gcd.reduce(parts)) for part in parts]


def schedule(counts: Sequence[int]) -> NDArray[np.int64]:
    """Returns the source of each sample in a cycle, `[sum(counts)]`."""
    shares = np.asarray(counts, np.int64)
    total = int(sum(counts))
    slack = max(2 * len(counts) - 2, 1)
    chosen_so_far = np.zeros(len(counts), np.int64)
    order = np.zeros(total, np.int64)
    for step in range(1, total + 1):
        owed = shares * step - chosen_so_far * total  # in units of 1 / total samples
        eligible = owed * slack >= total  # within Tijdeman's bound
        deadline = (total - owed - total / slack) / shares  # steps until it is too far behind
        order[step - 1] = chosen = int(np.argmin(np.where(eligible, deadline, np.inf)))
        chosen_so_far[chosen] += 1
    return order


def validation_samples(
    sources: Sequence[Sequence[Row]], weights: Sequence[float], *, batches: int, batch_size: int
) -> Samples:
    """Returns the rows of at most `batches` batches, each row at most once.

    Sources give rows by weight until they run out. Rows of padding fill the last batch.
    """
    order = validation_order([len(rows) for rows in sources], weights, batches * batch_size)
    shuffled = [grain.MapDataset.source(rows).seed(_VALIDATION_SEED).shuffle() for rows in sources]
    padding = np.full((-len(order) % batch_size, 2), -1)

    def row(place: NDArray[np.int64]) -> Row:
        source, position = place.tolist()
        if source >= 0:
            return shuffled[source][position]
        like: Row = shuffled[order[0, 0]][order[0, 1]]
        return {
            name: np.full_like(array, IGNORE if name == "labels" else 0)
            for name, array in like.items()
        }

    return grain.MapDataset.source(np.concatenate([order, padding])).map(row)


def validation_order(
    lengths: Sequence[int], weights: Sequence[float], count: int
) -> NDArray[np.int64]:
    """Returns `[count, 2]`, source and index: row k of a source is due at (k + 1/2) / weight."""
    counts = [min(length, count) for length in lengths]
    source = np.repeat(np.arange(len(counts)), counts)
    position = np.concatenate([np.arange(n) for n in counts])
    due = (position + 0.5) / np.asarray(weights)[source]
    return np.stack([source, position], axis=1)[np.argsort(due, kind="stable")[:count]]
