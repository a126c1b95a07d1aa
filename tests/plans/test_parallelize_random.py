"""Random models, random plans, several meshes: the same numbers, and never a silent replication."""

import numpy as np
import pytest
from flax import nnx
from flax_models import Attention, D, FeedForward, General, T
from flax_parity import assert_same, train_alone, train_on
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from numpy.random import default_rng
from support import sizes_of
from tables import read_table

import jaxtp
from jaxtp.mesh import mesh_of
from jaxtp.plans import (
    Colwise,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
)

MESHES = read_table(__file__, "meshes")["random"]
X = default_rng(0).standard_normal((8, T, D))
BRANCHES = (Attention, FeedForward, General)


class Graph(nnx.Module):
    """Branches from earlier results, whose outputs are added to the stream or put in its place."""

    def __init__(self, drawn):
        rngs = nnx.Rngs(0)
        self.drawn = drawn
        self.parts = nnx.List([branch(rngs) for branch, _, _ in drawn])
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in drawn])

    def __call__(self, x):
        seen = [x]
        for part, norm, (_, source, residual) in zip(
            self.parts, self.norms, self.drawn, strict=True
        ):
            y = part(norm(seen[source % len(seen)]))
            seen.append(residual * seen[-1] + y)
        return seen[-1]


GRAPHS = st.lists(
    st.tuples(st.sampled_from(BRANCHES), st.integers(0, 2), st.booleans()), min_size=1, max_size=2
).map(tuple)
OUTSIDE = st.sampled_from([Replicate(), Shard(1), Shard(-1)])
LINEAR = st.one_of(
    st.builds(Colwise, OUTSIDE, st.sampled_from([None, Replicate(), Shard(1)])),
    st.builds(Rowwise, st.sampled_from([None, Replicate()]), OUTSIDE),
    st.just(Replicate()),
)
PART = st.builds(PrepareInput, OUTSIDE, OUTSIDE)
STYLES = dict.fromkeys(BRANCHES, PART) | {
    nnx.Linear: LINEAR,
    nnx.LinearGeneral: LINEAR,
    nnx.LayerNorm: st.one_of(
        st.builds(SequenceParallel, st.just(1), st.sampled_from([None, Replicate()])),
        st.builds(PrepareOutput, st.none(), OUTSIDE),
    ),
}


@st.composite
def graphs_and_plans(draw):
    drawn = draw(GRAPHS)
    plan = {}
    for path, module in nnx.iter_modules(nnx.eval_shape(lambda: Graph(drawn))):
        if type(module) in STYLES and draw(st.booleans()):
            plan[".".join(map(str, path))] = draw(STYLES[type(module)])
    return drawn, plan


@pytest.mark.wide
@settings(max_examples=10, derandomize=True, phases=[Phase.generate])
@given(graphs_and_plans(), st.sampled_from(MESHES))
def test_a_valid_plan_keeps_the_numbers(graph_and_plan, mesh):
    drawn, plan = graph_and_plan
    build = lambda: Graph(drawn)
    assert_same(train_on(mesh, build, plan, [X]), train_alone(build, [X]))
    split = jaxtp.parallelize(nnx.eval_shape(build), plan, mesh=mesh_of(sizes_of(mesh)))
    for path, module in nnx.iter_modules(split):
        if isinstance(plan.get(".".join(map(str, path))), Colwise | Rowwise):
            part = module.kernel.sharding.shard_shape(module.kernel.shape)
            assert np.prod(part) * mesh[1] * mesh[2] == module.kernel.size
