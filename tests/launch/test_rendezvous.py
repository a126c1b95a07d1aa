"""The processes that people start by hand: all of them, one that is missing, ids and counts that cannot be."""

import json
import os
import socket
import threading
import time

import pytest
from runs import free_address

from jaxtp.launch import rendezvous
from jaxtp.launch.environment import LaunchError
from jaxtp.launch.rendezvous import meet


def meeting(places, seconds=20.0, before=()):
    """What becomes of processes, each with its (id, count): None, or the error of each. `before` is sent first."""
    port = int(free_address().rpartition(":")[2])
    ends = {}

    def take_part(index, process, count):
        try:
            meet("127.0.0.1", port, count, process, seconds)
            ends[index] = None
        except LaunchError as error:
            ends[index] = str(error)

    threads = [threading.Thread(target=take_part, args=(i, *place), daemon=True) for i, place in enumerate(places)]
    threads[0].start()
    for data in before:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
                    connection.sendall(data)
                break
            except OSError:
                time.sleep(0.02)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [ends[index] for index in range(len(places))]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_processes_meet(count):
    assert meeting([(process, count) for process in range(count)]) == [None] * count


def test_one_that_is_missing_is_named_to_all():
    first, other = meeting([(0, 4), (2, 4)], seconds=1.0)
    assert first == other
    assert first.startswith("process 1, 3 of 4 did not come within 1 s: does it run, with the address 127.0.0.1:")
    assert "and JAX_PROCESS_ID=1? (JAXTP_JOIN_SECONDS" in first


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (
            [(0, 3), (1, 3), (1, 3)],
            "two processes have the id 1, one on {host} and one on {host}: set JAX_PROCESS_ID to 0 to 2, each once",
        ),
        ([(0, 3), (1, 4)], "process 1 (on {host}) expects 4 processes, and process 0 3"),
    ],
)
def test_ids_and_counts_that_cannot_be_end_all_at_once(places, said):
    began = time.monotonic()
    assert set(meeting(places)) == {said.format(host=f"{socket.gethostname()}, pid {os.getpid()}")}
    assert time.monotonic() - began < 10


@pytest.mark.journey
def test_a_second_process_0_on_its_host_cannot_listen():
    ends = meeting([(0, 3), (0, 3), (1, 3)], seconds=1.5)
    assert sum("this host cannot listen there (Address already in use)" in end for end in ends) == 1


def test_one_that_went_away_may_come_again():
    gone = json.dumps({"process": 1, "count": 2, "host": "a"}).encode() + b"\n"
    assert meeting([(0, 3), (1, 3), (2, 3)], before=[gone.replace(b'"count": 2', b'"count": 3')]) == [None] * 3


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.0\r\n\r\n", b"[" * 4000 + b"\n", b'{"process": "1"}\n', b"x" * 9000, b"3\n"]
)
def test_strangers_are_left_alone(data):
    assert meeting([(0, 2), (1, 2)], before=[data]) == [None] * 2


def test_strangers_hold_up_nobody(monkeypatch):
    """One is silent, one says a byte now and then; they are heard beside the others, and not for ever."""
    port, ends = int(free_address().rpartition(":")[2]), []

    def take_part(process):
        began = time.monotonic()
        meet("127.0.0.1", port, 2, process, 20.0)
        ends.append(time.monotonic() - began)

    first = threading.Thread(target=take_part, args=(0,), daemon=True)
    first.start()
    time.sleep(0.3)
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(100)]
    for stranger in strangers[:50]:
        stranger.sendall(b"{")
    other = threading.Thread(target=take_part, args=(1,), daemon=True)
    other.start()
    other.join(20)
    first.join(20)
    for stranger in strangers:
        stranger.close()
    assert len(ends) == 2
    assert max(ends) < 15  # one after the other they would take minutes


def test_where_nothing_answers_it_is_said_in_time(monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "PATIENCE", 0.1)
    began = time.monotonic()
    with pytest.raises(LaunchError, match="nothing answers there after 1 s: process 0 has to run on that host"):
        meet("127.0.0.1", int(free_address().rpartition(":")[2]), 2, 1, 1.0)
    assert time.monotonic() - began < 10
    assert "still waiting for all to start, up to 1 s" in capsys.readouterr().err


def test_a_host_that_no_name_service_knows_is_said_so_too():
    with pytest.raises(LaunchError, match=r"at no-such-host\.invalid:99: the host has no address"):
        meet("no-such-host.invalid", 99, 2, 1, 0.5)
    with pytest.raises(LaunchError, match="no name that a host can have"):
        meet("node1..cluster", 99, 2, 1, 0.5)
