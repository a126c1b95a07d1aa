"""Sequences divided over cp: outputs, gradients and three updates of any mesh are those of one device."""

import dataclasses
import itertools
from functools import cache

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    TOLERANCE,
    continue_rows,
    random_weights,
    relative_error,
    sizes_of,
    state_on_mesh,
    sweep,
    without_mesh,
)

import jaxtp
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import costs_of
from jaxtp.config.schema import ConfigError
from jaxtp.generate.decode_model import DecodeModel
from jaxtp.layers.context import Sequences, num_routes, routes
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train.config import DataConfig, LoopConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxtp.train.run_report import describe_context
from jaxtp.train.validation import share_of

T = 16
LLAMA = jaxtp.ModelConfig(
    vocab_size=29, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24, rope_theta=2.0
)
BASE = TrainConfig(
    model=LLAMA,
    data=DataConfig(sequence_length=T, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10),
)


def variant(*, loop=BASE.train, **model):
    return dataclasses.replace(BASE, model=dataclasses.replace(LLAMA, **model), train=loop)


TWICE = LoopConfig(steps=10, accumulation=2, z_loss=1e-3)
CONFIGS = {
    "llama": BASE,
    # A window and all positions: halos and gathers of two chunks each, in the order zigzag.
    "windows": variant(
        num_kv_heads=2,
        pattern=({"sliding_window": 3}, {"value_is_key": True}),
        attention_softcap=5.0,
        qk_norm="heads",
        norm="layer_no_bias",
        rotary_fraction=0.5,
        query_temperature=0.5,
        rope_scaling=RopeScaling(original_length=3),
        attention_gate=True,
        attention_sinks=True,
        value_norm=True,
        dropout=0.2,
        remat="save_dots",
        loop=TWICE,
    ),
    "windows alone": variant(num_kv_heads=2, pattern=({"sliding_window": 3}, {}), remat="none"),
    # A window shorter than a chunk over cp 4, and one that reaches into the chunk before the last.
    "short windows": variant(num_kv_heads=4, sliding_window=3, remat="none", learned_positions=T, rope_theta=None),
    "long windows": variant(
        num_kv_heads=2, sliding_window=7, attention_sinks=True, lora=LoraConfig(rank=3), remat="save_gathered"
    ),
    "one kv head": variant(
        vocab_size=19,
        attention_sinks=True,
        num_kv_heads=1,
        head_dim=8,
        tie_embeddings=True,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        qk_norm="projection",
        loss_chunk=3,
        remat="save_reduced",
    ),
    "blockwise": variant(
        num_kv_heads=2, attention="blockwise", attention_sinks=True, attention_softcap=5.0, overlap="ring"
    ),
    "adapters": variant(num_kv_heads=2, attention_gate=True, lora=LoraConfig(rank=3), dropout=0.1, loop=TWICE),
    "parallel": variant(
        num_kv_heads=2, norm_placement="parallel", head_bias=True, layer_scale=True, mlp_bias=True, loop=TWICE
    ),
}
"""Rows are packed: documents cross chunks, the last row is padding alone, and one from its middle on."""

MESHES = [
    *((1, 1, 2, 1), (1, 1, 4, 1), (1, 1, 8, 1)),
    *((1, 1, 2, 2), (1, 1, 4, 2), (1, 1, 2, 4), (2, 1, 2, 1), (1, 2, 4, 1)),
    *((2, 1, 2, 2), (1, 2, 2, 2), (2, 2, 2, 2), (2, 2, 4, 1), (1, 1, 8, 2)),
]
SOME = [(1, 1, 4, 2), (1, 1, 2, 4), (2, 2, 2, 2), (1, 1, 8, 1)]
TRIED = [("llama", mesh, method) for mesh in MESHES for method in ("ulysses", "gather")]
TRIED += [
    (name, SOME[(at + i) % len(SOME)], method)
    for i, (name, at, method) in enumerate(
        (name, at, method) for name in CONFIGS for at, method in enumerate(("ulysses", "gather"))
    )
]
TRIED += [("long windows", (2, 1, 4, 1), "gather"), ("windows", (2, 2, 2, 2), "auto")]
TRIED += [("windows", (1, 2, 2, 2), "gather"), ("windows", (1, 1, 2, 4), "ulysses")]


def possible(name, mesh, method):
    queries, _ = CONFIGS[name].model.heads.on_device(mesh[-1])
    return method != "ulysses" or queries % mesh[2] == 0


TRIED = [tried for tried in dict.fromkeys(TRIED) if possible(*tried)]


