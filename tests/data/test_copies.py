"""Folders at URLs: their copies here, and uploads."""

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from made_once import TINY_MODEL, TINY_RUN, words_of
from mirror_failures import bodies_are_cut, one_in_three_is_500
from quick_run import QUICK, quick_flags, start_together
from runs import TEXT, contents, records
from small_tokenizers import byte_level

from jaxtp.config.entry import MISTAKE
from jaxtp.config.schema import ConfigError, place
from jaxtp.data import copies
from jaxtp.data.copies import RECORD, Record, local, sending
from jaxtp.data.object_store import ObjectStore, StoreError
from jaxtp.data.prepare.__main__ import main as prepare
from jaxtp.generate.__main__ import main as generate
from jaxtp.tools.convert.__main__ import main as convert
from jaxtp.tools.evaluate.__main__ import main as evaluate
from jaxtp.tools.score.__main__ import main as score
from jaxtp.train.__main__ import main as train

pytest.importorskip("obstore", reason="pip install 'jaxtp[s3]' 'moto[server]'")

FILES = {"a.txt": b"a" * 1000, "deep/b": b"b" * 3000, "c.json": b"{}", "empty": b""}


def forget():
    """Makes this process like a new one, which uses no copies."""
    copies._local.cache_clear()
    copies._urls.clear()
    copies._in_use.close()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def upload(url, files, **options):
    with sending(place(url), **options) as folder:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def put(url, files):
    """Uploads as another program does."""
    store = ObjectStore(url)
    for name, content in files.items():
        store.put(name, content)


def fetched_again(url, monkeypatch):
    """Returns the names that a new process fetches."""
    forget()
    names = []
    original = ObjectStore.download

    def download(store, key, *rest):
        names.append(key)
        return original(store, key, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "download", download)
        local(url)
    return set(names)


@pytest.mark.parametrize("send", [put, upload])
def test_a_copy_has_the_files_and_is_fetched_once(url, send, monkeypatch):
    send(url, FILES)
    assert fetched_again(url, monkeypatch) == (set(FILES) if send is put else set())
    folder = local(url)
    assert contents(folder) == FILES
    assert fetched_again(url, monkeypatch) == set()
    # Of other names, sizes or contents there is another copy, and who has this one may keep it.
    put(f"{url}/deep", {"b": b"x" * 3000})
    if send is upload:
        (folder / "deep/b").unlink()
        with pytest.raises(StoreError, match="deep/b is damaged"):
            fetched_again(url, monkeypatch)
    else:
        assert fetched_again(url, monkeypatch) == set(FILES)
        assert contents(local(url)) == {**FILES, "deep/b": b"x" * 3000}
        assert contents(folder) == FILES


@pytest.mark.parametrize("count", range(7))
def test_half_an_upload_is_none(url, count, monkeypatch):
    """The upload ends at each of its requests to write, and is repeated."""
    upload(url, FILES)
    changed = {**FILES, "a.txt": b"A" * 1000, "d": b"d"}
    del changed["empty"]
    sent = []
    original = ObjectStore.put

    def put_some(store, key, value):
        if len(sent) == count:
            raise StoreError("killed")
        sent.append(key)
        original(store, key, value)

    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "put", put_some)
        if count < 6:
            with pytest.raises(StoreError, match="killed"):
                upload(url, changed, replaces=True)
            forget()
        else:
            upload(url, changed, replaces=True)
    if count < 2:
        assert contents(local(url)) == FILES
    elif count < 6:
        with pytest.raises(ConfigError, match="is an unfinished upload"):
            local(url)
    upload(url, changed, replaces=True)
    forget()
    assert contents(local(url)) == changed
    assert set(ObjectStore(url).sizes("")) == {*changed, RECORD}


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/../../evil", "a//b", "..", "a\n"])
def test_names_stay_in_the_copy(url, name, tmp_path):
    record = Record(id="x", finished=True, files={"a": (1, "0"), name: (1, "0")})
    put(url, {RECORD: record.model_dump_json().encode(), "a": b"1", "evil": b"1"})
    with pytest.raises(StoreError, match="has a file with the name"):
        local(url)
    assert not list((tmp_path / "cache").rglob("*evil"))


