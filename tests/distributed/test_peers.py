"""Processes that watch each other: one ends, hangs, fails or leaves; messages and exit codes of the
others.
"""

import json
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.errors import JaxRuntimeError
from runs import free_address, run_program
from support import swept
from tables import read_table

from jaxtp.config.entry import MISTAKE, TEMPORARY, WRONG
from jaxtp.distributed import agreement, peers
from jaxtp.distributed.environment import LaunchError
from jaxtp.distributed.links import Link

# Of `SystemExit`, which Python itself ignores in a thread.
pytestmark = pytest.mark.filterwarnings("ignore:Exception in thread peers")
NAMES = ["n0", "n1", "n2"]
LOST = {"process": 2, "how": "has ended without a message", "grace": 0.0}


class Process:
    """One process of three, with frequent heartbeats, and the other ends of its connections."""

    def __init__(self, me, **settings):
        self.codes = []
        connected = (1, 2) if me == 0 else (0,)
        pairs = {other: socket.socketpair() for other in connected}
        self.sockets = {other: far for other, (_, far) in pairs.items()}
        self.others = {other: Link(far) for other, far in self.sockets.items()}
        links = {other: Link(near) for other, (near, _) in pairs.items()}
        self.ends = [*links.values(), *self.others.values()]
        self.peers = peers.Peers(
            NAMES, links, **{"beat": 0.05, "grace": 0.5, "end_process": self.end} | settings
        )
        self.peers.activity = "step 7"

    def end(self, code):
        self.codes.append(code)
        raise SystemExit  # ends the thread alone


def watch_ends():
    """Waits for the end of the watching threads."""
    for thread in threading.enumerate():
        if thread.name == "peers":
            thread.join(10)
            assert not thread.is_alive()


def codes_at_the_end(process):
    """Returns the exit codes with which a process would end."""
    watch_ends()
    return process.codes


@pytest.fixture
def start(monkeypatch):
    """Starts process 0 or 1, which ends after the test."""
    made = []

    def start(me, **settings):
        monkeypatch.setattr(peers.jax, "process_index", lambda: me)
        made.append(Process(me, **settings))
        return made[-1]

    yield start
    for process in made:
        for link in process.others.values():
            link.close()
    watch_ends()
    for process in made:
        for link in process.ends:
            link.close()


