"""Stopping when asked: the step is finished and saved at the first signal, and the process ends at the second."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""SIGHUP is that of a terminal that is closed."""


class Interrupt:
    """Listens for `SIGNALS`; use as a context manager. Outside the main thread it hears nothing."""

    def __init__(self) -> None:
        self.received: str | None = None
        """The name of the first signal."""
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # Python's condition for handling signals
            self._before = {number: signal.signal(number, self._first) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def agreed(self) -> bool:
        """Whether any process has received one: all processes stop at the same step. Every process must call it."""
        if jax.process_count() == 1:
            return self.received is not None
        return bool(multihost_utils.process_allgather(self.received is not None).any())

    def _first(self, number: int, _: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