def test_an_object_that_changes_meanwhile_is_refused(url, tmp_path):
    put(url, FILES)
    store = ObjectStore(url)
    items = copies._items(store)
    put(url, {"a.txt": b"x" * 1000})
    with pytest.raises(StoreError, match=r"a.txt was changed meanwhile"):
        copies._fetch(store, items, copies._root() / "x")
    assert not list(copies._root().glob("x*"))


def test_the_cache_is_bounded(tmp_path, monkeypatch):
    urls = [f"file://{tmp_path}/{name}" for name in "abcd"]
    for url in urls:
        put(url, {"file": b"x" * 300_000, "settings.json": b"{}"})
    monkeypatch.setenv("JAXTP_CACHE_GB", "0.0007")
    folders = []
    for url in urls[:3]:
        forget()
        folders.append(local(url))
    assert [folder.is_dir() for folder in folders] == [False, True, True]
    local(urls[1])
    with pytest.raises(ConfigError, match=r"Copies of URLs may have 700.0 KB in .*JAXTP_CACHE_GB"):
        local(urls[3])
    forget()
    local(urls[3])
    assert [folder.is_dir() for folder in folders] == [False, True, False]
    # Who reads only a tokenizer needs no more.
    assert [path.name for path in local(urls[0], is_small=True).iterdir()] == ["settings.json"]
    monkeypatch.setenv("JAXTP_CACHE_GB", "0.0002")
    forget()
    with pytest.raises(ConfigError, match=r"has 300.0 KB"):
        local(urls[0])
    for text in ("-1", "much"):
        monkeypatch.setenv("JAXTP_CACHE_GB", text)
        with pytest.raises(ConfigError, match=f"JAXTP_CACHE_GB={text}: should be a number"):
            local(urls[0])


def test_one_of_several_fetches(url, monkeypatch):
    put(url, FILES)
    calls = []
    together = threading.Barrier(4)
    original = copies._fetch

    def fetch(*arguments):
        calls.append(arguments)
        original(*arguments)

    def start(_):
        together.wait()
        return copies._fetched(url, is_small=False)

    monkeypatch.setattr(copies, "_fetch", fetch)
    with ThreadPoolExecutor(4) as pool:
        (folder,) = set(pool.map(start, range(4)))
    assert len(calls) == 1
    assert contents(folder) == FILES


def test_what_cannot_be_sent_is_refused_before_the_work(url, monkeypatch, tmp_path):
    put(f"{url}/full", FILES)
    with pytest.raises(ConfigError, match=r"has other files \(a.txt, "):
        upload(f"{url}/full", FILES)
    upload(f"{url}/own", FILES)
    with pytest.raises(ConfigError, match="exists already"):
        upload(f"{url}/own", FILES)
    with sending(place(f"{url}/new")) as folder:
        folder.mkdir()
        (folder / "a").touch()
        with pytest.raises(ConfigError, match="being written by another command"):
            upload(f"{url}/new", FILES)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxtp\[(s3|gcs)\]'"):
        upload(f"{url}/other", FILES)


def test_another_command_elsewhere_ends_an_upload(url, monkeypatch):
    original = ObjectStore.put

    def put_after_another(store, key, value):
        original(store, key, value)
        if key == "a.txt":
            other = Record(id="other", finished=False, files={})
            original(store, RECORD, other.model_dump_json().encode())

    monkeypatch.setattr(ObjectStore, "put", put_after_another)
    with pytest.raises(ConfigError, match="being written by another command"):
        upload(url, FILES)


@pytest.mark.journey
@pytest.mark.parametrize("fault", [403, 404])
def test_without_rights_or_a_bucket_nothing_begins(bucket, server, text, capsys, fault, tmp_path):
    server.fault = lambda method, path, number: fault
    assert prepare([str(text), f"--out={bucket}/data"]) == MISTAKE
    assert train([*QUICK, f"--data.path={bucket}/data"]) == MISTAKE
    error = capsys.readouterr().err
    assert error.count("see its address, rights and credentials") == 2
    assert not list((tmp_path / "cache").rglob("*.tokens"))


@pytest.mark.journey
def test_a_public_bucket_needs_no_credentials(bucket, monkeypatch):
    put(bucket, FILES)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="credentials"):
        local(bucket)
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    assert contents(local(bucket)) == FILES


