"""What a run measures of itself, and where it writes it."""

import importlib.util
import json
import math
import re
import time
import typing
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from flax import nnx
from runs import full_disk, records
from structures import plant, watched
from support import assert_refused
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxtp
from jaxtp.analysis.step_costs import active_parameters, described
from jaxtp.config import console
from jaxtp.config.schema import ConfigError, from_yaml, to_plain
from jaxtp.guards.hook import NextStep
from jaxtp.guards.profiler import Profiler
from jaxtp.guards.stragglers import memory_record
from jaxtp.layers.lora import LoraConfig
from jaxtp.train.__main__ import main
from jaxtp.train.config import MetricsConfig, RunConfig, TrainConfig
from jaxtp.train.metrics import TRACKERS, Timing, Trackers, read_metrics, run_id
from jaxtp.train.performance import (
    describe_peak,
    flops_per_token,
    peak_flops,
)
from jaxtp.train.run_folder import RunFilesError, RunFolderError
from jaxtp.train.run_report import Report


def tensorboard_values(run, tag="loss"):
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def records_of_wandb(data):
    """Yields the records of a file of W&B: LevelDB's log format, in blocks of 32 KiB, around
    protocol buffers.
    """
    at = 7
    pending = b""
    while at + 7 <= len(data):
        left_in_block = 32768 - at % 32768
        if left_in_block < 7:  # no header fits there
            at += left_in_block
            continue
        length = int.from_bytes(data[at + 4 : at + 6], "little")
        kind = data[at + 6]
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield pending
            pending = b""


def wandb_values(run):
    record_type = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in files}) == 1, "one run, continued"
    losses = {}
    for record in (each for path in files for each in records_of_wandb(path.read_bytes())):
        items = record_type.FromString(record).history.item
        row = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        if "loss" in row:
            losses[row["step"]] = row["loss"]
    return losses


def mlflow_values(run):
    client = pytest.importorskip("mlflow").MlflowClient()
    (experiment,) = client.search_experiments(filter_string="name = 'jaxtp'")
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == (run.name, "FINISHED")
    # The last value of a step that is logged again
    return {each.step: each.value for each in client.get_metric_history(found.info.run_id, "loss")}


READERS = {"tensorboard": tensorboard_values, "wandb": wandb_values, "mlflow": mlflow_values}


