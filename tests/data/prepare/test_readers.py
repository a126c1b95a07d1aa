"""Documents from every format, and a message for everything that gives none."""

import gzip
import json
import subprocess
import sys
import sysconfig
import tracemalloc
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pytest
import zstandard
from corpora import decoded, jsonl, packed, parquet, prepared, refused, texts
from pyarrow import parquet as parquet_file

from jaxtp.data.manifest import read_manifest
from jaxtp.data.prepare import readers
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.store import open_dataset

TEXTS = texts(45, seed=3)
ALL = ["--held-out", 0]
ROW = b'{"text": "a", "prompt": "a", "chosen": "b", "rejected": "c"}\n'


def manifest(dataset):
    return json.loads((dataset.folder / "dataset.json").read_text())


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_jsonl(tmp_path, suffix):
    path = jsonl(tmp_path / f"a.jsonl{suffix}", TEXTS)
    assert decoded(prepared(tmp_path / "d", path, *ALL)) == [text.encode() for text in TEXTS]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_is_one_document_to_the_byte(tmp_path, suffix):
    content = "\ufeffone\r\ntwo\n\n\0 語".encode()
    (tmp_path / f"a.txt{suffix}").write_bytes(packed(suffix, content))
    assert decoded(prepared(tmp_path / "d", tmp_path / f"a.txt{suffix}", *ALL)) == [content]


@pytest.mark.parametrize("settings", [{}, {"use_dictionary": False, "compression": "zstd"}])
def test_parquet(tmp_path, settings):
    path = parquet(tmp_path / "a.parquet", TEXTS, **settings)
    assert decoded(prepared(tmp_path / "d", path, *ALL)) == [text.encode() for text in TEXTS]


def test_several_frames_and_members_and_long_windows(tmp_path):
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    (tmp_path / "a.jsonl.gz").write_bytes(b"".join(map(gzip.compress, lines)))
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frames = long.compress(b"".join(lines[:5])) + long.flush() + b"".join(map(zstandard.compress, lines[5:]))
    (tmp_path / "b.jsonl.zst").write_bytes(frames)
    expected = [text.encode() for text in TEXTS]
    inputs = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.zst"]
    assert decoded(prepared(tmp_path / "d", *inputs, *ALL, "--max-window-bytes", 2**28)) == 2 * expected


def test_a_window_beyond_the_limit_names_its_flag(tmp_path, capsys):
    parameters = zstandard.ZstdCompressionParameters(window_log=28, write_content_size=False)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "a.txt.zst").write_bytes(frame.compress(b"a") + frame.flush())
    error = refused(capsys, tmp_path / "a.txt.zst", "--out", tmp_path / "d")
    assert "a.txt.zst: unpacking takes more than 134,217,728 bytes of memory; a larger --max-window-bytes" in error


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_document_beyond_the_limit_names_its_flag_and_is_never_read_whole(tmp_path, capsys, suffix, monkeypatch):
    """What comes after it is read, also by a command that goes on in mid-file."""
    monkeypatch.setattr(readers, "_SKIP_BYTES", 1000)
    limit, long = ["--max-document-bytes", 100], "x" * 5000
    (tmp_path / f"a.txt{suffix}").write_bytes(packed(suffix, long.encode()))
    error = refused(capsys, tmp_path / f"a.txt{suffix}", "--out", tmp_path / "d", *limit)
    assert f"a.txt{suffix}: more than 100 bytes; a larger --max-document-bytes reads it" in error
    path = jsonl(tmp_path / f"a.jsonl{suffix}", ["one", long, "three"])
    error = refused(capsys, path, *ALL, "--out", tmp_path / "e", *limit)
    assert f"a.jsonl{suffix}, line 2: more than 100 bytes; a larger --max-document-bytes reads it" in error
    dataset = prepared(tmp_path / "e", path, *ALL, *limit, "--on-error", "skip")
    assert decoded(dataset) == [b"one", b"three"]
    assert manifest(dataset)["skipped"] == {"too large": 1}
    assert len(decoded(prepared(tmp_path / "f", path, *ALL))) == 3


