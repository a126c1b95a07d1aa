import platform

import numpy as np
import pytest

from jaxtp.data.corpus import CorpusError, load_corpus, require_length, standard_library, text_file


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_standard_library_is_real_text_with_a_held_out_part():
    corpus = load_corpus(None)
    assert corpus.train.size > 5_000_000
    assert 0.005 < corpus.validation.size / corpus.train.size < 0.1
    assert b"import" in corpus.train[:100_000].tobytes()
    assert platform.python_version() in corpus.source
    assert corpus.describe()["sha256"] == load_corpus(None).sha256


def test_tests_site_packages_and_encodings_are_left_out(tmp_path):
    kept = {f"module_{i}.py": f"a{i}" for i in range(100)} | {"json/decoder.py": "b"}
    left_out = {f"{folder}/x.py": "SECRET" for folder in ("test", "json/tests", "site-packages/numpy", "encodings")}
    write(tmp_path, kept | left_out | {"README.txt": "SECRET"})
    corpus = standard_library(tmp_path)
    everything = corpus.train.tobytes() + corpus.validation.tobytes()
    assert b"SECRET" not in everything
    assert sorted(everything) == sorted("".join(kept.values()).encode())
    assert corpus.source.endswith(f"{len(kept)} files")


def test_the_split_follows_the_path_not_the_content(tmp_path):
    write(tmp_path / "a", {f"m{i}.py": f"{i:03}" for i in range(200)})
    write(tmp_path / "b", {f"m{i}.py": f"{999 - i:03}" for i in range(200)})
    a, b = standard_library(tmp_path / "a"), standard_library(tmp_path / "b")
    assert a.validation.size == b.validation.size > 0
    assert not np.array_equal(a.validation, b.validation)


@pytest.mark.parametrize("files", [{}, {"notes.txt": "x"}, {"test/x.py": "x"}])
def test_a_library_without_sources_is_an_error(tmp_path, files):
    write(tmp_path, files)
    with pytest.raises(CorpusError, match=r"no Python sources.*--data\.path"):
        standard_library(tmp_path)


def test_own_text_holds_out_its_last_twentieth(tmp_path):
    write(tmp_path, {"own.txt": "".join(chr(65 + i) for i in range(20)) * 5})
    corpus = text_file(tmp_path / "own.txt")
    assert (corpus.train.size, corpus.validation.size) == (95, 5)
    assert corpus.validation.tobytes() == b"PQRST"


@pytest.mark.parametrize(
    ("name", "message"), [("none.txt", "No such file"), ("", "is a folder"), ("empty.txt", "0 bytes")]
)
def test_unusable_text(tmp_path, name, message):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(CorpusError, match=message):
        load_corpus(tmp_path / name)


def test_text_shorter_than_a_sequence_says_which_length_fits(tmp_path):
    write(tmp_path, {"own.txt": "x" * 200})
    with pytest.raises(CorpusError, match=r"validation split has 10 bytes.*--data.sequence-length 9"):
        require_length(text_file(tmp_path / "own.txt"), 128)
