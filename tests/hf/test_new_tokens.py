"""Tokens that a model from Hugging Face lacks: named to prepare and train, and in the export."""

import io
import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx
from hf_folders import read_tensors
from numpy.testing import assert_array_equal
from run_comparisons import assert_same_records
from runs import records
from small_tokenizers import byte_level
from support import assert_refused, mesh_by_size
from tables import read_json, write_json
from variants import small_model

import jaxtp
from jaxtp.checkpoint.logical import named_variables, to_logical
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.generate.__main__ import main as generate
from jaxtp.hf.runs import load_base
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main as train

END = "<|endoftext|>"
NEW = ["<|im_start|>", "<|im_end|>"]
CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
NUM_TOKENS = 261
"""The tokens of the model's tokenizer, whose table may have spare rows."""
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
SHORT = [
    "--train.steps=3",
    "--train.log-every=1",
    "--data.sequence-length=40",
    "--data.global-batch-size=4",
    "--optimizer.warmup-steps=1",
    "--optimizer.learning-rate=0.01",
    "--eval.every=0",
]


def base_model(folder, *, rows=NUM_TOKENS, tied=False):
    """Makes a base model's folder, whose tokenizer has no token for the turns of a chat."""
    config = small_model(vocab_size=rows, num_layers=1, head_dim=6, d_ff=32, tie_embeddings=tied)
    jaxtp.hf.save(jax.jit(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(3)))(), folder)
    tokenizer = byte_level(size=NUM_TOKENS, special=[END])
    (folder / "tokenizer.json").write_bytes(tokenizer)
    end = json.loads(tokenizer)["model"]["vocab"][END]
    write_json(folder / "generation_config.json", {"eos_token_id": end, "temperature": 0.5})
    described = {"eos_token": END, "added_tokens_decoder": {str(end): {"content": END}}}
    write_json(folder / "tokenizer_config.json", described)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A folder with the model, its template, conversations, and their datasets with new tokens and
    without.
    """
    folder = tmp_path_factory.mktemp("chats")
    base = base_model(folder / "base")
    (folder / "chatml.jinja").write_text(CHATML)
    lines = []
    for number in range(24):
        question = {"role": "user", "content": f"add {number}"}
        answer = {"role": "assistant", "content": f"it is {number + 1}"}
        lines.append(json.dumps({"messages": [question, answer]}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    words = [f"{folder}/chats.jsonl", f"--tokenizer={base}", "--messages=messages"]
    words += [f"--template={folder}/chatml.jinja", "--held-out=0.1"]
    assert prepare([*words, f"--out={folder}/data", "--add-tokens", *NEW]) == 0
    assert prepare([*words, f"--out={folder}/plain"]) == 0
    return folder


@pytest.mark.wide
@pytest.mark.parametrize(
    ("rows", "tied"), [(NUM_TOKENS, False), (NUM_TOKENS + 1, True), (NUM_TOKENS + 9, False)]
)
def test_new_rows_are_the_mean_of_the_tokenizers_on_every_mesh(rows, tied, tmp_path):
    """Also where the model has a spare row for one of them, or for all."""
    folder = base_model(tmp_path / "base", rows=rows, tied=tied)
    new = range(NUM_TOKENS, NUM_TOKENS + 2)
    config = replace(jaxtp.hf.read_config(folder), vocab_size=max(rows, new.stop))
    stored = read_tensors(folder / "model.safetensors")
    for sizes in ({}, {"tp": 2}, {"fsdp": 2}):
        mesh = mesh_by_size(**sizes)
        weights, _ = load_base(folder, config, mesh, new_ids=new)
        arrays = to_logical(weights, mesh)
        for path, name in zip(("embedding.embedding", "head.kernel"), TABLES, strict=True):
            if path not in arrays:
                assert tied
                continue
            expected = np.zeros((config.vocab_size, stored[name].shape[1]), np.float32)
            expected[:rows] = stored[name]
            expected[NUM_TOKENS : new.stop] = stored[name][:NUM_TOKENS].mean(0, dtype=np.float64)
            assert_array_equal(arrays[path], expected)
        assert named_variables(weights).keys() == arrays.keys()


@pytest.mark.journey
def test_a_base_model_learns_a_template_with_new_tokens(chats, tmp_path, monkeypatch, capsys):
    """On two meshes, resumed on another; the export has all that a chat needs."""
    words = [f"--model.from-hf={chats}/base", f"--data.path={chats}/data", *SHORT]
    words += ["--model.add-tokens", *NEW]
    for mesh in ("tp=2", "fsdp=2"):
        assert train([*words, f"--run.dir={tmp_path}/{mesh}", f"--mesh={mesh}"]) == 0
        line = f"rows {NUM_TOKENS} to {NUM_TOKENS + 1} of {NEW[0]} {NEW[1]} begin as the mean"
        assert line in capsys.readouterr().out
    assert_same_records(tmp_path / "tp=2", tmp_path / "fsdp=2", "loss", rtol=1e-4)
    run = tmp_path / "tp=2"
    assert train([*words, f"--run.dir={run}", "--mesh=tp=1", "--train.steps=5"]) == 0
    assert records(run)[5] < records(run)[1]
    assert convert(["export", str(run), str(tmp_path / "out")]) == 0

    start, end = range(NUM_TOKENS, NUM_TOKENS + 2)
    out = tmp_path / "out"
    assert read_json(out / "config.json")["vocab_size"] == end + 1
    assert (out / "tokenizer.json").read_bytes() == (chats / "data/tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == CHATML
    before = read_json(chats / "base/generation_config.json")
    assert read_json(out / "generation_config.json") == {
        "eos_token_id": [end, before["eos_token_id"]],
        "temperature": 0.5,
    }
    described = read_json(out / "tokenizer_config.json")
    assert described["eos_token"] == NEW[1]
    added = {id: token["content"] for id, token in described["added_tokens_decoder"].items()}
    assert added == {str(before["eos_token_id"]): END, str(start): NEW[0], str(end): NEW[1]}
    for model in (run, out):
        monkeypatch.setattr("sys.stdin", io.StringIO("add 3\n"))
        assert generate(["--model", str(model), "--chat", "--max-tokens=4"]) == 0

    further = [f"--model.from-hf={out}", f"--data.path={chats}/data", *SHORT, "--mesh=tp=1"]
    assert train([*further, f"--run.dir={tmp_path}/further"]) == 0, "the export needs no new tokens"


@pytest.mark.journey
def test_adapters_train_the_rows_of_new_tokens(chats, tmp_path):
    """On two meshes, also in micro-batches; the base model has a spare row, and is not changed."""
    base = base_model(tmp_path / "base", rows=NUM_TOKENS + 1)
    words = [f"--model.from-hf={base}", f"--data.path={chats}/data", *SHORT]
    words += ["--model.lora.rank=2", "--model.add-tokens", *NEW]
    meshes = {"tp": ["--mesh=tp=2"], "dp": ["--mesh=dp=2,fsdp=2"]}
    for name, flags in meshes.items():
        assert train([*words, *flags, f"--run.dir={tmp_path}/{name}"]) == 0
    assert_same_records(tmp_path / "tp", tmp_path / "dp", "loss", rtol=1e-4)
    run = str(tmp_path / "tp")
    again = ["--mesh=dp=2", "--train.accumulation=2", "--train.steps=5", f"--run.dir={run}"]
    assert train([*words, *again]) == 0
    assert records(run)[5] < records(run)[1]
    assert convert(["export", run, str(tmp_path / "adapters")]) == 0
    assert convert(["export", run, str(tmp_path / "merged"), "--merged"]) == 0

    before = read_tensors(base / "model.safetensors")
    merged = read_tensors(tmp_path / "merged/model.safetensors")
    adapters = read_tensors(tmp_path / "adapters/adapter_model.safetensors")
    new = list(range(NUM_TOKENS, NUM_TOKENS + 2))
    indices = read_json(tmp_path / "adapters/adapter_config.json")["trainable_token_indices"]
    assert indices == {"embed_tokens": new, "lm_head": new}
    for table in TABLES:
        module = f"base_model.model.{table.removesuffix('.weight')}"
        rows = adapters[f"{module}.token_adapter.trainable_tokens_delta"]
        assert_array_equal(merged[table][:NUM_TOKENS], before[table][:NUM_TOKENS])
        assert_array_equal(merged[table][NUM_TOKENS:], rows)
        distance = np.abs(rows - before[table][:NUM_TOKENS].mean(0)).max()
        assert 0 < distance < 0.2, "they begin as the mean, and move"

    further = [f"--model.from-hf={base}", f"--data.path={chats}/data", *SHORT, "--mesh=tp=2"]
    further += [f"--model.lora.from-peft={tmp_path}/adapters", f"--run.dir={tmp_path}/further"]
    assert train([*further, "--model.add-tokens", *NEW]) == 0
    assert records(tmp_path / "further")[1] < records(run)[1]


@pytest.mark.parametrize(
    ("data", "new", "message"),
    [
        ("data", [], f"name the same here, by --model.add-tokens '{NEW[0]}' '{NEW[1]}'"),
        ("data", NEW[:1], f"by --model.add-tokens '{NEW[0]}' '{NEW[1]}'"),
        ("plain", NEW, f"tokenizer.json --add-tokens '{NEW[0]}' '{NEW[1]}'"),
        ("data", [*NEW, END], f"the new token {END!r} is in"),
        ("data", [*NEW, NEW[1]], f"the new token {NEW[1]!r} is named twice"),
        ("data", [*NEW, ""], "the new token '' is empty"),
        ("data", [*NEW, "\udcff"], "is not UTF-8"),
    ],
)
def test_the_data_and_the_run_have_the_same_new_tokens(data, new, message, chats, tmp_path, capsys):
    words = [f"--model.from-hf={chats}/base", f"--data.path={chats}/{data}", *SHORT, "--mesh=tp=1"]
    words.append(f"--run.dir={tmp_path}/run")
    assert_refused(train, [*words, *(["--model.add-tokens", *new] if new else [])], message, capsys)


@pytest.mark.journey
def test_a_tokenizer_with_more_ids_than_its_model_needs_more_rows(chats, tmp_path, capsys):
    """The setting that the message names is the one that works."""
    folder = shutil.copytree(chats / "base", tmp_path / "base")
    shutil.copy(chats / "data/tokenizer.json", folder)
    words = [f"--model.from-hf={folder}", f"--data.path={chats}/data", *SHORT, "--mesh=tp=1"]
    words.append(f"--run.dir={tmp_path}/run")
    needed = f"--model.vocab-size={NUM_TOKENS + 2}"
    assert_refused(train, words, needed.replace("=", " "), capsys)
    assert_refused(train, [*words, "--model.vocab-size=256"], "the model has 261", capsys)
    assert train([*words, needed, "--train.steps=1"]) == 0
    assert f"rows {NUM_TOKENS} to {NUM_TOKENS + 1} begin as the mean" in capsys.readouterr().out
