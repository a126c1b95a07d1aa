"""Kernels of attention against plain mathematics in float64; what they visit and hold; which of them `auto` takes."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support import assert_close, sweep

import jaxtp
from jaxtp.analysis.hardware import TABLE
from jaxtp.collectives import axis_index, device_view
from jaxtp.config.schema import ConfigError
from jaxtp.layers.attention import _rows_as_heads
from jaxtp.layers.kernels import blockwise_attention as blockwise
from jaxtp.layers.kernels import select as kernels
from jaxtp.layers.kernels.blockwise_attention import block_size, num_visited
from jaxtp.layers.kernels.fused_attention import MOST_HEAD_DIM
from jaxtp.layers.kernels.select import KERNELS, Use, architecture_of, candidates, num_scores, pick_kernel, unsupported
from jaxtp.layers.sequence_parallel import Part, key_ranges, query_ranges
from jaxtp.mesh import mesh_shape

WIDTH = 4


def plain(q, k, v, dy, seen, scale, softcap, sinks=None):
    """Returns the result of attention and the gradients of its inner product with `dy`, in NumPy, head by head.

    A sink is a column of scores more, the values of which are 0.
    """
    group = q.shape[2] // k.shape[2]
    y, dq, dk, dv = (np.zeros_like(x) for x in (dy, q, k, v))
    d_sinks = np.zeros(q.shape[2])
    for row in range(q.shape[0]):
        for head in range(q.shape[2]):
            queries, keys, values, grads = (
                q[row, :, head],
                k[row, :, head // group],
                v[row, :, head // group],
                dy[row, :, head],
            )
            scores = queries @ keys.T * scale
            capped = scores if softcap is None else softcap * np.tanh(scores / softcap)
            column = np.full((len(queries), 1), -np.inf if sinks is None else sinks[head])
            table = np.concatenate([np.where(seen[row], capped, -np.inf), column], axis=1)
            values = np.concatenate([values, np.zeros((1, values.shape[1]))])
            weights = np.exp(table - np.max(table, initial=-1e9, axis=1, keepdims=True))
            weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
            y[row, :, head] = weights @ values
            d_weights = grads @ values.T
            d_table = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
            d_sinks[head] += d_table[:, -1].sum()
            d_scores = d_table[:, :-1] * scale
            d_scores *= 1 if softcap is None else 1 - (capped / softcap) ** 2
            dq[row, :, head] = d_scores @ keys
            dk[row, :, head // group] += d_scores.T @ queries
            dv[row, :, head // group] += weights[:, :-1].T @ grads
    return (y, dq, dk, dv) if sinks is None else (y, dq, dk, dv, d_sinks)


def which_see(queries, keys, window, segments):
    """Whether the query at a position sees the key at another, `[B, Tq, S]`; no key is before position 0."""
    queries, keys = np.asarray(queries), np.asarray(keys)
    distance = queries[:, None] - keys
    seen = (distance >= 0) & (distance < (window or np.inf)) & (keys >= 0)
    last = segments.shape[1] - 1
    return seen & (segments[:, queries, None] == segments[:, None, np.clip(keys, 0, last)])


@st.composite
def problems(draw):
    length = draw(st.integers(1, 40))
    kv_heads, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2)]))
    ends = sorted(draw(st.sets(st.integers(1, length), max_size=3)))
    segments = np.searchsorted(ends, np.arange(length), side="right") + 1
    segments[ends[-1] if ends else length :] = 0  # padding
    return {
        "length": length,
        "heads": (kv_heads * group, kv_heads),
        "segments": np.stack([segments, np.arange(length) // 3]).astype(np.int32) if draw(st.booleans()) else None,
        "window": draw(st.none() | st.integers(1, length + 2)),
        "softcap": draw(st.none() | st.sampled_from([0.7, 30.0])),
        "sinks": np.linspace(-3, 2, kv_heads * group) if draw(st.booleans()) else None,
        "values": draw(st.sampled_from([WIDTH, 1, 7])),
    }


def arrays(length, heads, dtype="float64", seed=0, values=WIDTH):
    """Queries, keys, values and the gradient of the result."""
    draw, (queries, keys) = np.random.default_rng(seed).normal, heads
    sizes = (queries, WIDTH), (keys, WIDTH), (keys, values), (queries, values)
    return tuple(jnp.asarray(draw(size=(2, length, *size)), dtype) for size in sizes)


def run(kernel, q, k, v, dy, segments, *, sinks=None, **options):
    given = (q, k, v) if sinks is None else (q, k, v, sinks)

    def attend(q, k, v, sinks=None):
        return kernel(q, k, v, segments, **options, **({} if sinks is None else {"sinks": sinks}))

    y, gradients = jax.vjp(attend, *given)
    return y, *gradients(dy)


@pytest.mark.wide  # each example is a program
@pytest.mark.parametrize("name", ["blockwise", "xla"])
@settings(max_examples=25)
@given(problem=problems())
def test_a_kernel_is_plain_mathematics_whatever_the_sizes(name, problem):
    length, segments = problem["length"], problem["segments"]
    options = {"scale": 0.6, "window": problem["window"], "softcap": problem["softcap"], "sinks": problem["sinks"]}
    with jax.enable_x64(True):
        given = arrays(length, problem["heads"], values=problem["values"])
        found = jax.jit(lambda *a: run(KERNELS[name].run, *a, segments, **options))(*given)
    at = np.arange(length)
    seen = which_see(at, at, problem["window"], np.zeros((2, length)) if segments is None else segments)
    assert_equal(name, found, plain(*map(np.asarray, given), seen, 0.6, problem["softcap"], problem["sinks"]))


def assert_equal(name, found, expected):
    for what, actual, right in zip(("y", "dq", "dk", "dv", "d sinks")[: len(expected)], found, expected, strict=True):
        np.testing.assert_allclose(actual, right, atol=1e-5 if name == "xla" else 1e-12, err_msg=what)


TOKENS, QUERIES, KEYS = 24, 10, 15
STRUCTURES = {
    # query heads, kv heads, window, softcap, whether there are documents
    "documents": ((2, 1), None, None, True),
    "window and softcap": ((4, 2), 5, 3.0, True),
    "one document": ((2, 2), None, 3.0, False),
    "one document and a window": ((2, 1), 7, None, False),
    "sinks and narrow values": ((4, 2), 5, 3.0, True),
    "sinks and wide values": ((2, 1), None, None, True),
}
VALUES = {"sinks and narrow values": 3, "sinks and wide values": 7}


def drawn(tokens, structure):
    """Arrays and sinks of a structure; one sink is far above the scores, and one far below."""
    heads = STRUCTURES[structure][0]
    sinks = np.linspace(-30, 6, heads[0]) if structure in VALUES else None
    if structure == "sinks and narrow values":
        sinks[0] = 120  # exp(120) is no float32
    return arrays(tokens, heads, values=VALUES.get(structure, WIDTH)), sinks


@cache
def program(name, structure):
    """A kernel's result and gradients for a part; where the part is and the documents are no constants of it."""
    _, window, softcap, packed = STRUCTURES[structure]

    def attend(q, k, v, dy, segments, part, sinks):
        options = {"scale": 0.6, "window": window, "softcap": softcap, "part": part, "sinks": sinks}
        return run(KERNELS[name].run, q, k, v, dy, segments if packed else None, **options)

    return jax.jit(attend)


