"""Small datasets: inputs in every format, `jaxtp prepare` in this process, and its output decoded."""

import gzip
import json
import random

import zstandard

from jaxtp.data.prepare.__main__ import main
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import load_tokenizer

WORDS = ["the", "of", "naïve", "語", "🙂", "def", "x1", "'", "3.14", "<|endoftext|>", "é", "", "", "\n", "\t", "\r\n"]


def texts(count, seed=0, longest=60):
    """Returns documents of mixed scripts, some of them repeated."""
    numbers = random.Random(seed)
    made = [" ".join(numbers.choices(WORDS, k=numbers.randint(1, longest))) or "x" for _ in range(count)]
    return [made[numbers.randrange(i + 1)] if i % 5 == 4 else text for i, text in enumerate(made)]


def jsonl(path, rows):
    """Writes rows as JSONL, compressed by suffix; a string is a row with this text."""
    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    content = "".join(json.dumps(row, ensure_ascii=i % 2 == 0) + "\n" for i, row in enumerate(rows)).encode()
    path.write_bytes(packed(path.suffix, content))
    return path


def packed(suffix, content):
    return {".gz": gzip.compress, ".zst": zstandard.compress}.get(suffix, bytes)(content)


def parquet(path, rows, **settings):
    """Writes rows as Parquet, in row groups of 10."""
    import pyarrow
    from pyarrow import parquet

    rows = [{"text": row} if isinstance(row, str) else row for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=10, **settings)
    return path


def prepared(out, *arguments):
    """Runs the command, and returns its dataset."""
    assert main([*map(str, arguments), "--out", str(out)]) == 0
    return open_dataset(out)


def decoded(dataset, split="train"):
    """Returns the documents of a split, as bytes."""
    tokenizer = load_tokenizer(dataset.folder)
    found = dataset.splits[split]
    return [tokenizer.decode(found.document(index)) for index in range(found.num_documents)]


def refused(capsys, *arguments):
    """Runs a command that ends with exit code 2, and returns its message."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    assert captured.err.startswith("jaxtp prepare: error: ")
    return captured.err
