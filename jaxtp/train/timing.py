"""Where the wall time of a run goes: useful steps, and what else, by cause."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


class Timing:
    """The time of each step, what each waits for, and what is lost between them. All in seconds.

    A step's time is that from the end of the one before it to its own, as the host sees them, without what is
    `lost_to` something else in between.
    """

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._useful = 0.0
        self._lost: Counter[str] = Counter()
        self._steps: list[float] = []
        self._waited = 0.0

    @contextmanager
    def lost_to(self, cause: str) -> Iterator[None]:
        """Counts what runs inside as lost."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter()
            self._lost[cause] += self._last - started  # type: ignore[assignment]

    def begun(self) -> None:
        """Counts all until now as lost to the start."""
        self._last = time.perf_counter()
        self._lost["start"] = self._last - self._started  # type: ignore[assignment]

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measures a wait that is part of a step."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def tick(self) -> None:
        """Counts a step that has just finished."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._useful += now - self._last
        self._last = now

    @property
    def step_seconds(self) -> float:
        """Mean of the steps since the last `record`; there must be one."""
        return sum(self._steps) / len(self._steps)

    def record(self) -> dict[str, float]:
        """Of the steps since the last record: mean, median, 90th percentile and longest, and the wait for data in each.

        And of the time since this process began to train: the share spent in steps (`goodput`), and of each cause of
        loss.
        """
        steps, waited = np.array(self._steps), self._waited
        self._steps, self._waited = [], 0.0
        wall = time.perf_counter() - self._started
        return {
            "step_seconds": float(steps.mean()),
            "step_seconds_p50": float(np.percentile(steps, 50)),
            "step_seconds_p90": float(np.percentile(steps, 90)),
            "step_seconds_max": float(steps.max()),
            "data_wait_seconds": waited / len(steps),
            "goodput": self._useful / wall,
            **{f"lost_to_{cause}": seconds / wall for cause, seconds in self._lost.items()},
        }
