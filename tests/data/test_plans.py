"""Plans of rows that are kept: made once, read by all, and never trusted."""

import fcntl
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import full_disk

from jaxtp.data import packing, plans
from jaxtp.data.documents import InMemory
from jaxtp.data.packing import LongDocumentError, Packed, plan_key
from jaxtp.data.plans import Block, Wanted, find_plan
from jaxtp.launch import environment

LENGTHS = [7, 2, 9, 1, 3, 3, 3, 1, 25]


def documents(lengths=LENGTHS):
    return InMemory(np.arange(sum(lengths), dtype=np.uint32), np.array(lengths), "test")


def shards(lengths):
    """The same documents, the first of them in a shard of their own."""
    found = documents(lengths)
    found.lengths = lambda: iter([np.array(lengths[:1]), np.array(lengths[1:])])
    return found


def rows_of(packed):
    return [{name: array.tolist() for name, array in row.items()} for row in packed]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of plans, all of which are kept, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(plans, "FEW", 0)
    return tmp_path / "jaxtp/plans"


@pytest.fixture
def made(monkeypatch):
    """The plans that were made: one entry for each."""
    calls, make = [], plans._make
    monkeypatch.setattr(plans, "_make", lambda file, wanted: calls.append(wanted.key) or make(file, wanted))
    return calls


