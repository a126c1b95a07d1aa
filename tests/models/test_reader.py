"""Reading with a cache gives the logits of reading everything at once, at every position, on every mesh."""

import dataclasses
from contextlib import nullcontext
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import MESHES, TOLERANCE, continue_rows, random_weights, relative_error, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.generate.decode_model import decode_mesh, to_decode_model, weight_bytes
from jaxtp.layers.cache import DROPPED, NewTokens
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import batch_parts, mesh_sizes

B, T = 8, 16
PLAIN = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=4, d_ff=24, norm_eps=1e-3
)
SHARED = dataclasses.replace(PLAIN, vocab_size=19, num_kv_heads=2)  # odd vocabulary; kv heads fewer than tp
LONGROPE = RopeScaling(kind="longrope", original_length=8, short_factor=(1.0, 1.1), long_factor=(2.0, 5.0))
"""Slots for twice its original length, so that its first chunk is read by the long factors too."""
BIASES = {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, "tie_embeddings": True}
HEAD = {"head_bias": True, "logit_scale": 0.3, "residual_scale": 0.7}
MODELS = {
    "plain": PLAIN,
    "shared": dataclasses.replace(SHARED, rope_scaling=LONGROPE),
    "one kv head": dataclasses.replace(SHARED, num_kv_heads=1, scan_layers=False),
    "biases, tied": dataclasses.replace(SHARED, **BIASES),
    "head norms": dataclasses.replace(SHARED, qk_norm="head"),
    "projection norms": dataclasses.replace(SHARED, qk_norm="projection", sequence_parallel=False),
    "pieces": dataclasses.replace(
        SHARED,
        pattern=(
            {"value_is_key": True, "rope_scaling": RopeScaling(kind="proportional")},
            {"qk_norm_after_rope": True},
        ),
        **{"norm": "layer_no_bias", "qk_norm": "heads", "value_norm": True, "attention_gate": True, "clip_qkv": 0.5},
        **{"rotary_fraction": 0.5, "query_temperature": 0.5, "rope_scaling": RopeScaling(original_length=3)},
        attention_sinks=True,
    ),
    "plain norms": dataclasses.replace(SHARED, norm="layer_plain", qk_norm="head_plain", tie_embeddings=True),
    "window": dataclasses.replace(SHARED, sliding_window=4, attention_sinks=True),
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
    "parallel": dataclasses.replace(
        SHARED, **BIASES, **HEAD, norm_placement="parallel", embedding_norm=True, num_kv_heads=8
    ),
    "parallel, two norms": dataclasses.replace(SHARED, **HEAD, norm_placement="parallel_two", layer_scale=True),
    "parallel adapters": dataclasses.replace(SHARED, norm_placement="parallel", lora=LoraConfig(rank=2)),
    "norms after": dataclasses.replace(SHARED, norm_placement="after", qk_norm="projection"),
    "learned positions": dataclasses.replace(
        SHARED, **BIASES, learned_positions=T, rope_theta=None, norm="layer", mlp="plain", activation="relu"
    ),
    "adapters": dataclasses.replace(SHARED, lora=LoraConfig(rank=2)),
    "experts": dataclasses.replace(SHARED, num_layers=4, num_experts=6, pattern=({"num_experts": 0}, {})),
    "biased experts": dataclasses.replace(SHARED, num_experts=8, experts_per_token=3, selection_bias=True),
    "shared experts": dataclasses.replace(
        SHARED,
        num_experts=6,
        router_scores="sigmoid",
        expert_groups=3,
        groups_per_token=2,
        shared_experts=10,
        shared_experts_gate=True,
    ),
    "states": dataclasses.replace(
        SHARED,
        num_layers=4,
        pattern=({}, {"delta_value_heads": 0}),
        **{"delta_value_heads": 4, "delta_key_heads": 2, "delta_key_dim": 6, "delta_value_dim": 8},
    ),
    "learned activations": dataclasses.replace(SHARED, mlp="plain", activation="xielu", d_ff=22),
    "bfloat16": dataclasses.replace(SHARED, precision=jaxtp.Precision(param="bfloat16", compute="bfloat16")),
}
CASES = [("shared", mesh) for mesh in [None, *MESHES]] + [(name, (1, 2, 4)) for name in MODELS if name != "shared"]
CASES += [("states", (2, 2, 2))]
CASES += [("experts", (2, 2, 2))]  # whole ones on each device; above a part of each
DEFAULT = [("pieces", (1, 2, 4))]
FIRST = np.array([1, 2, 3, 4, 5, 6, 6, 1])  # tokens of each row that are read first
SECOND = np.array([6, 1, 5, 1, 2, 4, 3, 6])  # and after these


def build(name):
    return jaxtp.Decoder(MODELS[name], rngs=nnx.Rngs(0))


@cache
def weights_of(name):
    return random_weights(lambda: build(name))


def built(name, mesh):
    make = lambda: build(name)
    return without_mesh(make, weights_of(name)) if mesh is None else state_on_mesh(make, weights_of(name), mesh)


