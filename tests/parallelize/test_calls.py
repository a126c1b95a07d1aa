"""Modules whose calls are wrapped are otherwise what they were."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxtp
from jaxtp import Colwise, Rowwise
from jaxtp.parallelize.module_wrappers import modules_of, original_class, with_calls

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
    model, other, ids, seen = Tower(nnx.Rngs(0)), Tower(nnx.Rngs(0)), jnp.arange(3), []
    graph = {path: type(module) for path, module in modules_of(model).items()}

    def wrap(path, name, method, module, *args):
        seen.append((path, name))
        assert module is modules_of(model)[path]
        return method(module, *args)

    assert with_calls(model, wrap) is model
    assert (model(ids) == other(ids)).all()
    # Once by its path, though called twice: the list holds one layer
    layer = ("layers.0", "__call__")
    assert seen == [("", "__call__"), ("embed", "__call__"), layer, layer, ("embed", "attend")]
    assert {path: original_class(module) for path, module in modules_of(model).items()} == graph
    assert all(isinstance(module, graph[path]) for path, module in modules_of(model).items())
    assert not callable(model.layers), "what was not called cannot be"
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(nnx.state(other))


NAMES = ("self_", "path", "name", "method", "module", "cls", "role", "written", "parallel")


class Named(nnx.Module):
    """Takes keywords that the functions around its call have for names, too."""

    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(WIDTH))
        self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)

    def __call__(self, x, **named):
        assert tuple(named) == NAMES
        return self.down(self.up(x * self.scale[...]))


class Caller(nnx.Module):
    def __init__(self, rngs):
        self.inner = Named(rngs)

    def __call__(self, x):
        return self.inner(x, **dict.fromkeys(NAMES, 0))


@pytest.mark.parametrize("run", [jaxtp.explain, jaxtp.propose_plan])
def test_keywords_may_have_any_name(run):
    plan = {"inner.up": Colwise(), "inner.down": Rowwise()}
    given = {"plan": plan} if run is jaxtp.explain else {"report": None}
    found = run(lambda: Caller(nnx.Rngs(0)), X, mesh={"fsdp": 2, "tp": 2}, **given)
    assert found == plan if run is jaxtp.propose_plan else found.traffic
