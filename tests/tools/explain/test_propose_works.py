"""A proposal works: `parallelize` takes it, and forward and gradients are those of one device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax_parity import assert_same, train_alone, train_on
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from support import sizes_of, swept, use_mesh
from tools.explain.nets import seeded

import jaxtp
from jaxtp import explain
from jaxtp.mesh import STORAGE, mesh_shape
from jaxtp.plans import Colwise, Rowwise
from jaxtp.plans.layouts import stored_spec
from jaxtp.plans.plan import PlanError, matches, patterns_for

B = 8
T = 4
D = 16
F = 32
V = 64
HEADS = 4
WIDTH = 4
IDS = jax.random.randint(jax.random.key(2), (B, T), 0, V)


def drawn(rngs, shape, spec=None):
    return nnx.Param(0.3 * jax.random.normal(rngs.params(), shape), out_sharding=spec)


class Projection(nnx.Module):
    """An einsum with its own parameter and spec."""

    def __init__(self, equation, shape, spec, rngs):
        self.equation = equation
        self.w = drawn(rngs, shape, spec)

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w[...])


class Scale(nnx.Module):
    def __init__(self, spec):
        self.scale = nnx.Param(jnp.ones(D), out_sharding=spec)

    def __call__(self, x):
        return self.scale[...] * x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


class Table(nnx.Module):
    """Has methods of other names than `__call__`."""

    def __init__(self, spec, rngs):
        self.table = drawn(rngs, (V, D), spec)

    def encode(self, ids):
        return self.table[...][ids]

    def decode(self, x):
        return x @ self.table[...].T


class Declares(nnx.Module):
    """A decoder block whose layers declare specs; its kv heads are two."""

    def __init__(self, rngs, fsdp="fsdp", tp="tp"):
        declared = lambda *spec: nnx.with_partitioning(nnx.initializers.normal(0.3), spec)
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.table = Table((tp, fsdp), rngs)
        self.norm = Scale((tp,))
        self.mlp_norm = Scale((None,))
        self.q = Projection("btd,dnh->btnh", (D, HEADS, WIDTH), P(fsdp, tp, None), rngs)
        self.k = Projection("btd,dnh->btnh", (D, 2, WIDTH), P(fsdp, tp, None), rngs)
        self.v = nnx.Einsum(
            "btd,dnh->btnh", (D, 2, WIDTH), kernel_metadata={"out_sharding": P(fsdp, tp)}, rngs=rngs
        )
        self.o = Projection("btnh,nhd->btd", (HEADS, WIDTH, D), (tp,), rngs)
        self.gate, self.up = (linear(D, F, kernel_init=declared(fsdp, tp)) for _ in range(2))
        self.down = linear(F, D, kernel_init=declared(tp))

    def __call__(self, ids):
        x = self.table.encode(ids)
        y = self.norm(x)
        x = x + self.o(
            jax.nn.dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True)
        )
        y = self.mlp_norm(x)
        return self.table.decode(x + self.down(jax.nn.silu(self.gate(y)) * self.up(y)))


class Pair(nnx.Module):
    def __init__(self, rngs, whole=False):
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)
        # the class is metadata, in place of a dtype
        self.scale = nnx.Param(jnp.ones(D), dtype=jnp.float32)
        self.whole = whole

    def __call__(self, x):
        x = jnp.tanh(self.up(x * self.scale[...]))
        return self.down(jnp.cumsum(x, -1) / F if self.whole else x)


class Pairs(nnx.Module):
    """Layers whose best patterns would overlap: one of four blocks has one head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        first = nnx.List([Pair(rngs, whole=True), Pair(rngs)])
        self.rows = nnx.List([first, nnx.List([Pair(rngs), Pair(rngs)])])

    def __call__(self, ids):
        x = self.embed(ids)
        for pair in (*self.rows[0], *self.rows[1]):
            x = x + pair(x)
        return x


