"""Losses with settings: classes and functions with `train.loss_arguments`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from runs import SMOL_LM, records
from tables import read_table, write_json

import jaxtp
from jaxtp.config.python_object import load_object
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.tools.check.subject import random_batches
from jaxtp.train.__main__ import COMMAND, main
from jaxtp.train.config import DataConfig, OptimizerConfig, TrainConfig
from jaxtp.train.defaults import Decider, DeviceInfo
from jaxtp.train.parts import load_parts
from jaxtp.train.setup import check_loss, plan_step
from jaxtp.train.task import Task, with_references

TABLES = read_table(__file__)


@dataclass(frozen=True)
class Error:
    scale: float = 1.0
    power: Literal[1, 2] = 2

    def __call__(self, model, batch, key):
        errors = abs(model(batch["x"]) - batch["y"]) ** self.power
        return self.scale * errors.sum(), errors.size


class Plain:
    def __init__(self, scale):
        self.scale = 1 / scale

    def __call__(self, model, batch, key):
        return Error(self.scale)(model, batch, key)


@dataclass(frozen=True)
class SmallError(Error):
    least: int = 0
    most: int = 1

    def __post_init__(self):
        if self.least > self.most:
            raise ConfigError("least is more than most")


def error(model, batch, key, scale=1.0):
    return Error(scale)(model, batch, key)


instance = Error(scale=3.0)
optimizer = optax.sgd(1.0)
DEVICES = DeviceInfo(count=3, per_process=3, bfloat16=True, kind="devices")
MODEL = lambda x: x
BATCH = {"x": np.ones(4), "y": np.zeros(4)}


def loaded(name, **arguments):
    changes = {"train.loss": f"{__file__}:{name}", "train.loss_arguments": arguments}
    config = replace_nested(TrainConfig(), changes)
    config, parts = load_parts(config)
    return config, parts.loss.function


@pytest.mark.parametrize(
    ("name", "arguments", "expected", "recorded"),
    TABLES["arguments"],
)
def test_arguments_reach_classes_functions_and_instances(name, arguments, expected, recorded):
    config, loss = loaded(name, **arguments)
    assert loss(MODEL, BATCH, None)[0] == expected
    assert config.train.loss_arguments == recorded


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    TABLES["wrong"],
)
def test_a_wrong_argument_is_one_error(name, arguments, message):
    with pytest.raises(ConfigError, match=message):
        loaded(name, **arguments)


MINE = """
from collections import OrderedDict
from functools import partial as Partial

def build(rngs): ...
def error(model, batch, key, scale): ...
def log(trainer, step): ...

class Error:
    def __call__(self, model, batch, key): ...

