"""`jaxtp estimate` as its users meet it."""

import math
import re
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import yaml
from hf_reference import FOLDER
from support import assert_refused, swept
from tables import read_json, read_table

from jaxtp.analysis.hardware import find
from jaxtp.analysis.schedule import Scheduled
from jaxtp.config.schema import from_yaml
from jaxtp.mesh import AXES, mesh_shape
from jaxtp.tools.estimate import __main__ as command
from jaxtp.tools.estimate.__main__ import main
from jaxtp.tools.estimate.compiler import Compiled, DoesNotFitError, TargetError
from jaxtp.tools.estimate.search import meshes_to_try
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import TrainConfig
from jaxtp.train.defaults import Decider, DeviceInfo

TABLES = read_table(__file__)

ROOT = Path(__file__).parents[3]
CPU = DeviceInfo(count=8, per_process=8, bfloat16=False, kind="virtual CPU devices")
TINY = [f"--config={ROOT}/configs/tiny.yaml"]
OVER_TP = ["--hardware=h100x8", "--mesh=fsdp=2,tp=4"]


@pytest.fixture
def estimated(tmp_path):
    """Runs a command; returns its record."""

    def run(*flags, code=0):
        file = tmp_path / "records" / "estimate.json"
        assert main([*map(str, flags), f"--json={file}"]) == code
        return read_json(file)

    return run


def printed(capsys):
    return " ".join(capsys.readouterr().out.split())


SHIPPED = TABLES["shipped"]
"""With the number of parameters that is published."""


@swept("config", SHIPPED, "llama3_70b")
def test_a_shipped_configuration_is_answered(config, estimated, capsys):
    path = ROOT / f"configs/{config}.yaml"
    hardware, parameters = SHIPPED[config]
    record = estimated("--config", path, f"--hardware={hardware}")
    assert record["parameters"] == parameters
    out = capsys.readouterr().out
    best = record["meshes"][0]
    assert best["fits"]
    assert math.prod(best[axis] for axis in AXES) == record["devices"]
    sizes = dict(best["bytes_per_device"])
    total = sizes.pop("total")
    assert sum(sizes.values()) == pytest.approx(total)
    assert total <= record["bytes_for_jax"]
    sure = [mesh["tokens_per_second"] for mesh in record["meshes"] if mesh["fits_surely"]]
    assert sure[1:] == sorted(sure[1:], reverse=True)
    assert sure[0] > 0.95 * max(sure)
    assert record["configured"]["fits"]
    hours = r"[\d,.]+ to [\d,.]+"
    assert re.search(rf"^run +100,000 steps: {hours} hours, {hours} h100 hours$", out, re.MULTILINE)
    assert re.search(
        r"^memory +[\d.]+ of [\d.]+ GB for JAX: exact .*;\n +modelled ", out, re.MULTILINE
    )


RECIPES = TABLES["recipes"]


def near_meshes(config):
    """Returns the mesh of a configuration, and those that divide one axis by 2 and multiply
    another one.
    """
    own = config.mesh.sizes
    for mesh in meshes_to_try(config, math.prod(own.values()), find("h100")):
        if math.prod(max(own[axis] / mesh[axis], mesh[axis] / own[axis]) for axis in AXES) <= 4:
            yield ",".join(f"{axis}={size}" for axis, size in mesh.items())


@swept("name", RECIPES, "pretrain_1b")
def test_a_recipe_is_the_best_setting_and_surely_fits(name, estimated, tmp_path):
    """Best of the meshes near its own; all meshes take several times as long."""
    path = ROOT / f"configs/{name}.yaml"
    config = from_yaml(TrainConfig, path)
    written = tmp_path / "new" / "best.yaml"
    hardware = RECIPES[name]
    assert f"estimate --config configs/{name}.yaml --hardware {hardware}" in path.read_text()
    flags = [f"--config={path}", "--hardware", *hardware.split(), f"--write={written}"]
    assert estimated(*flags, "--mesh", *near_meshes(config))["meshes"][0]["fits_surely"]
    assert from_yaml(TrainConfig, written) == config
    listed = len(config.model.first_blocks)
    assert len(written.read_text().splitlines()) < 65 + 5 * listed


@pytest.mark.wide
def test_a_loss_scales_the_time_of_a_step_and_needs_no_data(estimated, capsys):
    sizes = ["--model.num-layers=1", "--model.d-model=64", "--model.d-ff=128"]
    flags = [*sizes, "--hardware=h100x2", "--mesh=tp=2", "--model.lora.rank=4", "--as-configured"]
    usual = estimated(*flags)["meshes"][0]
    loss = [
        "--train.loss=jaxtp.losses:DPO",
        "--train.loss-arguments.beta=0.2",
        "--data.path=absent",
    ]
    record = estimated(*flags, *loss)
    dpo = record["meshes"][0]
    relative = record["loss"]["relative"]
    assert "jaxtp.losses:DPO(beta=0.2)" in capsys.readouterr().out
    # A pass of the reference, by a forward and a backward pass without gradients of weights.
    assert 1.3 < relative < 1.6
    assert dpo["seconds"]["products"] == pytest.approx(relative * usual["seconds"]["products"])
    assert dpo["seconds"]["update"] == usual["seconds"]["update"]
    activations = dpo["bytes_per_device"]["activations"]
    kept = activations - usual["bytes_per_device"]["activations"]
    assert kept < 0.1 * activations, "the pass of the reference keeps nothing"
    assert dpo["bytes_per_device"]["batch"] == usual["bytes_per_device"]["batch"], (
        "pairs for segments"
    )