def message(link):
    """Returns the next message that is not a heartbeat; None after five seconds."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        if found := link.receive(0.5):
            return found
    return None


def test_ended_process_is_named_to_all(start, capsys):
    process = start(0)
    process.others[2].close()
    assert message(process.others[1]) == LOST | {"code": TEMPORARY}
    assert codes_at_the_end(process) == [TEMPORARY]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: process 2 (on n2) has ended without a message; process 0 (on n0) cannot continue"
    )
    assert line.endswith("step 7 and ends (exit code 75)")


def test_failure_reported_by_process_0_ends_all_processes(start, capsys):
    process = start(1)
    process.others[0].send(LOST)
    assert codes_at_the_end(process) == [TEMPORARY]
    assert (
        "process 2 (on n2) has ended without a message; process 1 (on n1)"
        in capsys.readouterr().err
    )


@swept("me", [0, 1], 1)
def test_process_without_heartbeats_is_lost(me, start, monkeypatch, capsys):
    monkeypatch.setattr(peers, "SILENCE", 1.0)
    process = start(me)
    silent = {0: 2, 1: 0}[me]
    heard = [link for other, link in process.others.items() if other != silent]
    until = time.monotonic() + 10
    while not process.codes and time.monotonic() < until:
        for link in heard:
            link.send({})
        time.sleep(0.05)
    assert process.codes == [TEMPORARY]
    assert (
        f"process {silent} (on n{silent}) has sent no heartbeat for 1 s" in capsys.readouterr().err
    )


@pytest.mark.parametrize(("said", "code"), [(MISTAKE, MISTAKE), (WRONG, WRONG), (1, TEMPORARY)])
def test_failure_of_a_peer_determines_the_exit_code(said, code, start, capsys):
    process = start(0)
    why = "TokenError: a\nerror: \x1b[31mb " + "ü" * 1000
    process.others[1].send({"process": 1, "failure": why, "code": said})
    assert message(process.others[2]) == {
        "process": 1,
        "how": f"failed: {why}",
        "grace": 0.5,
        "code": code,
    }
    assert codes_at_the_end(process) == [code]
    error = capsys.readouterr().err
    assert r"process 1 (on n1) failed: TokenError: a\nerror: \x1b[31mb " in error
    assert error.count("\n") == 1


def test_process_may_exit_by_itself_after_a_peer_fails(start, capsys):
    process = start(0, grace=60)
    failure = {"failure": "TokenError: token 9", "code": MISTAKE}
    process.others[1].send(failure | {"process": 1})
    assert message(process.others[2])
    process.peers.leave(**failure)
    assert message(process.others[2]) == failure | {"process": 0}
    process.others[2].close()
    assert codes_at_the_end(process) == []
    assert capsys.readouterr().err == ""


def test_processes_that_leave_are_not_lost(start):
    process = start(0)
    for other, link in process.others.items():
        link.send({"process": other, "failure": None, "code": 0})
        link.close()
    assert codes_at_the_end(process) == []


@pytest.mark.parametrize("data", [b"\n", b"\xff\n", b"[" * 4000 + b"\n", b"[1]\n", b"x" * 70000])
def test_invalid_data_counts_as_a_lost_process(data, start):
    process = start(0)
    process.sockets[1].setblocking(True)
    process.sockets[1].sendall(data)
    assert codes_at_the_end(process) == [TEMPORARY]


def test_heartbeats_are_regular(start):
    """If each heartbeat were answered at once, two processes would never stop answering."""
    process = start(0, beat=0.5)
    link = process.others[1]
    began = time.monotonic()
    for _ in range(50):
        link.send({})
        time.sleep(0.01)
    time.sleep(0.2)
    received = sum(1 for _ in iter(link.receive, None))
    assert received <= 3 + (time.monotonic() - began) / 0.5
    assert process.codes == []


def test_only_an_equal_failure_is_announced_after_a_peer_fails(start):
    """Gloo and NCCL fail if another process has ended."""
    for failure, grace, codes in (
        ("NonFiniteError: step 3", 0.5, [TEMPORARY]),
        (f"{JaxRuntimeError.__name__}: step 3", 60, []),
    ):
        process = start(0, grace=grace, beat=1.0)
        process.others[1].send({"process": 1, "failure": failure, "code": 1})
        process.peers.fail(JaxRuntimeError("step 3"))
        assert process.codes == codes


def test_unequal_numbers_of_devices_are_an_error(monkeypatch):
    """Every process sees all devices, and raises the same error without an exchange of values."""
    devices = [SimpleNamespace(process_index=process) for process in (0, 0, 1, 1, 2)]
    monkeypatch.setattr(agreement, "is_multiprocess", lambda: True)
    monkeypatch.setattr(peers.jax, "devices", lambda: devices)
    with pytest.raises(LaunchError, match="process 2 has 1 devices, and process 0 has 2"):
        agreement.watch()


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
def test_rejected_connections_are_counted_and_one_host_listens_on_loopback(
    bind, monkeypatch, capsys
):
    """Linux answers on all of 127.0.0.0/8, so 127.0.0.2 represents another interface."""
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    monkeypatch.setattr(peers.jax, "process_index", lambda: 1)
    exchanged = queue.Queue()
    monkeypatch.setattr(
        peers,
        "all_gather_json",
        lambda value: [exchanged.put(value)] if value else [exchanged.get()],
    )
    names = [socket.gethostname()] * 2 if bind is None else ["no-such-host.invalid", "b"]
    found = {}
    listening = threading.Thread(
        target=lambda: found.update(peers.accept_peers(names, bind)), daemon=True
    )
    listening.start()
    port, token = exchanged.get(timeout=10)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    for line in (
        b'{"process": 1}\n',
        b"GET / HTTP/1.0\n",
        f'{{"process": 1, "token": "{token}"}}\n'.encode(),
    ):
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(line)
            stranger.settimeout(5)
            assert b"welcome" not in stranger.recv(4096)
    exchanged.put([port, token])
    monkeypatch.setattr(peers, "coordinator_host", lambda: bind or "127.0.0.2")
    links = peers.reach_peer(names)
    listening.join(10)
    assert (list(links), list(found)) == ([0], [1])
    for link in (*links.values(), *found.values()):
        link.close()
    assert (
        capsys.readouterr().err
        == "dropped 3 connections that did not come from processes of this run\n"
    )


ENDINGS = read_table(__file__)


@pytest.mark.journey
def test_three_processes(tmp_path):
    """One program imports JAX, and forks three processes for each case."""
    command = [
        sys.executable,
        str(Path(__file__).parent.parent / "three_processes.py"),
        str(tmp_path),
        *ENDINGS,
    ]
    addresses = json.dumps([free_address() for _ in ENDINGS])
    variables = {"JAX_NUM_CPU_DEVICES": "1", "ADDRESSES": addresses}
    done = run_program(*command, env=os.environ | variables, timeout=600)
    assert done.returncode == 0, done.stderr
    ended = json.loads(done.stdout)
    assert ended == {ending: codes for ending, (codes, _) in ENDINGS.items()}
    for ending, (codes, said) in ENDINGS.items():
        for index, code in enumerate(codes):
            # A process whose own flags are refused has said so before.
            if code in (TEMPORARY, 2) and (ending, index) != ("flags", 1):
                log = (tmp_path / f"{ending}-{index}.log").read_text()
                assert said.format(host=socket.gethostname()) in log
                assert "Traceback" not in log
