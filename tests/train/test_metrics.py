"""What a run measures of itself, and where it writes it."""

import json
import math
import time

import jax
import numpy as np
import pytest
from runs import SMALL, TEXT, mesh, records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import jaxtp
from jaxtp.train.__main__ import main
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.timing import Timing
from jaxtp.train.trackers import Trackers
from jaxtp.train.utilization import flops_per_token, memory_record, peak_flops


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [*SMALL, "--data.path", str(tmp_path / "text.txt"), *mesh(1, 2, 2), "--run.dir", str(tmp_path / "run")]


def read_tensorboard(folder, tag):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_says_what_the_jsonl_says_also_after_a_resume(tmp_path, command):
    for steps in ("4", "7"):
        assert main([*command, "--train.steps", steps]) == 0
    for tag in ("loss", "learning_rate", "param_norm", "eval_perplexity", "goodput"):
        written, shown = records(tmp_path / "run", tag), read_tensorboard(tmp_path / "run", tag)
        assert shown.keys() == written.keys()
        np.testing.assert_allclose(list(shown.values()), list(written.values()), rtol=1e-6)
    perplexity, loss = (records(tmp_path / "run", key)[7] for key in ("eval_perplexity", "eval_loss"))
    assert perplexity == pytest.approx(math.exp(loss))


def test_steps_that_a_killed_run_had_logged_are_forgotten(tmp_path):
    first = Trackers(("tensorboard",), tmp_path, resumed_at=0)
    for step in range(1, 6):
        first.write({"step": step, "loss": float(step)})
    first.close()
    time.sleep(1.1)  # event files are told apart by the second in which they were opened
    again = Trackers(("tensorboard",), tmp_path, resumed_at=3)
    again.write({"step": 4, "loss": 40.0})
    again.write({"step": 5, "loss": math.nan})
    again.close()
    assert records(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0, 5: None}
    shown = read_tensorboard(tmp_path, "loss")
    assert {step: shown[step] for step in (1, 2, 3, 4)} == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0}


def test_no_tracker_but_the_file(tmp_path, command):
    (tmp_path / "c.yaml").write_text("metrics: {trackers: []}\n")
    assert main(["--config", str(tmp_path / "c.yaml"), *command, "--train.steps", "2"]) == 0
    assert not (tmp_path / "run/tensorboard").exists()
    assert records(tmp_path / "run").keys() == {1, 2}


def test_a_profile(tmp_path, command, capsys):
    assert main([*command, "--train.steps", "6", "--profile.start", "3", "--profile.steps", "2"]) == 0
    assert f"profile of steps 3 to 4 in {tmp_path / 'run/profile'}" in capsys.readouterr().out
    (trace,) = (tmp_path / "run/profile").rglob("*.xplane.pb")
    contents = trace.read_bytes()
    for module in (b"mlp/row_parallel_linear", b"attention/column_parallel_linear", b"vocab_parallel_cross_entropy"):
        assert module in contents, module
    assert list((tmp_path / "run/profile").rglob("perfetto_trace.json.gz"))


@pytest.mark.parametrize("schedule", ["wsd", "linear"])
def test_the_logged_rate_is_the_schedule_s(tmp_path, command, schedule):
    flags = ["--train.steps", "20", "--optimizer.schedule", schedule, "--optimizer.learning-rate", "1e-3"]
    assert main([*command, *flags]) == 0
    config = OptimizerConfig(schedule=schedule, learning_rate=1e-3, warmup_steps=2)
    expected = [float(learning_rate(config, 20)(step)) for step in range(20)]
    np.testing.assert_allclose(list(records(tmp_path / "run", "learning_rate").values()), expected, rtol=1e-6)


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


def test_utilization_is_absent_where_there_is_no_peak(tmp_path, command):
    assert math.isnan(peak_flops(jax.devices()[0]))
    assert memory_record(jax.devices()[0]) == {}
    assert main([*command, "--train.steps", "2"]) == 0
    row = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert not {"mfu", "memory_bytes"} & row.keys()
    assert row["tokens_per_second"] == pytest.approx(4 * row["tokens_per_second_per_device"])


class FakeGPU:
    device_kind = "NVIDIA H200"

    def memory_stats(self):
        return {"bytes_in_use": 5, "peak_bytes_in_use": 7, "other": 9}


def test_what_a_gpu_says():
    assert peak_flops(FakeGPU()) == 989.4e12
    assert memory_record(FakeGPU()) == {"memory_bytes": 5, "memory_peak_bytes": 7}
