"""`Compute`: the dtype of a module's computation, named in a plan."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import use_mesh

import jaxtp
from jaxtp import Colwise, Compute, Rowwise


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def build():
    return Net(nnx.Rngs(0))


def test_layers_compute_in_the_dtype_and_keep_their_parameters():
    plan = {"": Compute("bfloat16"), "up": Colwise(), "down": Compute("float32", Rowwise())}
    x = np.random.default_rng(0).standard_normal((8, 16), np.float32)
    run = nnx.jit(lambda model, x: (model.up(x), model(x)))
    with use_mesh(fsdp=2, tp=2):
        model = jaxtp.parallelize(build, plan)
        assert (model.up.kernel.dtype, model.down.kernel.dtype) == (jnp.float32, jnp.float32)
        up, result = run(model, x)
    assert (up.dtype, result.dtype) == (jnp.bfloat16, jnp.float32)
    reference = build()
    reference.up.dtype = jnp.bfloat16
    np.testing.assert_allclose(result, run(reference, x)[1], rtol=2e-2, atol=1e-3)


MISTAKES = {
    "no module that it matches has an attribute dtype": {"drop": Compute("bfloat16")},
    "'bf16' is not a dtype": {"up": Compute("bf16")},
    "match the same module": {"up": Compute("bfloat16", Rowwise()), "*": Colwise()},
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_plan_errors(message):
    with pytest.raises(jaxtp.PlanError, match=message):
        jaxtp.parallelize(nnx.eval_shape(build), MISTAKES[message], mesh=jaxtp.make_mesh(tp=2))