@pytest.mark.parametrize("case", sweep(CASES, *DEFAULT), ids=str)
def test_reading_in_parts_equals_reading_at_once(case):
    """Packed, also behind tokens that a row has already, and then a token of each row at a time."""
    name, sizes = case
    mesh = sizes and jaxtp.make_mesh(*sizes)
    graph, state = built(name, mesh)
    ids = np.random.default_rng(0).integers(0, MODELS[name].vocab_size, (B, T), np.int32)
    with jax.set_mesh(mesh) if mesh else nullcontext():
        expected = np.asarray(jax.jit(lambda state: nnx.merge(graph, state)(ids))(state), np.float64)
    whole = mesh and decode_mesh(mesh)
    reader, weights = nnx.split(to_decode_model(nnx.merge(graph, state), whole))
    parts = batch_parts(mesh_sizes(whole))
    found, lengths = np.full(expected.shape, np.nan), np.zeros(B, np.int32)

    @partial(jax.jit, donate_argnums=1)
    def read(weights, caches, ids, new):
        model = nnx.merge(reader, weights)
        x, caches = model(ids, caches, new)
        return model.logits_of_hidden(x), caches

    def packed(caches, counts, *, continued):
        """Reads so many of the next tokens of each row, those of a part in one sequence; padding may be any ids."""
        size, length = B // parts, 48
        given, positions = np.full((parts, length), 3, np.int32), np.full((parts, length), T, np.int32)
        rows, places = np.full((parts, length), -1, np.int32), []
        for part in range(parts):
            at = 0
            for row in range(part * size, (part + 1) * size):
                for position in range(lengths[row], lengths[row] + counts[row]):
                    given[part, at], positions[part, at] = ids[row, position], position
                    rows[part, at], at = row % size, at + 1
                    places.append((part, at - 1, row, position))
        logits, caches = read(weights, caches, given, NewTokens(positions, rows, continued))
        for part, at, row, position in places:
            found[row, position] = np.asarray(logits[part, at], np.float64)
        lengths[:] += counts
        return caches

    with jax.set_mesh(whole) if whole else nullcontext():
        caches = jax.jit(lambda weights: nnx.merge(reader, weights).empty(B, T))(weights)
        first = np.arange(B) % (B // parts) == 0  # in its part, which has them read before the others
        caches = packed(caches, np.where(first, FIRST, 0), continued=False)
        caches = packed(caches, np.where(first, SECOND, FIRST), continued=True)
        while lengths.min() < T:
            positions = np.where(lengths < T, lengths, DROPPED).astype(np.int32)[:, None]
            one = np.take_along_axis(ids, np.minimum(positions, T - 1), axis=1)
            logits, caches = read(weights, caches, one, NewTokens(positions))
            for row in np.flatnonzero(lengths < T):
                found[row, lengths[row]] = np.asarray(logits[row, 0], np.float64)
            lengths += lengths < T
    tolerance = 0.05 if name == "bfloat16" else TOLERANCE
    for row in range(B):
        for position in range(T):
            assert relative_error(found[row, position], expected[row, position]) < tolerance, (row, position)


@pytest.mark.parametrize(("sizes", "heads"), [((1, 1, 8), 8), ((2, 2, 2), 2), ((8, 1, 1), 2)], ids=str)
def test_the_cache_is_split_over_rows_and_kv_heads(sizes, heads):
    """Each device holds its rows and heads; two kv heads over eight devices are held four times each."""
    mesh = jaxtp.make_mesh(*sizes)
    reader = to_decode_model(nnx.merge(*built("shared", mesh)), decode_mesh(mesh))
    with jax.set_mesh(decode_mesh(mesh)):
        caches = jax.jit(lambda: reader.empty(B, T))()
    dp, fsdp, tp = sizes
    keys_and_values = jax.tree.leaves(caches)
    assert [array.shape for array in keys_and_values] == [(B, heads, T, 4)] * 4
    (shape,) = {shard.data.shape for array in keys_and_values for shard in array.addressable_shards}
    assert shape == (B // (dp * fsdp), heads // tp, T, 4)


def test_weights_are_whole_but_for_tp_and_in_the_compute_dtype():
    mesh = jaxtp.make_mesh(2, 2, 2)
    config = dataclasses.replace(PLAIN, precision=jaxtp.Precision(compute="bfloat16"))
    with jax.set_mesh(mesh):
        model = jax.jit(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))()
    reader = to_decode_model(model, decode_mesh(mesh), donate=True)
    arrays = jax.tree.leaves(nnx.state(reader))
    assert {str(array.dtype) for array in arrays} == {"bfloat16"}
    shares = {(array.ndim > 1, array.size // array.addressable_shards[0].data.size) for array in arrays}
    assert shares == {(True, 2), (False, 1)}, "norms are on every device"
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards) // 8
    assert held == weight_bytes(model, mesh_sizes(mesh))
    assert all(array.is_deleted() for array in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize(("name", "sums"), [("plain", 2), ("parallel", 1)])
def test_reading_a_token_moves_one_or_two_sums_a_layer_and_none_of_the_cache(name, sums):
    mesh = jaxtp.make_mesh(tp=8)
    reader, weights = nnx.split(to_decode_model(nnx.merge(*built(name, mesh)), mesh))
    with jax.set_mesh(mesh):
        caches = jax.eval_shape(lambda: nnx.merge(reader, weights).empty(B, T))
        read = lambda weights, caches, ids: continue_rows(nnx.merge(reader, weights), ids, caches, ids[:, 0])
        jaxpr = jax.make_jaxpr(read)(weights, caches, jnp.zeros((B, 1), jnp.int32))
    found = count_collectives(jaxpr, mesh_sizes(mesh))
    assert {(c.kind, c.shape) for c in found} == {("all-reduce", (B, 1, PLAIN.d_model))}
    assert found.total() == sums * PLAIN.num_layers + 1  # the embedding's
