"""Killed at random instants and given again, the command makes what it makes undisturbed, byte
for byte.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import output, refusal, run, texts, write, write_bpe
from runs import contents, run_program
from structures import plant
from support import journeys

from jaxtp.data.prepare import batches

KILLER = Path(__file__).parent.parent.parent / "killer.py"


@pytest.fixture
def inputs():
    """All formats, with bad lines and files among them, and a tokenizer."""
    write_bpe()
    path = write("in/a.jsonl.gz", [*texts(240, seed=1), {"bad": 1}, *texts(120, seed=2)])
    write("in/b.parquet", texts(180, seed=1))
    write("in/c.jsonl.zst", texts(180, seed=3))
    write("in/d.jsonl.gz", path.read_bytes()[:-600])
    for i, text in enumerate(texts(60, seed=4)):
        write(f"in/e{i:03}.txt", text.encode() if i % 9 else b"\xff")


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize(
    "flags", journeys(["", "--dedup", "--tokenizer t --dedup"], "--tokenizer t --dedup")
)
def test_a_killed_command_resumes_to_the_byte(flags):
    command = f"in {flags} --on-error skip --shard-tokens 4000 --held-out 0.1"
    output(command)
    assert len(list(Path("d").glob("train-*.tokens"))) > 3
    killer = [sys.executable, str(KILLER), "4", "10", "killed", *command.split()]
    process = run_program(*killer)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout.split()[-1]) >= 3, process.stdout
    assert "resuming after" in process.stdout
    assert contents("killed") == contents("d")


PAIRS = "a.jsonl --preference --dedup --shard-tokens 30000 --save-seconds 0"
TEXTS = "in/b.parquet in/c.jsonl.zst --dedup --tokenizer t --shard-tokens 10000 --save-seconds 0"


@pytest.mark.usefixtures("inputs")
@pytest.mark.parametrize("command", journeys([TEXTS, PAIRS], PAIRS), ids=["texts", "pairs"])
def test_a_command_that_ends_at_any_write_resumes_to_the_byte(monkeypatch, command):
    """At the first, second, third ... time that something is brought to the disk, until none is
    left to end at.
    """
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 150)
    answers = [text for text in texts(420) if text.strip()]
    write("a.jsonl", [{"prompt": "", "chosen": text, "rejected": f"no {text}"} for text in answers])
    output(command)
    whole = contents("d")
    moment = 0
    while ends_at(moment, f"{command} --out {moment}"):
        output(f"{command} --out {moment}")
        assert contents(str(moment)) == whole
        moment += 1
    assert moment > 20


def ends_at(moment, line):
    """Interrupts a command when it brings something to the disk for this time; whether it did."""
    real = os.fsync
    times = iter(range(10**6))

    def fsync(descriptor):
        real(descriptor)
        if next(times) == moment:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        code, _, _ = run(line)
    assert code in (0, 130)
    return code == 130


@pytest.mark.journey
@pytest.mark.usefixtures("inputs")
def test_a_command_whose_output_nobody_reads_ends_in_silence_and_resumes():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "jaxtp", "prepare", "in", "--on-error=skip", "--out=d"]
    with os.fdopen(writing) as nobody:
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
    output("in --on-error skip")
    assert Path("d/dataset.json").exists()


@pytest.mark.parametrize(
    "name", ["seen.sha256", "train-00000.tokens", "train-00000.documents", "inputs.jsonl"]
)
def test_a_link_in_an_unfinished_dataset_leads_to_no_other_file(name):
    write("victim", "precious")
    write("text.jsonl", ["some words", {"bad": 1}])
    refusal("text.jsonl --dedup")
    plant(Path("d") / name, "link to another file")
    code, _, error = run("text.jsonl --dedup --on-error skip")
    assert code == 0 or (code == 2 and f"{name}: " in error)
    assert Path("victim").read_text() == "precious"
