"""`jaxtp prepare`: what it says, what it refuses, and that it goes on."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from corpora import decoded, jsonl, prepared, refused, texts
from runs import contents

from jaxtp.data.manifest import read_manifest
from jaxtp.data.prepare import batches
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import ByteTokenizer

TEXTS = texts(60, seed=5)
COMMAND = [sys.executable, "-m", "jaxtp", "prepare"]


@pytest.fixture
def rows(tmp_path):
    return jsonl(tmp_path / "a.jsonl", TEXTS)


def test_help_explains_every_setting_and_verify(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help-all"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "jaxtp prepare --verify data/books" in out
    for setting in ("--out DIR", "--train-bpe SIZE", "--dedup", "--held-out FLOAT", "--prompt-field", "--no-eos"):
        assert setting in out
    assert "after an interruption the same command resumes in it" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "name at least one INPUT: a file or a folder; name the folder of the dataset by --out DIR"),
        (["x", "--out", "d", "--tokenizer", "t", "--train-bpe", "300"], "are two tokenizers"),
        (["x", "--out", "d", "--train-bpe", "256"], "--train-bpe 256: should be greater than or equal to 257"),
        (["x", "--out", "d", "--eos", "</s>"], "bytes have no special tokens"),
        (["x", "--out", "d", "--train-bpe", "300", "--eos", "a", "--no-eos"], "contradict each other"),
        (["x", "--out", "d", "--train-bpe", "300", "--eos", ""], "--eos is empty"),
        (["x", "--out", "d", "--prompt-field", "p"], "--prompt-field and --completion-field go together"),
        (["x", "--out", "d", "--prompt-field", "p", "--completion-field", "c", "--field", "f"], "--field is for"),
        (["x", "--out", "d", "--held-out", "1"], "--held-out 1: should be less than 1"),
        (["x", "--out", "d", "--shard-tokens", "0"], "--shard-tokens 0: should be greater than or equal to 1"),
        (["x", "--verify", "d"], "--verify DIR reads a dataset and does nothing else"),
    ],
)
def test_settings_that_cannot_be(capsys, flags, message):
    assert message in refused(capsys, *flags)


def test_what_it_shows(tmp_path, rows, capsys):
    (tmp_path / "b.txt").write_text("unlike the others")
    prepared(tmp_path / "d", rows, tmp_path / "b.txt", "--dedup", "--held-out", 0.2, "--shard-tokens", 3000)
    out = capsys.readouterr().out
    split = open_dataset(tmp_path / "d").splits
    assert f"dataset     {tmp_path}/d, tokenizer bytes, vocabulary 256" in out
    for name in ("train", "validation"):
        found = split[name]
        assert f"{name:<12}{found.num_documents} documents, {found.num_tokens:,} tokens in " in out
    assert f"left out    {60 - len(set(TEXTS))} x duplicate" in out
    assert split["train"].num_documents + split["validation"].num_documents == len(set(TEXTS)) + 1


def test_one_document_is_no_documents(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("alone")
    assert main([str(tmp_path / "a.txt"), "--out", str(tmp_path / "d"), "--held-out", "0"]) == 0
    assert f"{'train':<12}1 document, " in capsys.readouterr().out


def test_a_finished_dataset_is_left_as_it_is(tmp_path, rows, capsys):
    command = ["--train-bpe", 300, "--dedup"]
    dataset = prepared(tmp_path / "d", rows, *command)
    before = contents(tmp_path / "d")
    stamps = {path: path.stat().st_mtime_ns for path in dataset.folder.iterdir()}
    (tmp_path / "d/journal.json").write_text("left over")
    (tmp_path / "d/dataset.json.partial").write_text("left over")
    prepared(tmp_path / "d", rows, *command, "--on-error", "skip")
    assert "is finished; there is nothing to do" in capsys.readouterr().out
    assert contents(tmp_path / "d") == before
    assert {path: path.stat().st_mtime_ns for path in dataset.folder.iterdir()} == stamps
    assert sorted(path.name for path in dataset.folder.iterdir() if path.name.endswith(("json", "jsonl"))) == [
        "dataset.json",
        "inputs.jsonl",
        "tokenizer.json",
    ]


def test_a_dataset_that_was_made_otherwise_is_refused(tmp_path, rows, capsys):
    prepared(tmp_path / "d", rows)
    before = contents(tmp_path / "d")
    error = refused(capsys, rows, "--held-out", 0.5, "--dedup", "--out", tmp_path / "d")
    assert "holds a dataset that differs from this command (there -> here):" in error
    assert "  held_out: 0.01 -> 0.5\n  dedup: False -> True\n--overwrite starts over" in error
    error = refused(capsys, rows, tmp_path / "a.jsonl", "--out", tmp_path / "d")
    assert "  inputs: [" in error
    size = rows.stat().st_size
    jsonl(rows, [*TEXTS, "more"])
    assert f"  {rows}: {size:,} bytes, modified at " in refused(capsys, rows, "--out", tmp_path / "d")
    assert contents(tmp_path / "d") == before
    (tmp_path / "d/notes.txt").write_text("mine")
    dataset = prepared(tmp_path / "d", rows, "--overwrite", "--held-out", 0)
    assert dataset.splits["train"].num_documents == 61
    assert (tmp_path / "d/notes.txt").exists()


def test_a_file_of_the_same_size_that_was_modified_is_noticed(tmp_path, rows, capsys):
    prepared(tmp_path / "d", rows)
    os.utime(rows, ns=(1, 1))
    assert " bytes, modified at 1 ns\n" in refused(capsys, rows, "--out", tmp_path / "d")


def test_another_tokenizer_is_refused_and_the_same_elsewhere_is_not(tmp_path, rows, capsys):
    source = prepared(tmp_path / "t", rows, "--train-bpe", 300).folder / "tokenizer.json"
    other = prepared(tmp_path / "u", rows, "--train-bpe", 301).folder / "tokenizer.json"
    prepared(tmp_path / "d", rows, "--tokenizer", source)
    moved = shutil.copy(source, tmp_path / "moved.json")
    prepared(tmp_path / "d", rows, "--tokenizer", moved)
    error = refused(capsys, rows, "--tokenizer", other, "--out", tmp_path / "d")
    assert "tokenizer.sha256: " in error
    assert "tokenizer.vocab_size: 300 -> 301" in error
    assert "differs from this command" in refused(capsys, rows, "--out", tmp_path / "d")


def test_end_tokens(tmp_path, rows):
    dataset = prepared(tmp_path / "d", rows, "--train-bpe", 300, "--eos", "<end>", "--held-out", 0)
    split = dataset.splits["train"]
    assert all(split.document(i)[-1] == dataset.tokenizer.eos_id for i in range(60))
    assert json.loads((dataset.folder / "tokenizer.json").read_text())["added_tokens"][0]["content"] == "<end>"
    plain = prepared(
        tmp_path / "e", rows, "--tokenizer", dataset.folder / "tokenizer.json", "--no-eos", "--held-out", 0
    )
    assert plain.tokenizer.eos_id is None
    assert plain.splits["train"].num_tokens == split.num_tokens - 60
    assert decoded(plain) == decoded(dataset) == [text.encode() for text in TEXTS]


def test_bad_tokenizers(tmp_path, rows, capsys):
    out = ["--out", tmp_path / "d"]
    (tmp_path / "t.json").write_text("{}")
    assert "t.json: not a tokenizer.json: " in refused(capsys, rows, "--tokenizer", tmp_path / "t.json", *out)
    assert "u.json: No such file" in refused(capsys, rows, "--tokenizer", tmp_path / "u.json", *out)
    error = refused(capsys, rows, "--tokenizer", "meta-llama/Llama-3.1-8B", *out)
    download = "`hf download meta-llama/Llama-3.1-8B --local-dir models/Llama-3.1-8B` downloads it, and then its folder"
    assert "meta-llama/Llama-3.1-8B: No such file or directory; if it is the name of a model on" in error
    assert download in error
    (tmp_path / "llama").mkdir()
    error = refused(capsys, rows, "--tokenizer", tmp_path / "lama", *out)
    assert f"lama: No such file or directory; did you mean {tmp_path}/llama?" in error
    assert not (tmp_path / "d").exists()


def test_nothing_to_train_on_and_nothing_at_all(tmp_path, capsys):
    jsonl(tmp_path / "a.jsonl", ["", ""])
    error = refused(capsys, tmp_path / "a.jsonl", "--out", tmp_path / "d")
    assert "no document in 1 files; left out: 2 x empty document" in error
    assert "nothing to train a tokenizer on" in refused(
        capsys, tmp_path / "a.jsonl", "--train-bpe", 300, "--out", tmp_path / "e"
    )


def test_the_tokenizer_learns_from_a_sample_without_the_held_out_part(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", texts(2000, seed=8))
    prepared(tmp_path / "a", path, "--train-bpe", 300, "--bpe-sample", path.stat().st_size // 4, "--held-out", 0.5)
    out = capsys.readouterr().out
    text = sum(split.text_bytes for split in read_manifest(tmp_path / "a").splits.values())
    learnt = int(out.split("training a BPE tokenizer of 300 on ")[1].split(" bytes")[0].replace(",", ""))
    assert abs(learnt / text - 1 / 8) < 0.06


def test_folders_of_others_are_left_alone(tmp_path, rows, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    for flags in ([], ["--overwrite"]):
        error = refused(capsys, rows, "--out", tmp_path / "mine", *flags)
        assert "mine holds other files (thesis.txt) and no dataset; name a folder of its own" in error
    assert contents(tmp_path / "mine") == {"thesis.txt": b"x"}
    assert "a.jsonl: File exists; name another folder by --out DIR" in refused(capsys, rows, "--out", rows)
    assert "Not a directory" in refused(capsys, rows, "--out", rows / "d")


def test_a_second_command_on_the_folder_is_refused(tmp_path, rows, capsys):
    (tmp_path / "d").mkdir()
    descriptor = os.open(tmp_path / "d", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        assert "d is being written by another command" in refused(capsys, rows, "--out", tmp_path / "d")
    finally:
        os.close(descriptor)
    prepared(tmp_path / "d", rows)


def small_batches(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 7)


def test_stopped_by_a_bad_file_it_goes_on_where_it_is_mended(tmp_path, capsys, monkeypatch):
    small_batches(monkeypatch)
    folder = tmp_path / "in"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02}.txt").write_bytes(text.encode() if i != 40 else b"\xff")
    error = refused(capsys, folder, "--out", tmp_path / "d", "--dedup")
    assert "40.txt: not UTF-8" in error
    count = len(set(TEXTS[:40]))
    assert f"{count} documents before it are done" in error
    (folder / "40.txt").write_text("mended")
    (folder / "60.txt").write_text("added")
    resumed = prepared(tmp_path / "d", folder, "--dedup")
    assert "resuming after 40 of 61 inputs" in capsys.readouterr().out
    prepared(tmp_path / "e", folder, "--dedup")
    assert contents(resumed.folder) == contents(tmp_path / "e")


def test_what_was_read_must_not_change_under_an_unfinished_dataset(tmp_path, capsys):
    for name, content in {"a.txt": b"a", "b.txt": b"b", "c.txt": b"\xff"}.items():
        (tmp_path / name).write_bytes(content)
    inputs = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
    refused(capsys, *inputs, "--out", tmp_path / "d")
    assert "holds an unfinished dataset that differs from this command" in refused(
        capsys, *inputs, "--out", tmp_path / "d", "--held-out", 0.3
    )
    (tmp_path / "b.txt").write_bytes(b"other")
    assert "b.txt: 1 bytes, modified at " in refused(capsys, *inputs, "--out", tmp_path / "d")
    prepared(tmp_path / "d", *inputs, "--on-error", "skip", "--overwrite", "--held-out", 0)
    assert decoded(open_dataset(tmp_path / "d")) == [b"a", b"other"]


def test_a_file_of_many_bad_rows_is_not_read_whole_to_say_so(tmp_path, capsys, monkeypatch):
    small_batches(monkeypatch)
    monkeypatch.setattr(batches, "_MANY_PROBLEMS", 10)
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, *[{}] * 1000]))
    rows = []
    read = batches.read_source

    def counted(*arguments):
        for event in read(*arguments):
            rows.append(event)
            yield event

    monkeypatch.setattr(batches, "read_source", counted)
    assert "a.json, row 2: no field 'text'" in refused(capsys, tmp_path / "a.json", "--out", tmp_path / "d")
    assert len(rows) < 30
    prepared(tmp_path / "d", tmp_path / "a.json", "--on-error", "skip")
    assert len(rows) > 1000


@pytest.mark.parametrize(
    "name", ["journal.json", "train-00000.tokens", "train-00000.documents", "tokenizer.json", "seen.sha256"]
)
def test_a_damaged_unfinished_dataset_is_said_to_be(tmp_path, capsys, name):
    jsonl(tmp_path / "a.jsonl", [*TEXTS, {"bad": 1}])
    source = prepared(tmp_path / "t", jsonl(tmp_path / "b.jsonl", TEXTS), "--train-bpe", 300).folder / "tokenizer.json"
    command = [tmp_path / "a.jsonl", "--tokenizer", source, "--dedup", "--out", tmp_path / "d"]
    refused(capsys, *command)
    path = tmp_path / "d" / name
    path.write_bytes(path.read_bytes()[:-3])
    error = refused(capsys, *command)
    assert f"{name}: damaged, so the command cannot resume: " in error
    assert "--overwrite starts over" in error
    assert main([*map(str, command), "--overwrite", "--on-error", "skip"]) == 0


@pytest.mark.journey
def test_a_full_disk_is_an_error_and_the_command_goes_on(tmp_path):
    """A limit on the size of files stands in for it."""
    jsonl(tmp_path / "a.jsonl", [text * 20 for text in TEXTS])
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "runpy.run_module('jaxtp.data.prepare', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", limited, str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "d")]
    full = subprocess.run(command, capture_output=True, text=True, check=False)
    assert full.returncode == 2, full.stderr
    assert "File too large; fix this, and the same command resumes" in full.stderr
    assert "Traceback" not in full.stderr
    prepared(tmp_path / "d", tmp_path / "a.jsonl")
    prepared(tmp_path / "e", tmp_path / "a.jsonl")
    assert contents(tmp_path / "d") == contents(tmp_path / "e")


@pytest.mark.journey
def test_interrupted_it_says_that_the_same_command_goes_on(tmp_path):
    jsonl(tmp_path / "a.jsonl", texts(20_000, seed=1))
    command = [*COMMAND, str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "d"), "--train-bpe", "2000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "d/journal.json").exists():
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert error.strip() == "jaxtp prepare: interrupted; the same command, without --overwrite, resumes"
    assert not (tmp_path / "d/dataset.json").exists()
    prepared(tmp_path / "d", tmp_path / "a.jsonl", "--train-bpe", 2000)
    prepared(tmp_path / "e", tmp_path / "a.jsonl", "--train-bpe", 2000)
    assert contents(tmp_path / "d") == contents(tmp_path / "e")


def test_ctrl_c_leaves_what_was_saved(tmp_path, rows, capsys, monkeypatch):
    small_batches(monkeypatch)
    encode = ByteTokenizer.encode_batch

    def interrupted(self, texts):
        if texts[0] == TEXTS[14]:
            signal.raise_signal(signal.SIGINT)
        return encode(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_batch", interrupted)
    assert main([str(rows), "--out", str(tmp_path / "d"), "--save-seconds", "0"]) == 130
    assert "the same command, without --overwrite, resumes" in capsys.readouterr().err
    monkeypatch.setattr(ByteTokenizer, "encode_batch", encode)
    prepared(tmp_path / "d", rows)
    assert "resuming after 0 of 1 inputs, item 14 of the next" in capsys.readouterr().out
    prepared(tmp_path / "e", rows)
    assert contents(tmp_path / "d") == contents(tmp_path / "e")


def test_verify(tmp_path, rows, capsys):
    prepared(tmp_path / "d", rows, "--train-bpe", 300)
    assert main(["--verify", str(tmp_path / "d")]) == 0
    assert "no problems" in capsys.readouterr().out
    path = tmp_path / "d/tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"the", b"teh", 1))
    assert main(["--verify", str(tmp_path / "d")]) == 1
    assert "tokenizer.json: its sha256 is " in capsys.readouterr().out
    path = tmp_path / "d/train-00000.tokens"
    path.write_bytes(path.read_bytes()[:-2])
    assert main(["--verify", str(tmp_path / "d")]) == 1
    assert "train-00000.tokens: damaged dataset: cut short" in capsys.readouterr().out
    assert "no such folder" in refused(capsys, "--verify", tmp_path / "x")


def test_a_first_command_that_failed_can_be_corrected(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"content": "one"}\n{"content": "two"}\n')
    command = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert main([*command, "--field", "content"]) == 0
    assert "nothing is held out: so few documents need a larger --held-out" in capsys.readouterr().out


def test_what_a_command_reads_is_not_deleted_by_it(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text " * 50)
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--held-out", "0"]
    assert main([*command, "--train-bpe", "300"]) == 0
    assert "requested 300" in capsys.readouterr().out
    tokenizer = tmp_path / "out/tokenizer.json"
    assert main([*command, "--overwrite", "--tokenizer", str(tokenizer)]) == 2
    assert f"--overwrite would delete {tokenizer}" in capsys.readouterr().err
    assert tokenizer.exists()


def test_a_finished_dataset_that_lost_something_is_not_taken_for_done(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    command = [str(tmp_path / "a.txt"), "--out", str(tmp_path / "out"), "--held-out", "0"]
    assert main(command) == 0
    (tmp_path / "out/train-00000.tokens").write_bytes(b"some")
    assert main(command) == 2
    assert "cut short: 4 bytes of 9; --overwrite starts over" in capsys.readouterr().err
