"""The copy of a run at a URL."""

import json
import os
import shutil
import sys
from functools import partial

import pytest
from mirror_failures import no_fault, one_in_three_is_500
from runs import contents, records, wait_until

from jaxtp.checkpoint import mirror, ownership
from jaxtp.checkpoint.io_errors import CheckpointError, DamagedError
from jaxtp.checkpoint.mirror import Mirror
from jaxtp.checkpoint.ownership import TakenOverError
from jaxtp.checkpoint.storage import kept_steps, seal, steps_in
from jaxtp.config.entry import FILES, MISTAKE
from jaxtp.config.schema import ConfigError
from jaxtp.train.__main__ import main

pytestmark = [pytest.mark.journey, pytest.mark.usefixtures("short_silence")]
obstore = pytest.importorskip("obstore", reason="pip install 'jaxtp[s3]' 'moto[server]'")


class BegunMirror(Mirror):
    """Begins as after a restore of the newest checkpoint."""

    def __enter__(self):
        super().__enter__()
        self.begin(max(steps_in(self.folder), default=-1))
        return self


def mirrored(url, run, kind=BegunMirror, **settings):
    run.mkdir(exist_ok=True)
    kept = {"keep": 2, "keep_every": 0, "keep_best": False} | settings
    return kind(url, run / "checkpoints", print, partial(kept_steps, **kept))


def save(run, step):
    """Makes a folder that looks like a finished checkpoint."""
    unfinished = run / "unfinished"
    for folder in (unfinished / "state", unfinished / "info", run / "hf"):
        folder.mkdir(parents=True, exist_ok=True)
    (unfinished / "info/metadata").write_text(json.dumps(seal({"checksums": {}})))
    (run / "hf/config.json").write_text("{}")
    for name in ("state/data", "state/commit_success.txt", "commit_success.txt"):
        (unfinished / name).write_bytes(os.urandom(2000))
    (run / "metrics.jsonl").write_text(f"{step}\n")
    (run / "checkpoints").mkdir(exist_ok=True)
    unfinished.rename(run / "checkpoints" / str(step))


def upload(url, run, *steps, **settings):
    for step in steps:
        with mirrored(url, run, **settings):
            save(run, step)


def objects(url):
    return mirror.ObjectStore(url).sizes("")


def commits(url):
    return sorted(key for key in objects(url) if key.startswith("commits"))


def test_a_start_on_an_empty_folder_has_the_newest_checkpoint(url, tmp_path):
    upload(url, tmp_path / "a", 2, 3, 4, 5, keep_every=2, keep=1)
    with mirrored(url, tmp_path / "b", keep=1):
        pass
    # A start deletes nothing.
    assert commits(url) == [f"commits/{step}.json" for step in (2, 4, 5)]
    found = contents(tmp_path / "b")
    expected = contents(tmp_path / "a")
    fetched = {name for name in expected if "checkpoints/" not in name or "/5/" in name}
    assert found == {name: expected[name] for name in fetched}
    save(tmp_path / "c", 9)
    with pytest.raises(ConfigError, match="has another run"):
        mirrored(url, tmp_path / "c").__enter__()


def test_one_start_owns_the_url(url, tmp_path, monkeypatch):
    with (
        mirrored(url, tmp_path / "a"),
        pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on .*alive"),
    ):
        mirrored(url, tmp_path / "b").__enter__()
    monkeypatch.setattr(ownership, "BEAT_SECONDS", 600.0)
    silent = mirrored(url, tmp_path / "a").__enter__()
    with mirrored(url, tmp_path / "b"):
        save(tmp_path / "a", 3)
        with pytest.raises(TakenOverError, match="has taken over"):
            silent.__exit__(None, None, None)
    assert not [key for key in objects(url) if key.startswith(("commits", "checkpoints"))]


@pytest.mark.parametrize("damage", [b"", b"x" * 2000, None])
def test_a_damaged_copy_is_not_used(url, tmp_path, damage, capsys):
    upload(url, tmp_path / "a", 1, 4)
    store = mirror.ObjectStore(url)

    def harm(step):
        store.delete(f"checkpoints/{step}/state/data")
        if damage is not None:
            store.put(f"checkpoints/{step}/state/data", damage)

    harm(4)
    with mirrored(url, tmp_path / "b"):
        assert steps_in(tmp_path / "b/checkpoints") == [1]
        save(tmp_path / "b", 2)
    assert "checkpoints/4/state/data is damaged" in capsys.readouterr().out
    assert commits(url) == ["commits/1.json", "commits/2.json"]
    harm(1)
    harm(2)
    with pytest.raises(CheckpointError, match="every checkpoint"):
        mirrored(url, tmp_path / "c").__enter__()


