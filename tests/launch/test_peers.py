"""What a process learns of the others: one ends, hangs, fails or leaves, and what it says before it ends itself."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
from runs import free_address

from jaxtp.entry import PASSING
from jaxtp.launch import peers

NAMES = ["n0", "n1", "n2"]


@pytest.fixture
def process(monkeypatch):
    """Makes what one process of three has, and returns it with the other ends of its connections."""
    codes, made = [], []

    def end(code):
        codes.append(code)
        made[-1]._ending.set()
        made[-1]._connections.clear()

    monkeypatch.setattr(peers.os, "_exit", end)
    monkeypatch.setattr(peers, "_BEAT", 0.05)
    monkeypatch.setattr(peers, "_GRACE", 0.5)

    def make(me):
        monkeypatch.setattr(peers.jax, "process_index", lambda: me)
        pairs = {other: multiprocessing.Pipe() for other in ((1, 2) if me == 0 else (0,))}
        watched = peers._Peers(NAMES, {other: near for other, (near, _) in pairs.items()})
        watched.doing = "step 7"
        made.append(watched)
        return watched, {other: far for other, (_, far) in pairs.items()}, codes

    yield make
    for watched in made:
        watched._ending.set()
        watched._connections.clear()
        watched._thread.join(10)


def messages(connection, seconds=5.0):
    """What comes besides signs of life, until the connection is silent for a moment."""
    found, until = [], time.monotonic() + seconds
    while time.monotonic() < until and connection.poll(0.3):
        message = json.loads(connection.recv_bytes())
        found += [message] if message else []
        if message:
            break
    return found


def test_a_process_that_ends_is_named_to_all(process, capsys):
    watched, others, codes = process(0)
    others[2].close()
    (told,) = messages(others[1])
    assert told == {"process": 2, "how": "has ended without a word", "grace": 0.0}
    watched._thread.join(10)
    assert codes == [PASSING]
    assert capsys.readouterr().err == (
        "error: process 2 (on n2) has ended without a word; process 0 (on n0) cannot go on with step 7 and ends (exit "
        "code 75)\n"
    )


def test_what_process_0_learns_ends_the_others_too(process, capsys):
    watched, others, codes = process(1)
    others[0].send_bytes(json.dumps({"process": 2, "how": "has ended without a word", "grace": 0.0}).encode())
    watched._thread.join(10)
    assert codes == [PASSING]
    assert (
        "process 2 (on n2) has ended without a word; process 1 (on n1) cannot go on with step 7"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("me", [0, 1])
def test_one_that_is_silent_is_lost(me, process, monkeypatch, capsys):
    monkeypatch.setattr(peers, "SILENCE", 0.6)
    watched, others, codes = process(me)
    silent = 2 if me == 0 else 0
    until = time.monotonic() + 10
    while watched._thread.is_alive() and time.monotonic() < until:
        for other, connection in others.items():
            if other != silent and not connection.closed:
                connection.send_bytes(b"{}")
        time.sleep(0.05)
    assert codes == [PASSING]
    assert f"process {silent} (on n{silent}) has given no sign of life for 0.6 s" in capsys.readouterr().err


def test_after_the_failure_of_another_a_process_may_still_end_by_itself(process, capsys):
    watched, others, codes = process(0)
    others[1].send_bytes(json.dumps({"process": 1, "failure": "TokenError: token 9"}).encode())
    (told,) = messages(others[2])
    assert told == {"process": 1, "how": "failed: TokenError: token 9", "grace": 0.5}
    watched.leave("TokenError: token 9")
    watched._thread.join(10)
    assert codes == []
    assert capsys.readouterr().err == ""


def test_one_that_leaves_at_its_end_is_not_lost(process, capsys):
    watched, others, codes = process(0)
    for other, connection in others.items():
        connection.send_bytes(json.dumps({"process": other, "failure": None}).encode())
        connection.close()
    watched._thread.join(10)
    assert not watched._thread.is_alive()
    assert codes == []


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 4000, b"[1]", b"x" * 5000])
def test_what_is_no_message_counts_as_its_end(data, process, capsys):
    watched, others, codes = process(0)
    others[1].send_bytes(data)
    watched._thread.join(10)
    assert codes == [PASSING]


def test_an_error_that_follows_from_the_end_of_another_is_not_this_ones(process, monkeypatch):
    """Gloo and NCCL fail where a process has ended; what all have met, each says by itself."""
    watched, others, codes = process(0)
    monkeypatch.setattr(peers, "_current", watched)
    others[1].send_bytes(json.dumps({"process": 1, "failure": "NonFiniteError: step 3"}).encode())
    assert messages(others[2])
    peers.tell_failure(None, FloatingPointError("step 4"), None)
    assert codes == [PASSING]

    watched, others, codes = process(0)
    codes.clear()
    monkeypatch.setattr(peers, "_current", watched)
    others[1].send_bytes(json.dumps({"process": 1, "failure": "FloatingPointError: step 3"}).encode())
    assert messages(others[2])
    peers.tell_failure(None, FloatingPointError("step 3"), None)
    assert codes == []


PROGRAM = """
import os, sys, time
from jaxtp import entry
from jaxtp.launch import peers
from jaxtp.launch.joining import join_processes
peers.SILENCE = 4.0
me, failing = int(os.environ["JAX_PROCESS_ID"]), os.environ["FAILING"]
def act():
    join_processes()
    peers.watch()
    peers.working_on("step 7")
    print("ready", flush=True)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.05)
    if failing == "mistake" or failing == str(me):
        raise {"mistake": entry.UserError("a mistake of all")}.get(failing, RuntimeError("the disk is gone"))
    if failing == "none":
        return
    time.sleep(60)
