"""What is found in a jaxpr: modules, calls, what feeds what, and what every gradient costs."""

import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tools.explain.nets import net, over_sum, seeded

from jaxtp.analysis.collective import Collective
from jaxtp.analysis.dataflow import find_dataflow
from jaxtp.analysis.traced_model import ModelCall, trace_model
from jaxtp.mesh import mesh_shape

X = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)


UP_AND_DOWN = {"up": (8, 16), "down": (16, 8)}


def pair(between):
    """Two layers with a function between."""
    return net(lambda m, x: m.down(between(m.up(x))), **UP_AND_DOWN)


def look(make, excluded=(), batch_shards=1):
    """Returns what is found in a model that `make(rngs=...)` makes."""
    call = ModelCall.of(seeded(make), (X,), None)
    return find_dataflow(trace_model(call), excluded, mesh_shape(fsdp=batch_shards, tp=4))


def feeds(dataflow):
    """Returns the row layers, and the columns that feed them."""
    return {call.path: set(call.input.columns) for call in dataflow.calls if call.is_row}


@jax.custom_vjp
def own_gradient(x):
    return 2 * x


own_gradient.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))
WITHOUT_AN_END = {
    "jit": jax.jit(nnx.relu),
    "remat": jax.remat(lambda x: jnp.sin(x) * x),
    "custom_vjp": own_gradient,
    "barrier": jax.lax.optimization_barrier,
    "cond": lambda x: jax.lax.cond(jnp.arange(3).sum() > 2, jnp.sin, jnp.cos, x),
    "scan of the carry": lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0],
    "scan over rows": lambda x: jax.lax.scan(lambda c, row: (c, row + 1), 0, x)[1],
    "vmap": lambda x: jax.vmap(jnp.tanh)(x.reshape(4, 6, 4, 4)).reshape(4, 6, 16),
}


@pytest.mark.parametrize("name", WITHOUT_AN_END)
def test_a_split_goes_on_through_a_function(name):
    dataflow = look(pair(WITHOUT_AN_END[name]))
    assert feeds(dataflow) == {"down": {"up"}}
    assert not dataflow.blocked
    assert dataflow.collectives == {}


def scan_over_features(x):
    return jax.lax.scan(lambda c, row: (c, row + 1), 0, x.swapaxes(0, 2))[1].swapaxes(0, 2)


WITH_AN_END = {
    r"reduce_sum, which needs all 16 elements .* \(in the model itself\)": over_sum,
    "scan runs over": scan_over_features,
    "along another dim": lambda x: jax.lax.cond(
        jnp.arange(3).sum() > 2, jnp.sin, lambda x: x.swapaxes(2, 3), x.reshape(4, 6, 4, 4)
    ).reshape(4, 6, 16),
    "goes into while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x),
    "goes into pure_callback": lambda x: jax.pure_callback(lambda a: a, x, x),
}


@pytest.mark.parametrize("why", WITH_AN_END)
def test_the_reason_for_the_end_of_a_split_is_found(why):
    dataflow = look(pair(WITH_AN_END[why]))
    (layer,) = dataflow.blocked
    assert layer == "up"
    assert re.search(why, str(dataflow.blocked[layer]))


def test_whole_operands_have_gradients_to_sum():
    """A bias is gathered, a scalar summed, and what has no gradient costs nothing."""

    def scaled(m, x):
        return m.down(m.up(x) * m.scale[...] * m.gain[...] + jnp.ones(16))

    def gated(rngs):
        model = net(scaled, **UP_AND_DOWN)(rngs=rngs)
        model.scale = nnx.Param(jnp.ones(16))
        model.gain = nnx.Param(jnp.ones(()))
        return model

    bias = Collective("all-gather", ("tp",), 4, 16 * 4)
    scalar = Collective("all-reduce", ("tp",), 4, 4)
    assert look(gated).collectives == {frozenset({"up"}): {bias: 1, scalar: 1}}


def test_of_a_whole_array_of_the_batch_each_device_gathers_its_rows():
    """`x [4, 6, 8]`, trained, is added to a split array."""

    def run(m, x):
        x = m.first(x)
        return m.down(m.up(x) + x)

    residual = net(run, first=(8, 8), up=(8, 8), down=(8, 8))
    dataflow = look(residual, excluded={"first"}, batch_shards=2)
    gather = Collective("all-gather", ("tp",), 4, 4 * 6 * 8 * 4 / 2)
    assert dataflow.collectives == {frozenset({"up"}): {gather: 1}}


def test_the_carry_of_a_scan_keeps_its_split():
    fed = feeds(look(lambda rngs: nnx.RNN(nnx.LSTMCell(8, 8, rngs=rngs), rngs=rngs)))
    assert fed["cell.hi"] == {
        f"cell.{gate}" for gate in ("ii", "ig", "io", "hi", "hf", "hg", "ho", "if_")
    }


def test_convolutions_einsums_and_general_layers_can_be_split():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Conv(8, 16, (3,), rngs=rngs)
            self.b = nnx.Conv(16, 8, (3,), rngs=rngs)
            self.c = nnx.LinearGeneral(8, (4, 2), rngs=rngs)
            self.d = nnx.Einsum("btnh,nhd->btd", (4, 2, 8), rngs=rngs)

        def __call__(self, x):
            return self.d(self.c(over_sum(self.b(nnx.relu(self.a(x))))))

    assert feeds(look(Layers, excluded={"b"})) == {"b": {"a"}, "d": {"c"}}


def test_the_model_is_left_as_it_is():
    built = pair(nnx.gelu)(rngs=nnx.Rngs(0))

    def parts():
        classes = [type(module) for _, module in nnx.iter_modules(built)]
        return classes, list(map(id, jax.tree.leaves(nnx.state(built)))), len(jax.live_arrays())

    before = parts()
    trace_model(ModelCall.of(built, (X,), None))
    assert parts() == before, "a class or an array was changed, or an array was made"


def test_an_abstract_model_is_traced_and_numbers_are_passed_as_they_are():
    def run(m, inputs, times):
        x = inputs["x"]
        for _ in range(times):
            x = m.down(m.up(x))
        return x

    abstract = nnx.eval_shape(seeded(net(run, **UP_AND_DOWN)))
    call = ModelCall.of(abstract, ({"x": X}, 3), None)
    assert len(find_dataflow(trace_model(call), (), mesh_shape(tp=4)).calls) == 6


def test_a_layer_that_no_result_needs_is_not_there():
    def run(m, x):
        m.down(m.up(x))
        return m.up(x)

    dataflow = look(net(run, **UP_AND_DOWN))
    assert [call.path for call in dataflow.calls] == ["up"]
