"""`jaxtp prepare`: its output, what it refuses, and that the same command resumes it."""

import fcntl
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from corpora import dataset, decoded, documents, output, refusal, run, texts, write, write_bpe
from runs import contents, run_program
from tables import assert_errors, read_table
from tokenizers import Tokenizer, models

from jaxtp.data.prepare import batches
from jaxtp.data.prepare.__main__ import main
from jaxtp.data.store import open_dataset
from jaxtp.data.tokenizer import ByteTokenizer

TEXTS = texts(60, seed=5)


@pytest.fixture(autouse=True)
def _rows(folder):
    write("a.jsonl", TEXTS)


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 7)


def assert_same_as_undisturbed(line):
    """Compares the dataset with that of a command that nothing interrupted."""
    output(f"{line} --out undisturbed")
    assert contents("d") == contents("undisturbed")


def test_help_explains_every_setting_and_verify(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help-all"])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    expected = [
        "jaxtp prepare --verify data/books",
        "after an interruption, the same command resumes",
        "--out DIR",
        "--dedup",
        "--held-out FLOAT",
        "--prompt-field",
        "--no-eos",
    ]
    assert not [words for words in expected if words not in out]


def test_mistaken_commands_are_refused():
    write("t.json", "{}")
    Path("llama").mkdir()
    assert_errors(read_table(__file__, "mistaken_commands"), lambda row: refusal(row["line"]))
    assert not Path("d").exists()


def test_a_command_without_inputs_or_folder_is_refused(capsys):
    assert main([]) == 2
    error = capsys.readouterr().err
    assert (
        "name at least one INPUT: a file or a folder; name the folder of the dataset by --out DIR"
        in error
    )


def test_the_summary_counts_documents_tokens_and_what_was_left_out():
    write("b.txt", "unlike the others")
    out = output("a.jsonl b.txt --dedup --held-out 0.2 --shard-tokens 3000 --json s.json")
    splits = open_dataset(Path("d")).splits
    assert "dataset     d, tokenizer bytes, vocabulary 256" in out
    for name in ("train", "validation"):
        found = splits[name]
        assert f"{name:<12}{found.num_documents} documents, {found.num_tokens:,} tokens in " in out
    assert f"left out    {60 - len(set(TEXTS))} x duplicate" in out
    assert splits["train"].num_documents + splits["validation"].num_documents == len(set(TEXTS)) + 1
    assert json.loads(Path("s.json").read_text())["inputs"]["files"] == 2


def test_a_finished_dataset_is_left_as_it_is():
    command = f"a.jsonl --tokenizer {write_bpe()} --dedup"
    output(command)
    before = contents("d")
    stamp = Path("d/dataset.json").stat().st_mtime_ns
    write("d/journal.json", b"left over")
    write("d/dataset.json.partial", b"left over")
    assert "is finished; there is nothing to do" in output(f"{command} --on-error skip")
    assert contents("d") == before
    assert Path("d/dataset.json").stat().st_mtime_ns == stamp


def test_another_command_on_a_finished_dataset_is_refused():
    output("a.jsonl")
    before = contents("d")
    error = refusal("a.jsonl --held-out 0.5 --dedup")
    assert "holds a dataset that differs from this command (there -> here):" in error
    assert "  held_out: 0.01 -> 0.5\n  dedup: False -> True\n--overwrite starts over" in error
    assert "  inputs: [" in refusal("a.jsonl a.jsonl")
    os.utime("a.jsonl", ns=(1, 1))
    assert " bytes, modified at 1 ns\n" in refusal("a.jsonl"), "of the same size"
    size = Path("a.jsonl").stat().st_size
    write("a.jsonl", [*TEXTS, "more"])
    assert f"  a.jsonl: {size:,} bytes, modified at " in refusal("a.jsonl")
    assert contents("d") == before
    write("d/notes.txt", "mine")
    assert dataset("a.jsonl --overwrite --held-out 0").splits["train"].num_documents == 61
    assert Path("d/notes.txt").exists()


