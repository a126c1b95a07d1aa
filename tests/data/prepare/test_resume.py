"""Killed at random instants and given again, the command makes what it makes undisturbed, byte for byte."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import jsonl, parquet, prepared, texts
from runs import contents
from structures import plant
from support import journeys

from jaxtp.data.prepare import batches, run
from jaxtp.data.prepare.__main__ import main

KILLER = Path(__file__).parent.parent.parent / "killer.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """All formats, with bad lines and files among them."""
    root = tmp_path_factory.mktemp("inputs")
    jsonl(root / "a.jsonl.gz", [*texts(400, seed=1), {"bad": 1}, *texts(200, seed=2)])
    parquet(root / "b.parquet", texts(300, seed=1))
    jsonl(root / "c.jsonl.zst", texts(300, seed=3))
    (root / "d.jsonl.gz").write_bytes((root / "a.jsonl.gz").read_bytes()[:-1000])
    for i, text in enumerate(texts(100, seed=4)):
        (root / f"e{i:03}.txt").write_bytes(text.encode() if i % 9 else b"\xff")
    return root


BPE = ["--train-bpe", "300"]


@pytest.mark.parametrize("flags", journeys([[], ["--dedup"], [*BPE, "--dedup"]], [*BPE, "--dedup"]), ids=str)
def test_killed_and_resumed_to_the_byte(inputs, tmp_path, flags):
    command = [str(inputs), *flags, "--on-error", "skip", "--shard-tokens", "4000", "--held-out", "0.1"]
    whole = prepared(tmp_path / "whole", *command)
    assert len(list(whole.folder.glob("train-*.tokens"))) > 3
    killer = [sys.executable, str(KILLER), "4", "10", str(tmp_path / "killed"), *command]
    run = subprocess.run(killer, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout.split()[-1]) >= 3, run.stdout
    assert "resuming after" in run.stdout
    assert contents(tmp_path / "killed") == contents(whole.folder)


@pytest.mark.parametrize("pairs", journeys([False, True], True))
def test_ended_at_each_moment_in_turn_and_resumed_to_the_byte(inputs, tmp_path, monkeypatch, pairs):
    """At the first, second, third ... time that something is brought to the disk, until none is left to end at."""
    monkeypatch.setattr(batches, "BATCH_DOCUMENTS", 300)
    files = [str(inputs / "b.parquet"), str(inputs / "c.jsonl.zst")]
    command = [*files, "--dedup", "--train-bpe", "300", "--shard-tokens", "20000", "--save-seconds", "0"]
    if pairs:
        rows = [{"prompt": "", "chosen": text, "rejected": f"no {text}"} for text in texts(700)]
        file = jsonl(tmp_path / "a.jsonl", [row for row in rows if row["chosen"].strip()])
        command = [str(file), "--preference", "--dedup", "--shard-tokens", "60000", "--save-seconds", "0"]
    whole = contents(prepared(tmp_path / "whole", *command).folder)
    real = os.fsync
    moment = 0
    while True:
        moment += 1
        left = [moment]

        def fsync(descriptor, left=left):
            real(descriptor)
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

        out = tmp_path / str(moment)
        monkeypatch.setattr(os, "fsync", fsync)
        code = main([*command, "--out", str(out)])
        monkeypatch.setattr(os, "fsync", real)
        if code == 0:
            break
        assert code == 130
        assert contents(prepared(out, *command).folder) == whole
    assert moment > 20


@pytest.mark.journey
def test_ends_in_silence_when_nobody_reads_its_output_and_can_go_on(inputs, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    flags = [str(inputs), "--on-error", "skip", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "jaxtp", "prepare", *flags]
    with os.fdopen(writing) as nobody:
        ended = subprocess.run(command, stdout=nobody, stderr=subprocess.PIPE, timeout=120)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert (tmp_path / "out/dataset.json").exists()


@pytest.mark.parametrize("name", ["seen.sha256", "train-00000.tokens", "train-00000.documents", "inputs.jsonl"])
def test_an_unfinished_dataset_of_someone_else_leads_to_no_other_file(name, tmp_path, capsys):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "text.txt").write_text("some words\n")
    command = [str(tmp_path / "text.txt"), "--dedup", "--out", str(tmp_path / "shared")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "batches", stop)
        with pytest.raises(KeyError):
            main(command)
    plant(tmp_path / "shared" / name, "link to another file")
    code = main(command)
    assert code in (0, 2)
    if code:
        assert f"{name}: " in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"


def stop(*_):
    raise KeyError
