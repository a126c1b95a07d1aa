"""Folders that a session makes once, for all of its workers: a dataset, a tokenizer, a run and its
export.

Tests read them, and copy what they change.
"""

import fcntl
import json
import os
import shutil

import pytest
from runs import TEXT
from tables import read_table

from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.train.__main__ import main as train

TABLES = read_table(__file__)
TINY_MODEL = TABLES["tiny model"]
TINY_RUN = TABLES["tiny run"]


def words_of(flags):
    """Returns the words of a command line, from its flags by name."""
    words = []
    for name, value in flags.items():
        words += [name, str(value)]
    return words


def made_once(tmp_path_factory, name, make):
    """Returns a folder that `make(folder)` fills, once for all workers of a session."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder = base / "made_once" / name
    folder.parent.mkdir(exist_ok=True)
    done = folder.with_suffix(".done")
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            # A worker that failed here may have left a part.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="session")
def byte_dataset(tmp_path_factory):
    """A dataset of 2,000 short documents whose tokens are bytes, with a validation split."""

    def make(folder):
        text = folder / "lines.jsonl"
        rows = [json.dumps({"text": line}) for line in TEXT.splitlines()]
        text.write_text("\n".join(rows))
        assert prepare([str(text), "--held-out=0.1", f"--out={folder}/data"]) == 0

    return made_once(tmp_path_factory, "byte_dataset", make) / "data"


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory, byte_dataset):
    """A run of four steps of a model of one layer on `byte_dataset`, with checkpoints of steps 2
    and 4.
    """

    def make(folder):
        places = {"--data.path": byte_dataset, "--run.dir": folder / "run"}
        assert train(words_of(TINY_MODEL | TINY_RUN | places)) == 0

    return made_once(tmp_path_factory, "tiny_run", make) / "run"


@pytest.fixture(scope="session")
def tiny_export(tmp_path_factory, tiny_run):
    """The folder for Hugging Face of `tiny_run`."""

    def make(folder):
        assert convert(["export", str(tiny_run), str(folder / "model")]) == 0

    return made_once(tmp_path_factory, "tiny_export", make) / "model"
