"""A model made by a function in its parts is the model that was made first and then split."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtp
from jaxtp import Colwise, PlanError

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


def test_both_forms_give_the_same_model():
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=4)):
        made = jaxtp.parallelize(Tables(nnx.Rngs(0)), {"up": Colwise()})
        sharded = jaxtp.parallelize(lambda: Tables(nnx.Rngs(0)), {"up": Colwise()})
        x = jnp.linspace(0.0, 1.0, 4 * D).reshape(4, D)
        run = nnx.jit(lambda model, x: model(x))
        np.testing.assert_allclose(run(sharded, x), run(made, x), rtol=1e-5, atol=1e-5)
    states = [jax.tree_util.tree_leaves_with_path(nnx.state(model)) for model in (made, sharded)]
    (paths, arrays), (sharded_paths, sharded_arrays) = (zip(*state, strict=True) for state in states)
    assert paths == sharded_paths
    assert [a.sharding for a in arrays] == [a.sharding for a in sharded_arrays]
    assert nnx.split(made)[0] == nnx.split(sharded)[0]


class Holds(nnx.Module):
    def __init__(self, made):
        self.held = made(jnp.ones(D))
        self.up = nnx.Linear(D, D, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "made",
    [
        lambda x: {"mask": x},
        lambda x: (1, x),
        lambda x: partial(jnp.add, x),
        lambda x: partial(jnp.where, x=x),
        lambda x: lambda y: x + y,
        lambda x: partial(lambda y, z: x + y + z, 1),
    ],
    ids=["dict", "tuple", "partial", "keyword", "closure", "closure in a partial"],
)
def test_an_array_that_flax_does_not_see_is_refused_by_its_place(made):
    mesh = jaxtp.make_mesh(fsdp=2)
    with pytest.raises(PlanError, match=r"model in which inner\.held\S* contains an array .* nnx\.data\(\.\.\.\)"):
        jaxtp.parallelize(lambda: nnx.Dict(inner=Holds(made)), mesh=mesh)


@pytest.mark.parametrize("made", [lambda x: float(x.sum()), np.asarray, lambda x: 1 if x[0] else 2])
def test_a_value_that_is_not_there_in_a_trace_is_asked_for(made):
    with pytest.raises(PlanError, match="compute it with NumPy, or build the model first"):
        jaxtp.parallelize(lambda: Holds(made), mesh=jaxtp.make_mesh(fsdp=2))


def test_a_variable_that_has_no_value_yet_is_no_matter():
    def build():
        return Holds(lambda _: lambda: later)

    model = jaxtp.parallelize(build, mesh=jaxtp.make_mesh(fsdp=2))
    later = None
    assert model.held() is later
