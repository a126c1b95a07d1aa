"""What is found in a jaxpr: modules, calls, what feeds what, and what every gradient costs."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxtp.analysis.collective import Collective
from jaxtp.analysis.dataflow import find_dataflow
from jaxtp.analysis.traced_model import ModelCall, trace_model

X = jax.ShapeDtypeStruct((4, 6, 8), jnp.float32)


class Pair(nnx.Module):
    """Two layers with a function between."""

    def __init__(self, between, rngs, hidden=16):
        self.up = nnx.Linear(8, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, 8, rngs=rngs)
        self.between = between

    def __call__(self, x):
        return self.down(self.between(self.up(x)))


def model(between):
    return lambda: Pair(between, nnx.Rngs(0))


def look(build, *inputs, excluded=(), tp=4, batch_shards=1):
    return find_dataflow(
        trace_model(ModelCall.of(build, inputs or (X,), None)), excluded, tp=tp, batch_shards=batch_shards
    )


def feeds(dataflow):
    """Row layers, and the columns that feed them."""
    return {call.path: set(call.input.columns) for call in dataflow.calls if call.is_row}


def branch(x):
    return jax.lax.cond(jnp.arange(3).sum() > 2, jnp.sin, jnp.cos, x)


@jax.custom_vjp
def own_gradient(x):
    return 2 * x


own_gradient.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@pytest.mark.parametrize(
    "between",
    [
        nnx.gelu,
        jax.jit(nnx.relu),
        jax.remat(lambda x: jnp.sin(x) * x),
        own_gradient,
        branch,
        lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, length=3)[0],
        lambda x: jax.lax.scan(lambda c, row: (c, row + 1), 0, x)[1],
        lambda x: jax.vmap(jnp.tanh)(x.reshape(4, 6, 4, 4)).reshape(4, 6, 16),
        lambda x: x * jax.nn.softmax(x, axis=1),
        lambda x: x - jax.lax.stop_gradient(x).max(1, keepdims=True),
    ],
)
def test_a_pair_is_seen_through(between):
    dataflow = look(model(between))
    assert feeds(dataflow) == {"down": {"up"}}
    assert not dataflow.blocked
    assert dataflow.collectives == {}


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (
            lambda x: x / x.sum(-1, keepdims=True),
            r"reduce_sum, which needs all 16 elements .* \(in the model itself\)",
        ),
        (lambda x: x.reshape(4, 6, 2, 8).reshape(4, 6, 16), "becomes a dim of 2 by reshape, which tp 4 does not"),
        (lambda x: jax.lax.scan(lambda c, row: (c, row + 1), 0, x.swapaxes(0, 2))[1].swapaxes(0, 2), "scan runs over"),
        (lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x), "goes into while"),
        (lambda x: jax.pure_callback(lambda a: a, X.update(shape=(4, 6, 16)), x), "goes into pure_callback"),
        (lambda x: x @ x.swapaxes(1, 2) @ x, "sums over the split dim"),
    ],
)
def test_what_ends_a_split(between, why):
    dataflow = look(model(between))
    assert set(dataflow.blocked) == {"up"}
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(dataflow.blocked["up"])


def test_an_excluded_layer_is_whole():
    assert feeds(look(model(nnx.gelu), excluded={"up"})) == {}


def test_whole_operands_have_gradients_to_sum():
    """A bias is gathered, a scalar summed, and what has no gradient costs nothing."""

    class Gated(nnx.Module):
        def __init__(self, rngs):
            self.pair = Pair(lambda x: x, rngs)
            self.scale, self.gain = nnx.Param(jnp.ones(16)), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            self.pair.between = lambda h: h * self.scale[...] * self.gain[...] + jnp.ones(16)
            return self.pair(x)

    moved = {Collective("all-gather", ("tp",), 4, 16 * 4): 1, Collective("all-reduce", ("tp",), 4, 4): 1}
    assert look(lambda: Gated(nnx.Rngs(0))).collectives == {frozenset({"pair.up"}): moved}


def test_a_whole_array_of_the_batch_is_counted_by_its_part():
    """`x [4, 6, 8]`, trained, beside a split array: gathered, each device its rows."""

    class Residual(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)
            self.pair = Pair(lambda x: x, rngs, hidden=8)

        def __call__(self, x):
            x = self.first(x)
            self.pair.between = lambda h: h + x
            return self.pair(x)

    dataflow = look(lambda: Residual(nnx.Rngs(0)), excluded={"first"}, batch_shards=2)
    gather = Collective("all-gather", ("tp",), 4, 4 * 6 * 8 * 4 / 2)
    assert dataflow.collectives == {frozenset({"pair.up"}): {gather: 1}}


def test_projections_that_meet_are_joined():
    class Attention(nnx.Module):
        def __init__(self, rngs):
            self.q, self.k, self.v, self.o = (nnx.Linear(8, 8, rngs=rngs) for _ in range(4))

        def __call__(self, x):
            q, k, v = (layer(x).reshape(4, 6, 4, 2) for layer in (self.q, self.k, self.v))
            return self.o(jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(4, 6, 8))

    dataflow = look(lambda: Attention(nnx.Rngs(0)))
    assert feeds(dataflow) == {"o": {"q", "k", "v"}}
    assert {"q", "k"} in dataflow.joined
    (array,) = {call.input.key for call in dataflow.calls if not call.is_row}
    assert array is dataflow.calls[0].input.key, "q, k and v read one array"


@pytest.mark.parametrize("through", [lambda f: f, nnx.remat], ids=["plain", "remat"])
def test_stacked_layers_are_seen_in_the_body_of_their_scan(through):
    class Stack(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: Pair(nnx.gelu, rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=3)(make)(rngs)

        def __call__(self, x):
            body = through(lambda x, layer: x / x.sum(-1, keepdims=True) + layer(x))
            return nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)

    dataflow = look(lambda: Stack(nnx.Rngs(0)), excluded={"layers.down"})
    assert feeds(dataflow) == {"layers.down": {"layers.up"}}
    assert {call.path: call.times for call in dataflow.calls} == {"layers.up": 3, "layers.down": 3}


def test_the_carry_of_a_scan_keeps_its_split():
    class Recurrent(nnx.Module):
        def __init__(self, rngs):
            self.rnn = nnx.RNN(nnx.LSTMCell(8, 8, rngs=rngs), rngs=rngs)
            self.head = nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return self.head(self.rnn(x)[:, -1])

    fed = feeds(look(lambda: Recurrent(nnx.Rngs(0))))
    gates = {f"rnn.cell.{kind}{gate}" for kind in "ih" for gate in ("i", "f", "g", "o")} - {"rnn.cell.if"}
    assert fed["head"] == fed["rnn.cell.hi"] == gates | {"rnn.cell.if_"}


def test_convolutions_einsums_and_general_layers_have_ports():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Conv(8, 16, (3,), rngs=rngs)
            self.b = nnx.Conv(16, 8, (3,), rngs=rngs)
            self.c = nnx.LinearGeneral(8, (4, 2), rngs=rngs)
            self.d = nnx.Einsum("btnh,nhd->btd", (4, 2, 8), rngs=rngs)

        def __call__(self, x):
            x = self.b(nnx.relu(self.a(x)))
            return self.d(self.c(x / x.max(-1, keepdims=True)))

    assert feeds(look(lambda: Net(nnx.Rngs(0)), excluded={"b"})) == {"b": {"a"}, "d": {"c"}}


def test_the_model_is_left_as_it_is():
    built = Pair(nnx.gelu, nnx.Rngs(0))
    classes = [type(module) for _, module in nnx.iter_modules(built)]
    before, arrays = jax.tree.leaves(nnx.state(built)), len(jax.live_arrays())
    dataflow = look(built)
    assert feeds(dataflow) == {"down": {"up"}}
    assert [type(module) for _, module in nnx.iter_modules(built)] == classes
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(built)), strict=True))
    assert len(jax.live_arrays()) == arrays, "an array was made"


def test_an_abstract_model_is_traced_and_numbers_are_passed_as_they_are():
    class Repeated(Pair):
        def __call__(self, x, times):
            for _ in range(times):
                x = super().__call__(x)
            return x

    abstract = nnx.eval_shape(lambda: Repeated(nnx.gelu, nnx.Rngs(0)))
    assert len(look(abstract, X, 3).calls) == 6


def test_what_no_result_needs_is_not_there():
    class Unused(Pair):
        def __call__(self, x):
            super().__call__(x)
            return self.up(x)

    assert [call.path for call in look(lambda: Unused(nnx.gelu, nnx.Rngs(0))).calls] == ["up"]
