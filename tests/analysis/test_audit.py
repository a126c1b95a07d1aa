"""The audit: a clean step has no problems, and each kind of problem is found and named."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import mesh_by_size, swept
from tables import read_table
from variants import small_model

import jaxtp
from jaxtp.analysis.audit import AuditError, audit, bytes_by_place
from jaxtp.analysis.step_costs import step_costs
from jaxtp.data.loader import abstract_batch
from jaxtp.mesh import mesh_sizes
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.parts import step_settings
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step

B = 8
T = 16
MODEL = small_model(d_model=32, num_heads=8, head_dim=8, d_ff=64, loss_chunk=8)
QUICK = {"xla_backend_optimization_level": 0}


VARIANTS = read_table(__file__)


@cache
def audited(name, mesh, split):
    """One step, for many tests; `split`: the sequence is split between layers."""
    model = replace(MODEL, sequence_parallel=split, **VARIANTS[name])
    mesh = mesh_by_size(*mesh)
    plan = plan_state(model, optimizers.build(OptimizerConfig(), 10), mesh)
    step = make_train_step(step_settings(TrainConfig()), plan)
    budget = step_costs(model, mesh_sizes(mesh), batch_size=B, sequence_length=T).budget
    return audit(
        step,
        plan.sharded,
        abstract_batch(mesh, B, T),
        mesh=mesh,
        budget=budget,
        compiler_options=QUICK,
    )


FIRST = ("large vocabulary", (1, 2, 2), True)
STEPS = [
    FIRST,
    ("llama", (1, 1, 8), True),
    ("llama", (2, 2, 2), False),
    ("large vocabulary", (2, 4, 1), False),
    ("large vocabulary", (2, 2, 2), True),
    ("everything", (1, 2, 4), True),
    ("everything", (1, 1, 4), False),
]


@swept("step", STEPS, FIRST)
def test_the_compiler_adds_nothing_but_scalars(step):
    found = audited(*step)
    found.check(large=8)  # bytes: counters apart, everything declares how it is split
    assert {c.shape for c in found.added} <= {()}
    assert {c.module.split("/")[0] for c in found.added} <= {"grad_norm", "param_norm", "optimizer"}


def test_the_text_says_what_the_jaxpr_says():
    found = audited(*FIRST)
    assert bytes_by_place(found.realised - found.added) == pytest.approx(
        bytes_by_place(found.written)
    )
    assert {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"} <= {
        c.kind for c in found.realised
    }


def test_the_tables_name_everything():
    found = audited(*FIRST)
    text = str(found)
    assert all(holding.name in text for holding in found.holdings)
    kernel = next(h for h in found.holdings if h.name == "model.blocks.mlp.down.kernel")
    assert (kernel.shape, kernel.shard, kernel.bytes_per_device) == (
        (1, 64, 32),
        (1, 32, 16),
        32 * 16 * 4,
    )
    assert all(
        word in text
        for word in ("P(None, 'tp', ('fsdp', 'cp'))", "mlp/row_parallel_linear", "the compiler")
    )


class Dense(nnx.Module):
    """A layer that somebody wrote for one device."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((64, 64)))

    def __call__(self, x):
        return x @ self.kernel[...]


