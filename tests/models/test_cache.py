"""Decoding from a cache gives the logits of reading everything at once, at every position, on every mesh."""

import dataclasses
import math
import re
from contextlib import nullcontext
from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import MESHES, TOLERANCE, random_weights, relative_error, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.audit.census import count_collectives
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import mesh_sizes

B, T, CHUNK = 8, 16, 6
PLAIN = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24, norm_eps=1e-3
)
SHARED = dataclasses.replace(PLAIN, vocab_size=19, num_kv_heads=2)  # odd vocabulary; kv heads fewer than tp
LONGROPE = RopeScaling(kind="longrope", original_length=8, short_factor=(1.0, 1.1), long_factor=(2.0, 5.0))
"""Slots for twice its original length, so that its first chunk is read by the long factors too."""
BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_embeddings": True}
MODELS = {
    "plain": PLAIN,
    "shared": dataclasses.replace(SHARED, rope_scaling=LONGROPE),
    "one kv head": dataclasses.replace(SHARED, num_kv_heads=1, scan_layers=False),
    "biases, tied": dataclasses.replace(SHARED, **BIASES),
    "head norms": dataclasses.replace(SHARED, qk_norm="head"),
    "projection norms": dataclasses.replace(SHARED, qk_norm="projection", sequence_parallel=False),
    "window": dataclasses.replace(SHARED, sliding_window=4),
    "scaled": dataclasses.replace(SHARED, rope_scaling=RopeScaling(kind="yarn", factor=4.0, original_length=8)),
    "layers that differ": dataclasses.replace(
        SHARED,
        num_layers=4,
        pattern=({"sliding_window": 4, "rope_theta": 50.0}, {}),
        norm="rms_plus_one",
        norm_placement="both",
        query_scale=0.7,
        attention_softcap=2.0,
        logit_softcap=5.0,
        embedding_scale=4.0,
        activation="gelu_tanh",
    ),
    "first blocks": dataclasses.replace(
        SHARED, num_layers=5, first_blocks=({"sliding_window": 3}, {"rope_theta": 9.0}), pattern=({"d_ff": 16}, {})
    ),
    "norms after": dataclasses.replace(SHARED, norm_placement="after", qk_norm="projection"),
    "learned positions": dataclasses.replace(
        SHARED, **BIASES, learned_positions=T, rope_theta=None, norm="layer", mlp="plain", activation="relu"
    ),
    "adapters": dataclasses.replace(SHARED, lora=LoraConfig(rank=2)),
    "experts": dataclasses.replace(SHARED, num_layers=4, num_experts=6, pattern=({"num_experts": 0}, {})),
    "biased experts": dataclasses.replace(SHARED, num_experts=8, experts_per_token=3, selection_bias=True),
    "bfloat16": dataclasses.replace(SHARED, precision=jaxtp.Precision(param="bfloat16", compute="bfloat16")),
}
CASES = [("shared", mesh) for mesh in [None, *MESHES]] + [(name, (1, 2, 4)) for name in MODELS if name != "shared"]
CASES += [("experts", (2, 2, 2))]  # whole ones on each device; above a part of each
DEFAULT = [("shared", (2, 2, 2)), ("learned positions", (1, 2, 4))]
FIRST = np.array([1, 2, 3, 4, 5, 6, 6, 0])  # tokens of each row in the first chunk, padded to CHUNK
SECOND = np.array([6, 0, 5, 1, 2, 4, 3, 6])  # in the second, left over by the first


def build(name):
    return jaxtp.Decoder(MODELS[name], rngs=nnx.Rngs(0))


@cache
def weights_of(name):
    return random_weights(lambda: build(name))


def built(name, mesh):
    make = lambda: build(name)
    return without_mesh(make, weights_of(name)) if mesh is None else state_on_mesh(make, weights_of(name), mesh)


@pytest.mark.parametrize("case", sweep(CASES, *DEFAULT), ids=str)
def test_cached_equals_uncached(case):
    name, mesh = case
    mesh = mesh and jaxtp.make_mesh(*mesh)
    graph, state = built(name, mesh)
    ids = np.random.default_rng(0).integers(0, MODELS[name].vocab_size, (B, T), np.int32)
    found = np.full((B, T, MODELS[name].vocab_size), np.nan)

    @jax.jit
    def extend(state, past, ids, counts):
        model = nnx.merge(graph, state)
        past, x = model.extend(past, ids, counts)
        return past, model.logits_of_hidden(x)

    def read(past, width, counts):
        """The next tokens of each row; whatever else is in the row of ids is padding, and any padding will do."""
        at = np.asarray(past.lengths)
        rows = [np.append(row[start:], np.zeros(T, np.int32))[:width] for row, start in zip(ids, at, strict=True)]
        past, logits = extend(state, past, np.stack(rows), counts.astype(np.int32))
        logits = np.asarray(logits, np.float64)
        for row, (start, count) in enumerate(zip(at, counts, strict=True)):
            found[row, start : start + count] = logits[row, :count]
        return past

    with jax.set_mesh(mesh) if mesh else nullcontext():
        expected = np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(ids))(state), np.float64)
        past = jax.jit(lambda state: nnx.merge(graph, state).empty_cache(B, T))(state)
        past = read(read(past, CHUNK, FIRST), CHUNK, SECOND)
        np.testing.assert_array_equal(past.lengths, FIRST + SECOND)
        for _ in range(T):  # rows that are full read no further token
            past = read(past, 1, (np.asarray(past.lengths) < T).astype(np.int32))
    np.testing.assert_array_equal(past.lengths, T)
    tolerance = 0.05 if name == "bfloat16" else TOLERANCE
    for row in range(B):
        for position in range(T):
            assert relative_error(found[row, position], expected[row, position]) < tolerance, (row, position)


