"""What holds of any documents, in any order, in any batches."""

import json
import os
import signal

import hypothesis
import hypothesis.strategies as st
import pytest
from corpora import decoded, jsonl, parquet, prepared, texts
from hypothesis import given, settings
from runs import contents

from jaxtp.data.prepare import batches, run
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.prepare.session import JOURNAL

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One that is fresh for each example."""
    root = tmp_path_factory.mktemp("examples")
    count = iter(range(10**6))

    def fresh():
        path = root / str(next(count))
        path.mkdir()
        return path

    return fresh


@QUICK
@given(st.lists(TEXT, min_size=1), st.sampled_from([[], ["--train-bpe", 300]]), st.integers(1, 60), st.integers(1, 9))
def test_documents_in_are_documents_out(folder, documents, flags, shard_tokens, batch):
    root = folder()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "BATCH_DOCUMENTS", batch)
        path = jsonl(root / "a.jsonl", documents)
        dataset = prepared(root / "d", path, *flags, "--held-out", 0, "--shard-tokens", shard_tokens)
    assert decoded(dataset) == [document.encode() for document in documents]
    split = dataset.splits["train"]
    sizes = [int(lengths.sum()) for lengths in split.lengths()]
    assert all(size >= shard_tokens for size in sizes[:-1])
    assert all(int(lengths[:-1].sum()) < shard_tokens for lengths in split.lengths())


@QUICK
@given(st.lists(st.sampled_from(["a", "b", "aa", "A", "a ", "é", "e\u0301"]), min_size=1))
def test_dedup_keeps_the_first_of_each(folder, documents):
    root = folder()
    dataset = prepared(root / "d", jsonl(root / "a.jsonl", documents), "--dedup", "--held-out", 0)
    assert decoded(dataset) == [document.encode() for document in dict.fromkeys(documents)]


@QUICK
@given(st.lists(TEXT, min_size=2, unique=True), st.randoms(use_true_random=False), st.sampled_from([0.1, 0.5, 0.9]))
def test_what_is_held_out_depends_on_the_document_alone(folder, documents, numbers, share):
    root = folder()
    shuffled = numbers.sample(documents, len(documents))[1:]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_FEW", 0)  # as of many documents
        whole = prepared(root / "d", jsonl(root / "a.jsonl", documents), "--held-out", share)
        part = prepared(root / "e", jsonl(root / "b.jsonl.gz", shuffled), "--held-out", share)
    for split in ("train", "validation"):
        kept = set(decoded(whole, split)) - {next(d for d in documents if d not in shuffled).encode()}
        assert set(decoded(part, split)) == kept


@QUICK
@given(st.lists(TEXT, min_size=1), st.randoms(use_true_random=False), st.sampled_from([0.01, 0.2, 0.5, 0.9]))
def test_of_few_documents_as_many_are_held_out_as_are_nearest_to_the_share(folder, documents, numbers, share):
    root = folder()
    unique = list(dict.fromkeys(documents))
    flags = ["--dedup", "--held-out", share]
    dataset = prepared(root / "d", jsonl(root / "a.jsonl", documents), *flags)
    held_out = decoded(dataset, "validation")
    nearest = min(range(len(unique)), key=lambda count: (abs(count - share * len(unique)), -count))
    assert len(held_out) == nearest
    again = prepared(root / "e", jsonl(root / "b.jsonl", numbers.sample(unique, len(unique))), *flags)
    assert set(decoded(again, "validation")) == set(held_out), "in any order"
    copied = prepared(root / "f", jsonl(root / "c.jsonl", documents), "--held-out", share)
    assert not {*decoded(copied, "validation")} & {*decoded(copied)}, "copies are in one split"


def test_of_six_files_a_fifth_is_one(tmp_path, capsys):
    for share, numbers in {0.2: (5, 1), 0.4: (4, 2), 0.01: (6, 0)}.items():
        for index in range(6):
            (tmp_path / f"{index}.txt").write_text(f"{index} {share}")
        command = [*(tmp_path / f"{index}.txt" for index in range(6)), "--held-out", share]
        dataset = prepared(tmp_path / str(share), *command)
        assert tuple(dataset.splits[name].num_documents for name in ("train", "validation")) == numbers
        assert ("nothing is held out" in capsys.readouterr().out) == (numbers[1] == 0)
    file = tmp_path / "0.01/dataset.json"
    manifest = json.loads(file.read_text())
    assert manifest["arguments"]["held_out"] == 0.01, "the share that was requested"
    before = contents(tmp_path / "0.01")
    prepared(tmp_path / "0.01", *command)
    assert "is finished; there is nothing to do" in capsys.readouterr().out
    assert contents(tmp_path / "0.01") == before


def test_an_unfinished_dataset_of_an_older_version_goes_on_with_the_share_itself(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", sorted({text + str(i) for i, text in enumerate(texts(60))}))
    command = [path, "--held-out", 0.3, "--save-seconds", 0]
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(batches, "_FEW", 0)
        whole = contents(prepared(tmp_path / "whole", *command).folder)
        patch.setattr(run._Preparation, "_report", interrupt)
        assert main([*map(str, command), "--out", str(tmp_path / "d")]) == 130
    journal = tmp_path / "d" / JOURNAL
    journal.write_text(json.dumps({key: v for key, v in json.loads(journal.read_text()).items() if key != "threshold"}))
    assert contents(prepared(tmp_path / "d", *command).folder) == whole


def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)


def test_the_share_that_is_held_out(tmp_path):
    documents = sorted({text + str(i) for i, text in enumerate(texts(4000, longest=3))})
    path = jsonl(tmp_path / "a.jsonl", documents)
    previous = set()
    for share in (0.01, 0.1, 0.5):
        held_out = decoded(prepared(tmp_path / str(share), path, "--held-out", share), "validation")
        assert abs(len(held_out) / 4000 - share) < 0.03
        assert previous <= set(held_out)
        previous = set(held_out)
    none = prepared(tmp_path / "none", path, "--held-out", 0)
    assert none.splits["validation"].num_documents == 0
    assert list(none.splits["validation"].lengths()) == []


def test_another_boundary_of_the_prompt_is_another_document(tmp_path):
    rows = [{"p": "ab", "c": "c"}, {"p": "a", "c": "bc"}, {"p": "ab", "c": "c"}]
    fields = ["--prompt-field", "p", "--completion-field", "c"]
    dataset = prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", rows), *fields, "--dedup", "--held-out", 0)
    split = dataset.splits["train"]
    assert [split.prompt_length(i) for i in range(split.num_documents)] == [2, 1]


def test_batches_and_points_of_saving_change_nothing(tmp_path, monkeypatch):
    path = parquet(tmp_path / "a.parquet", texts(200))
    command = [path, "--train-bpe", 300, "--dedup", "--shard-tokens", 900, "--held-out", 0.2]
    first = contents(prepared(tmp_path / "a", *command).folder)
    monkeypatch.setattr(batches, "BATCH_BYTES", 100)
    assert contents(prepared(tmp_path / "b", *command, "--save-seconds", 0).folder) == first