@cache
def on_one_device(name):
    initial = parity.initial_arrays(CONFIGS[name])
    return initial, parity.run(CONFIGS[name], ONE_DEVICE, initial)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mesh", "method"), TRIED, ids=str)
def test_a_mesh_with_cp_equals_one_device(name, mesh, method):
    """The default suite trains a mixture over cp in test_experts.py."""
    initial, expected = on_one_device(name)
    case = Case(sizes_of(mesh), mesh[-1] > 1, method)
    numbers = parity.run(CONFIGS[name], case, initial, audited=True)
    errors = parity.compare(numbers, expected)
    assert errors.within(parity.TOLERANCES["float32"]), errors
    assert numbers.problems == ()


@pytest.mark.wide
@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_activations_that_are_whole_over_tp(method):
    initial, expected = on_one_device("windows")
    numbers = parity.run(CONFIGS["windows"], Case(sizes_of((2, 1, 2, 2)), False, method), initial, audited=True)
    assert parity.compare(numbers, expected).within(parity.TOLERANCES["float32"])
    assert numbers.problems == ()


@pytest.mark.wide
@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_bfloat16_within_its_tolerance(method):
    exact, _ = on_one_device("llama")
    config = variant(precision=jaxtp.Precision(compute="bfloat16"))
    one, many = (parity.run(config, case, exact) for case in (ONE_DEVICE, Case(sizes_of((1, 2, 2, 2)), True, method)))
    assert parity.compare(many, one).within(parity.TOLERANCES["bfloat16"])


@pytest.mark.parametrize(
    ("model", "cp", "method", "zigzag"),
    [
        ({}, 4, "gather", True),
        ({}, 4, "ulysses", False),
        ({"sliding_window": 100}, 4, "gather", False),
        ({"pattern": ({"sliding_window": 100}, {})}, 2, "gather", True),
        ({"pattern": ({"sliding_window": 100}, {})}, 2, "auto", False),
        ({}, 1, "gather", False),
    ],
    ids=str,
)
def test_the_device_with_the_most_work_has_its_share_of_all(model, cp, method, zigzag):
    run = dataclasses.replace(variant(**model), mesh=MeshConfig(context=method), data=DataConfig(sequence_length=4096))
    share, whole = (share_of(run, mesh_shape(cp=size, tp=tp)) for size, tp in ((cp, 2), (1, 1)))
    assert run.model.zigzag(share) == zigzag
    most, all_of_it = (
        sum(p.flops * p.counted for p in costs_of(run.model, Workload(**vars(each))).attention)
        for each in (share, whole)
    )
    assert most == pytest.approx(all_of_it / (cp * 2), rel=0.02)


# Places of documents. A model whose layers see windows and all positions; one program for all examples of a method.
PACKED = dataclasses.replace(CONFIGS["windows"].model, dropout=0.0, remat="none")
ROWS = 4


@cache
def program(method):
    """A function of ids and segments that gives the logits of a packed row and of a document alone, on a cp mesh."""
    mesh = mesh_of(sizes_of((1, 2, 2, 2)))

    def build():
        return jaxtp.Decoder(PACKED, rngs=nnx.Rngs(0))

    graph, state = state_on_mesh(build, random_weights(build), mesh)
    run = jax.jit(lambda state, ids, segments: nnx.merge(graph, state)(ids, segments, context=method))

    def logits(ids, segments):
        with jax.set_mesh(mesh):
            return np.asarray(run(state, ids, segments))

    return logits


@st.composite
def packings(draw):
    """A document's ids, and rows in which it stands: alone at the beginning, and at other places among others."""
    ids = st.integers(0, PACKED.vocab_size - 1)
    document = draw(st.lists(ids, min_size=1, max_size=T))
    rows = np.array(draw(st.lists(st.lists(ids, min_size=T, max_size=T), min_size=ROWS, max_size=ROWS)), np.int32)
    places = [0, *draw(st.lists(st.integers(0, T - len(document)), min_size=ROWS - 1, max_size=ROWS - 1))]
    bounds = draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=ROWS, max_size=ROWS))
    segments = 1 + np.cumsum(bounds, axis=1, dtype=np.int32)
    segments[0] = 1
    for row, place in enumerate(places):
        rows[row, place : place + len(document)] = document
        segments[row, place + len(document) :] += 2 * T
        segments[row, place : place + len(document)] = 2 * T
        segments[row, :place] *= draw(st.booleans())  # padding, or documents
    return len(document), places, rows, segments


