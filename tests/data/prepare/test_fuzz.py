"""Thousands of damaged files give a result or a user's error, and damage to a dataset does not
go unnoticed.
"""

import random
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow
import pytest
from corpora import output, packed, parquet, refusal, texts, write, write_bpe
from pyarrow import parquet as parquet_file
from runs import run_program
from tables import raised_by

from jaxtp.data.manifest import MANIFEST
from jaxtp.data.prepare.prepare_config import PrepareConfig
from jaxtp.data.prepare.readers import Fields, PrepareError, read_source
from jaxtp.data.prepare.run import prepare
from jaxtp.data.prepare.sources import find_sources
from jaxtp.data.store import DatasetError, open_dataset, verify
from jaxtp.data.tokenizer import HuggingFaceTokenizer
from jaxtp.data.tokenizer_files import TokenizerError

TEXTS = texts(40, seed=9)
WIDE = pytest.mark.wide


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
            content[at : at + 1] = numbers.choice(
                [b"\0", b"\xff", b'"', b"{", b"]", b"-1", b"9" * 30, b"\n"]
            )
        else:
            del content[at:]
    return bytes(content)


FILES = [f"{name}{suffix}" for name in ("a.jsonl", "b.txt") for suffix in ("", ".gz", ".zst")]


def whole_files():
    """A whole file of each format."""
    for name in FILES:
        write(name, TEXTS if "jsonl" in name else "\n".join(TEXTS))
    plain = {"compression": "none", "use_dictionary": False, "data_page_version": "2.0"}
    return [
        *map(Path, FILES),
        write("c.parquet", TEXTS),
        parquet(Path("d.parquet"), TEXTS, **plain),
    ]


@pytest.mark.parametrize(
    ("rounds", "whole"), [(40, 13), pytest.param(200, 8, marks=WIDE)], ids=["few", "many"]
)
@pytest.mark.parametrize("index", range(8))
def test_damaged_inputs_give_documents_or_problems(index, rounds, whole):
    """Read as `prepare` reads them; one in `whole` goes through all of it."""
    path = whole_files()[index]
    content = path.read_bytes()
    numbers = random.Random(index)
    outcomes = set()
    for number in range(rounds):
        path.write_bytes(mutated(content, numbers))
        (source,) = find_sources(PrepareConfig(inputs=(str(path),)))
        source = replace(source, in_folder=bool(number % 2))
        events = read_source(source, number % 5, Fields("text"))
        outcomes.update(event.problem is None for event in events)
        if number % whole == whole - 1:
            prepare_or_refuse(Path(f"out{number}"), path, numbers)
    assert False in outcomes, "a problem is found"


def prepare_or_refuse(out, path, numbers):
    config = PrepareConfig(
        inputs=(str(path),),
        out=out,
        on_error=numbers.choice(["stop", "skip"]),
        dedup=numbers.random() < 0.5,
    )
    refused = raised_by(prepare, out, config, kind=PrepareError)
    if refused == "no error":
        assert list(verify(open_dataset(out))) == []
    else:
        assert str(path) in refused or "no document in" in refused


@pytest.mark.parametrize("rounds", [100, pytest.param(400, marks=WIDE)])
def test_damaged_tokenizers_work_or_are_refused(rounds):
    content = (write_bpe(rows=TEXTS, size=290) / "tokenizer.json").read_bytes()
    numbers = random.Random(0)
    works = [tokenizer_works(mutated(content, numbers, most=2)) for _ in range(rounds)]
    assert 5 < sum(works) < rounds - 5


def tokenizer_works(content):
    def use():
        tokenizer = HuggingFaceTokenizer(content, "x")
        for ids in tokenizer.encode_batch(TEXTS[:5]):
            tokenizer.decode(ids)
            assert ids.max(initial=0) < tokenizer.info.vocab_size

    refused = raised_by(use, kind=TokenizerError)
    assert refused.startswith("TokenizerError: x: ") or refused == "no error"
    return refused == "no error"


