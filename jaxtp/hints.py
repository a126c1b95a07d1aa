"""Hints in messages about sizes that do not fit: single changes after which everything fits.

A number in a hint is tried before it is written. It is suggested if all problems of the setting that it changes are
gone and none is new, so that whoever follows a hint is not sent to the next one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jaxtp.mesh import divisors

MAX_SUGGESTED = 1024


@dataclass(frozen=True)
class Problem:
    """Sizes that do not fit each other."""

    text: str
    """Which, and their values."""

    among: Mapping[str, int] = field(default_factory=dict)
    """Settings that may be changed to a divisor of a number: `{"mesh.tp": 9}`."""

    multiples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Sizes that may be changed, and the values nearest to what they are: `{"model.d_ff": (96, 104)}`."""

    @property
    def settings(self) -> set[str]:
        """All settings that may be changed."""
        return {*self.among, *self.multiples}


Problems = Callable[[Mapping[str, int]], Iterable[Problem]]
"""The problems that are there after some settings are changed: `problems({"mesh.tp": 3})`."""


def explained(problems: Problems, *, fixed: bool) -> Iterator[str]:
    """Yields each problem with the values that would work.

    Args:
      problems: what does not fit.
      fixed: sizes of the model cannot be changed, so only other values are suggested.
    """
    found = list(problems({}))

    def working(setting: str, values: Iterable[int]) -> list[int]:
        if fixed and setting.startswith("model."):
            return []
        kept = {problem.text for problem in found if setting not in problem.settings}
        return [value for value in values if {problem.text for problem in problems({setting: value})} <= kept]

    for problem in found:
        smaller = {name: [d for d in divisors(number) if d <= MAX_SUGGESTED] for name, number in problem.among.items()}
        choices = {setting: working(setting, values) for setting, values in smaller.items()}
        hints = [f"{_short(name)} can be {', '.join(map(str, values))}" for name, values in choices.items() if values]
        nearest = {setting: working(setting, values) for setting, values in problem.multiples.items()}
        hints += [f"{_short(name)} {' or '.join(map(str, values))}" for name, values in nearest.items() if values]
        yield f"{problem.text}; {', or '.join(hints)}" if hints else problem.text


def not_divisible(name: str, value: int, by_name: str, by: int, among: Mapping[str, int]) -> Iterator[Problem]:
    """Yields a problem if `value` is not divisible by `by`.

    Args:
      name: of the setting that is divided.
      value: its value.
      by_name: what it is divided by, in words.
      by: the value of that.
      among: as `Problem.among`.
    """
    if value % by:
        sizes = tuple(multiple for multiple in nearest_multiples(value, by) if multiple < 2**31)
        yield Problem(f"{name}={value} is not divisible by {by_name}={by}", among, {name: sizes})


def nearest_multiples(value: int, by: int) -> list[int]:
    """Returns the multiples of a number next to a value that is none: one below it, if there is one, and one above."""
    return sorted({max(value // by, 1) * by, -(-value // by) * by})


def _short(setting: str) -> str:
    return setting.rpartition(".")[-1]
