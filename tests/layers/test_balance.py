"""The balance of experts: the same however a batch is divided over devices, in micro-batches or
in other batches.
"""

from functools import cache

import jax
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mixtures import B, D, E, F, T, balance_program, build, expected_balance
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import assert_close, random_weights, swept
from tables import read_table
from variants import variant

from jaxtp.layers.balance import updated_selection_bias
from jaxtp.layers.experts import ExpertsConfig

CONFIG = ExpertsConfig(num_experts=E, d_ff=F)
LAYERS = 2


@cache
def weights():
    return random_weights(lambda: build(CONFIG), scale=0.3)


@cache
def rows():
    """Inputs of each layer, segments and labels of a batch, in which rows have more padding one
    than the other.
    """
    random = default_rng(4)
    layers = random.standard_normal((LAYERS, B, T, D)).astype(np.float32)
    segments = 1 + np.cumsum(random.random((B, T)) < 0.3, axis=1).astype(np.int32)
    for row, begin in ((1, 3), (4, 6), (7, 0)):
        segments[row, begin:] = 0
    labels = np.where((segments == 0) | (random.random((B, T)) < 0.3), -100, 1)
    return layers, segments, labels


balanced = cache(balance_program)


@cache
def right():
    layers, segments, labels = rows()
    return expected_balance(weights(), layers, segments != 0, labels, CONFIG)


TABLE = read_table(__file__)
CASES = [(tuple(mesh), *whole) for mesh, *whole in TABLE["cases"]]


@swept("case", CASES, CASES[0])
def test_losses_and_gradients_are_those_of_the_paper(case):
    """Auxiliary loss, z-loss and their gradients, of the router and of the input."""
    found, _ = balanced(CONFIG, *case)(weights(), *rows())
    assert_close(found, right())


@swept("router", TABLE["routers"])
def test_other_routers_are_those_of_the_paper(router):
    config = variant(CONFIG, TABLE["routers"][router])
    layers, segments, labels = rows()
    found, _ = balanced(config, (1, 2, 2, 2))(weights(), *rows())
    assert_close(found, expected_balance(weights(), layers, segments != 0, labels, config))


@settings(max_examples=4)
@given(st.permutations(range(B)))
def test_batches_and_micro_batches_add_up(order):
    """Of half of the rows each, in any order: losses, gradients and counts are those of all
    rows.
    """
    layers, segments, labels = rows()
    run = balanced(CONFIG, (2, 1, 2, 2))
    parts = [
        run(weights(), layers[:, own], segments[own], labels[own])
        for own in np.split(np.array(order), 2)
    ]
    sums = {name: sum(found[name] for found, _ in parts) for name in parts[0][0]}
    sums["input"] = np.zeros_like(layers)
    sums["input"][:, order] = np.concatenate([found["input"] for found, _ in parts], axis=1)
    assert_close(sums, right())
    _, whole = run(weights(), *rows())
    assert_array_equal(sum(times for _, times in parts), whole)
    assert whole.sum() == LAYERS * CONFIG.experts_per_token * (segments != 0).sum()


MOVED_BIAS = jax.jit(updated_selection_bias)


@given(st.lists(st.integers(0, 9), min_size=7, max_size=7))
@example([3] * 7).via("a seventh of 21 is not 3 in float32")
def test_selection_biases_move_against_the_load_by_one_step(times):
    times = np.array([times], np.float32)
    moved = np.asarray(MOVED_BIAS(np.zeros((1, 7), np.float32), times, 0.5))
    assert_array_equal(moved, 0.5 * np.sign(times.sum() - 7 * times))
