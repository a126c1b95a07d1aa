"""Checkpoints at a URL, for processes without a common disk."""

import os
import signal
import subprocess
import sys
import time
from urllib.parse import unquote

import numpy as np
import orbax.checkpoint as ocp
import pytest
from mirror_failures import no_fault
from numpy.testing import assert_array_equal
from quick_run import quick_flags, start_together
from runs import contents, records, wait_until
from small_state import small_state, weight_of

from jaxtp.checkpoint import ownership
from jaxtp.checkpoint.__main__ import main as command_checkpoint
from jaxtp.checkpoint.at_url import UrlCheckpoints
from jaxtp.checkpoint.manager import Checkpoints, restore_newest
from jaxtp.checkpoint.mirror import Mirror
from jaxtp.checkpoint.ownership import TakenOverError
from jaxtp.checkpoint.storage import newest_checkpoint
from jaxtp.config.entry import MISTAKE, UserError
from jaxtp.config.schema import ConfigError
from jaxtp.data.copies import local
from jaxtp.data.object_store import ObjectStore
from jaxtp.hf.runs import hf_files_of
from jaxtp.mesh import make_mesh
from jaxtp.train.__main__ import main

pytestmark = [pytest.mark.journey, pytest.mark.usefixtures("short_silence")]
MESH = make_mesh()
PROGRAM = """
from jaxtp.checkpoint import ownership
ownership.BEAT_SECONDS = 0.3
from jaxtp.config import entry
from jaxtp.train.__main__ import PROGRAM, main
entry.run(PROGRAM, main)
"""


def opened(url, run):
    run.mkdir(exist_ok=True)
    return UrlCheckpoints(url, run, print, keep=2, keep_every=0, keep_best=False)


def save(checkpoints, run, *steps):
    for step in steps:
        (run / "metrics.jsonl").write_text(f"{step}\n" * step)
        checkpoints.save(step, small_state(step), MESH, {"next_sample": step})
        checkpoints.wait()


def commits(url):
    return sorted(ObjectStore(url).sizes("commits"))


def test_a_start_finds_what_is_finished_and_plain_orbax_reads_it(google, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with opened(google, tmp_path / "a") as checkpoints:
        (tmp_path / "a/hf").mkdir()
        (tmp_path / "a/hf/config.json").write_text("{}")
        save(checkpoints, tmp_path / "a", 1, 2, 3)
    store = ObjectStore(google)
    # Orbax takes it for finished.
    for name in ("state/data", "commit_success.txt"):
        store.put(f"checkpoints/9/{name}", b"1")
    with opened(google, tmp_path / "b") as checkpoints:
        assert checkpoints.steps() == [2, 3]
        step, state, info = restore_newest(checkpoints, small_state(), MESH, id, print)
    assert (step, info["next_sample"]) == (3, 3)
    assert_array_equal(weight_of(state), weight_of(small_state(3)))
    assert contents(tmp_path / "b") == contents(tmp_path / "a")
    assert ocp.CheckpointManager(f"{google}/checkpoints").all_steps() == [2, 3]
    reader = ocp.PyTreeCheckpointer()
    state_url = f"{google}/checkpoints/3/state"
    stored = reader.metadata(state_url).item_metadata.tree
    whole = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
    arrays = reader.restore(state_url, restore_args=whole)
    assert_array_equal(arrays["model.weight"], weight_of(state))
    assert command_checkpoint(["verify", google]) == 0
    assert contents(hf_files_of(newest_checkpoint(local(google)))) == {"config.json": b"{}"}
    # A run may go on in a folder, with a mirror.
    folder = tmp_path / "c/checkpoints"
    folder.parent.mkdir()
    with Mirror(google, folder, print, set) as mirror, Checkpoints(folder) as checkpoints:
        assert restore_newest(checkpoints, small_state(), MESH, id, print)[0] == 3
        mirror.begin(3)


@pytest.mark.parametrize("damage", [b"another", None])
def test_a_damaged_checkpoint_is_moved_and_its_step_repeated(google, tmp_path, damage):
    with opened(google, tmp_path / "a") as checkpoints:
        save(checkpoints, tmp_path / "a", 1, 2)
    store = ObjectStore(google)
    key = next(iter(store.sizes("checkpoints/2/state/ocdbt.process_0")))
    size = len(store.read(key))
    store.delete(key)
    if damage:
        store.put(key, damage.ljust(size))
    lines = []
    with opened(google, tmp_path / "a") as checkpoints:
        assert restore_newest(checkpoints, small_state(), MESH, id, lines.append)[0] == 1
        save(checkpoints, tmp_path / "a", 2)
        assert restore_newest(checkpoints, small_state(), MESH, id, lines.append)[0] == 2
    (line,) = lines
    assert f"{key} is damaged; moved to {google}/damaged/2/2, resuming from step 1" in line
    assert "damaged/2/2/info/metadata" in store.sizes("damaged")
    assert commits(google) == ["commits/1.json", "commits/2.json"]


def test_an_unreachable_store_is_no_damage(google, google_server, tmp_path):
    with opened(google, tmp_path / "a") as checkpoints:
        save(checkpoints, tmp_path / "a", 1)
        google_server.fault = lambda method, path, number: 403 if "tensorstore=" in path else None
        with pytest.raises(UserError, match="this proves no damage"):
            restore_newest(checkpoints, small_state(), MESH, id, print)
    assert commits(google) == ["commits/1.json"]


def test_one_start_owns_the_url(google, tmp_path, monkeypatch):
    with (
        opened(google, tmp_path / "a"),
        pytest.raises(ConfigError, match=r"checkpoint\.url=.* in use by process .*alive"),
    ):
        opened(google, tmp_path / "b")
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 600.0)
    silent = opened(google, tmp_path / "a")
    with opened(google, tmp_path / "b"):
        with pytest.raises(TakenOverError, match="has taken over"):
            save(silent, tmp_path / "a", 3)
        # It was silent during a save.
        monkeypatch.setattr(silent, "_require_writable", lambda: None)
        with pytest.raises(TakenOverError):
            save(silent, tmp_path / "a", 3)
        silent.__exit__(None, TakenOverError(""), None)
    assert commits(google) == []
    with opened(google, tmp_path / "b") as checkpoints:
        save(checkpoints, tmp_path / "b", 3)
    assert commits(google) == ["commits/3.json"]


