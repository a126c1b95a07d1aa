"""Sequences divided over cp: orders of tokens, packed documents and refusals. (Updates:
test_updates.py.)"""

from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from support import (
    TOLERANCE,
    decoder,
    random_weights,
    relative_error,
    sizes_of,
    state_on_mesh,
    swept,
    use_mesh,
    without_mesh,
)
from tables import read_table
from variants import variant, variants

from jaxtp import ModelConfig
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import costs_of
from jaxtp.config.schema import ConfigError
from jaxtp.layers.context import Sequences, halo, num_routes, routes
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.run_report import describe_context
from jaxtp.train.validation import share_of

T = 16
TABLE = read_table(__file__)
LLAMA = variant(ModelConfig(), TABLE["base"])
RUN = TrainConfig(model=LLAMA, data=DataConfig(sequence_length=T, global_batch_size=8))
PACKED = variants(LLAMA, TABLE["packed"])
"""All examples of a model are one program."""


@pytest.mark.parametrize("name", TABLE["shares"])
def test_the_device_with_the_most_work_has_its_share_of_all(name):
    cp, method, zigzag, model = TABLE["shares"][name]
    run = variant(
        RUN, {"model": model, "mesh": {"context": method}, "data": {"sequence_length": 4096}}
    )
    share, whole = (share_of(run, mesh_shape(cp=size, tp=tp)) for size, tp in ((cp, 2), (1, 1)))
    assert run.model.zigzag(share) == zigzag
    most, everything = (
        sum(
            product.flops * product.counted
            for product in costs_of(run.model, Workload(**vars(each))).attention
        )
        for each in (share, whole)
    )
    assert most == pytest.approx(everything / (cp * 2), rel=0.02)


ROWS = 4
MESH = (1, 2, 2, 2)


@cache
def built(method):
    """Returns how to build the model for a method over cp, and its weights."""
    return decoder(PACKED[method]), random_weights(decoder(PACKED[method]))


@cache
def logits_by(method):
    """Returns a function of ids and segments that gives logits on a mesh with cp."""
    mesh = mesh_of(sizes_of(MESH))
    graph, state = state_on_mesh(*built(method), mesh)
    run = jax.jit(
        lambda state, ids, segments: nnx.merge(graph, state)(ids, segments=segments, context=method)
    )

    def logits(ids, segments):
        with jax.set_mesh(mesh):
            return np.asarray(run(state, ids, segments))

    return logits


@st.composite
def packings(draw):
    """A document's ids, and rows in which it stands: alone at the beginning, and at other places
    among others."""
    ids = st.integers(0, LLAMA.vocab_size - 1)
    document = draw(st.lists(ids, min_size=1, max_size=T))
    rows = np.array(
        draw(st.lists(st.lists(ids, min_size=T, max_size=T), min_size=ROWS, max_size=ROWS)),
        np.int32,
    )
    places = [
        0,
        *draw(st.lists(st.integers(0, T - len(document)), min_size=ROWS - 1, max_size=ROWS - 1)),
    ]
    bounds = draw(
        st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=ROWS, max_size=ROWS)
    )
    segments = 1 + np.cumsum(bounds, axis=1, dtype=np.int32)
    segments[0] = 1
    for row, place in enumerate(places):
        rows[row, place : place + len(document)] = document
        segments[row, place + len(document) :] += 2 * T
        segments[row, place : place + len(document)] = 2 * T
        segments[row, :place] *= draw(st.booleans())  # padding, or documents
    return len(document), places, rows, segments


@swept("method", ["ulysses", "gather"], "gather")
@settings(max_examples=10)
@given(packing=packings())
def test_a_document_alone_equals_the_same_packed_at_any_place(method, packing):
    length, places, rows, segments = packing
    logits = logits_by(method)(rows, segments)
    assert np.isfinite(logits).all()
    for row, place in enumerate(places):
        assert relative_error(logits[row, place : place + length], logits[0, :length]) < TOLERANCE


@swept("method", ["ulysses", "gather"])
def test_logits_are_in_natural_order_and_those_of_one_device(method):
    random = default_rng(0)
    ids = random.integers(0, LLAMA.vocab_size, (ROWS, T), np.int32)
    segments = np.cumsum(random.random((ROWS, T)) < 0.2, axis=1, dtype=np.int32)
    graph, state = without_mesh(*built(method))
    expected = jax.jit(lambda state: nnx.merge(graph, state)(ids, segments=segments))(state)
    assert relative_error(logits_by(method)(ids, segments), expected) < TOLERANCE


@given(cp=st.sampled_from([1, 2, 4, 8]), zigzag=st.booleans())
def test_the_order_of_tokens_is_a_permutation_that_natural_undoes(cp, zigzag):
    sequences = Sequences(zigzag=zigzag and cp > 1)
    with use_mesh(**sizes_of((1, 1, cp, 1))):
        positions = np.asarray(sequences.positions(T))
        assert np.array_equal(np.sort(positions), np.arange(T))
        assert np.array_equal(sequences.natural(positions, 0), np.arange(T))


def traced(length=T, **given):
    """Calls a model on abstract ids."""
    call = lambda ids: decoder(LLAMA)()(ids, **given)
    return jax.eval_shape(call, jax.ShapeDtypeStruct((2, length), np.int32))


def test_a_mesh_that_the_heads_do_not_allow_is_refused():
    with (
        use_mesh(cp=8, tp=2),
        pytest.raises(ValueError, match=r'context="ulysses": cp=8 .* 4 query heads'),
    ):
        traced(context="ulysses")


def test_a_length_that_cp_does_not_divide_is_refused_by_the_model_itself():
    with use_mesh(cp=2, tp=2):
        for length in (15, 1):
            with pytest.raises(
                ValueError, match=f"dim 1 of shape .* is {length}, not divisible by cp=2; nearest: "
            ):
                traced(length)


def test_an_unknown_method_is_refused_by_the_model_itself():
    for method in ("Ulysses", "ring", "", None, ["gather"]):
        with pytest.raises(ConfigError, match="auto, ulysses, gather"):
            traced(context=method)


def test_the_summary_says_who_has_the_most_to_do():
    def described(run, **sizes):
        return describe_context(run.model, share_of(run, mesh_shape(**sizes)))

    by_gathers = {"mesh": {"context": "gather"}}
    uneven = described(variant(RUN, {"data": {"sequence_length": 20}, **by_gathers}), cp=4)
    assert "WARNING: uneven work: the last device does the most" in uneven
    assert "WARNING" not in described(RUN, cp=4, tp=2)
    windows = {"model": {"pattern": [{"sliding_window": 3}, {}]}}
    text = described(variant(RUN, windows | by_gathers), cp=4)
    assert "two chunks of each on a device" in text
    assert "window of 3" in text


@pytest.mark.parametrize(("window", "tokens"), [(None, None), (48, 47), (49, None)])
def test_a_halo_has_the_tokens_that_a_window_sees_unless_all_chunks_are_as_many(window, tokens):
    assert halo(64, 4, window, zigzag=False) == tokens


def test_routes_are_counted_without_listing_them():
    for cp in range(2, 9):
        for zigzag in (False, True):
            for hop in range(1, 2 * cp + 1):
                listed = routes(cp, hop, zigzag=zigzag)
                assert num_routes(cp, hop, zigzag=zigzag) == len(listed), (cp, hop, zigzag)
