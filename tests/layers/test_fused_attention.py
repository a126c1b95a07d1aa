"""The fused attention kernels, interpreted on the CPU in small blocks, against plain mathematics in float64."""

from functools import cache, partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support import TOLERANCE, assert_close, relative_error, sweep

import jaxtp
from jaxtp.collectives import axis_index, batch_spec, device_view
from jaxtp.layers.kernels import fused_attention as fused
from jaxtp.layers.kernels.fused_attention import MOST_HEAD_DIM, Blocks, block_sizes, fused_attention
from jaxtp.layers.sequence_parallel import Part

ROWS, SCALE = 2, 0.3
NAMES = ("output", "queries", "keys", "values", "sinks")
SMALL = Blocks(8, 4, 4, 2), Blocks(4, 8, 4, 2)
STRUCTURES = {
    # tokens, query heads, kv heads, width, width of values, sinks, softcap, blocks
    "rest of a block": (37, 4, 2, 16, 16, True, None, SMALL),
    "softcap, padded width": (24, 3, 1, 20, 12, True, 3.0, (Blocks(4, 8, 4, 2), Blocks(16, 4, 4, 2))),
    "less than a block": (5, 2, 2, 4, 20, False, None, (Blocks(16, 8, 4, 2), Blocks(8, 16, 4, 2))),
}


def in_blocks(blocks):
    return mock.patch.object(fused, "block_sizes", return_value=blocks)


def draw(tokens, heads, kv_heads, width, values=None, sinks=False, dtype="float32", rows=ROWS):
    """Queries, keys, values, the gradient of the output and perhaps sinks."""
    rng, values = np.random.default_rng(0), values or width
    sizes = (heads, width), (kv_heads, width), (kv_heads, values), (heads, values)
    arrays = [jnp.asarray(rng.standard_normal((rows, tokens, *size)), dtype) for size in sizes]
    return [*arrays, jnp.linspace(-9, 3, heads)] if sinks else arrays


