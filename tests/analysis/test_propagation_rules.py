"""What a split dim passes through: each part of the result is computed from the parts of the
operands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtp.analysis.propagation_rules import Blocked, pass_through

X = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
PARTS = 2


def follow(f, dims, *arrays):
    """The dim along which `f(*arrays)` is split where the arrays are split along `dims`."""
    closed = jax.make_jaxpr(f)(*arrays)
    return walk(closed.jaxpr, dims)[0]


def walk(jaxpr, dims):
    known = dict(zip(jaxpr.invars, dims, strict=True))
    for equation in jaxpr.eqns:
        given = [known.get(v) if not hasattr(v, "val") else None for v in equation.invars]
        if inner := equation.params.get("jaxpr", equation.params.get("call_jaxpr")):
            results = walk(inner.jaxpr, given)
        elif any(dim is not None for dim in given):
            results = pass_through(equation, given)
        else:
            results = [None] * len(equation.outvars)
        known.update(zip(equation.outvars, results, strict=True))
    return [known.get(v) for v in jaxpr.outvars]


def part(array, dim, index):
    """A part of an array; of one that is not split, all of it."""
    return array if dim is None else np.split(np.asarray(array), PARTS, axis=dim)[index]


PASSES = [
    (lambda x: jax.nn.gelu(x) * 2 + 1, (2,), 2),
    (lambda x: jax.nn.softmax(x, axis=1), (2,), 2),
    (lambda x: x.reshape(4, 6, -1, 2), (2,), 2),
    (lambda x: x.reshape(4, -1, 3, 8), (1,), 1),
    (lambda x: x.reshape(4, -1), (1,), 1),
    (lambda x: x[:, None].transpose(3, 0, 2, 1), (2,), 0),
    (lambda x: x.mean(1), (2,), 1),
    (lambda x: jax.nn.relu(x).max((0, 1)), (2,), 0),
    (lambda x: x[:, -1], (2,), 1),
    (lambda x: x[:, ::2], (2,), 2),
    (lambda x: jnp.repeat(x, 3, axis=2), (2,), 2),
    (lambda x: jnp.concatenate([x, x], 1), (2,), 2),
    (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), (2,), 2),
    (lambda x: jnp.cumsum(x, 1), (2,), 2),
    (lambda x: jnp.flip(x, 1), (2,), 2),
    (lambda x: x[:, jnp.array([3, 1])], (2,), 2),
    (lambda x: jnp.take(x, jnp.array([[3, 1]]), axis=0), (2,), 3),
    (lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID"), (2,), 2),
    (lambda x, y: x * y, (2, 2), 2),
    (lambda x, y: jnp.einsum("bsk,btk->kst", x, y), (2, 2), 0),
    (lambda x, y: jnp.einsum("bsk,bsj->bkj", x, y), (None, 2), 2),
    (lambda x, y: jnp.einsum("bsk,bsj->bkj", x, y), (2, None), 1),
    (lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))), (0, 0), 0),
]


@pytest.mark.parametrize("case", range(len(PASSES)))
def test_parts_of_the_result_need_parts_of_the_operands(case):
    f, dims, expected = PASSES[case]
    arrays = [X] * len(dims)
    whole = f(*arrays)
    assert follow(f, dims, *arrays) == expected
    for index in range(PARTS):
        from_parts = f(*(part(array, dim, index) for array, dim in zip(arrays, dims, strict=True)))
        np.testing.assert_allclose(from_parts, part(whole, expected, index), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("f", "dims", "why"),
    [
        (lambda x: x.sum(2), (2,), "reduce_sum, which needs all 8"),
        (lambda x: jax.nn.softmax(x), (2,), "reduce_max, which needs all 8"),
        (lambda x: x.reshape(4, -1), (2,), "merges the split dim into"),
        (lambda x: jnp.split(x, 2, axis=2)[0], (2,), "divided into 2"),
        (lambda x: x[..., 1:], (2,), "slice along the split dim"),
        (lambda x: jnp.concatenate([x, x], 2), (2,), "concatenate along the split dim"),
        (lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0))), (2,), "pad along the split dim"),
        (lambda x: jnp.sort(x), (2,), "sort"),
        (lambda x: jnp.cumsum(x, 2), (2,), "cumsum"),
        (lambda x: jnp.fft.fft(x), (2,), "fft, which may need all"),
        (lambda x: x @ X[0].T, (2,), "sums over the split dim"),
        (lambda x, y: x * y.transpose(1, 0, 2).reshape(4, 6, 8), (2, 1), r"another dim|merged"),
        (lambda x, y: x + y, (2, 1), "along another dim"),
        (lambda x: jnp.asarray(X[0])[x[0, 0].astype(int)], (2,), "gather, which needs all"),
        (lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 1, 2), (1, 1, 2), "VALID"), (2,), "reduce_window"),
    ],
)
def test_what_needs_the_whole_says_so(f, dims, why):
    with pytest.raises(Blocked, match=why):
        follow(f, dims, *[X] * len(dims))
