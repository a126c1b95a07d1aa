"""The balance of experts: the same however a batch is divided over devices, in micro-batches or in other batches."""

import dataclasses
from functools import cache

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mixtures import B, D, E, F, T, balance_program, build, expected_balance
from support import assert_close, random_weights, sweep

from jaxtp.layers.balance import updated_selection_bias
from jaxtp.layers.experts import ExpertsConfig

CONFIG = ExpertsConfig(num_experts=E, d_ff=F)
LAYERS = 2


@cache
def weights():
    return random_weights(lambda: build(CONFIG), scale=0.3)


@cache
def rows():
    """Inputs of each layer, segments and labels of a batch, in which rows have more padding one than the other."""
    random = np.random.default_rng(4)
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


MESHES = [
    *((1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), (1, 1, 1, 4), (1, 1, 4, 2)),
    *((2, 2, 1, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 2, 1, 4), (2, 2, 2, 2), (1, 1, 2, 4), (4, 1, 1, 3), (1, 4, 2, 1)),
]


@pytest.mark.parametrize("mesh", sweep(MESHES, (2, 1, 2, 2)), ids=str)
def test_it_is_that_of_the_paper(mesh):
    """Auxiliary loss, z-loss and their gradients, of the router and of the input."""
    found, _ = balanced(CONFIG, mesh)(weights(), *rows())
    assert_close(found, right())


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [mesh for mesh in MESHES if mesh[-1] > 1], ids=str)
def test_activations_that_are_whole_over_tp(mesh):
    found, _ = balanced(CONFIG, mesh, False)(weights(), *rows())
    assert_close(found, right())


@pytest.mark.wide
@pytest.mark.parametrize(
    "changes",
    [{"experts_per_token": 1}, {"experts_per_token": E}, {"normalize_experts": False}, {"router_scores": "sigmoid"}],
)
def test_other_numbers_of_experts(changes):
    config = dataclasses.replace(CONFIG, **changes)
    layers, segments, labels = rows()
    found, _ = balanced(config, (1, 2, 2, 2))(weights(), *rows())
    assert_close(found, expected_balance(weights(), layers, segments != 0, labels, config))


def check_parts(mesh, order, parts):
    """Batches of a part of the rows each, in any order, add up to the one of all rows: gradients too."""
    layers, segments, labels = rows()
    sums, times, inputs = {}, 0, np.zeros_like(layers)
    for own in np.split(np.array(order), parts):
        found, chosen = balanced(CONFIG, mesh)(weights(), layers[:, own], segments[own], labels[own])
        inputs[:, own] = found.pop("input")
        sums = {name: sums.get(name, 0) + array for name, array in found.items()}
        times += chosen
    assert_close({**sums, "input": inputs}, right())
    everything, whole = balanced(CONFIG, (1, 1, 1, 1))(weights(), *rows())
    assert_close(everything, right())
    np.testing.assert_array_equal(times, whole)
    assert whole.sum() == LAYERS * CONFIG.experts_per_token * (segments != 0).sum()


SOME = st.just(((1, 2, 2, 2), 2))
ANY = st.tuples(st.sampled_from([mesh for mesh in MESHES if mesh[0] * mesh[1] <= 2]), st.sampled_from([1, 2, 4]))


@settings(max_examples=5)
@given(SOME, st.permutations(range(B)))
def test_batches_and_micro_batches_add_up(case, order):
    check_parts(case[0], order, case[1])


@pytest.mark.wide
@settings(max_examples=60)
@given(ANY, st.permutations(range(B)))
def test_batches_and_micro_batches_add_up_on_any_mesh(case, order):
    check_parts(case[0], order, case[1])


MOVED_BIAS = jax.jit(updated_selection_bias)


@given(st.lists(st.integers(0, 9), min_size=7, max_size=7))
@example([3] * 7).via("a seventh of 21 is not 3 in float32")
def test_biases_move_against_the_load_by_one_step(times):
    times = np.array([times], np.float32)
    moved = np.asarray(MOVED_BIAS(np.zeros((1, 7), np.float32), times, 0.5))
    np.testing.assert_array_equal(moved, 0.5 * np.sign(times.sum() - 7 * times))