def plain(q, k, v, seen, softcap=None, sinks=None):
    """Attention by the book; `seen` is `[B, T, S]`. A sink is a column of scores more, the values of which are 0."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    s = SCALE * jnp.einsum("btnh,bsnh->bnts", q, k)
    s = s if softcap is None else softcap * jnp.tanh(s / softcap)
    s = jnp.where(seen[:, None], s, -1e30)
    if sinks is not None:
        s = jnp.concatenate([s, jnp.broadcast_to(sinks[:, None, None], (*s.shape[:3], 1))], axis=3)
    weights = jax.nn.softmax(s, axis=-1)[..., : k.shape[1]]
    return jnp.einsum("bnts,bsnh->btnh", jnp.where(seen[:, None], weights, 0), v)


def with_gradients(attend, q, k, v, do, *others):
    """`others` are arguments of `attend`, after sinks if these are floats."""
    sinks = [x for x in others[:1] if x.dtype in ("float32", "float64")]
    others = others[len(sinks) :]

    def run(q, k, v, *sinks):
        return attend(q, k, v, *others, **({"sinks": sinks[0]} if sinks else {}))

    o, backward = jax.vjp(run, q, k, v, *sinks)
    return dict(zip(NAMES, (o, *backward(do)), strict=False))


@cache
def programs(name):
    """Both programs of a structure, which take any documents and window."""
    *_, softcap, _ = STRUCTURES[name]

    def attend(q, k, v, segments, window, part=None, sinks=None):
        settings = {"scale": SCALE, "window": window, "softcap": softcap, "part": part, "sinks": sinks}
        return fused_attention(q, k, v, segments, **settings)

    expected = partial(with_gradients, partial(plain, softcap=softcap))
    return jax.jit(partial(with_gradients, attend)), jax.jit(expected)


def in_float64(program, arrays, seen):
    with jax.enable_x64(True):
        return {name: np.asarray(x) for name, x in program(*(np.asarray(x, np.float64) for x in arrays), seen).items()}


def which_see(segments, window, queries=None, keys=None):
    """Whether the query at a position sees the key at another, by default of all; no key is before position 0."""
    length = segments.shape[1]
    queries, keys = (np.arange(length) if at is None else np.asarray(at) for at in (queries, keys))
    distance = queries[:, None] - keys
    seen = (distance >= 0) & (distance < window) & (keys >= 0)
    return seen & (segments[:, queries, None] == segments[:, None, np.clip(keys, 0, length - 1)])


def documents(tokens, cuts, padded):
    """A row of segments as packing makes them: 1, 2, ... and, if `padded`, 0 at the end."""
    ids = 1 + np.searchsorted(np.unique([c % tokens for c in cuts]), np.arange(tokens), side="right")
    return np.where(padded & (ids == ids[-1]) & (ids[-1] > ids[0]), 0, ids)


ROW = st.tuples(st.lists(st.integers(0, 99), max_size=4), st.booleans())


@given(st.sampled_from(sorted(STRUCTURES)), st.lists(ROW, min_size=ROWS, max_size=ROWS), st.integers(1, 50))
@settings(max_examples=10)
@pytest.mark.wide
def test_documents_and_windows(name, rows, window):
    tokens, *sizes, _, blocks = STRUCTURES[name]
    segments = np.stack([documents(tokens, *row) for row in rows]).astype(np.int32)
    arrays = draw(tokens, *sizes)
    ours, expected = programs(name)
    with in_blocks(blocks):
        found = ours(*arrays, segments, window)
    assert_close(found, in_float64(expected, arrays, which_see(segments, window)), TOLERANCE)


QUERIES, KEYS = 13, 18
ANY_PART = st.lists(st.integers(0, 36), min_size=QUERIES, max_size=QUERIES, unique=True).map(sorted)


@pytest.mark.wide
@given(st.lists(ROW, min_size=ROWS, max_size=ROWS), st.integers(1, 50), ANY_PART, st.integers(-9, 37))
@settings(max_examples=15)
def test_any_part(rows, window, queries, first_key):
    """Queries anywhere, beside keys that begin anywhere, also before the sequence: some see none of them."""
    name = "rest of a block"
    tokens, *sizes, _, blocks = STRUCTURES[name]
    segments = np.stack([documents(tokens, *row) for row in rows]).astype(np.int32)
    q, k, v, do, sinks = draw(tokens, *sizes)
    arrays = q[:, :QUERIES], k[:, :KEYS], v[:, :KEYS], do[:, :QUERIES], sinks
    ours, expected = programs(name)
    with in_blocks(blocks):
        found = ours(*arrays, segments, window, Part(jnp.array(queries, jnp.int32), jnp.int32(first_key)))
    seen = which_see(segments, window, queries, first_key + np.arange(KEYS))
    right = in_float64(expected, arrays, seen)
    for what, empty in (("output", ~seen.any(2)), ("queries", ~seen.any(2)), ("keys", ~seen.any(1))):
        assert (np.asarray(found[what])[empty] == 0).all()
        np.testing.assert_allclose(found[what], right[what], atol=2e-5, err_msg=what)
    for what in ("values", "sinks"):
        np.testing.assert_allclose(found[what], right[what], atol=2e-5, err_msg=what)


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_without_documents(dtype):
    arrays = draw(21, 2, 1, 16, dtype=dtype)
    attend = partial(fused_attention, scale=SCALE)
    with in_blocks(SMALL):
        found = jax.jit(partial(with_gradients, attend))(*arrays)
    assert {x.dtype.name for x in found.values()} == {dtype}
    seen = which_see(np.zeros((ROWS, 21)), 21)
    expected = in_float64(jax.jit(partial(with_gradients, plain)), arrays, seen)
    assert_close(found, expected, 4 * float(jnp.finfo(dtype).eps))


TOKENS = 40
NOT_SEEN = {
    # documents, window, the block of 8 that is poisoned, the blocks that may read its keys, and those its queries read
    "causality": ([1] * 40, None, 2, {2, 3, 4}, {0, 1, 2}),
    "window": ([1] * 40, 9, 2, {2, 3}, {1, 2}),
    "documents": ([1] * 8 + [2] * 24 + [0] * 8, None, 2, {2, 3}, {1, 2}),
}


@pytest.mark.parametrize("case", sweep(NOT_SEEN, "documents"))
def test_blocks_that_are_excluded_are_not_read(case):
    """What is not a number stays one wherever it is read, whatever the mask makes of it."""
    segments, window, block, readers, read = NOT_SEEN[case]
    poisoned = slice(8 * block, 8 * block + 8)
    segments = np.asarray([segments] * ROWS, np.int32)
    attend = partial(fused_attention, scale=SCALE, window=window)
    q, k, v, do = draw(TOKENS, 2, 1, 16)
    nan = lambda *arrays: (x.at[:, poisoned].set(jnp.nan) for x in arrays)
    with in_blocks((Blocks(8, 8, 4, 2), Blocks(8, 8, 4, 2))):
        program = jax.jit(partial(with_gradients, attend))
        clean, keys = program(q, k, v, do, segments), program(q, *nan(k, v), do, segments)
        (nan_q, nan_do) = nan(q, do)
        queries = program(nan_q, k, v, nan_do, segments)
    for other in range(TOKENS // 8):
        rows = np.s_[:, 8 * other : 8 * other + 8]
        for found, names, reached in ((keys, ("output", "queries"), readers), (queries, ("keys", "values"), read)):
            for name in names:
                same = np.array_equal(found[name][rows], clean[name][rows])
                assert same == (other not in reached), f"{name} of block {other}"


def test_on_a_mesh_in_a_scan_with_remat():
    """Heads are split over tp, rows over dp and fsdp; the segments of a row are equal over tp."""
    q, k, v, do = draw(21, 4, 2, 16, rows=4)
    segments = np.stack([documents(21, [i, 3 * i + 5], i % 2) for i in range(4)]).astype(np.int32)

    def twice(q, k, v, segments):
        attend = jax.checkpoint(partial(fused_attention, scale=SCALE, window=7))
        return jax.lax.scan(lambda x, _: (attend(x, k, v, segments), None), q, length=2)[0]

    heads = batch_spec(None, "tp")
    view = device_view(twice, "attention", (heads, heads, heads, batch_spec(None)), heads)
    run = lambda: jax.jit(partial(with_gradients, view))(q, k, v, do, segments)
    with in_blocks(SMALL):
        expected = run()
        with jax.set_mesh(jaxtp.make_mesh(dp=1, fsdp=2, tp=2, devices=jax.devices()[:4])):
            found = run()
    assert_close(found, expected)
    assert relative_error(found["output"], do) > 0.1


def test_keys_that_are_equal_over_tp_have_their_gradient_summed():
    q, k, v, do = draw(21, 4, 1, 16)
    equal = PartitionSpec(None, None, None)
    heads = PartitionSpec(None, None, "tp")
    attend = partial(fused_attention, scale=SCALE)
    run = lambda attend: jax.jit(partial(with_gradients, attend))(q, k, v, do)
    with in_blocks(SMALL):
        expected = run(attend)
        with jax.set_mesh(jaxtp.make_mesh(tp=2, devices=jax.devices()[:2])):
            found = run(device_view(attend, "attention", (heads, equal, equal), heads))
    assert_close(found, expected)


def test_a_device_knows_its_part_only_when_it_runs():
    """Zigzag: chunks 0 and 3 or 1 and 2, by the place along an axis; the keys' gradients are summed over it."""
    q, k, v, do, sinks = draw(24, 2, 1, 16, values=12, sinks=True)
    segments = np.stack([documents(24, [5, 14], padded) for padded in (False, True)]).astype(np.int32)
    chunks = np.arange(24).reshape(4, 6)
    order = chunks[[0, 3, 1, 2]].ravel()
    split, equal = PartitionSpec(None, "fsdp"), PartitionSpec()

    def attend(q, k, v, segments, sinks):
        queries = jnp.asarray(order.reshape(2, 12), jnp.int32)[axis_index("fsdp")]
        return fused_attention(q, k, v, segments, scale=SCALE, part=Part(queries, 0), sinks=sinks)

    view = device_view(attend, "attention", (split, *[equal] * 4), split)
    on_mesh = lambda q, k, v, segments, sinks: view(q, k, v, segments, sinks)
    with in_blocks(SMALL), jax.set_mesh(jaxtp.make_mesh(fsdp=2, devices=jax.devices()[:2])):
        found = jax.jit(partial(with_gradients, on_mesh))(q[:, order], k, v, do[:, order], sinks, segments)
    right = in_float64(jax.jit(partial(with_gradients, plain)), (q, k, v, do, sinks), which_see(segments, 24))
    assert_close(found, {n: x[:, order] if n in ("output", "queries") else x for n, x in right.items()}, TOLERANCE)


@pytest.mark.parametrize("dtype", fused.DTYPES)
def test_every_head_has_blocks_that_triton_takes(dtype):
    for head_dim in (16, 32, 64, 128, MOST_HEAD_DIM):
        for blocks in block_sizes(head_dim, dtype):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (blocks.queries, blocks.keys))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "dtype", "message"),
    [
        (3, 2, 16, "float32", "3 query heads are not divisible by 2 kv heads"),
        (2, 1, 264, "float32", "head_dim 264 is above 256"),
        (2, 1, 16, "int32", "are int32, int32, int32: fused attention takes one of bfloat16, float16, float32"),
    ],
)
def test_what_the_kernels_do_not_take(heads, kv_heads, width, dtype, message):
    q, k, v, _ = draw(4, heads, kv_heads, width, dtype=dtype)
    with pytest.raises(ValueError, match=message):
        fused_attention(q, k, v, scale=1.0)
