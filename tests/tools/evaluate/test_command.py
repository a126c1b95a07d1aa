"""`jaxtp evaluate` on runs, models and files, and what it refuses."""

import errno
import importlib.util
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from evaluations import SIZES, TEXTS
from flax import nnx
from made_once import TINY_MODEL, words_of
from runs import TEXT, full_disk, records
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


def write_rows(path, rows):
    """Writes JSONL."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The texts as JSONL."""
    path = tmp_path_factory.mktemp("texts") / "lines.jsonl"
    return write_rows(path, [{"text": text} for text in TEXTS])


def run(*words):
    return main(list(map(str, words)))


def evaluated(capsys, *flags):
    capsys.readouterr()
    assert run(*flags, "--json", "-") == 0
    return json.loads(capsys.readouterr().out)


def assert_refused(capsys, message, *flags):
    capsys.readouterr()
    assert run(*flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxtp evaluate: error: ")
    assert captured.err.count("error") == 1, "one message"
    assert message in captured.err


def changed_model(tiny_model, folder, tokenizer=None, **attributes):
    """Copies the model with another tokenizer, or with other attributes of its config.json."""
    shutil.copytree(tiny_model, folder)
    if tokenizer is not None:
        (folder / "tokenizer.json").write_bytes(tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | attributes))
    return folder


def other_model(tiny_model, folder, norm=None):
    """Saves a model with other weights, whose last norm has this scale."""
    model = jaxtp.Decoder(jaxtp.ModelConfig(**SIZES, d_ff=8), rngs=nnx.Rngs(1))
    if norm is not None:
        model.norm.scale[...] = norm
    jaxtp.save_hf(model, folder, tokenizer_from=tiny_model, allow_non_finite=True)
    return folder


@pytest.mark.journey
def test_a_run_has_the_loss_of_its_own_evaluation(byte_dataset, tmp_path, capsys):
    flags = TINY_MODEL | {
        "--data.path": byte_dataset,
        "--run.dir": tmp_path / "run",
        "--train.steps": 3,
        "--eval.batches": 200,
        "--eval.every": 3,
        "--optimizer.warmup-steps": 1,
    }
    assert train(words_of(flags)) == 0
    mesh = ["--mesh.fsdp", 2, "--mesh.tp", 2]
    record = evaluated(capsys, "--model", tmp_path / "run", "--data", byte_dataset, *mesh)
    *_, expected = records(tmp_path / "run", "eval_loss").values()
    whole = record["all"]
    assert whole["loss"] == pytest.approx(expected, rel=1e-5)
    split = open_dataset(byte_dataset).splits["validation"]
    assert whole["documents"] == split.num_documents
    assert whole["tokens"] == whole["bytes"] == split.num_tokens - split.num_documents
    assert whole["bits_per_byte"] == pytest.approx(whole["loss"] / np.log(2))
    assert record["sequence_length"] == 32
    assert record["mesh"]["tp"] == 2


def test_numbers_by_source_and_by_length(tiny_model, lines, tmp_path, capsys):
    one = tmp_path / "one.txt"
    one.write_text(TEXTS[-1])
    inputs = ["--text", lines, "--text", one, "--by", "source", "--by", "length"]
    file = tmp_path / "new/numbers.json"
    assert run("--model", tiny_model, *inputs, "--sequence-length", 16, "--json", file) == 0
    captured = capsys.readouterr()
    record = json.loads(file.read_text())
    sources = record["by_source"]
    assert [part["source"] for part in sources] == [str(lines), str(one)]
    tokenizer = HuggingFaceTokenizer(byte_level(), "here", has_eos=False)
    ids = [found.tolist() for found in tokenizer.encode_batch(TEXTS)]
    assert sources[0]["documents"] == len(TEXTS)
    assert sources[0]["tokens"] == sum(len(each) - 1 for each in ids)
    decoded = [tokenizer.decode(np.array(each[1:], np.uint32)) for each in ids]
    assert sources[0]["bytes"] == sum(map(len, decoded))
    lengths = record["by_length"]
    assert record["all"]["documents"] == sum(part["documents"] for part in lengths)
    assert record["all"]["documents"] == len(TEXTS) + 1
    of_documents = [len(each) for each in [*ids, ids[-1]]]
    for part in lengths:
        first, last = part["tokens_from"], part["tokens_to"]
        inside = [length for length in of_documents if first <= length <= last]
        assert part["documents"] == len(inside)
        assert part["tokens"] == sum(inside) - len(inside)
    (single,) = (part for part in lengths if part["tokens_from"] == 1)
    assert (single["tokens"], single["loss"], single["bits_per_byte"]) == (0, None, None)
    first, *_, last = captured.out.splitlines()
    columns = ["window", "documents", "tokens", "bytes", "loss", "perplexity", "bits/byte", "accuracy"]
    assert first.split() == columns
    assert last.split()[:2] == ["all", "16"]
    assert f"{record['all']['loss']:.6f}" in last
    assert "parameters, float32" in captured.err