@pytest.mark.parametrize("flags", [[], ["--preference"]], ids=" ".join)
@pytest.mark.parametrize("filler", [b"x", b" ", b"\0"], ids=["letters", "blanks", "zeros"])
@pytest.mark.parametrize("first", [b"", ROW], ids=["first line", "second line"])
def test_a_line_beyond_the_limit_is_refused_without_its_end(first, filler, flags, tmp_path, capsys, monkeypatch):
    """The end of the line may be gigabytes away."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(first + filler * 10**6 + b'\n{"text": "a"}\n')
    positions = []

    @contextmanager
    def watched(*arguments):
        with open_stream(*arguments) as (stream, file):
            try:
                yield stream, file
            finally:
                positions.append(stream.tell())

    open_stream = readers.open_stream
    monkeypatch.setattr(readers, "open_stream", watched)
    error = refused(capsys, path, "--out", tmp_path / "d", "--max-document-bytes", 1000, *flags)
    assert f"line {2 if first else 1}: more than 1,000 bytes; a larger --max-document-bytes" in error
    assert max(positions) < 2000


def test_a_command_that_goes_on_passes_a_line_that_it_skipped_before(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ["x" * 5000, "two", "three"])
    source = readers.Source(str(path), path.stat().st_size, 0, readers.JSONL, 100, 2**20)
    (event,) = readers.read_source(source, 2, readers.Fields("text"))
    assert (event.item, event.problem) == (3, None)


@pytest.mark.parametrize(("spare", "count"), [(0, 1), (-1, 0)])
def test_the_limit_is_that_of_the_bytes(tmp_path, spare, count):
    line = '{"text": "é"}'
    (tmp_path / "a.jsonl").write_text(f'{line}\n{{"text": ""}}\n{{"text": "b"}}\n')
    limit = ["--max-document-bytes", len(line.encode()) + spare, "--on-error", "skip"]
    assert len(decoded(prepared(tmp_path / "d", tmp_path / "a.jsonl", *ALL, *limit))) == count + 1


def test_rows_of_a_table_beyond_the_limit(tmp_path, capsys):
    """A dictionary holds a text once for all rows: a few bytes of file are gigabytes as rows."""
    column = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 300 + [1], pyarrow.int32()), ["x" * 4_000_000, "b"]
    )
    parquet_file.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet", compression="zstd")
    limit = ["--max-document-bytes", 1_000_000]
    assert "a.parquet, row 1: more than 1,000,000 bytes" in refused(
        capsys, tmp_path / "a.parquet", *ALL, "--out", tmp_path / "d", *limit
    )
    tracemalloc.start()
    dataset = prepared(tmp_path / "d", tmp_path / "a.parquet", *ALL, *limit, "--on-error", "skip")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 50_000_000
    assert decoded(dataset) == [b"b"]


def test_jsonl_of_other_hands(tmp_path):
    """A byte order mark, line ends of Windows, blank lines, none at the end, other fields, separators in text."""
    content = '\ufeff{"text": "a", "n": NaN}\r\n\n  \n{"id": 7, "text": "b\u2028\\u0085c"}'.encode()
    (tmp_path / "a.jsonl").write_bytes(content)
    assert decoded(prepared(tmp_path / "d", tmp_path / "a.jsonl", *ALL)) == [b"a", "b\u2028\x85c".encode()]


ROWS = [{"text": text} for text in TEXTS]
LONG = b"x" * 300


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("indent", [None, 4])
def test_an_array_of_json_is_rows(tmp_path, suffix, indent):
    content = "\ufeff " + json.dumps(ROWS, indent=indent, ensure_ascii=indent is None) + "\r\n"
    (tmp_path / f"a.json{suffix}").write_bytes(packed(suffix, content.encode()))
    expected = [text.encode() for text in TEXTS]
    assert decoded(prepared(tmp_path / "d", tmp_path / f"a.json{suffix}", *ALL)) == expected
    (tmp_path / f"a.json{suffix}").rename(tmp_path / f"a{suffix}")
    assert decoded(prepared(tmp_path / "e", tmp_path / f"a{suffix}", "--format", "jsonl", *ALL)) == expected


def test_json_that_is_text(tmp_path, capsys):
    """As text on request, or found among sources; the summary says so."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.json").write_text(json.dumps(ROWS))
    content = (tmp_path / "in/a.json").read_bytes()
    assert decoded(prepared(tmp_path / "d", tmp_path / "in/a.json", "--format", "text", *ALL)) == [content]
    assert decoded(prepared(tmp_path / "e", tmp_path / "in", *ALL)) == [content]
    assert "as text     1 x .json: each file is one document, with its syntax" in capsys.readouterr().out
    assert len(decoded(prepared(tmp_path / "g", tmp_path / "in", "--format", "jsonl", *ALL))) == len(ROWS)


