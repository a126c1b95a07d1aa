"""Documents from every format, and a message for everything that gives none."""

import gzip
import json
import os
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow
import pytest
from corpora import (
    ZSTD,
    dataset,
    decoded,
    documents,
    output,
    parquet,
    prompts_and_answers,
    refusal,
    texts,
    write,
    write_bpe,
)
from pyarrow import parquet as parquet_file
from structures import watched
from tables import assert_errors, read_table

from jaxtp.data.manifest import read_manifest
from jaxtp.data.prepare import readers, run
from jaxtp.data.tokenizer import load_tokenizer

MISTAKES = read_table(__file__, "mistaken_files")
TEXTS = texts(45, seed=3)
ROWS = [{"text": text} for text in TEXTS]
SUFFIXES = ("", ".gz", ".zst")


def skipped(line):
    """The documents beside unreadable input, and how often each kind of problem was counted."""
    return documents(f"{line} --on-error skip"), read_manifest(Path("d")).skipped


def test_jsonl_and_text_are_read_from_every_compression():
    content = "\ufeffone\r\ntwo\n\n 語"
    for suffix in SUFFIXES:
        write(f"a.jsonl{suffix}", TEXTS)
        assert documents(f"a.jsonl{suffix}") == TEXTS
        write(f"a.txt{suffix}", content)
        assert documents(f"a.txt{suffix}") == [content], "a text file is one document, to the byte"


def test_parquet_is_read():
    for settings in ({}, {"use_dictionary": False, "compression": "zstd"}):
        parquet(Path("a.parquet"), TEXTS, **settings)
        assert documents("a.parquet") == TEXTS


def test_several_gzip_members_and_zstd_frames_are_read():
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    write("a.jsonl.gz", b"".join(map(gzip.compress, lines)))
    parameters = ZSTD.CompressionParameter
    # As `zstd --long=31` packs, of a size that is known at the end only
    options = {parameters.window_log: 31, parameters.enable_long_distance_matching: 1}
    compressor = ZSTD.ZstdCompressor(options=options)
    first = compressor.compress(b"".join(lines[:5])) + compressor.flush()
    write("b.jsonl.zst", first + b"".join(map(ZSTD.compress, lines[5:])))
    assert documents("a.jsonl.gz b.jsonl.zst") == 2 * TEXTS


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_document_beyond_the_limit_is_refused_and_what_follows_is_read(suffix, monkeypatch):
    monkeypatch.setattr(readers, "SKIP_BYTES", 1000)
    long = "x" * 5000
    write(f"a.txt{suffix}", long)
    error = refusal(f"a.txt{suffix} --max-document-bytes 100 --out text")
    assert f"a.txt{suffix}: more than 100 bytes; a larger --max-document-bytes" in error
    write(f"a.jsonl{suffix}", ["one", long, "three"])
    command = f"a.jsonl{suffix} --max-document-bytes 100"
    assert (
        f"a.jsonl{suffix}, line 2: more than 100 bytes; a larger --max-document-bytes"
        in refusal(command)
    )
    resumed = dataset(f"{command} --on-error skip")
    assert sorted(decoded(resumed) + decoded(resumed, "validation")) == [b"one", b"three"]
    assert skipped(command) == (["one", "three"], {"too large": 1})
    assert len(documents(f"a.jsonl{suffix}")) == 3


@pytest.mark.parametrize("flags", ["", "--preference"])
def test_a_line_beyond_the_limit_is_refused_without_reading_its_end(flags):
    """The end of the line is a terabyte away, which takes no room on the disk."""
    for line, first in {
        1: "",
        2: '{"text": "a", "prompt": "a", "chosen": "b", "rejected": "c"}\n',
    }.items():
        os.truncate(write("a.jsonl", first), 2**40)
        with watched(seconds=30):
            error = refusal(f"a.jsonl --max-document-bytes 1000 {flags} --overwrite")
        assert f"line {line}: more than 1,000 bytes; a larger --max-document-bytes" in error


