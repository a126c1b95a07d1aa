"""Training a mixture of experts: what checkpoints hold, what moves its biases, what a run says and goes on with."""

import dataclasses
import math
import re
import time
from collections import Counter

import jax
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, TEXT, finish, mesh, records
from support import sweep_of

import jaxtp
from jaxtp.analysis import step_costs as costs
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import ALL_TO_ALL
from jaxtp.checkpoint.logical import named_variables
from jaxtp.checkpoint.storage import open_checkpoint
from jaxtp.collectives import axis_size
from jaxtp.config.schema import ConfigError, to_plain, validate
from jaxtp.generate.__main__ import main as generate
from jaxtp.generate.loading import _inference_config
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import TP, mesh_of, mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train import optimizer as optimizers
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.memory import costs_of_step
from jaxtp.train.resume import check_resumable
from jaxtp.train.run_report import Report, _describe_experts, describe_grouped
from jaxtp.train.state import plan_state, trained_parameters
from jaxtp.train.step import fetch, make_train_step, trace_step
from jaxtp.train.validation import check, check_kernels

MODEL = jaxtp.ModelConfig(
    vocab_size=61,
    d_model=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    d_ff=8,
    loss_chunk=8,
    num_experts=6,
    selection_bias=True,
)
"""Experts that are divided over tp 2 whole, over tp 4 inside."""
RATE = 0.25
RUN = TrainConfig(
    model=MODEL,
    data=DataConfig(sequence_length=16, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.5),
    train=LoopConfig(steps=10, balance_loss=0.01, selection_bias_rate=RATE),
)
BIAS = "model.blocks.mlp.selection_bias"
WHOLE, INSIDE = mesh_shape(fsdp=2, tp=2), mesh_shape(dp=2, tp=4)


def plan_of(config, sizes=ONE_DEVICE.sizes):
    return plan_state(config.model, optimizers.build(config.optimizer, 10), mesh_of(sizes))


def test_checkpoints_hold_the_bias_and_no_optimizer_has_it():
    """It is no `nnx.Param`: a checkpoint of those alone had none, and could not be resumed."""
    plan = plan_of(RUN)
    stored = named_variables(plan.stored(plan.abstract))
    assert BIAS in stored
    assert not [name for name in stored if not name.startswith("model.") and "selection_bias" in name]
    assert BIAS.removeprefix("model.") not in trained_parameters(plan)


def test_a_checkpoint_of_adapters_holds_nothing_of_the_experts_beside_them():
    """The bias too is the base model's, which is frozen."""
    adapters = dataclasses.replace(MODEL, lora=LoraConfig(rank=2, targets=("q_proj", "v_proj")))
    plan = plan_of(dataclasses.replace(RUN, model=adapters))
    stored = [name for name in named_variables(plan.stored(plan.abstract)) if name.startswith("model.")]
    assert stored
    assert {name.rpartition(".")[2] for name in stored} == {"a", "b"}


def test_merged_adapters_leave_the_bias_where_it_is():
    lora = LoraConfig(rank=2, targets=("q_proj", "v_proj"))
    model = jaxtp.Decoder(dataclasses.replace(MODEL, lora=lora), rngs=nnx.Rngs(0))
    bias = model.blocks.mlp.selection_bias
    bias[...] = jax.random.normal(jax.random.key(0), bias.shape)
    np.testing.assert_array_equal(jaxtp.merge_adapters(model).blocks.mlp.selection_bias[...], bias[...])


def updated(sizes, **train):
    """The selection biases after three updates, and the scalars of the last."""
    config = dataclasses.replace(RUN, train=dataclasses.replace(RUN.train, **train))
    plan = plan_of(config, sizes)
    step = make_train_step(config, plan)
    with jax.set_mesh(plan.mesh):
        state = plan.create(0)
        for batch in random_tokens(config):
            state, scalars = step(state, batch)
    return parity.on_host(state, plan.mesh)[BIAS], fetch(scalars)


@pytest.fixture(scope="module")
def on_one_device():
    return updated(ONE_DEVICE.sizes)


