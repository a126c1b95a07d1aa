"""Attention kernels, forward and backward, against plain mathematics in float64; what they read and
what they hold.

The fused kernels are interpreted on the CPU, in small blocks.
"""

from dataclasses import dataclass
from functools import cache, partial
from unittest import mock

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from layer_programs import LayerProgram
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from support import assert_close, random_weights, sweep_of, swept, use_mesh

import jaxtp
from jaxtp.collectives import axis_index, device_view
from jaxtp.layers import LayerContext, attention
from jaxtp.layers.kernels import fused_attention as fused
from jaxtp.layers.kernels.blockwise_attention import block_size, num_visited
from jaxtp.layers.kernels.fused_attention import Blocks
from jaxtp.layers.kernels.select import KERNELS, num_scores
from jaxtp.layers.positions import Part

ROWS = 2
TOKENS = 25
QUERIES = 10
KEYS = 15
WIDTH = 4
SCALE = 0.6
NAMES = ("output", "queries", "keys", "values", "sinks")
ERRORS = {"blockwise": 1e-12, "xla": 1e-5, "fused": 2e-5}
"""Largest error of a number: XLA's softmax is in float32, and so is all of the fused kernel."""
SINKS = np.array([120.0, -18, -6, 6])
"""Of the last heads: exp(120) is no float32, and the second sink is far below the scores."""


@dataclass(frozen=True)
class Structure:
    """Attention, but for its sequences."""

    heads: tuple[int, int]  # of queries, and of keys and values
    window: int | None = None
    softcap: float | None = None
    packed: bool = True
    values: int = WIDTH  # their width
    sinks: bool = False
    blocks: tuple[Blocks, Blocks] = (Blocks(8, 4, 4, 2), Blocks(4, 8, 4, 2))  # of the fused kernels


STRUCTURES = {
    "documents": Structure((2, 1)),
    "window and softcap": Structure(
        (4, 2), 5, 3.0, blocks=(Blocks(4, 8, 4, 2), Blocks(16, 4, 4, 2))
    ),
    "one document": Structure((2, 2), softcap=3.0, packed=False),
    "one document and a window": Structure((2, 1), 7, packed=False),
    "sinks and narrow values": Structure((4, 2), 5, 3.0, values=3, sinks=True),
    "sinks and wide values": Structure(
        (2, 1), values=20, sinks=True, blocks=(Blocks(16, 8, 4, 2), Blocks(8, 16, 4, 2))
    ),
}