def test_what_has_no_slot_is_dropped():
    graph, state = built("plain", None)
    model = nnx.merge(graph, state)
    ids = jnp.arange(2 * CHUNK, dtype=jnp.int32).reshape(2, CHUNK)
    full, _ = model.extend(model.empty_cache(2, CHUNK), ids, jnp.full(2, CHUNK))
    after, _ = model.extend(full, ids[:, :1], jnp.ones(2, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, after.memories, full.memories)


@pytest.mark.parametrize(("mesh", "heads"), [((1, 1, 8), 8), ((2, 2, 2), 2), ((8, 1, 1), 2)], ids=str)
def test_the_cache_is_split_over_rows_and_kv_heads(mesh, heads):
    """Each device holds its rows and heads; two kv heads over eight devices are held four times each."""
    mesh = jaxtp.make_mesh(*mesh)
    graph, state = built("shared", mesh)
    with jax.set_mesh(mesh):
        cache = jax.jit(lambda state: nnx.merge(graph, state).empty_cache(B, T))(state)
    sizes = mesh_sizes(mesh)
    keys_and_values = jax.tree.leaves(cache.memories)
    assert [array.shape for array in keys_and_values] == [(2, B, heads, T, 4)] * 2
    (shape,) = {shard.data.shape for array in keys_and_values for shard in array.addressable_shards}
    assert shape == (2, B // (sizes["dp"] * sizes["fsdp"]), heads // sizes["tp"], T, 4)


def test_reading_a_token_moves_two_sums_a_layer_and_none_of_the_cache():
    mesh = jaxtp.make_mesh(tp=8)
    graph, state = built("plain", mesh)
    with jax.set_mesh(mesh):
        cache = jax.jit(lambda state: nnx.merge(graph, state).empty_cache(B, T))(state)
        extend = lambda state, cache, ids: nnx.merge(graph, state).extend(cache, ids, jnp.ones(B, jnp.int32))
        jaxpr = jax.make_jaxpr(extend)(state, cache, jnp.zeros((B, 1), jnp.int32))
    found = count_collectives(jaxpr, mesh_sizes(mesh))
    assert {(c.kind, c.shape) for c in found} == {("all-reduce", (B, 1, PLAIN.d_model))}
    assert found.total() == 2 * PLAIN.num_layers + 1  # the embedding's


SLOTS, WIDTH = 77, 10
"""Sizes that nothing else has: an array with both holds slots of the cache."""


def reading(rows, tokens):
    """A program that reads tokens, traced, and the cache that it reads them into, abstract."""
    model = dataclasses.replace(SHARED, head_dim=WIDTH, num_layers=3)
    graph, abstract = nnx.split(nnx.eval_shape(lambda: jaxtp.Decoder(model, rngs=nnx.Rngs(0))))
    past = jax.eval_shape(lambda state: nnx.merge(graph, state).empty_cache(rows, SLOTS), abstract)
    ids, counts = jax.ShapeDtypeStruct((rows, tokens), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    program = jax.jit(lambda past, *rest: nnx.merge(graph, rest[0]).extend(past, *rest[1:]), donate_argnums=0)
    return program.trace(past, abstract, ids, counts), past


def holds_slots(shape):
    return SLOTS in shape and WIDTH in shape


@pytest.mark.parametrize("tokens", [1, 5])
def test_layers_read_the_cache_as_it_is_and_nothing_is_written_but_the_new_slots(tokens):
    traced, past = reading(2, tokens)
    layers = [e.params["jaxpr"].jaxpr for e in accounts.equations(traced.jaxpr.jaxpr) if e.primitive.name == "scan"]
    inside = [e for jaxpr in layers for e in accounts.equations(jaxpr)]
    assert any(holds_slots(v.aval.shape) for e in inside if e.primitive.name == "dot_general" for v in e.invars)
    assert not [e for e in inside for v in e.outvars if holds_slots(v.aval.shape)]
    made = [e for e in accounts.equations(traced.jaxpr.jaxpr) if holds_slots(e.outvars[0].aval.shape)]
    writes = [e for e in made if e.primitive.name != "jit"]
    assert [e.primitive.name for e in writes] == ["scatter"] * 2
    new = past.memories["0"]["attention"][0].size // SLOTS * tokens
    assert [e.invars[2].aval.size for e in writes] == [new] * 2


def test_the_compiled_program_neither_copies_nor_transposes_a_slice_of_the_cache():
    """But for the slice of a layer, which is read from the stack as any weight is."""
    traced, past = reading(2, 1)
    compiled = traced.lower().compile()
    made = re.findall(r"= \w+\[([\d,]+)\]\S* ([\w-]+)\(", compiled.as_text())
    of_a_layer = past.memories["0"]["attention"][0].size // 3
    slices = {op for dims, op in made if math.prod(map(int, dims.split(","))) == of_a_layer}
    assert "dynamic-slice" in slices
    assert slices <= {"dynamic-slice", "fusion", "bitcast", "parameter", "get-tuple-element", "reshape"}
    held = sum(array.size * array.dtype.itemsize for array in jax.tree.leaves(past.memories))
    assert compiled.memory_analysis().alias_size_in_bytes >= held
