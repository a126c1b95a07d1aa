"""What a run says of the memory of its devices, and when it refuses."""

import re

import jax
import pytest

from jaxtp.mesh import make_mesh, mesh_shape
from jaxtp.train import memory_check
from jaxtp.train import optimizer as optimizers
from jaxtp.train import session as session_module
from jaxtp.train.__main__ import main
from jaxtp.train.config import LaunchConfig, LoopConfig, TrainConfig
from jaxtp.train.memory import memory_per_device
from jaxtp.train.parts import Parts
from jaxtp.train.setup import Plan
from jaxtp.train.state import plan_state


@pytest.mark.journey
def test_what_exceeds_a_device_runs_where_that_is_asked_for(command, monkeypatch, capsys):
    monkeypatch.setattr(memory_check, "bytes_limit", lambda device: 1000)
    assert main([*command, "--train.allow-oversize", "--train.steps", "1"]) == 0
    assert "of 1.0 KB that JAX has there: does not fit" in capsys.readouterr().out


LINES = [  # allocator, the memory of a device as a multiple of a step's, what the line says
    ("default", 10, "fits$"),
    ("default", 1 / 0.95, r"fits; [1-9][\d.]* KB to spare; [1-9][\d.]* KB are advisable"),
    ("default", 1 / 1.05, "does not fit"),
    ("cuda_async", 1 / 0.95, "fits$"),
    ("cuda_async", 1 / 1.05, r"fits; WARNING: above the [1-9][\d.]* MB"),
    ("cuda_async", 1 / 1.2, "does not fit; WARNING"),
]


def test_the_memory_line_knows_the_allocator(monkeypatch):
    config = TrainConfig(train=LoopConfig(allow_oversize=True))
    rule = optimizers.build(config.optimizer, config.train.steps)
    plan = plan_state(config.model, rule, make_mesh(fsdp=2, tp=4))
    step = memory_per_device(config, mesh_shape(fsdp=2, tp=4))
    for allocator, share, said in LINES:
        monkeypatch.setattr(
            memory_check, "bytes_limit", lambda device, share=share: share * step.total
        )
        config = TrainConfig(
            launch=LaunchConfig(allocator=allocator), train=LoopConfig(allow_oversize=True)
        )
        run = Plan(config=config, parts=Parts(), shapes={})
        line = str(memory_check.require_memory(run, plan))
        assert line.startswith(
            f"{step.total / 1e6:,.1f} MB ({step.state / 1e6:,.1f} MB of state, exact"
        )
        assert re.search(said, line), (allocator, share, line)


def test_an_error_for_lack_of_memory_ends_the_run_with_advice(command, monkeypatch):
    def out_of_memory(*_, **__):
        message = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 15354000000 bytes."
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(session_module, "make_run", out_of_memory)
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        main(command)
    assert "--launch.allocator cuda_async" in raised.value.__notes__[0]