@pytest.mark.parametrize(
    ("content", "kind", "message", "count"),
    [
        (b'[{"text": "a"}, {"txt": "b"}, {"text": "c"}]', "no such field", ", row 2: no field 'text'; did you mean", 2),
        (b'[{"text": "a"}, 3, {"text": "c"}]', "not JSON", ", row 2: not a JSON object: 3", 2),
        (b'[{"text": "a"}, {"text": "%b"}, {"text": "c"}]' % LONG, "too large", ", row 2: more than 200 bytes", 2),
        (b'[{"text": "a"}, {"text": "c"}', "not JSON", ", after row 2: not JSON: Expecting ',' delimiter", 2),
        (b'[{"text": "a"}, {"text": "c"},]', "not JSON", ", after row 2: not JSON: ", 2),
        (b'[{"text": "a"}, {"text": "c"}] {"text": "d"}', "not JSON", ", after row 2: not JSON: Extra data", 2),
        (b'[{"text": "a"}, {"text": "c"} {"text": "%b"}]' % LONG, "not JSON", ", after row 2: not JSON: Expecting", 2),
        (b'[{"text": "a"}, {"text": "c"}, {text: "%b"}]' % LONG, "not JSON", ", after row 2: not JSON: Expecting", 2),
        (b'[{"text": "a"}, {"text": "c"}, {"text": "%b' % LONG, "not JSON", ", after row 2: not JSON: Unterminated", 2),
        (b'[{"text": "a"}, {"text": "c\xff"}]', "not UTF-8", ": not UTF-8 text: byte 0xff at position 27", 0),
    ],
)
def test_a_bad_array_names_the_row_or_the_column(tmp_path, capsys, content, kind, message, count):
    (tmp_path / "a.json").write_bytes(content)
    (tmp_path / "z.txt").write_text("good")
    command = [tmp_path / "a.json", tmp_path / "z.txt", *ALL, "--max-document-bytes", 200]
    assert f"{tmp_path}/a.json{message}" in refused(capsys, *command, "--out", tmp_path / "d")
    dataset = prepared(tmp_path / "d", *command, "--on-error", "skip")
    assert manifest(dataset)["skipped"] == {kind: 1}
    assert decoded(dataset) == [*[b"a", b"c"][:count], b"good"]


@pytest.mark.parametrize("nested", [b"[" * 200_000, b"9" * 200_000 + b"}]"])
def test_an_array_that_python_cannot_read(tmp_path, capsys, nested):
    (tmp_path / "a.json").write_bytes(b'[{"text": "a"}, {"b": ' + nested)
    error = refused(capsys, tmp_path / "a.json", *ALL, "--out", tmp_path / "d")
    assert "a.json, after row 1: not JSON: " in error


def test_an_array_is_read_in_parts(tmp_path, capsys, monkeypatch):
    """Of any size, cut anywhere, also within a character; only its rows are limited."""
    monkeypatch.setattr(readers, "_ARRAY_CHUNK", 7)
    (tmp_path / "a.json").write_text("\ufeff" + json.dumps(ROWS, ensure_ascii=False))
    assert decoded(prepared(tmp_path / "d", tmp_path / "a.json", *ALL)) == [text.encode() for text in TEXTS]
    (tmp_path / "b.json").write_text(json.dumps([{"text": "é"}, {"text": "x" * 300}, {"text": "b"}]))
    command = [tmp_path / "b.json", *ALL, "--max-document-bytes", 100]
    error = refused(capsys, *command, "--out", tmp_path / "e")
    assert "b.json, after row 1: a row of more than 100 bytes; a larger --max-document-bytes reads it" in error
    assert decoded(prepared(tmp_path / "e", *command, "--on-error", "skip")) == ["é".encode()]
    (tmp_path / "c.json").write_bytes(b'[{"text": "a"}, {"text": "' + b"x" * 50 + b'\xff"}]')
    error = refused(capsys, tmp_path / "c.json", *ALL, "--out", tmp_path / "f")
    assert "c.json, after row 1: not UTF-8 text: byte 0xff at position 76" in error


