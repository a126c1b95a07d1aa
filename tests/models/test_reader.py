"""Reading with a cache gives the logits of reading everything at once, at every position, on every
mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from support import (
    TOLERANCE,
    continue_rows,
    decoder,
    mesh_by_size,
    random_weights,
    relative_error,
    state_on_mesh,
    swept,
)
from tables import read_table
from variants import variant

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.generate.decode_model import decode_mesh, to_decode_model, weight_bytes
from jaxtp.layers.cache import DROPPED, NewTokens
from jaxtp.mesh import batch_parts, mesh_sizes

B = 8
T = 16
MODELS = {name: row for name, row in read_table(__file__).items() if not name.startswith(".")}
SHARED = variant(jaxtp.ModelConfig(), MODELS.pop("base"))
FIRST = np.array([1, 2, 3, 4, 5, 6, 6, 1])  # tokens of each row that are read first
SECOND = np.array([6, 1, 5, 1, 2, 4, 3, 6])  # and after these


def built(config, mesh):
    """Returns `graph, state` of a model with random weights."""
    return state_on_mesh(decoder(config), random_weights(decoder(config)), mesh)


@swept("name", MODELS)
def test_reading_in_parts_equals_reading_at_once(name):
    """Packed, also behind tokens that a row has already, and then a token of each row at a time.

    A state reads one row at a time.
    """
    mesh = mesh_by_size(*MODELS[name]["mesh"])
    graph, state = built(variant(SHARED, MODELS[name]["model"]), mesh)
    ids = default_rng(0).integers(0, SHARED.vocab_size, (B, T), np.int32)
    with jax.set_mesh(mesh):
        expected = np.asarray(
            jax.jit(lambda state: nnx.merge(graph, state)(ids))(state), np.float64
        )
    whole = decode_mesh(mesh)
    reader, weights = nnx.split(to_decode_model(nnx.merge(graph, state), whole))
    parts = batch_parts(mesh_sizes(whole))
    found = np.full(expected.shape, np.nan)
    lengths = np.zeros(B, np.int32)

    @partial(jax.jit, donate_argnums=1)
    def read(weights, caches, ids, new):
        model = nnx.merge(reader, weights)
        x, caches = model(ids, caches, new)
        return model.logits_of_hidden(x), caches

    def packed(caches, counts, *, continued):
        """Reads so many of the next tokens of each row, those of a part in one sequence; padding
        may be any ids.
        """
        size = B // parts
        given = np.full((parts, 48), 3, np.int32)
        positions = np.full_like(given, T)
        rows = np.full_like(given, -1)
        ends = np.zeros(parts, int)
        places = []
        for row in range(B):
            part = row // size
            place = np.s_[part, ends[part] : ends[part] + counts[row]]
            read_now = np.s_[lengths[row] : lengths[row] + counts[row]]
            positions[place] = np.arange(T)[read_now]
            given[place] = ids[row][read_now]
            rows[place] = row % size
            ends[part] += counts[row]
            places.append((row, read_now, place))
        logits, caches = read(weights, caches, given, NewTokens(positions, rows, continued))
        for row, read_now, place in places:
            found[row][read_now] = logits[place]
        lengths[:] += counts
        return caches

    def alone(caches, counts, *, continued):
        for member in range(B // parts):
            is_member = np.arange(B) % (B // parts) == member
            caches = packed(caches, np.where(is_member, counts, 0), continued=continued)
        return caches

    read_prompts = alone if "states" in name else packed
    with jax.set_mesh(whole):
        caches = jax.jit(lambda weights: nnx.merge(reader, weights).empty(B, T))(weights)
        # In its part, which has them read before the others
        first = np.arange(B) % (B // parts) == 0
        caches = read_prompts(caches, np.where(first, FIRST, 0), continued=False)
        caches = read_prompts(caches, np.where(first, SECOND, FIRST), continued=True)
        while lengths.min() < T:
            positions = np.where(lengths < T, lengths, DROPPED).astype(np.int32)[:, None]
            one = np.take_along_axis(ids, np.minimum(positions, T - 1), axis=1)
            logits, caches = read(weights, caches, one, NewTokens(positions))
            for row in np.flatnonzero(lengths < T):
                found[row, lengths[row]] = logits[row, 0]
            lengths += lengths < T
    tolerance = 0.05 if name == "bfloat16" else TOLERANCE
    for place in np.ndindex(B, T):
        assert relative_error(found[place], expected[place]) < tolerance, place


LATENTS = variant(SHARED, MODELS["latents"]["model"])


@pytest.mark.parametrize(
    ("config", "sizes", "heads"),
    [
        (SHARED, (1, 1, 8), 8),  # two kv heads over eight devices are held four times each
        (LATENTS, (2, 1, 2), 2),  # each device of tp has all latents
    ],
    ids=["tp", "latents"],
)
def test_the_cache_is_split_over_rows_and_kv_heads(config, sizes, heads):
    mesh = mesh_by_size(*sizes)
    reader = to_decode_model(nnx.merge(*built(config, mesh)), decode_mesh(mesh))
    with jax.set_mesh(decode_mesh(mesh)):
        caches = jax.tree.leaves(jax.jit(lambda: reader.empty(B, T))())
    dp, fsdp, tp = sizes
    # One array of latents, or keys and values, in each layer.
    number, width = (
        (1, config.kv_rank + config.rope_head_dim) if config.kv_rank else (2, config.head_dim)
    )
    assert [array.shape for array in caches] == [(B, heads, T, width)] * number * config.num_layers
    held = {shard.data.shape for array in caches for shard in array.addressable_shards}
    assert held == {(B // (dp * fsdp), heads // tp, T, width)}


def test_weights_are_whole_but_for_tp_and_in_the_compute_dtype():
    mesh = jaxtp.make_mesh(dp=2, fsdp=2, tp=2)
    config = variant(
        SHARED, {"num_layers": 1, "vocab_size": 32, "precision": {"compute": "bfloat16"}}
    )
    with jax.set_mesh(mesh):
        model = jax.jit(decoder(config))()
    reader = to_decode_model(model, decode_mesh(mesh), donate=True)
    arrays = jax.tree.leaves(nnx.state(reader))
    assert {str(array.dtype) for array in arrays} == {"bfloat16"}
    shares = {
        (array.ndim > 1, array.size // array.addressable_shards[0].data.size) for array in arrays
    }
    assert shares == {(True, 2), (False, 1)}, "norms are on every device"
    assert len(arrays) == 3 + 6, "q, k and v are one kernel, and gate and up"
    held = sum(shard.data.nbytes for array in arrays for shard in array.addressable_shards) // 8
    assert held == weight_bytes(model, mesh_sizes(mesh))
    assert all(array.is_deleted() for array in jax.tree.leaves(nnx.state(model)))


@pytest.mark.wide
@pytest.mark.parametrize(("name", "sums"), [("learned positions", 2), ("parallel", 1)])
def test_reading_a_token_moves_one_or_two_sums_a_layer_and_none_of_the_cache(name, sums):
    mesh = jaxtp.make_mesh(tp=8)
    config = variant(SHARED, MODELS[name]["model"])
    reader, weights = nnx.split(to_decode_model(nnx.merge(*built(config, mesh)), mesh))
    with jax.set_mesh(mesh):
        caches = jax.eval_shape(lambda: nnx.merge(reader, weights).empty(B, T))
        read = lambda weights, caches, ids: continue_rows(
            nnx.merge(reader, weights), ids, caches, ids[:, 0]
        )
        jaxpr = jax.make_jaxpr(read)(weights, caches, jnp.zeros((B, 1), jnp.int32))
    found = count_collectives(jaxpr, mesh_sizes(mesh))
    assert {(c.kind, c.shape) for c in found} == {("all-reduce", (B, 1, config.d_model))}
    assert found.total() == sums * config.num_layers + 1  # the embedding's