sys.exit(peers.leaving(lambda: entry.attempt("program", act)))
"""


@pytest.mark.journey
@pytest.mark.parametrize(
    ("failing", "sent", "codes", "said"),
    [
        (
            "nobody",
            signal.SIGKILL,
            [PASSING, -signal.SIGKILL, PASSING],
            "process 1 (on {host}) has ended without a word",
        ),
        ("nobody", signal.SIGSTOP, [PASSING, None, PASSING], "process 1 (on {host}) has given no sign of life for 4 s"),
        ("1", None, [PASSING, 1, PASSING], "process 1 (on {host}) failed: RuntimeError: the disk is gone"),
        ("0", None, [1, PASSING, PASSING], "process 0 (on {host}) failed: RuntimeError: the disk is gone"),
        ("mistake", None, [2, 2, 2], "program: error: a mistake of all"),
        ("none", None, [0, 0, 0], ""),
    ],
)
def test_three_processes(failing, sent, codes, said, tmp_path):
    address = free_address()
    logs = [tmp_path / f"{index}.log" for index in range(3)]
    processes = []
    for index, log in enumerate(logs):
        place = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": str(index)}
        place |= {"JAX_NUM_CPU_DEVICES": "1", "FAILING": failing, "GO": str(tmp_path / "go")}
        with log.open("w") as file:
            streams = {"stdout": file, "stderr": subprocess.STDOUT}
            processes.append(subprocess.Popen([sys.executable, "-c", PROGRAM], env={**os.environ, **place}, **streams))
    try:
        until = time.monotonic() + 120
        while not all("ready" in log.read_text() for log in logs):
            assert time.monotonic() < until
            time.sleep(0.05)
        (tmp_path / "go").touch()
        if sent is not None:
            processes[1].send_signal(sent)
        began = time.monotonic()
        for process, code in zip(processes, codes, strict=True):
            if code is not None:
                process.wait(timeout=60)
        assert time.monotonic() - began < 30
        assert [process.poll() for process in processes] == codes
        for index, log in enumerate(logs):
            if codes[index] in (PASSING, 2):
                assert said.format(host=peers.socket.gethostname()) in log.read_text()
                assert "Traceback" not in log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
