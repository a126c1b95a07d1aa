"""Comparisons of the numbers that two runs logged."""

from numpy.testing import assert_allclose
from runs import records


def assert_same_records(run, expected, *names, rtol=0.0):
    """Compares the values of all steps, by name."""
    for name in names:
        known = records(expected, name)
        found = records(run, name)
        assert found.keys() == known.keys(), name
        assert_allclose(list(found.values()), list(known.values()), rtol=rtol, err_msg=name)
