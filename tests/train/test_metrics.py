"""What a run measures of itself, and where it writes it."""

import dataclasses
import importlib.util
import json
import math
import re
import subprocess
import sys
import time
import typing
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, TEXT, full_disk, mesh, records
from structures import plant, watched
from support import journeys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxtp
from jaxtp.analysis.step_costs import active_parameters, described
from jaxtp.config.schema import from_yaml
from jaxtp.layers.lora import LoraConfig
from jaxtp.train import optimizer as optimizers
from jaxtp.train import performance
from jaxtp.train.__main__ import main
from jaxtp.train.config import DataConfig, MetricsConfig, OptimizerConfig, RunConfig, TrainConfig
from jaxtp.train.metrics import TRACKERS, Timing, Trackers, _tracker_id, draw, read_metrics
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.performance import Profiler, describe_peak, flops_per_token, memory_record, peak_flops
from jaxtp.train.run_folder import RunFilesError, RunFolderError
from jaxtp.train.run_report import Report
from jaxtp.train.state import parameter_count, plan_state


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [*SMALL, "--data.path", str(tmp_path / "text.txt"), *mesh(1, 2, 2), "--run.dir", str(tmp_path / "run")]


def read_tensorboard(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_the_setting_names_every_tracker():
    names, _ = typing.get_args(typing.get_type_hints(MetricsConfig)["trackers"])
    assert set(typing.get_args(names)) == set(TRACKERS)


@pytest.mark.journey
def test_tensorboard_says_what_the_jsonl_says_also_after_a_resume(tmp_path, command):
    for steps in ("4", "7"):
        assert main([*command, "--train.steps", steps]) == 0
    for tag in ("loss", "learning_rate", "param_norm", "eval_perplexity", "goodput"):
        written, shown = records(tmp_path / "run", tag), read_tensorboard(tmp_path / "run", tag)
        assert shown.keys() == written.keys()
        np.testing.assert_allclose(list(shown.values()), list(written.values()), rtol=1e-6)
    perplexity, loss = (records(tmp_path / "run", key)[7] for key in ("eval_perplexity", "eval_loss"))
    assert perplexity == pytest.approx(math.exp(loss))


def trackers_of(folder, *names, resumed_at=0, warn=pytest.fail):
    config = TrainConfig(run=RunConfig(dir=folder), metrics=MetricsConfig(trackers=names))
    return Trackers(config, resumed_at, warn)


def test_steps_that_a_killed_run_had_logged_are_forgotten(tmp_path):
    first = trackers_of(tmp_path, "tensorboard")
    for step in range(1, 6):
        first.write({"step": step, "loss": float(step)})
    first.close()
    time.sleep(1.1)  # event files are told apart by the second in which they were opened
    again = trackers_of(tmp_path, "tensorboard", resumed_at=3)
    again.write({"step": 4, "loss": 40.0})
    again.write({"step": 5, "loss": math.nan})
    again.close()
    assert records(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: None}
    shown = read_tensorboard(tmp_path, "loss")
    assert {step: shown[step] for step in (1, 2, 3, 4)} == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_a_run_that_begins_again_forgets_its_first_evaluation(tmp_path):
    """It was killed before its first checkpoint."""
    for loss in (1.0, 2.0):
        trackers = trackers_of(tmp_path)
        trackers.write({"step": 0, "eval_loss": loss})
        trackers.close()
    assert records(tmp_path, "eval_loss") == {0: 2.0}


def test_a_tracker_that_fails_gets_no_more_and_the_run_goes_on(tmp_path):
    """tensorboardX's own writer would block the run for good, some events after its disk was full."""
    said = []
    trackers = trackers_of(tmp_path, "tensorboard", warn=said.append)
    with full_disk(1200):
        for step in range(1, 41):
            trackers.write({"step": step, "loss": 1.0})
        trackers.close()
    assert list(records(tmp_path)) == list(range(1, 41))
    assert len(said) == 1
    assert "metrics.trackers: tensorboard failed ([Errno 27] File too large) and is closed" in said[0]


def test_a_full_disk_under_the_metrics_is_one_message(tmp_path):
    trackers = trackers_of(tmp_path)
    with full_disk(10):
        with pytest.raises(RunFolderError, match=r"metrics.jsonl cannot be written \(File too large\)"):
            trackers.write({"step": 1, "loss": 1.0})
        trackers.close()


@pytest.mark.parametrize("name", ["metrics.jsonl", "tensorboard"])
def test_files_that_cannot_be_opened(tmp_path, name):
    if name == "tensorboard":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(RunFolderError, match=f"{name} cannot be written"):
        trackers_of(tmp_path, "tensorboard")


def test_files_that_a_crash_left_half_written(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + b"[" * 100_000 + b'\n\x00\xff{"step"')
    (tmp_path / "trackers.json").write_bytes(b'{"wandb": "a')
    trackers_of(tmp_path, resumed_at=1).close()
    assert records(tmp_path) == {1: 2.0}
    assert _tracker_id(tmp_path, "aim", "new") == "new"
    assert _tracker_id(tmp_path, "aim", None) == "new"


@pytest.mark.journey
def test_no_tracker_but_the_file(tmp_path, command):
    (tmp_path / "c.yaml").write_text("metrics: {trackers: []}\n")
    assert main(["--config", str(tmp_path / "c.yaml"), *command, "--train.steps", "2"]) == 0
    assert not (tmp_path / "run/tensorboard").exists()
    assert records(tmp_path / "run").keys() == {1, 2}


@pytest.mark.journey
def test_a_profile(tmp_path, command, capsys):
    assert main([*command, "--train.steps", "6", "--profile.start", "3", "--profile.steps", "2"]) == 0
    assert f"profile of steps 3 to 4 in {tmp_path / 'run/profile'}" in capsys.readouterr().out
    (trace,) = (tmp_path / "run/profile").rglob("*.xplane.pb")
    contents = trace.read_bytes()
    for module in (b"mlp/row_parallel_linear", b"attention/column_parallel_linear", b"vocab_parallel_cross_entropy"):
        assert module in contents, module
    assert list((tmp_path / "run/profile").rglob("perfetto_trace.json.gz"))


@pytest.mark.parametrize("schedule", journeys(["wsd", "linear"], "wsd"))
def test_the_logged_rate_is_the_schedule_s(tmp_path, command, schedule):
    flags = ["--train.steps", "20", "--optimizer.schedule", schedule, "--optimizer.learning-rate", "1e-3"]
    assert main([*command, *flags]) == 0
    config = OptimizerConfig(schedule=schedule, learning_rate=1e-3, warmup_steps=2)
    expected = [float(learning_rate(config, 20)(step)) for step in range(20)]
    np.testing.assert_allclose(list(records(tmp_path / "run", "learning_rate").values()), expected, rtol=1e-6)


@pytest.mark.journey
def test_a_profile_of_a_run_that_ends_first(tmp_path, command):
    assert main([*command, "--train.steps", "3", "--profile.start", "2", "--profile.steps", "9"]) == 0
    assert list((tmp_path / "run/profile").rglob("*.xplane.pb"))


def test_timing():
    timing = Timing()
    with timing.lost_to("save"):
        time.sleep(0.05)
    for _ in range(4):
        with timing.waiting_for_data():
            time.sleep(0.01)
        time.sleep(0.01)
        timing.tick()
    found = timing.record()
    assert 0.02 <= found["step_seconds_p50"] <= found["step_seconds_p90"] <= found["step_seconds_max"] < 1
    assert 0.01 <= found["data_wait_seconds"] <= found["step_seconds"]
    assert found["lost_to_save"] > 0.1
    assert 0.9 < found["goodput"] + found["lost_to_save"] <= 1
    with timing.lost_to("evaluate"):
        time.sleep(0.05)
    timing.tick()
    assert timing.record()["step_seconds"] < 0.05, "what is lost is no part of a step"


def test_flops_per_token_are_those_of_the_published_tables():
    """Llama 3.1 8B at 8,192 tokens: 14,451 tokens/s are 744 TFLOP/s (Megatron-Bridge's performance summary, 25.11)."""
    model = jaxtp.ModelConfig(
        vocab_size=128256, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, d_ff=14336
    )
    flops = flops_per_token(model, parameters=8_030_261_248, sequence_length=8192)
    assert 14451 * flops / 1e12 == pytest.approx(743.8, abs=0.1)


def test_experts_that_a_token_does_not_choose_do_not_count():
    model = jaxtp.ModelConfig(d_model=64, num_layers=3, d_ff=48, num_experts=8, experts_per_token=2)
    head, experts = model.vocab_size * model.d_model, 3 * 3 * 64 * 48
    found = flops_per_token(model, 10**6 + head + 8 * experts, sequence_length=0)
    assert found == 6 * (10**6 + 2 * experts)
    frozen = dataclasses.replace(model, lora=LoraConfig(rank=2, targets=("q_proj",)))
    adapters = 3 * 2 * (64 + model.num_heads * model.head_dim)
    found = flops_per_token(frozen, 10**6 + head + adapters + 8 * experts, sequence_length=0)
    assert found == 4 * (10**6 + 2 * experts) + 6 * adapters


@pytest.mark.parametrize(
    ("name", "every", "active"), [("qwen3_30b_a3b", 30.5, 3.35), ("mixtral_8x7b", 46.7, 12.9)], ids=str
)
def test_active_parameters_are_those_that_are_published(name, every, active):
    model = from_yaml(TrainConfig, Path(__file__).parents[2] / f"configs/{name}.yaml").model
    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(described(model), nnx.Param)))
    assert parameters / 1e9 == pytest.approx(every, abs=0.05)
    assert active_parameters(model, parameters) / 1e9 == pytest.approx(active, abs=0.05)