def test_a_resumed_command_passes_a_line_that_it_skipped_before():
    path = write("a.jsonl", ["x" * 5000, "two", "three"])
    source = readers.Source(str(path), path.stat().st_size, 0, readers.JSONL, 100)
    (event,) = readers.read_source(source, 2, readers.Fields("text"))
    assert (event.item, event.problem) == (3, None)


def test_the_limit_of_a_document_counts_bytes():
    line = '{"text": "é"}'
    write("a.jsonl", f'{line}\n{{"text": ""}}\n{{"text": "b"}}\n')
    size = len(line.encode())
    assert documents(f"a.jsonl --max-document-bytes {size}") == ["é", "b"]
    assert documents(f"a.jsonl --on-error skip --max-document-bytes {size - 1}") == ["b"]


@pytest.mark.wide
def test_rows_of_a_table_beyond_the_limit_take_little_memory():
    """A dictionary holds a text once for all rows: a few bytes of file are gigabytes as rows."""
    indices = pyarrow.array([0] * 300 + [1], pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(indices, ["x" * 4_000_000, "b"])
    parquet_file.write_table(pyarrow.table({"text": column}), "a.parquet", compression="zstd")
    command = "a.parquet --max-document-bytes 1000000"
    assert "a.parquet, row 1: more than 1,000,000 bytes" in refusal(command)
    tracemalloc.start()
    assert skipped(command) == (["b"], {"too large": 300})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300_000_000


def test_marks_blanks_and_line_ends_of_other_writers_of_jsonl_are_read():
    """A byte order mark, line ends of Windows, blank lines, none at the end, other fields,
    separators in text.
    """
    write("a.jsonl", '\ufeff{"text": "a", "n": NaN}\r\n\n  \n{"id": 7, "text": "b\u2028\\u0085c"}')
    assert documents("a.jsonl") == ["a", "b\u2028\x85c"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_list_of_objects_is_rows(suffix):
    for indent in (None, 4):
        content = "\ufeff " + json.dumps(ROWS, indent=indent, ensure_ascii=indent is None) + "\r\n"
        write(f"a.json{suffix}", content)
        write(f"b{suffix}", content)
        assert documents(f"a.json{suffix}") == documents(f"b{suffix} --format jsonl") == TEXTS


def test_json_is_text_on_request_or_in_a_folder():
    content = json.dumps(ROWS)
    write("in/a.json", content)
    assert documents("in/a.json --format text") == [content]
    assert documents("in") == [content]
    assert documents("in --format jsonl") == TEXTS


def test_a_damaged_list_names_the_row_or_the_place():
    write("z.txt", "good")
    command = "a.json z.txt --max-document-bytes 200"
    for row in MISTAKES["lists"]:
        write("a.json", row["content"].replace("LONG", "x" * 300))
        assert row["says"] in refusal(f"{command} --overwrite")
        assert skipped(command) == ([*row.get("read", "ac"), "good"], {row["kind"]: 1}), row
    write("a.json", b'[{"text": "a"}, {"text": "c\xff"}]')
    assert "a.json: not UTF-8 text: byte 0xff at position 27" in refusal(f"{command} --overwrite")


def test_a_list_that_python_cannot_parse_is_refused():
    for nested in (b"[" * 200_000, b"9" * 200_000 + b"}]"):
        write("a.json", b'[{"text": "a"}, {"b": ' + nested)
        assert "a.json: not JSON: " in refusal("a.json --overwrite")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_list_beyond_the_limit_is_refused_with_the_command_that_makes_lines_of_it(
    suffix, monkeypatch
):
    name = f"a.json{suffix}"
    text = json.dumps(ROWS)
    size = len(text)
    write(name, text)
    monkeypatch.setattr(readers, "MAX_LIST", size)
    assert documents(name) == TEXTS
    monkeypatch.setattr(readers, "MAX_LIST", size - 1)
    assert "bytes; jq -c '.[]' FILE.json > NEW.jsonl" in refusal(f"{name} --overwrite")


def test_a_row_of_very_many_values_is_refused(monkeypatch):
    """Each of two bytes would take a hundred in memory; a long text is one value, however many
    commas it has.
    """
    monkeypatch.setattr(readers, "MAX_VALUES", 1000)
    many = {"text": "a", "b": [[]] * 2000}
    write("many.jsonl", [many])
    assert "many.jsonl, line 1: a row of more than 1,000 values" in refusal("many.jsonl")
    long = ',[{\\"' * 2000
    write("long.jsonl", [long])
    write("long.json", json.dumps([{"text": long}]))
    assert documents("long.jsonl long.json") == [long, long]


def test_a_key_that_occurs_twice_is_refused():
    """Python would keep the last value; in a text it is no key."""
    write(
        "a.jsonl",
        '{"text": "a", "n": 1, "n": 2}\n{"text": "say \\"text\\""}\n{"text": "b", "text": "c"}\n',
    )
    assert 'a.jsonl, line 3: the key "text" occurs twice' in refusal("a.jsonl")
    assert documents("a.jsonl --on-error skip") == ["a", 'say "text"']


def test_text_in_utf_16_names_the_conversion():
    for name in ("a.txt", "a.jsonl"):
        write(name, '{"text": "a"}\n'.encode("utf-16"))
        assert "iconv -f UTF-16 -t UTF-8" in refusal(name)


def test_a_table_of_many_nulls_is_refused_by_its_types_and_counts(monkeypatch):
    """Five million nulls take some hundred bytes of a file. No value is made of them."""
    size = 5_000_000
    offsets = pyarrow.array([0, size], pyarrow.int32())
    nulls = pyarrow.ListArray.from_arrays(offsets, pyarrow.nulls(size, pyarrow.int8()))
    parquet_file.write_table(pyarrow.table({"text": nulls, "messages": nulls}), "a.parquet")
    assert Path("a.parquet").stat().st_size < 10_000
    monkeypatch.setattr(parquet_file.ParquetFile, "iter_batches", None)
    error = refusal("a.parquet")
    assert (
        "a.parquet: the column 'text' has no strings, but values of type list<element: int8>"
        in error
    )
    write("t.jinja", "{% for message in messages %}{{ message.content }}{% endfor %}")
    error = refusal("a.parquet --messages messages --template t.jinja --overwrite")
    assert "the column 'messages' has 5,000,000 values in 1 rows; at most 4,194,304 a row" in error


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not limit memory"
)
def memory_limits():
    return [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="other systems do not limit memory"
)
def test_memory_for_decoding_a_table_or_a_list_is_limited(monkeypatch):
    """As for a page that unpacks to gigabytes; the process can take memory again afterwards."""

    def large_pages(*_, **settings):
        assert settings["columns"] == ["text"]
        yield bytearray(2**33)

    size = write("a.parquet", TEXTS).stat().st_size
    before = memory_limits()
    with monkeypatch.context() as patched:
        patched.setattr(parquet_file.ParquetFile, "iter_batches", large_pages)
        error = refusal("a.parquet")
    assert f"a.parquet: decoding it takes more than {2**30 + 64 * size:,} bytes of memory" in error
    assert documents("a.parquet") == TEXTS
    size = write("a.json", json.dumps(ROWS)).stat().st_size
    with monkeypatch.context() as patched:
        patched.setattr(readers.json, "loads", lambda *_, **settings: bytearray(2**33))
        error = refusal("a.json --overwrite")
    assert f"a.json: decoding it takes more than {2**30 + 64 * size:,} bytes of memory" in error
    assert memory_limits() == before


def test_the_field_and_the_format_can_be_named():
    path = write("a.json", '{"body": "x"}\n{"body": "y"}\n')
    assert documents("a.json --field body") == ["x", "y"]
    assert documents("a.json --format text") == [path.read_text()]


@pytest.mark.parametrize("name", ["a.json", "a.JSON.gz", "a.jsonlines.zst", "a.NDJSON"])
def test_lines_of_objects_are_rows_under_every_suffix(name):
    write(name, "\ufeff\n" + "".join(json.dumps(row) + "\n" for row in ROWS))
    assert documents(name) == TEXTS


def test_json_without_rows_is_refused():
    def error_of(row):
        write("a.json", row["content"])
        error = refusal("a.json --overwrite")
        assert documents("a.json --format text") == [row["content"]]
        return error

    assert_errors(MISTAKES["no rows"], error_of)


def test_files_that_are_no_text_are_refused():
    def error_of(row):
        write(row["name"], row["content"])
        return refusal(f"{row['name']} --overwrite")

    assert_errors(MISTAKES["no text"], error_of)


def test_in_a_folder_tables_are_read_as_text_and_binary_files_are_skipped():
    names = ["a.csv", "b.ipynb", "c.html", "d.py"]
    for name in names:
        write(f"in/{name}", name.encode())
    write("in/e.pdf", b"%PDF-1.7\n")
    write("in/f.safetensors", b"\x08\0")
    assert documents("in") == names
    assert read_manifest(Path("d")).skipped == {"binary file": 2}


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.tsv", "\t")])
def test_a_table_becomes_rows_by_the_command_of_its_message(name, separator):
    write(name, f'text{separator}label\n"one, two"{separator}1\n')
    command = refusal(name).splitlines()[1].strip().replace("FILE", name)
    subprocess.run(command.replace("python", sys.executable, 1), shell=True, check=True)
    assert documents("NEW.jsonl") == ["one, two"]


@pytest.mark.parametrize(("name", "tokenizer"), [("a.jsonl", "--tokenizer t"), ("a.parquet", "")])
def test_prompts_and_completions_are_one_document_with_a_cut(name, tokenizer):
    rows = [{"prompt": f"{i} plus {i}?", "completion": f" {2 * i}"} for i in range(20)]
    rows.append({"prompt": "", "completion": "x"})
    write(name, rows)
    write_bpe()
    found = dataset(
        f"{name} --prompt-field prompt --completion-field completion {tokenizer} --held-out 0"
    )
    decode = load_tokenizer(found.folder).decode
    for (prompt, answer), row in zip(prompts_and_answers(found), rows, strict=True):
        assert decode(prompt) == row["prompt"].encode()
        assert decode(answer) == row["completion"].encode()


def test_folders_are_walked_in_order_without_what_is_hidden():
    for name in (
        "b.py",
        "a/z.py",
        "a/.hidden.py",
        ".git/x.py",
        "a/data.txt",
        "c/skip/x.py",
        "a.py",
    ):
        write(f"in/{name}", name)
    write("in/image.png", b"\x89PNG\0\xff")
    write("in/empty.py", b"")
    Path("in/loop").symlink_to("../in")
    counts = {"binary file": 1, "empty file": 1}
    assert skipped("in --exclude skip") == (["a/data.txt", "a/z.py", "a.py", "b.py"], counts)
    only = "in --include '*.py' --include 'c/*' --exclude 'a/*'"
    assert documents(only) == ["a.py", "b.py", "c/skip/x.py"]


def test_tables_of_the_library_datasets_are_read():
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(45))})
    table.save_to_disk("one")
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk("two")
    assert documents("hf:one") == TEXTS
    assert documents("hf:two:test") == [TEXTS[3]]
    assert_errors(MISTAKES["library datasets"], lambda row: refusal(f"{row['line']} --overwrite"))


