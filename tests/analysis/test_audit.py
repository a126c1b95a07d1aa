"""The audit: a clean step has no problems, and each kind of problem is found and named."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp.analysis.audit import AuditError, audit, bytes_by_place
from jaxtp.analysis.step_costs import step_costs
from jaxtp.data.loader import abstract_batch
from jaxtp.mesh import mesh_sizes
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import OptimizerConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step

B, T = 8, 16
MODEL = jaxtp.ModelConfig(
    vocab_size=61, d_model=32, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=8, d_ff=64, loss_chunk=8
)
QUICK = {"xla_backend_optimization_level": 0}


@cache
def audited():
    """One step, for many tests."""
    return audit_step("large vocabulary", (1, 2, 4))


def audit_step(name, mesh, **changes):
    model = dataclasses.replace(MODEL, **VARIANTS[name], **changes)
    mesh = jaxtp.make_mesh(*mesh)
    plan = plan_state(model, optimizers.build(OptimizerConfig(), 10), mesh)
    step = make_train_step(TrainConfig(), plan)
    budget = step_costs(model, mesh_sizes(mesh), batch_size=B, sequence_length=T).budget
    return audit(step, plan.sharded, abstract_batch(mesh, B, T), mesh=mesh, budget=budget, compiler_options=QUICK)


VARIANTS = {
    "llama": {},
    "large vocabulary": {"vocab_size": 509},  # its embedding exchanges activations over fsdp
    "everything": {
        "tie_embeddings": True,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "qk_norm": "projection",
        "dropout": 0.1,
    },
}


def assert_only_scalars_are_added(found):
    found.check(large=8)  # bytes: counters apart, everything declares how it is split
    assert {c.shape for c in found.added} <= {()}
    assert {c.module.split("/")[0] for c in found.added} <= {"grad_norm", "param_norm", "optimizer"}


def test_the_compiler_adds_nothing_but_scalars():
    assert_only_scalars_are_added(audited())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mesh", "split"),
    [
        ("llama", (1, 1, 8), True),
        ("llama", (2, 2, 2), False),
        ("large vocabulary", (2, 4, 1), False),
        ("large vocabulary", (2, 2, 2), True),
        ("everything", (1, 2, 4), True),
        ("everything", (1, 1, 8), False),
    ],
    ids=str,
)
def test_the_compiler_adds_nothing_but_scalars_to_other_steps(name, mesh, split):
    assert_only_scalars_are_added(audit_step(name, mesh, sequence_parallel=split))


def test_the_text_says_what_the_jaxpr_says():
    found = audited()
    written, realised = bytes_by_place(found.written), bytes_by_place(found.realised - found.added)
    assert realised == pytest.approx(written)
    assert {"all-to-all", "all-gather", "reduce-scatter", "all-reduce"} <= {c.kind for c in found.realised}


def test_the_tables_name_everything():
    found = audited()
    text = str(found)
    assert all(holding.name in text for holding in found.holdings)
    kernel = next(h for h in found.holdings if h.name == "model.blocks.mlp.down.kernel")
    assert (kernel.shape, kernel.shard, kernel.bytes_per_device) == ((2, 64, 32), (2, 16, 16), 2 * 16 * 16 * 4)
    assert "P(None, 'tp', ('fsdp', 'cp'))" in text
    assert "mlp/row_parallel_linear" in text
    assert "the compiler" in text


class Dense(nnx.Module):
    """A layer that somebody wrote for one device."""

    def __init__(self):
        self.kernel = nnx.Param(jnp.ones((64, 64)))

    def __call__(self, x):
        return x @ self.kernel[...]


def dense_state(mesh, spec, held_as):
    """An abstract `Dense` that declares `spec` and is held as `held_as`."""
    graph, state = nnx.split(nnx.eval_shape(Dense))
    if spec is not None:
        state["kernel"].set_metadata(out_sharding=tuple(spec))
    sharding = NamedSharding(mesh, held_as)
    return graph, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), state)


def audit_dense(spec, *, held_as=P(), out_shardings=None):
    """A step of plain Flax: forward, gradient, update."""
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    graph, state = dense_state(mesh, spec, held_as)

    def step(state, x):
        loss = lambda state: (nnx.merge(graph, state)(x) ** 2).sum()
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    shardings = None if out_shardings is None else jax.tree.map(lambda _: NamedSharding(mesh, out_shardings), state)
    x = jax.ShapeDtypeStruct((B, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    return audit(jax.jit(step, out_shardings=shardings), state, x, mesh=mesh, compiler_options=QUICK)


def test_a_parameter_that_declares_nothing():
    (problem,) = [p for p in audit_dense(None).problems(large=1024) if "replicated" in p]
    assert problem.startswith("kernel 64x64 is replicated over fsdp and tp, each device holds 16,384 of its")
    assert problem.endswith("16,384 bytes: no spec declared")
    assert not [p for p in audit_dense(None).problems() if "replicated" in p], "under a mebibyte"


def test_a_declaration_that_was_not_kept():
    found = audit_dense(P("fsdp", "tp"), out_shardings=P("fsdp"))
    (problem,) = [p for p in found.problems(large=1024) if "replicated" in p]
    assert "replicated over tp" in problem
    assert "P('fsdp', 'tp'), which the compiler did not keep" in problem


def test_replication_that_is_declared():
    assert not [p for p in audit_dense(P(None, "tp"), out_shardings=P(None, "tp")).problems(0) if "replicated" in p]


def test_collectives_that_nobody_asked_for():
    found = audit_dense(P("fsdp", "tp"), held_as=P("fsdp", "tp"))
    unasked = [p for p in found.problems() if "no module asked for it" in p]
    assert any("over tp" in p or "over fsdp" in p for p in unasked)
    with pytest.raises(AuditError, match="no module asked for it"):
        found.check()


def test_a_written_gather_of_a_weight_over_tp():
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    _, state = dense_state(mesh, P("fsdp", "tp"), P("fsdp", "tp"))

    def step(state):
        gather = lambda w: jax.lax.all_gather(w, "tp", axis=1, tiled=True)
        return jax.shard_map(gather, in_specs=P("fsdp", "tp"), out_specs=P("fsdp", "tp"))(state["kernel"][...])

    found = audit(jax.jit(step), state, mesh=mesh, compiler_options=QUICK)
    assert any("a weight moves (it has the shape of kernel)" in p for p in found.problems())


def test_a_gather_in_a_loop_that_data_end_is_reported_until_it_is_allowed():
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    _, state = dense_state(mesh, P("fsdp", "tp"), P("fsdp", "tp"))
    x = jax.ShapeDtypeStruct((B, 64), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))

    def step(state, x):
        with jax.named_scope("settle"):
            return jax.lax.while_loop(lambda x: x.sum() > 0.0, lambda x: x @ state["kernel"][...] - 1, x)

    found = audit(jax.jit(step), state, x, mesh=mesh, compiler_options=QUICK)
    gathers = [p for p in found.problems() if "all-gather of float32" in p]
    assert any("over fsdp" in p and "the compiler added it" in p for p in gathers)
    unknown = [p for p in found.problems() if "that may turn any number of times" in p]
    assert any("over fsdp" in p for p in unknown)
    assert all('uncounted=("settle",) allows it' in p for p in unknown)
    assert "1 a turn" in str(found)
    allowed = dataclasses.replace(found, uncounted=("settle",)).problems()
    assert allowed == [p for p in found.problems() if p not in unknown]


def test_over_budget():
    found = dataclasses.replace(audited(), budget={})
    problems = found.problems()
    assert any("mlp/row_parallel_linear sends" in p and "over tp; its budget is 0" in p for p in problems)


def test_without_a_budget_what_is_written_was_asked_for():
    assert dataclasses.replace(audited(), budget=None).problems() == []


def test_any_pytree_of_arrays_and_keys_is_a_state():
    mesh = jaxtp.make_mesh(tp=4)
    arrays = {"w": jnp.ones((8, 8)), "moments": (jnp.ones((8, 8)), jnp.zeros(())), "key": jax.random.key(0)}
    found = audit(jax.jit(lambda state: state), arrays, mesh=mesh, compiler_options=QUICK)
    assert {h.name: h.declared for h in found.holdings} == dict.fromkeys(("w", "moments.0", "moments.1", "key"))
    sizes = {"w": 256, "moments.0": 256, "moments.1": 4, "key": arrays["key"].dtype.itemsize}
    assert {h.name: h.bytes for h in found.holdings} == sizes
    assert "key" in str(found)


@pytest.mark.parametrize(
    ("step", "state"), [(lambda state: state, {"w": 1.0}), (jax.jit(lambda state: state), {}), (jax.jit(abs), Dense())]
)
def test_what_cannot_be_audited_is_said(step, state):
    with pytest.raises(TypeError, match=r"nnx\.split"):
        audit(step, state, mesh=jaxtp.make_mesh(tp=2))