def test_another_tokenizer_is_refused_and_the_same_elsewhere_is_not():
    write_bpe("u", size=301)
    output(f"a.jsonl --tokenizer {write_bpe()}")
    write("moved.json", Path("t/tokenizer.json").read_bytes())
    output("a.jsonl --tokenizer moved.json")
    error = refusal("a.jsonl --tokenizer u/tokenizer.json")
    assert "tokenizer.sha256: " in error
    assert "tokenizer.vocab_size: 300 -> 301" in error


def test_end_tokens_are_named_or_left_out():
    ended = dataset(f"a.jsonl --tokenizer {write_bpe(end='<end>')} --eos '<end>' --held-out 0")
    split = ended.splits["train"]
    assert {split.document(i)[-1] for i in range(60)} == {ended.tokenizer.eos_id}
    plain = dataset("a.jsonl --tokenizer d/tokenizer.json --no-eos --held-out 0 --out e")
    assert plain.tokenizer.eos_id is None
    assert plain.splits["train"].num_tokens == split.num_tokens - 60
    assert decoded(plain) == decoded(ended) == [text.encode() for text in TEXTS]


def test_inputs_without_a_document_are_refused():
    write("a.jsonl", ["", ""])
    assert "no document in 1 files; left out: 2 x empty document" in refusal("a.jsonl")


def test_documents_of_which_a_tokenizer_makes_no_token_are_left_out():
    write("w/tokenizer.json", Tokenizer(models.BPE({"a": 0}, [])).to_str())
    write("a.jsonl", ["a", "b"])
    write("b.jsonl", [{"prompt": "a", "chosen": "a", "rejected": text} for text in ("aa", "b")])
    for line in ("a.jsonl", "b.jsonl --preference --out e"):
        assert "left out    1 x empty document" in output(f"{line} --tokenizer w --no-eos")


def test_folders_with_other_files_are_left_alone():
    write("mine/thesis.txt", "x")
    for flags in ("", "--overwrite"):
        error = refusal(f"a.jsonl --out mine {flags}")
        assert "mine holds other files (thesis.txt) and no dataset" in error
    assert contents("mine") == {"thesis.txt": b"x"}


