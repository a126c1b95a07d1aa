"""`jaxtp checkpoint rows`: the documents in a step's batch are those that its rows were made of."""

import json
from pathlib import Path

import numpy as np
import pytest
from quick_run import QUICK
from runs import mesh
from support import assert_refused
from tables import read_json, write_json

from jaxtp.checkpoint.__main__ import main as checkpoint
from jaxtp.data.corpus import load_corpus
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.data.samples import Data, RowSettings
from jaxtp.train.__main__ import main as train


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Inputs of two datasets in the current folder, and the commands that prepare them."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"{i} " + "abc " * (i % 17)}) for i in range(1, 60)]
    Path("a.jsonl").write_text("\n\n".join(lines) + "\n")
    Path("b.txt").write_text("some longer text " * 40)
    commands = [
        ["a.jsonl", "b.txt", "--out=da", "--held-out=0.1", "--shard-tokens=700"],
        ["b.txt", "--out=db", "--held-out=0"],
    ]
    for command in commands:
        assert prepare(command) == 0
    return commands


def texts_of(record):
    """The text of each row, from the inputs that the record names."""
    for pieces in record["rows"]:
        text = b""
        for piece in pieces:
            content = Path(piece["file"]).read_text()
            if piece["file"].endswith(".jsonl"):
                content = json.loads(content.split("\n")[piece["line"] - 1])["text"]
            text += content.encode()[piece["start"] : piece["stop"]]
        yield text


@pytest.mark.parametrize(
    "packing",
    [
        pytest.param("documents", marks=pytest.mark.journey),
        pytest.param("concatenated", marks=pytest.mark.wide),
    ],
)
def test_rows_are_those_of_the_step_also_after_a_resume_with_larger_batches(
    commands, packing, capsys
):
    mixture = {"da": 0.7, "db": 0.3}
    write_json(Path("m.yaml"), {"data": {"mixture": mixture, "packing": packing}})
    flags = [*QUICK, "--config=m.yaml", "--eval.every=0", "--run.dir=r"]
    sizes = ["--data.global-batch-size=4", "--train.steps=2"]
    assert train([*flags, *mesh(1, 2, 1), *sizes]) == 0
    assert train([*flags, *mesh(1, 1, 2), "--train.steps=5"]) == 0

    data = Data(load_corpus(None, mixture), RowSettings(32, 256, packing), seed=0)
    first = 0
    files = set()
    for step, size in enumerate((4, 4, 8, 8, 8), start=1):
        assert checkpoint(["rows", "r", f"--step={step}", "--json=rows.json"]) == 0
        record = read_json(Path("rows.json"))
        assert record["first_sample"] == first
        assert len(record["rows"]) == size
        for sample, text in enumerate(texts_of(record), start=first):
            np.testing.assert_array_equal(
                data.train[sample]["inputs"][: len(text)], np.frombuffer(text, np.uint8)
            )
            assert not data.train[sample]["inputs"][len(text) :].any()
        files |= {piece["file"] for pieces in record["rows"] for piece in pieces}
        first += size
    assert files == {"a.jsonl", "b.txt"}
    shown = capsys.readouterr().out
    assert "step 5 of r: samples 24 to 31 of the run" in shown
    piece = record["rows"][0][0]
    assert f"{piece['file']}, line {piece['line']}" in shown
    assert_refused(
        checkpoint, ["rows", "r", "--step=6"], "--step 6: the last step of r is 5", capsys
    )

    for name in ("da", "db"):
        as_of_an_older_version(Path(name))
    command = "jaxtp prepare a.jsonl b.txt --out da --overwrite"
    if piece["document"].startswith("db"):
        command = "jaxtp prepare b.txt --out db --overwrite"
    assert_refused(checkpoint, ["rows", "r", "--step=5"], command, capsys)
    for arguments in commands:
        assert prepare([*arguments, "--overwrite"]) == 0
    assert checkpoint(["rows", "r", "--step=5", "--json=again.json"]) == 0
    assert read_json(Path("again.json")) == record
    Path("b.txt").write_text("another text " * 60)
    assert prepare([*commands[1], "--overwrite"]) == 0
    assert_refused(checkpoint, ["rows", "r", "--step=5"], "is not the data of r", capsys)


def as_of_an_older_version(folder):
    """Takes the lines of documents out of a dataset."""
    manifest = read_json(folder / "dataset.json")
    for split in manifest["splits"].values():
        for shard in split["shards"]:
            del shard["sha256"]["origins"]
    write_json(folder / "dataset.json", manifest)
    for path in folder.glob("*.origins"):
        path.unlink()


def test_a_dataset_that_an_older_version_began_is_finished_without_lines(commands):
    write_json(Path("a.json"), [{"text": "first"}, {"bad": 1}, {"text": "second"}])
    assert prepare(["a.json", "--out=d"]) == 2
    journal = read_json(Path("d/journal.json"))
    del journal["has_origins"]
    write_json(Path("d/journal.json"), journal)
    Path("d/train-00000.origins").unlink()
    assert prepare(["a.json", "--out=d", "--on-error=skip"]) == 0
    assert not any(Path("d").glob("*.origins"))
    assert prepare(["--verify=d"]) == 0
