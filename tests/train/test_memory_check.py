"""What a run says of the memory of its devices, and when it refuses."""

import pytest
from runs import SMALL, TEXT, mesh

from jaxtp.mesh import sized
from jaxtp.train import memory_check
from jaxtp.train.__main__ import main
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import memory_per_device


@pytest.fixture
def command(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    own = ["--data.path", str(tmp_path / "text.txt"), "--run.dir", str(tmp_path / "run"), "--train.steps", "2"]
    return [*SMALL, *own, *mesh(1, 1, 2)]


@pytest.mark.journey
def test_nothing_is_said_of_devices_that_do_not_say(command, capsys):
    assert main(command) == 0
    assert "memory  " not in capsys.readouterr().out


def test_what_exceeds_a_device_is_refused(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: 1000)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "a step takes" in error
    assert "--train.allow-oversize" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.journey
def test_what_exceeds_a_device_runs_where_that_is_asked_for(command, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: 1000)
    assert main([*command, "--train.allow-oversize"]) == 0
    assert "GB that JAX has there: does not fit" in capsys.readouterr().out


@pytest.mark.journey
def test_what_fits_is_told(command, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: 10**10)
    assert main(command) == 0
    assert "of 10.0 GB that JAX has there: fits" in capsys.readouterr().out


def test_the_account_adds_up():
    memory = memory_per_device(TrainConfig(), sized(fsdp=2, tp=4))
    assert memory.total > memory.state > 0
    assert f"{memory.total / 1e9:,.1f} GB" in memory_check._account(memory)
