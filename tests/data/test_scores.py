"""Scores beside a dataset: they stay with their tokens in every row, and what training refuses."""

import math
import os
import pickle
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import jsonl, prepared, texts
from numpy.random import default_rng
from numpy.testing import assert_array_equal
from tables import raised_by, read_json, read_table, write_json

import jaxtp
from jaxtp.config.schema import ConfigError, replace_nested
from jaxtp.data.corpus import load_corpus
from jaxtp.data.manifest import DatasetError
from jaxtp.data.rows import IGNORE
from jaxtp.data.samples import Data, RowSettings, make_rows
from jaxtp.data.scores import SCORES, Record, Scored, open_scores
from jaxtp.tools.score.scoring import Job, _Writer
from jaxtp.train.config import DataConfig, TrainConfig
from jaxtp.train.init_source import InitSource
from jaxtp.train.loss import Objective
from jaxtp.train.parts import Parts
from jaxtp.train.run_data import open_data

FOLDER = Path("s")
SETTINGS = RowSettings(64, 256, "documents", "split")
FILES = ExitStack()


@pytest.fixture(autouse=True)
def files_are_closed():
    yield
    FILES.close()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    """Documents in several shards."""
    folder = tmp_path_factory.mktemp("data")
    jsonl(folder / "a.jsonl", texts(40))
    return prepared(folder / "data", folder / "a.jsonl", "--held-out=0.2", "--shard-tokens=1000")


def write(dataset, settings=SETTINGS, top_k=None):
    """Writes scores that name the row and the position, and k ids from there on."""
    rows = {}
    splits = {}
    for name, split in dataset.splits.items():
        rows[name] = make_rows(split, settings)
        splits[name] = Scored(split.identity, rows[name].identity, len(rows[name]))
    record = Record(
        **{
            "format": 2,
            "model": "m",
            "model_sha256": "",
            "dtype": "float32",
            "dataset": "d",
            "vocab_size": 256,
            "top_k": top_k,
            "temperature": 1.0,
            "sequence_length": settings.length,
            "splits": splits,
            "packing": settings.packing,
            "long_documents": settings.long_documents,
        }
    )
    FOLDER.mkdir()
    writer = _Writer(Job(FOLDER, record, rows), FILES)
    for name in rows:
        for index in range(len(rows[name])):
            columns = expected(rows[name], index, top_k)
            writer.write(name, 1, {key: array[None] for key, array in columns.items()})
    writer.save()
    return writer


def expected(rows, index, top_k):
    positions = np.arange(1, SETTINGS.length + 1) + index * SETTINGS.length
    positions[rows[index]["labels"] == IGNORE] = 0
    if top_k is None:
        return {"log_probs": -positions.astype(np.float32)}
    ids = np.where(positions[:, None] > 0, positions[:, None] + np.arange(top_k), 0) % 256
    return {"top_ids": ids.astype(np.int32), "top_log_probs": -ids.astype(np.float32)}


@pytest.mark.parametrize(
    ("packing", "top_k"), [("documents", None), ("documents", 3), ("concatenated", 3)]
)
def test_rows_have_the_scores_of_their_tokens(dataset, packing, top_k):
    settings = replace(SETTINGS, packing=packing)
    write(dataset, settings, top_k).finish()
    scores = open_scores(FOLDER)
    assert scores.describe().startswith(f"s: {'3 most probable tokens' if top_k else 'log-prob'}")
    data = Data(load_corpus(dataset.folder), settings, 0, scores)
    assert data.description["scores"] == scores.identity
    for split, rows in zip(
        dataset.splits.values(), (*data.train_rows, *data.validation_rows), strict=True
    ):
        plain = make_rows(split, settings)
        for index, row in enumerate(pickle.loads(pickle.dumps(rows))):
            wanted = plain[index] | expected(plain, index, top_k)
            assert row.keys() == wanted.keys()
            for name, array in wanted.items():
                assert_array_equal(row[name], array)
                assert row[name].dtype == (np.float32 if "log" in name else np.int32)
    padding = data.validation(1, 64)[63]
    assert padding.keys() == row.keys()
    assert not any(padding[name].any() for name in padding.keys() - plain[0].keys())


def test_scores_that_do_not_fit_the_data_are_refused(dataset):
    """Each message names the folder, and what makes the right scores or finishes these."""
    config = DataConfig(path=dataset.folder, scores=FOLDER, sequence_length=64)

    def assert_refused(match, parts=Parts(loss=Objective(lambda *_: None)), **changes):
        with pytest.raises((DatasetError, ConfigError), match=match):
            open_data(replace(TrainConfig(), data=replace(config, **changes)), InitSource(), parts)

    assert_refused("no such folder")
    assert_refused(r"has no scores\.json", scores=Path("."))
    writer = write(dataset)
    assert_refused("unfinished scores, which the same jaxtp score command finishes")
    writer.finish()
    assert_refused("the default loss does not read them", Parts())
    assert_refused(r"data.packing: documents -> concatenated.*jaxtp score", packing="concatenated")
    assert_refused(r"data.sequence_length: 64 -> 32", sequence_length=32)
    assert_refused(r"data.long_documents: split -> drop", long_documents="drop")
    other = prepared("other", jsonl(Path("b.jsonl"), texts(40, seed=1)), "--held-out=0.2").folder
    assert_refused(
        "has scores of d, and not of the documents in .*other/train-00000.tokens; .*: jaxtp sc",
        path=other,
    )
    assert_refused("documents in .*other/validation", validation=other)


