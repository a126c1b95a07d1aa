"""What a run says of the memory of its devices, and when it refuses."""

import re

import jax
import pytest
from runs import SMALL, TEXT, mesh

from jaxtp.mesh import make_mesh, mesh_shape
from jaxtp.train import memory_check
from jaxtp.train import optimizer as optimizers
from jaxtp.train import trainer as trainer_module
from jaxtp.train.__main__ import main
from jaxtp.train.config import LaunchConfig, LoopConfig, TrainConfig
from jaxtp.train.memory import memory_per_device
from jaxtp.train.state import plan_state


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
    assert "of 1.0 KB that JAX has there: does not fit" in capsys.readouterr().out


@pytest.mark.journey
def test_what_fits_is_told(command, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: 10**10)
    assert main(command) == 0
    assert "of 10.0 GB that JAX has there: fits" in capsys.readouterr().out


def test_the_account_adds_up():
    step = memory_per_device(TrainConfig(), mesh_shape(fsdp=2, tp=4))
    assert step.total > step.state > 0
    memory = memory_check.StepMemory(step, 1e12, "default")
    assert memory.fits
    assert str(memory).startswith(f"{step.total / 1e6:,.1f} MB ({step.state / 1e6:,.1f} MB of state, exact")


@pytest.mark.parametrize(
    ("allocator", "share", "said"),
    [
        ("default", 10, None),
        ("default", 1 / 0.95, r"fits; [1-9][\d.]* KB to spare; [1-9][\d.]* KB are advisable, because fragments"),
        ("default", 1 / 1.05, "does not fit"),
        ("cuda_async", 1 / 0.95, None),
        ("cuda_async", 1 / 1.05, r"fits; WARNING: above the [1-9][\d.]* MB that the pool of cuda_async retains"),
        ("cuda_async", 1 / 1.2, "does not fit; WARNING"),
    ],
)
def test_the_memory_line_knows_the_allocator(allocator, share, said, monkeypatch):
    limit = share * memory_per_device(TrainConfig(), mesh_shape(fsdp=2, tp=4)).total
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: limit)
    config = TrainConfig(launch=LaunchConfig(allocator=allocator), train=LoopConfig(allow_oversize=True))
    optimizer = optimizers.build(config.optimizer, config.train.steps)
    line = str(memory_check.require_memory(config, plan_state(config.model, optimizer, make_mesh(fsdp=2, tp=4))))
    assert line.endswith("fits") if said is None else re.search(said, line)


def test_an_error_for_lack_of_memory_ends_the_run_with_advice(command, monkeypatch):
    def out_of_memory(*_, **__):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 15354000000 bytes."
        )

    monkeypatch.setattr(trainer_module, "make_run", out_of_memory)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        main(command)
    assert "--launch.allocator cuda_async" in raised.value.__notes__[0]
