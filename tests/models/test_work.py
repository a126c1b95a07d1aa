"""The products of a step, by formula and in the compiled program."""

import dataclasses

import pytest
from accounts import B, T, compiled_flops
from support import sizes_of, sweep_of

import jaxtp
from jaxtp.analysis.step_costs import step_costs
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape, mesh_sizes

MODEL = jaxtp.ModelConfig(
    vocab_size=61, d_model=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8, d_ff=64, loss_chunk=8
)
PIECES = {
    "attention_gate": True,
    "attention_sinks": True,
    "qk_norm": "heads",
    "rotary_fraction": 0.5,
    "pattern": ({"value_is_key": True, "value_norm": True}, {}),
}
SHAPE = {"batch_size": B, "sequence_length": T}


@pytest.mark.parametrize(
    ("mesh", "remat", "accumulation", "attention"),
    [
        pytest.param((1, 2, 4), "none", 1, "xla", marks=pytest.mark.wide),
        pytest.param((1, 1, 8), "save_dots", 2, "xla", marks=pytest.mark.wide),
        pytest.param((1, 1, 8), "save_dots", 2, "blockwise", marks=pytest.mark.wide),
        pytest.param((2, 2, 2), "save_gathered", 1, "xla", marks=pytest.mark.wide),
        pytest.param((1, 4, 1), "full", 2, "xla", marks=pytest.mark.wide),
        pytest.param((1, 4, 1), "full", 2, "blockwise", marks=pytest.mark.wide),
        pytest.param((1, 2, 4), "none", 1, "blockwise", marks=pytest.mark.wide),
    ],
    ids=str,
)
@pytest.mark.parametrize("overlap", ["none", pytest.param("ring", marks=pytest.mark.wide)])
def test_flops_are_those_of_the_compiled_program(mesh, remat, accumulation, attention, overlap):
    config = dataclasses.replace(MODEL, remat=remat, attention=attention, sliding_window=9, overlap=overlap, **PIECES)
    sizes = mesh_sizes(jaxtp.make_mesh(*mesh))
    work = step_costs(config, sizes, **SHAPE, accumulation=accumulation)
    assert work.flops == compiled_flops(config, mesh, accumulation)


DELTA = {"delta_value_heads": 8, "delta_key_heads": 4, "delta_key_dim": 8, "delta_value_dim": 6}
HYBRID = dataclasses.replace(MODEL, attention="xla", pattern=(DELTA, {}))


@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(1, 2, 4), (1, 1, 8), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("remat", ["none", "save_dots", "full"])
@pytest.mark.parametrize("rank", [0, 4])
def test_flops_of_gated_delta_net_are_those_of_the_compiled_program(mesh, remat, rank):
    config = dataclasses.replace(HYBRID, remat=remat, lora=LoraConfig(rank=rank))
    assert step_costs(config, sizes_of(mesh), **SHAPE).flops == compiled_flops(config, mesh, 1)


@pytest.mark.wide
def test_tp_divides_the_products_of_gated_delta_net():
    config = dataclasses.replace(HYBRID, vocab_size=64, num_kv_heads=8)
    whole = compiled_flops(config, (1, 1, 1), 1)
    assert [whole / compiled_flops(config, (1, 1, tp), 1) for tp in (2, 4)] == [2, 4]  # two of 8 share a key head


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["save_gathered", "save_reduced", "none", "full", "save_dots"])
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("placement", ["before", "parallel"])
def test_with_adapters_or_parallel_branches_too(remat, rank, placement):
    mesh, head = (1, 2, 4), {"head_bias": True, "logit_scale": 0.5}
    config = dataclasses.replace(MODEL, remat=remat, lora=LoraConfig(rank=rank), norm_placement=placement, **head)
    work = step_costs(config, mesh_sizes(jaxtp.make_mesh(*mesh)), **SHAPE)
    assert work.flops == compiled_flops(config, mesh, 1)


@pytest.mark.parametrize(
    ("remat", "rank", "overlap"),
    sweep_of([["none", "save_dots", "full"], [0, 4], ["none", "ring"]]),
)
def test_float8_changes_the_dtype_of_products_and_not_their_flops(remat, rank, overlap):
    mesh, precision = (1, 2, 4), jaxtp.Precision(compute="bfloat16", matmul="float8", matmul_least=16)
    config = dataclasses.replace(MODEL, remat=remat, lora=LoraConfig(rank=rank), overlap=overlap, precision=precision)
    costs = step_costs(config, sizes_of(mesh), **SHAPE)
    assert costs.flops == compiled_flops(config, mesh, 1)
    in_float8 = [each for each in costs.products if each.dtype == "float8"]
    names = {each.name for each in in_float8}
    gradients = sum(each.flops for each in costs.products if each.name in names and not each.dtype)  # of weights
    assert names == {"q, k, v", "attention out", "gate, up", "down"}
    assert (gradients == 0) == bool(rank)
    assert 2 * gradients <= sum(each.flops for each in in_float8)


