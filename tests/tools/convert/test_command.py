"""`jaxtp convert`: a model in, trained from, and out again."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hf_folders import move_adapters
from hf_reference import FOLDER
from made_once import words_of
from support import assert_refused
from tables import read_json, read_table, write_json

import jaxtp
from jaxtp import hf
from jaxtp.checkpoint.__main__ import main as checkpoint
from jaxtp.hf.families import FAMILIES, WRAPPERS
from jaxtp.hf.safetensors import read_header
from jaxtp.tools.convert import __main__ as transfer
from jaxtp.tools.convert.__main__ import main
from jaxtp.train.__main__ import main as train

QWEN3 = FOLDER / "qwen3"


def convert(*words):
    assert main(list(map(str, words))) == 0


def weights(folder):
    header = read_header(folder / "model.safetensors")
    return {name: tensor.read().tobytes() for name, tensor in header.items()}


def attributes_of(folder):
    return read_json(folder / "config.json")


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A run of the qwen3 reference, which came with files of a tokenizer."""
    root = tmp_path_factory.mktemp("convert")
    source = root / "source"
    shutil.copytree(QWEN3, source)
    (source / "tokenizer.json").write_text('{"version": "1.0"}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    convert("import", source, root / "run", "--mesh.fsdp=2")
    return root


def test_in_and_out_bit_by_bit(imported, tmp_path):
    run = imported / "run"
    out = tmp_path / "out"
    convert("export", run, out, "--mesh.tp=2")
    assert weights(out) == weights(QWEN3)
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (out / "chat_template.jinja").exists()
    attributes = attributes_of(out)
    assert attributes["model_type"] == "qwen3"
    assert attributes["eos_token_id"] == 2
    assert attributes["max_position_embeddings"] == 512


@pytest.mark.journey
def test_a_command_makes_its_devices(imported, tmp_path):
    """The tests set a number of devices; a user's process has one until the mesh asks for more."""
    command = [
        sys.executable,
        "-m",
        "jaxtp",
        "convert",
        "export",
        imported / "run",
        tmp_path / "out",
    ]
    environment = dict(os.environ)
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    root = Path(jaxtp.__file__).parent.parent
    subprocess.run([*command, "--mesh.tp=2"], check=True, env=environment, cwd=root)
    assert weights(tmp_path / "out") == weights(QWEN3)


@pytest.mark.journey
def test_a_model_and_adapters_become_one_model(imported, tmp_path):
    """From its folder or its run alike, with the tokenizer; bit by bit as merged here."""
    source = imported / "source"
    adapters = tmp_path / "adapters"
    lora = jaxtp.LoraConfig(rank=2, targets=("q_proj",))
    adapted = move_adapters(jaxtp.add_adapters(hf.load(source), lora))
    hf.save_adapters(adapted, adapters)
    hf.save(jaxtp.merge_adapters(adapted), tmp_path / "merged", family="qwen3")
    for place in (source, imported / "run"):
        out = tmp_path / f"from {place.name}"
        convert("export", place, out, f"--adapters={adapters}", "--mesh.tp=2")
        assert weights(out) == weights(tmp_path / "merged")
        assert attributes_of(out)["eos_token_id"] == 2
        assert (out / "tokenizer.json").exists()


@pytest.mark.wide
def test_a_model_that_was_trained_on_longer_sequences_is_made_for_them(imported, tmp_path):
    """Also where the tokenizer comes from the folder with the smaller number."""
    run = tmp_path / "run"
    shutil.copytree(imported / "run", run)
    kept = attributes_of(run / "hf") | {"max_position_embeddings": 64}
    write_json(run / "hf/config.json", kept)
    for out in (tmp_path / "with", tmp_path / "without"):
        convert("export", run, out)
        attributes = attributes_of(out)
        assert (attributes["eos_token_id"], attributes["max_position_embeddings"]) == (2, 128)
        (run / "hf/tokenizer.json").unlink(missing_ok=True)


@pytest.mark.wide
def test_a_model_that_was_trained_from_the_start_is_made_for_its_sequences(tiny_export):
    assert attributes_of(tiny_export)["max_position_embeddings"] == 32


def test_an_import_that_fails_leaves_nothing_in_the_way_of_the_next(tmp_path, monkeypatch, capsys):
    def full_disk(folder):
        folder.mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(transfer, "load_folder", lambda *_: None)
    monkeypatch.setattr(transfer, "Checkpoints", full_disk)
    words = ["import", str(QWEN3), str(tmp_path / "run")]
    for _ in range(2):
        assert_refused(main, words, f"{tmp_path}/run: No space left on device\n", capsys)
        assert not list(tmp_path.iterdir())


@pytest.mark.journey
def test_a_run_that_was_imported_is_verified_trained_and_exported(imported, tmp_path, capsys):
    run = imported / "run"
    for command in ("inspect", "verify"):
        assert checkpoint([command, str(run)]) == 0
    assert "no problems" in capsys.readouterr().out
    tuned = tmp_path / "tuned"
    small = {
        "--config": run / "config.yaml",
        "--data.sequence-length": 32,
        "--data.global-batch-size": 4,
        "--eval.batches": 1,
        "--train.steps": 2,
        "--optimizer.warmup-steps": 1,
    }
    assert train(words_of(small | {"--run.init-from": run, "--run.dir": tuned})) == 0
    assert f"weights from {run}/checkpoints/0" in capsys.readouterr().out
    out = tmp_path / "out"
    flags = ["--tokenizer-from", imported / "source", "--dtype=bfloat16"]
    convert("export", tuned, out, *flags)
    assert (out / "tokenizer.json").exists()
    header = read_header(out / "model.safetensors")
    assert {tensor.dtype for tensor in header.values()} == {"BF16"}
    assert_refused(train, words_of(small), "holds a checkpoint of another run", capsys)


def test_a_list_has_every_family(capsys):
    assert main(["list"]) == 0
    assert set(re.findall(r"\w+", capsys.readouterr().out)) >= {*FAMILIES, *WRAPPERS}


REFUSED = read_table(__file__)


def test_mistakes_are_refused(imported, tmp_path, capsys):
    places = {"tmp": tmp_path, "source": imported / "source", "run": imported / "run"}
    for words, message in REFUSED.items():
        assert main(words.format(**places).split()) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") <= 5
    assert not (tmp_path / "out").exists()