@pytest.fixture(autouse=True)
def _local_mlflow(monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def test_the_setting_names_every_tracker():
    names, _ = typing.get_args(typing.get_type_hints(MetricsConfig)["trackers"])
    assert set(typing.get_args(names)) == set(TRACKERS) == set(READERS)


GROUPS = ["blocks.attention.*", "blocks.mlp.*", "embedding.*", "head.*", "*norm.scale"]


@pytest.mark.journey
@pytest.mark.parametrize("tracker", READERS)
def test_a_tracker_and_the_file_hold_the_same_numbers_after_a_resume(
    tmp_path, monkeypatch, command, tracker
):
    if tracker != "tensorboard":
        pytest.importorskip(tracker)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = tmp_path / "run"
    for steps in ("3", "5"):
        assert main([*command, f"--train.steps={steps}", "--metrics.trackers", tracker]) == 0
        time.sleep(1.1)  # folders of W&B are told apart by the second
    assert READERS[tracker](run) == pytest.approx(records(run), rel=1e-6)


@pytest.mark.journey
def test_a_run_logs_norms_by_group_and_its_evaluations(tmp_path, command):
    run = tmp_path / "run"
    assert main([*command, "--metrics.norm-groups", *GROUPS, "--train.steps=6"]) == 0
    for kind in ("grad_norm", "param_norm"):
        parts = [records(run, f"{kind}/{group}") for group in GROUPS]
        for step, norm in records(run, kind).items():
            assert math.hypot(*(part[step] for part in parts)) == pytest.approx(norm, rel=1e-6)
    assert tensorboard_values(run, "goodput") == pytest.approx(records(run, "goodput"), rel=1e-6)
    assert records(run, "eval_perplexity")[6] == pytest.approx(
        math.exp(records(run, "eval_loss")[6])
    )


@pytest.mark.journey
def test_profiles_and_the_first_step_of_a_run_that_logs_every_fifth(tmp_path, command, capsys):
    """A resumed run shows its first step too, and its metrics are those of an undisturbed run."""
    (tmp_path / "c.yaml").write_text("metrics: {trackers: []}\n")
    sparse = [
        f"--config={tmp_path}/c.yaml",
        *command,
        "--train.log-every=5",
        "--eval.every=0",
    ]
    assert main([*sparse, "--train.steps=6", "--profile.start=3", "--profile.steps=2"]) == 0
    said = capsys.readouterr().out
    assert re.findall(r"^step (\d+)/6 ", said, re.MULTILINE) == ["1", "5", "6"]
    profile = tmp_path / "run/profile"
    assert f"profile of steps 3 to 4 in {profile}" in said
    (trace,) = profile.rglob("*.xplane.pb")
    modules = (
        b"mlp/row_parallel_linear",
        b"attention/column_parallel_linear",
        b"vocab_parallel_cross_entropy",
    )
    traced = trace.read_bytes()
    assert not [module for module in modules if module not in traced]
    assert list(profile.rglob("perfetto_trace.json.gz"))
    # The second profile ends with the run, before its last step.
    assert main([*sparse, "--train.steps=9", "--profile.start=8", "--profile.steps=9"]) == 0
    assert re.findall(r"^step (\d+)/9 ", capsys.readouterr().out, re.MULTILINE) == ["7", "9"]
    assert list(records(tmp_path / "run")) == [1, 5, 6, 9]
    assert len(list(profile.rglob("*.xplane.pb"))) == 2
    assert not (tmp_path / "run/tensorboard").exists()


def trackers_of(folder, *names, resumed_at=0, warn=pytest.fail):
    config = TrainConfig(run=RunConfig(dir=folder), metrics=MetricsConfig(trackers=names))
    return Trackers(folder, to_plain(config), resumed_at, warn)


def write_losses(trackers, losses):
    for step, loss in losses.items():
        trackers.write({"step": step, "loss": loss})
    trackers.close()


def test_steps_that_a_killed_run_had_logged_are_forgotten(tmp_path):
    write_losses(trackers_of(tmp_path, "tensorboard"), {step: float(step) for step in range(1, 6)})
    time.sleep(1.1)  # event files are told apart by the second in which they were opened
    write_losses(trackers_of(tmp_path, "tensorboard", resumed_at=3), {4: 40.0, 5: math.nan})
    assert records(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: None}
    shown = tensorboard_values(tmp_path)
    assert {step: shown[step] for step in (1, 2, 3, 4)} == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_a_tracker_that_fails_gets_no_more_and_the_run_goes_on(tmp_path):
    """tensorboardX's own writer would block the run for good, some events after its disk was
    full.
    """
    said = []
    trackers = trackers_of(tmp_path, "tensorboard", warn=said.append)
    with full_disk(1200):
        write_losses(trackers, dict.fromkeys(range(1, 41), 1.0))
    assert list(records(tmp_path)) == list(range(1, 41))
    (warning,) = said
    assert "tensorboard failed ([Errno 27] File too large)" in warning


def test_a_full_disk_under_the_metrics_is_one_message(tmp_path):
    trackers = trackers_of(tmp_path)
    with full_disk(10):
        with pytest.raises(RunFolderError, match=r"metrics.jsonl .*File too large"):
            trackers.write({"step": 1, "loss": 1.0})
        trackers.close()


def test_what_is_in_the_place_of_a_file_of_metrics_is_one_error(tmp_path):
    kinds = {
        "folder": RunFolderError,
        "pipe": RunFolderError,
        "device": RunFolderError,
        "sparse file": RunFilesError,
    }
    for kind, error in kinds.items():
        folder = tmp_path / kind
        folder.mkdir()
        plant(folder / "metrics.jsonl", kind)
        with watched(), pytest.raises(error, match=r"metrics\.jsonl"):
            trackers_of(folder)
        with watched(), pytest.raises(OSError, match=r"regular|larger|folder"):
            read_metrics(folder)
    (tmp_path / "tensorboard").touch()
    with pytest.raises(RunFolderError, match="tensorboard"):
        trackers_of(tmp_path, "tensorboard")


def test_metrics_are_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").symlink_to("../victim")
    write_losses(trackers_of(tmp_path / "run"), {1: 1.0})
    assert (tmp_path / "victim").read_text() == "precious\n"
    assert records(tmp_path / "run") == {1: 1.0}


def test_files_that_a_crash_left_half_written_are_read_as_far_as_they_go(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 1, "loss": 2.0}\n' + b"[" * 100_000 + b'\n\x00\xff{"step"'
    )
    trackers = tmp_path / "trackers.json"
    trackers.write_bytes(b'{"wandb": "a')
    trackers_of(tmp_path, resumed_at=1).close()
    assert records(tmp_path) == {1: 2.0}
    assert run_id(trackers, "wandb", lambda: "a") == "a"
    assert run_id(trackers, "mlflow", lambda: "c") == "c"
    assert run_id(trackers, "wandb", lambda: "d") == "a"


def test_mlflow_has_the_metrics_of_a_run_that_resumes(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    run = tmp_path / "run"
    run.mkdir()
    for resumed_at, losses in ((0, {1: 3.0, 2: 2.5}), (1, {2: 2.0})):
        trackers = trackers_of(run, "mlflow", resumed_at=resumed_at)
        trackers.write({"step": 2, "grad_norm/blocks.*": 1.0, "mfu": math.nan})
        write_losses(trackers, losses)
    assert mlflow_values(run) == {1: 3.0, 2: 2.0}
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://x")
    with pytest.raises(ConfigError, match=r"mlflow cannot start .* MLFLOW_TRACKING_URI=http"):
        trackers_of(run, "mlflow")


def test_a_tracker_that_is_not_installed_names_its_extra(monkeypatch, command, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name)
    )
    assert_refused(main, [*command, "--metrics.trackers", "wandb"], "jaxtp[wandb]", capsys)


def test_timing_divides_the_time_into_steps_waits_and_losses():
    clock = SimpleNamespace(now=0.0)
    timing = Timing(lambda: clock.now)
    with timing.lost_to("save"):
        clock.now += 5
    for seconds in (1, 1, 1, 7):
        with timing.waiting_for_data():
            clock.now += seconds / 2
        clock.now += seconds / 2
        timing.tick()
    found = timing.record()
    assert [found[f"step_seconds{end}"] for end in ("", "_p50", "_max")] == [2.5, 1, 7]
    assert 1 < found["step_seconds_p90"] < 7
    assert found["data_wait_seconds"] == 1.25
    assert (found["lost_to_save"], found["goodput"]) == (5 / 15, 10 / 15)


def recipe(name):
    """Returns the model of a configuration of ours."""
    return from_yaml(TrainConfig, Path(__file__).parents[2] / f"configs/{name}.yaml").model


def test_flops_per_token_are_those_of_the_published_tables():
    """Llama 3.1 8B at 8,192 tokens: 14,451 tokens/s are 744 TFLOP/s (Megatron-Bridge's
    performance summary, 25.11).
    """
    flops = flops_per_token(recipe("llama3_8b"), parameters=8_030_261_248, sequence_length=8192)
    assert 14451 * flops / 1e12 == pytest.approx(743.8, abs=0.1)


def test_flops_per_token_leave_out_what_a_token_does_not_use():
    """Without attention and lookup: 6 for a parameter, 4 for a frozen one, none for an expert
    that is not chosen.
    """
    model = jaxtp.ModelConfig(d_model=64, num_layers=3, d_ff=48, num_experts=8, experts_per_token=2)
    head = model.vocab_size * model.d_model
    experts = 3 * 3 * 64 * 48
    found = flops_per_token(model, 10**6 + head + 8 * experts, sequence_length=0)
    assert found == 6 * (10**6 + 2 * experts)
    frozen = replace(model, lora=LoraConfig(rank=2, targets=("q_proj",)))
    adapters = 3 * 2 * (64 + model.num_heads * model.head_dim)
    found = flops_per_token(frozen, 10**6 + head + adapters + 8 * experts, sequence_length=0)
    assert found == 4 * (10**6 + 2 * experts) + 6 * adapters


@pytest.mark.wide
def test_gated_delta_net_counts_three_products_with_its_states():
    model = jaxtp.ModelConfig(
        delta_value_heads=6, delta_key_heads=3, delta_key_dim=8, delta_value_dim=10
    )
    of_weights = flops_per_token(model, 10**6, sequence_length=0)
    of_states = flops_per_token(model, 10**6, sequence_length=100) - of_weights
    assert of_states == pytest.approx(model.num_layers * 18 * 6 * 8 * 10)


def test_active_parameters_are_those_that_are_published():
    for name, every, active in (("qwen3_30b_a3b", 30.5, 3.35), ("mixtral_8x7b", 46.7, 12.9)):
        model = recipe(name)
        parameters = sum(
            leaf.size for leaf in jax.tree.leaves(nnx.state(described(model), nnx.Param))
        )
        assert parameters / 1e9 == pytest.approx(every, abs=0.05)
        assert active_parameters(model, parameters) / 1e9 == pytest.approx(active, abs=0.05)


def test_a_device_says_its_peak_and_its_memory_where_they_are_known():
    """A run on CPUs writes neither: see train/test_command.py."""
    cpu = jax.devices()[0]
    assert math.isnan(peak_flops(cpu))
    assert memory_record(cpu) == {}
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "other": 9}
    gpu = SimpleNamespace(device_kind="NVIDIA H200", platform="gpu", memory_stats=lambda: stats)
    assert peak_flops(gpu) == 989.4e12
    assert describe_peak(gpu) is None
    assert memory_record(gpu) == {"memory_bytes": 5, "memory_peak_bytes": 7}
    gpu.device_kind = "NVIDIA H200 MIG 1g.18gb"
    assert math.isnan(peak_flops(gpu))
    assert "NVIDIA H200 MIG 1g.18gb" in describe_peak(gpu)


