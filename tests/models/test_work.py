"""The products of a step: by formula, in the compiled program, and by kernels that a CPU does not
have."""

from dataclasses import replace

import pytest
from accounts import B, T, compiled_flops
from support import sizes_of, swept
from tables import read_table
from variants import variant

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.mesh import mesh_shape

TABLE = read_table(__file__)
MODEL = variant(jaxtp.ModelConfig(), TABLE["base"])
SHAPE = {"batch_size": B, "sequence_length": T}
COMPILED = TABLE["compiled"]


@swept("name", COMPILED)
def test_flops_are_those_of_the_compiled_program(name):
    row = COMPILED[name]
    config = variant(MODEL, row["model"])
    accumulation = row.get("accumulation", 1)
    work = step_costs(config, sizes_of(row["mesh"]), **SHAPE, accumulation=accumulation)
    assert work.flops == compiled_flops(config, row["mesh"], accumulation)


@pytest.mark.wide
def test_tp_divides_the_products_of_gated_delta_net():
    """Also where two of 8 devices share a key head."""
    config = variant(MODEL, {"vocab_size": 64, "num_kv_heads": 8, **TABLE[".hybrid"]})
    whole, *parts = (step_costs(config, mesh_shape(tp=tp), **SHAPE).flops for tp in (1, 2, 4))
    assert [whole / part for part in parts] == [2, 4]


@pytest.mark.parametrize("rank", [0, 4])
def test_products_of_layers_and_of_their_inputs_gradients_are_in_float8(rank):
    costs = step_costs(
        variant(MODEL, {"lora": {"rank": rank}, **TABLE[".float8"]}),
        mesh_shape(fsdp=2, tp=4),
        **SHAPE,
    )
    in_float8 = [each for each in costs.products if each.dtype == "float8"]
    names = {each.name for each in in_float8}
    of_weights = sum(each.flops for each in costs.products if each.name in names and not each.dtype)
    assert names == {"q, k, v", "attention out", "gate, up", "down"}
    assert (of_weights == 0) == bool(rank)
    assert 2 * of_weights <= sum(each.flops for each in in_float8)


@pytest.mark.parametrize("mesh", [(1, 2, 4), (1, 1, 8)], ids=str)
def test_a_kernel_of_experts_computes_what_the_tokens_chose_alone(mesh):
    """As many rows as a device has tokens to a tp, times k; dense products have a row for each
    place and expert."""
    sizes = sizes_of(mesh)
    config = variant(MODEL, TABLE[".experts"])
    own, dense = (
        {
            p.name: p
            for p in step_costs(config, sizes, **SHAPE, platform=platform).products
            if "experts" in p.name
        }
        for platform in ("cuda", "cpu")
    )
    dp, fsdp, tp = mesh
    tokens = B * T // (dp * fsdp)
    k = config.experts_per_token
    divided_by = tp if config.num_experts % tp else 1
    rows = tokens * k * divided_by // tp
    width = config.d_ff // divided_by
    assert {(p.m, p.k, p.n) for p in own.values()} == {(rows, 32, 2 * width), (rows, width, 32)}
    assert all(dense[name].flops == config.num_experts * one.flops for name, one in own.items())
    assert all(p.counted * p.flops == own[name].flops for name, p in dense.items())
    xla = step_costs(replace(config, grouped="xla"), sizes, **SHAPE, platform="cuda")
    assert xla.products == step_costs(config, sizes, **SHAPE, platform="rocm").products


def test_micro_batches_change_no_flops_but_how_often_weights_are_read():
    whole, parts = (
        step_costs(MODEL, mesh_shape(fsdp=2, tp=4), **SHAPE, accumulation=n) for n in (1, 4)
    )
    assert whole.flops == parts.flops
    assert sum(p.bytes * p.count for p in whole.products) < sum(
        p.bytes * p.count for p in parts.products
    )


def test_a_kernel_without_scores_makes_half_of_them_and_moves_none():
    """But makes them again in its backward pass: they are made five times, values weighted four,
    with remat."""

    def attention(name, **changes):
        work = step_costs(replace(MODEL, **changes), mesh_shape(fsdp=2, tp=4), **SHAPE)
        return sum(p.flops for p in work.attention if p.name == name), work.scores

    for name, times in (("scores", 5 / 4), ("weighted values", 1)):
        squares, through = attention(name, attention="xla")
        halves, nothing = attention(name, attention="fused")
        assert halves == squares * times / 2
        assert through > nothing == 0
    kept, _ = attention("weighted values", attention="fused", remat="save_dots")
    assert kept == 3 / 4 * halves, "its result is kept"