@pytest.mark.parametrize(("sizes", "accumulation"), sweep_of([[WHOLE, INSIDE], [1, 2, 4]]), ids=str)
def test_an_update_moves_each_bias_once(on_one_device, sizes, accumulation):
    """By the rate, up or down, whatever the mesh and the micro-batches: it is neither averaged nor decayed."""
    expected, numbers = on_one_device
    bias, scalars = updated(sizes, accumulation=accumulation)
    np.testing.assert_array_equal(bias, expected)
    assert set(np.abs(bias / RATE).ravel()) <= {0, 1, 2, 3}
    assert np.any(bias)
    for name in ("balance_loss", "router_z_loss", "experts/max_load", "experts/unused", "experts/entropy"):
        assert scalars[name] == pytest.approx(numbers[name], rel=1e-5), name
    assert 0.9 < scalars["balance_loss"] < 6
    assert 1 <= scalars["experts/max_load"] <= 6
    assert scalars["experts/entropy"] <= math.log(6)
    assert scalars["experts/dropped"] == 0


OPTIMIZERS = ["muon", "adafactor", "lion"]


@pytest.mark.parametrize(("name", "sizes"), sweep_of([OPTIMIZERS, [WHOLE, INSIDE]]), ids=str)
def test_optimizers_over_whole_experts_and_parts_of_them(name, sizes):
    """Muon deals out matrices that tp divides inside, and has those of a device's own experts to itself over tp."""
    config = dataclasses.replace(RUN, optimizer=OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=1))
    initial = parity.initial_arrays(config)
    whole, actual = (parity.run(config, case, initial) for case in (ONE_DEVICE, Case(sizes, True)))
    errors = parity.compare(actual, whole)
    assert errors.within(parity.TOLERANCES["float32"]), errors


@pytest.mark.wide
@pytest.mark.parametrize("sizes", [WHOLE, INSIDE], ids=str)
def test_what_muon_moves_of_experts_is_what_is_declared(sizes):
    config = dataclasses.replace(RUN, optimizer=OptimizerConfig(name="muon"))
    found: list[Counter] = []
    for traffic in (
        costs_of_step(config, sizes).traffic,
        count_collectives(trace_step(config, plan_of(config, sizes)).jaxpr, sizes),
    ):
        found.append(Counter())
        for one, times in traffic.items():
            if one.kind == ALL_TO_ALL:
                found[-1][one.module, one.axes, one.bytes] += times
    assert found[0] == found[1]
    assert found[0]


def test_the_lines_of_a_run_say_the_balance(capsys):
    record = {"step": 3, "loss": 2.5, "step_seconds": 1.0, "tokens_per_second": 640.0}
    with Report() as report:
        report.log(record, 10, "tokens")
        report.log(record | {"balance_loss": 1.0234}, 10, "tokens")
        report.log(record, 10, "tokens", is_first=True)
    plain, mixture, first = capsys.readouterr().out.splitlines()
    assert plain == "step 3/10  loss 2.5000  640 tokens/s  0:07 left"
    assert mixture == "step 3/10  loss 2.5000  balance 1.02  640 tokens/s  0:07 left"
    assert first == "step 3/10  loss 2.5000  640 tokens/s"


@pytest.mark.parametrize(
    ("tp", "said"),
    [
        (1, "6 of 6 on each device, whole"),
        (2, "3 of 6 on each device, whole"),
        (4, "all 6 on each device, 2 of the width 8 of each"),
    ],
)
def test_the_summary_says_how_experts_are_divided(tp, said):
    assert _describe_experts(MODEL, tp) == f"over tp {tp}: {said}"
    assert _describe_experts(dataclasses.replace(MODEL, num_experts=0), tp) is None


@pytest.mark.parametrize(
    ("platform", "grouped", "said"),
    [
        ("cuda", "auto", ["pallas products of experts (it multiplies each row with its own expert alone)"]),
        ("cpu", "auto", ["xla products of experts (pallas runs only on cuda, not on cpu)"]),
        (
            *("cuda", "xla"),
            [
                "xla products of experts (as configured)",
                "WARNING: it multiplies every row by every expert, 6 times the work and the memory of rows",
            ],
        ),
    ],
)
def test_the_summary_says_what_multiplies_with_experts(platform, grouped, said):
    assert list(describe_grouped(dataclasses.replace(MODEL, grouped=grouped), platform)) == said


def test_a_bias_moves_by_no_more_than_scores_are():
    with pytest.raises(ConfigError, match=r"selection_bias_rate = 1e\+39: should be less than or equal to 1"):
        validate(TrainConfig, {"train": {"selection_bias_rate": 1e39}}, source="it")


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (dataclasses.replace(MODEL, num_experts=0, selection_bias=False), "balance_loss"),
        (dataclasses.replace(MODEL, num_experts=0, selection_bias=False), "router_z_loss"),
        (dataclasses.replace(MODEL, selection_bias=False), "selection_bias_rate"),
    ],
)
def test_what_would_have_no_effect_is_refused(model, given):
    run = dataclasses.replace(RUN, model=model, train=LoopConfig(steps=10, **{given: 0.5}))
    with pytest.raises(ConfigError, match=f"train.{given}=0.5 has no effect while model"):
        check(run, ONE_DEVICE.sizes)
    check(dataclasses.replace(run, train=LoopConfig(steps=10)), ONE_DEVICE.sizes)