@pytest.mark.wide
@pytest.mark.parametrize("length", [64, 100, 1024])
def test_gated_delta_net_counts_three_products_with_its_states(length):
    model = jaxtp.ModelConfig(delta_value_heads=6, delta_key_heads=3, delta_key_dim=8, delta_value_dim=10)
    of_weights = flops_per_token(model, 10**6, sequence_length=0)
    of_states = flops_per_token(model, 10**6, sequence_length=length) - of_weights
    assert of_states == pytest.approx(model.num_layers * 18 * 6 * 8 * 10)


def test_frozen_weights_have_no_gradient_to_compute():
    """Without attention and lookup: 4 for a frozen parameter, 6 for one of an adapter."""
    model = jaxtp.ModelConfig(d_ff=64, lora=LoraConfig(rank=2, targets=("q_proj", "down_proj")))
    wide, head = model.num_heads * model.head_dim, model.vocab_size * model.d_model
    adapters = model.num_layers * 2 * (model.d_model + wide + 64 + model.d_model)
    found = flops_per_token(model, 10**7 + head + adapters, sequence_length=0)
    assert found == 4 * 10**7 + 6 * adapters


def test_utilization_is_absent_where_there_is_no_peak():
    """Nor is it in what a run writes: see train/test_command.py."""
    assert math.isnan(peak_flops(jax.devices()[0]))
    assert memory_record(jax.devices()[0]) == {}


