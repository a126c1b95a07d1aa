"""`jaxtp evaluate` on runs, models and files, and what it refuses."""

import errno
import importlib.util
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from evaluations import SIZES, TEXTS
from flax import nnx
from runs import SMALL, TEXT, full_disk, records
from small_tokenizers import begins_texts, byte_fallback, byte_level

import jaxtp
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from jaxtp.generate.loading import open_source
from jaxtp.tools.evaluate.__main__ import main
from jaxtp.tools.evaluate.evaluation_settings import EvaluateConfig, window_length
from jaxtp.tools.evaluate.inputs import open_inputs
from jaxtp.train.__main__ import main as train


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents, and the dataset of their bytes beside them."""
    folder = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": line * (1 + i % 3)}) + "\n" for i, line in enumerate(TEXT.splitlines())]
    (folder / "a.jsonl").write_text("".join(lines))
    assert prepare([str(folder / "a.jsonl"), "--held-out", "0.02", "--out", str(folder / "data")]) == 0
    return folder / "data"


def evaluated(capsys, *flags):
    capsys.readouterr()
    assert main([*map(str, flags), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *flags):
    capsys.readouterr()
    assert main([*map(str, flags)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxtp evaluate: error: ")
    assert captured.err.count("error") == 1, "one message"
    return captured.err


@pytest.mark.journey
def test_a_run_has_the_loss_of_its_own_evaluation(data, tmp_path, capsys):
    flags = ["--data.path", str(data), "--run.dir", str(tmp_path / "run"), "--train.steps", "3"]
    assert train([*SMALL, *flags, "--eval.batches", "100", "--eval.every", "3"]) == 0
    record = evaluated(capsys, "--model", tmp_path / "run", "--data", data, "--mesh.fsdp", 2, "--mesh.tp", 2)
    *_, expected = records(tmp_path / "run", "eval_loss").values()
    assert record["all"]["loss"] == pytest.approx(expected, rel=1e-5)
    split = open_dataset(data).splits["validation"]
    assert record["all"]["documents"] == split.num_documents
    assert record["all"]["tokens"] == record["all"]["bytes"] == split.num_tokens - split.num_documents
    assert record["all"]["bits_per_byte"] == pytest.approx(record["all"]["loss"] / np.log(2))
    assert (record["sequence_length"], record["mesh"]["tp"]) == (32, 2)


def test_sources_and_lengths(folder, lines, tmp_path, capsys):
    (tmp_path / "one.txt").write_text(TEXTS[-1])
    flags = ["--model", folder, "--text", lines, "--text", tmp_path / "one.txt", "--by", "source", "--by", "length"]
    record = evaluated(capsys, *flags, "--sequence-length", 16)
    assert [part["source"] for part in record["by_source"]] == [str(lines), str(tmp_path / "one.txt")]
    tokenizer = HuggingFaceTokenizer(byte_level(), "here", has_eos=False)
    ids = [found.tolist() for found in tokenizer.encode_batch(TEXTS)]
    first = record["by_source"][0]
    assert (first["documents"], first["tokens"]) == (len(TEXTS), sum(len(each) - 1 for each in ids))
    assert first["bytes"] == sum(len(tokenizer.decode(np.array(each[1:], np.uint32))) for each in ids)
    assert record["all"]["documents"] == sum(part["documents"] for part in record["by_length"]) == len(TEXTS) + 1
    for part in record["by_length"]:
        inside = [each for each in [*ids, ids[-1]] if part["tokens_from"] <= len(each) <= part["tokens_to"]]
        assert (part["documents"], part["tokens"]) == (len(inside), sum(map(len, inside)) - len(inside))
    (single,) = (part for part in record["by_length"] if part["tokens_from"] == 1)
    assert (single["tokens"], single["loss"], single["bits_per_byte"]) == (0, None, None)
    main([*map(str, flags)])
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["window", "documents", "tokens", "bytes", "loss", "perplexity", "bits/byte", "accuracy"]
    assert table[-1].split()[:2] == ["all", "2,048"]
    limited = evaluated(capsys, *flags[:6], "--limit", 2)
    assert limited["all"]["documents"] == 3


def test_a_limit_counts_the_documents_that_are_read(tmp_path):
    """The first of them are shorter than the others."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "é" * size}) + "\n" for size in (2, 3, 40, 50)))
    flags = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(tmp_path / "d")]
    (tmp_path / "tokenizer.json").write_bytes(byte_level())
    assert prepare([str(tmp_path / "a.jsonl"), *flags, "--no-eos"]) == 0
    split = open_dataset(tmp_path / "d").splits["train"]
    assert split.num_documents == 4
    tokenizer = load_tokenizer(tmp_path / "d")
    model = SimpleNamespace(name="m", config=SimpleNamespace(vocab_size=300), tokenizer=tokenizer)
    for limit, count in {2: 2, 3: 3, 4: 4, 9: 4, None: 4}.items():
        (opened,) = open_inputs(EvaluateConfig(data=(tmp_path / "d",), limit=limit), tmp_path, model)
        assert opened.num_documents == len(list(opened.documents())) == count