def test_a_row_of_very_many_values(tmp_path, capsys, monkeypatch):
    """Each of two bytes would take a hundred in memory; a long text is one value, however many commas it has."""
    monkeypatch.setattr(readers, "_MAX_VALUES", 1000)
    many = {"text": "a", "b": [[] for _ in range(2000)]}
    long = {"text": ',[{\\"' * 2000}
    monkeypatch.setattr(readers, "_ARRAY_CHUNK", 100)
    (tmp_path / "many.jsonl").write_text(json.dumps(many))
    (tmp_path / "many.json").write_text(json.dumps([{"text": "a"}, many]))
    for name, place in {"many.jsonl": "line 1", "many.json": "after row 1"}.items():
        error = refused(capsys, tmp_path / name, *ALL, "--out", tmp_path / name.replace(".", "_"))
        assert f"{name}, {place}: a row of more than 1,000 values" in error
    (tmp_path / "long.jsonl").write_text(json.dumps(long))
    (tmp_path / "long.json").write_text(json.dumps([long]))
    dataset = prepared(tmp_path / "d", tmp_path / "long.jsonl", tmp_path / "long.json", *ALL)
    assert decoded(dataset) == 2 * [long["text"].encode()]


def test_a_key_that_occurs_twice(tmp_path, capsys):
    """Python would keep the last value; in a text it is no key."""
    content = '{"text": "a", "n": 1, "n": 2}\n{"text": "say \\"text\\""}\n{"text": "b", "text": "c"}\n'
    (tmp_path / "a.jsonl").write_text(content)
    error = refused(capsys, tmp_path / "a.jsonl", *ALL, "--out", tmp_path / "d")
    assert 'a.jsonl, line 3: the key "text" occurs twice in an object; remove one of them' in error
    assert decoded(prepared(tmp_path / "d", tmp_path / "a.jsonl", *ALL, "--on-error", "skip")) == [b"a", b'say "text"']


def test_text_in_utf_16_names_the_conversion(tmp_path, capsys):
    for name, content in {"a.txt": "text", "a.jsonl": '{"text": "a"}\n'}.items():
        (tmp_path / name).write_bytes(content.encode("utf-16"))
        error = refused(capsys, tmp_path / name, *ALL, "--out", tmp_path / "d")
        assert "UTF-16, not UTF-8 text; convert it with iconv -f UTF-16 -t UTF-8" in error


