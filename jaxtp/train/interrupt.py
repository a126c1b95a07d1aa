"""Stopping when asked: the step is finished and saved at the first signal, and the process ends at the second."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is that of a terminal that is closed."""
_SECOND: dict[signal.Signals, Any] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_IGN,
}
"""What a signal does after the first. A closed terminal sends several SIGHUPs, from its kernel and from its shell: they
are no second request."""


class Interrupt:
    """Listens for `SIGNALS`; use as a context manager. Outside the main thread it hears nothing.

    What whoever started the run had ignored, as nohup does SIGHUP, stays ignored.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """The name of the first signal."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's condition for handling signals
            heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._first) for number in heard}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def agreed(self) -> bool:
        """Whether any process has received one: all processes stop at the same step. Every process must call it."""
        if jax.process_count() == 1:
            return self.received is not None
        return bool(multihost_utils.process_allgather(self.received is not None).any())

    def _first(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        for each in self._before:
            signal.signal(each, _SECOND[each])