@pytest.mark.parametrize("long", ["split", "drop"])
def test_a_plan_is_made_once_and_read_as_it_was_made(cache, made, long):
    first, again = (Packed(documents(), 10, 100, long) for _ in range(2))
    assert len(made) == 1
    assert rows_of(again) == rows_of(first)
    for name in ("identity", "padding", "num_split", "num_dropped"):
        assert getattr(again, name) == getattr(first, name)
    (file,) = cache.iterdir()
    assert (file.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_few_documents_are_not_worth_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Packed(documents(), 10, 100)
    assert not list(tmp_path.iterdir())


def test_where_every_document_is_left_out_the_plan_is_empty(cache, made):
    assert [len(Packed(documents(), 1, 100, "drop")) for _ in range(2)] == [2, 2]
    assert [len(Packed(documents([5, 6]), 1, 100, "drop")) for _ in range(2)] == [0, 0]
    assert len(made) == 2


def test_all_that_a_plan_depends_on_is_in_its_name(monkeypatch):
    ours = plan_key(documents(), 10, "split")
    assert plan_key(documents(), 10, "split") == ours
    others = [
        plan_key(documents([*LENGTHS[:-1], 24]), 10, "split"),
        plan_key(documents(LENGTHS[::-1]), 10, "split"),
        plan_key(shards(LENGTHS), 10, "split"),
        plan_key(documents(), 11, "split"),
        plan_key(documents(), 10, "drop"),
    ]
    monkeypatch.setattr(packing, "BLOCK", 4)
    others.append(plan_key(documents(), 10, "split"))
    monkeypatch.setattr(Packed, "algorithm", "best fit 0")
    others.append(plan_key(documents(), 10, "split"))
    assert len({ours, *others}) == 8


def test_the_identity_is_that_of_the_plan(monkeypatch):
    def first_fit(histogram, room):
        return [((size,), int(count)) for size, count in enumerate(histogram) if count and size]

    ours = Packed(documents(), 10, 100).identity
    assert Packed(documents(), 10, 100).identity == ours
    monkeypatch.setattr(packing, "best_fit", first_fit)
    assert Packed(documents(), 10, 100).identity != ours


def _resealed(content):
    """The content with the sha256 that it should state."""
    digest = plans.hashlib.sha256(content[plans._HASHED :]).digest()
    return content[:8] + digest + content[40:]


def _with(content, number, value):
    """The content with another value in place of one of its numbers, counted from behind the key."""
    at = plans._HASHED + 8 * number
    return _resealed(content[:at] + np.int64(value).tobytes() + content[at + 8 :])


DAMAGE = {
    "empty": lambda content: b"",
    "cut in its header": lambda content: content[:50],
    "cut": lambda content: content[:-8],
    "longer": lambda content: content + bytes(8),
    "of another version": lambda content: b"jaxtpln0" + content[8:],
    "of another key": lambda content: content[:40] + bytes(32) + content[72:],
    "as many pieces as no file can have": lambda content: _with(content, 0, 2**60),
    "negative rows": lambda content: _with(content, 1, -1),
    "a document that is not there": lambda content: _with(content, 5, len(LENGTHS)),
    "a document before the first": lambda content: _with(content, 5, -1),
    "a token before the first": lambda content: _with(content, 6, -1),
    "a row that ends before it begins": lambda content: _with(content, (len(content) - 72) // 8 - 2, 0),
    "a pickle": lambda content: b"cos\nsystem\n(S'false'\ntR." + content,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_file_that_is_no_plan_of_these_documents_is_made_anew(cache, made, how):
    expected = rows_of(Packed(documents(), 10, 100))
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(DAMAGE[how](whole))
    assert rows_of(Packed(documents(), 10, 100)) == expected
    assert len(made) == 2
    assert file.read_bytes() == whole
    Packed(documents(), 10, 100)
    assert len(made) == 2, "the new one is kept"


def test_any_changed_bit_is_noticed(tmp_path):
    wanted = Wanted(
        bytes(32), 3, 6, lambda: iter([Block(np.array([[0, 0], [2, 0], [1, 0]]), np.array([2, 1]), 9, 0, 0)])
    )
    with (tmp_path / "whole").open("w+b") as file:
        plans._make(file, wanted)
    whole = (tmp_path / "whole").read_bytes()

    @given(st.integers(0, 8 * len(whole) - 1))
    def check(bit):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "changed").write_bytes(changed)
        assert plans._kept(tmp_path / "changed", wanted) is None

    check()
    assert plans._kept(tmp_path / "whole", wanted) is not None


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a link that leads nowhere"])
def test_what_is_no_file_is_neither_read_nor_waited_for(cache, what):
    expected = rows_of(Packed(documents(), 10, 100))
    (file,) = cache.iterdir()
    file.unlink()
    {"a folder": os.mkdir, "a pipe": os.mkfifo}.get(what, lambda path: path.symlink_to("nowhere"))(file)
    assert rows_of(Packed(documents(), 10, 100)) == expected


def test_of_those_that_start_at_once_one_makes_the_plan(cache):
    made, found = [], []

    def make():
        made.append(threading.get_ident())
        time.sleep(0.3)
        yield Block(np.array([[0, 0], [1, 0]]), np.array([2]), 5, 0, 0)

    def start():
        found.append(find_plan(Wanted(bytes(32), 2, 2, make)).sha256)

    threads = [threading.Thread(target=start) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert len(found) == 5
    assert len(set(found)) == 1
    assert [path.suffix for path in cache.iterdir()] == [plans.SUFFIX]


DIES = """
import os, sys, time
from pathlib import Path
from jaxtp.data.plans import Wanted, _keep
def make():
    print("makes", flush=True)
    time.sleep(600)
    yield
_keep(Path(sys.argv[1]), Wanted(bytes(32), 2, 2, make))
"""


def test_a_process_that_is_killed_while_it_makes_a_plan_holds_nobody_up(tmp_path, monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "makes\n"
        process.kill()
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock", plans.PARTIAL}
    wanted = Wanted(bytes(32), 2, 2, lambda: iter([Block(np.array([[0, 0], [1, 0]]), np.array([2]), 5, 0, 0)]))
    plan = plans._keep(tmp_path, wanted)
    assert plan.pieces.tolist() == [[0, 0], [1, 0]]
    assert plan.rows.tolist() == [0, 2]
    assert [path.suffix for path in tmp_path.iterdir()] == [plans.SUFFIX]


def _no_locks(*_):
    raise OSError("no locks available")


@pytest.mark.parametrize("why", ["no locks", "a file", "open to others", "no home", "another takes too long"])
def test_where_no_plan_can_be_kept_each_makes_its_own_and_says_so_if_that_took_long(cache, why, monkeypatch, capsys):
    monkeypatch.setattr(plans, "TELL_AFTER", -1)
    monkeypatch.setattr(plans, "LONGEST_WAIT", 0.1)
    cache.parent.mkdir()
    if why == "no locks":
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    elif why == "a file":
        cache.touch()
    elif why == "no home":
        monkeypatch.setattr(plans, "cache_folder", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    else:
        cache.mkdir(mode=0o777 if why == "open to others" else 0o700)
        cache.chmod(0o777 if why == "open to others" else 0o700)
    if why == "another takes too long":
        with (cache / f"{plan_key(documents(), 10, 'split').hex()}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            packed = Packed(documents(), 10, 100)
    else:
        packed = Packed(documents(), 10, 100)
    assert sorted(token for row in rows_of(packed) for token in row["inputs"] if token) == list(range(1, 54))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the rows took 0 s to plan, and are not kept for the next run: ")
    assert not list(cache.glob(f"*{plans.SUFFIX}"))


def test_a_mistake_and_a_full_disk_leave_nothing(cache):
    with pytest.raises(LongDocumentError):
        Packed(documents(), 10, 100, "stop")
    assert not list(cache.iterdir())
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        Packed(documents(), 10, 100)
    assert not list(cache.iterdir())


def test_a_plan_in_use_is_not_forgotten(cache):
    """Another host that shares the folder could take it away from under a map."""
    used, idle = (Packed(documents(), length, 100) for length in (10, 11))
    files = {path.stem: path for path in cache.iterdir()}
    key = plan_key(documents(), 10, "split").hex()
    expected = rows_of(used)
    del idle
    environment.forget_oldest(cache, 0, plans._forget_unused)
    assert [path.stem for path in cache.iterdir()] == [key]
    assert rows_of(used) == expected
    del used
    environment.forget_oldest(cache, files[key].stat().st_size, plans._forget_unused)
    assert list(cache.iterdir()), "it is not too much"
    environment.forget_oldest(cache, 0, plans._forget_unused)
    assert not list(cache.iterdir())