def test_the_best_setting_is_written_for_training(estimated, tmp_path, monkeypatch, capsys):
    """What depends on the devices is in it even at its default: training with it chooses nothing
    itself.
    """
    # A run in the default folder, as of the README's first command, would keep its dtype.
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "best.yaml"
    flags = ["--mesh=dp=8", "--data.sequence-length=64", "--memory-fraction=0.9"]
    best = estimated("--hardware=h100x8", *flags, f"--write={file}")["meshes"][0]
    assert f"jaxtp train --config {file}\n" in capsys.readouterr().out
    head, _, body = file.read_text().partition("\n\n")
    assert f"XLA_PYTHON_CLIENT_MEM_FRACTION=0.9 jaxtp train --config {file}" in head
    assert "h100x8" in head
    written = yaml.safe_load(body)
    assert set(written["data"]) == {"sequence_length", "global_batch_size"}
    assert not {"run", "optimizer", "eval", "metrics"} & set(written)
    config, notes = TRAIN.load([f"--config={file}"], Decider(CPU))
    assert notes == []
    assert config.mesh.sizes == mesh_shape(dp=8)
    assert (config.model.remat, config.train.accumulation) == (best["remat"], best["accumulation"])
    assert config.data.global_batch_size == 8 * best["accumulation"] * best["micro_batch_size"]
    assert config.data.sequence_length == 64
    assert config.model.precision.compute == "bfloat16"


@pytest.mark.wide
def test_meshes_of_the_user_replace_the_default_mesh(estimated, capsys):
    for flags in ((), ("--mesh=fsdp=4,tp=2",)):
        estimated(f"--model.from-hf={FOLDER / 'qwen3'}", "--hardware=h100x8", *flags)
        out = capsys.readouterr().out
        assert ("default mesh" in out) == (not flags)
        assert "default model.precision.compute" in out


def test_the_written_file_says_what_is_missing_and_how_several_hosts_start_it(estimated, tmp_path):
    file = tmp_path / "best.yaml"
    given = ["--data.path=data/x", "--run.dir=runs/x", "--model.precision.compute=float32"]
    estimated("--hardware=2xh100x2", "--mesh=tp=4", "--as-configured", *given, f"--write={file}")
    head, _, body = file.read_text().partition("\n\n")
    first, second, *_ = head.splitlines()
    assert "jaxtp launch" in first
    assert second == f"# jaxtp train --config {file}"
    assert "data.path:" not in head
    values = yaml.safe_load(body)
    assert values["run"] == {"dir": "runs/x"}
    assert values["mesh"]["tp_across_hosts"]
    assert values["data"]["path"] == "data/x"
    # A default here, and another one on GPUs.
    assert values["model"]["precision"] == {"compute": "float32"}


def test_one_mesh_and_its_settings_as_they_are(estimated, capsys):
    flags = [*TINY, *OVER_TP, "--as-configured"]
    record = estimated(*flags)
    (mesh,) = record["meshes"]
    # Weights and two moments in float32; all are written by one process.
    state = 3 * 4 * record["parameters"]
    assert record["save_host_bytes"] == pytest.approx(2 * state, rel=1e-4)
    assert {axis: mesh[axis] for axis in AXES} == mesh_shape(fsdp=2, tp=4)
    assert (mesh["remat"], mesh["accumulation"]) == ("full", 1)
    out = printed(capsys)
    assert "fsdp 2 x tp 4" in out
    assert "settings tried: 1; meshes: 1 " in out
    assert "head and logits" in out
    in_float8 = ["--model.precision.matmul=float8", "--model.precision.matmul-least=16"]
    assert main([*flags, *in_float8]) == 0
    out = printed(capsys)
    assert " 1,979 TFLOP/s in float8, " in out


@pytest.fixture
def compile_by(monkeypatch):
    """Returns a function that sets the compiler."""
    monkeypatch.setattr(command, "topology", lambda *args, **kwargs: None)
    return partial(monkeypatch.setattr, command, "compile_for")


def failing(error):
    return mock.Mock(side_effect=error)


TIER_3 = [*TINY, *OVER_TP, "--tier=3"]


