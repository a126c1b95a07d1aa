"""What a process learns of the others: one ends, hangs, fails or leaves, and what it says before it ends itself."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from runs import free_address
from support import journeys, sweep

from jaxtp.config.entry import MISTAKE, TEMPORARY, WRONG
from jaxtp.distributed import agreement, peers
from jaxtp.distributed.environment import LaunchError
from jaxtp.distributed.links import Link

NAMES = ["n0", "n1", "n2"]


@pytest.fixture
def process(monkeypatch):
    """Makes what one process of three has, and returns it with the other ends of its connections."""
    codes, made, links = [], [], []

    def end(code):
        codes.append(code)
        made[-1]._leaving.set()
        made[-1]._links.clear()

    monkeypatch.setattr(peers.os, "_exit", end)
    monkeypatch.setattr(peers, "_BEAT", 0.05)
    monkeypatch.setattr(peers, "_GRACE", 0.5)

    def make(me):
        monkeypatch.setattr(peers.jax, "process_index", lambda: me)
        pairs = {other: map(Link, socket.socketpair()) for other in ((1, 2) if me == 0 else (0,))}
        pairs = {other: tuple(pair) for other, pair in pairs.items()}
        watched = peers.Peers(NAMES, {other: near for other, (near, _) in pairs.items()})
        watched.activity = "step 7"
        made.append(watched)
        links.extend(link for pair in pairs.values() for link in pair)
        return watched, {other: far for other, (_, far) in pairs.items()}, codes

    yield make
    for watched in made:
        watched._leaving.set()
        watched._links.clear()
        watched._thread.join(10)
    for link in links:
        link.close()


def message(link, seconds=5.0):
    """What comes first besides signs of life."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := link.receive(0.5):
            return found
    return None


def test_a_process_that_ends_is_named_to_all(process, capsys):
    watched, others, codes = process(0)
    others[2].close()
    told = message(others[1])
    assert told == {"process": 2, "how": "has ended without a word", "grace": 0.0, "code": TEMPORARY}
    watched._thread.join(10)
    assert codes == [TEMPORARY]
    assert capsys.readouterr().err == (
        "error: process 2 (on n2) has ended without a word; process 0 (on n0) cannot continue with step 7 and ends "
        "(exit code 75)\n"
    )


