"""`jaxtp convert`: a model in, trained from, and out again; its plan."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from flax import nnx
from hf_reference import FOLDER

import jaxtp
from jaxtp.checkpoint.__main__ import main as checkpoint
from jaxtp.hf.safetensors import read_header
from jaxtp.tools.convert import __main__ as transfer
from jaxtp.tools.convert.__main__ import main
from jaxtp.train.__main__ import main as train


def attributes_of(checkpoint, info):
    return transfer._run_files(SimpleNamespace(folder=checkpoint, info=info))[0]


def weights(folder):
    return {name: tensor.read().tobytes() for name, tensor in read_header(folder / "model.safetensors").items()}


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run of the qwen3 reference, which came with files of a tokenizer."""
    root = tmp_path_factory.mktemp("convert")
    shutil.copytree(FOLDER / "qwen3", root / "source")
    (root / "source/tokenizer.json").write_text('{"version": "1.0"}')
    (root / "source/chat_template.jinja").write_text("{{ messages }}")
    assert main(["import", str(root / "source"), str(root / "run"), "--mesh.fsdp", "2", "--mesh.tp", "2"]) == 0
    return root


def test_in_and_out_bit_by_bit(imported, tmp_path):
    assert main(["export", str(imported / "run"), str(tmp_path / "out"), "--mesh.tp", "4"]) == 0
    assert weights(tmp_path / "out") == weights(FOLDER / "qwen3")
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "out/chat_template.jinja").exists()
    attributes = json.loads((tmp_path / "out/config.json").read_text())
    assert (attributes["model_type"], attributes["eos_token_id"], attributes["max_position_embeddings"]) == (
        "qwen3",
        2,
        512,
    )


@pytest.mark.journey
def test_a_command_makes_its_devices(imported, tmp_path):
    """The tests set a number of devices; a user's process has one until the mesh asks for more."""
    command = [sys.executable, "-m", "jaxtp", "convert", "export", str(imported / "run"), str(tmp_path / "out")]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    subprocess.run([*command, "--mesh.tp", "2"], check=True, env=environment, cwd=Path(jaxtp.__file__).parent.parent)
    assert weights(tmp_path / "out") == weights(FOLDER / "qwen3")


@pytest.mark.journey
def test_a_model_and_adapters_become_one_model(imported, tmp_path, capsys):
    """From its folder or its run alike, with the tokenizer; bit by bit as merged here."""
    source = imported / "source"
    adapted = jaxtp.add_adapters(jaxtp.load_hf(source), jaxtp.LoraConfig(rank=2, targets=("q_proj",)))
    nnx.update(adapted, jax.tree.map(lambda a: a + 0.1, nnx.state(adapted, nnx.LoRAParam)))
    jaxtp.save_peft(adapted, tmp_path / "adapters")
    jaxtp.save_hf(jaxtp.merge_adapters(adapted), tmp_path / "merged", family="qwen3")
    for place, out in ((source, "a"), (imported / "run", "b")):
        add = ["export", str(place), str(tmp_path / out), "--adapters", str(tmp_path / "adapters"), "--mesh.tp", "2"]
        assert main(add) == 0
        assert weights(tmp_path / out) == weights(tmp_path / "merged")
        assert json.loads((tmp_path / out / "config.json").read_text())["eos_token_id"] == 2
        assert (tmp_path / out / "tokenizer.json").exists()
    capsys.readouterr()
    assert main(["export", str(source), str(tmp_path / "c")]) == 2
    assert "is in Hugging Face format already; --adapters DIR adds adapters" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "c"), "--adapters", str(tmp_path)]) == 2
    assert "no adapter_config.json" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_what_was_trained_on_longer_sequences_is_made_for_them(tmp_path):
    """Also where the tokenizer comes from the folder with the smaller number."""
    kept = tmp_path / "run/hf"
    kept.mkdir(parents=True)
    (kept / "tokenizer.json").write_text("{}")
    (kept / "config.json").write_text('{"eos_token_id": 2, "max_position_embeddings": 64}')
    for trained, longest in ((128, 128), (32, 64)):
        info = {"config": {"data": {"sequence_length": trained}}}
        attributes = attributes_of(tmp_path / "run/checkpoints/1", info)
        model = jaxtp.Decoder(jaxtp.ModelConfig(vocab_size=8, d_model=4, num_layers=1, d_ff=4), rngs=nnx.Rngs(0))
        jaxtp.save_hf(model, tmp_path / str(trained), attributes=attributes, tokenizer_from=kept)
        written = json.loads((tmp_path / str(trained) / "config.json").read_text())
        assert (written["eos_token_id"], written["max_position_embeddings"]) == (2, longest)


