"""Modules whose calls are wrapped are otherwise what they were."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import use_mesh

import jaxtp
from jaxtp.plans import Colwise, ContextParallel, Rowwise, SequenceParallel
from jaxtp.plans.module_wrappers import modules_of, original_class, with_calls

WIDTH = 8
X = jax.ShapeDtypeStruct((4, 2, WIDTH), jnp.float32)


class Tower(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(3, WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs)] * 2)

    def __call__(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def test_a_wrapped_model_is_what_it_was_but_for_its_calls():
    model = Tower(nnx.Rngs(0))
    other = Tower(nnx.Rngs(0))
    ids = jnp.arange(3)
    seen = []

    def wrap(path, name, method, module, *args):
        seen.append((path, name))
        assert module is modules_of(model)[path]
        return method(module, *args)

    assert with_calls(model, wrap) is model
    assert (model(ids) == other(ids)).all()
    # Once by its path, though called twice: the list holds one layer
    layer = ("layers.0", "__call__")
    assert seen == [("", "__call__"), ("embed", "__call__"), layer, layer, ("embed", "attend")]
    for module, before in zip(modules_of(model).values(), modules_of(other).values(), strict=True):
        assert original_class(module) is type(before)
        assert isinstance(module, type(before))
    assert not callable(model.layers), "what was not called cannot be"
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(other))


NAMES = ("self_", "path", "name", "method", "module", "cls", "role", "written", "parallel")


class Named(nnx.Module):
    """Takes keywords that the functions around its call have for names, too."""

    def __init__(self):
        self.up = nnx.Linear(WIDTH, 16, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(16, WIDTH, rngs=nnx.Rngs(0))

    def __call__(self, x, **named):
        assert tuple(named) == NAMES
        return self.down(self.up(x))


class Caller(nnx.Module):
    def __init__(self):
        self.inner = Named()

    def __call__(self, x):
        return self.inner(x, **dict.fromkeys(NAMES, 0))


def test_keywords_may_have_any_name():
    plan = {"inner.up": Colwise(), "inner.down": Rowwise()}
    mesh = {"fsdp": 2, "tp": 2}
    assert jaxtp.propose_plan(Caller, X, mesh=mesh, report=None) == plan
    assert jaxtp.explain(Caller, X, mesh=mesh, plan=plan).traffic


class KeywordOnly(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.arange(1.0, WIDTH + 1))

    def __call__(self, *, x):
        return x * self.scale


@pytest.mark.parametrize("plan", [{}, {"": SequenceParallel()}, {"": ContextParallel()}])
def test_a_keyword_only_argument_stays_one(plan):
    x = jax.random.normal(jax.random.key(0), (4, 2, WIDTH))
    expected = KeywordOnly(nnx.Rngs(0))(x=x)
    with use_mesh(fsdp=2, tp=2):
        model = jaxtp.parallelize(lambda: KeywordOnly(nnx.Rngs(0)), plan)
        assert jnp.array_equal(nnx.jit(lambda model, x: model(x=x))(model, x), expected)