class Experts(nnx.Module):
    """Parameters of its own that no style splits."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.router = nnx.Linear(D, 4, rngs=rngs)
        self.up = drawn(rngs, (4, D, F))
        self.down = drawn(rngs, (4, F, D))

    def __call__(self, ids):
        x = self.embed(ids)
        weight = jax.nn.softmax(self.router(x))
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,bte->btd", h, self.down[...], weight)


def propose(make, mesh, *inputs, **options):
    return jaxtp.propose_plan(make, *(inputs or (IDS,)), mesh=mesh, report=None, **options)


OVER_TP = {"tp": 2}
OVER_FOUR = {"tp": 4}
OVER_BOTH = {"fsdp": 2, "tp": 2}
CASES = {
    "declares": (Declares, (1, 2, 2)),
    "pairs": (Pairs, (1, 2, 2)),
    "experts": (Experts, (1, 1, 2)),
}


@swept("name", CASES)
def test_a_mesh_computes_what_one_device_does(name):
    model, mesh = CASES[name]
    make = seeded(model)

    def without_a_mesh():
        with nnx.use_eager_sharding(False):
            return make()

    plan = propose(make, sizes_of(mesh))
    assert_same(train_on(mesh, make, plan, (IDS,)), train_alone(without_a_mesh, (IDS,)))


declared = seeded(Declares)


def test_declared_specs_stay_and_are_completed():
    mesh = {"fsdp": 2, "tp": 4}
    plan = propose(declared, mesh)
    assert plan["gate"] == plan["up"] == Colwise()
    assert plan["down"] == Rowwise()
    assert "v" not in plan
    rows = explain(declared, plan=plan, mesh=mesh).rows
    found = {}
    for row in rows:
        found |= {f"{row.path}.{parameter.name}": parameter.split for parameter in row.parameters}
    tp = ("tp",)
    none = ()
    assert found == {
        "table.table": (tp, STORAGE),
        "norm.scale": (tp,),
        "mlp_norm.scale": (STORAGE,),
        "q.w": (STORAGE, tp, none),
        "k.w": (STORAGE, none, none),
        "v.kernel": (STORAGE, none, none),
        "o.w": (tp, none, STORAGE),
        "gate.kernel": (STORAGE, tp),
        "up.kernel": (STORAGE, tp),
        "down.kernel": (tp, STORAGE),
    }


@pytest.mark.wide
def test_a_declared_dim_that_tp_does_not_divide_is_noted():
    plan = propose(declared, OVER_FOUR)
    note = "k declares w 16x2x4 as P('fsdp', 'tp', None), which tp 4 does not divide: no split"
    assert note in plan.notes
    assert f"note: {note}" in str(plan)
    assert note in explain(declared, mesh=OVER_FOUR).notes
    assert not propose(declared, OVER_TP).notes
    assert {reason.module: reason.style for reason in plan.reasons}["q"] == "as declared"


def test_a_parameter_of_the_model_itself_is_named():
    model = seeded(partial(Projection, "btd,df->btf", (D, 6), (None, "tp")))
    (note,) = explain(model, mesh=OVER_FOUR).notes
    assert note.startswith("the model itself declares w 16x6 as")


def test_a_dim_that_declares_two_axes_keeps_those_that_divide_it():
    specs = {(6, 8): P("tp", STORAGE), (8, 6): P((*STORAGE, "tp"), None), (7, 8): P(None, STORAGE)}
    for shape, spec in specs.items():
        parameter = nnx.Param(jnp.ones(shape))
        parameter.set_metadata(out_sharding=P(("fsdp", "tp")))
        assert stored_spec(parameter, 2, None, mesh_shape(**OVER_BOTH), fsdp=True) == spec


def test_a_style_that_would_change_a_declared_spec_is_refused():
    message = r"'gate' \(Linear\) cannot be Rowwise: it declares kernel as P\('fsdp', 'tp'\)"
    with pytest.raises(PlanError, match=message):
        explain(declared, plan={"gate": Rowwise()}, mesh=OVER_TP)


def test_other_names_of_axes_are_mapped_or_refused():
    other = seeded(partial(Declares, fsdp="data", tp="model"))
    with pytest.raises(
        PlanError,
        match=r"splits over 'data', 'model': .* axes are dp, fsdp, cp, tp\..*axis_rules\(",
    ):
        propose(other, OVER_BOTH)
    with nnx.logical_axis_rules((("data", "fsdp"), ("model", "tp"))):
        assert propose(other, OVER_BOTH) == propose(declared, OVER_BOTH)


@pytest.mark.parametrize("spec", [P("fsdp", None, "tp"), P("data")])
def test_activations_for_explicit_axes_are_refused(spec):
    class Explicit(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x, out_sharding=spec)

    with pytest.raises(
        PlanError, match=r"activations for a mesh with explicit axes.*configure it without"
    ):
        propose(seeded(partial(Explicit, D, F)), OVER_BOTH, jnp.ones((B, T, D)))


def test_a_model_that_is_split_already_goes_back_to_what_it_declares():
    plan = propose(declared, OVER_TP)
    with use_mesh(**OVER_BOTH):
        model = jaxtp.parallelize(declared, plan)
    for mesh in (OVER_BOTH, OVER_FOUR):
        assert explain(model, mesh=mesh).rows == explain(declared, plan=plan, mesh=mesh).rows


PARTS = st.sampled_from(["a", "b", "0", "1", "*", "?", "["])
PATHS = st.lists(PARTS, min_size=1, max_size=4).map(".".join)


@given(st.dictionaries(PATHS, st.booleans()))
def test_one_pattern_matches_a_path(values):
    patterns = patterns_for(values)
    for path in values:
        matching = {pattern for pattern in patterns.values() if matches(pattern, path)}
        assert matching == {patterns[path]}
        alike = [other for other in values if patterns[path] == patterns[other]]
        assert {values[other] for other in alike} == {values[path]}


def test_flops_that_tp_does_not_divide_are_noted():
    make = seeded(Experts)
    plan = propose(make, OVER_FOUR)
    assert not plan
    (note,) = plan.notes
    assert "tp does not divide 100% of this model's FLOPs" in note
    assert "has its own parameters, down 4x32x16, up 4x16x32" in str(plan)
    assert explain(make, IDS, plan=plan, mesh=OVER_FOUR).notes == (note,)
    assert not explain(make, IDS, plan=plan, mesh={"fsdp": 4}).notes


def by_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_index(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


class Head(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)
        self.head = nnx.Linear(D, 4096, rngs=rngs)
        self.last = nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, ids, key):
        return self.head(self.dropout(self.embed(ids), rngs=nnx.Rngs(key)))


@pytest.mark.wide
@pytest.mark.parametrize("cross_entropy", [by_optax, by_index])
def test_a_head_stays_split_in_a_loss(cross_entropy):
    batch = {
        "ids": np.asarray(IDS),
        "labels": np.asarray(IDS),
        "weights": np.ones((B, T), np.float32),
    }
    given = (seeded(Head), batch, jax.random.key(0))

    def loss(model, batch, key):
        each = cross_entropy(model(batch["ids"], key), batch["labels"])
        return jnp.sum(each * batch["weights"])

    def with_count(*arguments):
        return loss(*arguments), float(B * T)

    def read_by_a_layer(model, *arguments):
        return model.last(loss(model, *arguments)[None, None])[0, 0]

    plan = jaxtp.propose_plan(*given, mesh=OVER_BOTH, report=None, call=loss)
    assert plan["head"] == Colwise()
    found, counted = (
        explain(*given, plan=plan, mesh=OVER_BOTH, call=call) for call in (loss, with_count)
    )
    assert not found.notes
    assert counted.flops == found.flops
    assert "head" not in jaxtp.propose_plan(
        *given, mesh=OVER_BOTH, report=None, call=read_by_a_layer
    )
