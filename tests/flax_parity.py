"""A model in plain Flax, trained for three steps with and without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxtp

TOLERANCE = 1e-5
STEPS = 3


@nnx.jit
def step(model, optimizer, inputs):
    """One AdamW update of a random linear function of the outputs; what came out, and the gradients."""

    def loss(model):
        y = jnp.asarray(model(*inputs))
        return jnp.mean(y * jax.random.normal(jax.random.key(3), y.shape)), y

    (_, y), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return y, grads


def train(model, inputs):
    """Outputs and gradients of each step, and everything that the model holds in the end, on the host, by name."""
    # A gradient that is zero but for rounding (of a bias of keys) would be all that a small eps looks at.
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    found = {}
    for index in range(STEPS):
        y, grads = step(model, optimizer, inputs)
        found |= {f"output.{index}": {"y": y}, f"gradient.{index}": by_name(grads)}
    found["state"] = by_name(nnx.state(model, nnx.Not(nnx.RngState)))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def by_name(state):
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def assert_same(actual, expected, tolerance=TOLERANCE):
    """Every array, relative to its norm, or to a thousandth of the largest one of its group."""
    for group, arrays in expected.items():
        assert actual[group].keys() == arrays.keys()
        floor = 1e-3 * max(np.linalg.norm(x) for x in arrays.values())
        errors = {
            f"{group}: {name}": np.linalg.norm(actual[group][name] - x) / max(np.linalg.norm(x), floor)
            for name, x in arrays.items()
        }
        worst = {name: error for name, error in errors.items() if not error <= tolerance}
        assert not worst, worst


def train_on(mesh, build, plan, inputs, *, born=True, **options):
    """As `train`, of a model that is made in its parts, or split when it is there."""
    with jax.set_mesh(jaxtp.make_mesh(*mesh)):
        model = jaxtp.parallelize(build if born else build(), plan, **options)
        return train(model, inputs)
