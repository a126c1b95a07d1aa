"""Training a mixture of experts: what checkpoints hold, what moves its biases, what a run says
and goes on with.
"""

import re
from dataclasses import replace

import numpy as np
import pytest
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from run_comparisons import assert_same_records
from runs import OF_ANY_MODEL, SMALL, TEXT
from support import new_decoder, swept, use_mesh
from variants import small_model

from jaxtp import merge_adapters
from jaxtp.analysis import step_costs as costs
from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.collectives import axis_size
from jaxtp.config.schema import ConfigError, to_plain
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.loading import inference_config
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import TP, mesh_of, mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.resume import check_resumable
from jaxtp.train.run_report import Report, describe_experts, describe_grouped
from jaxtp.train.state import plan_state, trained_parameters
from jaxtp.train.validation import check

MODEL = small_model(head_dim=8, d_ff=8, loss_chunk=8, num_experts=6, selection_bias=True)
"""Experts that are divided over tp 2 whole, over tp 4 inside."""
RATE = 0.25
RUN = TrainConfig(
    model=MODEL,
    data=DataConfig(sequence_length=16, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.5),
    train=LoopConfig(steps=10, balance_loss=0.01, selection_bias_rate=RATE),
)
BIAS = "model.blocks.mlp.selection_bias"
WHOLE = mesh_shape(fsdp=2, tp=2)
INSIDE = mesh_shape(dp=2, tp=4)


def plan_of(config, sizes=ONE_DEVICE.sizes):
    return plan_state(config.model, optimizers.build(config.optimizer, 10), mesh_of(sizes))


def stored_in(config):
    return [*named_variables(plan_of(config).stored(plan_of(config).abstract))]


LORA = LoraConfig(rank=2, targets=("q_proj", "v_proj"))
ADAPTED = replace(MODEL, lora=LORA)


def test_checkpoints_hold_the_bias_and_no_optimizer_has_it():
    """It is no `nnx.Param`: a checkpoint of those alone had none, and could not be resumed."""
    assert [name for name in stored_in(RUN) if "selection_bias" in name] == [BIAS]
    assert BIAS.removeprefix("model.") not in trained_parameters(plan_of(RUN))
    of_adapters = [
        name for name in stored_in(replace(RUN, model=ADAPTED)) if name.startswith("model.")
    ]
    assert {name.rpartition(".")[2] for name in of_adapters} == {"a", "b"}, (
        "the bias too is the base model's"
    )


def test_merged_adapters_leave_the_bias_where_it_is():
    model = new_decoder(ADAPTED)
    bias = model.blocks.mlp.selection_bias
    bias[...] = default_rng(0).normal(size=bias.shape).astype(np.float32)
    assert_array_equal(merge_adapters(model).blocks.mlp.selection_bias[...], bias[...])


@swept("name", ["adafactor", "lion"])
def test_optimizers_over_whole_experts_and_parts_of_them(name):
    config = replace(RUN, optimizer=OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=1))
    initial = parity.initial_arrays(config)
    whole = parity.run(config, ONE_DEVICE, initial)
    for sizes in (WHOLE, INSIDE):
        errors = parity.compare(parity.run(config, Case(sizes, True), initial), whole)
        assert errors.within(parity.TOLERANCES["float32"]), errors


def test_the_lines_of_a_run_say_the_balance(capsys):
    record = {
        "step": 3,
        "loss": 2.5,
        "balance_loss": 1.0234,
        "step_seconds": 1.0,
        "tokens_per_second": 640.0,
    }
    with Report() as report:
        report.log(record, 10, "tokens")
        report.log(record, 10, "tokens", is_first=True)
    assert capsys.readouterr().out.splitlines() == [
        "step 3/10  loss 2.5000  balance 1.02  640 tokens/s  0:07 left",
        "step 3/10  loss 2.5000  balance 1.02  640 tokens/s",
    ]


def test_the_summary_says_how_experts_are_divided_and_what_multiplies_with_them():
    divided = {
        1: "over tp 1: 6 of 6 on each device, whole",
        2: "over tp 2: 3 of 6 on each device, whole",
        4: "over tp 4: all 6 on each device, 2 of the width 8 of each",
    }
    assert {tp: describe_experts(MODEL, tp) for tp in divided} == divided
    assert describe_experts(replace(MODEL, num_experts=0), 1) is None
    said = "".join(describe_grouped(MODEL, "cpu"))
    assert said == "xla products of experts (pallas runs only on cuda, not on cpu)"


