"""Random models, random plans, several meshes: the same numbers, and never a silent replication."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax_models import D, F, H, N, T
from flax_parity import in_float64
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import jaxtp
from jaxtp import Colwise, PrepareInput, PrepareOutput, Replicate, Rowwise, SequenceParallel, Shard

B = 8
MESHES = [(1, 1, 4), (1, 2, 4), (2, 2, 2), (2, 1, 4), (1, 1, 8), (1, 4, 2)]
X = np.random.default_rng(0).standard_normal((B, T, D))


class Mlp(nnx.Module):
    def __init__(self, rngs, gated):
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.gate = nnx.Linear(D, F, use_bias=False, rngs=rngs) if gated else None
        self.down = nnx.Linear(F, D, rngs=rngs)

    def __call__(self, x):
        gate = 1 if self.gate is None else self.gate(x)
        return self.down(nnx.tanh(self.up(x)) * gate)


class Attention(nnx.Module):
    def __init__(self, rngs, general):
        self.general = general
        wide = (N, H) if general else (N * H,)
        self.query = nnx.LinearGeneral(D, wide, rngs=rngs)
        self.key = nnx.LinearGeneral(D, wide, rngs=rngs)
        self.value = nnx.Linear(D, N * H, rngs=rngs)
        self.out = nnx.LinearGeneral(wide, D, axis=(-2, -1) if general else -1, rngs=rngs)

    def __call__(self, x):
        q, k, v = (layer(x).reshape(*x.shape[:2], N, H) for layer in (self.query, self.key, self.value))
        # Jax.nn.dot_product_attention rounds to float32
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        y = jnp.einsum("bnts,bsnh->btnh", weights, v)
        return self.out(y if self.general else y.reshape(*x.shape[:2], N * H))


class Graph(nnx.Module):
    """Branches from earlier results, some normalised, added to the stream or put in its place."""

    def __init__(self, kinds, rngs):
        self.kinds = kinds
        make = {"mlp": Mlp, "attention": Attention}
        self.parts = nnx.List([make[kind](rngs, flag) for kind, flag, _, _ in kinds])
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in kinds])

    def __call__(self, x):
        seen = [x]
        for part, norm, (_, _, source, residual) in zip(self.parts, self.norms, self.kinds, strict=True):
            y = part(norm(seen[source % len(seen)]))
            seen.append(seen[-1] + y if residual else y)
        return seen[-1]


KINDS = st.lists(
    st.tuples(st.sampled_from(["mlp", "attention"]), st.booleans(), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=2,
).map(tuple)
OUTSIDE = st.sampled_from([Replicate(), Shard(1), Shard(-1)])
COLUMN = st.builds(Colwise, OUTSIDE, st.sampled_from([None, Replicate(), Shard(1)]))
ROW = st.builds(Rowwise, st.sampled_from([None, Replicate()]), OUTSIDE)
LINEAR = st.one_of(st.none(), COLUMN, ROW, st.just(Replicate()))
PART = st.one_of(st.none(), st.builds(PrepareInput, OUTSIDE, OUTSIDE))
STYLES = {
    nnx.Linear: LINEAR,
    nnx.LinearGeneral: LINEAR,
    nnx.LayerNorm: st.one_of(
        st.none(),
        st.builds(SequenceParallel, st.just(1), st.sampled_from([None, Replicate()])),
        st.builds(PrepareOutput, st.none(), OUTSIDE),
    ),
    Mlp: PART,
    Attention: PART,
}


@st.composite
def models_and_plans(draw):
    kinds = draw(KINDS)
    plan = {}
    for path, module in nnx.iter_modules(Graph(kinds, nnx.Rngs(0))):
        name = ".".join(map(str, path))
        style = draw(STYLES.get(type(module), st.none()))
        if style is not None:
            plan[name] = style
    return kinds, plan


def gradients(model):
    """Output, and gradients of a random linear function of it, of parameters and input."""
    graph, state = nnx.split(model)

    def loss(state, x):
        y = nnx.merge(graph, state)(x)
        return jnp.mean(jnp.asarray(y) * jax.random.normal(jax.random.key(1), y.shape)), jnp.asarray(y)

    (_, y), found = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, X)
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves((y, found))]


def check(kinds, plan, mesh):
    build = lambda: in_float64(Graph(kinds, nnx.Rngs(0)))
    with jax.enable_x64(True):
        expected = gradients(build())
        with jax.set_mesh(jaxtp.make_mesh(*mesh)):
            model = jaxtp.parallelize(build, plan)
            actual = gradients(model)
    floor = 1e-3 * max(np.linalg.norm(x) for x in expected[1:])
    for one, other in zip(actual, expected, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * max(np.linalg.norm(other), floor)
    for path, module in nnx.iter_modules(model):
        if isinstance(plan.get(".".join(map(str, path))), Colwise | Rowwise):
            kernel = module.kernel[...]
            assert kernel.addressable_shards[0].data.size * mesh[1] * mesh[2] == kernel.size


@settings(max_examples=1, derandomize=True, phases=[Phase.generate])
@given(models_and_plans(), st.sampled_from(MESHES))
def test_a_valid_plan_keeps_the_numbers(model_and_plan, mesh):
    check(*model_and_plan, mesh)


@pytest.mark.wide
@settings(max_examples=10, derandomize=True, phases=[Phase.generate])
@given(models_and_plans(), st.sampled_from(MESHES))
def test_many_valid_plans_keep_the_numbers(model_and_plan, mesh):
    check(*model_and_plan, mesh)
