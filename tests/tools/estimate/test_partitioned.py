"""The estimate's collectives beside those of the partitioned program, which are equal on every
mesh; what nobody planned is called out.
"""

import inspect
import math
from dataclasses import replace

import jax
import pytest
import yaml
from fast_programs import captured_stderr
from hf_reference import FOLDER
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import swept
from tables import read_table

import jaxtp
from jaxtp.analysis.audit import audit
from jaxtp.analysis.collective import bytes_by
from jaxtp.analysis.hardware import find
from jaxtp.config.schema import replace_nested, validate
from jaxtp.mesh import AXES, mesh_of
from jaxtp.models import decoder
from jaxtp.tools.estimate.compiler import trace
from jaxtp.tools.estimate.search import Target, describe_model, estimate
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.setup import plan_step
from jaxtp.train.state import OPTIMIZER_SCOPE, plan_state

SETTINGS = """
model: {vocab_size: 61, d_model: 32, num_layers: 2, num_heads: 16, num_kv_heads: 4, head_dim: 8, d_ff: 64,
  loss_chunk: 8}
data: {sequence_length: 32, global_batch_size: 32}
optimizer: {name: adamw}
train: {accumulation: 1}
"""  # noqa: E501
CONFIG = validate(TrainConfig, yaml.safe_load(SETTINGS), source="here")
MESHES = read_table(__file__)
WINDOWED = {"model.pattern": ({"sliding_window": 5}, {})}
OTHERS = {
    "offload": ("2-2-1-2", {"model.remat": "offload"}),
    "rings": ("1-2-1-4", {"model.remat": "save_dots", "model.overlap": "ring"}),
    "ulysses": ("2-1-2-2", WINDOWED | {"mesh.context": "ulysses"}),
    "gather": ("2-1-2-2", WINDOWED | {"mesh.context": "gather"}),
}


def setting(mesh, changes=(), config=CONFIG):
    sizes = dict(zip(AXES, map(int, mesh.split("-")), strict=True))
    over_axes = {f"mesh.{axis}": size for axis, size in sizes.items()}
    config = replace_nested(config, over_axes | dict(changes))
    hardware = find("h100")
    where = Target(hardware, math.prod(sizes.values()), hardware.memory)
    return estimate(config, where, describe_model(config))


def compiled(estimated):
    """Returns the bytes that a device sends, by kind and axes, as estimated and after SPMD
    partitioning; and communication that the compiler added.
    """
    config = estimated.config
    if config.model.remat == "offload":  # a CPU offloads nothing
        config = replace_nested(config, {"model.remat": "full"})
    mesh = mesh_of(estimated.sizes)
    tuned = optimizers.build(config.optimizer, config.train.steps)
    blueprint = plan_state(config.model, tuned, mesh)
    with captured_stderr() as warnings:
        report = audit(
            plan_step(config).trace_on(mesh),
            blueprint.sharded,
            mesh=mesh,
            budget=estimated.costs.budget,
            global_view=() if optimizers.is_modelled(config.optimizer) else (OPTIMIZER_SCOPE,),
            compiler_options={"xla_backend_optimization_level": 0},
        )
    assert not "".join(warnings).strip()
    arrays = {moved: times for moved, times in report.realised.items() if moved.shape}
    sent = [bytes_by(moved, "kind", "axes") for moved in (estimated.costs.traffic, arrays)]
    return *sent, report.problems()


def assert_moves_as_estimated(estimated):
    planned, realised, problems = compiled(estimated)
    assert realised == pytest.approx(planned)
    assert not problems


@swept("mesh", MESHES)
def test_the_estimate_is_what_the_partitioned_program_moves(mesh):
    assert_moves_as_estimated(setting(mesh, MESHES[mesh]))


@swept("name", OTHERS)
def test_the_estimate_is_what_other_programs_move(name):
    mesh, changes = OTHERS[name]
    assert_moves_as_estimated(setting(mesh, changes | {"train.accumulation": 2}))


@pytest.mark.wide
def test_the_estimate_knows_an_optimizer_that_exchanges_matrices():
    muon = setting("2-1-2-2", {"optimizer.name": "muon"})
    assert_moves_as_estimated(muon)
    assert "all-to-all" in {moved.kind for moved in muon.costs.traffic}


@swept("name", ["gemma3", "gpt2"])
def test_the_estimate_knows_other_families(name):
    model = replace(jaxtp.hf.read_config(FOLDER / name), loss_chunk=8)
    config = replace(CONFIG, model=model)
    assert_moves_as_estimated(setting("1-2-1-4", {"data.sequence_length": 16}, config))


def plant(monkeypatch):
    """Between attention and MLP, the whole batch on every device; returns the line that asks for
    it.
    """
    norm = decoder.DecoderBlock.with_routing

    def resharding(self, x_BTD, *rest):
        mesh = jax.sharding.get_abstract_mesh()
        x_BTD = jax.lax.with_sharding_constraint(x_BTD, NamedSharding(mesh, P(None, None, None)))
        return norm(self, x_BTD, *rest)

    monkeypatch.setattr(decoder.DecoderBlock, "with_routing", resharding)
    lines, first = inspect.getsourcelines(resharding)
    return first + next(i for i, line in enumerate(lines) if "with_sharding_constraint" in line)


@pytest.mark.wide
def test_a_planted_reshard_is_called_out_with_its_line(monkeypatch):
    line = plant(monkeypatch)
    # The batch is gathered over fsdp alone.
    planned, realised, problems = compiled(setting("1-2-1-1", {"model.num_layers": 1}))
    assert realised != pytest.approx(planned)
    unasked = [problem for problem in problems if "the compiler added it" in problem]
    assert any(f"test_partitioned.py:{line}" in problem for problem in unasked), problems
    assert any(
        "all-gather of float32 32x32x32 (131,072 bytes) over fsdp" in problem for problem in unasked
    )


@pytest.mark.wide
def test_the_program_of_a_loss_reads_its_batch():
    changes = {"train.loss": "jaxtp.losses:DPO", "model.lora.rank": 2, "model.num_layers": 1}
    traced = trace(replace_nested(CONFIG, changes), jaxtp.make_mesh(fsdp=2, tp=2))
    assert "pairs" in str(traced.in_avals)