def documents(tokens):
    """Two rows of documents; from the last end on there is padding."""
    rows = st.lists(st.sets(st.integers(1, tokens), min_size=1, max_size=4).map(sorted), min_size=2, max_size=2)

    def segments(rows):
        ids = np.stack([np.searchsorted(ends, np.arange(tokens), side="right") + 1 for ends in rows])
        return np.where(np.arange(tokens) < np.array([[ends[-1]] for ends in rows]), ids, 0).astype(np.int32)

    return rows.map(segments)


@pytest.mark.parametrize("name", ["blockwise", "xla"])
@pytest.mark.parametrize("structure", sweep(list(STRUCTURES), "sinks and narrow values", "documents"))
@settings(max_examples=8)
@given(documents(TOKENS + 1))
def test_a_kernel_is_plain_mathematics(name, structure, segments):
    """Of a length that no block divides."""
    (_, window, softcap, _), at = STRUCTURES[structure], np.arange(TOKENS + 1)
    with jax.enable_x64(True):
        given, sinks = drawn(TOKENS + 1, structure)
        found = program(name, structure)(*given, segments, None, sinks)
    seen = which_see(at, at, window, cut(segments, structure))
    assert_equal(name, found, plain(*map(np.asarray, given), seen, 0.6, softcap, sinks))