def test_active_parameters_are_counted_whatever_mesh_is_in_context():
    """Of several processes, none can make a mesh of one device."""
    dense = 3 * MODEL.num_layers * MODEL.d_model * MODEL.d_ff * (MODEL.num_experts - MODEL.experts_per_token)
    with jax.set_mesh(mesh_of(mesh_shape(fsdp=2, tp=2))):
        costs._described.cache_clear()
        assert costs.active_parameters(MODEL, 10**6) == 10**6 - dense
        assert axis_size(TP) == 2


def test_models_without_experts_refuse_no_kernel():
    check_kernels(TrainConfig(model=jaxtp.ModelConfig(grouped="pallas")), ONE_DEVICE.sizes, "cpu")


def test_a_kernel_that_the_devices_lack_is_one_message():
    config = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, grouped="pallas"))
    with pytest.raises(ConfigError, match=r"model.grouped=pallas: it runs on cuda, not on cpu; use auto \(xla\)"):
        check_kernels(config, ONE_DEVICE.sizes, "cpu")


def test_a_run_generates_and_goes_on_where_its_kernel_is_not(tmp_path):
    """Trained on GPUs by a kernel of theirs, and opened on a CPU."""
    model = dataclasses.replace(MODEL, grouped="pallas")
    assert _inference_config(model, "float32").grouped == "auto"
    stored = {"config": to_plain(dataclasses.replace(RUN, model=model)), "corpus": {}, "mesh": {}, "next_sample": 0}
    (changed,) = check_resumable(RUN, {}, stored)
    assert changed == "changed since, without effect on the numbers: model.grouped: pallas -> auto"


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    experts = ["--model.num-experts", "6", "--model.selection-bias", "--train.selection-bias-rate", "0.01"]
    loop = ["--train.steps", "30", "--optimizer.learning-rate", "1e-3"]
    return [*SMALL, *experts, *loop, "--data.path", str(tmp_path / "text.txt")]


@pytest.mark.journey
def test_killed_and_resumed_where_experts_are_divided_otherwise(tmp_path, command, start, capsys):
    """From whole experts over tp 2 to parts of each over tp 4, in micro-batches; then others begin with the run."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main([*command, *mesh(1, 2, 2), "--run.dir", str(whole)]) == 0
    assert re.search(r"step 30/30  loss \d\.\d{4}  balance \d\.\d\d  ", capsys.readouterr().out)
    process = start([*command, *mesh(1, 2, 2), "--run.dir", str(killed)])
    while not (killed / "checkpoints/5").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    process.kill()
    process.wait()
    there = [*command, *mesh(2, 1, 4), "--run.dir", str(killed), "--train.accumulation", "2"]
    resumed = finish(start([*there, "--train.verify-every", "30"]))
    assert re.search(r"resumed from the checkpoint at step \d+", resumed)
    assert "step 30: verified" in resumed
    for key in ("loss", "balance_loss", "eval_loss", "experts/max_load", "experts/unused", "experts/dropped"):
        expected, actual = records(whole, key), records(killed, key)
        assert actual.keys() == expected.keys(), key
        np.testing.assert_allclose(list(actual.values()), list(expected.values()), rtol=1e-4, err_msg=key)
    biases = [open_checkpoint(run).read(BIAS) for run in (whole, killed)]
    np.testing.assert_array_equal(*biases)
    assert np.any(biases[0])

    assert generate(["--model", str(killed), "--prompt", "line", "--max-tokens", "4", "--mesh.tp", "4"]) == 0
    flags = [*SMALL[SMALL.index("--data.sequence-length") :], *command[-2:], "--run.init-from", str(killed)]
    adapters = [*flags, "--train.steps", "2", *mesh(1, 1, 2), "--model.lora.rank", "2", "--model.lora.targets"]
    assert main([*adapters, "q_proj", "up_proj", "--run.dir", str(tmp_path / "tuned")]) == 0
    capsys.readouterr()
    assert generate(["--model", str(tmp_path / "tuned"), "--prompt", "line", "--max-tokens", "4"]) == 0
