"""A proposal works: `parallelize` takes it, and forward and gradients are those of one device."""

import functools

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
from support import sizes_of

import jaxtp
from jaxtp import Colwise, Rowwise
from jaxtp.mesh import STORAGE, mesh_shape
from jaxtp.parallelize.layouts import stored_spec
from jaxtp.parallelize.plan import PlanError, matches, patterns_for

B = 8
T = 4
D = 16
F = 32
V = 64
HEADS = 4
WIDTH = 4
IDS = jax.random.randint(jax.random.key(2), (B, T), 0, V)


class Projection(nnx.Module):
    """An einsum with its own parameter and spec."""

    def __init__(self, equation, shape, spec, rngs):
        self.equation = equation
        self.w = nnx.Param(0.3 * jax.random.normal(rngs.params(), shape), out_sharding=spec)

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
        self.table = nnx.Param(0.3 * jax.random.normal(rngs.params(), (V, D)), out_sharding=spec)

    def encode(self, ids):
        return self.table[...][ids]

    def decode(self, x):
        return x @ self.table[...].T


class Declares(nnx.Module):
    """A decoder block whose layers declare specs; its kv heads are two."""

    def __init__(self, rngs, fsdp="fsdp", tp="tp"):
        declared = lambda *spec: nnx.with_partitioning(nnx.initializers.normal(0.3), spec)
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.table, self.norm, self.mlp_norm = Table((tp, fsdp), rngs), Scale((tp,)), Scale((None,))
        self.q = Projection("btd,dnh->btnh", (D, HEADS, WIDTH), P(fsdp, tp, None), rngs)
        self.k = Projection("btd,dnh->btnh", (D, 2, WIDTH), P(fsdp, tp, None), rngs)
        self.v = nnx.Einsum("btd,dnh->btnh", (D, 2, WIDTH), kernel_metadata={"out_sharding": P(fsdp, tp)}, rngs=rngs)
        self.o = Projection("btnh,nhd->btd", (HEADS, WIDTH, D), (tp,), rngs)
        self.gate, self.up = (linear(D, F, kernel_init=declared(fsdp, tp)) for _ in range(2))
        self.down = linear(F, D, kernel_init=declared(tp))

    def __call__(self, ids):
        x = self.table.encode(ids)
        y = self.norm(x)
        x = x + self.o(jax.nn.dot_product_attention(self.q(y), self.k(y), self.v(y), is_causal=True))
        y = self.mlp_norm(x)
        return self.table.decode(x + self.down(jax.nn.silu(self.gate(y)) * self.up(y)))


class Pairs(nnx.Module):
    """Layers whose best patterns would overlap: one of four blocks has one head."""

    def __init__(self, rngs):
        row = lambda i: nnx.List([Pair(rngs, whole=(i, j) == (0, 0)) for j in range(2)])
        self.embed, self.rows = nnx.Embed(V, D, rngs=rngs), nnx.List([row(i) for i in range(2)])

    def __call__(self, ids):
        x = self.embed(ids)
        for row in self.rows:
            for pair in row:
                x = x + pair(x)
        return x


class Pair(nnx.Module):
    def __init__(self, rngs, whole):
        self.up, self.down = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(D), dtype=jnp.float32)  # the class is metadata, in place of a dtype
        self.whole = whole

    def __call__(self, x):
        x = jnp.tanh(self.up(x * self.scale[...]))
        return self.down(jnp.cumsum(x, -1) / F if self.whole else x)


class Experts(nnx.Module):
    """Parameters of its own that no style splits."""

    def __init__(self, rngs):
        self.embed, self.router = nnx.Embed(V, D, rngs=rngs), nnx.Linear(D, 4, rngs=rngs)
        self.up, self.down = (
            nnx.Param(0.3 * jax.random.normal(rngs.params(), shape)) for shape in ((4, D, F), (4, F, D))
        )

    def __call__(self, ids):
        x = self.embed(ids)
        weight = jax.nn.softmax(self.router(x))
        h = jax.nn.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        return jnp.einsum("btef,efd,bte->btd", h, self.down[...], weight)


MODELS = {"declares": Declares, "pairs": Pairs, "experts": Experts}


def build(name):
    with nnx.use_eager_sharding(False):  # one device has no mesh
        return MODELS[name](nnx.Rngs(0))


@functools.cache
def alone(name):
    return train_alone(lambda: build(name), (IDS,))


def propose(make, mesh, *inputs, **options):
    return jaxtp.propose_plan(make, *(inputs or (IDS,)), mesh=sizes_of(mesh), report=None, **options)


CASES = [
    ("declares", (1, 2, 2)),
    ("declares", (1, 1, 2)),
    ("pairs", (1, 2, 2)),
    ("pairs", (1, 1, 4)),
    ("experts", (1, 1, 2)),
]


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_a_mesh_computes_what_one_device_does(name, mesh):
    make = lambda: MODELS[name](nnx.Rngs(0))
    assert_same(train_on(mesh, make, propose(make, mesh), (IDS,)), alone(name))


def declares(mesh, **names):
    return propose(lambda: Declares(nnx.Rngs(0), **names), mesh)


def test_declared_specs_stay_and_are_completed():
    plan = declares((1, 2, 4))
    assert {path: plan.get(path) for path in ("gate", "up", "down", "v")} == {
        "gate": Colwise(),
        "up": Colwise(),
        "down": Rowwise(),
        "v": None,
    }
    model = jaxtp.explain(lambda: Declares(nnx.Rngs(0)), plan=plan, mesh={"fsdp": 2, "tp": 4})
    found = {f"{row.path}.{p.name}": p.split for row in model.rows for p in row.parameters}
    tp, none = ("tp",), ()
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


