import os
import platform
from pathlib import Path

import numpy as np
import pytest
from corpora import output, write, write_bpe
from numpy.testing import assert_allclose

from jaxtp.data.corpus import (
    BYTE_TOKENIZER,
    Corpus,
    CorpusError,
    Source,
    load_corpus,
    standard_library,
    text_file,
)
from jaxtp.data.documents import InMemory
from jaxtp.data.samples import HELD_OUT, ORDER, Data, RowSettings

TEXTS = [f"document {i}: " + "abc" * (i % 7) for i in range(60)]


def write_all(folder, files):
    for name, text in files.items():
        write(f"{folder}/{name}", text)
    return Path(folder)


def prepare(folder, held_out, texts=TEXTS, flags=""):
    """Makes a dataset of texts, and returns its folder."""
    write_all(f"{folder}_texts", {f"{i:03}.txt": text for i, text in enumerate(texts)})
    output(f"{folder}_texts --out {folder} --held-out {held_out} {flags}")
    return Path(folder)


def contents(*splits):
    return [
        split.document(i).tobytes().decode() for split in splits for i in range(split.num_documents)
    ]


def test_the_standard_library_is_real_text_with_a_held_out_part():
    corpus = load_corpus(None)
    assert corpus.train_tokens > 5_000_000
    assert 0.005 < corpus.validation_tokens / corpus.train_tokens < 0.1
    assert b"import" in corpus.sources[0].train.tokens(0, 100_000).tobytes()
    assert platform.python_version() in corpus.description
    assert corpus.describe() == load_corpus(None).describe()
    assert corpus.unit == "bytes"


def test_tests_site_packages_and_encodings_are_left_out():
    kept = {f"module_{i}.py": f"a{i}" for i in range(100)} | {"json/decoder.py": "b"}
    left_out = {
        f"{folder}/x.py": "SECRET"
        for folder in ("test", "json/tests", "site-packages/numpy", "encodings")
    }
    part = standard_library(write_all("lib", kept | left_out | {"README.txt": "SECRET"}))
    assert sorted(contents(part.train, part.validation)) == sorted(kept.values())
    assert part.name.endswith(f"{len(kept)} files")


def test_the_split_follows_the_path_not_the_content():
    a = standard_library(write_all("a", {f"m{i}.py": f"{i:03}" for i in range(200)}))
    b = standard_library(write_all("b", {f"m{i}.py": f"{i:03}!" for i in range(200)}))
    assert contents(b.validation) == [f"{text}!" for text in contents(a.validation)] != []


def test_a_library_without_sources_is_an_error():
    write("lib/notes.txt", "x")
    write("lib/test/x.py", "x")
    with pytest.raises(CorpusError, match=r"no Python sources.*--data\.path"):
        standard_library(Path("lib"))


def test_a_text_holds_out_its_last_twentieth():
    part = text_file(write("own.txt", "ABCDEFGHIJKLMNOPQRST" * 5))
    assert (part.train.num_tokens, part.validation.num_tokens) == (95, 5)
    assert contents(part.validation) == ["PQRST"]


def test_files_that_are_no_text_are_refused():
    write("empty.txt", "")
    os.mkfifo("pipe")
    for name, message in {
        "none.txt": "there is no such file or dataset",
        "empty.txt": "0 bytes",
        "pipe": "not a regular file",
    }.items():
        with pytest.raises(CorpusError, match=message):
            load_corpus(Path(name))


def test_a_text_larger_than_the_memory_is_to_be_prepared(monkeypatch):
    def read_bytes(path):
        raise MemoryError

    path = write("own.txt", "x" * 100)
    monkeypatch.setattr("jaxtp.data.corpus.open_regular", read_bytes)
    with pytest.raises(CorpusError, match=r"own.txt: 100 bytes do not fit.*jaxtp prepare"):
        load_corpus(path)


def test_a_text_shorter_than_a_sequence_names_the_length_that_fits():
    corpus = load_corpus(write("own.txt", "x" * 100))
    with pytest.raises(
        CorpusError, match=r"95 bytes to train on.*at most --data.sequence-length 95"
    ):
        Data(corpus, RowSettings(128, 256), seed=0)


def test_a_dataset_may_be_evaluated_on_another():
    train = prepare("a", 0.2)
    (source,) = load_corpus(train).sources
    assert sorted(contents(source.train, source.validation)) == sorted(TEXTS)
    assert 0 < source.validation.num_documents < 30
    (source,) = load_corpus(train, validation=prepare("b", 0, ["one", "two"])).sources
    assert contents(source.validation) == ["one", "two"]


def test_data_without_held_out_documents_are_not_evaluated():
    train = prepare("a", 0)
    corpus = load_corpus(train)
    assert corpus.train_tokens == sum(map(len, TEXTS))
    assert corpus.not_evaluated().startswith(
        f"none: {train} has no held-out documents; prepare again with --held-out"
    )
    assert corpus.validation_tokens == 0
    data = Data(corpus, RowSettings(8, 256), seed=3)
    assert data.validation(8, 4) is None
    assert HELD_OUT not in data.description[ORDER]
    held_out = prepare("b", 0.3, TEXTS[:40])
    mixture = load_corpus(None, {"a": 0.7, "b": 0.3})
    assert mixture.not_evaluated().startswith("partly: a has no held-out documents")
    evaluated = load_corpus(held_out)
    (rows,) = Data(mixture, RowSettings(8, 256), seed=3).validation_rows
    (expected,) = Data(evaluated, RowSettings(8, 256), seed=3).validation_rows
    assert rows.identity == expected.identity
    assert evaluated.not_evaluated() is None


def test_documents_without_a_label_are_refused():
    def cut(prompt):
        return InMemory(
            np.zeros(40, np.uint8), np.array([20, 20]), "chats", np.array([prompt, prompt])
        )

    for train, validation, where in ((20, 2, "train"), (2, 20, "evaluate")):
        corpus = Corpus(
            (Source("chats", 1.0, cut(train), cut(validation)),), BYTE_TOKENIZER, "chats"
        )
        message = rf"chats, to {where} on: no sequence of data.sequence_length=32 has a label.*\(2 sequences\)"  # noqa: E501
        with pytest.raises(CorpusError, match=message):
            Data(corpus, RowSettings(32, 256), seed=3)


def test_a_mixture_names_its_parts_and_changes_when_they_do():
    prepare("a", 0.2)
    prepare("b", 0.3, TEXTS[:40])
    mixed = load_corpus(None, {"a": 0.7, "b": 0.3})
    assert [source.name for source in mixed.sources] == ["a", "b"]
    assert mixed.description == "0.7 x a + 0.3 x b"
    assert load_corpus(None, {"a": 0.6, "b": 0.4}).identity != mixed.identity
    data = Data(mixed, RowSettings(8, 256), seed=3)
    assert_allclose(data.epochs(100), [70 / len(data.train_rows[0]), 30 / len(data.train_rows[1])])


def test_parts_by_different_tokenizers_are_refused():
    prepare("a", 0.2)
    trained = prepare("b", 0.2, TEXTS, f"--tokenizer {write_bpe()}")
    with pytest.raises(
        CorpusError, match="were not made by the same tokenizer: prepare one of them again"
    ):
        load_corpus(None, {"a": 1.0, "b": 1.0})
    with pytest.raises(CorpusError, match="were not made by the same tokenizer"):
        load_corpus(None, validation=trained)
