"""`jaxtp estimate` and `jaxtp explain` with the model, plan, loss, batches and optimizer of a
run.
"""

from pathlib import Path

import pytest
from hf_reference import FOLDER
from support import assert_refused, task_flags
from tables import read_json, read_table, write_json

from jaxtp.config.schema import from_yaml
from jaxtp.mesh import make_mesh
from jaxtp.tools.estimate.__main__ import main as estimate
from jaxtp.tools.explain.__main__ import main as explain
from jaxtp.train.config import TrainConfig
from jaxtp.train.setup import plan_step
from jaxtp.train.state import bytes_per_device

EXAMPLES = Path(__file__).parents[3] / "scripts/examples"
SOURCE = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import optax
from vit import PLAN, batches, build, loss

def unlike(model, batch, key):
    return batch["pictures"], 1

momentum = optax.sgd(1e-3, momentum=0.9)
factored = lambda: optax.chain(optax.clip(1.0), optax.adafactor(1e-3))
"""
SETTINGS = """
model: {build: FILE:build, plan: FILE:PLAN}
train: {loss: FILE:loss, accumulation: 2}
data: {batches: FILE:batches, global_batch_size: 32}
optimizer: {build: FILE:factored}
"""


@pytest.fixture
def run(tmp_path):
    """A folder with a task, and the settings of a run of it."""
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "run.yaml").write_text(SETTINGS.replace("FILE", f"{tmp_path}/mine.py"))
    return tmp_path


@pytest.mark.wide
def test_the_estimate_of_a_run_is_its_state_and_the_work_of_explain(run):
    settings = [
        "--allow-code",
        "--config",
        f"{run}/run.yaml",
        "--mesh=fsdp=2,tp=2",
        "--json",
        f"{run}/out.json",
    ]
    assert estimate([*settings, "--hardware=h100x4"]) == 0
    (mesh,) = read_json(run / "out.json")["meshes"]
    assert explain(settings) == 0
    explained = read_json(run / "out.json")
    plan = plan_step(from_yaml(TrainConfig, run / "run.yaml"))
    blueprint, _ = plan.state_on(make_mesh(fsdp=2, tp=2))
    memory = mesh["bytes_per_device"]
    assert memory["parameters"] + memory["optimizer"] == bytes_per_device(blueprint)
    # There are two micro-batches.
    assert mesh["bytes_sent"] == {axes: 2 * sent for axes, sent in explained["bytes_sent"].items()}
    assert mesh["flops_per_device"] == 2 * explained["flops_per_device"] > 0


@pytest.mark.wide
def test_without_a_plan_each_mesh_has_a_proposal_as_in_a_run(run, capsys):
    flags = task_flags(run / "mine.py", model="build", loss="loss", batches="batches")
    assert estimate([*flags, "--hardware=h100x2", "--json", f"{run}/out.json"]) == 0
    record = read_json(run / "out.json")
    assert {(mesh["tp"], bool(mesh["plan"])) for mesh in record["meshes"]} == {
        (1, False),
        (2, True),
    }
    assert "mesh.cp=2 splits sequences" in next(iter(record["refused"].values()))
    assert explain([*flags, "--mesh=tp=2"]) == 0
    assert "blocks.*.attention.query" in capsys.readouterr().out


@pytest.mark.wide
def test_a_configuration_is_explained_on_a_micro_batch(tmp_path):
    """Its model is that of its folder."""
    settings = {
        "model": {"from_hf": str(FOLDER / "qwen3"), "remat": "none"},
        "data": {"sequence_length": 16},
        "mesh": {"fsdp": 1, "tp": 2},
        "train": {"accumulation": 2},
    }
    write_json(tmp_path / "small.yaml", settings)
    records = []
    for count in (2, 1):
        words = ["--config", f"{tmp_path}/small.yaml", "--json", f"{tmp_path}/out.json"]
        assert explain([*words, f"--train.accumulation={count}"]) == 0
        records.append(read_json(tmp_path / "out.json"))
    part, whole = records
    assert part["modules"] == whole["modules"]
    assert whole["flops_per_device"] == 2 * part["flops_per_device"] > 0
    assert "blocks.attention.qk_norms.0" in {row["module"] for row in whole["modules"]}


@pytest.mark.wide
def test_frozen_weights_have_the_dtype_of_their_files(tmp_path, capsys):
    """config.json states it where there are no weights."""
    config = read_json(FOLDER / "qwen3/config.json")
    write_json(tmp_path / "config.json", config | {"dtype": "bfloat16"})
    words = ["--model.from-hf", str(tmp_path), "--mesh=tp=2", "--data.sequence-length=16"]
    assert explain([*words, "--model.lora.rank=2", f"--json={tmp_path}/out.json"]) == 0
    modules = {row["module"]: row for row in read_json(tmp_path / "out.json")["modules"]}
    dtypes = {}
    for name in ("blocks.attention.out", "blocks.attention.out.loras.0"):
        dtypes[name.rpartition("out")[2]] = modules[name]["parameters"][0]["dtype"]
    assert dtypes == {"": "bfloat16", ".loras.0": "float32"}
    assert "default model.precision.param = bfloat16" in capsys.readouterr().out


@pytest.mark.wide
def test_an_optimizer_of_the_users_has_its_own_state(run):
    """The decoder's formulas are those of the optimizer in the settings."""
    sizes = ["--model.num-layers=1", "--model.remat=none", "--mesh=fsdp=2", "--hardware=h100x2"]
    command = [*task_flags(run / "mine.py", optimizer="momentum"), *sizes, f"--json={run}/out.json"]
    assert estimate(command) == 0
    (mesh,) = read_json(run / "out.json")["meshes"]
    memory = mesh["bytes_per_device"]
    assert memory["parameters"] <= memory["optimizer"] < 1.1 * memory["parameters"], (
        "one moment, and counters"
    )


REFUSED = read_table(__file__)


@pytest.mark.parametrize("words", REFUSED)
def test_a_mistake_is_refused(run, capsys, words):
    command, *rest = words.format(run=run).split()
    main = {"estimate": estimate, "explain": explain}[command]
    assert_refused(main, rest, REFUSED[words].format(run=run), capsys)
