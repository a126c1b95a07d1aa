"""Kernels of attention against plain mathematics in float64; what they visit and hold; which of them `auto` takes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxtp
from jaxtp.config import ConfigError
from jaxtp.layers.blockwise_attention import block_size, visited
from jaxtp.layers.fused_attention import MOST_HEAD_DIM
from jaxtp.layers.kernels import KERNELS, Use, chosen, refused

WIDTH = 4


def plain(q, k, v, dy, seen, scale, softcap):
    """Returns the result of attention and the gradients of its inner product with `dy`, in NumPy, head by head."""
    group = q.shape[2] // k.shape[2]
    y, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
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
            highest = np.max(capped, where=seen[row], initial=-1e9, axis=1, keepdims=True)
            weights = np.where(seen[row], np.exp(capped - highest), 0)
            weights /= np.maximum(weights.sum(1, keepdims=True), 1e-300)
            y[row, :, head] = weights @ values
            d_weights = grads @ values.T
            d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True)) * scale
            d_scores *= 1 if softcap is None else 1 - (capped / softcap) ** 2
            dq[row, :, head] = d_scores @ keys
            dk[row, :, head // group] += d_scores.T @ queries
            dv[row, :, head // group] += weights.T @ grads
    return y, dq, dk, dv


def seen_keys(length, window, segments):
    at = np.arange(length)
    seen = at[:, None] >= at
    seen &= (at[:, None] - at) < (window or length)
    return seen & (segments[:, :, None] == segments[:, None])


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
    }


def arrays(length, heads, dtype="float64", seed=0):
    draw = np.random.default_rng(seed).normal
    return tuple(jnp.asarray(draw(size=(2, length, n, WIDTH)), dtype) for n in (heads[0], heads[1], heads[1], heads[0]))


def run(kernel, q, k, v, dy, segments, **options):
    y, gradients = jax.vjp(lambda q, k, v: kernel(q, k, v, segments, **options), q, k, v)
    return y, *gradients(dy)


@pytest.mark.parametrize("name", ["blockwise", "xla"])
@settings(max_examples=8)
@given(problem=problems())
def test_a_kernel_is_plain_mathematics(name, problem):
    length, segments = problem["length"], problem["segments"]
    options = {"scale": 0.6, "window": problem["window"], "softcap": problem["softcap"]}
    with jax.enable_x64(True):
        given = arrays(length, problem["heads"])
        found = jax.jit(lambda *a: run(KERNELS[name].run, *a, segments, **options))(*given)
    seen = seen_keys(length, problem["window"], np.zeros((2, length)) if segments is None else segments)
    expected = plain(*map(np.asarray, given), seen, 0.6, problem["softcap"])
    for what, actual, right in zip(("y", "dq", "dk", "dv"), found, expected, strict=True):
        np.testing.assert_allclose(actual, right, atol=1e-5 if name == "xla" else 1e-12, err_msg=what)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    """As those do that fill the last block."""
    with jax.enable_x64(True):
        length = block_size(33) * 4 - 1
        y, *grads = run(KERNELS["blockwise"].run, *arrays(length, (1, 1)), None, scale=1.0)
    assert all(jnp.isfinite(x).all() for x in (y, *grads))


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


def test_documents_may_have_the_number_of_one_before_their_neighbour():
    again, counted = (jnp.asarray([row] * 2) for row in ([1] * 4 + [2] * 4 + [1] * 4, [0] * 4 + [1] * 4 + [2] * 4))
    given = arrays(12, (2, 1), "float32")
    for kernel in (KERNELS["xla"], KERNELS["blockwise"]):
        one, other = (run(kernel.run, *given, s, scale=1.0, window=None, softcap=None) for s in (again, counted))
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (4, None), (5, 3.0)])
def test_second_derivatives(window, softcap):
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
    exact = plain(*(np.asarray(x, "float64") for x in given), seen_keys(70, None, np.zeros((2, 70))), 0.5, None)
    for what, found, other, right in zip(("y", "dq", "dk", "dv"), of("blockwise"), of("xla"), exact, strict=True):
        error, usual = (np.linalg.norm(np.asarray(x, "float64") - right) for x in (found, other))
        assert error < 1.5 * usual, what  # the softmax's mean is of a result in 16 bits


def temporaries(kernel, length):
    """Bytes of temporaries of a forward and a backward pass."""
    shape = jax.ShapeDtypeStruct((1, length, 1, 8), "float32")
    of = lambda *a: run(KERNELS[kernel].run, *a, None, scale=1.0, window=None, softcap=None)
    return jax.jit(of).lower(*[shape] * 4).compile().memory_analysis().temp_size_in_bytes


def test_blockwise_holds_blocks_of_scores_and_no_more():
    """Twice the tokens are twice the memory; scores of all would be four times."""
    short, long = (temporaries("blockwise", length) for length in (2048, 4096))
    assert long < 2.2 * short
    assert long < 4096**2 * 4 / 8


def test_what_is_visited_grows_as_causality_and_windows_say():
    blocks = 4096 // block_size(4096)
    assert len(visited(4096, None)) == blocks * (blocks + 1) // 2
    assert len(visited(4096, 1)) == blocks
    assert len(visited(4096, 2)) == 2 * blocks - 1


GPU = {"platform": "cuda", "dtype": "bfloat16", "head_dim": 128, "length": 4096, "packed": False}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "cudnn"),
        ({"packed": True}, "fused"),
        ({"dtype": "float32"}, "fused"),
        ({"softcap": 50.0}, "fused"),
        ({"window": 128}, "cudnn"),
        ({"head_dim": 256}, "fused"),
        ({"head_dim": 512}, "blockwise"),
        ({"platform": "rocm"}, "blockwise"),
        ({"platform": "cpu"}, "blockwise"),
        ({"platform": "cpu", "length": 256}, "xla"),
    ],
)
def test_auto_takes_the_fastest_that_can(changes, name):
    kernel, why = chosen("auto", Use(**{**GPU, **changes}))
    assert kernel.name == name
    assert why


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"packed": True}, "packed documents (data.packing=documents) would give it a [T, T] mask; use auto (fused or"),
        ({"softcap": 50.0}, "it has no model.attention_softcap"),
        ({"dtype": "float32"}, "it computes in 16 bits, and model.precision.compute is float32"),
        ({"head_dim": 132}, "it takes a head_dim of at most 128, a multiple of 8, not 132"),
        ({"platform": "rocm"}, "it runs on cuda, not on rocm; use auto (blockwise or xla)"),
    ],
)
def test_a_kernel_that_cannot_is_refused_with_those_that_can(changes, said):
    (problem,) = refused("cudnn", Use(**{**GPU, **changes}))
    assert problem.startswith("model.attention=cudnn: ")
    assert said in problem
    assert not list(refused("auto", Use(**{**GPU, **changes})))


def test_the_table_has_the_fused_kernels_limit():
    assert KERNELS["fused"].head_dims[0] == MOST_HEAD_DIM


def test_a_layer_refuses_a_kernel_that_cannot():
    layer = jaxtp.CausalSelfAttention(
        8, jaxtp.AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, attention="cudnn"), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ConfigError, match=r"model.attention=cudnn: it runs on cuda, not on cpu; use auto"):
        layer(jnp.zeros((1, 4, 8)))
