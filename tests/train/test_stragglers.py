"""Who holds up the others: a slow device, a process that waits for its data, and when it is
over.
"""

import jax
import numpy as np
import pytest
from support import use_mesh

import jaxtp
from jaxtp.train import performance
from jaxtp.train.performance import Stragglers

RECORD = {"step_seconds": 1.0, "data_wait_seconds": 0.01}


@pytest.fixture
def others(monkeypatch):
    """A run of three processes of two devices, of which this one is the first; takes what the
    others measure.
    """
    # seconds of the products and of waits, by device
    measured = np.full((2, 2, 2), [1.0, 0.01], np.float32)
    monkeypatch.setattr(performance, "is_multiprocess", lambda: True)
    monkeypatch.setattr(performance, "host_names", lambda: ["n0", "n1", "n2"])
    monkeypatch.setattr(
        performance, "gather_numbers", lambda own: np.concatenate([own[None], measured])
    )
    return measured


def watching(lines, own=(1.0, 1.1)):
    return Stragglers(jaxtp.make_mesh(dp=2), lines.append, lambda: list(own))


def test_a_slow_device_is_named_since_when_and_until_it_is_not(others):
    lines = []
    watch = watching(lines)
    for step in range(10, 60, 10):
        others[1, 1, 0] = 1.5 if step > 10 else 1.2
        kept = watch.record(step, dict(RECORD), ())
        assert kept["slowest_device"] == pytest.approx(1.5 if step > 10 else 1.2, rel=1e-6)
    assert lines == [
        "step 40: the run waits for device 1 of process 2 (on n2), which takes 1.50 times the "
        "median for the same products, since step 20"
    ]
    others[1, 1, 0] = 1.0
    watch.record(60, dict(RECORD), ())
    assert lines[1:] == ["step 60: device 1 of process 2 (on n2) no longer holds up the run"]


def test_a_process_that_waits_for_data_is_named(others):
    lines = []
    watch = watching(lines)
    others[0, :, 1] = 0.4
    for step in (1, 2, 3, 4):
        assert watch.record(step, dict(RECORD), ())["data_wait_seconds"] == pytest.approx(0.4)
    assert lines == [
        "step 3: the run waits for process 1 (on n1), which waits 0.39 s longer for data in each "
        "step of 1 s, since step 1"
    ]


def test_one_who_is_slow_now_and_then_is_not_named(others):
    lines = []
    watch = watching(lines)
    for step in range(1, 12):
        others[0, 0, 0] = 1.0 if step % 3 == 0 else 2.0
        watch.record(step, dict(RECORD), ())
    assert lines == []


def test_devices_that_share_a_cpu_are_not_compared(others, monkeypatch):
    monkeypatch.setattr(performance, "host_names", lambda: ["n0"] * 3)
    kept = Stragglers(jaxtp.make_mesh(dp=2), print).record(1, dict(RECORD), ())
    assert kept == {"step_seconds": 1.0, "data_wait_seconds": pytest.approx(0.01)}
    monkeypatch.setattr(performance, "is_multiprocess", lambda: False)
    assert Stragglers(jaxtp.make_mesh(dp=2), print).record(1, dict(RECORD), ()) == RECORD


def test_of_two_devices_one_can_be_slow(monkeypatch):
    lines = []
    monkeypatch.setattr(performance, "gather_numbers", lambda own: own[None])
    watch = watching(lines, own=(1.0, 1.3))
    for step in (1, 2, 3):
        assert watch.record(step, dict(RECORD), ())["slowest_device"] == pytest.approx(1.3)
    assert len(lines) == 1


def test_the_products_are_timed_on_each_device():
    with use_mesh(dp=2):
        times = performance.matmul_timer(jax.devices()[:2])()
    assert len(times) == 2
    assert min(times) > 0
