"""Muon by ownership: equal to whole matrices on one device, and what it moves, computes and
holds as declared.
"""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from numpy.random import default_rng
from support import assert_close, swept
from variants import small_model

import jaxtp
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_TO_ALL
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_collectives_in_hlo, count_flops_in_hlo
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import PaddedDim, padding_of, parameter, spec_of, unpad
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.memory import costs_of_step
from jaxtp.train.muon import scale_by_muon
from jaxtp.train.setup import plan_step

FOUR = mesh_shape(fsdp=2, tp=2)
EIGHT = mesh_shape(dp=2, fsdp=2, tp=2)
TP_4 = mesh_shape(tp=4)
TP_8 = mesh_shape(tp=8)
FSDP_4 = mesh_shape(fsdp=4)
QUERIES = PaddedHeads((3, 3, 4), 4)
HIDDEN = PaddedDim((22,))
COLUMNS = PartitionSpec(None, "fsdp", "tp")
ROWS = PartitionSpec(None, "tp", "fsdp")
SHAPES = {
    "query": ((3, 16, 36), COLUMNS, ((-1, QUERIES),)),  # 9 heads of 4
    "out": ((3, 36, 16), ROWS, ((-2, QUERIES),)),
    "gate": ((3, 16, 22), COLUMNS, ((-1, HIDDEN),)),
    "down": ((2, 22, 16), ROWS, ((-2, HIDDEN),)),
    "lora_a": ((5, 16, 3), PartitionSpec(None, "fsdp"), ()),
    "lora_b": ((5, 3, 36), PartitionSpec(None, None, "tp"), ((-1, QUERIES),)),
    "table": ((24, 16), PartitionSpec(None, "fsdp"), ()),  # the only one of its kind
    "whole": ((2, 3, 5), PartitionSpec(), ()),
    "experts": ((2, 8, 16, 12), PartitionSpec(None, "tp", "fsdp"), ()),
    "experts' down": ((2, 8, 12, 16), PartitionSpec(None, "tp", None, "fsdp"), ()),
    # of their shape, and not split over tp
    "beside them": ((3, 16, 12), PartitionSpec(None, "fsdp"), ()),
    "experts inside": ((1, 3, 16, 24), PartitionSpec(None, None, "fsdp", "tp"), ()),
}
"""Weights without padding: 3 + 3 and 3 + 2 matrices are dealt out together, and mostly do not go
into the devices.
"""


def weights():
    random = default_rng(0)
    return {
        name: jnp.asarray(random.standard_normal(shape, np.float32))
        for name, (shape, *_) in SHAPES.items()
    }


def two_updates(rule, gradients, **variables):
    """The last of two updates, of other gradients each, and the state after it; padding stays
    zero.
    """
    state = rule.init(gradients)
    _, state = rule.update(gradients, state, **variables)
    return rule.update(jax.tree.map(jnp.sin, gradients), state, **variables)


@pytest.fixture(scope="module")
def expected():
    """Optax's own, of whole matrices."""

    def matrices(tree):
        return jax.tree.map(
            lambda u: optax.contrib.MuonDimensionNumbers(u.ndim - 2, u.ndim - 1), tree
        )

    rule = optax.contrib.scale_by_muon(beta=0.9, weight_dimension_numbers=matrices)
    updates, state = jax.jit(lambda gradients: two_updates(rule, gradients))(weights())
    return {
        name: update * 0.2 * max(update.shape[-2:]) ** 0.5 for name, update in updates.items()
    }, state.mu


@swept("sizes", [TP_4, EIGHT, FSDP_4])
def test_matrices_that_are_dealt_out_are_orthogonalised_whole(expected, sizes):
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh):
        variables = {
            name: parameter(name, w, SHAPES[name][1], padding=SHAPES[name][2])
            for name, w in weights().items()
        }
        update = jax.jit(
            lambda gradients: two_updates(scale_by_muon(0.9), gradients, variables=variables)
        )
        updates, state = update({name: variable[...] for name, variable in variables.items()})
    for name, variable in variables.items():
        assert updates[name].sharding.is_equivalent_to(
            NamedSharding(mesh, spec_of(variable)), updates[name].ndim
        ), name
    for arrays, those, tolerance in zip((updates, state.mu), expected, (1e-5, 1e-6), strict=True):
        whole = {
            name: unpad(np.asarray(arrays[name]), padding_of(v), sizes["tp"])
            for name, v in variables.items()
        }
        assert_close(whole, those, tolerance)


# over tp 2 and 4 heads and d_ff are padded, and three layers never go into the devices
MODEL = small_model(
    num_layers=3, num_heads=9, num_kv_heads=3, head_dim=8, d_ff=26, rope_theta=2.0, loss_chunk=8
)
RUN = TrainConfig(
    model=MODEL,
    data=DataConfig(sequence_length=8, global_batch_size=8),
    optimizer=OptimizerConfig(name="muon", learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10),
)


def exchanged(traffic):
    """How often each all-to-all runs, by module, axes and bytes."""
    counts = Counter()
    for one, times in traffic.items():
        if one.kind == ALL_TO_ALL:
            counts[one.module, one.axes, one.group, one.bytes] += times
    return counts


DECLARED = [(FOUR, "plain"), (FSDP_4, "adapters"), (TP_4, "bfloat16")]
VARIANTS = {
    "plain": MODEL,
    "adapters": replace(MODEL, lora=LoraConfig(rank=3)),
    "bfloat16": replace(MODEL, precision=jaxtp.Precision(param="bfloat16")),
}


def traced_and_declared(model, sizes):
    config = replace(RUN, model=model)
    traced = plan_step(config).trace_on(mesh_of(sizes))
    costs = costs_of_step(config, sizes)
    declared = exchanged(costs.traffic)
    assert declared == exchanged(count_collectives(traced.jaxpr, sizes))
    return traced, costs, declared


@swept("case", DECLARED)
def test_what_it_moves_and_computes_is_what_is_declared(case):
    sizes, variant = case
    traced, costs, declared = traced_and_declared(VARIANTS[variant], sizes)
    _, text = compile_with_spmd_text(traced.lower(), {"xla_backend_optimization_level": 0})
    assert declared == exchanged(count_collectives_in_hlo(text, sizes))
    dealt = sum(times for (module, *_), times in declared.items() if module.endswith("muon"))
    assert variant == "adapters" or dealt == 6  # of q and out, of k and v, of the MLP; and back
    assert count_flops_in_hlo(text) == costs.flops


@swept("sizes", [TP_4, TP_8, FOUR, mesh_shape(dp=2)])
def test_experts_are_dealt_out_as_declared(sizes):
    """Six of them: whole ones over tp 2, and a part of each over tp 4 and 8."""
    _, _, declared = traced_and_declared(replace(MODEL, num_experts=6, d_ff=24), sizes)
    assert any(module.endswith("muon") for module, *_ in declared) or sizes == mesh_shape(dp=2)
