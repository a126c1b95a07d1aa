"""Scores beside a dataset: they stay with their tokens in every row, and what training refuses."""

import json
import math
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from corpora import jsonl, prepared, texts

import jaxtp
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.corpus import load_corpus
from jaxtp.data.manifest import BYTES
from jaxtp.data.rows import IGNORE
from jaxtp.data.samples import Data, RowSettings, make_rows
from jaxtp.data.scores import JOURNAL, SCORES, Record, Scored, Scores, ScoresError, open_scores, verify
from jaxtp.tools.score.scoring import Job, _Writer
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.init_source import InitSource
from jaxtp.train.run_data import open_data
from jaxtp.train.task import Task

SETTINGS = RowSettings(64, 256, "documents", "split")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Documents in several shards."""
    folder = tmp_path_factory.mktemp("data")
    jsonl(folder / "a.jsonl", texts(40))
    return prepared(folder / "data", folder / "a.jsonl", "--held-out", "0.2", "--shard-tokens", "1000")


def write(dataset, out, settings=SETTINGS, top_k=None):
    """Writes scores that name the token: minus its index among all tokens, and k ids from there on."""
    rows = {name: make_rows(split, settings) for name, split in dataset.splits.items()}
    splits = {
        name: Scored(split.identity, rows[name].identity, ({},) * len(split.shard_sizes))
        for name, split in dataset.splits.items()
    }
    named = {"model": "m", "model_sha256": "", "dtype": "float32", "dataset": "d", "tokenizer": BYTES}
    rules = {"sequence_length": settings.length, "packing": settings.packing, "long_documents": settings.long_documents}
    record = Record(format=1, **named, vocab_size=256, top_k=top_k, temperature=1.0, **rules, splits=splits)
    out.mkdir()
    writer = _Writer(Job(out, record, dataset.splits, rows, ("a", "b c")))
    for name in rows:
        for index in range(len(rows[name])):
            writer.write(name, index, {key: array[None] for key, array in expected(rows[name], index, top_k).items()})
    writer.save()
    return writer


def expected(rows, index, top_k):
    row, positions = rows[index], np.zeros(SETTINGS.length, np.int64)
    ranges = [np.arange(*each) for each in rows._ranges(index)]
    positions[: sum(map(len, ranges))] = np.concatenate(ranges)
    positions[row["labels"] == IGNORE] = 0
    if top_k is None:
        return {"log_probs": -positions.astype(np.float32)}
    ids = np.where(positions[:, None] > 0, positions[:, None] + np.arange(top_k), 0) % 256
    return {"top_ids": ids.astype(np.int32), "top_log_probs": -ids.astype(np.float32)}


@pytest.mark.parametrize("packing", ["documents", "concatenated"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_rows_have_the_scores_of_their_tokens(dataset, tmp_path, packing, top_k):
    settings = replace(SETTINGS, packing=packing)
    write(dataset, tmp_path / "s", settings, top_k).finish()
    scores = open_scores(tmp_path / "s")
    assert list(verify(scores)) == []
    assert scores.describe().startswith(f"{tmp_path / 's'}: {'3 most probable tokens' if top_k else 'log-prob'}")
    data = Data(load_corpus(dataset.folder), settings, 0, scores)
    assert data.description["scores"] == scores.identity
    for rows in (*data.train_rows, *data.validation_rows):
        for index in range(len(rows)):
            row, plain = pickle.loads(pickle.dumps(rows))[index], rows._row(index)
            wanted = expected(rows, index, top_k)
            assert row.keys() == {*plain, *wanted}
            for name, array in {**plain, **wanted}.items():
                np.testing.assert_array_equal(row[name], array)
                assert row[name].dtype == (np.float32 if "log" in name else np.int32)
    padding = data.validation(1, 64)[63]
    assert padding.keys() == row.keys()
    assert not any(padding[name].any() for name in wanted)


def test_refused(dataset, tmp_path):
    """Each message names the folder, and the command that makes the right scores or finishes these."""
    config = DataConfig(path=dataset.folder, scores=tmp_path / "s", sequence_length=64)

    def refused(match, task=Task(loss=lambda *_: None), config=config):
        with pytest.raises((ScoresError, ConfigError), match=match):
            open_data(replace(TrainConfig(), data=config), InitSource(), task)

    refused("no such folder")
    writer = write(dataset, tmp_path / "s")
    refused(r"this command finishes them: jaxtp score a 'b c'")
    writer.finish()
    refused("the default loss does not read them", Task())
    refused(r"data.packing: documents -> concatenated.*jaxtp score", config=replace(config, packing="concatenated"))
    refused(r"data.sequence_length: 64 -> 32", config=replace(config, sequence_length=32))
    refused(r"data.long_documents: split -> drop", config=replace(config, long_documents="drop"))
    other = prepared(tmp_path / "other", jsonl(tmp_path / "b.jsonl", texts(40, seed=1)), "--held-out", "0.2")
    match = r"has scores of d, and not of the documents in .*other/train-00000.tokens; .*: jaxtp score"
    refused(match, config=replace(config, path=other.folder))
    refused(r"documents in .*other/validation", config=replace(config, validation=other.folder))
    scores = open_scores(tmp_path / "s")
    with pytest.raises(ScoresError, match=r"scores for tokenizer bytes, and the data were made with tokenizer abc"):
        scores.check(SimpleNamespace(name="abc"), SETTINGS)
    foreign = Scores(tmp_path, replace(scores.record, tokenizer="\x1b[31m"))
    with pytest.raises(ScoresError, match=r"scores for tokenizer \\x1b\[31m"):
        foreign.check(SimpleNamespace(name="abc"), SETTINGS)
    write(dataset, tmp_path / "k", top_k=3).finish()
    rows = make_rows(dataset.splits["train"], SETTINGS)
    open_scores(tmp_path / "k").add_to(rows, dataset.splits["train"], replace(SETTINGS, vocab_size=100))
    with pytest.raises(ScoresError, match=r"train-0000\d.top_ids: id \d+ is beyond model.vocab_size=100"):
        list(rows)


def test_a_run_of_dpo_is_told_the_command_that_makes_its_reference(dataset, tmp_path):
    """With its own paths, another folder than one that is there, and never the most probable tokens of --top-k."""
    config = replace_nested(
        TrainConfig(), {"data.path": dataset.folder, "data.sequence_length": 64, "model.from_hf": tmp_path / "a model"}
    )
    scored = f"jaxtp score {dataset.folder} --model '{tmp_path}/a model' --out"

    def refusal(loss=jaxtp.DPO(), **changes):
        with pytest.raises((ScoresError, ConfigError)) as error:
            open_data(replace_nested(config, changes), InitSource(), Task(loss=loss))
        return str(error.value)

    none = refusal()
    assert f"needs a reference: {scored} {dataset.folder}-scores --data.sequence-length 64; " in none
    assert "--model.lora.rank 16" in none
    write(dataset, tmp_path / "s", top_k=3).finish()
    top = refusal(**{"data.scores": tmp_path / "s"})
    assert "has the 3 most probable tokens at each position, and the loss needs the log-prob" in top
    assert top.endswith(f"labels: {scored} {tmp_path / 's'}-2 --data.sequence-length 64")
    rows = refusal(**{"data.scores": tmp_path / "s", "data.sequence_length": 32})
    assert rows.endswith(f"score again: {scored} {tmp_path / 's'}-2 --data.sequence-length 32")
    teacher = refusal(jaxtp.Distillation(), **{"data.scores": tmp_path / "s", "data.packing": "concatenated"})
    assert f"jaxtp score {dataset.folder} --model MODEL --out {tmp_path / 's'}-2 --top-k 3 --data.sequ" in teacher
    assert teacher.endswith("--data.packing concatenated")


def damaged(folder, how):
    file = folder / "train-00000.log_probs"
    content = file.read_bytes()
    if how == "cut":
        file.write_bytes(content[:-4])
    elif how == "changed":
        file.write_bytes(content[:-4] + np.float32(-7).tobytes())
    elif how == "gone":
        file.unlink()
    elif how == "link":
        (folder.parent / "elsewhere").write_bytes(content)
        file.unlink()
        file.symlink_to(folder.parent / "elsewhere")
    elif how == "pipe":
        file.unlink()
        os.mkfifo(file)


@pytest.mark.parametrize("how", ["cut", "changed", "gone", "link", "pipe"])
def test_damage_is_found(dataset, tmp_path, how):
    write(dataset, tmp_path / "s").finish()
    damaged(tmp_path / "s", how)
    (problem,) = verify(open_scores(tmp_path / "s"))
    assert "train-00000.log_probs" in problem
    if how != "changed":
        with pytest.raises(ScoresError, match=r"train-00000.log_probs: damaged scores"):
            Data(load_corpus(dataset.folder), SETTINGS, 0, open_scores(tmp_path / "s"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("format", 2), ("top_k", 0), ("temperature", 0), ("packing", "no"), ("vocab_size", "x"), ("splits", {"../y": {}})],
)
def test_a_wrong_scores_json_is_refused(dataset, tmp_path, key, value):
    write(dataset, tmp_path / "s").finish()
    record = json.loads((tmp_path / "s" / SCORES).read_text())
    (tmp_path / "s" / SCORES).write_text(json.dumps({**record, key: value}))
    with pytest.raises(ScoresError, match=r"scores.json: "):
        open_scores(tmp_path / "s")


def test_mutated_files_give_rows_or_one_error(dataset, tmp_path):
    write(dataset, tmp_path / "s", top_k=3).finish()
    write(dataset, tmp_path / "j", top_k=3)
    numbers, outcomes, corpus = np.random.default_rng(0), set(), load_corpus(dataset.folder)
    for name in (SCORES, JOURNAL):
        folder = tmp_path / ("s" if name == SCORES else "j")
        whole = (folder / name).read_bytes()
        for _ in range(50):
            content = bytearray(whole)
            at = int(numbers.integers(len(content)))
            content[at : at + int(numbers.integers(3))] = numbers.bytes(int(numbers.integers(3)))
            (folder / name).write_bytes(content)
            try:
                Data(corpus, SETTINGS, 0, open_scores(folder))
                outcomes.add("rows")
            except ScoresError as error:
                outcomes.add(str(error).rpartition(": ")[2][:20])
    assert "rows" in outcomes
    assert len(outcomes) > 3


def test_pairs_keep_their_scores(tmp_path):
    rows = [{"prompt": f"{i} ", "chosen": "yes" * (i + 1), "rejected": "no" * (9 - i)} for i in range(9)]
    jsonl(tmp_path / "a.jsonl", rows)
    pairs = prepared(tmp_path / "data", tmp_path / "a.jsonl", "--preference", "--held-out", "0.3")
    write(pairs, tmp_path / "s").finish()
    for row in Data(load_corpus(pairs.folder), SETTINGS, 0, open_scores(tmp_path / "s")).train_rows[0]:
        assert {"pairs", "log_probs"} <= row.keys()
        assert row["log_probs"][(row["pairs"] != 0) & (row["labels"] != IGNORE)].all()
        assert not row["log_probs"][row["labels"] == IGNORE].any()


@pytest.mark.parametrize("number", [math.nan, 1e30])
def test_numbers_that_are_no_scores_are_found(dataset, tmp_path, number):
    writer = write(dataset, tmp_path / "s")
    path = tmp_path / "s" / "train-00000.log_probs"
    array = np.memmap(path, np.float32, "r+")
    array[0] = number
    array.flush()
    writer.finish()
    (problem,) = verify(open_scores(tmp_path / "s"))
    assert problem.startswith(f"{path}: log-probabilities from ")
    data = Data(load_corpus(dataset.folder), SETTINGS, 0, open_scores(tmp_path / "s"))
    with pytest.raises(ScoresError, match="no log-probability; jaxtp score --verify"):
        list(data.train_rows[0])