def cut(segments, structure):
    """Segments `[2, T]` of a case, which a structure may leave out."""
    return segments if STRUCTURES[structure][3] else np.zeros_like(segments)


ANY_PART = (
    documents(TOKENS),
    st.lists(st.integers(0, TOKENS - 1), min_size=QUERIES, max_size=QUERIES, unique=True).map(sorted),
    st.integers(-8, TOKENS),
)


@pytest.mark.parametrize("name", ["blockwise", "xla"])
@pytest.mark.parametrize("structure", sweep(list(STRUCTURES), "sinks and narrow values"))
@settings(max_examples=10)
@given(*ANY_PART)
def test_a_kernel_computes_any_part(name, structure, segments, queries, first_key):
    """Queries anywhere, beside keys that begin anywhere, also before the sequence: some see none of them."""
    _, window, softcap, _ = STRUCTURES[structure]
    seen = which_see(queries, first_key + np.arange(KEYS), window, cut(segments, structure))
    with jax.enable_x64(True):
        (q, k, v, dy), sinks = drawn(TOKENS, structure)
        given, part = (q[:, :QUERIES], k[:, :KEYS], v[:, :KEYS], dy[:, :QUERIES]), jnp.array(queries, jnp.int32)
        found = program(name, structure)(*given, segments, Part(part, jnp.int32(first_key)), sinks)
    assert_equal(name, found, plain(*map(np.asarray, given), seen, 0.6, softcap, sinks))
    for rows, empty in ((found[:2], ~seen.any(2)), (found[2:4], ~seen.any(1))):  # not nearly zero
        assert all((np.asarray(x)[empty] == 0).all() for x in rows)


def zigzag(tokens, devices, *, contiguous=False):
    """The chunks of each device."""
    size = tokens // (2 * devices)
    chunks = [range(i * size, (i + 1) * size) for i in range(2 * devices)]
    if contiguous:
        return [[range(i * 2 * size, (i + 1) * 2 * size)] for i in range(devices)]
    return [[chunks[i], chunks[-1 - i]] for i in range(devices)]