def test_a_limit_counts_the_documents_that_are_read(tmp_path):
    """The first of them are shorter than the others."""
    rows = [{"text": "é" * size} for size in (2, 3, 40, 50)]
    file = write_rows(tmp_path / "a.jsonl", rows)
    (tmp_path / "tokenizer.json").write_bytes(byte_level())
    out = tmp_path / "d"
    flags = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--out", str(out), "--no-eos"]
    assert prepare([str(file), *flags]) == 0
    config = SimpleNamespace(vocab_size=300)
    model = SimpleNamespace(name="m", config=config, tokenizer=load_tokenizer(out))
    for limit, count in {2: 2, 3: 3, 4: 4, 9: 4, None: 4}.items():
        (opened,) = open_inputs(EvaluateConfig(data=(out,), limit=limit), tmp_path, model)
        assert opened.num_documents == len(list(opened.documents())) == count


def test_the_default_window_of_several_models(tiny_model):
    """A run with weights of its own has what it was trained on."""
    hf = open_source(tiny_model)
    new = replace(hf, trained_length=256)
    for sources, length in (([hf], 2048), ([new], 256), ([hf, hf], 2048), ([hf, new, hf], 256)):
        assert window_length(EvaluateConfig(), sources) == length
        assert window_length(EvaluateConfig(sequence_length=64), sources) == 64


def test_several_models_in_one_table(tiny_model, lines, tmp_path, capsys):
    other = other_model(tiny_model, tmp_path / "other")
    given = ["--text", lines, "--sequence-length", 32, "--by", "source"]
    file = tmp_path / "numbers.json"
    models = ["--model", tiny_model, "--model", other]
    assert run(*models, *given, "--json", file) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    both = json.loads(file.read_text())["models"]
    assert both[1] == evaluated(capsys, "--model", other, *given)
    losses = [record["all"]["loss"] for record in both]
    assert losses[0] != losses[1]
    parts = [[f"{model}:", part, "32"] for model in (tiny_model, other) for part in (str(lines), "all")]
    assert [row[:3] for row in rows] == parts
    assert [row[-4] for row in rows[1::2]] == [f"{loss:.6f}" for loss in losses]


def test_numbers_stay_where_a_later_model_fails(tiny_model, lines, tmp_path, capsys):
    wrong = other_model(tiny_model, tmp_path / "wrong", norm=np.nan)
    file = tmp_path / "numbers.json"
    given = ["--text", lines, "--sequence-length", 32, "--json", file]
    assert run("--model", tiny_model, wrong, *given) == 2
    (record,) = json.loads(file.read_text())["models"]
    assert record["all"]["documents"] == len(TEXTS)
    assert "elements that are not finite" in capsys.readouterr().err


