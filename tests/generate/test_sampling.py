"""Each filter against its definition in plain numpy, and the tokens drawn against the
distribution that is left.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from tables import read_table

import jaxtp
from jaxtp.generate import sampling
from jaxtp.generate.sampling import Settings

V = 13
# with ties
vectors = st.lists(st.sampled_from(np.linspace(-4, 4, 33).tolist()), min_size=V, max_size=V).map(
    np.array
)


def softmax(logits):
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def top_k(logits, k):
    return np.array([np.sum(logits > own) < k for own in logits])


def top_p(logits, p):
    probabilities = softmax(logits)
    return np.array([probabilities[logits > own].sum() < p for own in logits])


def min_p(logits, p):
    return softmax(logits) >= p * softmax(logits).max()


@partial(jax.jit, static_argnames="p")
def filtered(logits, p):
    """Returns the tokens that each filter keeps."""
    kept = [sampling.keep_top_p(logits, p), sampling.keep_min_p(logits, p)]
    return jnp.isfinite(jnp.stack(kept))


@settings(deadline=None, max_examples=40)
@given(vectors, st.sampled_from([0.0103, 0.31, 0.77, 0.9991]))
def test_filters_are_their_definitions(logits, p):
    by_top_p, by_min_p = filtered(logits, p)
    assert_array_equal(by_min_p, min_p(logits, p))
    sums = np.cumsum(np.sort(softmax(logits))[::-1])
    if np.min(np.abs(sums - p)) > 1e-5:  # else rounding decides
        assert_array_equal(by_top_p, top_p(logits, p))


@settings(deadline=None)
@given(vectors, st.sampled_from([1, 4, V, V + 3]))
def test_top_k(logits, k):
    assert_array_equal(np.isfinite(sampling.keep_top_k(jnp.array(logits), k)), top_k(logits, k))


def plainly(logits, chosen):
    """The distribution that is left by what was chosen."""
    logits = logits / chosen.temperature
    for keep, value in ((top_k, chosen.top_k or V), (top_p, chosen.top_p), (min_p, chosen.min_p)):
        logits = np.where(keep(logits, value), logits, -np.inf)
    return softmax(logits)


LOGITS = default_rng(3).normal(0, 0.8, V)
DRAWS = 4096
CASES = read_table(__file__)


@cache
def sampler(chosen, num_ids, mesh):
    """Returns the function that samples; one for each mesh, which a trace depends on."""
    return jax.jit(partial(sampling.sample, settings=chosen, num_ids=num_ids))


def draw(chosen, seeds, positions, *, num_ids=V, mesh=None):
    rows = len(seeds)
    logits = np.tile(LOGITS, (rows, 1)).astype(np.float32)
    places = np.asarray(seeds, np.uint32), np.asarray(positions, np.int32)
    return [np.asarray(each) for each in sampler(chosen, num_ids, mesh)(logits, *places)]


def chi_square_limit(freedom):
    """Returns the value that one in a thousand samples exceeds, by the approximation of Wilson
    and Hilferty.
    """
    variance = 2 / (9 * freedom)
    return freedom * (1 - variance + 3.0902 * variance**0.5) ** 3


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_from_the_distribution_that_is_left(name):
    """Whether seeds differ, or positions."""
    chosen = Settings(**CASES[name])
    expected = plainly(LOGITS, chosen)
    many = np.arange(DRAWS)
    same = np.full(DRAWS, 5)
    for places in ((many, same), (same, many)):
        tokens, logprobs = draw(chosen, *places)
        counts = np.bincount(tokens, minlength=V)
        assert not counts[expected == 0].any(), "a token that a filter leaves out"
        rare = DRAWS * expected < 5  # counted together: the test is no good for fewer
        seen, wanted = (
            np.append(some[~rare], some[rare].sum()) for some in (counts, DRAWS * expected)
        )
        there = wanted > 0
        distance = np.sum((seen[there] - wanted[there]) ** 2 / wanted[there])
        assert distance < chi_square_limit(there.sum() - 1)  # seeds are fixed: it is not chance
        assert_allclose(logprobs, np.log(softmax(LOGITS))[tokens], rtol=1e-5)


def test_temperatures_and_shares_of_zero_or_nearly_zero_take_the_likeliest():
    """In the dtype of the logits they are 0."""
    likeliest = [int(np.argmax(LOGITS))] * 2
    for chosen in ({"temperature": 1e-300}, {"temperature": 1.0, "top_p": 1e-300}):
        assert draw(Settings(**chosen), [0, 1], [3, 4])[0].tolist() == likeliest


def test_ids_without_a_meaning_are_never_chosen():
    few = int(np.argmax(LOGITS))  # the likeliest is the first that is left out
    tokens, _ = draw(Settings(temperature=5.0), np.arange(DRAWS), np.zeros(DRAWS), num_ids=few)
    assert set(tokens.tolist()) == set(range(few))


def test_a_row_draws_the_same_on_every_mesh_and_in_every_batch():
    chosen = Settings(**CASES["all"])
    seeds = np.arange(8)
    positions = seeds[::-1] + 3
    alone = [int(draw(chosen, [s], [p])[0][0]) for s, p in zip(seeds, positions, strict=True)]
    for mesh in (jaxtp.make_mesh(), jaxtp.make_mesh(dp=2, tp=2)):
        with jax.set_mesh(mesh):
            assert draw(chosen, seeds, positions, mesh=mesh)[0].tolist() == alone
    assert len(set(alone)) > 1