EXPERTS = dataclasses.replace(MODEL, attention="xla", num_experts=4, experts_per_token=2)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    sweep_of(
        [
            [(1, 2, 4), (1, 1, 8), (2, 2, 2)],
            [
                {"remat": "none"},
                {"remat": "save_dots"},
                {"remat": "save_gathered"},
                {"remat": "save_reduced", "norm_placement": "after"},
                {"remat": "full", "sequence_parallel": False},
                {"remat": "full", "shared_experts": 10, "shared_experts_gate": True, "router_scores": "sigmoid"},
                {"remat": "save_dots", "shared_experts": 32, "mlp": "plain", "sequence_parallel": False},
                {"remat": "save_gathered", "norm_placement": "parallel_two"},
                {"remat": "none", "experts_bias": True, "swiglu_limit": 7.0},
                {"remat": "full", "experts_bias": True, "norm_placement": "after"},
                {"remat": "full", "lora": LoraConfig(rank=4), "shared_experts": 8},
                {"remat": "save_dots", "lora": LoraConfig(rank=4), "experts_bias": True},
            ],
        ],
    ),
    ids=str,
)
def test_flops_of_experts_over_tp_and_inside_are_those_of_the_compiled_program(mesh, changes):
    """XLA's products on a CPU are of all places with all experts of a device: 4 over tp 8 are inside."""
    config = dataclasses.replace(EXPERTS, **changes)
    work = step_costs(config, sizes_of(mesh), **SHAPE)
    assert work.flops == compiled_flops(config, mesh, 1)


@pytest.mark.parametrize("mesh", [(1, 2, 4), (1, 1, 8)], ids=str)
def test_a_kernel_computes_what_the_tokens_chose_alone(mesh):
    """As many rows as a device has tokens to a tp, times k; dense products have a row for each place and expert."""
    sizes = sizes_of(mesh)
    own, dense = (
        {p.name: p for p in step_costs(EXPERTS, sizes, **SHAPE, platform=platform).products if "experts" in p.name}
        for platform in ("cuda", "cpu")
    )
    tokens, tp, k = B * T // (mesh[0] * mesh[1]), mesh[2], EXPERTS.experts_per_token
    width = EXPERTS.d_ff // (1 if EXPERTS.num_experts % tp == 0 else tp)
    rows = tokens * k // (tp if EXPERTS.num_experts % tp == 0 else 1)
    assert {(p.m, p.k, p.n) for p in own.values()} == {(rows, 32, 2 * width), (rows, width, 32)}
    assert all(dense[name].flops == EXPERTS.num_experts * one.flops for name, one in own.items())
    assert all(p.counted * p.flops == own[name].flops for name, p in dense.items())
    xla = dataclasses.replace(EXPERTS, grouped="xla")
    assert step_costs(xla, sizes, **SHAPE, platform="cuda").products == tuple(
        p for p in step_costs(EXPERTS, sizes, **SHAPE, platform="rocm").products
    )


def test_micro_batches_change_no_flops_but_how_often_weights_are_read():
    sizes = mesh_shape(fsdp=2, tp=4)
    whole, parts = (step_costs(MODEL, sizes, **SHAPE, accumulation=n) for n in (1, 4))
    assert whole.flops == parts.flops
    assert sum(p.bytes * p.count for p in whole.products) < sum(p.bytes * p.count for p in parts.products)


def attention_flops(name, **changes):
    work = step_costs(dataclasses.replace(MODEL, **changes), mesh_shape(fsdp=2, tp=4), **SHAPE)
    return sum(p.flops for p in work.attention if p.name == name), work.scores


def test_a_kernel_without_scores_makes_half_of_them_and_moves_none():
    """But makes them again in its backward pass: they are made five times, values weighted four, with remat."""
    for name, times in (("scores", 5 / 4), ("weighted values", 1)):
        squares, through = attention_flops(name, attention="xla")
        halves, nothing = attention_flops(name, attention="fused")
        assert halves == squares * times / 2
        assert through > nothing == 0
    kept, _ = attention_flops("weighted values", attention="fused", remat="save_dots")
    assert kept == 3 / 4 * halves, "its result is kept"