@pytest.mark.journey
def test_a_model_and_a_run_that_was_tuned_from_it_are_compared(tiny_model, tmp_path, capsys):
    rows = [{"text": line} for line in TEXT.splitlines()]
    file = write_rows(tmp_path / "texts.jsonl", rows)
    data = ["--tokenizer", tiny_model, "--no-eos", "--held-out", "0.1", "--out", tmp_path / "d"]
    assert prepare(list(map(str, [file, *data]))) == 0
    tuned = tmp_path / "run"
    flags = ["--run.dir", tuned, "--model.from-hf", tiny_model, "--data.path", tmp_path / "d"]
    flags += ["--data.sequence-length", 16, "--train.steps", 2, "--eval.batches", 1, "--mesh", "tp=2"]
    assert train(list(map(str, flags))) == 0
    text = tmp_path / "text.txt"
    text.write_text(TEXT[:5000])
    given = ["--text", text, "--limit", 1]
    models = evaluated(capsys, "--model", tiny_model, tuned, *given)["models"]
    assert [model["sequence_length"] for model in models] == [2048, 2048]
    assert evaluated(capsys, "--model", tuned, *given) == models[1]


@pytest.mark.wide
def test_what_precedes_a_text_counts_no_byte(tiny_model, tmp_path, capsys):
    """A tokenizer that begins each text: then its first token is predicted too."""
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[-1])
    size = len(TEXTS[-1].encode())
    tokenizers = {"begins": begins_texts(), "fallback": byte_fallback(), "plain": byte_level()}
    for name, content in tokenizers.items():
        model = changed_model(tiny_model, tmp_path / name, content)
        given = ["--model", model, "--sequence-length", 16]
        record = evaluated(capsys, *given, "--text", text)
        assert (record["all"]["bytes"] == size) is (name != "plain")
        data = tmp_path / f"data of {name}"
        tokens = ["--out", str(data), "--tokenizer", str(model), "--no-eos"]
        assert prepare([str(text), *tokens]) == 0
        prepared = evaluated(capsys, *given, "--data", data)
        assert prepared["all"] == record["all"], "a dataset gives what its files do"


@pytest.mark.wide
def test_adapters_are_those_of_the_merged_model(tiny_model, lines, tmp_path, capsys):
    adapters = tmp_path / "adapters"
    merged = tmp_path / "merged"
    with jax.set_mesh(jaxtp.make_mesh()):
        adapted = jaxtp.add_adapters(jaxtp.load_hf(tiny_model), jaxtp.LoraConfig(rank=2))
        state = nnx.state(adapted, nnx.LoRAParam)
        nnx.update(adapted, jax.tree.map(lambda array: array + 0.1, state))
        jaxtp.save_peft(adapted, adapters)
        jaxtp.save_hf(jaxtp.merge_adapters(adapted), merged, tokenizer_from=tiny_model)
    given = ["--text", lines, "--sequence-length", 64]
    flags = [[tiny_model], [merged], [tiny_model, "--adapters", adapters]]
    plain, as_one, found = (evaluated(capsys, "--model", *model, *given)["all"]["loss"] for model in flags)
    assert found == pytest.approx(as_one, rel=1e-6)
    assert found != pytest.approx(plain, rel=1e-4)
    file = adapters / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 3}))
    assert_refused(capsys, "adapters", "--model", tiny_model, "--adapters", adapters, *given)


