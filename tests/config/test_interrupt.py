"""Which signals stop a command, and what a second one does."""

import os
import signal

import pytest

from jaxtp.config.entry import SIGNALS, Interrupt


@pytest.fixture(autouse=True)
def _handlers():
    """The test's process must outlive what the run would not."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_and_handlers_come_back(number):
    with Interrupt() as interrupt:
        assert interrupt.received is None
        os.kill(os.getpid(), number)
        assert interrupt.received == number.name
    assert {signal.getsignal(each) for each in SIGNALS} == {signal.default_int_handler}


@pytest.mark.parametrize("first", SIGNALS)
def test_a_terminal_that_closes_again_does_not_end_the_run(first):
    """The kernel sends SIGHUP, then the shell does to its jobs, then the kernel again when the shell ends."""
    with Interrupt() as interrupt:
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert interrupt.received == first.name


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_request_ends_the_run(first):
    with Interrupt():
        os.kill(os.getpid(), first)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_was_ignored_stays_ignored():
    """As nohup asks."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.received is None
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        assert interrupt.received == "SIGTERM"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_that_the_first_ctrl_c_was_received(capfd, monkeypatch, terminal):
    monkeypatch.setattr(os, "isatty", lambda descriptor: terminal)
    with Interrupt(notice="stops soon") as interrupt:
        signal.raise_signal(signal.SIGTERM)
        assert not capfd.readouterr().err
        assert interrupt.received
    with Interrupt(notice="stops soon"):
        signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err == "\nstops soon\n" * terminal
