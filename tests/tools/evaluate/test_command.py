"""`jaxtp evaluate` on runs, models and files, and what it refuses."""

import errno
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import jsonl, prepared, write
from evaluations import TEXTS
from hf_folders import move_adapters
from made_once import TINY_MODEL, words_of
from runs import TEXT, full_disk, records
from small_tokenizers import begins_texts, byte_fallback, byte_level
from support import assert_refused, use_mesh
from tables import read_json, read_table

import jaxtp
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import HuggingFaceTokenizer, load_tokenizer
from jaxtp.generate.loading import open_source
from jaxtp.tools.evaluate.__main__ import main
from jaxtp.tools.evaluate.evaluation_settings import EvaluateConfig, window_length
from jaxtp.tools.evaluate.inputs import open_inputs
from jaxtp.train.__main__ import main as train


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """The texts as JSONL."""
    return jsonl(tmp_path_factory.mktemp("texts") / "lines.jsonl", TEXTS)


def prepared_by(model, folder, *words):
    """Returns the folder of a dataset of the tokens of a model."""
    return prepared(folder, *words, f"--tokenizer={model}", "--no-eos").folder


def run(words):
    return main(list(map(str, words)))


def evaluated(capsys, *flags):
    capsys.readouterr()
    assert run([*flags, "--json=-"]) == 0
    return json.loads(capsys.readouterr().out)


def changed_model(tiny_model, folder, tokenizer):
    """Copies the model with another tokenizer."""
    shutil.copytree(tiny_model, folder)
    write(folder / "tokenizer.json", tokenizer)
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
    mesh = ["--mesh.fsdp=2", "--mesh.tp=2"]
    record = evaluated(capsys, "--model", tmp_path / "run", "--data", byte_dataset, *mesh)
    *_, expected = records(tmp_path / "run", "eval_loss").values()
    whole = record["all"]
    assert whole["loss"] == pytest.approx(expected, rel=1e-5)
    split = open_dataset(byte_dataset).splits["validation"]
    assert whole["documents"] == split.num_documents
    assert whole["tokens"] == whole["bytes"] == split.num_tokens - split.num_documents
    assert record["sequence_length"] == 32
    assert record["mesh"]["tp"] == 2


@pytest.mark.wide
def test_numbers_of_several_sources(tiny_model, lines, tmp_path, capsys):
    one = write(tmp_path / "one.txt", TEXTS[-1])
    inputs = ["--text", lines, "--text", one]
    file = tmp_path / "new/numbers.json"
    assert run(["--model", tiny_model, *inputs, "--sequence-length=16", f"--json={file}"]) == 0
    captured = capsys.readouterr()
    record = read_json(file)
    assert record["data"] == [str(lines), str(one)]
    tokenizer = HuggingFaceTokenizer(byte_level(), "here")
    ids = [found.tolist() for found in tokenizer.encode_batch([*TEXTS, TEXTS[-1]])]
    numbers = record["all"]
    assert numbers["documents"] == len(TEXTS) + 1
    assert numbers["tokens"] == sum(len(each) - 1 for each in ids)
    assert numbers["bytes"] == sum(
        len(tokenizer.decode(np.array(each[1:], np.uint32))) for each in ids
    )
    header, last = captured.out.splitlines()
    assert header.split() == [
        "window",
        "documents",
        "tokens",
        "bytes",
        "loss",
        "perplexity",
        "bits/byte",
        "accuracy",
    ]
    assert last.split()[:2] == ["all", "16"]
    assert f"{numbers['loss']:.6f}" in last
    assert "parameters, float32" in captured.err


def test_groups_of_numbers_are_refused_by_what_replaces_them(capsys):
    assert_refused(main, ["--model=a", "--by", "source"], "one command for each source", capsys)


def test_a_limit_counts_the_documents_that_are_read(tiny_model, tmp_path):
    """The first of them are shorter than the others."""
    data = prepared_by(
        tiny_model,
        tmp_path / "d",
        jsonl(tmp_path / "a.jsonl", ["é" * size for size in (2, 3, 40, 50)]),
    )
    model = SimpleNamespace(
        name="m", config=SimpleNamespace(vocab_size=300), tokenizer=load_tokenizer(data)
    )
    for limit, count in {2: 2, 3: 3, 4: 4, 9: 4, None: 4}.items():
        (opened,) = open_inputs(EvaluateConfig(data=(data,), limit=limit), tmp_path, model)
        assert opened.num_documents == len(list(opened.documents())) == count


def test_the_default_window(tiny_model):
    """A run with weights of its own has what it was trained on."""
    hf = open_source(tiny_model)
    new = replace(hf, trained_length=256)
    for source, length in ((hf, 2048), (new, 256)):
        assert window_length(EvaluateConfig(), source) == length
        assert window_length(EvaluateConfig(sequence_length=64), source) == 64


@pytest.mark.journey
def test_a_model_and_a_run_that_was_tuned_from_it_are_compared(tiny_model, tmp_path, capsys):
    rows = jsonl(tmp_path / "texts.jsonl", TEXT.splitlines())
    data = prepared_by(tiny_model, tmp_path / "d", rows, "--held-out=0.1")
    tuned = tmp_path / "run"
    flags = [
        f"--run.dir={tuned}",
        f"--model.from-hf={tiny_model}",
        f"--data.path={data}",
        "--data.sequence-length=16",
        "--train.steps=2",
        "--eval.batches=1",
        "--mesh=tp=2",
    ]
    assert train(list(map(str, flags))) == 0
    given = ["--text", write(tmp_path / "text.txt", TEXT[:5000]), "--limit=1"]
    windows = [
        evaluated(capsys, "--model", model, *given)["sequence_length"]
        for model in (tiny_model, tuned)
    ]
    assert windows == [2048, 2048]


