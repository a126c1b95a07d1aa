"""Plans of rows that are kept: made once, read by all, and never trusted."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import full_disk

from jaxtp.data import packing
from jaxtp.data.documents import InMemory
from jaxtp.data.packing import Block, LongDocumentError, Packed, find_plan, plan_key

LENGTHS = [7, 2, 9, 1, 3, 3, 3, 1, 25]
IDENTITY_0_1 = "b668c0f71ccabe30419d0561977f11be8d1a59e67a0501ad7f9dc5c7b4b25971"


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
    monkeypatch.setattr(packing, "FEW", 0)
    return tmp_path / "jaxtp/plans"


@pytest.fixture
def made(monkeypatch):
    """The plans that were made: one entry for each."""
    calls, make = [], packing._make
    monkeypatch.setattr(packing, "_make", lambda file, blocks: calls.append(blocks) or make(file, blocks))
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


DAMAGE = {
    "empty": lambda content: b"",
    "cut in its header": lambda content: content[:50],
    "cut": lambda content: content[:-8],
    "longer": lambda content: content + bytes(8),
    "of another key": lambda content: bytes(32) + content[32:],
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
    block = Block(np.array([[0, 0], [2, 0], [1, 0]]), np.array([2, 1]), 9, 0, 0)
    with (tmp_path / "whole").open("w+b") as file:
        packing._make(file, lambda: iter([block]))
    whole = (tmp_path / "whole").read_bytes()

    @given(st.integers(0, 8 * len(whole) - 1))
    def check(bit):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "changed").write_bytes(changed)
        with pytest.raises(ValueError, match="not a plan"):
            read("changed")

    def read(name):
        with (tmp_path / name).open("rb") as file:
            return packing._read(file)

    check()
    assert read("whole").rows.tolist() == [0, 2, 3]


@pytest.mark.parametrize("what", ["a folder", "a pipe", "a link that leads nowhere"])
def test_what_is_no_file_is_neither_read_nor_waited_for(cache, what):
    expected = rows_of(Packed(documents(), 10, 100))
    (file,) = cache.iterdir()
    file.unlink()
    {"a folder": os.mkdir, "a pipe": os.mkfifo}.get(what, lambda path: path.symlink_to("nowhere"))(file)
    assert rows_of(Packed(documents(), 10, 100)) == expected


def test_processes_that_start_at_once_have_the_same_plan(cache):
    def blocks():
        time.sleep(0.1)
        yield Block(np.array([[0, 0], [1, 0]]), np.array([2]), 5, 0, 0)

    with ThreadPoolExecutor(5) as pool:
        found = list(pool.map(lambda _: find_plan(bytes(32), 2, blocks), range(5)))
    assert len({plan.sha256 for plan in found}) == 1
    assert [path.suffix for path in cache.iterdir()] == [packing.SUFFIX]


DIES = """
import sys, time
from pathlib import Path
from jaxtp.data.packing import _find_in
def blocks():
    print("makes", flush=True)
    time.sleep(600)
    yield
_find_in(Path(sys.argv[1]), bytes(32), blocks)
"""


def test_a_process_that_is_killed_while_it_makes_a_plan_holds_nobody_up(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "makes\n"
        process.kill()
    assert [path.suffix for path in tmp_path.iterdir()] == [packing.PARTIAL]
    block = Block(np.array([[0, 0], [1, 0]]), np.array([2]), 5, 0, 0)
    plan = packing._find_in(tmp_path, bytes(32), lambda: iter([block]))
    assert plan.pieces.tolist() == [[0, 0], [1, 0]]
    assert plan.rows.tolist() == [0, 2]


def test_the_hash_of_a_plan_is_the_one_that_runs_of_0_1_have_in_their_checkpoints():
    assert Packed(documents(), 10, 100).identity == IDENTITY_0_1


@pytest.mark.parametrize("why", ["a file", "open to others", "no home"])
def test_where_no_plan_can_be_kept_each_makes_its_own_and_says_so(cache, why, monkeypatch, capsys):
    cache.parent.mkdir()
    if why == "a file":
        cache.touch()
    elif why == "no home":
        monkeypatch.setattr(packing, "cache_folder", lambda: (_ for _ in ()).throw(RuntimeError("no home directory")))
    else:
        cache.mkdir()
        cache.chmod(0o777)
    packed = Packed(documents(), 10, 100)
    assert sorted(token for row in rows_of(packed) for token in row["inputs"] if token) == list(range(1, 54))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the plan of the rows is not cached: ")
    assert not list(cache.glob(f"*{packing.SUFFIX}"))


def test_a_mistake_and_a_full_disk_leave_nothing(cache):
    with pytest.raises(LongDocumentError):
        Packed(documents(), 10, 100, "stop")
    assert not list(cache.iterdir())
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        Packed(documents(), 10, 100)
    assert not list(cache.iterdir())
