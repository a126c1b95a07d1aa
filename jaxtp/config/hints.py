"""Suggests values for sizes that do not fit, and names things by dotted paths.

Each suggestion changes one setting, fixes all its problems, and causes no others.
"""

import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from jaxtp.config.entry import UserError

T = TypeVar("T")

MAX_SUGGESTED = 1024


@dataclass(frozen=True)
class Problem:
    """Sizes that do not fit each other."""

    text: str  # the message, with names and values
    among: Mapping[str, int] = field(default_factory=dict)  # settings that must divide a number: `{"mesh.tp": 9}`
    multiples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Settings that must be a multiple, and the nearest multiples: `{"model.d_ff": (96, 104)}`."""


Problems = Callable[[Mapping[str, int]], Iterable[Problem]]
"""Returns the problems after changes of settings: `problems({"mesh.tp": 3})`."""


def explained(problems: Problems, *, fixed: bool) -> Iterator[str]:
    """Yields the message of each problem, with values that would work.

    Args:
      problems: returns the problems after changes of settings.
      fixed: the model cannot be changed.
    """
    found = list(problems({}))

    def working(setting: str, values: Iterable[int]) -> list[int]:
        if fixed and setting.startswith("model."):
            return []
        kept = {problem.text for problem in found if setting not in {*problem.among, *problem.multiples}}
        return [value for value in values if {problem.text for problem in problems({setting: value})} <= kept]

    for problem in found:
        hints = []
        for setting, number in problem.among.items():
            if values := working(setting, (size for size in divisors(number) if size <= MAX_SUGGESTED)):
                hints.append(f"{_short(setting)} can be {', '.join(map(str, values))}")
        for setting, sizes in problem.multiples.items():
            if values := working(setting, sizes):
                hints.append(f"{_short(setting)} {' or '.join(map(str, values))}")
        yield f"{problem.text}; {', or '.join(hints)}" if hints else problem.text


def not_divisible(name: str, value: int, by_name: str, by: int, among: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem if `value` of setting `name` is not divisible by `by`, the value of `by_name`."""
    if value % by:
        sizes = tuple(multiple for multiple in nearest_multiples(value, by) if multiple < 2**31)
        yield Problem(f"{name}={value} is not divisible by {by_name}={by}", among, {name: sizes})


def matches(pattern: str, path: str) -> bool:
    """Returns whether one of the pattern's alternatives, separated by `|`, matches as in the shell."""
    return any(fnmatch.fnmatchcase(path, alternative) for alternative in pattern.split("|"))


def dotted(path: Iterable[object]) -> str:
    """Returns the keys of a path, joined by dots."""
    return ".".join(map(str, path))


def by_dotted_path(items: Iterable[tuple[Sequence[object], T]]) -> dict[str, T]:
    """Returns things by dotted path.

    Every dict of parameters, variables or modules by dotted path is made here, because a key may contain a dot, and of
    two things with one path a dict would keep only the last.

    Raises:
      UserError: two things have the same dotted path.
    """
    named: dict[str, T] = {}
    paths: dict[str, Sequence[object]] = {}
    for path, thing in items:
        name = dotted(path)
        if name in named:
            raise UserError(
                f"the model has two things at {name!r}, by the keys {list(paths[name])} and {list(path)}: jaxtp joins "
                "keys by dots, and could not tell them apart; rename the one that has a dot in a key"
            )
        named[name] = thing
        paths[name] = path
    return named


def nearest_multiples(value: int, by: int) -> list[int]:
    """Returns the nearest multiples of `by` below (if positive) and above `value`."""
    return sorted({max(value // by, 1) * by, -(-value // by) * by})


def divisors(number: int) -> list[int]:
    """Returns the divisors in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def mesh_settings(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the settings of axes: `mesh.fsdp` for fsdp."""
    return tuple(f"mesh.{axis}" for axis in axes)


def mesh_product(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Returns the number of shards over `axes` as a text, `mesh.fsdp * mesh.cp`; omits axes of size 1."""
    return " * ".join(mesh_settings(axis for axis in axes if sizes[axis] > 1))


def _short(setting: str) -> str:
    return setting.rpartition(".")[-1]
