"""Training on prepared data: every kind, the whole way from files, and what is refused."""

import json
import re

import numpy as np
import pytest
from runs import SMALL, mesh, records
from support import journeys

from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.train.__main__ import main as train

WORDS = ["tensor", "mesh", "shard", "gather", "scatter", "reduce", "device", "axis"]


def sentence(random):
    return " ".join(random.choice(WORDS, random.integers(3, 30))) + ".\n"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    for index in range(120):
        (folder / f"{index}.txt").write_text(sentence(random))
    rows = [{"prompt": f"Say {word}: ", "completion": f"{word} {word}"} for word in WORDS * 20]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def dataset(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "bpe"
    flags = ["--include", "*.txt", "--train-bpe", "300", "--held-out", "0.2"]
    assert prepare([str(texts), *flags, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def command(tmp_path):
    return [*SMALL, "--model.vocab-size", "301", "--train.steps", "6", "--run.dir", str(tmp_path / "run")]


@pytest.mark.journey
def test_an_odd_vocabulary_resumes_on_another_mesh_with_the_same_numbers(tmp_path, dataset, command, capsys):
    command = [*command, "--data.path", str(dataset), "--optimizer.schedule", "constant"]
    assert train([*command, *mesh(1, 1, 2)]) == 0
    out = capsys.readouterr().out
    assert f"data    {dataset}: " in out
    assert "% padding" in out
    assert "nats per token, perplexity" in out
    whole = records(tmp_path / "run")
    again = [*command, "--run.dir", str(tmp_path / "again")]
    assert train([*again, *mesh(1, 1, 2), "--train.steps", "3"]) == 0
    assert train([*again, *mesh(2, 1, 4)]) == 0
    joined = records(tmp_path / "again")
    assert joined.keys() == whole.keys()
    np.testing.assert_allclose(list(joined.values()), list(whole.values()), rtol=1e-4)


@pytest.mark.parametrize("packing", journeys(["documents", "concatenated"], "documents"))
def test_the_mesh_changes_nothing(tmp_path, dataset, command, packing):
    for name, shape in {"a": (1, 1, 1), "b": (2, 2, 2)}.items():
        flags = ["--data.path", str(dataset), "--data.packing", packing, "--run.dir", str(tmp_path / name)]
        assert train([*command, *flags, *mesh(*shape)]) == 0
    for key in ("loss", "eval_loss"):
        ours, theirs = (list(records(tmp_path / name, key).values()) for name in "ab")
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.journey
def test_a_mixture_and_a_validation_set_of_its_own(tmp_path, texts, dataset, command, capsys):
    again = tmp_path / "other"
    tokenizer = ["--tokenizer", str(dataset / "tokenizer.json"), "--held-out", "0"]
    assert prepare([str(texts), "--include", "*.txt", *tokenizer, "--out", str(again)]) == 0
    (tmp_path / "c.yaml").write_text(
        f"data: {{mixture: {{{dataset}: 3, {again}: 1}}, validation: {dataset}, global_batch_size: 8}}\n"
    )
    flags = ["--config", str(tmp_path / "c.yaml"), *command, *mesh(1, 2, 2)]
    assert train(flags) == 0
    out = capsys.readouterr().out
    assert f"data    3 x {dataset} + 1 x {again}: " in out
    assert f"epochs of {again}" in out
    (tmp_path / "c.yaml").write_text((tmp_path / "c.yaml").read_text().replace(": 3,", ": 2,"))
    assert train([*flags, "--train.steps", "9"]) == 2
    assert "data: sha256: " in capsys.readouterr().err


@pytest.mark.journey
def test_instruction_data(tmp_path, texts, command, capsys):
    """Completions repeat a word of the prompt: of the labels that count, most follow from what comes before them."""
    folder = tmp_path / "pairs"
    fields = ["--prompt-field", "prompt", "--completion-field", "completion", "--held-out", "0.5"]
    assert prepare([str(texts / "pairs.jsonl"), *fields, "--out", str(folder)]) == 0
    assert train([*command, "--data.path", str(folder), *mesh(1, 1, 2)]) == 0
    assert train([*command, "--data.path", str(folder), "--data.packing", "concatenated", *mesh(1, 1, 2)]) == 2
    assert "data.packing" in capsys.readouterr().err


REFUSED = {
    "small vocabulary": (["--model.vocab-size", "200"], "model.vocab_size=200 has fewer"),
    "no such folder": (["--data.path", "nowhere"], "data.path=nowhere: there is no such file or dataset"),
    "long documents": (
        ["--data.sequence-length", "8", "--data.long-documents", "stop"],
        "tokens are more than data.sequence_length=8",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_the_data(tmp_path, dataset, command, capsys, name):
    flags, message = REFUSED[name]
    assert train([*command, "--data.path", str(dataset), *mesh(1, 1, 2), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (tmp_path / "run").exists()


@pytest.mark.journey
def test_a_token_beyond_the_vocabulary_stops_the_run_with_its_place(tmp_path, dataset, command, capsys):
    tokens = dataset / "train-00000.tokens"
    whole = tokens.read_bytes()
    with tokens.open("r+b") as file:  # in place: the threads that read ahead still have it in their memory
        file.write(np.full(len(whole) // 2, 9999, "<u2").tobytes())
        file.flush()
        try:
            assert train([*command, "--data.path", str(dataset), *mesh(1, 1, 2)]) == 2
        finally:
            file.seek(0)
            file.write(whole)
    assert f"{tokens}, document" in (error := capsys.readouterr().err)
    assert "token 9999 is beyond model.vocab_size=301" in error


@pytest.mark.journey
def test_sequences_of_prompts_alone_are_left_out_and_counted(tmp_path, command, capsys):
    rows = [{"prompt": f"{i:200}", "completion": "yes"} for i in range(20)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ["--prompt-field", "prompt", "--completion-field", "completion", "--held-out", "0.3"]
    assert prepare([str(tmp_path / "long.jsonl"), *fields, "--out", str(tmp_path / "long")]) == 0
    flags = ["--data.path", str(tmp_path / "long"), "--data.global-batch-size", "2", "--train.steps", "20"]
    assert train([*command, *flags, *mesh(1, 1, 2)]) == 0
    assert re.search(r"^rows .* \d+ more without a label left out", capsys.readouterr().out, re.MULTILINE)
    assert min(records(tmp_path / "run").values()) > 0


@pytest.mark.journey
def test_data_may_move(tmp_path, dataset, command):
    assert train([*command, "--data.path", str(dataset), *mesh(1, 1, 2), "--train.steps", "3"]) == 0
    (tmp_path / "moved").symlink_to(dataset)
    assert train([*command, "--data.path", str(tmp_path / "moved"), *mesh(1, 1, 2)]) == 0
    assert max(records(tmp_path / "run")) == 6
    assert train([*command, "--config", str(tmp_path / "run/config.yaml"), "--train.steps", "7", *mesh(1, 1, 2)]) == 0


def test_files_that_must_be_prepared_first(tmp_path, texts, command, capsys):
    assert train([*command, "--data.path", str(texts / "pairs.jsonl"), *mesh(1, 1, 2)]) == 2
    assert "is not plain text: make a dataset of it by jaxtp prepare" in capsys.readouterr().err
