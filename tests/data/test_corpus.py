import os
import platform

import numpy as np
import pytest

from jaxtp.data.corpus import (
    BYTE_TOKENIZER,
    Corpus,
    CorpusError,
    Part,
    Source,
    _require_one_tokenizer,
    load_corpus,
    standard_library,
    text_file,
)
from jaxtp.data.documents import InMemory
from jaxtp.data.manifest import TokenizerInfo
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.samples import HELD_OUT, ORDER, Data, RowSettings


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def contents(documents):
    return [documents.document(i).tobytes() for i in range(documents.num_documents)]


def test_standard_library_is_real_text_with_a_held_out_part():
    corpus = load_corpus(None)
    assert corpus.train_tokens > 5_000_000
    assert 0.005 < corpus.validation_tokens / corpus.train_tokens < 0.1
    assert b"import" in corpus.sources[0].train.tokens(0, 100_000).tobytes()
    assert platform.python_version() in corpus.description
    assert corpus.describe() == load_corpus(None).describe()
    assert corpus.unit == "bytes"


def test_tests_site_packages_and_encodings_are_left_out(tmp_path):
    kept = {f"module_{i}.py": f"a{i}" for i in range(100)} | {"json/decoder.py": "b"}
    left_out = {f"{folder}/x.py": "SECRET" for folder in ("test", "json/tests", "site-packages/numpy", "encodings")}
    write(tmp_path, kept | left_out | {"README.txt": "SECRET"})
    part = standard_library(tmp_path)
    assert sorted(contents(part.train) + contents(part.validation)) == sorted(text.encode() for text in kept.values())
    assert part.description.endswith(f"{len(kept)} files")


def test_the_split_follows_the_path_not_the_content(tmp_path):
    write(tmp_path / "a", {f"m{i}.py": f"{i:03}" for i in range(200)})
    write(tmp_path / "b", {f"m{i}.py": f"{999 - i:03}" for i in range(200)})
    a, b = standard_library(tmp_path / "a"), standard_library(tmp_path / "b")
    assert a.validation.num_documents == b.validation.num_documents > 0
    assert contents(a.validation) != contents(b.validation)


@pytest.mark.parametrize("files", [{}, {"notes.txt": "x"}, {"test/x.py": "x"}])
def test_a_library_without_sources_is_an_error(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(CorpusError, match=r"no Python sources.*--data\.path"):
        standard_library(tmp_path)


def test_own_text_holds_out_its_last_twentieth(tmp_path):
    write(tmp_path, {"own.txt": "".join(chr(65 + i) for i in range(20)) * 5})
    part = text_file(tmp_path / "own.txt")
    assert (part.train.num_tokens, part.validation.num_tokens) == (95, 5)
    assert contents(part.validation) == [b"PQRST"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("none.txt", "there is no such file or dataset"), ("empty.txt", "0 bytes"), ("pipe", "not a regular file")],
)
def test_unusable_text(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusError, match=message):
        load_corpus(tmp_path / name)


def test_text_larger_than_the_memory_is_to_be_prepared(tmp_path, monkeypatch):
    def read_bytes(path):
        raise MemoryError

    write(tmp_path, {"own.txt": "x" * 100})
    monkeypatch.setattr("jaxtp.data.corpus.open_regular", read_bytes)
    with pytest.raises(CorpusError, match=r"own.txt: 100 bytes do not fit.*jaxtp prepare"):
        load_corpus(tmp_path / "own.txt")


def test_text_shorter_than_a_sequence_says_which_length_fits(tmp_path):
    write(tmp_path, {"own.txt": "x" * 100})
    with pytest.raises(CorpusError, match=r"95 bytes to train on.*at most --data.sequence-length 95"):
        Data(load_corpus(tmp_path / "own.txt"), RowSettings(128, 256), seed=0)


@pytest.fixture
def dataset(tmp_path):
    """Prepares texts as a dataset of a name."""

    def make(name, texts, *flags):
        write(tmp_path / f"{name}_texts", {f"{i:03}.txt": text for i, text in enumerate(texts)})
        assert prepare([str(tmp_path / f"{name}_texts"), "--out", str(tmp_path / name), *flags]) == 0
        return tmp_path / name

    return make


TEXTS = [f"document {i}: " + "abc" * (i % 7) for i in range(60)]