@pytest.mark.journey
@pytest.mark.parametrize("fault", [one_in_three_is_500, bodies_are_cut])
def test_a_faulty_network(bucket, server, fault, monkeypatch):
    server.fault = fault
    upload(bucket, FILES)
    forget()
    for path in copies._root().glob("*-*"):
        path.rename(path.with_name(f"moved{path.suffix}"))
    assert contents(local(bucket)) == FILES


@pytest.mark.journey
def test_a_journey_by_urls(bucket, server, tmp_path, monkeypatch, capsys):
    """From a tokenizer to texts, each command as on a new host, over a faulty network."""
    hosts = itertools.count()

    def run(main, *words):
        forget()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"host{next(hosts)}"))
        capsys.readouterr()
        code = main(list(map(str, words)))
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    server.fault = one_in_three_is_500
    put(f"{bucket}/tokenizer", {"tokenizer.json": byte_level(), "model.safetensors": b"\0" * 999})
    lines = tmp_path / "lines.jsonl"
    rows = [json.dumps({"text": line}) for line in TEXT.splitlines()[:200]]
    lines.write_text("\n".join(rows))
    prepared = [lines, "--held-out=0.1", f"--tokenizer={bucket}/tokenizer", "--no-eos"]
    data = f"{bucket}/data"
    run(prepare, *prepared, f"--out={data}")
    assert not list((tmp_path / "host0").rglob("model.safetensors"))
    assert "nothing to do" in run(prepare, *prepared, f"--out={data}")

    run(prepare, *prepared, f"--out={tmp_path}/data")
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text(f"data: {{mixture: {{'{data}': 0.5, '{tmp_path}/data': 0.5}}}}")
    trained = words_of(TINY_MODEL | TINY_RUN)
    for name, place_of in {
        "here": ["--data.path", tmp_path / "data"],
        "run": ["--data.path", data],
        "mixed": ["--config", mixture],
    }.items():
        run(train, *trained, *place_of, "--run.dir", tmp_path / name)
    assert records(tmp_path / "run") == records(tmp_path / "here")

    model = f"{bucket}/model"
    run(convert, "export", tmp_path / "run", model)
    run(convert, "export", tmp_path / "here", tmp_path / "model")
    run(convert, "import", model, f"{bucket}/imported")
    texts = [
        run(generate, "--model", source, "--prompt=the", "--max-tokens=5")
        for source in (model, tmp_path / "model", f"{bucket}/imported", tmp_path / "run")
    ]
    assert len(set(texts)) == 1

    # A run records URLs, so another host finds its base model and its data.
    tuned = ["--model.from-hf", model, "--data.path", data, "--run.dir", tmp_path / "tuned"]
    adapted = [*words_of(TINY_RUN)[2:], "--model.lora.rank=2", "--mesh=tp=1"]
    length = "--data.sequence-length=32"
    run(train, *tuned, *adapted, length, "--train.steps=2")
    run(train, *tuned, *adapted, length, "--train.steps=4")
    run(evaluate, "--model", tmp_path / "tuned", "--data", data)
    run(score, data, "--model", tmp_path / "tuned", "--out", tmp_path / "scores", length)
    run(convert, "export", tmp_path / "tuned", f"{bucket}/adapters")
    run(generate, "--model", model, "--adapters", f"{bucket}/adapters", "--prompt=the")


@pytest.mark.journey
def test_two_processes_of_a_host_fetch_once_and_fail_together(bucket, text, tmp_path):
    assert prepare([str(text), "--held-out=0.1", f"--out={bucket}/data"]) == 0
    other_cache = {"XDG_CACHE_HOME": str(tmp_path / "other")}

    def start(flags, **of_process):
        return subprocess.Popen(
            [sys.executable, "-m", "jaxtp.train", *flags],
            env=os.environ | other_cache | of_process,
            stderr=subprocess.PIPE,
            text=True,
        )

    flags = [
        *quick_flags(tmp_path / "run", f"{bucket}/data"),
        "--train.steps=1",
        "--eval.batches=1",
    ]
    processes = start_together(start, flags, 2, 2)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sum(error.count(": done in") for error in errors) == 1
    flags = quick_flags(tmp_path / "none", f"{bucket}/none")
    processes = start_together(start, flags, 2, 2)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [MISTAKE, MISTAKE]
    assert all(f"{bucket}/none has no files below it" in error for error in errors)
