"""What holds of any documents, in any order, in any batches."""

import hypothesis
import hypothesis.strategies as st
import pytest
from corpora import decoded, jsonl, parquet, prepared, texts
from hypothesis import given, settings
from runs import contents

from jaxtp.prepare import batches

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
    whole = prepared(root / "d", jsonl(root / "a.jsonl", documents), "--held-out", share)
    part = prepared(root / "e", jsonl(root / "b.jsonl.gz", shuffled), "--held-out", share)
    for split in ("train", "validation"):
        kept = set(decoded(whole, split)) - {next(d for d in documents if d not in shuffled).encode()}
        assert set(decoded(part, split)) == kept


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
