"""`jaxtp score`: the model's log-probabilities on every mesh, after kills too, and training with them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from evaluations import TEXTS
from flax import nnx
from runs import contents, records
from tools.score.conftest import save

import jaxtp
from jaxtp.config.entry import InterruptError
from jaxtp.data.rows import IGNORE, SEGMENTS
from jaxtp.data.samples import RowSettings, make_rows
from jaxtp.data.scores import JOURNAL, SCORES, open_scores
from jaxtp.data.store import open_dataset
from jaxtp.tools.score import scoring
from jaxtp.tools.score.__main__ import main
from jaxtp.train.__main__ import main as train

LENGTH = ["--data.sequence-length", "32"]


def scored(data, model, out, *flags):
    assert main([*map(str, [data, "--model", model, "--out", out, *LENGTH, *flags])]) == 0
    return out


@pytest.fixture(scope="session")
def base(data, model, tmp_path_factory):
    """Log-probabilities of the model."""
    folder = tmp_path_factory.mktemp("scores")
    out = scored(data, model, folder / "base", "--json", folder / "base.json")
    record = json.loads((folder / "base.json").read_text())
    assert record == {"folder": str(out)} | json.loads((out / SCORES).read_text())
    return out


@pytest.fixture(scope="session")
def decoder(model):
    """Returns all log-probabilities at each position of rows, by one device."""
    with jax.set_mesh(jaxtp.make_mesh(devices=jax.devices()[:1])):
        model = jaxtp.load_hf(model)

    @nnx.jit
    def run(model, ids, segments, temperature):
        return jax.nn.log_softmax(model(ids, segments) / temperature)

    def log_probs(rows, temperature):
        with jax.set_mesh(jaxtp.make_mesh(devices=jax.devices()[:1])):
            ids, segments = (
                np.stack([row[name] for row in rows]) if name in rows[0] else None for name in ("inputs", SEGMENTS)
            )
            return np.asarray(run(model, ids, segments, temperature))

    return log_probs


def check(decoder, data, out, settings=RowSettings(32, 300), temperature=1.0):
    scores = open_scores(out)
    for split in open_dataset(data).splits.values():
        rows = list(make_rows(split, settings, scores))[:8]
        for row, logps in zip(rows, decoder(rows, temperature), strict=True):
            has_label = row["labels"] != IGNORE
            if scores.record.top_k is None:
                wanted = np.take_along_axis(logps, np.maximum(row["labels"], 0)[:, None], 1)[:, 0]
                np.testing.assert_allclose(row["log_probs"], np.where(has_label, wanted, 0), atol=1e-5)
                continue
            wanted = -np.sort(-logps, axis=1)[:, : scores.record.top_k]
            for found in (row["top_log_probs"], np.take_along_axis(logps, row["top_ids"], 1)):
                np.testing.assert_allclose(found[has_label], wanted[has_label], atol=1e-5)
            assert not row["top_ids"][~has_label].any()


def test_one_device(decoder, data, base, tmp_path, capsys):
    check(decoder, data, base)
    assert not (base / JOURNAL).exists()
    assert main(["--verify", str(base), "--json", str(tmp_path / "verify.json")]) == 0
    assert capsys.readouterr().out == f"{base}: log-probabilities, no problems\n"
    assert json.loads((tmp_path / "verify.json").read_text()) == {"folder": str(base), "problems": []}


@pytest.mark.wide
@pytest.mark.parametrize(
    ("mesh", "flags"),
    [
        ("tp=2", []),
        ("tp=4", ["--top-k", 7]),
        ("fsdp=2,tp=2", ["--temperature", 2, "--batch-size", 3]),
        ("cp=2,tp=2", ["--top-k", 300]),
        ("dp=2,cp=2", ["--data.long-documents", "drop"]),
    ],
)
def test_meshes(decoder, data, model, tmp_path, mesh, flags):
    out = scored(data, model, tmp_path / "s", "--mesh", mesh, *flags)
    settings = RowSettings(32, 300, long_documents="drop" if "drop" in flags else "split")
    check(decoder, data, out, settings, temperature=2.0 if "--temperature" in flags else 1.0)
    assert main(["--verify", str(out)]) == 0


@pytest.mark.wide
def test_concatenated(decoder, model, tmp_path):
    """Rows that cross documents and shards."""
    from corpora import jsonl, prepared

    options = ["--tokenizer", model, "--no-eos", "--held-out", "0.3", "--shard-tokens", "100"]
    data = prepared(tmp_path / "data", jsonl(tmp_path / "a.jsonl", TEXTS * 3), *options).folder
    out = scored(data, model, tmp_path / "s", "--data.packing", "concatenated", "--mesh", "tp=2")
    check(decoder, data, out, RowSettings(32, 300, "concatenated"))


class Killed(BaseException):
    """In place of a kill."""


def test_a_killed_command_resumes(data, model, base, tmp_path, monkeypatch, capsys):
    write, calls = scoring._Writer.write, []

    def kill(writer, split, first, found):
        calls.append((split, first))
        if len(calls) in (1, 3, 4):
            write(writer, split, first, {name: array * 3 for name, array in found.items()})  # written, and not saved
            raise Killed
        monkeypatch.setattr(scoring, "SAVE_SECONDS", 0.0)
        write(writer, split, first, found)
        monkeypatch.setattr(scoring, "SAVE_SECONDS", 15.0)

    monkeypatch.setattr(scoring._Writer, "write", kill)
    out = tmp_path / "s"
    for _ in range(3):
        with pytest.raises(Killed):
            scored(data, model, out)
    assert calls == [("train", 0), ("train", 0), ("train", 8), ("train", 8)]
    assert main(["--verify", str(out)]) == 2
    assert "this command finishes them: jaxtp score" in capsys.readouterr().err
    assert main([*map(str, [data, "--model", model, "--out", out, "--data.sequence-length", 16])]) == 2
    assert "sequence_length: 32 -> 16" in capsys.readouterr().err
    scored(data, model, out)
    assert "; 8 of them are done" in capsys.readouterr().err
    ours, theirs = contents(out), contents(base)
    assert ours == theirs
    before = (out / SCORES).stat().st_mtime_ns
    scored(data, model, out)
    assert (out / SCORES).stat().st_mtime_ns == before, "a finished folder stays as it is"


@pytest.mark.wide
def test_kill_9(data, model, base, tmp_path):
    code = "import sys, jaxtp.tools.score.scoring as s; s.SAVE_SECONDS = 0; from jaxtp.tools.score.__main__ import main"
    flags = [*map(str, [data, "--model", model, "--out", tmp_path / "s", *LENGTH])]
    slow = "import time; w = s._Writer.write; s._Writer.write = lambda *a: (w(*a), time.sleep(1))"
    process = subprocess.Popen([sys.executable, "-c", f"{code}; {slow}; main(sys.argv[1:])", *flags])
    journal, until = tmp_path / "s" / JOURNAL, time.monotonic() + 200
    while not (journal.exists() and json.loads(journal.read_text())["rows"]["train"]):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    scored(data, model, tmp_path / "s")
    assert contents(tmp_path / "s") == contents(base)


@pytest.mark.wide
def test_ctrl_c_saves(data, model, base, tmp_path, monkeypatch):
    checks = []

    def check(found):
        if checks:
            raise InterruptError
        checks.append(found)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "_check_finite", check)
        assert main([*map(str, [data, "--model", model, "--out", tmp_path / "s", *LENGTH])]) == 130
    assert json.loads((tmp_path / "s" / JOURNAL).read_text())["rows"]["train"] == 8
    scored(data, model, tmp_path / "s")
    assert contents(tmp_path / "s") == contents(base)


@pytest.mark.journey
def test_two_processes(data, model, base, tmp_path):
    """Process 0 writes all scores."""
    flags = [*map(str, [data, "--model", model, *LENGTH, "--mesh", "fsdp=2,tp=2", "--out"])]
    launch = ["launch", "--processes", "2", "--devices", "2", "--logs", str(tmp_path / "logs"), "--", "jaxtp", "score"]
    command = [sys.executable, "-m", "jaxtp", *launch, *flags, str(tmp_path / "two")]
    assert subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}).returncode == 0
    command = [sys.executable, "-m", "jaxtp", "score", *flags, str(tmp_path / "one")]
    assert subprocess.run(command, env=os.environ | {"XLA_FLAGS": ""}).returncode == 0
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def refused(capsys, *argv):
    capsys.readouterr()
    assert main([*map(str, argv)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxtp score: error: ")
    assert error.count("error") == 1, "and no weights are read"
    return error


def test_refused(data, model, base, tmp_path, capsys, monkeypatch):
    given = [data, "--model", model, *LENGTH]
    assert "name a folder for the scores by --out DIR" in refused(capsys, *given)
    out = ["--out", tmp_path / "s"]
    assert "--top-k 301: " in (error := refused(capsys, *given, *out, "--top-k", 301))
    assert "has 300 tokens" in error
    assert "not divisible by mesh.cp=2; cp can be 1, 3" in refused(capsys, *given[:-1], 33, *out, "--mesh", "cp=2")
    full = shutil.disk_usage(tmp_path)._replace(free=5)
    monkeypatch.setattr(scoring.shutil, "disk_usage", lambda path: full)
    assert main([*map(str, [*given, "--out", tmp_path / "full"])]) == 2
    too_small = capsys.readouterr().err
    assert re.search(r"the scores take [1-9][\d.]* [KM]B, and 5 B are free$", too_small, re.MULTILINE)
    monkeypatch.undo()
    assert "no such folder" in refused(capsys, data, "--model", tmp_path / "nowhere", *LENGTH, *out)
    assert "top_k: None -> 5" in refused(capsys, *given, "--out", base, "--top-k", 5)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("")
    assert "holds other files (mine.txt) and no scores" in refused(capsys, *given, "--out", tmp_path / "other")
    (tmp_path / "a.txt").write_text("bytes" * 100)
    from corpora import prepared

    of_bytes = prepared(tmp_path / "bytes", tmp_path / "a.txt").folder
    assert "was made with tokenizer bytes" in refused(capsys, of_bytes, *given[1:], *out)
    assert not (tmp_path / "s").exists()


LOSS = """
import jax.numpy as jnp
from jaxtp.models.log_probs import token_log_probs

