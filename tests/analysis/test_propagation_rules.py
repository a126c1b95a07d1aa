"""What a split dim passes through: each part of the result is computed from the parts of the
operands.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose

from jaxtp.analysis.propagation_rules import Blocked, pass_through

X = default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
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


SPLIT = (2,)
"""An array whose last dim is split."""
PASSES = [
    (lambda x: jax.nn.gelu(x) * 2 + 1, SPLIT),
    (lambda x: jax.nn.softmax(x, axis=1), SPLIT),
    (lambda x: x.reshape(4, 6, -1, 2), SPLIT),
    (lambda x: x.reshape(4, -1, 3, 8), (1,)),
    (lambda x: x.reshape(4, -1), (1,)),
    (lambda x: x[:, None].transpose(3, 0, 2, 1), SPLIT),
    (lambda x: x.mean(1), SPLIT),
    (lambda x: x.max((0, 1)), SPLIT),
    (lambda x: x[:, -1], SPLIT),
    (lambda x: x[:, ::2], SPLIT),
    (lambda x: jnp.repeat(x, 3, axis=2), SPLIT),
    (lambda x: jnp.concatenate([x, x], 1), SPLIT),
    (lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0))), SPLIT),
    (lambda x: jnp.cumsum(x, 1), SPLIT),
    (lambda x: jnp.flip(x, 1), SPLIT),
    (lambda x: x[:, jnp.array([3, 1])], SPLIT),
    (lambda x: jnp.take(x, jnp.array([[3, 1]]), axis=0), SPLIT),
    (
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID"),
        SPLIT,
    ),
    (lambda x, y: x * y, (2, 2)),
    (lambda x, y: jnp.einsum("bsk,btk->kst", x, y), (2, 2)),
    (lambda x, y: jnp.einsum("bsk,bsj->bkj", x, y), (None, 2)),
    (lambda x, y: jnp.einsum("bsk,bsj->bkj", x, y), (2, None)),
    (lambda x, y: jax.lax.dot_general(x, y, (((1,), (1,)), ((0,), (0,)))), (0, 0)),
]


@pytest.mark.parametrize("case", range(len(PASSES)))
def test_parts_of_the_result_need_parts_of_the_operands(case):
    f, dims = PASSES[case]
    arrays = [X] * len(dims)
    whole = f(*arrays)
    dim = follow(f, dims, *arrays)
    assert dim is not None
    for index in range(PARTS):
        from_parts = f(*(part(X, split, index) for split in dims))
        assert_allclose(from_parts, part(whole, dim, index), rtol=1e-5, atol=1e-6)


BLOCKED = {
    "reduce_sum, which needs all 8": lambda x: x.sum(2),
    "reduce_max, which needs all 8": jax.nn.softmax,
    "reshape, which needs all 8": lambda x: jax.lax.reshape(x, (8, 24), (2, 0, 1)),
    "merges the split dim into": lambda x: x.reshape(4, -1),
    "divided into 2": lambda x: jnp.split(x, 2, axis=2)[0],
    "slice along the split dim": lambda x: x[..., 1:],
    "concatenate along the split dim": lambda x: jnp.concatenate([x, x], 2),
    "pad along the split dim": lambda x: jnp.pad(x, ((0, 0), (0, 0), (1, 0))),
    "sort": jnp.sort,
    "cumsum": lambda x: jnp.cumsum(x, 2),
    "fft, which may need all": jnp.fft.fft,
    "sums over the split dim": lambda x: x @ X[0].T,
    "another dim|merged": lambda x: x * x.transpose(2, 1, 0).reshape(4, 6, 8),
    "gather, which needs all": lambda x: jnp.asarray(X[0])[x[0, 0].astype(int)],
    "reduce_window": lambda x: jax.lax.reduce_window(
        x, 0.0, jax.lax.add, (1, 1, 2), (1, 1, 2), "VALID"
    ),
}


@pytest.mark.parametrize("why", BLOCKED)
def test_what_needs_the_whole_says_so(why):
    with pytest.raises(Blocked, match=why):
        follow(BLOCKED[why], SPLIT, X)


def test_operands_have_to_be_split_along_the_same_dim():
    with pytest.raises(Blocked, match="along another dim"):
        follow(lambda x, y: x + y, (2, 1), X, X)
