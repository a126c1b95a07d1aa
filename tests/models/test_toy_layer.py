"""A model of a layer that the package does not know: what it declares is all that the rest asks
for."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
from accounts import B, T, account_of, compiled_flops, kept_activations
from flax import nnx
from numpy.random import default_rng
from support import (
    assert_close,
    cached_and_whole,
    decoder,
    random_weights,
    swept,
    use_mesh,
    without_mesh,
)
from tables import read_table
from toy_layer import GatedConvolution, ToyBlock, ToyModel, WrongModel
from variants import variant

from jaxtp import ModelConfig
from jaxtp.analysis.hardware import find
from jaxtp.analysis.step_costs import step_costs
from jaxtp.config.schema import ConfigError, replace_nested, to_plain, validate
from jaxtp.layers.parameter import Precision
from jaxtp.mesh import mesh_shape
from jaxtp.models.block import BlockConfig, adapter_kernels, padded_dims
from jaxtp.models.config import validate_model, violations
from jaxtp.tools.check.__main__ import verdicts
from jaxtp.tools.check.first_difference import first_difference
from jaxtp.tools.check.parity import TOLERANCES, initial_arrays
from jaxtp.tools.check.shrink import Case, default_cases, shrink
from jaxtp.tools.estimate.search import describe_model, search, target
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.memory import memory_per_device

MODEL = ToyModel(vocab_size=61, d_model=32, num_layers=2, d_ff=48, conv_features=32, loss_chunk=8)
PATTERN = replace(MODEL, num_layers=3, pattern=({"conv_width": 2}, {}))
"""Two kinds of convolution in turn, and one left over."""
TP = Case(mesh_shape(tp=2), True)
CP = Case(mesh_shape(cp=2), False, "gather")


class Daring(GatedConvolution):
    """Says that it works over cp, and does nothing about it."""

    over_cp = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class DaringModel(ToyModel):
    """A decoder of them."""

    layer = Daring


def run_of(**changes):
    data = DataConfig(sequence_length=16, global_batch_size=16)
    return TrainConfig(model=variant(PATTERN, changes), data=data)


CONFIG = run_of()


STEPS = read_table(__file__)


@swept("name", STEPS, "parallel")
def test_a_step_moves_and_multiplies_what_is_declared(name):
    found = account_of(variant(PATTERN, STEPS[name]["model"]), STEPS[name]["mesh"])
    assert found.sent == pytest.approx(found.costs.budget)
    assert found.flops == found.costs.flops
    assert "convolution/causal_convolution" in {module for module, _ in found.sent}


@pytest.mark.wide
def test_its_products_are_those_of_the_compiled_program():
    config = replace(MODEL, num_layers=1, remat="save_dots")
    work = step_costs(config, mesh_shape(fsdp=2, tp=2), batch_size=B, sequence_length=T)
    assert work.flops == compiled_flops(config, (1, 2, 2), 1)


@swept("remat", ["full", "save_gathered", "save_dots"], "save_gathered")
def test_a_block_keeps_what_it_declares(remat):
    config = replace(MODEL, num_layers=1, remat=remat, precision=Precision(compute="bfloat16"))
    declared = step_costs(config, mesh_shape(), batch_size=2, sequence_length=T).saved
    assert declared == kept_activations(config, 2, T)


@pytest.mark.wide
def test_memory_and_the_search_for_a_setting():
    """Of one block on one mesh, of which the search tries few settings."""
    small, large = (
        memory_per_device(run_of(conv_features=n), mesh_shape(tp=2)).parameters for n in (32, 64)
    )
    assert large - small == 3 * 4 * 32 * (3 * 32 / 2) + 4 * 32 * (2 + 3 + 2) / 2
    run = run_of(num_layers=1, pattern=[])
    found = search(run, target(find("h100"), 2, 0.75), describe_model(run), [mesh_shape(tp=2)])
    assert {setting.sizes["tp"] for setting in found.settings} == {2}
    assert all(setting.fits for setting in found.settings)


@swept("placement", ["before", "parallel"])
def test_the_check_passes(placement):
    case = {"before": Case(mesh_shape(dp=2, fsdp=2, tp=2), True), "parallel": TP}[placement]
    run = run_of(norm_placement=placement, layer_scale=True)
    (verdict,) = verdicts(shrink(run, [case]), [case])
    assert verdict.passed, (verdict.errors, verdict.problems)


def test_shrinking_keeps_its_structure():
    small = shrink(run_of(num_layers=9), [TP]).model
    assert isinstance(small, ToyModel)
    assert [(stack.repeats, [b.conv_width for b in stack.pattern]) for stack in small.stacks()] == [
        (2, [2, 3]),
        (1, [2]),
    ]
    assert small.conv_features < 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedBlock(ToyBlock):
    """A block whose convolution says what tp pads and where adapters can be."""

    def padding(self, tp):
        yield "conv_features", self.conv_features, -(-self.conv_features // tp) * tp

    def adapter_kernels(self):
        yield "q_proj", "convolution.enter.kernels.0"


def test_what_a_branch_says_is_added_to_what_is_known_of_the_others():
    block = PaddedBlock(conv_features=30)
    known = BlockConfig()
    assert [*padded_dims(block, 4)] == [*padded_dims(known, 4), ("conv_features", 30, 32)]
    kernels = [*adapter_kernels(block)]
    assert kernels == [*adapter_kernels(known), ("q_proj", "convolution.enter.kernels.0")]


def where_it_differs(kind, case):
    """Returns the first module whose numbers on a mesh differ from one device's, or None."""
    model = kind(**vars(replace(MODEL, num_layers=1)))
    small = shrink(replace(CONFIG, model=model), [case])
    if case.sizes["cp"] > 1:
        small = replace_nested(small, {"mesh.context": "gather", "model.sequence_parallel": False})
    return first_difference(small, case, initial_arrays(small), TOLERANCES["float32"].tensor)