def test_a_declared_dim_that_tp_does_not_divide_is_noted():
    plan = declares((1, 1, 4))
    note = "k declares w 16x2x4 as P('fsdp', 'tp', None), which tp 4 does not divide: no split"
    assert note in plan.notes
    assert f"note: {note}" in str(plan)
    assert note in jaxtp.explain(lambda: Declares(nnx.Rngs(0)), mesh={"tp": 4}).notes
    assert not declares((1, 1, 2)).notes
    assert {reason.module: reason.style for reason in plan.reasons}["q"] == "as declared"


def test_a_parameter_of_the_model_itself_is_named():
    model = lambda: Projection("btd,df->btf", (D, 6), (None, "tp"), nnx.Rngs(0))
    (note,) = jaxtp.explain(model, mesh={"tp": 4}).notes
    assert note.startswith("the model itself declares w 16x6 as")


@pytest.mark.parametrize(
    ("shape", "spec"), [((6, 8), P("tp", STORAGE)), ((8, 6), P((*STORAGE, "tp"), None)), ((7, 8), P(None, STORAGE))]
)
def test_a_dim_that_declares_two_axes_keeps_those_that_divide_it(shape, spec):
    parameter = nnx.Param(jnp.ones(shape))
    parameter.set_metadata(out_sharding=P(("fsdp", "tp")))
    assert stored_spec(parameter, 2, None, mesh_shape(fsdp=2, tp=2), fsdp=True) == spec


def test_a_style_that_would_change_a_declared_spec_is_refused():
    with pytest.raises(
        PlanError, match=r"'gate' \(Linear\) cannot be Rowwise: it declares kernel as P\('fsdp', 'tp'\)"
    ):
        jaxtp.explain(lambda: Declares(nnx.Rngs(0)), plan={"gate": Rowwise()}, mesh={"tp": 2})


def test_other_names_of_axes_are_mapped_or_refused():
    names = {"fsdp": "data", "tp": "model"}
    with pytest.raises(PlanError, match=r"splits over 'data', 'model': .* axes are dp, fsdp, cp, tp\..*axis_rules\("):
        declares((1, 2, 2), **names)
    with nnx.logical_axis_rules((("data", "fsdp"), ("model", "tp"))):
        assert declares((1, 2, 2), **names) == declares((1, 2, 2))


@pytest.mark.parametrize("spec", [P("fsdp", None, "tp"), P("data")])
def test_activations_for_explicit_axes_are_refused(spec):
    class Explicit(nnx.Linear):
        def __call__(self, x):
            return super().__call__(x, out_sharding=spec)

    make = lambda: Explicit(D, F, rngs=nnx.Rngs(0))
    with pytest.raises(PlanError, match=r"activations for a mesh with explicit axes.*configure it without"):
        propose(make, (1, 2, 2), jnp.ones((B, T, D)))


def test_a_model_that_is_split_already_goes_back_to_what_it_declares():
    plan = declares((1, 1, 2))
    make = lambda: Declares(nnx.Rngs(0))
    with jax.set_mesh(jaxtp.make_mesh(fsdp=2, tp=2)):
        model = jaxtp.parallelize(make, plan)
        here = jaxtp.explain(model).rows
    assert here == jaxtp.explain(make, plan=plan, mesh={"fsdp": 2, "tp": 2}).rows
    assert jaxtp.explain(model, mesh={"tp": 4}).rows == jaxtp.explain(make, plan=plan, mesh={"tp": 4}).rows


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
    make = lambda: Experts(nnx.Rngs(0))
    plan = propose(make, (1, 1, 4))
    assert not plan
    (note,) = plan.notes
    assert "tp does not divide 100% of this model's FLOPs" in note
    assert "has its own parameters, down 4x32x16, up 4x16x32" in str(plan)
    assert jaxtp.explain(make, IDS, plan=plan, mesh={"tp": 4}).notes == (note,)
    assert not jaxtp.explain(make, IDS, plan=plan, mesh={"fsdp": 4}).notes
    assert not declares((1, 1, 2)).notes


def by_optax(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_index(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]


class Head(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.dropout = nnx.Embed(V, D, rngs=rngs), nnx.Dropout(0.1)
        self.head, self.last = nnx.Linear(D, 4096, rngs=rngs), nnx.Linear(1, 1, rngs=rngs)

    def __call__(self, ids, key):
        return self.head(self.dropout(self.embed(ids), rngs=nnx.Rngs(key)))


@pytest.mark.parametrize("cross_entropy", [by_optax, by_index])
def test_a_head_stays_split_in_a_loss(cross_entropy):
    batch = {"ids": np.asarray(IDS), "labels": np.asarray(IDS), "weights": np.ones((B, T), np.float32)}

    def loss(model, batch, key):
        each = cross_entropy(model(batch["ids"], key), batch["labels"])
        return jnp.sum(each * batch["weights"]), float(B * T)

    first = lambda *arguments: loss(*arguments)[0]
    read = lambda *arguments: model_reads(loss, *arguments)
    make, inputs = lambda: Head(nnx.Rngs(0)), (batch, jax.random.key(0))
    plan = propose(make, (1, 2, 2), *inputs, call=first)
    assert plan["head"] == Colwise()
    found = jaxtp.explain(make, *inputs, plan=plan, mesh={"fsdp": 2, "tp": 2}, call=first)
    assert not found.notes
    assert "head" not in propose(make, (1, 2, 2), *inputs, call=read), "a layer reads a sum over the logits"
    assert jaxtp.explain(make, *inputs, plan=plan, mesh={"fsdp": 2, "tp": 2}, call=loss).flops == found.flops


def model_reads(loss, model, batch, key):
    return model.last(loss(model, batch, key)[0][None, None])[0, 0]