def test_a_table_of_many_nulls_is_refused_by_its_types_and_counts(tmp_path, capsys, monkeypatch):
    """Four million nulls take some hundred bytes of a file. No value is made of them."""
    size = 5_000_000
    nulls = pyarrow.ListArray.from_arrays(
        pyarrow.array([0, size], pyarrow.int32()), pyarrow.nulls(size, pyarrow.int8())
    )
    parquet_file.write_table(pyarrow.table({"text": nulls, "messages": nulls}), tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    decoded_files = []
    monkeypatch.setattr(readers, "_within_memory", lambda *arguments: decoded_files.append(arguments))
    error = refused(capsys, tmp_path / "a.parquet", *ALL, "--out", tmp_path / "d")
    assert "a.parquet: the column 'text' has no strings, but values of type list<element: int8>" in error
    (tmp_path / "t.jinja").write_text("")
    chat = ["--messages", "messages", "--template", tmp_path / "t.jinja"]
    error = refused(capsys, tmp_path / "a.parquet", *chat, *ALL, "--out", tmp_path / "e")
    assert "a.parquet: the column 'messages' has 5,000,000 values in 1 rows; at most 4,194,304 a row are read" in error
    assert decoded_files == []


def test_a_row_of_a_table_that_is_large_in_memory(tmp_path, capsys, monkeypatch):
    """Its neighbours are read. A dictionary repeats a long text in each message."""
    monkeypatch.setattr(readers, "_VALUES_BYTES", 10_000)
    turn = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    long = [*turn, {"role": "user", "content": "x" * 12_000}]
    path = parquet(tmp_path / "a.parquet", [{"messages": each} for each in (turn, turn * 500, long, turn)])
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [path, "--template", tmp_path / "t.jinja", *ALL, "--max-document-bytes", 1000]
    assert "a.parquet, row 2: a row that takes more than 11,000 bytes; a larger --max" in refused(
        capsys, *command, "--out", tmp_path / "d"
    )
    dataset = prepared(tmp_path / "d", *command, "--on-error", "skip")
    assert manifest(dataset)["skipped"] == {"too large": 2}
    assert decoded(dataset) == [b"ab", b"ab"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems do not limit memory")
def test_memory_for_decoding_a_table_is_limited(tmp_path, capsys, monkeypatch):
    """As for a page that unpacks to gigabytes; the process can take memory again afterwards."""

    def large_pages(*_, **settings):
        assert settings["columns"] == ["text"]
        yield bytearray(2**33)

    path = parquet(tmp_path / "a.parquet", TEXTS)
    with monkeypatch.context() as patched:
        patched.setattr(parquet_file.ParquetFile, "iter_batches", large_pages)
        error = refused(capsys, path, *ALL, "--out", tmp_path / "d")
    size = path.stat().st_size
    assert f"a.parquet: decoding it takes more than {2**30 + 64 * size:,} bytes of memory" in error
    assert len(decoded(prepared(tmp_path / "d", path, *ALL))) == len(TEXTS)
    assert len(bytearray(2**31)) == 2**31


def test_another_field_and_format(tmp_path):
    path = jsonl(tmp_path / "a.json", [{"body": "x"}, {"body": "y"}])
    assert decoded(prepared(tmp_path / "d", path, "--field", "body", "--format", "jsonl", *ALL)) == [b"x", b"y"]
    assert decoded(prepared(tmp_path / "e", path, "--field", "body", *ALL)) == [b"x", b"y"]
    assert decoded(prepared(tmp_path / "f", path, "--format", "text", *ALL)) == [path.read_bytes()]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.json", "a.JSON", "a.jsonlines", "a.NDJSON"])
def test_lines_of_objects_are_rows(tmp_path, suffix, name):
    content = "\ufeff\n" + "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / f"{name}{suffix}").write_bytes(packed(suffix, content.encode()))
    expected = [text.encode() for text in TEXTS]
    assert decoded(prepared(tmp_path / "d", tmp_path / f"{name}{suffix}", *ALL)) == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('["a", {"text": "b"}]', "is neither a list of objects nor JSON Lines: write its rows as JSON Lines"),
        ('{\n "data": [\n  {"text": "a"}]}', "if 'data' is the list of its rows, jq -c '.[\"data\"][]' FILE.json"),
        ('{"data": [{"text": "a"}]}', "no field 'text'; fields: 'data'. Name it with --field NAME, or a conversation"),
        ('{"data": [{"text": "a"}]}', "if 'data' is the list of rows, jq -c '.[\"data\"][]' FILE.json > NEW.jsonl"),
        ('{"chat": [{"role": "user", "content": "a"}]}', "; 'chat' seems to be a conversation"),
        ("17", "is neither a list of objects nor JSON Lines"),
    ],
)
def test_json_without_rows_is_refused(tmp_path, capsys, content, message):
    (tmp_path / "a.json").write_text(content)
    assert message in refused(capsys, tmp_path / "a.json", *ALL, "--out", tmp_path / "d")
    assert "a.json" in refused(capsys, tmp_path / "a.json", *ALL, "--out", tmp_path / "d")
    assert decoded(prepared(tmp_path / "e", tmp_path / "a.json", "--format", "text", *ALL)) == [content.encode()]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"text,label\none,1\n", "a.csv is a table, which would be read as one text; make JSON Lines of it"),
        ("a.csv", b"text,label\none,1\n", "\n--format text reads it as one text"),
        ("a.TSV", b"text\tlabel\n", "csv.DictReader(sys.stdin, delimiter=chr(9))"),
        ("a.csv.gz", gzip.compress(b"text\n", mtime=0), "a.csv.gz is a table"),
        ("a.xlsx", b"x", "a.xlsx is a spreadsheet, and not text: save it as CSV"),
        ("a.arrow", b"x", "a.arrow is a table in a format that is not read, and not text: write it as Parquet"),
        ("a.tar.gz", gzip.compress(b"x", mtime=0), "a.tar.gz is an archive, and not text: unpack it"),
        ("a.jsonl.xz", b"x", "a.jsonl.xz is packed in a way that is not read"),
        ("a.safetensors", b"x", "a.safetensors is a file of arrays"),
        ("a.pdf", b"x", "a.pdf is a PDF"),
        ("a", b"%PDF-1.4 text", "a is a PDF"),
        ("a.txt", b"PK\x03\x04", "a.txt is an archive"),
        ("a.txt", gzip.compress(b"text", mtime=0), "a.txt is packed with gzip, and not text: give it a name"),
        ("a.txt", b"\x93NUMPY", "a.txt is a file of arrays"),
        ("a.bin", b"GGUF", "a.bin is a file of arrays"),
    ],
)
def test_files_that_are_no_text_are_refused(tmp_path, capsys, name, content, message):
    """In a folder they are left out, or read as text and counted in the summary."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(content)
    command = [tmp_path / "in" / name, *ALL, "--on-error", "skip", "--out", tmp_path / "d"]
    assert message in refused(capsys, *command)
    assert not (tmp_path / "d").exists()


def test_structured_files_in_folders(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    for name in ("a.csv", "b.ipynb", "c.html", "d.py"):
        (tmp_path / "in" / name).write_text(name)
    for name in ("e.pdf", "f.safetensors", "g.xz"):
        (tmp_path / "in" / name).write_text(name)
    dataset = prepared(tmp_path / "d", tmp_path / "in", *ALL)
    assert decoded(dataset) == [b"a.csv", b"b.ipynb", b"c.html", b"d.py"]
    assert manifest(dataset)["skipped"] == {"binary file": 3}
    out = capsys.readouterr().out
    assert "as text     1 x .csv, 1 x .html, 1 x .ipynb: each file is one document, with its syntax" in out


@pytest.mark.parametrize(("name", "separator"), [("a b.csv", ","), ("a b.tsv.gz", "\t")])
def test_a_table_becomes_rows_by_the_command_of_its_message(tmp_path, capsys, name, separator):
    content = f'text{separator}label\n"one, two"{separator}1\n'
    (tmp_path / name).write_bytes(packed(Path(name).suffix, content.encode()))
    error = refused(capsys, tmp_path / name, *ALL, "--out", tmp_path / "d")
    command = error.splitlines()[1].strip().replace("| python ", f"| {sys.executable} ", 1)
    subprocess.run(command, shell=True, check=True)
    assert decoded(prepared(tmp_path / "d", tmp_path / "a b.jsonl", *ALL)) == [b"one, two"]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("tokenizer", [(), ("--train-bpe", 300)])
def test_prompts_and_completions(tmp_path, write, tokenizer):
    rows = [{"prompt": f"{i} plus {i}?", "completion": f" {2 * i}"} for i in range(20)] + [
        {"prompt": "", "completion": "x"}
    ]
    path = write(tmp_path / ("a.jsonl" if write is jsonl else "a.parquet"), rows)
    fields = ["--prompt-field", "prompt", "--completion-field", "completion"]
    dataset = prepared(tmp_path / "d", path, *fields, *tokenizer, *ALL)
    split = dataset.splits["train"]
    assert decoded(dataset) == [(row["prompt"] + row["completion"]).encode() for row in rows]
    from jaxtp.data.tokenizer import load_tokenizer

    read = load_tokenizer(dataset.folder).decode
    for index, row in enumerate(rows):
        prompt = split.prompt_length(index)
        assert read(split.document(index, 0, prompt)) == row["prompt"].encode()
        assert read(split.document(index, prompt)) == row["completion"].encode()


def test_folders_are_walked_in_order_without_what_is_hidden(tmp_path):
    folder = tmp_path / "in"
    for name in ("b.py", "a/z.py", "a/.hidden.py", ".git/x.py", "a/data.txt", "c/skip/x.py", "a.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "image.png").write_bytes(b"\x89PNG\0\xff")
    (folder / "empty.py").touch()
    (folder / "loop").symlink_to(folder)
    dataset = prepared(tmp_path / "d", folder, "--exclude", "skip", *ALL)
    assert decoded(dataset) == [b"a/data.txt", b"a/z.py", b"a.py", b"b.py"]
    assert manifest(dataset)["skipped"] == {"binary file": 1, "empty file": 1}
    only = prepared(tmp_path / "e", folder, "--include", "*.py", "--include", "c/*", "--exclude", "a/*", *ALL)
    assert decoded(only) == [b"a.py", b"b.py", b"c/skip/x.py"]


def test_tables_of_the_library_datasets(tmp_path, capsys):
    import datasets

    table = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(45))})
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "test": table.select([3])}).save_to_disk(tmp_path / "two")
    expected = [text.encode() for text in TEXTS]
    assert decoded(prepared(tmp_path / "d", f"hf:{tmp_path / 'one'}", *ALL)) == expected
    assert decoded(prepared(tmp_path / "e", f"hf:{tmp_path / 'two'}:test", *ALL)) == [expected[3]]
    assert "has several splits; name one: hf:" in refused(capsys, f"hf:{tmp_path / 'two'}", "--out", tmp_path / "f")
    assert "'nope'" in refused(capsys, f"hf:{tmp_path / 'two'}:nope", "--out", tmp_path / "f")
    assert "no such folder" in refused(capsys, f"hf:{tmp_path / 'three'}", "--out", tmp_path / "f")
    error = refused(capsys, f"hf:{tmp_path / 'one'}", "--field", "n", "--out", tmp_path / "f")
    assert "one: the column 'n' has no strings, but values of type int64" in error
    assert f"is a dataset made by save_to_disk; name it hf:{tmp_path}/one" in refused(
        capsys, tmp_path / "one", "--out", tmp_path / "g"
    )
    error = refused(capsys, f"hf:{tmp_path / 'one'}", "--field", "txt", "--out", tmp_path / "g")
    assert "no field 'txt'; did you mean 'text'?" in error


def line(content):
    return b'{"text": "fine"}\n' * 2 + content + b'\n{"text": "after"}\n'


def truncated(content):
    return content[: len(content) // 2]


PARQUET = "parquet of 45 rows"
BAD = {
    "a.txt": (b"ok\nab\xffc", "a.txt: not UTF-8 text: byte 0xff at position 5 (line 2)", "not UTF-8"),
    "b.txt": (b"", "b.txt: the file is empty", "empty file"),
    "c.jsonl": (b"", "c.jsonl: the file is empty", "empty file"),
    "d.txt.gz": (truncated(gzip.compress(bytes(range(256)))), "d.txt.gz: broken gz file: ", "broken file"),
    "e.txt.gz": (b"plain text", "e.txt.gz: broken gz file: Not a gzipped file", "broken file"),
    "f.txt.zst": (
        truncated(zstandard.compress(bytes(range(256)))),
        "f.txt.zst: broken zst file: the zstd",
        "broken file",
    ),
    "g.txt.zst": (b"plain text", "g.txt.zst: broken zst file: ", "broken file"),
    "h.jsonl": (line(b"{nope}"), "h.jsonl, line 3: not JSON: Expecting property name", "not JSON"),
    "i.jsonl": (line(b"[1, 2]"), "i.jsonl, line 3: not a JSON object: [1, 2]", "not JSON"),
    "j.jsonl": (line(b'{"txet": "x"}'), "j.jsonl, line 3: no field 'text'; did you mean 'txet'?", "no such field"),
    "k.jsonl": (line(b"{}"), "k.jsonl, line 3: no field 'text'; fields: none", "no such field"),
    "l.jsonl": (line(b'{"text": [1]}'), "l.jsonl, line 3: 'text' is not a string, but [1]", "not a string"),
    "m.jsonl": (line(b'{"text": null}'), "m.jsonl, line 3: 'text' is not a string, but null", "not a string"),
    "n.jsonl": (line(b'{"text": "\xe9"}'), "n.jsonl, line 3: not UTF-8 text: byte 0xe9 at position 10", "not UTF-8"),
    "o.jsonl": (line(b'{"text": "\\ud800"}'), "o.jsonl, line 3: 'text' holds half of a surrogate pair", "not UTF-8"),
    "p.jsonl": (line(b"[" * 100_000), "p.jsonl, line 3: not JSON: ", "not JSON"),
    "q.jsonl": (line(b'{"text": "x", "n": ' + b"9" * 5000 + b"}"), "q.jsonl, line 3: not JSON: ", "not JSON"),
    "r.jsonl.gz": (
        gzip.compress(line(b'{"text": ""}'))[:-9],
        "r.jsonl.gz, after line 4: broken gz file: ",
        "broken file",
    ),
    "s.parquet": (b"PAR1 and no more PAR1", "s.parquet: broken Parquet file: ", "broken file"),
    "t.parquet": (b"", "t.parquet: broken Parquet file: ", "broken file"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path, capsys, name):
    content, message, kind = BAD[name]
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.txt").write_text("good")
    command = [tmp_path / name, tmp_path / "z.txt", *ALL, "--out", tmp_path / "d"]
    error = refused(capsys, *command)
    assert f"{tmp_path}/{message}" in error
    assert "--on-error skip" in error
    assert not (tmp_path / "d/dataset.json").exists()
    assert main([*map(str, command), "--on-error", "skip"]) == 0
    assert f"skipped: {tmp_path}/{message}" in capsys.readouterr().out
    dataset = open_dataset(tmp_path / "d")
    assert manifest(dataset)["skipped"][kind] == 1
    lines = [b"fine", b"fine", b"after"] if b'"fine"' in content or name.startswith("r") else []
    assert decoded(dataset) == [*lines, b"good"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"txt": "x"}], "no field 'text'; did you mean 'txt'?"),
        ([{"text": 3}], "the column 'text' has no strings, but values of type int64"),
        ([{"text": ["x"]}], "the column 'text' has no strings, but values of type list<element: string>"),
        ([{"text": "x"}, {"text": None}], "row 2: 'text' is not a string, but null"),
    ],
)
def test_bad_tables(tmp_path, capsys, rows, message):
    path = parquet(tmp_path / "a.parquet", rows)
    assert f"{path}{',' if message.startswith('row') else ':'} {message}" in refused(
        capsys, path, "--out", tmp_path / "d"
    )


def test_a_damaged_page_is_found_by_its_checksum(tmp_path, capsys):
    path = parquet(
        tmp_path / "a.parquet",
        TEXTS,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        write_statistics=False,
    )
    content = bytearray(path.read_bytes())
    content[content.index(TEXTS[30].encode()) + 1] ^= 1
    path.write_bytes(content)
    assert "a.parquet, after row 30: broken Parquet file: " in refused(capsys, path, "--out", tmp_path / "d")


def test_the_first_problems_are_shown_and_all_are_counted(tmp_path, capsys):
    jsonl(tmp_path / "a.jsonl", [{"no": "x"}] * 20 + ["fine"])
    dataset = prepared(tmp_path / "d", tmp_path / "a.jsonl", "--on-error", "skip", *ALL)
    out = capsys.readouterr().out
    assert out.count("skipped: ") == 5
    assert "further ones are only counted" in out
    assert manifest(dataset)["skipped"] == {"no such field": 20}


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "books.txt").write_text("x")
    out = ["--out", tmp_path / "d"]
    error = refused(capsys, tmp_path / "book.txt", *out)
    assert f"{tmp_path}/book.txt: No such file or directory; did you mean {tmp_path}/books.txt?" in error
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    assert "loop.txt: Too many levels of symbolic links" in refused(capsys, tmp_path / "loop.txt", *out)
    assert "--exclude loop.txt leaves it out" in refused(capsys, tmp_path, *out)
    assert "/dev/null is neither a file nor a folder" in refused(capsys, "/dev/null", *out)
    (tmp_path / "empty").mkdir()
    assert "no file in this folder" in refused(capsys, tmp_path / "empty", *out)
    assert "that matches --include *.cc" in refused(capsys, tmp_path / "empty", "--include", "*.cc", *out)
    assert not (tmp_path / "d").exists()


def test_a_file_that_vanishes_or_cannot_be_opened_is_unreadable(tmp_path, capsys, monkeypatch):
    """Between listing and reading; permissions would not stop the root user who may run this."""
    from jaxtp.data.prepare import run

    (tmp_path / "a.txt").write_text("x")
    listed = run.find_sources

    def then_delete(config):
        found = listed(config)
        (tmp_path / "a.txt").unlink()
        return found

    monkeypatch.setattr(run, "find_sources", then_delete)
    assert "a.txt: No such file or directory" in refused(capsys, tmp_path / "a.txt", "--out", tmp_path / "d")


def test_text_has_no_prompt(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("x")
    fields = ["--prompt-field", "p", "--completion-field", "c"]
    assert "a.txt: text has no fields" in refused(capsys, tmp_path / "a.txt", *fields, "--out", tmp_path / "d")


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [
        ("a.parquet", "pyarrow", "data"),
        ("a.txt.zst", "zstandard", "data"),
        ("hf:a", "datasets", "datasets"),
    ],
)
def test_without_a_library_the_message_names_the_extra(tmp_path, capsys, monkeypatch, name, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(b"x")
    error = refused(capsys, name, "--out", tmp_path / "d")
    assert f"need{'s' if library == 'datasets' else ''} the library {library}: pip install 'jaxtp[{extra}]'" in error


def test_text_jsonl_and_gzip_need_no_library(tmp_path, monkeypatch):
    for library in ("tokenizers", "pyarrow", "zstandard", "datasets"):
        monkeypatch.setitem(sys.modules, library, None)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a"))
    rows = jsonl(tmp_path / "b.jsonl.gz", ["b"])
    assert decoded(prepared(tmp_path / "d", tmp_path / "a.txt.gz", rows, *ALL)) == [b"a", b"b"]


def test_real_sources_decode_to_their_bytes(tmp_path):
    root = Path(sysconfig.get_paths()["stdlib"]) / "email"
    dataset = prepared(tmp_path / "d", root, "--include", "*.py", "--train-bpe", 600, *ALL)
    files = sorted(path for path in root.rglob("*.py") if path.stat().st_size)
    assert len(files) > 20
    assert decoded(dataset) == [path.read_bytes() for path in files]
    split = dataset.splits["train"]
    assert all(split.document(i)[-1] == dataset.tokenizer.eos_id for i in range(split.num_documents))
    assert split.num_tokens < read_manifest(dataset.folder).splits["train"].text_bytes / 2