@pytest.mark.wide
def test_the_check_names_a_wrong_layer_and_no_other():
    assert where_it_differs(ToyModel, TP) is None
    assert where_it_differs(WrongModel, TP).startswith(
        "blocks.0.convolution.convolution: its output is off"
    )
    assert where_it_differs(DaringModel, CP).startswith("blocks.0.convolution")


def test_sizes_that_do_not_fit_are_named():
    (problem,) = violations(replace(MODEL, conv_features=36), mesh_shape(tp=8))
    assert "model.conv_features=36 is not divisible by mesh.tp=8" in problem
    with pytest.raises(
        ConfigError,
        match=r"model.pattern\[1\]:\n.*conv_widht: unknown key; did you mean conv_width",
    ):
        validate_model(replace(MODEL, pattern=({}, {"conv_widht": 2})), mesh_shape())


def test_over_cp_it_is_refused_and_not_wrong():
    (problem,) = violations(PATTERN, mesh_shape(cp=2, tp=2))
    assert (
        problem
        == "mesh.cp=2 splits each sequence, which is not supported by GatedConvolution; cp can be 1"
    )
    with (
        pytest.raises(ConfigError, match="not supported by GatedConvolution"),
        use_mesh(cp=2),
    ):
        nnx.eval_shape(decoder(PATTERN))
    assert not any(violations(ModelConfig(), mesh_shape(cp=2))), "attention and an MLP do"
    assert all(case.sizes["cp"] == 1 for case in default_cases(CONFIG, mesh_shape(cp=2, tp=2)))


def test_its_settings_are_written_and_read_back():
    plain = to_plain(CONFIG.model)
    assert plain["pattern"] == [{"conv_width": 2}, {}]
    assert validate(ToyModel, plain, source="a file") == PATTERN


@pytest.mark.wide
def test_cached_equals_uncached():
    build = decoder(PATTERN)
    ids = default_rng(0).integers(0, MODEL.vocab_size, (2, 6), np.int32)
    cached, whole = cached_and_whole(*without_mesh(build, random_weights(build)), ids, 4)
    assert_close({"hidden": cached}, {"hidden": whole})
