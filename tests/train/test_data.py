"""Training on prepared data: every kind, the whole way from files, and what is refused."""

import json
import re

import numpy as np
import pytest
from corpora import write_bpe
from numpy.random import default_rng
from numpy.testing import assert_allclose
from run_comparisons import assert_same_records
from runs import SMALL, mesh, records
from support import assert_refused

from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.train.__main__ import main as train

WORDS = ["tensor", "mesh", "shard", "gather", "scatter", "reduce", "device", "axis"]
BPE = ["--include=*.txt", "--held-out=0.2"]
PAIRS = ["--prompt-field=prompt", "--completion-field=completion"]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    random = default_rng(0)
    for index in range(120):
        (folder / f"{index}.txt").write_text(
            " ".join(random.choice(WORDS, random.integers(3, 30))) + ".\n"
        )
    write_bpe(folder / "t", WORDS)
    return folder


@pytest.fixture(scope="module")
def dataset(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "bpe"
    assert prepare([str(texts), *BPE, f"--tokenizer={texts}/t", f"--out={folder}"]) == 0
    return folder


@pytest.fixture
def command(tmp_path):
    sizes = ["--model.vocab-size=301", "--model.num-layers=1", "--train.steps=6"]
    return [*SMALL, *sizes, f"--run.dir={tmp_path}/run"]


@pytest.mark.journey
def test_a_token_beyond_the_vocabulary_stops_the_run_with_its_place(
    tmp_path, texts, command, capsys
):
    dataset = tmp_path / "bpe"
    assert prepare([str(texts), *BPE, f"--tokenizer={texts}/t", f"--out={dataset}"]) == 0
    tokens = dataset / "train-00000.tokens"
    tokens.write_bytes(np.full(tokens.stat().st_size // 2, 9999, "<u2").tobytes())
    assert train([*command, "--mesh=tp=2", f"--data.path={dataset}"]) == 2
    error = capsys.readouterr().err
    assert f"{tokens}, document" in error
    assert "token 9999 is beyond model.vocab_size=301" in error


@pytest.mark.journey
def test_a_padded_run_resumes_on_another_mesh_from_data_that_moved(
    tmp_path, dataset, command, capsys
):
    """Its vocabulary and its heads are divided by neither tp."""
    padded = ["--model.num-heads=9", "--model.num-kv-heads=3"]
    command = [*command, *padded, f"--data.path={dataset}", "--optimizer.schedule=constant"]
    assert train([*command, "--mesh=tp=2"]) == 0
    out = capsys.readouterr().out
    assert f"data    {dataset}: " in out
    assert "9 query heads to 12, 3 kv heads to 4" in out
    again = [*command, f"--run.dir={tmp_path}/again"]
    assert train([*again, "--mesh=tp=2", "--train.steps=3"]) == 0
    (tmp_path / "moved").symlink_to(dataset)
    assert train([*again, "--mesh=dp=2,tp=4", f"--data.path={tmp_path}/moved"]) == 0
    assert_same_records(tmp_path / "again", tmp_path / "run", "loss", rtol=1e-4)
    last = [records(tmp_path / name, "eval_loss")[6] for name in ("run", "again")]
    assert_allclose(*last, rtol=1e-4)


@pytest.mark.journey
def test_a_mixture_of_concatenated_documents_and_a_validation_set_of_its_own(
    tmp_path, texts, dataset, command, capsys
):
    other = tmp_path / "other"
    tokenizer = [f"--tokenizer={dataset}/tokenizer.json", "--held-out=0"]
    assert prepare([str(texts), "--include=*.txt", *tokenizer, f"--out={other}"]) == 0
    config = tmp_path / "c.yaml"
    config.write_text(
        f"data: {{mixture: {{{dataset}: 3, {other}: 1}}, validation: {dataset}, packing: concatenated}}"  # noqa: E501
    )
    flags = [f"--config={config}", *command, "--mesh=fsdp=2,tp=2"]
    assert train(flags) == 0
    out = capsys.readouterr().out
    assert f"data    3 x {dataset} + 1 x {other}: " in out
    assert f"epochs of {other}" in out
    config.write_text(config.read_text().replace(": 3,", ": 2,"))
    assert_refused(train, [*flags, "--train.steps=9"], "data: sha256: ", capsys)


@pytest.mark.journey
def test_sequences_of_prompts_alone_are_left_out_and_counted(tmp_path, command, capsys):
    rows = [{"prompt": f"{i:{200 if i % 2 else 2}}", "completion": "yes"} for i in range(40)]
    long = str(tmp_path / "long")
    assert (
        prepare(
            [write_rows(tmp_path / "rows.jsonl", rows), *PAIRS, "--held-out=0.3", f"--out={long}"]
        )
        == 0
    )
    flags = [*command, "--mesh=tp=2", f"--data.path={long}", "--data.global-batch-size=2"]
    assert train(flags) == 0
    assert re.search(
        r"^rows .* \d+ more without a label left out", capsys.readouterr().out, re.MULTILINE
    )
    assert min(records(tmp_path / "run").values()) > 0
    assert_refused(
        train,
        [*flags, "--data.packing=concatenated", f"--run.dir={tmp_path}/next"],
        "data.packing",
        capsys,
    )


REFUSED = {
    "--model.vocab-size=200": "model.vocab_size=200 has fewer",
    "--data.path=nowhere": "data.path=nowhere: there is no such file or dataset",
    "--data.sequence-length=8 "
    "--data.long-documents=stop": "tokens are more than data.sequence_length=8",
    "--data.path={rows}": "is not plain text: make a dataset of it by jaxtp prepare",
}


def test_data_that_do_not_fit_are_refused(tmp_path, dataset, command, capsys):
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    for flags, message in REFUSED.items():
        assert (
            train(
                [
                    *command,
                    "--mesh=tp=2",
                    f"--data.path={dataset}",
                    *flags.format(rows=rows).split(),
                ]
            )
            == 2
        ), flags
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error
        assert not (tmp_path / "run").exists(), flags


@pytest.mark.journey
def test_the_validation_loss_does_not_depend_on_the_batch_size_and_the_mesh(tmp_path):
    """Documents have very different lengths, so that a row that counts twice shows.

    The weights are those of the initialisation: the learning rate is too small to move them.
    """
    for name in "ab":
        rows = [{"text": f"{name}{i} " * (1 + i % 23)} for i in range(90)]
        file = write_rows(tmp_path / f"{name}.jsonl", rows)
        assert prepare([file, "--held-out=0.2", f"--out={tmp_path / name}"]) == 0
    mixed = tmp_path / "mixture.yaml"
    mixed.write_text(f"data: {{mixture: {{{tmp_path / 'a'}: 3, {tmp_path / 'b'}: 1}}}}\n")
    once = ["--eval.batches=99", "--train.steps=1", "--optimizer.learning-rate=1e-30"]
    flags = [f"--config={mixed}", *SMALL, "--model.num-layers=1", *once]
    losses = []
    for size, where in ((2, mesh(1, 1, 1)), (64, mesh(2, 1, 1)), (4, mesh(1, 1, 2, cp=2))):
        out = tmp_path / str(size)
        assert train([*flags, *where, f"--data.global-batch-size={size}", f"--run.dir={out}"]) == 0
        losses += records(out, "eval_loss").values()
    assert_allclose(losses, losses[0], rtol=2e-6)
