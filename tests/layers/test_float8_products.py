"""Products in float8: errors within bounds that coarser rounding exceeds, and the numbers of one
device on any mesh.
"""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_programs import LayerProgram
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from support import assert_close, random_weights, relative_error, swept
from tables import read_table

from jaxtp.layers import linear
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import Precision

T = 96
D = 64
F = 48
IN_FLOAT8 = Precision(matmul="float8", matmul_least=1)
KINDS = {"column": linear.ColumnParallelLinear, "row": linear.RowParallelLinear}


def single(rng, *shape):
    """A number in each row, and a larger one that meets zeros: sums of one product, whose errors
    do not cancel.
    """
    array = np.zeros(shape)
    rows = np.arange(shape[0])
    array[rows, 2 + rng.permutation(rows) % (shape[1] - 2)] = rng.uniform(1, 2, shape[0])
    array[:, int(shape[0] == T)] = 3
    return array


def spread(rng, *shape):
    """Tokens, or output features, whose sizes differ by up to 1e6."""
    return rng.standard_normal(shape) * 10 ** rng.uniform(-3, 3, (shape[0], 1))


def outliers(rng, *shape):
    return rng.standard_normal(shape) * np.where(np.arange(shape[1]) == 3, 1e3, 1)


INPUTS = {
    "normal": lambda rng, *shape: rng.standard_normal(shape),
    "heavy-tailed": lambda rng, *shape: rng.standard_normal(shape) ** 5,
    "outlier channel": outliers,
    "spread": spread,
    "single": single,
}


def layer(kind, matmul="float8"):
    context = LayerContext(precision=replace(IN_FLOAT8, matmul=matmul))
    return nnx.split(KINDS[kind](D, F, context, rngs=nnx.Rngs(0)))


def gradients(kind, x, kernel, grad_y):
    """The output, and the gradients of the input and the kernel, in float64."""
    graph, state = layer(kind)

    def output(x, kernel):
        return nnx.merge(graph, jax.tree.map(lambda _: kernel, state))(x[None])[0]

    y, transpose = jax.vjp(output, *(jnp.asarray(each, jnp.float32) for each in (x, kernel)))
    return [
        np.asarray(each, np.float64) for each in (y, *transpose(jnp.asarray(grad_y, jnp.float32)))
    ]


def error(x, dim=-1):
    """The bound of the error of a number in 8 bits."""
    return np.maximum(np.abs(x) / 2**4, np.abs(x).max(dim, keepdims=True) / 448 / 2**10)


def of_product(a, b, a_error, b_error):
    return np.abs(a) @ b_error + a_error @ np.abs(b) + a_error @ b_error


def excess(kind, inputs):
    """The largest error relative to its bound, and the largest relative error of an array."""
    rng = default_rng(0)
    make = INPUTS[inputs]
    x, kernel, grad_y = (
        np.float64(np.float32(each))
        for each in (make(rng, T, D), make(rng, F, D).T, make(rng, T, F))
    )
    found = gradients(kind, x, kernel, grad_y)
    scale = np.abs(kernel).max(0) / 448
    to_round = grad_y * scale
    rounded = kernel / scale
    exact = [x @ kernel, grad_y @ kernel.T, x.T @ grad_y]
    bounds = [
        of_product(x, kernel, error(x), error(kernel, 0)),
        of_product(to_round, rounded.T, error(to_round), error(rounded, 0).T),
        error(x).T @ np.abs(grad_y),
    ]
    terms = [
        np.abs(x) @ np.abs(kernel),
        np.abs(grad_y) @ np.abs(kernel.T),
        np.abs(x.T) @ np.abs(grad_y),
    ]
    # float32 sums
    bounds = [bound + 1e-5 * each + 1e-30 for bound, each in zip(bounds, terms, strict=True)]
    worst = max(
        (np.abs(f - e) / bound).max() for f, e, bound in zip(found, exact, bounds, strict=True)
    )
    return worst, max(map(relative_error, found, exact))


@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_each_number_is_bounded(kind):
    errors = {inputs: excess(kind, inputs) for inputs in INPUTS}
    assert not {
        inputs: found for inputs, found in errors.items() if not (found[0] <= 1 and found[1] < 0.05)
    }


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_number_that_is_not_finite_stays_in_its_token_and_zeros_are_zeros(bad):
    rng = default_rng(0)
    x = rng.standard_normal((T, D))
    kernel = rng.standard_normal((D, F))
    grad_y = rng.standard_normal((T, F))
    x[0] = 0
    grad_y[1] = 0
    kernel[:, 2] = 0
    clean = gradients("column", x, kernel, grad_y)
    assert all(np.isfinite(each).all() for each in clean)
    assert not any(each.any() for each in (clean[0][0], clean[0][:, 2], clean[1][1]))
    x[3, 5] = bad
    grad_y[4, 6] = bad
    y, grad_x, grad_kernel = gradients("column", x, kernel, grad_y)
    for found, exact, at in ((y, clean[0], 3), (grad_x, clean[1], 4)):
        assert np.isnan(found[at]).all()
        assert_array_equal(np.delete(found, at, 0), np.delete(exact, at, 0))
    assert np.isnan(grad_kernel[5]).all()
    assert np.isnan(grad_kernel[:, 6]).all()


B = 8
S = 16
CASES = [(kind, split, overlap, tuple(mesh)) for kind, split, overlap, mesh in read_table(__file__)]


def layer_of(kind, split=False, overlap="none"):
    """Returns a function that builds a layer with an adapter."""

    def build():
        context = LayerContext(
            sequence_parallel=split,
            overlap=overlap,
            lora=LoraConfig(rank=2),
            precision=IN_FLOAT8,
        )
        name = {"targets": ("gate_proj",)} if kind == "column" else {"target": "down_proj"}
        return KINDS[kind](D, D, context, use_bias=True, **name, rngs=nnx.Rngs(0))

    return build


GIVEN = default_rng(1).standard_normal((2, B, S, D), "f4")


@cache
def on_one_device(kind):
    """Returns weights; and the output, and the gradients of the input and the parameters."""
    weights = random_weights(layer_of(kind))
    return weights, LayerProgram(layer_of(kind), weights)(*GIVEN)


@swept("case", CASES, CASES[0])
def test_a_layer_rounds_on_each_mesh_as_on_one_device(case):
    """One layer rounds the same numbers on every mesh, so another order of summation is all that
    differs.
    """
    kind, split, overlap, mesh = case
    weights, expected = on_one_device(kind)
    found = LayerProgram(layer_of(kind, split, overlap), weights, mesh)(*GIVEN)
    assert_close(found, expected, 2e-6)
