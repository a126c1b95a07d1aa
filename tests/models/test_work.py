"""The products of a step, by formula and in the compiled program."""

import dataclasses

import jax
import pytest

import jaxtp
from jaxtp.audit.compiling import compile_with_spmd_text
from jaxtp.audit.hlo import count_flops_in_hlo
from jaxtp.data.loader import abstract_batch
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_sizes
from jaxtp.models.costs import step_costs
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step

B, T = 16, 16
MODEL = jaxtp.ModelConfig(
    vocab_size=61, d_model=32, num_layers=3, num_heads=8, num_kv_heads=2, head_dim=8, d_ff=64, loss_chunk=8
)
SHAPE = {"batch_size": B, "sequence_length": T}


def compiled_flops(config, mesh, accumulation):
    mesh = jaxtp.make_mesh(*mesh)
    plan = plan_state(config, optimizers.build(OptimizerConfig(), 10), mesh)
    step = make_train_step(TrainConfig(train=LoopConfig(accumulation=accumulation)), plan)
    with jax.set_mesh(mesh):
        lowered = step.lower(plan.sharded, abstract_batch(mesh, B, T))
    _, text = compile_with_spmd_text(lowered, {"xla_backend_optimization_level": 0})
    return count_flops_in_hlo(text)


@pytest.mark.parametrize(
    ("mesh", "remat", "accumulation"),
    [
        pytest.param((1, 2, 4), "none", 1, marks=pytest.mark.wide),
        ((1, 1, 8), "save_dots", 2),
        pytest.param((2, 2, 2), "save_gathered", 1, marks=pytest.mark.wide),
        pytest.param((1, 4, 1), "full", 2, marks=pytest.mark.wide),
    ],
    ids=str,
)
def test_flops_are_those_of_the_compiled_program(mesh, remat, accumulation):
    config = dataclasses.replace(MODEL, remat=remat)
    sizes = mesh_sizes(jaxtp.make_mesh(*mesh))
    work = step_costs(config, sizes, **SHAPE, accumulation=accumulation)
    assert work.flops == compiled_flops(config, mesh, accumulation)


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["save_gathered", "none", "full", "save_dots"])
def test_with_adapters_too(remat):
    mesh = (1, 2, 4)
    config = dataclasses.replace(MODEL, remat=remat, lora=LoraConfig(rank=4))
    work = step_costs(config, mesh_sizes(jaxtp.make_mesh(*mesh)), **SHAPE)
    assert work.flops == compiled_flops(config, mesh, 1)


def test_micro_batches_change_no_flops_but_how_often_weights_are_read():
    sizes = {"dp": 1, "fsdp": 2, "tp": 4}
    whole, parts = (step_costs(MODEL, sizes, **SHAPE, accumulation=n) for n in (1, 4))
    assert whole.flops == parts.flops
    assert sum(p.bytes * p.count for p in whole.products) < sum(p.bytes * p.count for p in parts.products)


def test_a_kernel_without_scores_makes_half_of_them_and_moves_none():
    sizes = {"dp": 1, "fsdp": 2, "tp": 4}
    fused = dataclasses.replace(MODEL, attention="cudnn")
    squares, halves = (step_costs(config, sizes, **SHAPE) for config in (MODEL, fused))
    assert squares.scores > halves.scores == 0
    scores = [sum(p.flops for p in work.attention if p.name == "scores") for work in (squares, halves)]
    assert scores[0] == 2 * scores[1]