def audit_dense(step, spec, *, held_as=None, out=None):
    """Audits a step of an abstract `Dense` that declares `spec`, and is held as `held_as`, else
    as it declares.
    """
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    graph, state = nnx.split(nnx.eval_shape(Dense))
    if spec is not None:
        state["kernel"].set_metadata(out_sharding=tuple(spec))
    held = NamedSharding(mesh, spec if held_as is None else held_as)
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=held), state)
    out_shardings = None if out is None else jax.tree.map(lambda _: NamedSharding(mesh, out), state)
    x = jax.ShapeDtypeStruct((B, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    jitted = jax.jit(partial(step, graph), out_shardings=out_shardings)
    return audit(jitted, state, x, mesh=mesh, compiler_options=QUICK)


def update(graph, state, x):
    """A step of plain Flax: forward, gradient, update."""
    loss = lambda state: (nnx.merge(graph, state)(x) ** 2).sum()
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


def of_replication(found, large):
    return [problem for problem in found.problems(large) if "replicated" in problem]


SPLIT = P("fsdp", "tp")


def test_a_parameter_that_declares_nothing():
    found = audit_dense(update, None, held_as=P())
    (problem,) = of_replication(found, 1024)
    assert problem.startswith(
        "kernel 64x64 is replicated over fsdp and tp, each device holds 16,384 of its"
    )
    assert problem.endswith("16,384 bytes: no spec declared")
    assert not of_replication(found, 2**20)


def test_a_declaration_that_was_not_kept():
    (problem,) = of_replication(audit_dense(update, SPLIT, held_as=P(), out=P("fsdp")), 1024)
    assert "replicated over tp" in problem
    assert "P('fsdp', 'tp'), which the compiler did not keep" in problem


def test_replication_that_is_declared():
    over_tp = P(None, "tp")
    assert not of_replication(audit_dense(update, over_tp, held_as=P(), out=over_tp), 0)


def test_collectives_that_nobody_asked_for():
    with pytest.raises(AuditError, match=r"over (fsdp|tp).*no module asked for it"):
        audit_dense(update, SPLIT).check()


def test_a_written_gather_of_a_weight_over_tp():
    def step(graph, state, x):
        gather = lambda w: jax.lax.all_gather(w, "tp", axis=1, tiled=True)
        return jax.shard_map(gather, in_specs=SPLIT, out_specs=SPLIT)(state["kernel"][...])

    found = audit_dense(step, SPLIT)
    assert any("a weight moves (it has the shape of kernel)" in p for p in found.problems())


def test_a_gather_in_a_loop_that_data_end_is_reported_until_it_is_allowed():
    def step(graph, state, x):
        with jax.named_scope("settle"):
            return jax.lax.while_loop(
                lambda x: x.sum() > 0.0, lambda x: x @ state["kernel"][...] - 1, x
            )

    found = audit_dense(step, SPLIT)
    problems = found.problems()
    assert any(
        "all-gather of float32" in p and "over fsdp" in p and "the compiler added it" in p
        for p in problems
    )
    unknown = [p for p in problems if "whose trip count is unknown" in p]
    assert any("over fsdp" in p for p in unknown)
    assert all('uncounted=("settle",) allows it' in p for p in unknown)
    assert "1 a turn" in str(found)
    allowed = replace(found, uncounted=("settle",)).problems()
    assert allowed == [p for p in problems if p not in unknown]


def test_a_loop_that_only_the_compiler_counts_is_the_program_s():
    def loop(x):
        moved = lambda x: jax.lax.pcast(jax.lax.psum(x, "tp"), "tp", to="varying")
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, moved(c[1])), (0, x))[1]

    run = jax.shard_map(loop, in_specs=SPLIT, out_specs=SPLIT)
    found = audit_dense(lambda graph, state, x: run(state["kernel"][...]), SPLIT)
    assert [(c.counted, times) for c, times in found.written.items()] == [("a turn", 1)]
    assert [(c.counted, times) for c, times in found.realised.items()] == [("", 3)]
    assert not found.added
    (problem,) = replace(found, budget={("", ("tp",)): 1e9}).problems()
    assert "whose trip count is unknown" in problem


def test_a_budget_is_kept_where_there_is_one():
    problems = replace(audited(*FIRST), budget={}).problems()
    assert any(
        "mlp/row_parallel_linear sends" in p and "over tp; its budget is 0" in p for p in problems
    )
    assert replace(audited(*FIRST), budget=None).problems() == []


def test_any_pytree_of_arrays_and_keys_is_a_state():
    arrays = {
        "w": jnp.ones((8, 8)),
        "moments": (jnp.ones((8, 8)), jnp.zeros(())),
        "key": jax.random.key(0),
    }
    found = audit(
        jax.jit(lambda state: state), arrays, mesh=jaxtp.make_mesh(tp=4), compiler_options=QUICK
    )
    assert {h.declared for h in found.holdings} == {None}
    sizes = {"w": 256, "moments.0": 256, "moments.1": 4, "key": arrays["key"].dtype.itemsize}
    assert {h.name: h.bytes for h in found.holdings} == sizes


@pytest.mark.parametrize(
    ("step", "state"),
    [
        (lambda state: state, {"w": 1.0}),
        (jax.jit(lambda state: state), {}),
        (jax.jit(abs), Dense()),
    ],
)
def test_what_cannot_be_audited_is_said(step, state):
    with pytest.raises(TypeError, match=r"nnx\.split"):
        audit(step, state, mesh=jaxtp.make_mesh(tp=2))
