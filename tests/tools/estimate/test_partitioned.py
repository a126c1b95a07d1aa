"""Tier 1 beside the partitioned program: equal on every mesh, and what nobody planned is called out."""

import dataclasses
import inspect
import math

import jax
import pytest
from hf_reference import FOLDER, TRAINED
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import sweep

import jaxtp
from jaxtp.analysis.hardware import find
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.mesh import AXES, TP, fitting_meshes, mesh_shape
from jaxtp.models import decoder
from jaxtp.tools.estimate import compiler
from jaxtp.tools.estimate.compiler import MAX_DEVICES, compile_partitioned, request_devices
from jaxtp.tools.estimate.search import Target, describe_model, estimate
from jaxtp.train.config import DataConfig, LoopConfig, MeshConfig, OptimizerConfig, TrainConfig

MODEL = jaxtp.ModelConfig(
    vocab_size=61, d_model=32, num_layers=2, num_heads=16, num_kv_heads=4, head_dim=8, d_ff=64, loss_chunk=8
)
CONFIG = TrainConfig(model=MODEL, data=DataConfig(sequence_length=32, global_batch_size=32))
EIGHT = [tuple(sizes.values()) for sizes in fitting_meshes(8)]
MESHES = [mesh for mesh in EIGHT if mesh[2] == 1] + [mesh for mesh in EIGHT if mesh[2] > 1][::2]
MESHES += [(1, 1, 1, 16), (2, 1, 1, 8), (1, 4, 1, 4), (1, 2, 2, 2)]
FIRST = ((1, 2, 2, 2),)
VARIETY = [("none", 1, True), ("save_gathered", 2, None), ("save_dots", 1, None), ("full", 2, False)]
"""Remat, micro-batches, sequence-parallel: each mesh takes the next."""


RINGS = dataclasses.replace(MODEL, overlap="ring")
WINDOWED = dataclasses.replace(MODEL, pattern=({"sliding_window": 5}, {}))


def setting(
    mesh,
    remat="full",
    accumulation=1,
    sequence_parallel=None,
    model=MODEL,
    length=32,
    optimizer="adamw",
    context="auto",
):
    sizes = mesh_shape(**dict(zip(AXES, mesh, strict=True)))
    model = dataclasses.replace(model, remat=remat, sequence_parallel=sequence_parallel if sizes[TP] > 1 else None)
    config = dataclasses.replace(
        CONFIG,
        model=model,
        optimizer=OptimizerConfig(name=optimizer),
        data=dataclasses.replace(CONFIG.data, sequence_length=length),
        mesh=MeshConfig(**sizes, context=context),
        train=LoopConfig(accumulation=accumulation),
    )
    hardware = find("h100")
    return estimate(config, Target(hardware, math.prod(mesh), hardware.memory), describe_model(config))


def test_there_are_twelve_meshes():
    assert len(set(MESHES)) >= 12
    assert set(FIRST) <= set(MESHES)


@pytest.mark.parametrize(
    ("mesh", "variety"),
    [
        *(
            pytest.param(mesh, VARIETY[i % len(VARIETY)], marks=() if mesh in FIRST else pytest.mark.wide, id=str(mesh))
            for i, mesh in enumerate(dict.fromkeys(MESHES))
        ),
        pytest.param((2, 2, 1, 2), ("full", 2), id="micro-batches", marks=pytest.mark.wide),
        pytest.param((1, 2, 1, 4), ("save_dots", 2, None, RINGS), id="rings", marks=pytest.mark.wide),
        *(
            pytest.param((2, 1, 2, 2), ("full", 2, None, WINDOWED, 32, "adamw", way), id=way, marks=pytest.mark.wide)
            for way in ("ulysses", "gather")
        ),
    ],
)
def test_tier_1_is_what_the_partitioned_program_moves(mesh, variety):
    found = compile_partitioned(setting(mesh, *variety))
    assert found.realised.keys() == found.planned.keys()
    assert found.realised == pytest.approx(found.planned)
    assert found.equal
    assert not found.problems
    assert not found.warnings


@pytest.mark.wide
def test_of_a_rule_that_exchanges_matrices():
    found = compile_partitioned(setting((2, 1, 2, 2), accumulation=2, optimizer="muon"))
    assert found.realised == pytest.approx(found.planned)
    assert "all-to-all" in {kind for kind, _ in found.planned}
    assert not found.problems


@pytest.mark.parametrize("name", sweep(TRAINED))
def test_of_every_family(name):
    model = dataclasses.replace(jaxtp.read_config(FOLDER / name), loss_chunk=8)
    found = compile_partitioned(setting((1, 2, 1, 4), model=model, length=16))
    assert found.realised == pytest.approx(found.planned)
    assert found.equal
    assert not found.problems


def plant(monkeypatch):
    """Between attention and MLP, the whole batch on every device; returns the line that asks for it."""
    norm = decoder.DecoderBlock.with_routing

    def resharding(self, x_BTD, *rest):
        mesh = jax.sharding.get_abstract_mesh()
        x_BTD = jax.lax.with_sharding_constraint(x_BTD, NamedSharding(mesh, P(None, None, None)))
        return norm(self, x_BTD, *rest)

    monkeypatch.setattr(decoder.DecoderBlock, "with_routing", resharding)
    lines, first = inspect.getsourcelines(resharding)
    return first + next(i for i, line in enumerate(lines) if "with_sharding_constraint" in line)


def test_a_planted_reshard_is_called_out_with_its_line(monkeypatch):
    line = plant(monkeypatch)
    one = setting((1, 2, 1, 4))
    found = compile_partitioned(one)
    assert not found.equal
    unasked = [problem for problem in found.problems if "the compiler added it" in problem]
    assert any(f"test_partitioned.py:{line}" in problem for problem in unasked), found.problems
    assert any("all-gather of float32 32x32x32 (131,072 bytes) over fsdp" in problem for problem in unasked)
    text = "\n".join(found.lines(one))
    assert "does not move what tier 1 says" in text
    assert unasked[0] in text


def test_more_devices_than_a_process_can_have():
    many = dataclasses.replace(setting((1, 1, 1, 8)), target=Target(find("h100"), 2 * MAX_DEVICES, 1.0))
    with pytest.raises(ConfigError, match="at most 1,024 virtual CPU devices"):
        request_devices(many)


def test_only_what_a_cpu_has_is_compiled():
    model = dataclasses.replace(MODEL, attention="cudnn", remat="offload")
    config, notes = compiler._for_cpu(dataclasses.replace(CONFIG, model=model))
    assert (config.model.attention, config.model.remat) == ("auto", "full")
    assert len(notes) == 2


@pytest.mark.wide
def test_the_program_of_a_loss_reads_its_batch():
    config = replace_nested(CONFIG, {"train.loss": "jaxtp:DPO", "model.lora.rank": 2, "model.num_layers": 1})
    assert "pairs" in str(compiler.trace(config, jaxtp.make_mesh(fsdp=2, tp=2)).in_avals)
