"""What proposed plans move once compiled: what they say, no more than plans by hand, no more than
layers one by one.

The bound for a random graph is the plan that splits the same layers without pairs: each is a column
layer whose output is gathered, so that no layer knows of another.
"""

from functools import partial

import flax_models as models
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from flax_parity import assert_same, train_alone, train_on
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from moves import bytes_over_tp
from tools.explain.nets import net, seeded

import jaxtp
from jaxtp.plans import Colwise, Replicate, Rowwise, SequenceParallel

X = jax.random.normal(jax.random.key(0), (8, 8, 16))
MESH = {"fsdp": 2, "tp": 4}


class InStream(nnx.Module):
    """A block that is not the first: its input has a gradient."""

    def __init__(self, block, rngs):
        self.bias = nnx.Param(jnp.ones(16))
        self.block = block(rngs)

    def __call__(self, x):
        return self.block(x + self.bias[...])


def propose(build):
    return jaxtp.propose_plan(build, X, mesh=MESH, report=None)


def moves(build, plan):
    return bytes_over_tp(build, plan, (X,), jaxtp.make_mesh(**MESH))


in_stream = seeded(partial(InStream, models.LlamaBlock))


def test_a_llama_block_moves_what_is_said():
    proposed = propose(in_stream)
    assert moves(in_stream, proposed) == proposed.bytes == 4 * 2 * 3 / 4 * X.nbytes / 2


@pytest.mark.wide
def test_a_llama_block_moves_no_more_than_by_the_plan_of_the_tutorial():
    plan = {path.replace("layers.*", "block"): style for path, style in models.LLAMA_PLAN.items()}
    by_hand = {path: style for path, style in plan.items() if path.startswith("block")}
    assert propose(in_stream).bytes <= moves(in_stream, by_hand)


@pytest.mark.wide
def test_norms_of_heads_stay_where_the_heads_are():
    """`nnx.MultiHeadAttention` with normalised queries and keys: as by hand, their norms are
    gathered.
    """
    build = seeded(partial(InStream, models.Encoder))
    proposed = propose(build)
    assert proposed["block.attention.query_ln"] == SequenceParallel(2)
    by_hand = {
        path: style for path, style in proposed.items() if not isinstance(style, SequenceParallel)
    }
    moved = moves(build, proposed)
    assert moved <= proposed.bytes
    assert moved < moves(build, by_hand) / 2


def attend(m, x):
    q, k, v = (layer(x).reshape(*x.shape[:2], 4, -1) for layer in (m.q, m.k, m.v))
    weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
    values = jnp.einsum("bnts,bsnh->btnh", weights, v)
    return x + m.o(values.reshape(*x.shape[:2], -1))


def mix_tokens(m, x):
    return x + m.down(nnx.gelu(m.up(x.swapaxes(1, 2)))).swapaxes(1, 2)


def gated(m, x):
    return x + m.down(nnx.silu(m.gate(x)) * m.up(x))


def part(kind, a, b):
    """Returns a function that makes a part of a graph with an input of width `a`."""
    return {
        "linear": net(lambda m, x: nnx.tanh(m.w(x)), w=(a, b)),
        "wide": net(lambda m, x: m.down(nnx.gelu(m.up(x))), up=(a, 3 * b), down=(3 * b, b)),
        "gated": net(gated, up=(a, b), gate=(a, b), down=(b, a)),
        "tokens": net(mix_tokens, up=(8, b), down=(b, 8)),
        "attention": net(attend, q=(a, 16), k=(a, 16), v=(a, 16), o=(16, a)),
        "norm": partial(nnx.LayerNorm, a),
    }[kind]


KINDS = ["attention", "gated", "linear", "norm", "tokens", "wide"]


class Graph(nnx.Module):
    """Parts in a row, each fed by the last or one before it; what comes out has the width of the
    input.
    """

    def __init__(self, parts, rngs):
        widths = [16]
        self.sources = ()
        self.parts = nnx.List()
        for kind, width, source in parts:
            self.sources += (source % len(widths),)
            before = widths[self.sources[-1]]
            self.parts.append(part(kind, before, width)(rngs=rngs))
            widths.append(width if kind in ("linear", "wide") else before)
        self.out = nnx.Linear(widths[-1], 16, rngs=rngs)

    def __call__(self, x):
        seen = [x]
        for source, layers in zip(self.sources, self.parts, strict=True):
            seen.append(layers(seen[source]))
        return self.out(seen[-1])


WIDTHS = st.sampled_from([6, 8, 16, 24, 32])
SOURCES = st.sampled_from([-1, -1, -1, -2])
PARTS = st.lists(st.tuples(st.sampled_from(KINDS), WIDTHS, SOURCES), min_size=1, max_size=5).map(
    tuple
)


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.generate])
@given(PARTS)
def test_plans_of_random_graphs_keep_their_word(parts):
    build = seeded(partial(Graph, parts))
    plan = propose(build)
    assert plan.bytes == sum(reason.bytes for reason in plan.reasons)
    if plan:
        moved = moves(build, plan)
        assert moved <= plan.bytes * (1 + 1e-9)
        if all(width % 4 == 0 for _, width, _ in parts):  # else not every layer can be split alone
            layers = [
                pattern for pattern, style in plan.items() if isinstance(style, Colwise | Rowwise)
            ]
            one_by_one = dict.fromkeys(layers, Colwise(output_layouts=Replicate()))
            assert moved <= moves(build, one_by_one)
        assert_same(train_on((1, 2, 4), build, plan, (X,)), train_alone(build, (X,)))
