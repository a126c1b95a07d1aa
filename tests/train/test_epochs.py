"""The length of a run in epochs: which steps it comes to, and who sees them."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import yaml
from runs import SMALL, TEXT, records, smol_lm

from jaxtp.config.schema import ConfigError, from_yaml, replace_nested
from jaxtp.tools.estimate.__main__ import main as estimate
from jaxtp.train.__main__ import COMMAND, main
from jaxtp.train.config import DataConfig, LoopConfig, TrainConfig
from jaxtp.train.defaults import DeviceInfo, resolve_defaults
from jaxtp.train.init_source import InitSource
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.run_data import load_tokens
from jaxtp.train.run_report import describe_steps
from jaxtp.train.setup import with_steps

CPU = DeviceInfo(count=1, per_process=1, bfloat16=False, kind="virtual CPU devices")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [f"--data.path={tmp_path}/text.txt", "--data.sequence-length=32", f"--run.dir={tmp_path}/r"]


def resolved(*flags):
    return COMMAND.load(flags, partial(resolve_defaults, devices=CPU))


def rows_of(config):
    return sum(map(len, load_tokens(config, InitSource()).train_rows))


def test_epochs_come_to_steps_of_the_rows_and_the_batch(text):
    for epochs in ("3", "0.5"):
        config, notes = resolved(*text, "--train.epochs", epochs, "--data.global-batch-size=6")
        rows = rows_of(config)
        assert config.train.steps == math.ceil(float(epochs) * rows / 6)
        assert config.train.epochs is None, "from here on they are steps"
        assert f"train.steps = {config.train.steps}: {epochs} epochs of {rows:,} sequences, 6 in a step" in notes


def test_a_flag_or_a_file_replaces_what_the_file_below_it_says(tmp_path, text):
    (tmp_path / "steps.yaml").write_text("train: {steps: 7}\n")
    (tmp_path / "epochs.yaml").write_text("base: steps.yaml\ntrain: {epochs: 2}\n")
    steps = [f"--config={tmp_path}/steps.yaml", *text]
    epochs = [f"--config={tmp_path}/epochs.yaml", *text]
    two = resolved(*epochs)[0].train.steps
    assert two == math.ceil(2 * rows_of(resolved(*text)[0]) / 16)
    assert resolved(*steps, "--train.epochs=2")[0].train.steps == two
    assert resolved(*epochs, "--train.steps=9")[0].train.steps == 9
    with pytest.raises(
        ConfigError, match=r"train.steps=7 and train.epochs=2 exclude each other: leave one of them out"
    ):
        resolved(*text, "--train.epochs=2", "--train.steps=7")
    with pytest.raises(ConfigError, match="a run has less than 2,147,483,648 steps"):
        resolved(*text, "--train.epochs=1e12")


def test_a_resumed_run_counts_what_is_left_of_its_epochs(text):
    """Ten steps of 16 samples were made, and the batch is another now."""
    config, _ = resolved(*text)
    rows = rows_of(config)

    def steps(epochs, batch, resumed=True):
        asked = TrainConfig(data=DataConfig(global_batch_size=batch), train=LoopConfig(epochs=epochs))
        return with_steps(asked, rows, (10, 160) if resumed else (0, 0))[0].train.steps

    assert steps(3, 16) == math.ceil(3 * rows / 16), "an undisturbed run makes as many"
    assert steps(3, 8) == 10 + math.ceil((3 * rows - 160) / 8)
    assert steps(100 / rows, 16) == 10, "it is at its end"


def test_a_resumed_run_says_what_is_done_and_what_is_left(text, monkeypatch):
    """As above; the same command has another batch."""
    config, _ = resolved(*text)
    rows = rows_of(config)
    data = load_tokens(config, InitSource())
    monkeypatch.setattr("jaxtp.train.setup.newest_with_info", lambda run: (Path("10"), {"next_sample": 160}))
    flags = [*text, "--optimizer.warmup-steps=10", "--data.global-batch-size=8", "--train.epochs"]
    left = math.ceil((1000 * rows - 160) / 8)
    _, notes = resolved(*flags, "1000")
    what = f"1,000 epochs of {rows:,} sequences; steps done: 10; left: {left:,}, of 8 sequences each"
    assert f"train.steps = {10 + left}: {what}" in notes
    ended, notes = resolved(*flags, str(160 / rows))
    assert any("steps done: 10; left: 0, of 8 sequences each" in note for note in notes)
    done = f"10: 10 done, 0 left, of 256 each; 5,120 bytes in all, {160 / rows:.2g} epochs"
    assert describe_steps(ended, data, 10, 160) == done
    fresh = replace_nested(ended, {"train.steps": 10**6})
    for counted in ((0, 0), (10, 80)):
        assert describe_steps(fresh, data, *counted).startswith("1,000,000 of 256 = 256,000,000 bytes, ")
    assert f", {8 * 10**6 / rows:,.0f} epochs" in describe_steps(fresh, data, 0, 0)


def test_the_warm_up_of_a_tuned_model_is_a_share_of_these_steps(tmp_path, text):
    model = smol_lm(tmp_path / "model")
    config, notes = resolved(*text, f"--model.from-hf={model}", "--train.epochs=3")
    assert config.train.steps == math.ceil(3 * rows_of(config) / config.data.global_batch_size) > 400
    assert config.optimizer.warmup_steps == round(0.03 * config.train.steps)
    assert f"optimizer.warmup_steps = {config.optimizer.warmup_steps}: 3% of {config.train.steps} steps" in "".join(
        notes
    )


def test_an_estimate_of_epochs_needs_the_data(tmp_path, text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert estimate(["--train.epochs=3"]) == 2
    message = "train.epochs=3 needs a dataset to count its steps: add --data.path, or give --train.steps instead"
    assert message in capsys.readouterr().err
    flags = [*text[:2], "--hardware=h100x8", "--mesh=dp=8", "--as-configured", "--json", "e.json"]
    assert estimate([*flags, "--train.epochs=3"]) == 0
    config, _ = resolved(*text, "--train.epochs=3")
    assert json.loads((tmp_path / "e.json").read_text())["steps"] == config.train.steps
    assert estimate([*flags, "--train.epochs=3", "--write", "e.yaml"]) == 0
    written = yaml.safe_load((tmp_path / "e.yaml").read_text())
    assert written["train"]["epochs"] == 3
    assert "steps" not in written["train"], "the run counts them"
    assert resolved("--config", "e.yaml")[0].train.steps == config.train.steps


@pytest.mark.journey
def test_a_run_of_epochs_reads_each_sample_so_often_on_any_batch(tmp_path, capsys):
    """Stopped by --train.steps and resumed with another batch, on another mesh."""
    (tmp_path / "text.txt").write_text(TEXT[:8000])
    run = tmp_path / "run"
    command = [*SMALL, f"--data.path={tmp_path}/text.txt", f"--run.dir={run}"]
    assert main([*command, "--mesh=tp=2", "--train.steps=4"]) == 0
    assert main([*command, "--mesh=fsdp=2,tp=2", "--train.epochs=1", "--data.global-batch-size=4"]) == 0
    config = from_yaml(TrainConfig, run / "config.yaml")
    rows = rows_of(config)
    assert config.train.steps == max(records(run)) == 4 + math.ceil((rows - 32) / 4)
    assert yaml.safe_load((run / "config.yaml").read_text())["train"]["epochs"] is None
    rates = records(run, "learning_rate")
    last = config.train.steps
    assert rates[last] == pytest.approx(float(learning_rate(config.optimizer, last)(last - 1)))
    assert main([f"--config={run}/config.yaml"]) == 0
    assert f"already at step {config.train.steps}" in capsys.readouterr().out