def test_the_estimate_stays_where_the_compiler_fails(compile_by, estimated, monkeypatch, capsys):
    compile_by(failing(TargetError("the compiler crashed")))
    record = estimated(*TIER_3, code=2)
    captured = capsys.readouterr()
    assert captured.err.endswith("the compiler crashed\n")
    assert "to spare" in captured.out
    assert record["meshes"][0]["fits"]
    assert "crashed" in record["tier_3"]["error"]
    # A missing extra is found before the work.
    monkeypatch.setattr(
        command, "topology", failing(TargetError("pip install 'jaxtp[estimate-gpu]'"))
    )
    assert_refused(main, TIER_3, "--tier 3: pip install 'jaxtp[estimate-gpu]'\n", capsys)


def test_a_compiler_that_says_it_does_not_fit_is_believed(compile_by, estimated, capsys):
    compile_by(failing(DoesNotFitError("it does not fit: 90 of 80 GB")))
    assert not estimated(*TIER_3, code=1)["tier_3"]["fits"]
    assert "does not fit: 90 of 80 GB" in capsys.readouterr().out


GB = 10**9


@pytest.mark.parametrize(("peak", "verdict"), [(GB, "fits"), (64 * GB, "does not fit")])
def test_tier_3_is_shown_beside_tier_1(peak, verdict, compile_by, estimated, capsys):
    moved = Scheduled("all-gather", ("tp",), 4, bytes=4 * GB, count=3, overlapped=2, computing=7)
    sizes = {
        "argument_bytes": 1,
        "temp_bytes": 2,
        "peak_bytes": peak,
        "flops": 2e12,
    }
    lists = {"collectives": (moved,), "notes": ("a note",)}
    compiler = mock.Mock(return_value=Compiled(**sizes, **lists, seconds=5.0))
    compile_by(compiler)
    tier_3 = estimated(*TIER_3, code=0 if verdict == "fits" else 1)["tier_3"]
    limits = {"hosts": 1, "devices_per_host": 8, "timeout_s": 300.0}
    compiler.assert_called_once_with(mock.ANY, mesh_shape(fsdp=2, tp=4), "h100", **limits)
    assert tier_3["fits"] == (verdict == "fits")
    (collective,) = tier_3["collectives"]
    assert collective["bytes"] == 4 * GB
    assert (collective["axes"], collective["count"], collective["overlapped"]) == (["tp"], 3, 2)
    out = capsys.readouterr().out
    assert f"of 63.70 for JAX: {verdict}; tier 1: " in out
    assert "(a note)" in out


@pytest.mark.wide
def test_an_update_that_is_not_modelled_makes_nothing_sure(estimated, capsys):
    record = estimated(
        *TINY, OVER_TP[0], "--mesh", "fsdp=2,tp=4", "tp=8", "--optimizer.name=adafactor"
    )
    out = printed(capsys)
    assert "surely" not in out
    assert "without the update by adafactor: its time, memory and communication" in out
    assert "not sure: the update by adafactor is not modelled" in out
    assert not any(mesh["fits_surely"] or mesh["update_is_modelled"] for mesh in record["meshes"])


def test_the_update_by_muon_is_modelled(estimated, capsys):
    (mesh,) = estimated(*TINY, *OVER_TP, "--optimizer.name=muon")["meshes"]
    assert "not modelled" not in printed(capsys)
    assert mesh["update_is_modelled"]
    (kind,) = {c["kind"] for c in mesh["collectives"] if c["module"] == "optimizer/muon"}
    assert kind == "all-to-all"


@pytest.mark.wide
def test_nothing_is_written_where_nothing_fits(tmp_path, capsys):
    (tmp_path / "small.yaml").write_text("like: rtx4090\nmemory: 2.5e+9")
    file = tmp_path / "best.yaml"
    flags = ["--hardware", f"{tmp_path}/small.yamlx2", "--mesh=fsdp=2", f"--write={file}"]
    assert main([*TINY, "--model.d-ff=262144", *flags]) == 1
    out = capsys.readouterr().out
    assert f"--write {file}: not written, because nothing fits\n" in out
    assert not file.exists()
    assert "does not fit" in out
    assert "nothing fits; the least is " in out


def test_a_file_that_it_did_not_write_is_kept(tmp_path, capsys):
    file = tmp_path / "mine.yaml"
    words = ["--hardware=h100x1", "--mesh=tp=1", "--as-configured", f"--write={file}"]
    for _ in range(2):
        assert main([*TINY, *words]) == 0
    assert_refused(main, [*TINY, *words, f"--json={file}"], "name different files", capsys)
    own = "model:\n  num_layers: 3\n"
    file.write_text(own)
    message = "it exists, and no earlier --write made it"
    assert_refused(main, [*words, f"--config={file}"], message, capsys)
    assert file.read_text() == own


REFUSED = TABLES["refused"] | {
    f"--hardware h100x1{'0' * 5000}": "--hardware h100x10000000000000000000...: from 1 to",
}


@pytest.mark.parametrize("flags", REFUSED, ids=lambda flags: flags[:60])
def test_a_mistake_is_refused(flags, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(main, flags.split(), REFUSED[flags], capsys)
    assert not list(tmp_path.iterdir()), "no file is left behind"
