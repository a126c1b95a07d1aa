"""What `PrepareInput` makes of an array, used as people use arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import sweep

import jaxtp
from jaxtp import Colwise, PrepareInput, Replicate, Rowwise

USES = {
    "as it is": lambda x: x,
    "tree.map": lambda x: jax.tree.map(lambda v: v - v.mean(0), x),
    "shape of a leaf": lambda x: jax.tree.map(lambda v: v / v.shape[0], x),
    "vmap": lambda x: jax.vmap(jnp.tanh)(x),
    "lax.map": lambda x: jax.lax.map(lambda row: 2 * row, x),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "astype, indexing, methods": lambda x: x.astype(jnp.float32)[:, ::-1] + x.mean(0),
    "softmax": jax.nn.softmax,
}
PLAN = {"": PrepareInput(Replicate(), Replicate()), "up": Colwise(), "down": Rowwise()}


class Mlp(nnx.Module):
    def __init__(self, use, rngs):
        self.use = use
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(USES[self.use](x)))


def loss(model, x):
    return jnp.sum(model(x) ** 2)


@pytest.mark.parametrize("use", sweep(list(USES), "astype, indexing, methods"))
def test_any_use_gives_the_numbers_of_the_array(use):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)  # made before there is a mesh
    expected, grads = jax.value_and_grad(loss, argnums=1)(Mlp(use, nnx.Rngs(0)), x)
    with jax.set_mesh(jaxtp.make_mesh(1, 2, 4)):
        model = jaxtp.parallelize(lambda: Mlp(use, nnx.Rngs(0)), PLAN)
        found, found_grads = nnx.jit(lambda model, x: jax.value_and_grad(loss, argnums=1)(model, x))(model, x)
        eager = model(x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(found_grads, grads, atol=1e-5)
    np.testing.assert_allclose(np.sum(np.square(eager)), expected, rtol=1e-5)


def test_an_array_of_numpy_is_refused_as_ever():
    class Model(nnx.Module):
        def __call__(self, x):
            return jnp.asarray(np.asarray(x))

    with jax.set_mesh(jaxtp.make_mesh(1, 2, 4)):
        model = jaxtp.parallelize(Model(), {"": PrepareInput(Replicate(), Replicate())})
        with pytest.raises(jax.errors.TracerArrayConversionError):
            nnx.jit(lambda model, x: model(x))(model, jnp.ones((4, 8)))
        np.testing.assert_array_equal(model(jnp.ones((4, 8))), np.ones((4, 8)))
