"""Seconds of compiled programs, in turn."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

Program = Callable[[], Any]
"""Gives arrays, which are waited for."""

WARM_UP = 2
"""Calls before any that is timed: what is allocated, connected or loaded once."""


@dataclass(frozen=True)
class Repeats:
    """Numbers of measurements and runs."""

    rounds: int = 10
    """Measurements, of which the median is taken."""

    in_a_row: int = 10
    """Runs in each, so that starting one counts for little."""


def medians(
    programs: Mapping[str, Program],
    rounds: int,
    *,
    calls: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the median seconds of a call of each program; a round runs all in turn, so that all see the same machine.

    Args:
      programs: what to run, by name.
      rounds: measurements of each.
      calls: of a program in a measurement, started one after the other and waited for together.
      clock: seconds.
    """
    for program in programs.values():
        for _ in range(WARM_UP):
            jax.block_until_ready(program())
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(_seconds(program, calls, clock))
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def _seconds(program: Program, calls: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(calls - 1):
        program()
    jax.block_until_ready(program())  # a device runs its programs in order: the last one ends last
    return (clock() - started) / calls
