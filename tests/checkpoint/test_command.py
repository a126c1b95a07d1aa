"""`jaxtp checkpoint`: inspect, verify, diff."""

import dataclasses
import json
import shutil

import jax
import pytest

import jaxtp
from jaxtp.checkpoint import storage
from jaxtp.checkpoint.__main__ import describe_difference, main
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.train import optimizer
from jaxtp.train.config import OptimizerConfig
from jaxtp.train.state import plan_state

MODEL = jaxtp.ModelConfig(vocab_size=19, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=2, d_ff=8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two checkpoints of a run on (1, 2, 2), of when there was no cp; in the second, one array has changed."""
    folder = tmp_path_factory.mktemp("run")
    plan = plan_state(MODEL, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(1, 2, 2))
    state = plan.create(seed=0)
    checkpoints = Checkpoints(folder / "checkpoints")
    info = {"next_sample": 8, "mesh": {"dp": 1, "fsdp": 2, "tp": 2}, "processes": 1, "versions": {"jax": "x"}}
    info |= {"corpus": {"sha256": "abc"}, "config": {"model": {"d_model": 8}}}
    checkpoints.save(1, state, plan.mesh, info)
    scale = state["model"]["norm"]["scale"]
    state["model"]["norm"]["scale"] = scale.replace(jax.device_put(scale[...] * 2, scale[...].sharding))
    checkpoints.save(2, state, plan.mesh, info)
    checkpoints.close()
    return folder


def test_inspect(run, capsys):
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert "step      2, next sample 8" in out
    assert "written   on mesh dp 1 x fsdp 2 x cp 1 x tp 2 by 1 process(es)" in out
    line = next(line for line in out.splitlines() if line.startswith("model.embedding.embedding"))
    assert line.split()[1:4] == ["19x8", "float32", "608"]
    assert line.endswith("P('tp', ('fsdp', 'cp'))") or line.endswith("PartitionSpec('tp', ('fsdp', 'cp'))")


def test_inspect_a_copy_of_a_checkpoint_that_another_loop_wrote(tmp_path, capsys):
    plan = plan_state(MODEL, optimizer.build(OptimizerConfig(), 10), jaxtp.make_mesh(1, 2, 2))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, plan.create(seed=0), plan.mesh, {"config": "mine.yaml", "mesh": [4]})
    copy = (tmp_path / "1").rename(tmp_path / "best")
    assert main(["inspect", str(copy), "--json", str(tmp_path / "record.json")]) == 0
    out = capsys.readouterr().out
    assert 'info      {"config": "mine.yaml", "mesh": [4], "eval_loss": null}\n' in out
    assert "model.embedding.embedding" in out
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["step"], record["config"]) == ("best", "mine.yaml")


def test_verify(run, tmp_path, capsys):
    assert main(["verify", str(run / "checkpoints/1")]) == 0
    assert "no problems" in capsys.readouterr().out
    shutil.copytree(run, tmp_path / "run")
    largest = max((tmp_path / "run/checkpoints/2/state").rglob("*"), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    assert main(["verify", str(tmp_path / "run")]) in (1, 2)
    captured = capsys.readouterr()
    assert "arrays, 1 problem\n" in captured.out or "damaged" in captured.err
    assert "Traceback" not in captured.out + captured.err


def test_diff(run, capsys):
    first, second = (str(run / "checkpoints" / step) for step in "12")
    assert main(["diff", first, second]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out == ["1.000e+00               model.norm.scale", out[-1]]
    assert out[-1].startswith("1 of ")
    assert main(["diff", first, first]) == 0


def test_mistakes(tmp_path, capsys):
    assert main(["inspect", str(tmp_path)]) == 2
    assert "no finished checkpoint there; name the folder of a run" in capsys.readouterr().err


def test_an_array_that_was_not_part_of_the_saved_state_is_compared_by_its_elements(run):
    first, second = (storage.open_checkpoint(run / "checkpoints" / step) for step in "12")
    sums = first.info["checksums"]
    without = {name: sums[name] for name in sums if name != "model.norm.scale"}
    unknown = dataclasses.replace(first, info={**first.info, "checksums": without})
    assert describe_difference(unknown, second, "model.norm.scale") == "1.000e+00"
