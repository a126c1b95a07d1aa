"""The length of a run in epochs: which steps it comes to, and who sees them."""

import math
from pathlib import Path

import pytest
import yaml
from runs import SMALL, TEXT, records
from support import assert_refused

from jaxtp.config.schema import ConfigError, from_yaml
from jaxtp.tools.estimate.__main__ import main as estimate
from jaxtp.train.__main__ import COMMAND, main
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import Decider, DeviceInfo
from jaxtp.train.init_source import InitSource
from jaxtp.train.optimizer import learning_rate
from jaxtp.train.parts import Parts
from jaxtp.train.run_data import load_tokens
from jaxtp.train.run_report import describe_steps

CPU = DeviceInfo(count=1, per_process=1, bfloat16=False, kind="virtual CPU devices")


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    return [
        f"--data.path={tmp_path}/text.txt",
        "--data.sequence-length=32",
        f"--run.dir={tmp_path}/r",
    ]


def resolved(*flags):
    return COMMAND.load(flags, Decider(CPU))


def rows_of(config):
    return sum(map(len, load_tokens(config, InitSource(), Parts()).train_rows))


def test_epochs_come_to_steps_of_the_rows_and_the_batch(text):
    config, notes = resolved(*text, "--train.epochs=0.5", "--data.global-batch-size=6")
    rows = rows_of(config)
    assert config.train.steps == math.ceil(0.5 * rows / 6)
    assert config.train.epochs is None, "from here on they are steps"
    assert (
        f"train.steps = {config.train.steps}: 0.5 epochs of {rows:,} sequences, 6 in a step"
        in notes
    )


def test_a_flag_or_a_file_replaces_what_the_file_below_it_says(tmp_path, text):
    (tmp_path / "steps.yaml").write_text("train: {steps: 7}\n")
    (tmp_path / "epochs.yaml").write_text("base: steps.yaml\ntrain: {epochs: 2}\n")
    steps = [f"--config={tmp_path}/steps.yaml", *text]
    epochs = [f"--config={tmp_path}/epochs.yaml", *text]
    two = resolved(*epochs)[0].train.steps
    assert resolved(*steps, "--train.epochs=2")[0].train.steps == two
    assert resolved(*epochs, "--train.steps=9")[0].train.steps == 9
    with pytest.raises(ConfigError, match=r"train.steps=7 and train.epochs=2 exclude each other"):
        resolved(*text, "--train.epochs=2", "--train.steps=7")
    with pytest.raises(ConfigError, match="a run has fewer than 2,147,483,648 steps"):
        resolved(*text, "--train.epochs=1e12")


def test_a_resumed_run_says_what_is_done_and_what_is_left(text, monkeypatch):
    """As above; the same command has another batch."""
    config, _ = resolved(*text)
    rows = rows_of(config)
    data = load_tokens(config, InitSource(), Parts())
    monkeypatch.setattr(
        "jaxtp.train.defaults.newest_with_info", lambda run: (Path("10"), {"next_sample": 160})
    )
    flags = [*text, "--optimizer.warmup-steps=10", "--data.global-batch-size=8", "--train.epochs"]
    left = math.ceil((1000 * rows - 160) / 8)
    _, notes = resolved(*flags, "1000")
    what = (
        f"1,000 epochs of {rows:,} sequences; steps done: 10; left: {left:,}, of 8 sequences each"
    )
    assert f"train.steps = {10 + left}: {what}" in notes
    ended, _ = resolved(*flags, str(160 / rows))
    done = f"10: 10 done, 0 left, of 256 each; 5,120 bytes in all, {160 / rows:.2g} epochs"
    assert describe_steps(ended.data, 10, data, 10, 160) == done
    said = describe_steps(ended.data, 10**6, data, 0, 0)
    assert said.startswith("1,000,000 x 256 = 256,000,000 bytes, ")
    assert f", {8 * 10**6 / rows:,.0f} epochs" in said


def test_an_estimate_of_epochs_needs_the_data(tmp_path, text, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(
        estimate,
        ["--train.epochs=3"],
        "train.epochs=3 needs a dataset to count its steps: add --data.path",
        capsys,
    )
    flags = [*text[:2], "--hardware=h100x8", "--mesh=dp=8", "--as-configured"]
    config, _ = resolved(*text, "--train.epochs=3")
    assert estimate([*flags, "--train.epochs=3", "--write=e.yaml"]) == 0
    written = yaml.safe_load((tmp_path / "e.yaml").read_text())
    assert "epochs" not in written["train"]
    assert written["train"]["steps"] == config.train.steps


@pytest.mark.journey
def test_a_run_of_epochs_reads_each_sample_so_often_on_any_batch(tmp_path):
    """Stopped by --train.steps and resumed with another batch, on another mesh."""
    (tmp_path / "text.txt").write_text(TEXT[:8000])
    run = tmp_path / "run"
    command = [*SMALL, f"--data.path={tmp_path}/text.txt", f"--run.dir={run}"]
    assert main([*command, "--mesh=tp=2", "--train.steps=4"]) == 0
    assert (
        main([*command, "--mesh=fsdp=2,tp=2", "--train.epochs=1", "--data.global-batch-size=4"])
        == 0
    )
    config = from_yaml(TrainConfig, run / "config.yaml")
    rows = rows_of(config)
    assert config.train.steps == max(records(run)) == 4 + math.ceil((rows - 32) / 4)
    rates = records(run, "learning_rate")
    last = config.train.steps
    assert rates[last] == pytest.approx(float(learning_rate(config.optimizer, last)(last - 1)))
