"""Ctrl-C, taken between batches.

Raised wherever it arrives it would be lost in a callback, such as JAX's when garbage is collected; and what has been
done since the last point of saving would be lost too.
"""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self


class InterruptError(KeyboardInterrupt):
    """Ctrl-C, at a place where all that has been done can be saved."""


class Interrupt:
    """Remembers the first SIGINT while it is entered; a second one is raised at once, wherever it arrives."""

    def __init__(self) -> None:
        self._asked = False
        self._previous: signal._HANDLER = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # no other may handle signals
            self._previous = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def check(self) -> None:
        """Raises what has been asked for.

        Raises:
          InterruptError: Ctrl-C.
        """
        if self._asked:
            raise InterruptError

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