def lines_with(content):
    return b'{"text": "fine"}\n' * 2 + content + b'\n{"text": "after"}\n'


def half(content):
    return content[: len(content) // 2]


BAD = {
    "d.txt.gz": (half(gzip.compress(bytes(range(256)))), ": broken gz file: ", "broken file"),
    "f.txt.zst": (
        half(ZSTD.compress(bytes(range(256)))),
        ": broken zst file: Compressed file ended before",
        "broken file",
    ),
    "p.jsonl": (lines_with(b"[" * 100_000), ", line 3: not JSON: ", "not JSON"),
    "q.jsonl": (
        lines_with(b'{"text": "x", "n": ' + b"9" * 5000 + b"}"),
        ", line 3: not JSON: ",
        "not JSON",
    ),
    "r.jsonl.gz": (
        gzip.compress(lines_with(b'{"text": ""}'))[:-9],
        ", after line 4: broken gz file: ",
        "broken file",
    ),
}
for name, (content, *said) in MISTAKES["damaged files"].items():
    BAD[name] = (content.encode("latin-1"), *said)
for name, (line, *said) in MISTAKES["damaged lines"].items():
    BAD[name] = (lines_with(line.encode("latin-1")), *said)


@pytest.mark.parametrize("name", BAD)
def test_damaged_files_are_refused_or_skipped_by_kind(name):
    content, message, kind = BAD[name]
    write(name, content)
    write("z.txt", "good")
    error = refusal(f"{name} z.txt")
    assert f"{name}{message}" in error
    assert "--on-error skip" in error
    assert f"skipped: {name}{message}" in output(f"{name} z.txt --on-error skip")
    found, counts = skipped(f"{name} z.txt")
    assert counts[kind] == 1
    assert found in (["good"], ["fine", "fine", "after", "good"])


def test_tables_without_texts_are_refused():
    def error_of(row):
        write("a.parquet", row["rows"])
        return refusal("a.parquet --overwrite")

    assert_errors(MISTAKES["tables"], error_of)


def test_a_damaged_page_is_found_by_its_checksum():
    settings = {"write_page_checksum": True, "use_dictionary": False, "write_statistics": False}
    path = parquet(Path("a.parquet"), TEXTS, compression="none", **settings)
    content = bytearray(path.read_bytes())
    content[content.index(TEXTS[30].encode()) + 1] ^= 1
    path.write_bytes(content)
    assert "a.parquet, after row 30: broken Parquet file: " in refusal("a.parquet")


def test_the_first_problems_are_shown_and_all_are_counted():
    write("a.jsonl", [{"no": "x"}] * 20 + ["fine"])
    out = output("a.jsonl --on-error skip")
    assert out.count("skipped: ") == 5
    assert "further problems are only counted" in out
    assert read_manifest(Path("d")).skipped == {"no such field": 20}


def test_paths_that_are_no_files_are_refused():
    write("books.txt", "x")
    Path("loop.txt").symlink_to("loop.txt")
    Path("empty").mkdir()
    assert_errors(MISTAKES["paths"], lambda row: refusal(row["line"]))
    assert not Path("d").exists()


def test_a_file_that_vanishes_before_it_is_read_is_refused(monkeypatch):
    """Permissions would not stop the root user who may run this."""
    write("a.txt", "x")
    listed = run.find_sources

    def then_delete(config):
        found = listed(config)
        Path("a.txt").unlink()
        return found

    monkeypatch.setattr(run, "find_sources", then_delete)
    assert "a.txt: No such file or directory" in refusal("a.txt")


def test_text_has_no_prompt():
    write("a.txt", "x")
    assert "a.txt: text has no fields" in refusal("a.txt --prompt-field p --completion-field c")


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("a.parquet", "pyarrow", "data"),
        ("a.txt.zst", readers.ZSTD_LIBRARY, "data"),
        ("hf:a", "datasets", "datasets"),
    ],
)
def test_without_a_library_the_message_names_the_extra(monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    write(name, b"x")
    assert f"the library {library}: pip install 'jaxtp[{extra}]'" in refusal(name)


def test_text_jsonl_and_gzip_need_no_library(monkeypatch):
    for library in ("tokenizers", "pyarrow", readers.ZSTD_LIBRARY, "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    write("a.txt.gz", "a")
    write("b.jsonl.gz", ["b"])
    assert documents("a.txt.gz b.jsonl.gz") == ["a", "b"]
