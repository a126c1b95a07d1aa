"""What `PrepareInput` makes of an array, used as people use arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from support import use_mesh

import jaxtp
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise, Shard

D = 8
USES = {
    "as it is": lambda x: x,
    "tree.map": lambda x: jax.tree.map(lambda v: v - v.mean(0), x),
    "shape of a leaf": lambda x: jax.tree.map(lambda v: v / v.shape[0], x),
    "vmap": lambda x: jax.vmap(jnp.tanh)(x),
    "lax.map": lambda x: jax.lax.map(lambda row: 2 * row, x),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "astype, indexing, methods": lambda x: x.astype(jnp.float32)[:, ::-1] + x.mean(0),
    "softmax": jax.nn.softmax,
    "operators": lambda x: -x + 2 - x * x + (x > 0) + jax.nn.gelu(x) / len(x),
    "concatenate": lambda x: (
        jnp.concatenate([x[:, :4], x.reshape(x.shape)[:, 4:]], axis=-1) @ jnp.ones((D, D))
    ),
}
PLAN = {"": PrepareInput(Shard(1), Replicate()), "up": Colwise(), "down": Rowwise()}


class Mlp(nnx.Module):
    """Uses its input in each way, and returns a sum of squares for each."""

    def __init__(self):
        self.up = nnx.Linear(D, 16, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, D, rngs=nnx.Rngs(0))

    def __call__(self, x):
        assert x.shape == (4, D)
        return jnp.stack([jnp.sum(self.down(self.up(use(x))) ** 2) for use in USES.values()])


def sums_and_gradients(model, x):
    """Returns each sum, and the gradients of a random combination of them."""
    sums, backward = jax.vjp(model, x)
    return sums, backward(jnp.sin(jnp.arange(1.0, 1 + len(USES))))


@pytest.mark.wide
def test_any_use_gives_the_numbers_of_the_array():
    x = default_rng(0).standard_normal((4, D), np.float32)
    run = nnx.jit(sums_and_gradients)
    expected = run(Mlp(), x)
    with use_mesh(1, 2, 2):
        found = run(jaxtp.parallelize(Mlp, PLAN), x)
    jax.tree.map(
        lambda one, other: assert_allclose(one, other, rtol=1e-5, atol=1e-5),
        found,
        expected,
    )


class Identity(nnx.Module):
    def __call__(self, x):
        return jnp.asarray(np.asarray(x))


def test_an_array_of_numpy_is_refused_as_ever():
    with use_mesh(1, 2, 2):
        model = jaxtp.parallelize(Identity(), {"": PrepareInput(Replicate(), Replicate())})
        with pytest.raises(jax.errors.TracerArrayConversionError):
            nnx.jit(lambda model, x: model(x))(model, np.ones((4, D), np.float32))
        assert_array_equal(model(jnp.ones((4, D))), np.ones((4, D)))