PLAN = {"kernel": 1}
ROWS = [{"x": 1}]
"""


def test_a_name_that_is_not_there_is_refused_with_the_nearest_or_all_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    for setting, message in TABLES["absent"].items():
        flag, _, name = setting.partition(" ")
        with pytest.raises(ConfigError) as error:
            load_object(name, f"--{flag}")
        assert str(error.value).endswith(message), setting


class NeedsPairs:
    columns = ("inputs", "pairs")

    def __call__(self, model, batch, key):
        return dry(model, batch, key)


class BringsPairs(NeedsPairs):
    def example_batch(self, rows, length, config):
        ids = jax.ShapeDtypeStruct((rows, length), np.int32)
        return {"inputs": np.zeros((rows, length), np.int32), "labels": ids, "pairs": ids}


SMALL = {"model.num_layers": 1, "model.d_model": 32, "model.d_ff": 64, "data.global_batch_size": 4}


def small_run(name):
    """Returns the settings of a run with a loss of this file."""
    return replace_nested(
        TrainConfig(), SMALL | {"train.loss": f"{__file__}:{name}", "data.path": Path("absent")}
    )


def test_a_missing_column_is_refused_with_how_to_get_it():
    config = replace_nested(small_run("NeedsPairs"), {"data.path": None})
    with pytest.raises(
        ConfigError, match=r"needs 'pairs', and batches have inputs.*: jaxtp prepare --preference"
    ):
        plan_step(config)


def dry(model, batch, key, **options):
    return model.loss(batch["inputs"], batch["labels"], **options)


def wet(model, batch, key):
    return dry(model, batch, key, dropout_keys=jax.random.split(key, 4))


def test_dropout_that_a_loss_leaves_out_is_refused(tmp_path):
    settings = SMALL | {
        "model.dropout": 0.5,
        "data.sequence_length": 32,
        "run.dir": tmp_path / "run",
    }
    config = replace_nested(TrainConfig(), settings)
    batch = {name: jax.ShapeDtypeStruct((4, 32), np.int32) for name in ("inputs", "labels")}
    random, fixed = (load_parts(config, Task(loss=loss))[1] for loss in (wet, dry))
    assert check_loss(config, random, batch).is_random
    assert not check_loss(config, fixed, batch).is_random
    with pytest.raises(
        ConfigError, match=r"model.dropout=0.5 has no effect: .*:dry passes no dropout_keys"
    ):
        jaxtp.Trainer(settings=settings | {"train.loss": f"{__file__}:dry"}).__enter__()


def test_a_part_without_a_name_says_so_when_a_command_reads_it():
    config = replace_nested(TrainConfig(), {"model.build": "net.py:Net", "model.plan": "<dict>"})
    with pytest.raises(ConfigError, match=r"model.plan=<dict>: .* set --model.plan FILE.py:NAME"):
        load_parts(config)


def test_an_example_batch_replaces_data_that_are_not_here():
    config = small_run("BringsPairs")
    plan = plan_step(config)
    assert {name: each.shape for name, each in plan.shapes.items()} == dict.fromkeys(
        ("inputs", "labels", "pairs"), (4, 128)
    )
    first, *_ = random_batches(config, plan.parts.loss)
    assert first["labels"].any(), "an abstract column has random tokens"
    assert not first["inputs"].any()


def test_defaults_for_fine_tuning_leave_out_what_a_part_replaces(tmp_path):
    write_json(tmp_path / "config.json", SMOL_LM)
    parts = {"train.loss": "loss", "data.batches": "batches", "optimizer.build": "optimizer"}
    flags = [f"--{setting}={__file__}:{name}" for setting, name in parts.items()]
    config, notes = COMMAND.load([f"--model.from-hf={tmp_path}", *flags], Decider(DEVICES))
    assert config.data == replace(DataConfig(), batches=f"{__file__}:batches")
    assert config.optimizer == OptimizerConfig(build=f"{__file__}:optimizer")
    assert not any(note.startswith(("data.", "optimizer.")) for note in notes)


def test_arguments_need_a_loss_and_are_given_once():
    with pytest.raises(ConfigError, match=r"need a loss: set --train\.loss"):
        load_parts(replace_nested(TrainConfig(), {"train.loss_arguments": {"beta": 1}}))
    with pytest.raises(
        ConfigError, match=r"train.loss_arguments.scale is set, and the task has a loss"
    ):
        with_references(TrainConfig(), Task(loss=Error()), {"train.loss_arguments.scale"})


def build(*, rngs):
    return nnx.Linear(4, 2, rngs=rngs)


def batches(step):
    return {"x": np.ones((4, 4), np.float32), "y": np.zeros((4, 2), np.float32)}


@pytest.mark.wide
def test_a_run_records_its_loss_so_that_its_file_and_flags_resume_it(tmp_path, capsys):
    settings = {"train.log_every": 1, "optimizer.learning_rate": 1e-3}
    with jaxtp.Trainer(
        model=build,
        loss=Error(scale=0.5),
        batches=batches,
        mesh="dp=1",
        folder=tmp_path / "run",
        steps=1,
        settings=settings,
    ) as trainer:
        assert trainer.run_to_end()
    assert "test_loss_arguments:Error(scale=0.5, power=2)" in capsys.readouterr().out
    again = ["--config", f"{tmp_path}/run/config.yaml", "--allow-code"]
    assert main([*again, "--train.steps=2"]) == 0
    assert "train.loss_arguments" not in capsys.readouterr().out
    assert main([*again, "--train.steps=3", "--train.loss-arguments.scale=1e-1"]) == 0
    assert "changed since: train.loss_arguments.scale: 0.5 -> 0.1" in capsys.readouterr().out
    losses = records(tmp_path / "run")
    assert losses[3] == pytest.approx(losses[2] / 5, rel=0.1)