def test_the_default_window_of_several_models(folder):
    """A run with weights of its own has what it was trained on."""
    hf = open_source(folder)
    new = replace(hf, trained_length=256)
    for sources, length in (([hf], 2048), ([new], 256), ([hf, hf], 2048), ([hf, new, hf], 256)):
        assert window_length(EvaluateConfig(), sources) == length
        assert window_length(EvaluateConfig(sequence_length=64), sources) == 64


def test_several_models_in_one_table(folder, lines, tmp_path, capsys):
    other = tmp_path / "other"
    jaxtp.save_hf(jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=8), rngs=nnx.Rngs(1)), other, tokenizer_from=folder)
    given = ["--text", lines, "--sequence-length", 32]
    alone = [evaluated(capsys, "--model", model, *given) for model in (folder, other)]
    assert alone[0]["all"]["loss"] != alone[1]["all"]["loss"]
    for models in (["--model", folder, other], ["--model", folder, "--model", other]):
        assert evaluated(capsys, *models, *given) == {"models": alone}
    assert main([*map(str, ["--model", folder, other, *given, "--by", "source"])]) == 0
    table = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:3] for row in table] == [
        [f"{model}:", part, "32"] for model in (folder, other) for part in (str(lines), "all")
    ]
    assert [row[-4] for row in table[1::2]] == [f"{record['all']['loss']:.6f}" for record in alone]


def test_a_model_that_fails_does_not_lose_the_numbers_of_those_before_it(folder, lines, tmp_path, capsys):
    wrong, model = tmp_path / "wrong", jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=8), rngs=nnx.Rngs(1))
    model.norm.scale[...] = jax.numpy.nan
    jaxtp.save_hf(model, wrong, tokenizer_from=folder, allow_non_finite=True)
    given = ["--text", lines, "--sequence-length", 32]
    alone = evaluated(capsys, "--model", folder, *given)
    assert main([*map(str, ["--model", folder, wrong, *given, "--json", tmp_path / "numbers.json"])]) == 2
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"models": [alone]}
    assert "elements that are not finite" in capsys.readouterr().err


def test_a_model_is_given_once(folder, lines, capsys):
    assert main([*map(str, ["--model", folder, folder, "--text", lines])]) == 2
    assert f"--model {folder} is given twice" in capsys.readouterr().err


@pytest.mark.journey
def test_a_model_and_a_run_that_was_tuned_from_it_are_compared(folder, lines, tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT[:5000])
    flags = ["--tokenizer", str(folder), "--no-eos", "--held-out", "0.1", "--out", str(tmp_path / "d")]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    assert prepare([str(tmp_path / "texts.jsonl"), *flags]) == 0
    run = ["--run.dir", str(tmp_path / "run"), "--model.from-hf", str(folder), "--data.path", str(tmp_path / "d")]
    flags = ["--data.sequence-length", "16", "--train.steps", "2", "--eval.batches", "1", "--mesh", "tp=2"]
    assert train([*run, *flags]) == 0
    text = ["--text", str(tmp_path / "text.txt"), "--limit", "1"]
    base, tuned = evaluated(capsys, "--model", folder, tmp_path / "run", *text)["models"]
    assert base["sequence_length"] == tuned["sequence_length"] == 2048
    assert evaluated(capsys, "--model", tmp_path / "run", *text) == tuned


