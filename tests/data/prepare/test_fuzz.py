"""Thousands of damaged files give a result or a user's error, and damage to a dataset does not go unnoticed."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pytest
from corpora import jsonl, packed, parquet, prepared, texts
from pyarrow import parquet as parquet_file

from jaxtp.data.manifest import MANIFEST
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Fields, PrepareError, Source, read_source
from jaxtp.data.prepare.run import prepare
from jaxtp.data.prepare.sources import format_of
from jaxtp.data.store import DatasetError, open_dataset, verify
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.data.tokenizer_files import TokenizerError

TEXTS = texts(40, seed=9)
LIMITS = (PrepareConfig().max_document_bytes, PrepareConfig().max_window_bytes)


def mutated(content, numbers, most=4):
    """The content with a few bytes changed, lost, doubled, or its end cut off."""
    content = bytearray(content)
    for _ in range(numbers.randint(1, most)):
        if not content:
            break
        at = numbers.randrange(len(content))
        length = numbers.choice([1, 1, 4, 64])
        kind = numbers.randrange(6)
        if kind == 0:
            content[at] ^= 1 << numbers.randrange(8)
        elif kind == 1:
            content[at : at + length] = numbers.randbytes(length)
        elif kind == 2:
            del content[at : at + length]
        elif kind == 3:
            content[at:at] = content[numbers.randrange(len(content)) :][:length]
        elif kind == 4:
            content[at : at + 1] = numbers.choice([b"\0", b"\xff", b'"', b"{", b"]", b"-1", b"9" * 30, b"\n"])
        else:
            del content[at:]
    return bytes(content)


def inputs(folder):
    """A whole file of each format."""
    folder.mkdir()
    for suffix in ("", ".gz", ".zst"):
        jsonl(folder / f"a.jsonl{suffix}", TEXTS)
        (folder / f"b.txt{suffix}").write_bytes(packed(suffix, "\n".join(TEXTS).encode()))
    parquet(folder / "c.parquet", TEXTS)
    parquet(folder / "d.parquet", TEXTS, compression="none", use_dictionary=False, data_page_version="2.0")
    return sorted(folder.iterdir())


@pytest.mark.parametrize("index", range(8))
def test_damaged_inputs(tmp_path, index):
    """Read as `prepare` reads them, of which one in eight goes all the way."""
    whole = inputs(tmp_path / "in")[index]
    numbers = random.Random(index)
    path = tmp_path / whole.name
    outcomes = set()
    for round_ in range(200):
        path.write_bytes(mutated(whole.read_bytes(), numbers))
        source = Source(str(path), path.stat().st_size, 0, format_of(path), *LIMITS, in_folder=bool(round_ % 2))
        events = read_source(source, round_ % 5, Fields("text"))
        kinds = ["Document" if event.problem is None else "Problem" for event in events]
        outcomes.update(kinds or ["nothing"])
        if round_ % 8 == 0:
            outcomes.add(outcome_of_prepare(tmp_path / f"out{round_}", path, numbers))
    assert "Problem" in outcomes
    assert outcomes <= {"Document", "Problem", "nothing", "dataset", "refused"}


def outcome_of_prepare(out, path, numbers):
    config = PrepareConfig(inputs=(str(path),), on_error=numbers.choice(["stop", "skip"]), dedup=numbers.random() < 0.5)
    try:
        prepare(out, config)
    except PrepareError as error:
        return "refused" if str(path) in str(error) or "no document in" in str(error) else f"unclear: {error}"
    assert list(verify(open_dataset(out))) == []
    return "dataset"


def test_damaged_tokenizers(tmp_path):
    content = (
        prepared(tmp_path / "d", jsonl(tmp_path / "a.jsonl", TEXTS), "--train-bpe", 290).folder / "tokenizer.json"
    ).read_bytes()
    numbers = random.Random(0)
    outcomes = [outcome_of_tokenizer(mutated(content, numbers, most=2)) for _ in range(400)]
    assert min(outcomes.count("works"), outcomes.count("refused")) > 10
    assert set(outcomes) == {"works", "refused"}


@pytest.mark.wide
def test_small_files_take_little_memory(tmp_path):
    """Files that unpack or parse to gigabytes, each in a process that may take 1.5 GiB."""
    numbers = random.Random(3)
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for round_ in range(12):
        path = numbers.choice([hostile_json, hostile_parquet, hostile_text])(tmp_path / str(round_), numbers)
        assert path.stat().st_size < 2**21
        flags = numbers.choice([[], ["--messages", "text", "--template", str(tmp_path / "t.jinja")]])
        command = [str(path), *flags, "--out", str(tmp_path / f"{round_}.out"), "--held-out", "0"]
        limited = (
            "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29)); "
            "runpy.run_module('jaxtp.data.prepare', run_name='__main__', alter_sys=True)"
        )
        ended = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True, check=False)
        assert ended.returncode == 2, (path, ended)
        assert ended.stderr.startswith(f"jaxtp prepare: error: {path}"), ended.stderr
        assert "Traceback" not in ended.stderr


def hostile_json(path, numbers):
    """Rows of very many small values, deep nesting, or one long line."""
    start, part, end = numbers.choice(
        [
            (b'{"text": [0', b",[]", b"]}"),
            (b'{"text": [0', b',{"a":1}', b"]}"),
            (b'{"text": "', b"\\n", b'"}'),
            (b'{"text": ', b"[", b""),
            (b'{"text": ', b"9", b"}"),
        ]
    )
    is_list = numbers.random() < 0.5
    suffix = numbers.choice([".gz", ".zst"])
    path = path.with_suffix((".json" if is_list else ".jsonl") + suffix)
    content = start + part * (2**27 // len(part)) + end
    path.write_bytes(packed(suffix, b"[" + content + b"]" if is_list else content))
    return path


def hostile_text(path, numbers):
    suffix = numbers.choice([".gz", ".zst"])
    path = path.with_suffix(f".txt{suffix}")
    path.write_bytes(packed(suffix, numbers.choice([b"a", b"\n", "\U0001f642".encode()]) * 2**26 * 2))
    return path


def hostile_parquet(path, numbers):
    """A list of very many nulls, or of messages without content."""
    size = numbers.randint(5, 20) * 10**6
    values = pyarrow.nulls(size, numbers.choice([pyarrow.int8(), pyarrow.string()]))
    if numbers.random() < 0.5:
        values = pyarrow.StructArray.from_arrays([values, values], ["role", "content"])
    rows = pyarrow.ListArray.from_arrays(pyarrow.array([0, size], pyarrow.int32()), values)
    path = path.with_suffix(".parquet")
    parquet_file.write_table(pyarrow.table({"text": rows}), path, compression="zstd")
    return path


def outcome_of_tokenizer(content):
    try:
        tokenizer = HuggingFaceTokenizer(content, "x")
        encoded = tokenizer.encode_batch(TEXTS[:5])
        for ids in encoded:
            tokenizer.decode(ids)
    except TokenizerError as error:
        return "refused" if str(error).startswith("x: ") else f"unclear: {error}"
    return (
        "works" if all(ids.max(initial=0) < tokenizer.info.vocab_size for ids in encoded) else "beyond the vocabulary"
    )


@pytest.mark.wide
def test_damaged_datasets(tmp_path):
    rows = [{"p": text[:3], "c": text} for text in TEXTS]
    command = [jsonl(tmp_path / "a.jsonl", rows), "--prompt-field", "p", "--completion-field", "c", "--train-bpe", 300]
    whole = prepared(tmp_path / "whole", *command, "--shard-tokens", 500, "--held-out", 0.1).folder
    damaged = Path(shutil.copytree(whole, tmp_path / "damaged"))
    numbers = random.Random(1)
    names = sorted(path.name for path in whole.iterdir() if path.suffix != ".jsonl")
    for _ in range(600):
        name = numbers.choice([MANIFEST, *names])
        content = mutated((whole / name).read_bytes(), numbers)
        (damaged / name).write_bytes(content)
        noticed = is_noticed(damaged)
        assert noticed or name == MANIFEST or content == (whole / name).read_bytes(), name
        shutil.copy(whole / name, damaged / name)
    assert not is_noticed(damaged)


def is_noticed(folder):
    """Whether opening or `verify` finds damage; whatever opens can be read, though what it reads may be nonsense."""
    try:
        dataset = open_dataset(folder)
    except DatasetError:
        return True
    for split in dataset.splits.values():
        for index in range(split.num_documents):
            split.document(index)
            split.prompt_length(index)
        for position in range(0, split.num_tokens, 97):
            split.document_at(position)
    return bool(list(verify(dataset)))


def test_a_damaged_journal_is_refused_or_the_result_is_right(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*TEXTS, {"bad": 1}])
    config = PrepareConfig(inputs=(str(path),), dedup=True, shard_tokens=500)
    with pytest.raises(PrepareError, match="line 41"):
        prepare(tmp_path / "unfinished", config)
    numbers = random.Random(2)
    for round_ in range(60):
        out = Path(shutil.copytree(tmp_path / "unfinished", tmp_path / str(round_)))
        (out / "journal.json").write_bytes(mutated((out / "journal.json").read_bytes(), numbers))
        with pytest.raises(PrepareError):
            prepare(out, config)
