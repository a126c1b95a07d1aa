"""Which signals stop a command, and what a second one does."""

import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest

from jaxtp.config.entry import INTERRUPTED, SIGNALS, Interrupt, InterruptError, attempt, in_thread


@pytest.fixture(autouse=True)
def _handlers():
    """The test's process must outlive what the run would not."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_asks_and_a_second_one_ends_the_run(first):
    """A terminal that closes again does not: the kernel sends SIGHUP, then the shell does to its
    jobs, then the kernel again when the shell ends.
    """
    with Interrupt() as interrupt:
        assert interrupt.received is None
        for number in (first, signal.SIGHUP, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert interrupt.received == first.name
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {signal.getsignal(each) for each in SIGNALS} == {signal.default_int_handler}


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


def test_a_terminal_shows_that_the_first_ctrl_c_was_received(capfd, monkeypatch):
    for terminal in (True, False):
        monkeypatch.setattr(os, "isatty", lambda descriptor, terminal=terminal: terminal)
        for number in (signal.SIGTERM, signal.SIGINT):
            with Interrupt(notice="stops soon"):
                signal.raise_signal(number)
            is_shown = terminal and number == signal.SIGINT
            assert capfd.readouterr().err == "\nstops soon\n" * is_shown


def test_ctrl_c_at_the_start_ends_at_once_and_later_only_asks(capfd, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    with Interrupt(notice="stops soon", at_start="nothing is lost") as interrupt:
        for _ in range(2):
            with pytest.raises(InterruptError, match="nothing is lost"):
                signal.raise_signal(signal.SIGINT)
        with pytest.raises(InterruptError):
            interrupt.defer()
    assert "stops soon" not in capfd.readouterr().err
    with Interrupt(notice="stops soon", at_start="nothing is lost") as interrupt:
        interrupt.defer()
        signal.raise_signal(signal.SIGINT)
        assert interrupt.received == "SIGINT"
    assert "stops soon" in capfd.readouterr().err


def test_other_signals_at_the_start_ask():
    """A scheduler's SIGTERM has an exit code of its own."""
    with Interrupt(at_start="nothing is lost") as interrupt:
        signal.raise_signal(signal.SIGTERM)
        interrupt.defer()
        assert interrupt.received == "SIGTERM"


def test_the_message_of_an_interrupted_start_is_printed(capsys):
    def interrupted():
        raise InterruptError("nothing is lost")

    assert attempt("jaxtp train", interrupted, "resumes") == INTERRUPTED
    assert capsys.readouterr().err == "\njaxtp train: nothing is lost\n"


def _collect_with_a_callback(interrupt):
    """JAX has such a callback, in which a tracing run spends much of its time."""

    def callback(phase, details):
        if phase == "start":
            interrupt()

    gc.callbacks.append(callback)
    gc.collect()
    gc.callbacks.remove(callback)


def _end_a_weak_reference(interrupt):
    referent = threading.Event()
    reference = weakref.ref(referent, lambda reference: interrupt())
    del referent
    assert reference() is None


def _call_a_destructor(interrupt):
    class Owner:
        def __del__(self):
            interrupt()

    Owner()


@pytest.mark.parametrize(
    "swallow", [_collect_with_a_callback, _end_a_weak_reference, _call_a_destructor]
)
def test_ctrl_c_where_python_ignores_exceptions_is_sent_again(swallow, capfd):
    hook = sys.unraisablehook
    gc.collect()  # another test's objects could end in this one
    with Interrupt(at_start="nothing is lost"):
        swallow(lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(InterruptError):
            time.sleep(10)
    assert "ignored" not in capfd.readouterr().err
    assert sys.unraisablehook is hook


def test_ctrl_c_ends_a_wait_for_a_thread():
    release = threading.Event()
    with Interrupt(at_start="nothing is lost"):
        future = in_thread(release.wait)
        threading.Timer(
            0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)
        ).start()
        with pytest.raises(InterruptError):
            future.result(timeout=10)
    release.set()
    assert future.result() is True


def test_a_thread_passes_its_error_on():
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 // 0).result()