DENSE = replace(MODEL, num_experts=0, selection_bias=False)
UNBIASED = replace(MODEL, selection_bias=False)
WITHOUT_EFFECT = {"balance_loss": DENSE, "router_z_loss": DENSE, "selection_bias_rate": UNBIASED}


def test_what_would_have_no_effect_is_refused():
    for given, model in WITHOUT_EFFECT.items():
        run = replace(RUN, model=model, train=LoopConfig(steps=10, **{given: 0.5}))
        with pytest.raises(ConfigError, match=f"train.{given}=0.5 has no effect without model"):
            check(run, ONE_DEVICE.sizes)
        check(replace(run, train=LoopConfig(steps=10)), ONE_DEVICE.sizes)


def test_active_parameters_are_counted_whatever_mesh_is_in_context():
    """Of several processes, none can make a mesh of one device."""
    model = replace(MODEL, vocab_size=67)  # no other test has counted this one's
    dense = (
        3
        * model.num_layers
        * model.d_model
        * model.d_ff
        * (model.num_experts - model.experts_per_token)
    )
    with use_mesh(fsdp=2, tp=2):
        assert costs.active_parameters(model, 10**6) == 10**6 - dense
        assert axis_size(TP) == 2


def test_a_run_goes_on_and_generates_where_its_kernel_is_not():
    """Trained on GPUs by a kernel of theirs, and opened on a CPU."""
    config = replace(RUN, model=replace(MODEL, grouped="pallas"))
    assert inference_config(config.model, "float32").grouped == "auto"
    stored = {"config": to_plain(config), "corpus": {}, "mesh": {}, "next_sample": 0}
    (changed,) = check_resumable(to_plain(RUN), {}, stored)
    assert "without effect on the numbers: model.grouped: pallas -> auto" in changed


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    experts = [
        "--model.num-experts=6",
        "--model.selection-bias",
        "--train.selection-bias-rate=0.01",
    ]
    loop = ["--train.steps=12", "--optimizer.schedule=constant", "--optimizer.learning-rate=1e-3"]
    return [*SMALL, *experts, *loop, f"--data.path={tmp_path}/text.txt"]


@pytest.mark.journey
def test_a_run_resumes_where_experts_are_divided_otherwise(tmp_path, command, capsys):
    """From whole experts over tp 2 to parts of each over tp 4, in micro-batches; then others
    begin with the run.
    """
    whole = tmp_path / "whole"
    resumed = tmp_path / "resumed"
    assert main([*command, "--mesh=fsdp=2,tp=2", f"--run.dir={whole}"]) == 0
    assert re.search(r"step 12/12  loss \d\.\d{4}  balance \d\.\d\d  ", capsys.readouterr().out)
    assert main([*command, "--mesh=fsdp=2,tp=2", f"--run.dir={resumed}", "--train.steps=6"]) == 0
    there = [*command, "--mesh=dp=2,tp=4", f"--run.dir={resumed}", "--train.accumulation=2"]
    assert main([*there, "--train.verify-every=12"]) == 0
    assert "step 12: verified" in capsys.readouterr().out
    names = ("loss", "balance_loss", "experts/max_load", "experts/unused", "experts/dropped")
    assert_same_records(resumed, whole, *names, rtol=1e-4)
    biases = [open_checkpoint(run).read(BIAS) for run in (whole, resumed)]
    assert_array_equal(*biases)
    assert np.any(biases[0])

    adapters = [
        *OF_ANY_MODEL,
        command[-1],
        f"--run.init-from={resumed}",
        "--train.steps=2",
        "--mesh=tp=2",
        "--model.lora.rank=2",
        "--model.lora.targets",
    ]
    assert main([*adapters, "q_proj", "up_proj", f"--run.dir={tmp_path}/tuned"]) == 0
    assert generate([f"--model={tmp_path}/tuned", "--prompt=line", "--max-tokens=4"]) == 0
