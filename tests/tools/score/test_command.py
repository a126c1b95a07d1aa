"""`jaxtp score`: the model's log-probabilities on every mesh, after kills too, and training with
them.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest
from corpora import jsonl, prepared, write
from evaluations import TEXTS
from flax import nnx
from numpy.testing import assert_allclose
from runs import contents, records
from support import assert_refused, swept
from tables import read_json, read_table
from tools.conftest import save_model

import jaxtp
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.data.samples import RowSettings, make_rows
from jaxtp.data.scores import SCORES, open_scores
from jaxtp.data.store import open_dataset
from jaxtp.tools.score import scoring
from jaxtp.tools.score.__main__ import main
from jaxtp.train.__main__ import main as train

TABLES = read_table(__file__)

LENGTH = ["--data.sequence-length=32"]


def run(*words):
    return main(list(map(str, words)))


def scored(data, model, out, *flags):
    assert run(data, "--model", model, f"--out={out}", *LENGTH, *flags) == 0
    return out


@pytest.fixture(scope="session")
def data(tmp_path_factory, tiny_model):
    """The folder of a dataset in several shards."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        {"prompt": text[: len(text) // 3], "completion": f"{text} {i}"}
        for i in range(4)
        for text in TEXTS
    ]
    fields = ["--prompt-field=prompt", "--completion-field=completion"]
    options = [f"--tokenizer={tiny_model}", "--no-eos", "--held-out", "0.2", "--shard-tokens=1000"]
    return prepared(folder / "data", jsonl(folder / "a.jsonl", rows), *fields, *options).folder


@pytest.fixture(scope="session")
def base(data, tiny_model, tmp_path_factory):
    """The folder of the log-probabilities of the model."""
    folder = tmp_path_factory.mktemp("scores")
    return scored(data, tiny_model, folder / "base")


@pytest.fixture(scope="session")
def log_probs(tiny_model):
    """Returns a function that computes all log-probabilities of rows on one device."""
    mesh = jaxtp.make_mesh(devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = jaxtp.hf.load(tiny_model)

    @nnx.jit
    def compute(model, ids, segments, temperature):
        return jax.nn.log_softmax(model(ids, segments=segments) / temperature)

    def of_rows(rows, temperature):
        columns = jax.tree.map(lambda *arrays: np.stack(arrays), *rows)
        with jax.set_mesh(mesh):
            return np.asarray(compute(model, columns["inputs"], columns.get(SEGMENTS), temperature))

    return of_rows


def assert_scores(log_probs, data, out, temperature=1.0, **settings):
    scores = open_scores(out)
    assert_row = assert_log_probs if scores.record.top_k is None else assert_top_log_probs
    for split in open_dataset(data).splits.values():
        rows = list(make_rows(split, RowSettings(32, 300, **settings), scores))[:2]
        for row, expected in zip(rows, log_probs(rows, temperature), strict=True):
            assert_row(row, expected, row["labels"] != IGNORE)


def assert_log_probs(row, expected, has_label):
    labels = np.where(has_label, row["labels"], 0)
    of_labels = expected[np.arange(len(labels)), labels]
    assert_allclose(row["log_probs"], np.where(has_label, of_labels, 0), atol=1e-5)


def assert_top_log_probs(row, expected, has_label):
    found = row["top_log_probs"]
    best = -np.sort(-expected, axis=1)[:, : found.shape[1]]
    for each in (found, np.take_along_axis(expected, row["top_ids"], 1)):
        assert_allclose(each[has_label], best[has_label], atol=1e-5)
    assert not row["top_ids"][~has_label].any()


@pytest.mark.wide
def test_scores_of_one_device_are_those_of_the_model(log_probs, data, base):
    assert_scores(log_probs, data, base)


ON_MESHES = TABLES["meshes"]


@swept("flags", ON_MESHES)
def test_a_mesh_scores_as_one_device(log_probs, data, tiny_model, tmp_path, flags):
    out = scored(data, tiny_model, tmp_path / "s", *flags.split())
    assert_scores(log_probs, data, out, **ON_MESHES[flags])


@pytest.mark.wide
def test_rows_that_cross_documents_and_shards(log_probs, tiny_model, tmp_path):
    options = [f"--tokenizer={tiny_model}", "--no-eos", "--held-out", "0.3", "--shard-tokens=100"]
    data = prepared(tmp_path / "data", jsonl(tmp_path / "a.jsonl", TEXTS * 3), *options).folder
    concatenated = ["--data.packing=concatenated", "--mesh=tp=2"]
    out = scored(data, tiny_model, tmp_path / "s", *concatenated)
    assert_scores(log_probs, data, out, packing="concatenated")


class Killed(BaseException):
    """In place of a kill."""


def finished(out):
    return read_json(out / SCORES)["finished"]["train"]


@pytest.mark.wide
def test_a_killed_command_resumes(data, tiny_model, base, tmp_path, monkeypatch, capsys):
    """It is killed when the scores of a batch are written, and their count is not yet."""
    out = tmp_path / "s"
    for saves, rows in ((1, 0), (1, 8), (0, 8)):
        killed = mock.Mock(
            wraps=scoring.write_atomically, side_effect=[mock.DEFAULT] * saves + [Killed]
        )
        with monkeypatch.context() as patch:
            patch.setattr(scoring, "SAVE_SECONDS", 0.0)
            patch.setattr(scoring, "write_atomically", killed)
            with pytest.raises(Killed):
                scored(data, tiny_model, out)
        assert finished(out) == rows
    assert run(data, "--model", tiny_model, f"--out={out}", "--data.sequence-length=16") == 2
    assert "sequence_length: 32 -> 16" in capsys.readouterr().err
    scored(data, tiny_model, out)
    assert "; 8 of them are done" in capsys.readouterr().err
    assert contents(out) == contents(base)
    before = (out / SCORES).stat().st_mtime_ns
    scored(data, tiny_model, out)
    assert (out / SCORES).stat().st_mtime_ns == before, "a finished folder stays as it is"
    assert "has these scores already, with the same checksums" in capsys.readouterr().err


@pytest.mark.wide
def test_ctrl_c_saves(data, tiny_model, base, tmp_path, monkeypatch):
    whole = scoring.write_atomically
    out = tmp_path / "s"

    def interrupted(path, content):
        whole(path, content)
        if finished(out) == 8:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "SAVE_SECONDS", 0.0)
        patch.setattr(scoring, "write_atomically", interrupted)
        assert run(data, "--model", tiny_model, f"--out={out}", *LENGTH) == 130
    assert finished(out) >= 8
    scored(data, tiny_model, out)
    assert contents(out) == contents(base)