@pytest.mark.parametrize("method", sweep(["ulysses", "gather"], "gather"))
@settings(max_examples=10)
@given(packing=packings())
def test_a_document_alone_equals_the_same_packed_at_any_place(method, packing):
    length, places, rows, segments = packing
    logits = program(method)(rows, segments)
    assert np.isfinite(logits).all()
    for row, place in enumerate(places):
        assert relative_error(logits[row, place : place + length], logits[0, :length]) < TOLERANCE


@pytest.mark.parametrize("method", ["ulysses", "gather"])
def test_logits_are_in_natural_order_and_those_of_one_device(method):
    def build():
        return jaxtp.Decoder(PACKED, rngs=nnx.Rngs(0))

    random = np.random.default_rng(0)
    ids = random.integers(0, PACKED.vocab_size, (ROWS, T), np.int32)
    segments = np.cumsum(random.random((ROWS, T)) < 0.2, axis=1, dtype=np.int32)
    graph, state = without_mesh(build, random_weights(build))
    expected = jax.jit(lambda state: nnx.merge(graph, state)(ids, segments))(state)
    assert relative_error(program(method)(ids, segments), expected) < TOLERANCE


@given(cp=st.sampled_from([1, 2, 4, 8]), zigzag=st.booleans())
def test_the_order_of_tokens_is_a_permutation_that_natural_undoes(cp, zigzag):
    sequences = Sequences(zigzag=zigzag and cp > 1)
    with jax.set_mesh(mesh_of(sizes_of((1, 1, cp, 1)))):
        positions = np.asarray(sequences.positions(T))
        assert np.array_equal(np.sort(positions), np.arange(T))
        assert np.array_equal(sequences.natural(positions, 0), np.arange(T))


def test_what_users_ask_of_a_model_is_refused_in_one_sentence():
    def build():
        return jaxtp.Decoder(LLAMA, rngs=nnx.Rngs(0))

    ids = jax.ShapeDtypeStruct((2, T), np.int32)
    with jax.set_mesh(mesh_of(mesh_shape(cp=8, tp=2))):
        with pytest.raises(ConfigError, match=r"mesh.context=ulysses: mesh.cp=8 does not divide the 4 query heads"):
            jax.eval_shape(lambda ids: build()(ids, context="ulysses"), ids)
        with pytest.raises(ConfigError, match=r"a KV cache cannot be split over cp, and the mesh has cp=8; use cp=1"):
            jax.eval_shape(lambda ids: continue_rows(DecodeModel(build(), ()), ids, (), ids[:, 0]), ids)


@pytest.mark.parametrize("length", [15, 1])
def test_a_length_that_cp_does_not_divide_is_refused_by_the_model_itself(length):
    with jax.set_mesh(mesh_of(mesh_shape(cp=2, tp=2))):
        model = nnx.eval_shape(lambda: jaxtp.Decoder(LLAMA, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=f"dim 1 of shape .* is {length}, not divisible by cp=2; nearest: "):
            jax.eval_shape(lambda ids: model(ids), jax.ShapeDtypeStruct((2, length), "int32"))


@pytest.mark.parametrize("method", ["Ulysses", "ring", "", None, ["gather"]])
def test_a_method_that_there_is_not_is_refused_by_the_model_itself(method):
    model = nnx.eval_shape(lambda: jaxtp.Decoder(LLAMA, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match="attention over cp takes auto, ulysses, gather"):
        jax.eval_shape(lambda ids: model(ids, context=method), jax.ShapeDtypeStruct((2, 8), "int32"))


def test_the_summary_says_who_has_the_most_to_do():
    uneven = dataclasses.replace(BASE, data=DataConfig(sequence_length=20), mesh=MeshConfig(context="gather"))
    assert "WARNING: the last has the most to do, as 2 * cp does not divide" in describe_context(
        uneven, mesh_shape(cp=4)
    )
    assert "WARNING" not in describe_context(BASE, mesh_shape(cp=4, tp=2))
    mixed = dataclasses.replace(variant(pattern=({"sliding_window": 3}, {})), mesh=MeshConfig(context="gather"))
    text = describe_context(mixed, mesh_shape(cp=4))
    assert "two chunks of each on a device" in text
    assert "gather within a window of 3 (as configured) and gather (as configured)" in text


def test_halos_are_counted_as_they_are_sent():
    for cp, zigzag in itertools.product(range(2, 8), (False, True)):
        for hop in range(1, 3 * cp):
            assert num_routes(cp, hop, zigzag=zigzag) == len(routes(cp, hop, zigzag=zigzag)), (cp, hop, zigzag)