@pytest.mark.wide
def test_what_precedes_a_text_counts_no_byte(tiny_model, tmp_path, capsys):
    """A tokenizer that begins each text: then its first token is predicted too."""
    text = write(tmp_path / "text.txt", TEXTS[-1])
    tokenizers = {"begins": begins_texts(), "fallback": byte_fallback(), "plain": byte_level()}
    for name, content in tokenizers.items():
        model = changed_model(tiny_model, tmp_path / name, content)
        given = ["--model", model, "--sequence-length=16"]
        record = evaluated(capsys, *given, "--text", text)
        assert (record["all"]["bytes"] == len(TEXTS[-1].encode())) is (name != "plain")
        of_data = evaluated(
            capsys, *given, "--data", prepared_by(model, tmp_path / f"data of {name}", text)
        )
        assert of_data["all"] == record["all"], "a dataset gives what its files do"


@pytest.mark.wide
def test_adapters_are_those_of_the_merged_model(tiny_model, lines, tmp_path, capsys):
    adapters = tmp_path / "adapters"
    merged = tmp_path / "merged"
    with use_mesh():
        adapted = move_adapters(
            jaxtp.add_adapters(jaxtp.hf.load(tiny_model), jaxtp.LoraConfig(rank=2))
        )
        jaxtp.hf.save_adapters(adapted, adapters)
        jaxtp.hf.save(jaxtp.merge_adapters(adapted), merged, tokenizer_from=tiny_model)
    given = ["--text", lines, "--sequence-length=64"]
    flags = [[tiny_model], [merged], [tiny_model, f"--adapters={adapters}"]]
    plain, as_one, found = (
        evaluated(capsys, "--model", *model, *given)["all"]["loss"] for model in flags
    )
    assert found == pytest.approx(as_one, rel=1e-6)
    assert found != pytest.approx(plain, rel=1e-4)


def test_numbers_are_shown_where_their_file_cannot_be_written(tiny_model, lines, tmp_path, capsys):
    path = tmp_path / "numbers.json"
    given = ["--model", tiny_model, "--text", lines, "--sequence-length=16"]
    evaluated(capsys, *given)
    with full_disk(20):
        assert run([*given, f"--json={path}"]) == 2
    captured = capsys.readouterr()
    reason = os.strerror(errno.EFBIG)
    assert f"--json {path}: {reason}; name another file; the numbers are above" in captured.err
    assert captured.out.startswith(" ")


@pytest.mark.wide
def test_a_context_is_not_exceeded(tiny_model, lines, tmp_path, capsys):
    model = changed_model(tiny_model, tmp_path / "model", byte_level())
    config = read_json(model / "config.json")
    write(model / "config.json", json.dumps(config | {"max_position_embeddings": 32}))
    given = ["--model", model, "--text", lines]
    longer = [*given, "--sequence-length=33"]
    assert evaluated(capsys, *given)["sequence_length"] == 32
    assert_refused(run, longer, "give at most 32, or allow it by --beyond-context", capsys)
    assert evaluated(capsys, *longer, "--beyond-context")["sequence_length"] == 33


FILES = {
    "empty.txt": b"",
    "binary.txt": b"\x00\xff\xfe",
    "blank.jsonl": b"\n\n",
    "broken.jsonl": b'{"text": "a"}\n{"text": \n',
    "other.jsonl": b'{"txt": "a"}\n',
    "chat.jsonl": b'{"messages": [{"role": "user", "content": "a"}]}\n',
    "nothing.jsonl": b'{"text": ""}\n',
    "table.csv": b"text,label\none,1\n",
    "one.txt": b"x",
}
GIVEN = "--model {model} --text {lines}"
REFUSED = read_table(__file__)


def test_contradictions_and_inputs_that_cannot_be_measured_are_refused(
    tiny_model, lines, byte_dataset, tmp_path, capsys
):
    for name, content in FILES.items():
        write(tmp_path / name, content)
    (tmp_path / "folder").mkdir()
    places = {"here": tmp_path, "data": byte_dataset, "model": tiny_model, "lines": lines}
    for words, message in REFUSED.items():
        assert_refused(run, words.format(**places).split(), message.format(**places), capsys)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(
    tiny_model, lines, tmp_path, capsys
):
    tokenizer = json.loads(byte_level())
    tokenizer["model"]["vocab"]["x"] = 3000
    model = changed_model(tiny_model, tmp_path / "model", json.dumps(tokenizer))
    assert_refused(
        run,
        ["--model", model, "--text", lines],
        f"the token 3000 is beyond the 300 of {model}",
        capsys,
    )


def test_tasks_need_the_harness(tiny_model, monkeypatch, capsys):
    monkeypatch.setattr("jaxtp.tools.evaluate.evaluation_settings.find_spec", lambda name: None)
    message = "tasks needs lm-evaluation-harness: pip install 'jaxtp[eval]'"
    assert_refused(run, ["--model", tiny_model, "--tasks", "mmlu"], message, capsys)
    assert_refused(train, ["--eval.tasks", "mmlu"], f"eval.{message}", capsys)