@pytest.mark.journey
def test_two_processes(data, tiny_model, tmp_path):
    """Process 0 writes all scores."""
    launch = [
        "launch",
        "--processes=2",
        "--devices=2",
        "--logs",
        tmp_path / "logs",
        "--",
        "jaxtp",
    ]
    for out, before in (("two", launch), ("one", [])):
        flags = [
            data,
            "--model",
            tiny_model,
            *LENGTH,
            "--mesh=fsdp=2,tp=2",
            "--out",
            tmp_path / out,
        ]
        words = [sys.executable, "-m", "jaxtp", *before, "score", *flags]
        subprocess.run(list(map(str, words)), env=os.environ | {"XLA_FLAGS": ""}, check=True)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_mistakes_are_refused_before_weights_are_read(
    data, tiny_model, base, tmp_path, capsys, monkeypatch
):
    write(tmp_path / "other/mine.txt", "")
    of_bytes = prepared(tmp_path / "bytes", write(tmp_path / "a.txt", "bytes" * 100)).folder
    places = {
        "data": data,
        "base": base,
        "tmp": tmp_path,
        "of_bytes": of_bytes,
        "model": f"--model {tiny_model}",
        "out": f"--out {tmp_path}/s",
    }
    with monkeypatch.context() as patched:
        patched.setattr("jaxtp.generate.loading.load_folder", None)
        for words, message in TABLES["refused"].items():
            assert_refused(main, [*LENGTH, *words.format(**places).split()], message, capsys)
    assert not (tmp_path / "s").exists()
    full = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(scoring.shutil, "disk_usage", lambda path: full)
    assert run(data, "--model", tiny_model, *LENGTH, "--out", tmp_path / "full") == 2
    error = capsys.readouterr().err
    assert re.search(r"the scores take [1-9][\d.]* [KM]B, and 5 B are free$", error, re.MULTILINE)


LOSS = """
import jax.numpy as jnp
from jaxtp.models.log_probs import token_log_probs

def loss(model, batch, key):
    found = token_log_probs(model, batch["inputs"], batch["labels"], segments=batch["segments"])
    count = jnp.sum(batch["labels"] != -100)
    apart = jnp.sum(jnp.abs(found - batch["log_probs"]))
    return -jnp.sum(found), count, {"apart": (apart, count)}
"""


@pytest.mark.wide
def test_a_run_reads_the_scores_of_its_initial_model(data, tiny_model, base, tmp_path, capsys):
    """Adapters are zero at first, so that the initial model is the one that was scored."""
    file = write(tmp_path / "mine.py", LOSS)
    other = save_model(tmp_path / "other", 1)
    flags = [
        f"--data.path={data}",
        *LENGTH,
        "--data.global-batch-size=4",
        "--train.log-every=1",
        "--mesh=fsdp=2,tp=2",
        "--train.loss",
        f"{file}:loss",
        "--model.lora.rank=2",
    ]

    def trained(model, scores, steps=2, folder="run"):
        places = [
            "--run.dir",
            tmp_path / folder,
            f"--model.from-hf={model}",
            f"--data.scores={scores}",
        ]
        return train(list(map(str, [*flags, *places, f"--train.steps={steps}"])))

    assert trained(other, base, folder="other_run") == 2
    assert "this run starts from other weights" in capsys.readouterr().err
    assert trained(tiny_model, base) == 0
    apart = records(tmp_path / "run", "apart")
    assert apart[1] < 1e-5 < apart[2]
    hotter = scored(data, tiny_model, tmp_path / "hotter", "--temperature=2")
    assert trained(tiny_model, hotter, steps=3) == 2
    assert "data: scores: " in capsys.readouterr().err
    assert trained(tiny_model, base, steps=3) == 0
