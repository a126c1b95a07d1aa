from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp.data.mixture import PARTS, Mixture, cycle_counts, schedule

WEIGHTS = st.lists(st.one_of(st.integers(1, 50), st.floats(0.01, 1)), min_size=1, max_size=6)


class Endless(list):
    def __getitem__(self, index):
        return index


@given(WEIGHTS)
@settings(deadline=None, max_examples=8)
def test_counts_are_the_weights(weights):
    counts = cycle_counts(weights)
    total = sum(map(Fraction, weights))
    for count, weight in zip(counts, weights, strict=True):
        assert abs(Fraction(count, sum(counts)) - Fraction(weight) / total) <= Fraction(
            len(weights), PARTS
        )
    assert sum(counts) <= PARTS + len(weights)


def test_round_weights_are_exact():
    assert cycle_counts([0.7, 0.3]) == [7, 3]
    assert cycle_counts([2, 1, 1]) == [2, 1, 1]
    assert cycle_counts([5.0]) == [1]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6))
@settings(deadline=None, max_examples=15)
def test_every_source_keeps_to_its_share_within_a_sample(counts):
    """Tijdeman's bound, 1 - 1 / (2 K - 2), at every point; so any window is within twice that:
    one, for two sources.
    """
    order = schedule(counts)
    bound = 1 - 1 / max(2 * len(counts) - 2, 1)
    steps = np.arange(len(order) + 1)
    for source, count in enumerate(counts):
        given = np.concatenate([[0], np.cumsum(order == source)])
        owed = given - steps * count / sum(counts)
        assert given[-1] == count
        assert np.abs(owed).max() <= bound + 1e-9
        assert owed.max() - owed.min() <= 2 * bound + 1e-9


@given(WEIGHTS, st.integers(0, 10**6))
@settings(deadline=None, max_examples=8)
def test_samples_of_each_source_come_in_its_own_order_without_gap_wherever_one_begins(
    weights, start
):
    mixture = Mixture([Endless() for _ in weights], weights)
    found = {}
    for index in range(start, start + 300):
        source, position = mixture.locate(index)
        assert found.get(source, position - 1) == position - 1
        found[source] = position
        assert mixture[index] == position