@pytest.mark.wide
def test_what_precedes_a_text_counts_no_byte(folder, tmp_path, capsys):
    """A tokenizer that begins each text: then its first token is predicted too."""
    model, text = tmp_path / "model", tmp_path / "text.txt"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).write_bytes((folder / name).read_bytes())
    text.write_text(TEXTS[-1])
    for content, special in ((begins_texts(), True), (byte_fallback(), True), (byte_level(), False)):
        (model / "tokenizer.json").write_bytes(content)
        size = len(TEXTS[-1].encode())
        record = evaluated(capsys, "--model", model, "--text", text, "--sequence-length", 16)
        assert (record["all"]["bytes"] == size) is special
        tokens = ["--tokenizer", str(model), "--no-eos", "--overwrite"]
        assert prepare([str(text), "--out", str(tmp_path / "d"), *tokens]) == 0
        capsys.readouterr()
        prepared = evaluated(capsys, "--model", model, "--data", tmp_path / "d", "--sequence-length", 16)
        assert prepared["all"] == record["all"], "a dataset gives what its files do"


@pytest.mark.wide
def test_adapters_are_those_of_the_merged_model(folder, lines, tmp_path, capsys):
    with jax.set_mesh(jaxtp.make_mesh()):
        adapted = jaxtp.add_adapters(jaxtp.load_hf(folder), jaxtp.LoraConfig(rank=2))
        nnx.update(adapted, jax.tree.map(lambda array: array + 0.1, nnx.state(adapted, nnx.LoRAParam)))
        jaxtp.save_peft(adapted, tmp_path / "adapters")
        jaxtp.save_hf(jaxtp.merge_adapters(adapted), tmp_path / "merged", tokenizer_from=folder)
    given = ["--text", lines, "--sequence-length", 64]
    plain, merged = (evaluated(capsys, "--model", model, *given)["all"] for model in (folder, tmp_path / "merged"))
    found = evaluated(capsys, "--model", folder, "--adapters", tmp_path / "adapters", *given)["all"]
    assert found["loss"] == pytest.approx(merged["loss"], rel=1e-6)
    assert found["loss"] != pytest.approx(plain["loss"], rel=1e-4)
    record = json.loads((tmp_path / "adapters/adapter_config.json").read_text())
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(record | {"r": 3}))
    assert "adapters" in refused(capsys, "--model", folder, "--adapters", tmp_path / "adapters", *given)


