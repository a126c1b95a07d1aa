"""A model made by a function in its parts is the model that was made first and then split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose
from support import use_mesh

import jaxtp
from jaxtp.errors import PlanError
from jaxtp.plans import Colwise

D = 8


class Inner(nnx.Module):
    def __init__(self):
        self.scales = nnx.data({"one": jnp.arange(D) + 1.0, "more": [jnp.full(D, 2.0)]})

    def __call__(self, x):
        return x * self.scales["one"] * self.scales["more"][0]


class Tables(nnx.Module):
    """Arrays that are no parameters, wherever a module may hold them."""

    def __init__(self, rngs):
        self.up = nnx.Linear(D, D, rngs=rngs)
        self.normed = nnx.WeightNorm(nnx.Linear(D, D, rngs=rngs), rngs=rngs)
        self.mask = jnp.tril(jnp.ones((D, D)))
        self.table = np.cos(np.arange(D, dtype=np.float32))
        self.listed = nnx.List([jnp.arange(D) * 1.0])
        self.named = nnx.Dict(shift=jnp.ones(D))
        self.inner = Inner()
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.normed(self.up(x)) @ self.mask * self.table
        return self.dropout(self.inner(x) + self.listed[0] + self.named["shift"])


@pytest.mark.wide
def test_both_forms_give_the_same_model():
    build = lambda: Tables(nnx.Rngs(0))
    x = jnp.linspace(0.0, 1.0, 4 * D).reshape(4, D)
    run = nnx.jit(lambda model, x: model(x))
    with use_mesh(fsdp=2, tp=4):
        made, in_parts = (jaxtp.parallelize(model, {"up": Colwise()}) for model in (build(), build))
        assert_allclose(run(in_parts, x), run(made, x), rtol=1e-5, atol=1e-5)
    assert nnx.split(made)[0] == nnx.split(in_parts)[0]
    shardings = [
        jax.tree.map(lambda array: array.sharding, nnx.state(model)) for model in (made, in_parts)
    ]
    assert jax.tree.leaves(shardings[0]) == jax.tree.leaves(shardings[1])


class Holds(nnx.Module):
    def __init__(self, made):
        self.held = made(jnp.ones(D))
        self.up = nnx.Linear(D, D, rngs=nnx.Rngs(0))


HIDDEN = {
    "dict": lambda x: {"mask": x},
    "tuple": lambda x: (1, x),
    "partial": lambda x: partial(jnp.add, x),
    "keyword": lambda x: partial(jnp.where, x=x),
    "closure": lambda x: lambda y: x + y,
    "closure in a partial": lambda x: partial(lambda y, z: x + y + z, 1),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_array_that_flax_does_not_see_is_refused_by_its_place(name):
    with pytest.raises(
        PlanError, match=r"model in which inner\.held\S* contains an array .* nnx\.data\(\.\.\.\)"
    ):
        jaxtp.parallelize(lambda: nnx.Dict(inner=Holds(HIDDEN[name])), mesh=jaxtp.make_mesh(fsdp=2))


@pytest.mark.parametrize("made", [lambda x: float(x.sum()), np.asarray, lambda x: 1 if x[0] else 2])
def test_a_value_that_is_not_there_in_a_trace_is_asked_for(made):
    with pytest.raises(PlanError, match="compute it with NumPy, or build the model first"):
        jaxtp.parallelize(lambda: Holds(made), mesh=jaxtp.make_mesh(fsdp=2))


def test_a_variable_that_has_no_value_yet_is_no_matter():
    model = jaxtp.parallelize(lambda: Holds(lambda _: lambda: later), mesh=jaxtp.make_mesh(fsdp=2))
    later = None
    assert model.held() is later