def by_the_book(q, k, v, sinks, seen, structure):
    """Attention; a sink is a score more, the value of which is 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = SCALE * jnp.einsum("btnh,bsnh->bnts", q, k)
    if structure.softcap is not None:
        scores = structure.softcap * jnp.tanh(scores / structure.softcap)
    sinks = jnp.full(q.shape[2], -1e9) if sinks is None else sinks
    scores = jnp.where(seen[:, None], scores, -1e9)
    column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=3))[..., :-1]
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(seen[:, None], weights, 0), v)


@partial(jax.jit, static_argnames="structure")
def plain(q, k, v, grad, sinks, seen, structure):
    """Returns the result of attention and the gradients of its product with `grad`, in float64."""
    return with_gradients(
        lambda *arrays: by_the_book(*arrays, seen, structure), q, k, v, grad, sinks
    )


def which_see(queries, keys, window, segments):
    """Returns whether each query sees each key, `[B, T, S]`, by their positions; no key is
    before position 0.
    """
    distance = queries[:, None] - keys
    seen = (distance >= 0) & (distance < (window or np.inf)) & (keys >= 0)
    in_row = np.clip(keys, 0, segments.shape[1] - 1)
    return seen & (segments[:, queries, None] == segments[:, None, in_row])


def draw(structure, queries=TOKENS, keys=TOKENS):
    """Returns queries, keys, values, the gradient of the output, and sinks or None."""
    rng = default_rng(0)
    of_queries, of_keys = structure.heads
    shapes = [
        (queries, of_queries, WIDTH),
        (keys, of_keys, WIDTH),
        (keys, of_keys, structure.values),
        (queries, of_queries, structure.values),
    ]
    sinks = SINKS[-of_queries:] if structure.sinks else None
    return [*(rng.normal(size=(ROWS, *shape)) for shape in shapes), sinks]


def with_gradients(attend, q, k, v, grad, sinks, *others):
    """Returns the output of `attend(q, k, v, sinks, *others)` and its gradients, by name."""
    output, backward = jax.vjp(lambda *arrays: attend(*arrays, *others), q, k, v, sinks)
    results = dict(zip(NAMES, (output, *backward(grad)), strict=True))
    return {name: array for name, array in results.items() if array is not None}


def in_blocks(blocks):
    return mock.patch.object(fused, "block_sizes", return_value=blocks)


def attend(name, structure, q, k, v, sinks, segments, part=None):
    options = {"scale": SCALE, "window": structure.window, "softcap": structure.softcap}
    segments = segments if structure.packed else None
    with in_blocks(structure.blocks):
        return KERNELS[name].run(q, k, v, segments, part=part, sinks=sinks, **options)


@cache
def program(name, structure):
    """Returns a compiled kernel with its gradients; documents and part are arguments of it, not
    constants.
    """
    return jax.jit(partial(with_gradients, partial(attend, name, structure)))


def check(name, structure, segments, part=None):
    tokens = segments.shape[1]
    if part is None:
        queries = keys = np.arange(tokens)
    else:
        queries = part.queries
        keys = part.first_key + np.arange(KEYS)
    arrays = draw(structure, len(queries), len(keys))
    with jax.enable_x64(name != "fused"):
        found = program(name, structure)(*arrays, segments, part)
    seen = which_see(
        queries, keys, structure.window, segments if structure.packed else 0 * segments
    )
    with jax.enable_x64(True):
        expected = plain(*arrays, seen, structure)
    for what, array in found.items():
        assert_allclose(array, expected[what], atol=ERRORS[name], err_msg=what)
    for what, empty in (
        ("output", ~seen.any(2)),
        ("queries", ~seen.any(2)),
        ("keys", ~seen.any(1)),
    ):
        assert not np.asarray(found[what])[empty].any(), f"{what} that meet nothing are exactly 0"


def documents(tokens):
    """Draws segments of two rows; from the last end on there is padding."""
    rows = st.lists(
        st.sets(st.integers(1, tokens), min_size=1, max_size=4).map(sorted),
        min_size=ROWS,
        max_size=ROWS,
    )

    def segments(rows):
        at = np.arange(tokens)
        ids = [
            np.where(at < ends[-1], np.searchsorted(ends, at, side="right") + 1, 0) for ends in rows
        ]
        return np.stack(ids).astype(np.int32)

    return rows.map(segments)


SOME_QUERIES = st.lists(st.integers(0, TOKENS - 1), min_size=QUERIES, max_size=QUERIES, unique=True)
DEFAULT = [("sinks and narrow values", name) for name in ERRORS]


@pytest.mark.parametrize(("structure", "name"), sweep_of([STRUCTURES, ERRORS], *DEFAULT))
@settings(max_examples=8)
@given(documents(TOKENS), SOME_QUERIES, st.integers(-8, TOKENS))
def test_a_kernel_equals_plain_mathematics(structure, name, segments, queries, first_key):
    """Of whole sequences, which no block divides; and of any queries beside any keys.

    Keys may begin before the sequence, and some queries see none of them.
    """
    check(name, STRUCTURES[structure], segments)
    check(
        name,
        STRUCTURES[structure],
        segments,
        Part(np.array(sorted(queries), np.int32), np.int32(first_key)),
    )


@swept("name", ERRORS)  # each example is a program
@settings(max_examples=6)
@given(
    st.builds(
        Structure,
        heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
        window=st.none() | st.integers(1, 40),
        softcap=st.sampled_from([None, 0.7, 30.0]),
        packed=st.booleans(),
        values=st.sampled_from([WIDTH, 1, 7]),
        sinks=st.booleans(),
    ),
    st.integers(1, 40).flatmap(documents),
)
def test_a_kernel_equals_plain_mathematics_whatever_the_sizes(name, structure, segments):
    check(name, structure, segments)


@swept("name", ERRORS)
def test_a_document_may_have_the_number_of_one_before_its_neighbour(name):
    structure = STRUCTURES["documents"]
    run = partial(program(name, structure), *draw(structure, 12, 12))
    again, counted = (
        np.repeat([ids, ids], 4, axis=1).astype(np.int32) for ids in ([1, 2, 1], [1, 2, 3])
    )
    jax.tree.map(assert_array_equal, run(again), run(counted))


@pytest.mark.parametrize("name", ERRORS)
def test_a_device_may_learn_its_part_only_when_it_runs(name):
    """Zigzag: chunks 0 and 3 or 1 and 2, by the place along an axis; the keys' gradients are
    summed over it.
    """
    structure = STRUCTURES["sinks and wide values"]
    order = np.arange(24).reshape(4, 6)[[0, 3, 1, 2]].ravel()
    segments = np.repeat([[1, 2, 3], [1, 1, 0]], 8, axis=1).astype(np.int32)

    def body(q, k, v, sinks, segments):
        mine = jnp.asarray(order.reshape(2, 12), jnp.int32)[axis_index("fsdp")]
        return attend(name, structure, q, k, v, sinks, segments, Part(mine, 0))

    split = P(None, "fsdp")
    view = device_view(body, "attention", (split, *[P()] * 4), split)
    q, k, v, grad, sinks = draw(structure, 24, 24)
    with use_mesh(fsdp=2, devices=jax.devices()[:2]):
        run = jax.jit(lambda *arrays: with_gradients(lambda *given: view(*given), *arrays))
        found = run(q[:, order], k, v, grad[:, order], sinks, segments)
    at = np.arange(24)
    with jax.enable_x64(True):
        right = plain(q, k, v, grad, sinks, which_see(at, at, None, segments), structure)
    expected = {what: np.array(array) for what, array in right.items()}
    for what in ("output", "queries"):
        expected[what] = expected[what][:, order]
    assert_close(found, expected)


NOT_READ = {
    # Documents and window; the blocks of 8 that read the keys of block 1, and those that its
    # queries read.
    "window": ([1] * 32, 9, {1, 2}, {0, 1}),
    "causality and documents": ([1] * 8 + [2] * 16 + [0] * 8, None, {1, 2}, {1}),
}
IN_EIGHTS = (Blocks(8, 8, 4, 2), Blocks(8, 8, 4, 2))


@pytest.mark.parametrize("name", ["blockwise", "fused"])
@swept("case", NOT_READ, "causality and documents")
def test_blocks_that_nothing_sees_are_not_read(case, name):
    """What is not a number stays so wherever it is read, even if it is masked."""
    ids, window, readers, read = NOT_READ[case]
    segments = np.array([ids] * ROWS, np.int32)
    structure = Structure((2, 1), window, blocks=IN_EIGHTS)
    q, k, v, grad, _ = draw(structure, 32, 32)
    poisoned = [
        np.where(np.arange(32)[:, None, None] // 8 == 1, np.nan, x) for x in (q, k, v, grad)
    ]
    run = program(name, structure)
    clean = run(q, k, v, grad, None, segments)
    of_keys = run(q, *poisoned[1:3], grad, None, segments)
    of_queries = run(poisoned[0], k, v, poisoned[3], None, segments)
    for other in range(4):
        rows = np.s_[:, 8 * other : 8 * other + 8]
        for found, names, reached in (
            (of_keys, ("output", "queries"), readers),
            (of_queries, ("keys", "values"), read),
        ):
            for what in names:
                same = np.array_equal(found[what][rows], clean[what][rows])
                assert same == (other not in reached), f"{what} of block {other}"


@pytest.mark.parametrize("name", ["blockwise", "fused"])
def test_a_part_reads_no_block_that_it_does_not_see(name):
    """Two chunks with a window: keys before, between and after what they see."""
    structure = Structure((2, 1), 8, packed=False, blocks=IN_EIGHTS)
    queries = np.array([*range(24, 36), *range(60, 72)], np.int32)
    q, k, v, grad, _ = draw(structure, len(queries), 96)
    for x in (k, v):
        # The block of queries that lies across the gap sees what is between.
        x[:, :16] = np.nan
        x[:, 72:] = np.nan
    found = program(name, structure)(q, k, v, grad, None, None, Part(queries, 0))
    assert np.isfinite(found["output"]).all()


@pytest.mark.wide
def test_second_derivatives_of_blockwise_are_those_of_xla():
    structure = Structure((2, 1), 5, 3.0, packed=False)
    *given, grad, _ = draw(structure)

    def second(name):
        def loss(*given):
            return jnp.sum(jnp.sin(attend(name, structure, *given, None, None)) * grad)

        def squares(*given):
            return sum(jnp.sum(x**2) for x in jax.grad(loss, (0, 1, 2))(*given))

        return dict(enumerate(jax.jit(jax.grad(squares, (0, 1, 2)))(*given)))

    assert_close(second("blockwise"), second("xla"), 1e-4)


@swept("dtype", ["bfloat16", "float16"], "bfloat16")
def test_sixteen_bits_are_as_exact_as_a_result_that_is_rounded_once(dtype):
    """The gradient takes the softmax's mean from the output, which is in 16 bits, and is not
    rounded any more.
    """
    structure = Structure((4, 2), packed=False)
    *arrays, _ = (x if x is None else jnp.asarray(x, dtype) for x in draw(structure, 40, 40))
    found = jax.jit(
        lambda *given: {name: program(name, structure)(*given, None, None) for name in ERRORS}
    )(*arrays)
    exact = [np.asarray(x, np.float64) for x in arrays]
    at = np.arange(40)
    with jax.enable_x64(True):
        expected = plain(*exact, None, which_see(at, at, None, np.zeros((ROWS, 40))), structure)
    for results in found.values():
        assert {array.dtype.name for array in results.values()} == {dtype}
        assert_close(
            results, {what: expected[what] for what in results}, float(jnp.finfo(dtype).eps) / 2
        )


@pytest.mark.wide
def test_blockwise_holds_blocks_of_scores_and_no_more():
    """Twice the tokens are twice the memory; scores of all would be four times."""

    def temporaries(length):
        structure = Structure((1, 1), packed=False, values=8, sinks=True)
        shapes = [jax.ShapeDtypeStruct((1, length, 1, 8), "float32")] * 4 + [
            jax.ShapeDtypeStruct((1,), "float32")
        ]
        compiled = program("blockwise", structure).lower(*shapes, None).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short = temporaries(2048)
    long = temporaries(4096)
    assert long < 2.2 * short
    assert long < 4096**2 * 4 / 8


def zigzag(size, devices):
    """Returns the chunks of each device."""
    chunks = [range(i * size, (i + 1) * size) for i in range(2 * devices)]
    return [[chunks[i], chunks[-1 - i]] for i in range(devices)]


def in_order(size, devices):
    return [[range(i * size, (i + 1) * size)] for i in range(devices)]


SPLITS = st.builds(
    lambda split, size, devices: split(size, devices),
    *(st.sampled_from([zigzag, in_order]), st.integers(1, 300), st.integers(1, 4)),
)


@given(SPLITS, st.none() | st.integers(1, 700))
def test_visited_blocks_and_scores_of_a_device_are_counted_from_its_chunks(devices, window):
    for chunks in devices:
        queries = np.concatenate(chunks)
        block = block_size(len(queries))
        lowest = np.maximum(queries - (window or np.inf) + 1, 0)
        starts = range(0, len(queries), block)
        pairs = sum(queries[i : i + block][-1] // block - lowest[i] // block + 1 for i in starts)
        assert num_visited(tuple(chunks), window) == pairs
    whole = [range(sum(len(chunk) for chunks in devices for chunk in chunks))]
    assert_allclose(
        sum(num_scores(chunks, window) for chunks in devices), num_scores(whole, window)
    )


def test_zigzag_chunks_make_the_work_of_all_devices_alike():
    devices = zigzag(2**16, 8)
    for name in KERNELS.keys() - {"xla"}:
        blocks = [KERNELS[name].products(chunks, None) for chunks in devices]
        products = {number * queries * keys for number, queries, keys in blocks}
        assert max(products) < 1.01 * min(products)
    assert len({round(num_scores(chunks, 4096)) for chunks in devices[1:]}) == 1


@pytest.mark.wide
def test_cudnn_gets_values_as_wide_as_keys(monkeypatch):
    """JAX's function takes no others, and its check is all that a CPU can run."""
    by_jax = jax.nn.dot_product_attention

    def on_cpu(*arrays, implementation, **settings):
        assert implementation == "cudnn"
        return by_jax(*arrays, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    structures = [Structure((2, 1), 5, packed=False, values=values) for values in (3, 7)]

    @jax.jit
    def run(given):
        pairs = zip(structures, given, strict=True)
        return [
            [program(name, s)(*arrays, None) for name in ("cudnn", "blockwise")]
            for s, arrays in pairs
        ]

    for found, expected in run([draw(structure) for structure in structures]):
        assert_close(found, expected)


@pytest.mark.wide
def test_a_layer_with_a_kernel_for_gpus_equals_one_with_xla():
    """On a mesh, in a scan with remat.

    With sequence parallelism the kernel takes the heads of all rows as those of one row.
    """

    def build(name):
        config = jaxtp.AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=4, attention=name)
        return jaxtp.CausalSelfAttention(
            8, config, LayerContext(sequence_parallel=None), rngs=nnx.Rngs(0)
        )

    def twice(layer, x):
        again = jax.checkpoint(lambda x, _: (layer(x), None))
        return jax.lax.scan(again, x, length=2)[0]

    arrays = default_rng(0).standard_normal((2, 4, 10, 8), "f4")
    weights = random_weights(partial(build, "xla"))
    fused, xla = (
        LayerProgram(partial(build, name), weights, (1, 2, 1, 2), call=twice)
        for name in ("fused", "xla")
    )
    with (
        in_blocks(IN_EIGHTS),
        mock.patch.object(attention, "architecture_of", return_value="cuda 9.0"),
    ):
        assert_close(fused(*arrays), xla(*arrays))
        equations = accounts.equations(fused.jaxpr(*arrays).jaxpr)
    grids = [e.params["grid_mapping"].grid for e in equations if e.primitive.name == "pallas_call"]
    assert {rows for *_, rows in grids} == {1}