def test_json_in_a_file_beside_the_table(folder, lines, tmp_path, capsys):
    path = tmp_path / "new/numbers.json"
    assert main(["--model", str(folder), "--text", str(lines), "--sequence-length", "64", "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert f"{json.loads(path.read_text())['all']['loss']:.6f}" in captured.out
    assert "6 parameters" in captured.err or "parameters, float32" in captured.err
    with full_disk(20):
        assert main(["--model", str(folder), "--text", str(lines), "--sequence-length", "64", "--json", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"--json {path}: {os.strerror(errno.EFBIG)}; name another file; the numbers are above" in captured.err
    assert captured.out.startswith(" ")


def test_contradictions(folder, lines, capsys):
    given = ["--model", folder, "--text", lines]
    for flags, message in {
        (): "name the model by --model DIR; name what to measure on by --data DIR, --text FILE, or --tasks NAME",
        (*given, "--stride", 65, "--sequence-length", 64): "tokens between windows would be skipped",
        (*given, "--split", "train"): "--split train needs --data DIR",
        (*given, "--num-fewshot", 2): "--num-fewshot needs --tasks NAME",
        (*given, "--tasks", "mmlu"): "--text is for text, and tasks have their own",
        (*given[:2], "--tasks", "mmlu", "--mesh.cp", 2): "--mesh.tp 2",
        (*given, "--sequence-length", 63, "--mesh.cp", 2): "is not divisible by --mesh.cp 2; nearest: 62 or 64",
        (*given, "--mesh.tp", 16): "tp can be 1, 2, 4",
        (*given[:2], folder, "--text", lines, "--adapters", lines): "is for one model, and --model names 2",
        ("--model", folder, folder, "--tasks", "mmlu"): "--tasks takes one --model",
        (*given, "--limit", 0): "--limit 0: should be greater than or equal to 1",
    }.items():
        assert message in refused(capsys, *flags)


@pytest.mark.wide
def test_a_context_is_not_exceeded(folder, lines, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes((folder / name).read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"max_position_embeddings": 32}
    (model / "config.json").write_text(json.dumps(config))
    given = ["--model", model, "--text", lines]
    assert evaluated(capsys, *given)["sequence_length"] == 32
    assert "give at most 32, or allow it by --beyond-context" in refused(capsys, *given, "--sequence-length", 33)
    assert evaluated(capsys, *given, "--sequence-length", 33, "--beyond-context")["sequence_length"] == 33


def test_inputs_that_cannot_be_measured(folder, data, tmp_path, capsys):
    model = ["--model", folder]
    for name, content in {
        "empty.txt": b"",
        "binary.txt": b"\x00\xff\xfe",
        "blank.jsonl": b"\n\n",
        "broken.jsonl": b'{"text": "a"}\n{"text": \n',
        "other.jsonl": b'{"txt": "a"}\n',
        "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n',
        "nothing.jsonl": b'{"text": ""}\n',
        "one.txt": b"x",
    }.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    for flags, message in {
        ("--text", tmp_path / "empty.txt"): "the file is empty",
        ("--text", tmp_path / "binary.txt"): "not UTF-8 text: byte 0xff",
        ("--text", tmp_path / "blank.jsonl"): "all documents are empty",
        ("--text", tmp_path / "broken.jsonl"): "line 2: not JSON",
        ("--text", tmp_path / "other.jsonl"): "did you mean 'txt'?",
        ("--text", tmp_path / "chat.jsonl"): "prepare it with jaxtp prepare --messages NAME, then --data",
        ("--text", tmp_path / "nothing.jsonl"): "all documents are empty",
        ("--text", tmp_path / "empty.tx"): f"did you mean {tmp_path / 'empty.txt'}?",
        ("--text", tmp_path / "folder"): "no file in this folder",
        ("--text", data): f"read it by --data {data}",
        ("--data", tmp_path / "one.txt"): "--text",
        ("--data", tmp_path / "folders"): f"did you mean {tmp_path / 'folder'}?",
        ("--data", data): f"Prepare the documents again with --tokenizer {folder}",
        ("--data", data.parent): "dataset",
    }.items():
        assert message in refused(capsys, *model, *flags)
    long = refused(capsys, *model, "--text", data.parent / "a.jsonl", "--max-document-bytes", 100)
    assert "line 2: more than 100 bytes; a larger --max-document-bytes reads it" in long
    one = ["--text", str(tmp_path / "one.txt")]
    assert main([*map(str, model), *one]) == 2
    assert "no token to predict: no document has more than one" in capsys.readouterr().err
    assert "no such folder" in refused(capsys, "--model", tmp_path / "nowhere", *one)
    assert "--json /proc/no/file" in refused(capsys, *model, *one, "--json", "/proc/no/file")


def test_a_tokenizer_with_more_tokens_than_the_model(folder, lines, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("model.safetensors", "config.json"):
        (model / name).write_bytes((folder / name).read_bytes())
    tokenizer = json.loads(byte_level())
    tokenizer["model"]["vocab"]["x"] = 3000
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["--model", str(model), "--text", str(lines)]) == 2
    assert f"the token 3000 is beyond the 300 of {model}" in capsys.readouterr().err


def test_tasks_need_the_harness(folder, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "jaxtp.tools.evaluate.__main__.find_spec", lambda name: None if name == "lm_eval" else find(name)
    )
    message = refused(capsys, "--model", folder, "--tasks", "mmlu")
    assert "--tasks needs lm-evaluation-harness: pip install 'jaxtp[eval]'" in message
