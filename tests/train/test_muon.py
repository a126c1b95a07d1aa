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
from jax.sharding import NamedSharding
from numpy.random import default_rng
from small_state import padded_variable
from support import assert_close, swept
from tables import read_table
from variants import small_model, variant, variants

from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_TO_ALL
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_collectives_in_hlo, count_flops_in_hlo
from jaxtp.layers.parameter import padding_of, spec_of, unpad
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import costs_of_step
from jaxtp.train.muon import scale_by_muon
from jaxtp.train.setup import plan_step

FOUR = mesh_shape(fsdp=2, tp=2)
EIGHT = mesh_shape(dp=2, fsdp=2, tp=2)
TP_4 = mesh_shape(tp=4)
TP_8 = mesh_shape(tp=8)
FSDP_4 = mesh_shape(fsdp=4)
TABLES = read_table(__file__)
SHAPES = TABLES["weights"]


def weights():
    random = default_rng(0)
    return {
        name: jnp.asarray(random.standard_normal(row["shape"], np.float32))
        for name, row in SHAPES.items()
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
            name: padded_variable(name, array, SHAPES[name]) for name, array in weights().items()
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


RUN = variant(TrainConfig(model=small_model()), TABLES["run"])


def exchanged(traffic):
    """How often each all-to-all runs, by module, axes and bytes."""
    counts = Counter()
    for one, times in traffic.items():
        if one.kind == ALL_TO_ALL:
            counts[one.module, one.axes, one.group, one.bytes] += times
    return counts


DECLARED = [(FOUR, "plain"), (FSDP_4, "adapters"), (TP_4, "bfloat16")]
VARIANTS = variants(RUN.model, TABLES["variants"])


def traced_and_declared(model, sizes):
    config = replace(RUN, model=model)
    traced = plan_step(config).trace_on(mesh_of(sizes))
    costs = costs_of_step(config, sizes)
    declared = exchanged(costs.traffic)
    assert declared == exchanged(count_collectives(traced.jaxpr, sizes))
    return traced, costs, declared


@swept("case", DECLARED)
def test_what_it_moves_and_computes_is_what_is_declared(case):
    sizes, kind = case
    traced, costs, declared = traced_and_declared(VARIANTS[kind], sizes)
    _, text = compile_with_spmd_text(traced.lower(), {"xla_backend_optimization_level": 0})
    assert declared == exchanged(count_collectives_in_hlo(text, sizes))
    dealt = sum(times for (module, *_), times in declared.items() if module.endswith("muon"))
    assert kind == "adapters" or dealt == 6  # of q and out, of k and v, of the MLP; and back
    assert count_flops_in_hlo(text) == costs.flops


@swept("sizes", [TP_4, TP_8, FOUR, mesh_shape(dp=2)])
def test_experts_are_dealt_out_as_declared(sizes):
    """Six of them: whole ones over tp 2, and a part of each over tp 4 and 8."""
    _, _, declared = traced_and_declared(replace(RUN.model, num_experts=6, d_ff=24), sizes)
    assert any(module.endswith("muon") for module, *_ in declared) or sizes == mesh_shape(dp=2)