def test_a_profile_that_cannot_be_written_is_said_and_never_touches_the_run(tmp_path, monkeypatch):
    def fail():
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **kwargs: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", fail)
    lines = []
    loop = SimpleNamespace(state=None, line=lines.append, lost_to=lambda cause: nullcontext())
    profiler = Profiler(tmp_path, 1, 2)
    profiler.before_step(loop, NextStep(1, {}, None))
    for loop.step in (1, 2):
        profiler.after_dispatch(loop)
    assert lines == ["no profile of steps 1 to 2: [Errno 28] No space left on device"]
    profiler.close()


def test_a_step_shows_the_metrics_of_a_loss(capsys):
    report = Report(("rewards/margins", "accuracy"))
    values = {
        "step": 3,
        "loss": 0.5,
        "accuracy": 0.75,
        "rewards/margins": 0.125,
        "rows_per_second": 7.0,
    }
    report.log({**values, "step_seconds": 1.0}, 9, "rows")
    shown = "step 3/9  loss 0.5000  rewards/margins 0.125  accuracy 0.75  7 rows/s  0:06 left\n"
    assert capsys.readouterr().out == shown


def test_a_bar_shows_the_metrics_that_fit(monkeypatch, capsys):
    """Of a loss, then those that a callback logged, then the time to the next evaluation."""
    values = {"loss": 0.5, "rewards/margins": 0.25, "rewards/chosen": 1.0}
    report = Report(tuple(values)[1:])
    report.logged = {"seen": 3.0}
    report.has_bar = True
    monkeypatch.setattr(console, "columns_of", lambda stream: 60)
    report.begin(0, 9)
    report.step(9, values, "7 rows/s", 61.0)
    shown = "step 9/9 loss 0.5000  7 rows/s  rewards/chosen 1  0:00 left"
    assert shown in capsys.readouterr().out
    monkeypatch.setattr(console, "columns_of", lambda stream: 120)
    report.step(9, values, "7 rows/s", 61.0)
    shown = "rewards/margins 0.25  rewards/chosen 1  seen 3  evaluation in 1:01  0:00 left"
    assert shown in capsys.readouterr().out
