"""Mixes several sources by weight: says which of them each sample is from.

Sample `i` of a mixture is from one source, and the so-many-th of it, whatever the mesh or where a run was resumed. A
cycle of samples holds each source exactly by its weight, and within it every source is less than one sample from its
share at any point: the schedule of Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980). So any
window of samples is exact to within one for two sources and to within less than two for more, which cannot be
had closer for weights in general.

Grain's own mixing rounds weights, so that its shares drift.
"""

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import SupportsIndex, TypeVar

import numpy as np
from numpy.typing import NDArray

from jaxtp.files import fingerprint

T = TypeVar("T")

ALGORITHM = "Tijdeman 1"
"""Name of the schedule, and its version: one that gives other cycles for the same weights is another."""
PARTS = 10_000
"""Number of samples in a cycle at most: weights are rounded to this part of their sum."""


class Mixture(Sequence[T]):
    """Samples of several endless sources.

    Args:
      sources: samples of each source, by index.
      weights: weight of each source, above 0; only their ratios matter, and of these four digits.
    """

    def __init__(self, sources: Sequence[Sequence[T]], weights: Sequence[float]):
        self._sources = sources
        self.counts = cycle_counts(weights)
        self._cycle = schedule(self.counts)
        chosen = self._cycle[:, None] == np.arange(len(sources))
        self._ranks = np.cumsum(chosen, axis=0)[chosen] - 1  # a sample's index among those of its source in the cycle

    @property
    def identity(self) -> str:
        """Hash of the sources of a cycle's samples, in hexadecimal digits."""
        return fingerprint(self._cycle.tolist())

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: SupportsIndex) -> T:  # type: ignore[override]
        source, position = self.locate(int(index))
        return self._sources[source][position]

    def locate(self, index: int) -> tuple[int, int]:
        """Returns the source of a sample, and its index there."""
        cycle, offset = divmod(index, len(self._cycle))
        source = int(self._cycle[offset])
        return source, cycle * self.counts[source] + int(self._ranks[offset])

    def __repr__(self) -> str:
        return f"Mixture({' : '.join(map(str, self.counts))})"  # Grain prints its sources in errors


def cycle_counts(weights: Sequence[float]) -> list[int]:
    """Returns the samples of each source in a cycle: the smallest integers in the weights' ratio, to 1 / `PARTS`."""
    total = sum(map(Fraction, weights))
    parts = [max(round(Fraction(weight) / total * PARTS), 1) for weight in weights]
    return [part // int(np.gcd.reduce(parts)) for part in parts]


def schedule(counts: Sequence[int]) -> NDArray[np.int64]:
    """Returns the source of each sample of a cycle, `[sum(counts)]`."""
    shares, total = np.asarray(counts, np.int64), int(sum(counts))
    slack = max(2 * len(counts) - 2, 1)
    given = np.zeros(len(counts), np.int64)
    order = np.zeros(total, np.int64)
    for step in range(1, total + 1):
        owed = shares * step - given * total  # by source, in units of 1 / total samples
        eligible = owed * slack >= total  # as far behind as Tijdeman's bound lets it be chosen
        deadline = (total - owed - total / slack) / shares  # steps until it would be too far behind
        order[step - 1] = chosen = int(np.argmin(np.where(eligible, deadline, np.inf)))
        given[chosen] += 1
    return order