class FakeGPU:
    device_kind = "NVIDIA H200"
    platform = "gpu"

    def memory_stats(self):
        return {"bytes_in_use": 5, "peak_bytes_in_use": 7, "other": 9}


def test_what_a_gpu_says():
    assert peak_flops(FakeGPU()) == 989.4e12
    assert describe_peak(FakeGPU()) is None
    assert memory_record(FakeGPU()) == {"memory_bytes": 5, "memory_peak_bytes": 7}


def test_a_gpu_that_is_not_known_is_not_taken_for_another():
    part = FakeGPU()
    part.device_kind = "NVIDIA H200 MIG 1g.18gb"
    assert math.isnan(peak_flops(part))
    assert "of 'NVIDIA H200 MIG 1g.18gb' not known: no mfu" in describe_peak(part)
    assert describe_peak(jax.devices()[0]) is None


def test_utilization_is_of_all_devices(monkeypatch):
    model = jaxtp.ModelConfig(num_layers=1)
    config = TrainConfig(model=model, data=DataConfig(global_batch_size=2, sequence_length=16))
    plan = plan_state(model, optimizers.build(OptimizerConfig(), 10), jaxtp.make_mesh(tp=2))
    rows = {"inputs": jax.ShapeDtypeStruct((2, 16), "int32")}
    flops = performance.row_flops(config, plan, jaxtp.Task(), rows)
    assert flops == 16 * flops_per_token(model, parameter_count(plan), 16)
    assert performance.utilization(plan.mesh, 100.0 * flops) == {}, "a CPU's peak is not known"
    monkeypatch.setattr(performance, "peak_flops", lambda device: 1e9)
    assert performance.utilization(plan.mesh, 100.0 * flops) == {"mfu": pytest.approx(100.0 * flops / 2e9)}


@pytest.mark.journey
def test_norms_by_group(tmp_path, command):
    groups = ["blocks.attention.*", "blocks.mlp.*", "embedding.*", "head.*", "*norm.scale"]
    assert main([*command, "--train.steps", "2", "--metrics.norm-groups", *groups]) == 0
    for kind in ("grad_norm", "param_norm"):
        whole = records(tmp_path / "run", kind)
        parts = [records(tmp_path / "run", f"{kind}/{group}") for group in groups]
        for step, norm in whole.items():
            assert math.hypot(*(part[step] for part in parts)) == pytest.approx(norm, rel=1e-6)