def test_a_second_command_on_the_folder_is_refused():
    Path("d").mkdir()
    descriptor = os.open("d", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    error = refusal("a.jsonl")
    os.close(descriptor)
    assert "d is being written by another command" in error
    output("a.jsonl")


@pytest.mark.usefixtures("small_batches")
def test_a_command_that_a_bad_file_stopped_resumes_when_it_is_corrected():
    for i, text in enumerate(TEXTS):
        write(f"in/{i:02}.txt", text)
    write("in/40.txt", b"\xff")
    error = refusal("in --dedup")
    assert "40.txt: not UTF-8" in error
    assert f"{len(set(TEXTS[:40]))} documents before it are done" in error
    write("in/40.txt", "mended")
    write("in/60.txt", "added")
    assert "resuming after 40 of 61 inputs" in output("in --dedup")
    assert_same_as_undisturbed("in --dedup")


def test_what_was_read_must_not_change_under_an_unfinished_dataset():
    write("a.txt", "a")
    write("b.txt", "b")
    write("c.txt", b"\xff")
    inputs = "a.txt b.txt c.txt"
    refusal(inputs)
    assert "holds an unfinished dataset that differs from this command" in refusal(
        f"{inputs} --held-out 0.3"
    )
    write("b.txt", "other")
    assert "b.txt: 1 bytes, modified at " in refusal(inputs)
    assert documents(f"{inputs} --on-error skip") == ["a", "other"]


@pytest.mark.usefixtures("small_batches")
def test_a_file_of_many_bad_rows_is_not_read_whole_to_be_refused(monkeypatch):
    monkeypatch.setattr(batches, "FEW", 10)
    write("a.json", json.dumps([{"text": "a"}, *[{}] * 1000]))
    rows = []
    read = batches.read_source

    def counted(*arguments):
        for event in read(*arguments):
            rows.append(event)
            yield event

    monkeypatch.setattr(batches, "read_source", counted)
    assert "a.json, row 2: no field 'text'" in refusal("a.json")
    assert len(rows) < 30
    output("a.json --on-error skip")
    assert len(rows) > 1000


@pytest.mark.parametrize(
    "name",
    [
        "journal.json",
        "train-00000.tokens",
        "train-00000.documents",
        "tokenizer.json",
        "seen.sha256",
    ],
)
def test_a_damaged_unfinished_dataset_is_refused(name):
    write_bpe()
    write("b.jsonl", [*TEXTS, {"bad": 1}])
    command = "b.jsonl --tokenizer t/tokenizer.json --dedup --shard-tokens 900"
    refusal(command)
    write(f"d/{name}", Path(f"d/{name}").read_bytes()[:-3])
    error = refusal(command)
    assert f"{name}: damaged, so the command cannot resume: " in error
    assert "--overwrite starts over" in error
    output(f"{command} --overwrite --on-error skip")


@pytest.mark.journey
def test_on_a_full_disk_the_command_ends_with_an_error_and_resumes():
    """A limit on the size of files stands in for it."""
    write("a.jsonl", [text * 20 for text in TEXTS])
    limited = (
        "import resource, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)); "
        "runpy.run_module('jaxtp.data.prepare', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", limited, "a.jsonl", "--out=d"]
    full = run_program(*command)
    assert full.returncode == 2, full.stderr
    assert "unclosed file" not in full.stderr
    assert full.stderr.startswith("jaxtp prepare: error: ")
    assert "File too large; fix this, and the same command resumes" in full.stderr
    output("a.jsonl")
    assert_same_as_undisturbed("a.jsonl")


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize(
    ("command", "item"),
    [
        ("a.jsonl --save-seconds 0", 14),
        ("pairs.parquet --preference --shard-tokens 900 --held-out 0.2 --save-seconds 0", 21),
    ],
    ids=["texts", "pairs"],
)
def test_an_interrupted_command_resumes_from_what_was_saved(monkeypatch, command, item):
    answers = [text for text in TEXTS[:40] if text.strip()]
    write(
        "pairs.parquet",
        [{"prompt": "", "chosen": text, "rejected": f"no {text}"} for text in answers],
    )
    encode = ByteTokenizer.encode_batch
    calls = iter(range(item))

    def interrupted(self, some):
        if next(calls) == item // 7:
            signal.raise_signal(signal.SIGINT)
        return encode(self, some)

    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "encode_batch", interrupted)
        code, _, error = run(command)
    assert code == 130
    assert "the same command, without --overwrite, resumes" in error
    assert f"resuming after 0 of 1 inputs, item {item} of the next" in output(command)
    assert_same_as_undisturbed(command)


def test_verify_finds_changed_and_cut_files():
    output(f"a.jsonl --tokenizer {write_bpe()}")
    assert "no problems" in output("--verify d")
    write("d/tokenizer.json", Path("d/tokenizer.json").read_bytes().replace(b"the", b"teh", 1))
    code, out, _ = run("--verify d")
    assert (code, "tokenizer.json: its sha256 is " in out) == (1, True)
    write("d/train-00000.tokens", b"short")
    code, out, _ = run("--verify d")
    assert (code, "train-00000.tokens: damaged: cut short" in out) == (1, True)


def test_a_first_command_that_failed_can_be_corrected():
    write("a.jsonl", '{"content": "one"}\n{"content": "two"}\n')
    refusal("a.jsonl")
    out = output("a.jsonl --field content")
    assert "nothing is held out: so few documents need a larger --held-out" in out


def test_overwrite_does_not_delete_what_the_command_reads():
    write("a.txt", "some text " * 50)
    output(f"a.txt --held-out 0 --tokenizer {write_bpe()}")
    error = refusal("a.txt --held-out 0 --overwrite --tokenizer d/tokenizer.json")
    assert "--overwrite would delete d/tokenizer.json" in error
    assert Path("d/tokenizer.json").exists()


def test_a_finished_dataset_that_lost_tokens_is_not_finished():
    output(f"{write('a.txt', 'some text')} --held-out 0")
    write("d/train-00000.tokens", b"some")
    assert "cut short: 4 bytes of 9; --overwrite starts over" in refusal("a.txt --held-out 0")