def test_a_damaged_checkpoint_of_the_folder_is_replaced(url, tmp_path):
    upload(url, tmp_path, 1, 4)
    newest = tmp_path / "checkpoints/4"
    (newest / "info/metadata").write_bytes(b"")
    with mirrored(url, tmp_path, Mirror) as running:
        assert (newest / "info/metadata").stat().st_size
        assert steps_in(tmp_path / "damaged") == [4]
        # Its arrays are damaged, and the run repeats the step.
        shutil.rmtree(newest)
        running.begin(1)
        save(tmp_path, 4)
    key = "checkpoints/4/state/data"
    assert mirror.ObjectStore(url).read(key) == (tmp_path / key).read_bytes()


def test_programs_are_read_by_a_start_with_the_same_secret(url, tmp_path, monkeypatch):
    programs = tmp_path / "a/programs"
    programs.mkdir(parents=True)
    (programs / "jit_b-0-cache").write_bytes(b"b")
    monkeypatch.setenv("JAXTP_TOKEN", "secret")
    for step in (1, 2):
        (programs / f"jit_step{step}-0-cache").write_bytes(b"a")
        upload(url, tmp_path / "a", step)
        (programs / "jit_b-0-cache").unlink(missing_ok=True)

    def fetched(name):
        (tmp_path / name).mkdir()
        mirror.fetch_programs(url, tmp_path / name)
        return contents(tmp_path / name)

    assert fetched("b") == contents(programs)
    assert [key for key in objects(url) if "jit_b" in key] == []
    monkeypatch.setenv("JAXTP_TOKEN", "another")
    assert fetched("c") == {}
    monkeypatch.setenv("JAXTP_TOKEN", "secret")
    mirror.ObjectStore(url).put("programs/jit_step1-0-cache", b"b")
    with pytest.raises(DamagedError, match="jit_step1-0-cache is damaged"):
        fetched("d")


@pytest.mark.parametrize("count", [1, 3, 4])
def test_an_upload_that_ends_in_the_middle_is_not_a_checkpoint(bucket, server, tmp_path, count):
    upload(bucket, tmp_path / "a", 1)
    puts = []

    def fault(method, path, number):
        puts.extend([path] if method == "PUT" and "/beats/" not in path else [])
        return 403 if len(puts) > count else None

    running = mirrored(bucket, tmp_path / "a").__enter__()
    puts.clear()
    server.fault = fault
    save(tmp_path / "a", 2)
    wait_until(lambda: len(puts) > count)
    running.__exit__(None, KeyboardInterrupt(), None)
    server.fault = no_fault
    with mirrored(bucket, tmp_path / "b"):
        assert steps_in(tmp_path / "b/checkpoints") == [1]
        save(tmp_path / "b", 3)
    assert commits(bucket) == ["commits/1.json", "commits/3.json"]
    assert not [key for key in objects(bucket) if "/2" in key]


@pytest.mark.parametrize(
    ("fault", "cause"), [("ignore", "ignores conditional"), (403, "rights"), (None, "jaxtp.s3")]
)
def test_a_store_that_cannot_be_used_is_refused_before_the_work(
    bucket, server, command, capsys, monkeypatch, fault, cause
):
    server.fault = lambda *_: fault
    if fault is None:
        monkeypatch.setitem(sys.modules, "boto3", None)
        monkeypatch.delitem(sys.modules, "obstore.auth.boto3", raising=False)
    assert main([*command, f"--run.mirror={bucket}"]) == MISTAKE
    error = capsys.readouterr().err
    assert bucket in error
    assert cause in error.replace("[", ".")


def test_a_run_goes_on_elsewhere_and_says_where_the_url_is_behind(
    bucket, server, command, tmp_path, capsys, monkeypatch
):
    flags = [*command, "--checkpoint.every=2", f"--run.mirror={bucket}"]
    assert main([*command, "--train.steps=6", f"--run.dir={tmp_path}/whole"]) == 0
    server.fault = one_in_three_is_500
    assert main([*flags, "--train.steps=3"]) == 0
    elsewhere = [*flags, "--train.steps=6", f"--run.dir={tmp_path}/elsewhere"]
    assert main(elsewhere) == 0
    assert records(tmp_path / "elsewhere") == records(tmp_path / "whole")
    monkeypatch.setattr(mirror, "END_SECONDS", 1.0)
    server.fault = lambda method, path, number: 403 if "checkpoints/7" in path else None
    assert main([*elsewhere, "--train.steps=7"]) == FILES
    assert f"{bucket} has step 6" in capsys.readouterr().err