def wandb_history(path):
    """`{step: row}` of an offline run, through W&B's own records: LevelDB's log format around protocol buffers."""
    pb = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, at, rows, pending = path.read_bytes(), 7, {}, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # no header fits in the rest of a block
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record, pending = pb.Record.FromString(pending), b""
            items = {".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
            if items:
                rows.setdefault(items["step"], {}).update(items)
    return rows


@pytest.mark.journey
def test_weights_and_biases_holds_what_the_jsonl_says_also_after_a_resume(tmp_path, monkeypatch, command):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in ("3", "5"):
        assert main([*command, "--train.steps", steps, "--metrics.trackers", "tensorboard", "wandb"]) == 0
        time.sleep(1.1)  # its folders are told apart by the second
    histories = sorted((tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb"))
    assert len({path.name for path in histories}) == 1, "one run, continued"
    shown = {step: row["loss"] for path in histories for step, row in wandb_history(path).items() if "loss" in row}
    assert shown == records(tmp_path / "run")


@pytest.mark.journey
def test_aim_holds_what_the_jsonl_says_also_after_a_resume(tmp_path, command):
    aim = pytest.importorskip("aim")
    for steps in ("3", "5"):
        assert main([*command, "--train.steps", steps, "--metrics.trackers", "aim"]) == 0
    index = [Path(sys.executable).with_name("aim"), "storage", "--repo", str(tmp_path), "reindex"]
    subprocess.run(index, input="y\n", text=True, check=True, capture_output=True)
    (run,) = aim.Repo(str(tmp_path)).iter_runs()
    (loss,) = (metric for metric in run.metrics() if metric.name == "loss")
    assert run["config"]["train"]["steps"] == 5
    steps, (values, *_) = loss.data.numpy()
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == records(tmp_path / "run")


def test_a_tracker_that_is_not_installed_names_its_extra(monkeypatch, command, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "aim" else find(name))
    assert main([*command, "--metrics.trackers", "aim"]) == 2
    assert "metrics.trackers: aim is not installed; pip install 'jaxtp[aim]'" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["start_trace", "stop_trace"])
def test_a_profile_that_cannot_be_written_is_said_and_never_touches_the_run(failing, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for name in ("start_trace", "stop_trace"):
        monkeypatch.setattr(jax.profiler, name, fail if name == failing else lambda *args, **kwargs: None)
    profiler = Profiler(tmp_path, 1, 2, Timing())
    profiler.before(1)
    assert profiler.after(1, None) is None
    assert profiler.after(2, None) == "no profile of steps 1 to 2: [Errno 28] No space left on device"
    profiler.close()


@pytest.mark.journey
def test_the_first_step_of_a_run_is_shown_whatever_is_logged(tmp_path, command, capsys):
    """A resumed run shows its first step too, and its metrics are those of an undisturbed run."""
    sparse = [*command, "--train.log-every", "5", "--eval.every", "0"]
    assert main([*sparse, "--train.steps", "6"]) == 0
    assert re.findall(r"^step (\d+)/6 ", capsys.readouterr().out, re.MULTILINE) == ["1", "5", "6"]
    assert main([*sparse, "--train.steps", "9"]) == 0
    assert re.findall(r"^step (\d+)/9 ", capsys.readouterr().out, re.MULTILINE) == ["7", "9"]
    assert list(records(tmp_path / "run")) == [1, 5, 6, 9]


def test_one_logged_step_is_seen_in_the_picture(tmp_path):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n')
    draw([tmp_path], figure)
    (line,) = figure.axes[0].lines
    assert list(line.get_xdata()) == [1]
    assert line.get_marker() == "."
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": 0.5}}\n' for i in range(100)))
    figure = type(figure)()
    draw([tmp_path], figure)
    assert not figure.axes[0].lines[0].get_marker()


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse file"])
def test_what_is_no_list_of_metrics_is_one_error(kind, tmp_path):
    plant(tmp_path / "metrics.jsonl", kind)
    with watched(), pytest.raises(RunFolderError if kind != "sparse file" else RunFilesError):
        trackers_of(tmp_path)
    with watched(), pytest.raises(OSError, match=r"regular|larger"):
        read_metrics(tmp_path)


def test_metrics_are_not_written_through_a_link(tmp_path):
    (tmp_path / "victim").write_text("precious\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").symlink_to("../victim")
    trackers = trackers_of(tmp_path / "run")
    trackers.write({"step": 1, "loss": 1.0})
    trackers.close()
    assert (tmp_path / "victim").read_text() == "precious\n"
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'


def picture(folder, records, **options):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    draw([folder], figure, **options)
    return {panel.get_title(): panel for panel in figure.axes}


OWN = [
    {"step": 0, "eval_loss": 0.7, "eval_rewards/margins": 0.0},
    *(
        {"step": step, "loss": 0.6, "rewards/margins": 0.1, "temperature": 1.0, "rows_per_second": 5.0, "rows": step}
        | {"lost_to_start": 0.1, "step_seconds": 0.2, "grad_norm/blocks": 1.0, "nothing": None}
        for step in (10, 20)
    ),
    {"step": 20, "eval_loss": 0.5, "eval_rewards/margins": 0.3},
]


def test_a_picture_has_the_metrics_of_a_loss_and_no_empty_panel(tmp_path):
    panels = picture(tmp_path, OWN)
    assert list(panels) == ["loss", "rewards/margins", "temperature", "speed"]
    assert all(panel.lines for panel in panels.values())
    assert panels["speed"].get_ylabel() == "rows per second"
    assert not panels["loss"].get_ylabel(), "the unit of a user's loss is not known"


def test_training_and_validation_share_a_panel(tmp_path):
    panels = picture(tmp_path, OWN)
    for name, validation in (("loss", [0.7, 0.5]), ("rewards/margins", [0.0, 0.3])):
        training, evaluated = panels[name].lines
        assert (training.get_label(), evaluated.get_label()) == ("training", "validation")
        assert training.get_color() != evaluated.get_color()
        assert list(evaluated.get_xdata()) == [0, 20]
        assert list(evaluated.get_ydata()) == validation
        assert [text.get_text() for text in panels[name].get_legend().get_texts()] == ["training", "validation"]


def test_an_evaluation_is_drawn_over_another_metric_of_its_step(tmp_path):
    panels = picture(tmp_path, OWN, x="rows", metrics=["loss"])
    assert list(panels["loss"].lines[1].get_xdata()) == [20]


def test_the_loss_of_tokens_has_a_unit(tmp_path):
    records = [{"step": 0, "eval_loss": 2.0, "eval_perplexity": 7.4}, {"step": 1, "loss": 2.0}]
    panels = picture(tmp_path, records)
    assert list(panels) == ["loss"]
    assert panels["loss"].get_ylabel() == "nats per token"


@pytest.mark.parametrize("count", range(1, 12))
def test_panels_leave_no_place_empty(count, tmp_path):
    panels = picture(tmp_path, [{"step": 1, "loss": 1.0} | {f"metric {i}": 1.0 for i in range(count - 1)}])
    rows = {}
    for panel in panels.values():
        place = panel.get_subplotspec()
        rows.setdefault(place.rowspan.start, []).extend(place.colspan)
    assert len(panels) == count
    assert all(sorted(columns) == list(range(6)) for columns in rows.values())


def rewards_shown(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    report = Report()
    report.own_metrics = ("rewards/margins", "rewards/chosen", "logps/chosen")
    report.has_bar = True
    report.begin(0, 9)
    values = {"loss": 0.5, "rewards/margins": 0.25, "rewards/chosen": 1.0, "logps/chosen": -20.0}
    report.step(9, values, "7 rows/s")
    return capsys.readouterr().out


def test_a_step_shows_the_metrics_of_a_loss(capsys):
    report = Report()
    report.own_metrics = ("rewards/margins", "accuracy")
    values = {"step": 3, "loss": 0.5, "accuracy": 0.75, "rewards/margins": 0.125, "rows_per_second": 7.0}
    report.log({**values, "step_seconds": 1.0}, 9, "rows")
    assert (
        capsys.readouterr().out == "step 3/9  loss 0.5000  rewards/margins 0.125  accuracy 0.75  7 rows/s  0:06 left\n"
    )


def test_a_bar_shows_the_metrics_that_fit(monkeypatch, capsys):
    wide = rewards_shown(160, monkeypatch, capsys)
    assert "loss 0.5000  margins 0.25  rewards/chosen 1  logps/chosen -20  7 rows/s" in wide
    assert "loss 0.5000  margins 0.25  7 rows/s" in rewards_shown(100, monkeypatch, capsys)
    assert "loss 0.5000  7 rows/s" in rewards_shown(60, monkeypatch, capsys)
