"""Graceful stopping: the first signal waits until work can be saved, the second ends the process."""

import signal
import threading
from types import FrameType
from typing import Any, Self

_SECOND: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_IGN,
    signal.SIGUSR1: signal.SIG_IGN,
}
"""Handlers after the first signal. A closed terminal sends several SIGHUPs, from its kernel and from its shell, and a
scheduler may repeat SIGUSR1: they are no second request."""
SIGNALS = tuple(_SECOND)
"""Signals that ask for an end."""


def signal_name(number: int) -> str:
    """Returns a signal's name (SIGKILL), or its number if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class InterruptError(KeyboardInterrupt):
    """Request to stop, raised where all work can be saved."""


class Interrupt:
    """Context manager that records signals; inactive outside the main thread.

    Signals already ignored stay ignored, such as SIGHUP under nohup.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.received: str | None = None
        """Name of the first signal."""
        self._signals = signals or SIGNALS
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's condition for handling signals
            heard = [number for number in self._signals if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._first) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raises `InterruptError` if a signal was received."""
        if self.received is not None:
            raise InterruptError

    def _first(self, number: int, _: FrameType | None) -> None:
        # An exception here could be lost in a callback, such as JAX's during garbage collection.
        self.received = signal.Signals(number).name
        for each in self._before:
            signal.signal(each, _SECOND[each])