def test_what_process_0_learns_ends_the_others_too(process, capsys):
    watched, others, codes = process(1)
    others[0].send({"process": 2, "how": "has ended without a word", "grace": 0.0})
    watched._thread.join(10)
    assert codes == [TEMPORARY]
    assert (
        "process 2 (on n2) has ended without a word; process 1 (on n1) cannot continue with step 7"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("me", sweep([0, 1], 1))
def test_one_that_is_silent_is_lost(me, process, monkeypatch, capsys):
    monkeypatch.setattr(peers, "SILENCE", 2.0)
    watched, others, codes = process(me)
    silent = 2 if me == 0 else 0
    until = time.monotonic() + 10
    while watched._thread.is_alive() and time.monotonic() < until:
        for other, connection in others.items():
            if other != silent:
                connection.send({})
        time.sleep(0.05)
    assert codes == [TEMPORARY]
    assert f"process {silent} (on n{silent}) has sent no heartbeat for 2 s" in capsys.readouterr().err


@pytest.mark.parametrize(("said", "code"), [(MISTAKE, MISTAKE), (WRONG, WRONG), (1, TEMPORARY), (TEMPORARY, TEMPORARY)])
def test_after_the_failure_of_another_a_process_ends_for_its_reason(said, code, process, capsys):
    watched, others, codes = process(0)
    why = "TokenError: token 9 " + "ü" * 1000
    others[1].send({"process": 1, "failure": why, "code": said})
    assert message(others[2]) == {"process": 1, "how": f"failed: {why}", "grace": 0.5, "code": code}
    watched._thread.join(10)
    assert codes == [code]
    assert f"process 1 (on n1) failed: {why}; process 0" in capsys.readouterr().err


def test_after_the_failure_of_another_a_process_may_still_end_by_itself(process, monkeypatch, capsys):
    monkeypatch.setattr(peers, "_GRACE", 60)
    watched, others, codes = process(0)
    others[1].send({"process": 1, "failure": "TokenError: token 9", "code": MISTAKE})
    assert message(others[2])
    watched.leave("TokenError: token 9", MISTAKE)
    assert message(others[2]) == {"process": 0, "failure": "TokenError: token 9", "code": MISTAKE}
    others[2].close()
    watched._thread.join(10)
    assert codes == []
    assert capsys.readouterr().err == ""


def test_one_that_leaves_at_its_end_is_not_lost(process, capsys):
    watched, others, codes = process(0)
    for other, link in others.items():
        link.send({"process": other, "failure": None, "code": 0})
        link.close()
    watched._thread.join(10)
    assert not watched._thread.is_alive()
    assert codes == []


@pytest.mark.parametrize("data", [b"\n", b"\xff\n", b"[" * 4000 + b"\n", b"[1]\n", b"x" * 70000])
def test_what_is_no_message_counts_as_its_end(data, process, capsys):
    watched, others, codes = process(0)
    others[1]._socket.setblocking(True)
    others[1]._socket.sendall(data)
    watched._thread.join(10)
    assert codes == [TEMPORARY]


def test_signs_of_life_come_by_the_clock(process, monkeypatch):
    """One that was answered at once would be answered without end."""
    monkeypatch.setattr(peers, "_BEAT", 0.5)
    _, others, codes = process(0)
    began = time.monotonic()
    for _ in range(50):
        others[1].send({})
        time.sleep(0.01)
    time.sleep(0.2)
    received = sum(1 for _ in iter(others[1].receive, None))
    assert received <= 3 + (time.monotonic() - began) / 0.5
    assert codes == []


def test_an_error_that_follows_from_the_end_of_another_is_not_this_ones(process, monkeypatch):
    """Gloo and NCCL fail where a process has ended; what all have met, each says by itself."""
    watched, others, codes = process(0)
    monkeypatch.setattr(agreement, "_current", watched)
    others[1].send({"process": 1, "failure": "NonFiniteError: step 3", "code": 1})
    assert message(others[2])
    agreement.report_failure(FloatingPointError("step 4"))
    assert codes == [TEMPORARY]

    monkeypatch.setattr(peers, "_GRACE", 60)
    watched, others, codes = process(0)
    codes.clear()
    monkeypatch.setattr(agreement, "_current", watched)
    others[1].send({"process": 1, "failure": "FloatingPointError: step 3", "code": 1})
    assert message(others[2])
    agreement.report_failure(FloatingPointError("step 3"))
    assert codes == []


def test_processes_with_other_numbers_of_devices_are_named(monkeypatch):
    """Every process sees the devices of all, and raises the same; what exchanges values would fail."""
    devices = [SimpleNamespace(process_index=process) for process in (0, 0, 1, 1, 2)]
    monkeypatch.setattr(agreement, "is_multiprocess", lambda: True)
    monkeypatch.setattr(peers.jax, "devices", lambda: devices)
    with pytest.raises(LaunchError, match="process 2 has 1 devices, and process 0 has 2: every process needs"):
        agreement.watch()


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
def test_strangers_are_counted_and_one_host_listens_on_loopback(bind, monkeypatch, capsys):
    """Linux answers on all of 127.0.0.0/8, so that 127.0.0.2 stands for another interface."""
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(peers.jax, "process_index", lambda: 1)
    exchanged = queue.Queue()

    monkeypatch.setattr(peers, "all_gather_json", lambda value: [exchanged.put(value)] if value else [exchanged.get()])
    names, found = [socket.gethostname()] * 2 if bind is None else ["no-such-host.invalid", "b"], {}
    listening = threading.Thread(target=lambda: found.update(peers._accept(names, bind)), daemon=True)
    listening.start()
    port, token = exchanged.get(timeout=10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    for line in (b'{"process": 1}\n', b"GET / HTTP/1.0\n", f'{{"process": 1, "token": "{token}"}}\n'.encode()):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(line)
            stranger.settimeout(5)
            assert b"welcome" not in stranger.recv(4096)
    exchanged.put([port, token])
    monkeypatch.setattr(peers, "coordinator_host", lambda: "127.0.0.1")
    links = peers._connect(names)
    listening.join(10)
    assert list(links) == [0]
    assert list(found) == [1]
    for link in (*links.values(), *found.values()):
        link.close()
    assert capsys.readouterr().err == "dropped 3 connections that did not come from processes of this run\n"


def test_what_another_says_stays_on_one_line(process, capsys):
    watched, others, codes = process(0)
    others[1].send({"process": 1, "failure": "a\nerror: \x1b[31mb", "code": 1})
    watched._thread.join(10)
    assert codes == [TEMPORARY]
    assert capsys.readouterr().err.count("\n") == 1


PROGRAM = """
import os, sys, time
from jaxtp.config import entry
from jaxtp.distributed import agreement, peers
from jaxtp.distributed.agreement import raise_everywhere
from jaxtp.distributed.joining import join_processes
peers.SILENCE = 4.0
me, failing = int(os.environ["JAX_PROCESS_ID"]), os.environ["FAILING"]
def act():
    join_processes()
    agreement.watch()
    agreement.working_on("step 7")
    print("ready", flush=True)
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.05)
    if failing == "flags":
        with raise_everywhere():
            if me == 1:
                sys.exit(2)
    if failing == "mistake" or failing == str(me):
        raise {"mistake": entry.UserError("a mistake of all")}.get(failing, RuntimeError("the disk is gone"))
    if failing == "none":
        return
    time.sleep(60)
sys.exit(agreement.run_and_report(lambda: entry.attempt("program", act)))
"""


ENDINGS = {
    "killed": (
        *("nobody", signal.SIGKILL, [TEMPORARY, -signal.SIGKILL, TEMPORARY]),
        "process 1 (on {host}) has ended without a word",
    ),
    "stopped": (
        *("nobody", signal.SIGSTOP, [TEMPORARY, None, TEMPORARY]),
        "process 1 (on {host}) has sent no heartbeat for 4 s",
    ),
    "process 1": ("1", None, [TEMPORARY, 1, TEMPORARY], "process 1 (on {host}) failed: RuntimeError: the disk is gone"),
    "process 0": ("0", None, [1, TEMPORARY, TEMPORARY], "process 0 (on {host}) failed: RuntimeError: the disk is gone"),
    "mistake": ("mistake", None, [2, 2, 2], "program: error: a mistake of all"),
    "flags": ("flags", None, [2, 2, 2], "process 1 (on {host}) cannot continue: its command line is refused"),
    "none": ("none", None, [0, 0, 0], ""),
}


@pytest.mark.parametrize("ending", journeys([*ENDINGS], "killed", "stopped", "process 0", "flags"))
def test_three_processes(ending, tmp_path):
    failing, sent, codes, said = ENDINGS[ending]
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
        assert time.monotonic() - began < 60
        assert [process.poll() for process in processes] == codes
        for index, log in enumerate(logs):
            if codes[index] in (TEMPORARY, 2) and (failing, index) != ("flags", 1):
                assert said.format(host=socket.gethostname()) in log.read_text()
                assert "Traceback" not in log.read_text()
    finally:
        for process in processes:
            process.kill()
            process.wait()