def test_a_slow_save_is_announced_once(google, google_server, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(ownership, "SLOW_SECONDS", 0.5)
    google_server.fault = lambda method, *_: time.sleep(0.1 * (method == "POST"))
    with opened(google, tmp_path / "a") as checkpoints:
        save(checkpoints, tmp_path / "a", 1)
        assert checkpoints.steps() == [1]
    line = f"{google}: the checkpoint of step 1 takes more than 0.5 s; training continues"
    assert capfd.readouterr().err.count(line) == 1


@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (
            ["--checkpoint.url=s3://run/a"],
            "Orbax writes checkpoints to no other store; --run.mirror",
        ),
        (["--checkpoint.url=gs://"], "should be gs://BUCKET/PATH, because Orbax"),
        (["--checkpoint.url=gs://b/a", "--run.mirror=gs://b/c"], "leave run.mirror out"),
        (["--checkpoint.url=gs://b/a", "--run.resume-at=3"], "leave run.resume_at out"),
        (
            ["--checkpoint.url=gs://b/a"],
            "needs gcsfs, which is not installed; pip install 'jaxtp[gcs]'",
        ),
        (["--checkpoint.url=gs://b/a", "--run.dir=old"], "old has checkpoints of its own"),
    ],
)
def test_what_cannot_be_is_refused_before_the_work(
    command, capsys, monkeypatch, tmp_path, flags, cause
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with Checkpoints(tmp_path / "old/checkpoints") as checkpoints:
        checkpoints.save(1, small_state(), MESH, {})
    assert main([*command, *flags]) == MISTAKE
    assert cause in capsys.readouterr().err


def test_processes_without_a_common_disk_are_killed_in_a_save_and_one_resumes(
    google, google_server, tmp_path, text
):
    flags = ["--checkpoint.every=2", "--train.steps=6", "--run.dir=run"]
    whole = f"--run.dir={tmp_path}/whole"
    assert main([*quick_flags("run", text), *flags, "--checkpoint.every=0", whole]) == 0
    uploads = []

    def fault(method, path, number):
        """The process is in the middle of the save at step 4."""
        if method == "POST" and "/checkpoints/4/state/" in unquote(path):
            uploads.append(path)
            return "hang"
        return None

    google_server.fault = fault

    def start(words, **of_process):
        folder = tmp_path / of_process["JAX_PROCESS_ID"]
        folder.mkdir()
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], cwd=folder, env=os.environ | of_process
        )

    words = [*quick_flags("run", text), *flags, f"--checkpoint.url={google}"]
    processes = start_together(start, words, 2, 2)
    wait_until(lambda: uploads or any(process.poll() is not None for process in processes))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert commits(google) == ["commits/2.json"]
    google_server.fault = no_fault
    (tmp_path / "elsewhere").mkdir()
    elsewhere = ["--mesh.fsdp=1", "--mesh.dp=2", f"--run.dir={tmp_path}/elsewhere/run"]
    assert main([*words, *elsewhere]) == 0
    assert commits(google) == ["commits/4.json", "commits/6.json"]
    assert records(tmp_path / "elsewhere/run") == pytest.approx(records(tmp_path / "whole"), 1e-4)


def test_a_run_that_is_taken_over_ends_with_the_exit_code_of_a_mistake(
    google, command, monkeypatch, capsys
):
    def taken_over(self):
        ObjectStore(google).create("owners/00000007.json", b"{}")

    monkeypatch.setattr(UrlCheckpoints, "_require_writable", taken_over)
    assert main([*command, "--train.steps=2", f"--checkpoint.url={google}"]) == MISTAKE
    assert "has taken over" in capsys.readouterr().err
    assert commits(google) == []
