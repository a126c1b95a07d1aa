"""Processes that are started by hand: all of them, a missing one, and invalid ids and counts."""

import os
import re
import socket
import threading
import time
from functools import partial

import pytest
from runs import free_address

from jaxtp.distributed import joining
from jaxtp.distributed.environment import LaunchError
from jaxtp.distributed.joining import Wait, rendezvous
from jaxtp.distributed.links import connect

TOKEN = "the token"
STRANGER = b'{"process": 1, "count": 99, "host": "x"}\n'


def come(port, process, count, seconds, token=TOKEN, host="127.0.0.1"):
    rendezvous(Wait(process, count, (host, port), seconds), host, token)


def say_hello(port, token=TOKEN, **hello):
    """Sends the hello of a process that then goes away; returns whether it is admitted."""
    link = connect(socket.create_connection(("127.0.0.1", port), timeout=1), token, hello, 5.0)
    if link:
        link.close()
    return link is not None


def free_port():
    return int(free_address().rpartition(":")[2])


def in_a_thread(action, *arguments):
    thread = threading.Thread(target=action, args=arguments, daemon=True)
    thread.start()
    return thread


def reached(send):
    """Sends something to the listening process as soon as it listens."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        try:
            send()
            return
        except OSError:
            time.sleep(0.02)


def send_bytes(port, data):
    with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(data)


def meeting(places, seconds=20, strangers=(), gone=None):
    """Returns the error of each process, or None.

    Args:
      places: the (id, count) of each process, and its token if it has another one.
      strangers: bytes that unrelated connections send first.
      gone: the hello of a process that goes away before.
    """
    port = free_port()
    ends = {}

    def take_part(index, process, count, token=TOKEN):
        try:
            come(port, process, count, seconds, token)
            ends[index] = None
        except LaunchError as error:
            ends[index] = str(error)

    threads = [in_a_thread(take_part, 0, *places[0])]
    for data in strangers:
        reached(partial(send_bytes, port, data))
    if gone:
        reached(partial(say_hello, port, **gone))
    threads += [
        in_a_thread(take_part, index, *place) for index, place in enumerate(places) if index
    ]
    for thread in threads:
        thread.join(60)
    return [ends[index] for index in range(len(places))]


def test_processes_meet_at_the_rendezvous():
    for count in (1, 2, 5):
        assert meeting([(process, count) for process in range(count)]) == [None] * count


def test_missing_process_is_named_to_all():
    first, other = meeting([(0, 4), (2, 4)], seconds=1)
    assert first == other
    assert first.startswith(
        "process 1, 3 of 4 did not join within 1 s: is it running, with the address 127.0.0.1:"
    )
    assert "and JAX_PROCESS_ID=1? (JAXTP_JOIN_SECONDS" in first


def test_invalid_ids_and_counts_end_all_processes_at_once():
    here = f"{socket.gethostname()}, pid {os.getpid()}"
    twice = (
        f"two processes have the id 1, one on {here} and one on {here}: set JAX_PROCESS_ID to "
        "0 to 2, each once"
    )
    assert {*meeting([(0, 3), (1, 3), (1, 3)], seconds=60)} == {twice}
    counts = f"process 1 (on {here}) expects 4 processes, but process 0 expects 3"
    assert {*meeting([(0, 3), (1, 4)], seconds=60)} == {counts}


@pytest.mark.journey
def test_second_process_0_on_a_host_cannot_listen():
    ends = meeting([(0, 3), (0, 3), (1, 3)], seconds=2)
    assert sum("this host cannot listen there (Address already in use)" in end for end in ends) == 1


def test_restarted_process_may_reconnect():
    gone = {"process": 1, "count": 3, "host": "a"}
    assert meeting([(0, 3), (1, 3), (2, 3)], gone=gone) == [None] * 3


def test_text_from_another_process_stays_on_one_line():
    (error,) = meeting([(0, 2)], gone={"process": 1, "count": 3, "host": "a\nerror: \x1b[31mb"})
    assert (
        error == r"process 1 (on a\nerror: \x1b[31mb) expects 3 processes, but process 0 expects 2"
    )


def test_unrelated_connections_are_dropped():
    strangers = [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"[" * 4000 + b"\n",
        b'{"process": "1"}\n',
        b"x" * 9000,
        STRANGER,
    ]
    # Python's reader of JSON and its writer refuse different depths.
    nested = [
        b"[" * depth + b"1" + b"]" * depth
        for depth in (100, 900, 950, 970, 980, 985, 990, 995, 2000)
    ]
    for proof in (b'"00"', b"{}", b'"\xc3\xa9"', b'"\\ud800"', *nested):
        strangers.append(STRANGER.replace(b"}", b', "challenge": [1], "proof": ' + proof + b"}"))
        strangers.append(STRANGER.replace(b"}", b', "challenge": ' + proof + b', "proof": "00"}'))
    assert meeting([(0, 2), (1, 2)], strangers=strangers) == [None] * 2


def test_silent_connections_delay_no_process():
    """Half of them send a byte. All are read in parallel: one after the other, they would take
    minutes.
    """
    port = free_port()
    processes = [in_a_thread(come, port, 0, 2, 20)]
    reached(partial(send_bytes, port, b"{"))
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
    for stranger in strangers[:50]:
        stranger.sendall(b"{")
    processes.append(in_a_thread(come, port, 1, 2, 20))
    for process in processes:
        process.join(20)
    for stranger in strangers:
        stranger.close()
    assert not any(process.is_alive() for process in processes)


def test_unanswered_address_is_reported_before_the_timeout(monkeypatch, capsys):
    monkeypatch.setattr(joining, "LONG_WAIT", 0.1)
    with pytest.raises(
        LaunchError, match="nothing answers there after 1 s: process 0 must run on that host"
    ):
        come(free_port(), 1, 2, 1)
    assert "still waiting for all to start, up to 1 s" in capsys.readouterr().err


def test_unreachable_address_is_reported_at_once_and_in_the_error(monkeypatch, capsys):
    said = []
    monkeypatch.setattr(
        joining.time,
        "sleep",
        lambda _: said.append(capsys.readouterr().err) or threading.Event().wait(0.2),
    )
    for host, problem in (
        ("no-such-host.invalid", "the host has no address ("),
        ("node1..cluster", "the host has no address (not a valid host name)"),
        ("255.255.255.255", "the address cannot be reached ("),
    ):
        said.clear()
        with pytest.raises(LaunchError) as error:
            come(99, 1, 2, 1, host=host)
        where = f"process 1 of 2 at {host}:99: {problem}"
        assert str(error.value).startswith(where)
        first, *later = said
        assert first.startswith(where)
        assert first.endswith("; still trying\n")
        assert {*later} == {""}, "it is said once"


def test_peers_without_the_token_are_rejected(capsys):
    """Process 0 rejects a process, and a process rejects process 0; both report it. An unsigned
    line ends no process.
    """
    first, other = meeting([(0, 2, "token 0"), (1, 2, "token 1")], seconds=2)
    dropped = (
        r"did not join within 2 s.*; dropped \d+ connections that did not prove the "
        r"token of "
        r"this run \(the same "
    )
    assert re.search(
        f"process 1 of 2 {dropped}command line on all hosts, or JAXTP_TOKEN\\), from 127.0.0.1$",
        first,
    )
    assert "the program that answers there does not prove the token of this run" in other
    assert capsys.readouterr().err.count("does not prove the token of this run") == 1


def test_token_is_never_sent():
    sent = []
    server = socket.create_server(("127.0.0.1", 0))

    def record():
        connection, _ = server.accept()
        connection.sendall(b'{"challenge": "0"}\n')
        sent.append(connection.recv(4096))
        connection.sendall(sent[0])  # what it has signed itself proves nothing
        connection.close()

    recording = in_a_thread(record)
    assert not say_hello(server.getsockname()[1], process=1)
    recording.join(10)
    server.close()
    assert b"proof" in sent[0]
    assert TOKEN.encode() not in sent[0]
