"""Marks on settings: the effects of a change, and whether the short help lists them.

A mark annotates a field: `steps: Annotated[Count, STEP, SHORT_HELP] = 400`; a section's mark applies to its unmarked
fields. Imports only the standard library, so that any room can use it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Affects:
    """The effects of changing a setting."""

    numbers: bool = False
    """Losses and weights, beyond the order of sums."""

    cost: bool = False
    """Time or memory of a step."""

    samples: bool = False
    """The training data, and nothing else of a step: commands that make up a batch ignore it."""

    architecture: bool = False
    """The shapes or the meaning of parameters."""

    fixed: bool = False
    """A checkpoint with another value cannot be resumed."""


NOTHING = Affects()
COST = Affects(cost=True)
NUMBERS = Affects(numbers=True)
STEP = Affects(cost=True, numbers=True)
SAMPLES = Affects(samples=True)
ARCHITECTURE = Affects(cost=True, numbers=True, architecture=True, fixed=True)


class _ShortHelp:
    """Type of `SHORT_HELP`."""


SHORT_HELP = _ShortHelp()


def affects(schema: type, name: str, default: Affects = STEP) -> Affects:
    """Returns the mark of a setting, its section's if it has none.

    Args:
      name: dotted; may continue inside the value (`data.mixture.code`).
      default: returned if neither has a mark.
    """
    kind: object = schema
    for key in name.split("."):
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)) or key not in (fields := _fields(kind)):
            break
        _, kind, marks = fields[key]
        default = _mark(marks, default)
    return default


def settings(schema: type, accept: Callable[[Affects], bool], default: Affects = STEP) -> list[str]:
    """Returns dotted names of settings with an accepted mark; a section if it accepts all of its settings."""
    names = []
    for name, kind, marks in _fields(schema).values():
        mark = _mark(marks, default)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner = settings(kind, accept, mark)
            whole = set(inner) == {each for each, _, _ in _fields(kind).values()}
            names += [name] if whole else [f"{name}.{each}" for each in inner]
        elif accept(mark):
            names.append(name)
    return names


def in_short_help(schema: type) -> Iterator[str]:
    """Yields dotted names of the settings in `--help`."""
    for name, kind, marks in _fields(schema).values():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            yield from (f"{name}.{each}" for each in in_short_help(kind))
        elif SHORT_HELP in marks:
            yield name


def _mark(marks: tuple[object, ...], default: Affects) -> Affects:
    return next((mark for mark in marks if isinstance(mark, Affects)), default)


@cache
def _fields(schema: type) -> dict[str, tuple[str, object, tuple[object, ...]]]:
    found = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        kind, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        aliases = (getattr(mark, "alias", None) for mark in marks)
        found[next(filter(None, aliases), name)] = name, kind, tuple(marks)
    return found
