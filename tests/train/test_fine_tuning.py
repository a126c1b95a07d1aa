"""Training that begins with a model in Hugging Face format: all of it, or adapters beside it."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from runs import SMALL, TEXT, mesh, records

import jaxtp
from jaxtp.checkpoint.reader import open_checkpoint
from jaxtp.train.__main__ import main

MODEL = jaxtp.ModelConfig(vocab_size=256, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=6, d_ff=64)
SHORT = [*SMALL[SMALL.index("--data.sequence-length") :], "--eval.every", "0"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder of a small model."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    jaxtp.save_hf(jaxtp.Decoder(MODEL, rngs=nnx.Rngs(5)), folder)
    return folder


@pytest.fixture
def command(tmp_path, model):
    (tmp_path / "text.txt").write_text(TEXT)
    data = ["--data.path", str(tmp_path / "text.txt"), "--train.steps", "3"]
    return [*SHORT, *data, "--model.from-hf", str(model), "--run.dir", str(tmp_path / "run")]


LORA = ["--model.lora.rank", "4", "--optimizer.learning-rate", "0.05", "--optimizer.warmup-steps", "0"]


def test_it_begins_where_the_model_is(tmp_path, command, model, capsys):
    assert main([*command, *mesh(1, 2, 2), *LORA]) == 0
    assert f"weights from {model}" in capsys.readouterr().out
    assert main([*command, *mesh(1, 1, 1), "--run.dir", str(tmp_path / "whole")]) == 0
    first, whole = records(tmp_path / "run"), records(tmp_path / "whole")
    assert first[1] == pytest.approx(whole[1], rel=1e-6), "an adapter begins as nothing"
    assert first[3] < first[1]
    resolved = (tmp_path / "run/config.yaml").read_text()
    assert "head_dim: 6\n" in resolved


def test_adapters_alone_are_stored_and_a_run_goes_on_with_them(tmp_path, command):
    assert main([*command, *mesh(1, 1, 2), *LORA, "--train.steps", "6", "--optimizer.schedule", "constant"]) == 0
    whole = records(tmp_path / "run")
    names = open_checkpoint(tmp_path / "run").arrays
    assert all("loras" in name for name in names if name.startswith("model."))
    assert sum(name.startswith("model.") for name in names) == 14
    again = [*command, *LORA, "--optimizer.schedule", "constant", "--run.dir", str(tmp_path / "again")]
    assert main([*again, *mesh(1, 1, 2), "--train.steps", "3"]) == 0
    assert main([*again, *mesh(2, 2, 2), "--train.steps", "6"]) == 0
    joined = records(tmp_path / "again")
    np.testing.assert_allclose(list(joined.values()), list(whole.values()), rtol=1e-4)


def test_adapters_of_a_run_of_ours(tmp_path, command):
    assert main([*command, *mesh(1, 1, 2), "--run.dir", str(tmp_path / "base")]) == 0
    at = command.index("--model.from-hf")
    sizes = "--model.num-heads 4 --model.num-kv-heads 2 --model.head-dim 6 --model.d-model 32 --model.num-layers 2 "
    flags = [*command[:at], *command[at + 2 :], *(sizes + "--model.d-ff 64").split(), *LORA]
    assert main([*flags, "--run.init-from", str(tmp_path / "base"), *mesh(1, 2, 1)]) == 0
    assert main([*flags, "--run.init-from", str(tmp_path / "base"), *mesh(1, 1, 2), "--train.steps", "4"]) == 0


MISTAKES = {
    "another size": ("--model.d-model 64", "is another model: model.d_model=64, where it has 32"),
    "two beginnings": ("--run.init-from {run}", "--run.init-from and --model.from-hf are two beginnings"),
    "no such model": ("--model.from-hf nowhere", "nowhere: no such folder"),
    "not on this mesh": ("--mesh.tp 8", "model.num_heads=4 is not divisible by mesh.tp=8"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(tmp_path, command, capsys, name):
    flags, message = MISTAKES[name]
    base = tmp_path / "base"
    if "{run}" in flags:
        assert main([*command, *mesh(1, 1, 1), "--train.steps", "2", "--run.dir", str(base)]) == 0
    assert main([*command, *mesh(1, 1, 2), *flags.format(run=base).split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_adapters_of_nothing_are_refused(tmp_path, capsys):
    assert main(["--model.lora.rank", "8", "--run.dir", str(tmp_path / "run")]) == 2
    assert "name that by --model.from-hf FOLDER or --run.init-from RUN" in capsys.readouterr().err


def test_data_by_another_tokenizer_are_refused(tmp_path, command, model, capsys):
    other = tmp_path / "with_tokenizer"
    jaxtp.save_hf(jax.jit(lambda: jaxtp.Decoder(MODEL, rngs=nnx.Rngs(5)))(), other)
    (other / "tokenizer.json").write_text(json.dumps({}))
    assert main([*command, *mesh(1, 1, 2), "--model.from-hf", str(other)]) == 2
    assert f"prepare them with --tokenizer {other / 'tokenizer.json'}" in capsys.readouterr().err