LIMITED = """
import os, resource, sys
from jaxtp.data.prepare.__main__ import main
resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29))
codes = []
for line in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        os._exit(main(line.split()))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""


@WIDE
def test_small_files_take_little_memory():
    """Files that unpack or parse to gigabytes, each in a fork of a process that may take 1.5
    GiB.
    """
    numbers = random.Random(3)
    write("t.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    paths = []
    lines = []
    for number in range(9):
        path = [hostile_json, hostile_parquet, hostile_text][number % 3](str(number), numbers)
        assert path.stat().st_size < 2**21
        flags = numbers.choice(["", "--messages text --template t.jinja"])
        lines.append(f"{path} {flags} --out {number}.out --held-out 0")
        paths.append(path)
    ended = run_program(sys.executable, "-c", LIMITED, *lines)
    assert ended.stdout.splitlines()[-1] == str([2] * len(lines)), ended
    assert not [path for path in paths if f"jaxtp prepare: error: {path}" not in ended.stderr]
    assert "Traceback" not in ended.stderr


def hostile_json(name, numbers):
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
    suffix = numbers.choice([".gz", ".zst"])
    content = start + part * (2**27 // len(part)) + end
    if numbers.random() < 0.5:
        return write(f"{name}.json{suffix}", packed(suffix, b"[" + content + b"]"))
    return write(f"{name}.jsonl{suffix}", packed(suffix, content))


def hostile_text(name, numbers):
    suffix = numbers.choice([".gz", ".zst"])
    part = numbers.choice([b"a", b"\n", "\U0001f642".encode()])
    return write(f"{name}.txt{suffix}", packed(suffix, part * 2**27))


def hostile_parquet(name, numbers):
    """A list of very many nulls, or of messages without content."""
    size = numbers.randint(5, 20) * 10**6
    values = pyarrow.nulls(size, numbers.choice([pyarrow.int8(), pyarrow.string()]))
    if numbers.random() < 0.5:
        values = pyarrow.StructArray.from_arrays([values, values], ["role", "content"])
    rows = pyarrow.ListArray.from_arrays(pyarrow.array([0, size], pyarrow.int32()), values)
    parquet_file.write_table(pyarrow.table({"text": rows}), f"{name}.parquet", compression="zstd")
    return Path(f"{name}.parquet")


@pytest.mark.parametrize("rounds", [40, pytest.param(400, marks=WIDE)])
def test_damage_to_a_dataset_is_noticed(rounds):
    write("a.jsonl", [{"p": text[:3], "c": text} for text in TEXTS])
    fields = f"--prompt-field p --completion-field c --tokenizer {write_bpe()}"
    output(f"a.jsonl {fields} --shard-tokens 500 --held-out 0.1")
    whole = Path("d")
    damaged = Path(shutil.copytree(whole, "damaged"))
    numbers = random.Random(1)
    names = [MANIFEST, *sorted(path.name for path in whole.iterdir() if path.suffix != ".jsonl")]
    for _ in range(rounds):
        name = numbers.choice(names)
        content = mutated((whole / name).read_bytes(), numbers)
        (damaged / name).write_bytes(content)
        noticed = is_noticed(damaged)
        assert noticed or name == MANIFEST or content == (whole / name).read_bytes(), name
        shutil.copy(whole / name, damaged / name)
    assert not is_noticed(damaged)


def is_noticed(folder):
    """Whether opening or `verify` finds damage; whatever opens can be read, though what it reads
    may be nonsense.
    """
    if raised_by(open_dataset, folder, kind=DatasetError) != "no error":
        return True
    found = open_dataset(folder)
    for split in found.splits.values():
        for index in range(split.num_documents):
            split.document(index)
            split.prompt_length(index)
        for position in range(0, split.num_tokens, 97):
            split.document_at(position)
    return bool(list(verify(found)))


@pytest.mark.parametrize("rounds", [15, pytest.param(60, marks=WIDE)])
def test_a_damaged_journal_is_refused(rounds):
    path = write("a.jsonl", [*TEXTS, {"bad": 1}])
    assert "line 41" in refusal("a.jsonl --dedup --shard-tokens 500")
    config = PrepareConfig(inputs=(str(path),), out=Path("d"), dedup=True, shard_tokens=500)
    journal = Path("d/journal.json").read_bytes()
    numbers = random.Random(2)
    for number in range(rounds):
        out = Path(shutil.copytree("d", str(number)))
        (out / "journal.json").write_bytes(mutated(journal, numbers))
        with pytest.raises(PrepareError):
            prepare(out, config)