PADDING = np.repeat([[1, 0], [1, 2]], TOKENS // 2, axis=1).astype(np.int32)
"""Of two devices one has nothing else, in a row."""


@pytest.mark.parametrize("name", ["blockwise", "xla"])
@pytest.mark.parametrize("devices", sweep([2, 3, 4], 2))
@pytest.mark.parametrize("structure", sweep(list(STRUCTURES), "sinks and wide values"))
@settings(max_examples=6)
@example(segments=PADDING, contiguous=True)
@given(documents(TOKENS), st.booleans())
def test_the_parts_of_all_devices_are_the_whole(name, devices, structure, segments, contiguous):
    _, window, softcap, _ = STRUCTURES[structure]
    at = np.arange(TOKENS)
    with jax.enable_x64(True):
        (q, k, v, dy), sinks = given = drawn(TOKENS, structure)
        whole = [np.zeros(x.shape) for x in (dy, q, k, v) + (() if sinks is None else (sinks,))]
        for chunks in zigzag(TOKENS, devices, contiguous=contiguous):
            queries = np.concatenate(chunks).astype(np.int32)
            part = Part(jnp.asarray(queries), jnp.int32(0))
            y, dq, *sums = program(name, structure)(q[:, queries], k, v, dy[:, queries], segments, part, sinks)
            whole[0][:, queries], whole[1][:, queries] = y, dq
            for total, summand in zip(whole[2:], sums, strict=True):
                total += np.asarray(summand)
    seen = which_see(at, at, window, cut(segments, structure))
    assert_equal(name, whole, plain(*map(np.asarray, given[0]), seen, 0.6, softcap, sinks))


@pytest.mark.parametrize("name", ["blockwise", "xla"])
@settings(max_examples=6)
@given(documents(TOKENS))
def test_keys_from_a_halo_before_the_chunk_are_as_good_as_all(name, segments):
    """What lies in a halo that begins before the sequence is not seen, and has no gradient."""
    structure, size = "window and softcap", TOKENS // 2
    heads, window, softcap, _ = STRUCTURES[structure]
    at, halo = np.arange(TOKENS), window - 1
    with jax.enable_x64(True):
        q, k, v, dy = given = arrays(TOKENS, heads)
        beyond = [jnp.pad(x, ((0, 0), (halo, 0), (0, 0), (0, 0)), constant_values=1e3) for x in (k, v)]
        whole = [np.zeros(x.shape) for x in (q, q, *beyond)]
        for start in range(0, TOKENS, size):
            mine, held = np.s_[:, start : start + size], np.s_[:, start : start + size + halo]
            part = Part(start + jnp.arange(size, dtype=jnp.int32), jnp.int32(start - halo))
            found = program(name, structure)(q[mine], *(x[held] for x in beyond), dy[mine], segments, part, None)
            for array, place, x in zip(whole, (mine, mine, held, held), found, strict=True):
                array[place] += x
    for x in whole[2:]:
        assert (x[:, :halo] == 0).all()
    found = [*whole[:2], *(x[:, halo:] for x in whole[2:])]
    assert_equal(name, found, plain(*map(np.asarray, given), which_see(at, at, window, segments), 0.6, softcap))


@pytest.mark.parametrize("name", ["blockwise", "xla"])
def test_a_device_knows_its_part_only_when_it_runs(name):
    """Its place along an axis is traced; gradients of keys that are equal on all devices are summed over them."""
    given = arrays(TOKENS, (2, 1), "float32")
    segments = np.repeat([[1, 2, 3], [1, 1, 0]], TOKENS // 3, axis=1).astype(np.int32)
    split, equal = PartitionSpec(None, "fsdp"), PartitionSpec()

    def attend(q, k, v, segments):
        mine = axis_index("fsdp") * q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
        part = Part(mine, 0)
        return KERNELS[name].run(q, k, v, segments, scale=0.6, window=5, softcap=None, part=part)

    view = device_view(attend, "attention", (split, equal, equal, equal), split)
    found = {}
    for devices in (1, 2):
        with jax.set_mesh(jaxtp.make_mesh(fsdp=devices, devices=jax.devices()[:devices])):
            results = jax.jit(partial(run, view))(*given, segments)
        found[devices] = dict(zip(("y", "dq", "dk", "dv"), results, strict=True))
    assert_close(found[2], found[1])
    at = np.arange(TOKENS)
    exact = plain(*(np.asarray(x, "float64") for x in given), which_see(at, at, 5, segments), 0.6, None)
    np.testing.assert_allclose(found[2]["dk"], exact[2], atol=1e-5)


@pytest.mark.wide
@settings(max_examples=30)
@given(*ANY_PART, st.none() | st.integers(1, TOKENS))
def test_two_ranges_say_who_sees_whom(segments, queries, first_key, window):
    part = Part(jnp.array(queries, jnp.int32), first_key)
    for packed in (segments, None):
        rest = (KEYS, window, packed, part)
        of_queries = key_ranges((2, QUERIES), *rest)
        of_keys = query_ranges(of_queries, *rest)
        assert_ranges(of_queries, of_keys, queries, first_key + np.arange(KEYS), window, packed)
        rest = (TOKENS, window, packed)
        of_queries = key_ranges((2, TOKENS), *rest)
        assert_ranges(of_queries, query_ranges(of_queries, *rest), np.arange(TOKENS), np.arange(TOKENS), window, packed)


def assert_ranges(of_queries, of_keys, queries, keys, window, segments):
    seen = which_see(queries, keys, window, np.zeros((2, TOKENS)) if segments is None else segments)
    for (first, last), right in ((of_queries, seen), (of_keys, seen.swapaxes(1, 2))):
        index = np.arange(right.shape[2])
        np.testing.assert_array_equal((first[:, :, None] <= index) & (index <= last[:, :, None]), right)
        assert all((np.diff(np.asarray(ends)) >= 0).all() and ends.dtype == "int32" for ends in (first, last))


@pytest.mark.wide
def test_blocks_that_nothing_sees_are_not_visited():
    """Else what is not a number there would spoil the rest: it is not masked, for it is never read."""
    length, block = 64, block_size(64)
    segments = jnp.repeat(jnp.arange(4), block)[None].repeat(2, 0)
    q, k, v, _ = arrays(length, (2, 1), "float32")
    for options, hidden, far in (
        ({"segments_BT": segments}, slice(0, block), 0),
        ({"window": block}, slice(0, block), block),
    ):
        spoilt = [x.at[:, hidden].set(jnp.nan) for x in (k, v)]
        y = jax.jit(lambda k, v, o=options: KERNELS["blockwise"].run(q, k, v, scale=1.0, **o))(*spoilt)
        assert bool(jnp.isnan(y[:, :block]).all())
        assert bool(jnp.isfinite(y[:, block + far :]).all())


def test_a_part_visits_no_block_that_it_does_not_see():
    """Two chunks with a window: keys before, between and after what they see."""
    length, block = 96, block_size(24)
    queries = jnp.array([*range(24, 36), *range(60, 72)], jnp.int32)
    q, k, v, _ = arrays(length, (2, 1), "float32")
    first, last = 24 // block, 71 // block  # a block of 8 queries lies across the gap, and sees what is between
    spoilt = [x.at[:, : (first - 1) * block].set(jnp.nan).at[:, (last + 1) * block :].set(jnp.nan) for x in (k, v)]
    attend = partial(KERNELS["blockwise"].run, scale=1.0, window=block, part=Part(queries, 0))
    assert bool(jnp.isfinite(jax.jit(attend)(q[:, :24], *spoilt)).all())


@pytest.mark.wide
def test_documents_may_have_the_number_of_one_before_their_neighbour():
    again, counted = (jnp.asarray([row] * 2) for row in ([1] * 4 + [2] * 4 + [1] * 4, [0] * 4 + [1] * 4 + [2] * 4))
    given = arrays(12, (2, 1), "float32")
    for kernel in (KERNELS["xla"], KERNELS["blockwise"]):
        attend = jax.jit(partial(run, partial(kernel.run, scale=1.0, window=None, softcap=None)))
        jax.tree.map(np.testing.assert_array_equal, attend(*given, again), attend(*given, counted))


@pytest.mark.wide
@pytest.mark.parametrize("case", [(None, None), (4, None), (5, 3.0)], ids=str)
def test_second_derivatives(case):
    window, softcap = case
    *given, dy = arrays(20, (2, 1), "float32")

    def second(kernel):
        def loss(*given):
            return jnp.sum(jnp.sin(kernel(*given, None, scale=0.5, window=window, softcap=softcap)) * dy)

        return jax.grad(lambda *given: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*given)), (0, 1, 2))(*given)

    found, right = (jax.jit(second, static_argnums=0)(KERNELS[name].run) for name in ("blockwise", "xla"))
    for x, y in zip(found, right, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_sixteen_bits_are_as_exact_as_xla():
    given, options = arrays(70, (4, 2), "bfloat16"), {"scale": 0.5, "window": None, "softcap": None}
    of = lambda name: jax.jit(lambda *a: run(KERNELS[name].run, *a, None, **options))(*given)
    seen = which_see(np.arange(70), np.arange(70), None, np.zeros((2, 70)))
    exact = plain(*(np.asarray(x, "float64") for x in given), seen, 0.5, None)
    for what, found, other, right in zip(("y", "dq", "dk", "dv"), of("blockwise"), of("xla"), exact, strict=True):
        error, usual = (np.linalg.norm(np.asarray(x, "float64") - right) for x in (found, other))
        assert error < 1.5 * usual, what  # the softmax's mean is of a result in 16 bits


def temporaries(kernel, length):
    """Bytes of temporaries of a forward and a backward pass, with a sink."""
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), "float32")
    of = lambda *a: run(KERNELS[kernel].run, *a, None, scale=1.0, window=None, softcap=None, sinks=jnp.ones(1))
    return jax.jit(of).lower(*[shape] * 4).compile().memory_analysis().temp_size_in_bytes