def loss(model, batch, key):
    found = token_log_probs(model, batch["inputs"], batch["labels"], batch["segments"])
    count = jnp.sum(batch["labels"] != -100)
    apart = jnp.sum(jnp.abs(found - batch["log_probs"]))
    return -jnp.sum(found), count, {"apart": (apart, count)}
"""


@pytest.mark.wide
@pytest.mark.parametrize("lora", [[], ["--model.lora.rank", "2"]])
def test_a_run_reads_the_scores_of_its_initial_model(data, model, base, tmp_path, capsys, lora):
    (tmp_path / "mine.py").write_text(LOSS)
    other = save(tmp_path / "other", 1)
    flags = ["--data.path", data, *LENGTH, "--data.global-batch-size", 4, "--mesh", "fsdp=2,tp=2", "--train.steps", 2]
    flags += ["--data.scores", base, "--train.loss", f"{tmp_path}/mine.py:loss", "--train.log-every", 1, *lora]
    assert train([*map(str, [*flags, "--run.dir", tmp_path / "other_run", "--model.from-hf", other])]) == 2
    assert "this run starts from other weights" in capsys.readouterr().err
    ours = [*flags, "--run.dir", tmp_path / "run", "--model.from-hf", model]
    assert train([*map(str, ours)]) == 0
    apart = records(tmp_path / "run", "apart")
    assert apart[1] < 1e-5 < apart[2]
    again = scored(data, model, tmp_path / "hotter", "--temperature", 2)
    assert train([*map(str, [*ours, "--train.steps", 3, "--data.scores", again])]) == 2
    assert "data: scores: " in capsys.readouterr().err
    assert train([*map(str, [*ours, "--train.steps", 3])]) == 0