def test_a_prepared_dataset(dataset):
    corpus = load_corpus(dataset("a", TEXTS, "--held-out", "0.2"))
    (source,) = corpus.sources
    assert sorted(contents(source.train) + contents(source.validation)) == sorted(text.encode() for text in TEXTS)
    assert 0 < source.validation.num_documents < 30


def test_what_to_evaluate_on_may_be_elsewhere(dataset):
    train = dataset("a", TEXTS, "--held-out", "0")
    corpus = load_corpus(train, validation=dataset("b", ["one", "two"], "--held-out", "0"))
    assert contents(corpus.sources[0].validation) == [b"one", b"two"]
    assert corpus.train_tokens == sum(map(len, TEXTS))


def test_data_without_held_out_documents_is_trained_on_and_says_so(dataset):
    train = dataset("a", TEXTS, "--held-out", "0")
    corpus = load_corpus(train)
    assert corpus.not_evaluated().startswith(f"none: {train} has no held-out documents; prepare again with --held-out")
    assert corpus.validation_tokens == 0
    data = Data(corpus, RowSettings(8, 256), seed=3)
    assert data.validation(8, 4) is None
    assert HELD_OUT not in data.description[ORDER]


def test_a_mixture_is_evaluated_on_the_sources_that_hold_documents_out(dataset):
    a = dataset("a", TEXTS, "--held-out", "0")
    b = dataset("b", TEXTS[:40], "--held-out", "0.3")
    corpus = load_corpus(None, {str(a): 0.7, str(b): 0.3})
    assert corpus.not_evaluated().startswith(f"partly: {a} has no held-out documents")
    alone = Data(load_corpus(b), RowSettings(8, 256), seed=3)
    mixed = Data(corpus, RowSettings(8, 256), seed=3)
    assert [rows.identity for rows in mixed.validation_rows] == [rows.identity for rows in alone.validation_rows]
    assert load_corpus(b).not_evaluated() is None


def test_documents_without_a_label_are_refused(dataset, tmp_path):
    prompts = InMemory(np.zeros(40, np.uint8), np.array([20, 20]), "chats", np.array([20, 20]))
    answers = InMemory(np.zeros(40, np.uint8), np.array([20, 20]), "chats", np.array([2, 2]))
    for train, validation, where in ((prompts, answers, "train"), (answers, prompts, "evaluate")):
        corpus = Corpus((Source("", 1.0, train, validation),), BYTE_TOKENIZER, "chats")
        message = rf"chats, to {where} on: no sequence of data.sequence_length=32 has a label.*\(2 sequences\)"
        with pytest.raises(CorpusError, match=message):
            Data(corpus, RowSettings(32, 256), seed=3)


def test_a_mixture_names_its_parts_and_changes_when_they_do(dataset):
    a, b = dataset("a", TEXTS, "--held-out", "0.2"), dataset("b", TEXTS[:40], "--held-out", "0.3")
    mixed = load_corpus(None, {str(a): 0.7, str(b): 0.3})
    assert [source.name for source in mixed.sources] == [str(a), str(b)]
    assert mixed.description == f"0.7 x {a} + 0.3 x {b}"
    assert load_corpus(None, {str(a): 0.6, str(b): 0.4}).identity != mixed.identity
    data = Data(mixed, RowSettings(8, 256), seed=3)
    np.testing.assert_allclose(data.epochs(100), [70 / len(data.train_rows[0]), 30 / len(data.train_rows[1])])


def test_tokenizers_of_different_sizes_are_refused_by_name():
    """The end token of the larger is beyond the vocabulary of the smaller."""
    large = TokenizerInfo("huggingface", "a" * 64, 50_257, 50_256)
    parts = {
        "large": Part(None, None, large, "large"),
        "bytes": Part(None, None, TokenizerInfo("bytes", None, 256, None), ""),
    }
    with pytest.raises(CorpusError, match=r"were not made by the same tokenizer"):
        _require_one_tokenizer(parts)


def test_parts_by_different_tokenizers_are_refused(dataset):
    trained = dataset("b", TEXTS, "--train-bpe", "300", "--held-out", "0.2")
    with pytest.raises(CorpusError, match=r"were not made by the same tokenizer: prepare one of them again"):
        load_corpus(None, {str(dataset("a", TEXTS, "--held-out", "0.2")): 1.0, str(trained): 1.0})
    with pytest.raises(CorpusError, match=r"were not made by the same tokenizer"):
        load_corpus(None, validation=trained)
