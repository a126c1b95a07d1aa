"""Gated DeltaNet over cp: states and convolutions reach over chunks of tokens, and so do all
gradients.
"""

from collections import Counter
from functools import cache

import deltas
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layer_programs import LayerProgram, delta_layer, in_order
from numpy.random import default_rng
from support import (
    TOLERANCE,
    assert_close,
    random_weights,
    relative_error,
    sizes_of,
    swept,
    use_mesh,
)
from tables import read_table
from variants import variant

import jaxtp
from jaxtp.analysis.collective import ALL_GATHER, PERMUTE, REDUCE_SCATTER
from jaxtp.analysis.work import work_of
from jaxtp.collectives import device_view
from jaxtp.layers.context import Sequences, routes
from jaxtp.layers.gated_delta import DELTA, GatedDeltaNet
from jaxtp.mesh import BATCH, CONTEXT, TP, mesh_of, mesh_shape
from jaxtp.tools.check.shrink import methods_of
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.run_report import describe_context
from jaxtp.train.validation import share_of

B = 2
HEADS = 2
K = 3
V = 5
D = 16


def states_before(m, u):
    """Returns the state before each chunk, from maps `[n, B, H, K, ...]`."""
    states = [jnp.zeros_like(u[0])]
    for chunk in range(len(u) - 1):
        states.append(m[chunk] @ states[-1] + u[chunk])
    return jnp.stack(states)


@swept("case", [(4, True), (2, False)], (4, True))
def test_every_chunk_starts_with_the_state_of_all_chunks_before_it(case):
    cp, zigzag = case
    count = cp * (1 + zigzag)
    chunks = 1 + zigzag
    draw = default_rng(0).standard_normal
    m, u, upstream = (draw((count, B, HEADS, K, width)).astype(np.float32) for width in (K, V, V))
    expected, pull = jax.vjp(states_before, m, u)
    with use_mesh(**sizes_of((1, 2, cp, 2))):
        sequences = Sequences(zigzag=zigzag)
        order = sequences.positions(count)

        def body(m, u):  # of a device, [chunks, b, h, K, ...]
            states = sequences.initial_states(
                *(jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for x in (m, u))
            )
            return jnp.moveaxis(states.reshape(-1, chunks, *states.shape[1:]), 1, 0)

        spec = P(CONTEXT, BATCH, TP)

        @jax.jit
        def run(m, u, upstream):
            view = device_view(body, "states", (spec, spec), spec)
            found, back = jax.vjp(lambda m, u: sequences.natural(view(m[order], u[order]), 0), m, u)
            return found, *back(upstream)

        found = run(m, u, upstream)
    assert_close(dict(enumerate(found)), dict(enumerate((expected, *pull(upstream)))))


TABLE = read_table(__file__)
CONFIG = variant(jaxtp.ModelConfig(d_model=D), TABLE["model"])
"""Results of a head can be small, and their norm would amplify rounding: its epsilon is large."""


@cache
def program(mesh, zigzag, packed=True, kind="gated_delta"):
    """Returns a function from rows, the output's gradient and segments to the output and all
    gradients.
    """
    build = delta_layer(variant(CONFIG, TABLE["kinds"][kind]), D)
    weights = deltas.long_memory(random_weights(build))
    return LayerProgram(build, weights, mesh, call=in_order(zigzag, packed))


@st.composite
def packings(draw, length):
    """A document's length, its place in a row, and the segments of a row with it alone and of
    one with others.
    """
    size = draw(st.integers(1, length))
    place = draw(st.integers(0, length - size))
    around = np.cumsum(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
    around[:place] *= draw(st.booleans())  # padding
    at = np.arange(length)
    alone = at < size
    packed = (at >= place) & (at < place + size)
    return (
        size,
        place,
        np.stack([np.where(alone, 99, 0), np.where(packed, 99, around + 100 * (at > place))]),
    )


@settings(max_examples=8)
@given(packings(16), st.integers(0, 9))
def test_a_document_over_chunks_equals_it_at_any_other_place(packing, seed):
    """Chunks are shorter than the convolution."""
    size, place, segments = packing
    x = default_rng(seed).standard_normal((B, 16, D)).astype(np.float32)
    x[1, place : place + size] = x[0, :size]
    y = np.asarray(program((1, 1, 4, 1), zigzag=True)(x, x, segments.astype(np.int32))["y"])
    assert relative_error(y[1, place : place + size], y[0, :size]) < TOLERANCE


@swept("case", TABLE["cases"])
@settings(max_examples=5)
@given(data=st.data())
def test_over_cp_outputs_and_gradients_are_those_of_one_device(case, data):
    mesh, zigzag, length, packed, *kind = case
    segments = data.draw(packings(length))[2].astype(np.int32)
    x, upstream = default_rng(0).standard_normal((2, B, length, D)).astype(np.float32)
    on_mesh = program(tuple(mesh), zigzag, packed, *kind)
    on_one = program((1, 1, 1, 1), False, packed, *kind)
    assert_close(on_mesh(x, upstream, segments), on_one(x, upstream, segments))


@swept("zigzag", [False, True])
def test_what_moves_over_cp_does_not_depend_on_the_length(zigzag):
    """A gather of maps in float32, and halos; transposed in the backward pass."""
    cp = 4
    tp = 2
    chunks = 1 + zigzag

    def moved(length):
        sizes = sizes_of((1, 1, cp, tp))
        with jax.set_mesh(mesh_of(sizes)):
            graph, state = nnx.split(
                nnx.eval_shape(lambda: GatedDeltaNet(D, CONFIG, rngs=nnx.Rngs(0)))
            )
            loss = lambda params, x: jnp.sum(
                nnx.merge(graph, params[0])(params[1] + x, Sequences(zigzag=zigzag))
            )
            x = jax.ShapeDtypeStruct((B, length, D), jnp.float32)
            traffic = work_of(loss, sizes, (state, x), x).traffic
        moved = Counter()
        for c, times in traffic.items():
            if c.axes == ("cp",) and c.module == DELTA:
                moved[c.kind, c.bytes] += times
        return moved

    keys = CONFIG.delta_key_dim
    values = CONFIG.delta_value_dim
    maps = 4 * B * CONFIG.delta_value_heads // tp * keys * (keys + values)
    features = (2 * CONFIG.delta_key_heads * keys + CONFIG.delta_value_heads * values) // tp
    halos = len(routes(cp, 1, zigzag=zigzag))
    found = moved(64)
    assert found[PERMUTE, 4 * B * (CONFIG.delta_conv - 1) * features] == 2 * halos
    assert found[ALL_GATHER, cp * chunks * maps] == found[REDUCE_SCATTER, cp * chunks * maps] == 1
    assert found == moved(128) == moved(256)


def test_only_attention_has_methods_and_an_order_over_cp():
    """A model without attention has chunks in natural order, and equal work in them."""
    mesh = mesh_shape(cp=4)
    data = DataConfig(sequence_length=64)
    said = []
    methods = []
    for model in (CONFIG, variant(CONFIG, {"pattern": [{"delta_value_heads": 0}, {}]})):
        run = TrainConfig(model=model, data=data)
        gathering = variant(run, {"mesh": {"context": "gather"}})
        said.append(describe_context(model, share_of(gathering, mesh)))
        methods.append({*methods_of(run, mesh)})
    assert all("states by their chunks' maps of states" in text for text in said)
    assert ["attention by gather" in text for text in said] == [False, True]
    assert ["two chunks of each" in text for text in said] == [False, True]
    assert methods == [{"auto"}, {"ulysses", "gather"}]
