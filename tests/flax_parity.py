"""Trains a model in plain Flax for three steps, with and without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from support import sizes_of, use_mesh

import jaxtp

TOLERANCE = 1e-5  # of float32; these models are in float64, and come far below it
STEPS = 3


@nnx.jit
def step(model, optimizer, inputs):
    """Makes one AdamW update of a random linear function of the outputs; returns outputs and
    gradients."""

    def loss(model):
        y = jnp.asarray(model(*inputs))
        return jnp.mean(y * jax.random.normal(jax.random.key(3), y.shape)), y

    (_, y), grads = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return y, grads


def train(model, inputs):
    """Returns outputs and gradients of each step, and the model's final state, on the host, by
    name."""
    inputs = [x.astype(float) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in inputs]
    # A gradient that is zero but for rounding (of a bias of keys) would be all that a small eps
    # looks at.
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)
    found = {}
    for index in range(STEPS):
        y, grads = step(model, optimizer, inputs)
        found |= {f"output.{index}": {"y": y}, f"gradient.{index}": by_name(grads)}
    found["state"] = by_name(nnx.state(model, nnx.Not(nnx.RngState)))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), found)


def by_name(state):
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(state)}


def in_float64(model):
    """Returns the model in double precision, where rounding hides no error."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Embed):
            node.dtype = None
        if isinstance(node, nnx.Variable) and jnp.issubdtype(node.dtype, jnp.floating):
            node.set_value(node[...].astype(jnp.float64))
    return model


def assert_same(actual, expected):
    """Compares arrays, relative to the array's norm or a thousandth of the largest norm in its
    group."""
    for group, arrays in expected.items():
        assert actual[group].keys() == arrays.keys()
        floor = 1e-3 * max(np.linalg.norm(x) for x in arrays.values())
        errors = {}
        for name, x in arrays.items():
            distance = np.linalg.norm(actual[group][name] - x)
            errors[f"{group}: {name}"] = distance / max(np.linalg.norm(x), floor)
        worst = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        assert not worst, worst


def train_alone(build, inputs):
    """Runs `train` on a new model on one device, in float64."""
    with jax.enable_x64(True):
        return train(in_float64(build()), inputs)


def train_on(mesh, build, plan, inputs, *, sharded=True, **options):
    """Runs `train_alone` on a mesh; the model is created sharded, or created whole and then
    sharded."""
    with jax.enable_x64(True), use_mesh(**sizes_of(mesh)):
        make = lambda: in_float64(build())
        return train(jaxtp.parallelize(make if sharded else make(), plan, **options), inputs)