def test_scores_of_another_vocabulary_are_refused(dataset):
    write(dataset, top_k=3).finish()
    scores = open_scores(FOLDER)
    train = dataset.splits["train"]
    rows = make_rows(train, SETTINGS)
    scores.add_to(rows, train, replace(SETTINGS, vocab_size=100))
    with pytest.raises(DatasetError, match=r"train.scores: id \d+ is beyond model.vocab_size=100"):
        list(rows)


def test_a_run_of_dpo_is_told_the_command_that_makes_its_reference(dataset):
    """With its own paths, another folder than one that is there, and never the most probable
    tokens of --top-k.
    """
    settings = {
        "data.path": dataset.folder,
        "data.sequence_length": 64,
        "model.from_hf": Path("a model"),
    }
    config = replace_nested(TrainConfig(), settings)
    scored = f"jaxtp score {dataset.folder} --model 'a model' --out"

    def refusal(loss=jaxtp.losses.DPO(), **changes):
        with pytest.raises((DatasetError, ConfigError)) as error:
            open_data(replace_nested(config, changes), InitSource(), Parts(loss=Objective(loss)))
        return str(error.value)

    none = refusal()
    assert (
        f"needs a reference: {scored} {dataset.folder}-scores --data.sequence-length 64; " in none
    )
    assert "--model.lora.rank 16" in none
    write(dataset, top_k=3).finish()
    top = refusal(**{"data.scores": FOLDER})
    assert "has the 3 most probable tokens at each position, and the loss needs the log-prob" in top
    assert top.endswith(f"labels: {scored} s-2 --data.sequence-length 64")
    rows = refusal(**{"data.scores": FOLDER, "data.sequence_length": 32})
    assert rows.endswith(f"score again: {scored} s-2 --data.sequence-length 32")
    teacher = refusal(
        jaxtp.losses.Distillation(), **{"data.scores": FOLDER, "data.packing": "concatenated"}
    )
    assert f"jaxtp score {dataset.folder} --model MODEL --out s-2 --top-k 3 --data.sequ" in teacher
    assert teacher.endswith("--data.packing concatenated")


def linked(file):
    file.symlink_to(file.rename("elsewhere").absolute())


def piped(file):
    file.unlink()
    os.mkfifo(file)


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-4]),
    "changed": lambda file: file.write_bytes(file.read_bytes()[:-4] + np.float32(-7).tobytes()),
    "deleted": Path.unlink,
    "linked": linked,
    "piped": piped,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(dataset, damage):
    writer = write(dataset)
    writer.finish()
    DAMAGES[damage](Path("s/train.scores"))
    with pytest.raises(DatasetError, match=r"train.scores: (damaged|its sha256|No such)"):
        _Writer(writer._job, FILES)
    if damage != "changed":
        with pytest.raises(DatasetError, match=r"train.scores: damaged: "):
            Data(load_corpus(dataset.folder), SETTINGS, 0, open_scores(FOLDER))


def test_a_wrong_scores_json_is_refused(dataset):
    write(dataset).finish()
    file = FOLDER / SCORES
    record = read_json(file)
    wrong = read_table(__file__)
    for key, value in wrong.items():
        write_json(file, {**record, key: value})
        with pytest.raises(DatasetError, match=r"scores.json: "):
            open_scores(FOLDER)


@pytest.mark.parametrize("is_finished", [True, False])
def test_mutated_files_give_rows_or_one_error(dataset, is_finished):
    writer = write(dataset, top_k=3)
    if is_finished:
        writer.finish()
    numbers = default_rng(0)
    corpus = load_corpus(dataset.folder)
    whole = (FOLDER / SCORES).read_bytes()
    errors = []
    for _ in range(30):
        content = bytearray(whole)
        at = int(numbers.integers(len(content)))
        content[at : at + int(numbers.integers(3))] = numbers.bytes(int(numbers.integers(3)))
        (FOLDER / SCORES).write_bytes(content)
        errors.append(
            raised_by(lambda: Data(corpus, SETTINGS, 0, open_scores(FOLDER)), kind=DatasetError)
        )
    assert not [error for error in errors if "\n" in error]
    assert any(error != "no error" for error in errors)
    assert is_finished == ("no error" in errors)


def test_pairs_keep_their_scores():
    rows = [
        {"prompt": f"{i} ", "chosen": "yes" * (i + 1), "rejected": "no" * (9 - i)} for i in range(9)
    ]
    pairs = prepared("data", jsonl(Path("a.jsonl"), rows), "--preference", "--held-out", "0.3")
    write(pairs).finish()
    for row in Data(load_corpus(pairs.folder), SETTINGS, 0, open_scores(FOLDER)).train_rows[0]:
        has_label = row["labels"] != IGNORE
        assert row["log_probs"][(row["pairs"] != 0) & has_label].all()
        assert not row["log_probs"][~has_label].any()


@pytest.mark.parametrize("number", [math.nan, 1e30])
def test_numbers_that_are_no_scores_are_found(dataset, number):
    writer = write(dataset)
    path = FOLDER / "train.scores"
    path.write_bytes(np.float32(number).tobytes() + path.read_bytes()[4:])
    writer.finish()
    data = Data(load_corpus(dataset.folder), SETTINGS, 0, open_scores(FOLDER))
    with pytest.raises(DatasetError, match=r"train.scores: log-probabilities from "):
        list(data.train_rows[0])