def test_blockwise_holds_blocks_of_scores_and_no_more():
    """Twice the tokens are twice the memory; scores of all would be four times."""
    short, long = (temporaries("blockwise", length) for length in (2048, 4096))
    assert long < 2.2 * short
    assert long < 4096**2 * 4 / 8


def test_what_is_visited_grows_as_causality_and_windows_say():
    blocks = 4096 // block_size(4096)
    assert num_visited([range(4096)], None) == blocks * (blocks + 1) // 2
    assert num_visited([range(4096)], 1) == blocks
    assert num_visited([range(4096)], 2) == 2 * blocks - 1


def split_sequences():
    """Chunks of the devices of a split, with a length of its own."""
    sizes = st.tuples(st.integers(1, 300), st.integers(1, 4), st.booleans())
    return sizes.map(lambda drawn: zigzag(2 * drawn[0] * drawn[1], drawn[1], contiguous=drawn[2]))


@settings(max_examples=40)
@given(split_sequences(), st.none() | st.integers(1, 700))
def test_what_a_device_visits_is_counted_from_its_chunks(devices, window):
    for chunks in devices:
        queries = np.concatenate(chunks)
        block = block_size(len(queries))
        lowest = np.zeros_like(queries) if window is None else np.maximum(queries - window + 1, 0)
        pairs = sum(queries[i : i + block][-1] // block - lowest[i] // block + 1 for i in range(0, len(queries), block))
        assert num_visited(chunks, window) == pairs
    whole = [range(devices[0][0].start, sum(len(chunk) for chunks in devices for chunk in chunks))]
    np.testing.assert_allclose(sum(num_scores(chunks, window) for chunks in devices), num_scores(whole, window))


@pytest.mark.parametrize("window", [None, 40])
def test_the_count_is_that_of_the_loop(window):
    for chunks in ([range(100)], *zigzag(96, 3), *zigzag(96, 3, contiguous=True)):
        length = sum(map(len, chunks))
        q, k, _, _ = arrays(100, (1, 1), "float32")
        part = Part(jnp.array(np.concatenate(chunks), jnp.int32), 0)
        call = blockwise._Settings(1.0, window, None, block_size(length))
        assert int(blockwise._Pairs(call, q[:, :length], k, None, part).count) == num_visited(chunks, window)


def test_zigzag_chunks_make_the_work_of_all_devices_alike():
    length, window = 2**20, 4096
    work = {kind: [KERNELS[kind].blocks(chunks, None) for chunks in zigzag(length, 8)] for kind in KERNELS}
    products = {kind: {number * m * n for number, m, n in device} for kind, device in work.items() if kind != "xla"}
    assert all(max(products[kind]) < 1.01 * min(products[kind]) for kind in products)
    assert len({round(num_scores(chunks, window)) for chunks in zigzag(length, 8)[1:]}) == 1


GPU = {"platform": "cuda 9.0", "dtype": "bfloat16", "head_dim": 128, "length": 4096, "packed": False}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cudnn"),
        ({"packed": True}, "fused"),
        ({"dtype": "float32"}, "fused"),
        ({"softcap": 50.0}, "fused"),
        ({"part": True}, "fused"),
        ({"window": 128}, "cudnn"),
        ({"head_dim": 256}, "cudnn"),
        ({"head_dim": 250}, "fused"),
        ({"head_dim": 512}, "blockwise"),
        ({"sinks": True}, "fused"),
        ({"head_dim": 192, "value_head_dim": 128}, "cudnn"),
        ({"head_dim": 192, "value_head_dim": 128, "platform": "cuda 8.0"}, "fused"),
        ({"value_head_dim": 512}, "blockwise"),
        *(({"platform": f"cuda {capability}"}, "fused") for capability in ("8.0", "8.9", "10.0", "12.0")),
        ({"platform": "cuda"}, "fused"),
        ({"platform": "rocm"}, "blockwise"),
        ({"platform": "cpu"}, "blockwise"),
        ({"platform": "cpu", "length": 256}, "xla"),
    ],
)
def test_auto_takes_the_fastest_that_can(changes, name):
    kernel, why = pick_kernel("auto", Use(**{**GPU, **changes}))
    assert kernel.name == name
    assert why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packed": True}, "packed documents (data.packing=documents) would give it a [T, T] mask; use auto (fused or"),
        ({"softcap": 50.0}, "it has no model.attention_softcap"),
        ({"dtype": "float32"}, "it computes in 16 bits, and model.precision.compute is float32"),
        ({"head_dim": 132}, "it takes a head_dim of at most 256, a multiple of 8, not 132"),
        ({"head_dim": 256, "platform": "cuda 8.0"}, "it takes a head_dim of at most 128, a multiple of 8, not 256"),
        ({"head_dim": 256, "platform": "cuda 12.0"}, "it takes a head_dim of at most 128, a multiple of 8, not 256"),
        ({"head_dim": 64, "value_head_dim": 264}, "at most 256, a multiple of 8, not 264; use auto (blockwise or xla)"),
        ({"sinks": True}, "it has no model.attention_sinks; use auto (fused or blockwise or xla)"),
        ({"platform": "rocm"}, "it runs on cuda, not on rocm; use auto (blockwise or xla)"),
        ({"part": True}, "with mesh.context=ulysses, but not with gather; use auto (fused"),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_those_that_can(changes, said):
    (problem,) = unsupported("cudnn", Use(**{**GPU, **changes}))
    assert problem.startswith("model.attention=cudnn: ")
    assert said in problem
    assert not list(unsupported("auto", Use(**{**GPU, **changes})))


def test_cudnn_gets_values_as_wide_as_keys(monkeypatch):
    """JAX's function takes no others, and its check is all that a CPU can run."""
    attend = jax.nn.dot_product_attention

    def on_cpu(*arrays, implementation, **settings):
        assert implementation == "cudnn"
        return attend(*arrays, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_cpu)
    for values in (3, 7):
        given, options = arrays(20, (2, 1), "float32", values=values), {"scale": 0.5, "window": 5, "softcap": None}
        found, right = (run(KERNELS[name].run, *given, None, **options) for name in ("cudnn", "blockwise"))
        for x, y in zip(found, right, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


def test_the_heads_of_all_rows_may_be_those_of_one():
    kernel = KERNELS["blockwise"].run

    def merged(q, k, v, segments, **settings):
        return _rows_as_heads(partial(kernel, **settings), q, k, v, segments)

    given, options = arrays(20, (4, 2), "float32", values=7), {"scale": 0.5, "window": 5, "softcap": None}
    for x, y in zip(run(merged, *given, None, **options), run(kernel, *given, None, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_the_table_has_the_fused_kernels_limit():
    assert KERNELS["fused"].head_dims(Use(head_dim=1))[0] == MOST_HEAD_DIM


@pytest.mark.parametrize(
    ("installed", "widest"),
    [((9, 22, 0), 128), ((9, 24, 0, 43), 128), ((9, 25, 0, 15), 256), ((10, 0), 256), (None, 256)],
)
def test_the_widest_head_of_cudnn_on_blackwell_depends_on_its_version(monkeypatch, installed, widest):
    """NVIDIA/TransformerEngine#3056: an older one has no backward pass, and JAX lets it through."""
    monkeypatch.setattr(kernels, "installed_cudnn", lambda: installed)
    wide = Use(**{**GPU, "platform": "cuda 10.0", "head_dim": 256})
    assert KERNELS["cudnn"].head_dims(wide)[0] == widest
    assert any(unsupported("cudnn", wide)) == (widest == 128)


def test_an_architecture_is_that_of_the_device_or_of_its_row_in_the_table():
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA RTX A6000", compute_capability="8.6")
    assert architecture_of(device) == "cuda 8.6"
    assert architecture_of(SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 NVL")) == "cuda 9.0"
    assert architecture_of(SimpleNamespace(platform="gpu", device_kind="NVIDIA of tomorrow")) == "cuda"
    assert architecture_of(SimpleNamespace(platform="gpu", device_kind="AMD Instinct MI300X")) == "rocm"
    assert architecture_of(jax.devices()[0]) == "cpu"
    assert {TABLE[name].architecture for name in ("h100", "b200", "l40s", "v5e")} == {
        *("cuda 9.0", "cuda 10.0", "cuda 8.9", "tpu")
    }


def test_auto_takes_the_kernel_that_was_measured_to_be_faster(monkeypatch):
    monkeypatch.setattr(kernels, "_MEASURED", {})
    use = Use(**GPU)
    assert [kernel.name for kernel in candidates("auto", use)] == ["cudnn", "fused"]
    assert [kernel.name for kernel in candidates("auto", Use(**{**GPU, "platform": "cuda 8.9"}))] == ["fused", "cudnn"]
    for asked, changes in (("cudnn", {}), ("auto", {"packed": True}), ("auto", {"platform": "cpu"})):
        assert len(candidates(asked, Use(**{**GPU, **changes}))) == 1
    kernels.record_fastest(use, "fused", "measured")
    assert (pick_kernel("auto", use)[0].name, pick_kernel("auto", use)[1]) == ("fused", "measured")
    assert pick_kernel("cudnn", use)[0].name == "cudnn"
    assert pick_kernel("auto", Use(**{**GPU, "window": 128}))[0].name == "cudnn"


def test_a_layer_refuses_a_kernel_that_cannot():
    layer = jaxtp.CausalSelfAttention(
        8, jaxtp.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, attention="cudnn"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ConfigError, match=r"model.attention=cudnn: it runs on cuda, not on cpu; use auto"):
        layer(jnp.zeros((1, 4, 8)))
    settings = jaxtp.AttentionConfig(attention="cudnn", attention_sinks=True)
    (problem,) = settings.problems(mesh_shape())
    assert problem.text.startswith("model.attention=cudnn: it has no model.attention_sinks; use auto (fused on cuda or")
