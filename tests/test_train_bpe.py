"""`scripts/train_bpe.py`: a tokenizer for `jaxtp prepare`, which reads the same inputs."""

import re

import pytest
import train_bpe
from corpora import dataset, decoded, texts, write

ROWS = texts(1000, seed=8)


@pytest.fixture
def train(monkeypatch, tmp_path, capsys):
    """Runs the script; returns its exit code, and what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(line):
        code = train_bpe.main([*line.split(), "--out", "t"])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_documents_are_encoded_by_it_and_end_with_its_token(train):
    write("a.jsonl", ROWS)
    code, printed = train("a.jsonl --held-out 0 --size 300")
    assert (code, printed.endswith("tokenizer.json: a vocabulary of 300\n")) == (0, True)
    found = dataset("a.jsonl --held-out 0 --tokenizer t")
    assert (found.tokenizer.vocab_size, found.tokenizer.prefix) == (300, ())
    assert decoded(found) == [row.encode() for row in ROWS]
    assert found.splits["train"].document(0)[-1] == found.tokenizer.eos_id == 0


def test_it_learns_from_a_sample_without_the_held_out_part(train):
    size = write("a.jsonl", ROWS).stat().st_size
    _, printed = train(f"a.jsonl --size 300 --sample {size // 4} --held-out 0.5")
    learnt = int(re.search(r"training on ([\d,]+) bytes", printed)[1].replace(",", ""))
    assert abs(learnt / len("".join(ROWS).encode()) - 1 / 8) < 0.06


def test_inputs_without_text_are_refused(train):
    write("a.jsonl", ["", ""])
    code, printed = train("a.jsonl --size 300")
    assert (code, "train_bpe.py: error: nothing to train a tokenizer on" in printed) == (2, True)