def test_numbers_are_shown_where_their_file_cannot_be_written(tiny_model, lines, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    given = ["--model", tiny_model, "--text", lines, "--sequence-length", 16, "--json", path]
    assert run(*given) == 0
    path.unlink()
    capsys.readouterr()
    with full_disk(20):
        assert run(*given) == 2
    captured = capsys.readouterr()
    reason = os.strerror(errno.EFBIG)
    assert f"--json {path}: {reason}; name another file; the numbers are above" in captured.err
    assert captured.out.startswith(" ")


def test_contradictions_are_refused(tiny_model, lines, capsys):
    model = ("--model", tiny_model)
    given = (*model, "--text", lines)
    several = (*model, tiny_model)
    for flags, message in {
        (): "--model DIR; name what to measure on by --data DIR, --text FILE, or --tasks NAME",
        (*given, "--stride", 65, "--sequence-length", 64): "tokens between windows would be skipped",
        (*given, "--split", "train"): "--split train needs --data DIR",
        (*given, "--num-fewshot", 2): "--num-fewshot needs --tasks NAME",
        (*given, "--tasks", "mmlu"): "--text is for text, and tasks have their own",
        (*model, "--tasks", "mmlu", "--mesh.cp", 2): "--mesh.tp 2",
        (*given, "--sequence-length", 63, "--mesh.cp", 2): "is not divisible by --mesh.cp 2",
        (*given, "--mesh.tp", 16): "tp can be 1, 2, 4",
        (*several, "--text", lines, "--adapters", lines): "--model names 2",
        (*several, "--text", lines): f"--model {tiny_model} is given twice",
        (*several, "--tasks", "mmlu"): "--tasks takes one --model",
        (*given, "--limit", 0): "--limit 0: should be greater than or equal to 1",
        (*given, "--json", "/proc/no/file"): "--json /proc/no/file",
    }.items():
        assert_refused(capsys, message, *flags)


@pytest.mark.wide
def test_a_context_is_not_exceeded(tiny_model, lines, tmp_path, capsys):
    model = changed_model(tiny_model, tmp_path / "model", max_position_embeddings=32)
    given = ["--model", model, "--text", lines]
    longer = [*given, "--sequence-length", 33]
    assert evaluated(capsys, *given)["sequence_length"] == 32
    assert_refused(capsys, "give at most 32, or allow it by --beyond-context", *longer)
    assert evaluated(capsys, *longer, "--beyond-context")["sequence_length"] == 33


FILES = {
    "empty.txt": b"",
    "binary.txt": b"\x00\xff\xfe",
    "blank.jsonl": b"\n\n",
    "broken.jsonl": b'{"text": "a"}\n{"text": \n',
    "other.jsonl": b'{"txt": "a"}\n',
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n',
    "nothing.jsonl": b'{"text": ""}\n',
    "long.jsonl": b'{"text": "a"}\n{"text": "%s"}\n' % (b"a" * 100),
    "one.txt": b"x",
}
REFUSED = {
    "--text {here}/empty.txt": "the file is empty",
    "--text {here}/binary.txt": "not UTF-8 text: byte 0xff",
    "--text {here}/blank.jsonl": "all documents are empty",
    "--text {here}/broken.jsonl": "line 2: not JSON",
    "--text {here}/other.jsonl": "did you mean 'txt'?",
    "--text {here}/chat.jsonl": "prepare it with jaxtp prepare --messages NAME, then --data",
    "--text {here}/nothing.jsonl": "all documents are empty",
    "--text {here}/empty.tx": "did you mean {here}/empty.txt?",
    "--text {here}/folder": "no file in this folder",
    "--text {data}": "read it by --data {data}",
    "--text {here}/long.jsonl --max-document-bytes 100": "line 2: more than 100 bytes; a larger",
    "--data {here}/one.txt": "--text",
    "--data {here}/folders": "did you mean {here}/folder?",
    "--data {data}": "Prepare the documents again with --tokenizer",
    "--data {here}": "dataset",
}


def test_inputs_that_cannot_be_measured_are_refused(tiny_model, byte_dataset, tmp_path, capsys):
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder").mkdir()
    places = {"here": tmp_path, "data": byte_dataset}
    for words, message in REFUSED.items():
        flags = words.format(**places).split()
        assert_refused(capsys, message.format(**places), "--model", tiny_model, *flags)
    one = ["--text", tmp_path / "one.txt"]
    assert_refused(capsys, "no such folder", "--model", tmp_path / "nowhere", *one)
    assert run("--model", tiny_model, *one) == 2
    assert "no document has more than one" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny_model, lines, tmp_path, capsys):
    tokenizer = json.loads(byte_level())
    tokenizer["model"]["vocab"]["x"] = 3000
    content = json.dumps(tokenizer).encode()
    model = changed_model(tiny_model, tmp_path / "model", content)
    assert run("--model", model, "--text", lines) == 2
    assert f"the token 3000 is beyond the 300 of {model}" in capsys.readouterr().err


def test_tasks_need_the_harness(tiny_model, monkeypatch, capsys):
    find = importlib.util.find_spec

    def without_harness(name):
        return None if name == "lm_eval" else find(name)

    monkeypatch.setattr("jaxtp.tools.evaluate.__main__.find_spec", without_harness)
    message = "--tasks needs lm-evaluation-harness: pip install 'jaxtp[eval]'"
    assert_refused(capsys, message, "--model", tiny_model, "--tasks", "mmlu")
