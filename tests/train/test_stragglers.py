"""Who holds up the others: a process that waits for its data, and when it is over."""

from types import SimpleNamespace

import numpy as np
import pytest

import jaxtp
from jaxtp.guards import stragglers
from jaxtp.guards.stragglers import Stragglers

RECORD = {"step_seconds": 1.0, "data_wait_seconds": 0.01}


@pytest.fixture
def waits(monkeypatch):
    """A run of three processes, of which this one is the first; takes the waits of the others."""
    measured = np.full((2, 1), 0.01, np.float32)
    monkeypatch.setattr(stragglers, "is_multiprocess", lambda: True)
    monkeypatch.setattr(stragglers, "host_names", lambda: ["n0", "n1", "n2"])
    monkeypatch.setattr(
        stragglers, "gather_numbers", lambda own: np.concatenate([own[None], measured])
    )
    return measured


class Watch:
    """The guard of a loop, whose lines are kept."""

    def __init__(self, lines):
        self.loop = SimpleNamespace(line=lines.append)
        self.guard = Stragglers(jaxtp.make_mesh(dp=2))

    def record(self, step):
        record = {"step": step, **RECORD}
        self.guard.at_log(self.loop, record)
        return record


def test_a_process_that_waits_for_data_is_named_since_when_and_until_it_does_not(waits):
    lines = []
    watch = Watch(lines)
    for step in (1, 2, 3, 4, 5):
        waits[0] = 0.4 if step > 1 else 0.1
        kept = watch.record(step)
        assert kept["data_wait_seconds"] == pytest.approx(0.4 if step > 1 else 0.1)
    assert lines == [
        "step 4: the run waits for process 1 (on n1), which waits 0.39 s longer for data in each "
        "step of 1 s, since step 2"
    ]
    waits[0] = 0.01
    watch.record(6)
    assert lines[1:] == ["step 6: process 1 (on n1) no longer holds up the run"]


def test_one_who_is_late_now_and_then_is_not_named(waits):
    lines = []
    watch = Watch(lines)
    for step in range(1, 12):
        waits[0] = 0.01 if step % 3 == 0 else 0.4
        watch.record(step)
    assert lines == []


def test_memory_is_the_most_of_all_devices(monkeypatch):
    sizes = iter([3, 7])
    monkeypatch.setattr(stragglers, "memory_record", lambda _: {"memory_bytes": next(sizes)})
    assert Watch([]).record(1) == {"step": 1, **RECORD, "memory_bytes": 7}