@pytest.mark.wide
def test_what_says_nothing_of_the_computation_goes_out_again(imported, tmp_path):
    """Without a tokenizer too; a model that was trained from the start was made for what it was trained on."""
    info = {"config": {"data": {"sequence_length": 96}}}
    (tmp_path / "run/hf").mkdir(parents=True)
    shutil.copy(FOLDER / "qwen3/config.json", tmp_path / "run/hf")
    kept = attributes_of(tmp_path / "run/checkpoints/1", info)
    assert (kept["eos_token_id"], kept["max_position_embeddings"]) == (2, 512)
    assert attributes_of(tmp_path / "other/checkpoints/1", info) == {"max_position_embeddings": 96}
    model = jaxtp.Decoder(jaxtp.ModelConfig(vocab_size=8, d_model=4, num_layers=1, d_ff=4), rngs=nnx.Rngs(0))
    jaxtp.save_hf(model, tmp_path / "out", attributes=kept)
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == 512


@pytest.mark.journey
def test_the_run_can_be_inspected_and_verified(imported, capsys):
    assert checkpoint(["inspect", str(imported / "run")]) == 0
    assert checkpoint(["verify", str(imported / "run")]) == 0
    assert "no problems" in capsys.readouterr().out


def test_an_import_that_fails_leaves_nothing_in_the_way_of_the_next(tmp_path, monkeypatch, capsys):
    def full_disk(folder, *_):
        (folder / "checkpoints").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer, "load_folder", lambda *_: None)
    monkeypatch.setattr(transfer, "_save", full_disk)
    for _ in range(2):
        assert main(["import", str(FOLDER / "qwen3"), str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err == f"jaxtp convert: error: {tmp_path}/run: No space left on device\n"
        assert not list(tmp_path.iterdir())


@pytest.mark.journey
def test_training_from_it_and_exporting_that(imported, tmp_path, capsys):
    run = imported / "run"
    small = [
        "--data.sequence-length",
        "32",
        "--data.global-batch-size",
        "4",
        "--eval.batches",
        "1",
        "--train.steps",
        "2",
    ]
    flags = [
        "--config",
        str(run / "config.yaml"),
        "--run.init-from",
        str(run),
        "--run.dir",
        str(tmp_path / "tuned"),
        *small,
    ]
    assert train([*flags, "--optimizer.warmup-steps", "1"]) == 0
    assert f"weights from {run}/checkpoints/0" in capsys.readouterr().out
    source = str(imported / "source")
    command = [
        "export",
        str(tmp_path / "tuned"),
        str(tmp_path / "out"),
        "--tokenizer-from",
        source,
        "--dtype",
        "bfloat16",
    ]
    assert main(command) == 0
    assert (tmp_path / "out/tokenizer.json").exists()
    header = read_header(tmp_path / "out/model.safetensors")
    assert {tensor.dtype for tensor in header.values()} == {"BF16"}
    assert train(["--config", str(run / "config.yaml"), *small, "--optimizer.warmup-steps", "1"]) == 2
    assert "holds a checkpoint of another run" in capsys.readouterr().err


def test_mistakes(imported, tmp_path, capsys):
    for command, expected in {
        ("import", str(tmp_path / "none"), str(tmp_path / "run")): "no such folder",
        ("import", str(imported / "source"), str(imported / "run")): "already exists; name a new folder",
        ("import", str(imported / "source"), str(tmp_path / "run"), "--mesh.fsdp", "3"): "fsdp can be 1, 2",
        ("export", str(tmp_path), str(tmp_path / "out")): "no finished checkpoint there",
        ("export", str(imported / "run"), str(tmp_path / "out"), "--family", "bert"): "supported are llama, mistral",
        ("export", str(imported / "run"), str(tmp_path / "out"), "--family", "llama"): "a llama cannot represent",
        ("export", str(imported / "run"), str(tmp_path / "o"), "--tokenizer-from", str(tmp_path)): "no tokenizer file",
        ("plan", str(tmp_path)): "no config.json",
    }.items():
        assert main(command) == 2, command
        captured = capsys.readouterr()
        assert expected in captured.err
        assert captured.err.count("\n") <= 5


def test_plan(tmp_path, capsys):
    assert main(["plan", str(FOLDER / "llama_gqa")]) == 0
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[3:]}
    assert rows["layers.*.self_attn.q_proj"] == ["colwise", "colwise", "same"]
    assert rows["layers.*.mlp.down_proj"] == ["rowwise", "rowwise", "same"]
    assert rows["lm_head"] == ["colwise_gather_output", "colwise", "same"]
    assert rows["norm"] == ["-", "replicated"]
    attributes = json.loads((FOLDER / "llama_gqa/config.json").read_text())
    attributes["base_model_tp_plan"] = {"layers.*.self_attn.q_proj": "rowwise", "layers.*.gone": "colwise"}
    (tmp_path / "config.json").write_text(json.dumps(attributes))
    assert main(["plan", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"llama, base_model_tp_plan of {tmp_path}/config.json" in out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines()[3:]}
    assert rows["layers.*.self_attn.q_proj"] == "rowwise colwise differs"
    assert rows["layers.*.gone"] == "colwise - no such module in this model"


def test_the_list_of_families_says_which_published_weights_were_loaded(capsys):
    """The evidence in README rests on them."""
    assert main(["list"]) == 0
    listed = " ".join(capsys.readouterr().out.split())
    assert "Published weights were loaded of one model alone, SmolLM2-135M (llama)" in listed
    assert "published weights of SmolLM2-135M alone" in (Path(__file__).parents[3] / "README.md").read_text()
