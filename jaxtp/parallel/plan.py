"""Plans: patterns of module paths and the styles they name, matched strictly, and written as one writes them.

A path has a name for each step, joined by dots: `blocks.0.attn.query`. In a pattern `*` stands for one name (or a
part of it, `w*`), `**` for any number of names, `{a,b}` for either.
"""

import difflib
import fnmatch
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from jaxtp.entry import UserError
from jaxtp.parallel.styles import Style

Plan = Mapping[str, Style]
"""The styles of the modules whose paths match each pattern."""


class PlanError(UserError):
    """A plan that does not fit its model, or its mesh."""


def expand_braces(pattern: str) -> list[str]:
    """Returns the patterns without braces: `a.b.d` and `a.c.d` for `a.{b,c}.d`."""
    found = re.search(r"\{([^{}]*)\}", pattern)
    if found is None:
        return [pattern]
    parts = (pattern[: found.start()] + choice + pattern[found.end() :] for choice in found[1].split(","))
    return [expanded for part in parts for expanded in expand_braces(part)]


def matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a whole path."""
    return any(_match(_names(p), _names(path)) for p in expand_braces(pattern))


def _names(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


def assign_styles(
    plan: Plan, modules: Sequence[Sequence[str]], parameters: Iterable[str] = ()
) -> list[tuple[str, Style | None]]:
    """Returns the pattern and the style of each module; `""` and None where no pattern matches.

    Args:
      plan: patterns and styles.
      modules: the paths of each module; more than one if it is shared.
      parameters: their paths, for messages.

    Raises:
      PlanError: a pattern matches nothing, two match one module, or a value is no style.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(f"a plan is a dict from patterns to styles, not {plan!r}")
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(f"{pattern!r} is no pattern; a pattern is a string such as 'blocks.*.mlp.up'")
        if isinstance(style, type) and issubclass(style, Style):
            raise PlanError(f"{pattern!r}: {style.__name__} is a class; write {style.__name__}()")
        if not isinstance(style, Style):
            styles = ", ".join(kind.__name__ for kind in Style.__args__)
            raise PlanError(f"{pattern!r}: {style!r} is no style; a style is {styles}")
        if not _is_hashable(style):
            raise PlanError(f"{pattern!r}: {style}: layouts of several arguments are a tuple")
        if not any(matches(pattern, path) for paths in modules for path in paths):
            raise PlanError(_nothing(pattern, [path for paths in modules for path in paths], list(parameters)))
    return [_style_of(plan, paths) for paths in modules]


def _style_of(plan: Plan, paths: Sequence[str]) -> tuple[str, Style | None]:
    hits = [(pattern, path) for pattern in plan for path in paths if matches(pattern, path)]
    patterns = list(dict.fromkeys(pattern for pattern, _ in hits))
    if len(patterns) > 1 and len(paths) == 1:
        both = " and ".join(map(repr, patterns))
        raise PlanError(f"{both} match the same module, {paths[0]!r}; one module has one style")
    styles = {plan[pattern] for pattern in patterns}
    if len(styles) > 1:
        both = " and ".join(f"{path!r} ({pattern!r}: {plan[pattern]})" for pattern, path in hits)
        raise PlanError(f"{both} are one shared module; give it one style")
    return (patterns[0], styles.pop()) if styles else ("", None)


@functools.lru_cache(maxsize=4096)  # several ** would try the same rests again and again
def _match(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return _match(pattern[1:], names) or (bool(names) and _match(pattern, names[1:]))
    return bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _match(pattern[1:], names[1:])


def _nothing(pattern: str, paths: list[str], parameters: list[str]) -> str:
    parameter = next((p for p in parameters if any(matches(pattern, start) for start in _starts(p))), None)
    if parameter is not None:
        owner = next(start for start in _starts(parameter) if start in paths)
        where = repr(owner) if owner else "'', the model itself"
        return f"{pattern!r} matches a parameter; a style is for a module: {where}"
    near = difflib.get_close_matches(pattern, [path for path in paths if path], n=3, cutoff=0.3) or paths[1:4]
    return f"{pattern!r} matches no module; nearest: {', '.join(map(repr, near)) or 'there are none'}"


def _starts(path: str) -> list[str]:
    """Returns a path and those that it begins with, the longest first; the last is that of the model itself."""
    names = path.split(".")
    return [".".join(names[:n]) for n in range(len(names), -1, -1)]


def _is_hashable(style: Style) -> bool:
    try:
        hash(style)
    except TypeError:
        return False
    return True


def spelled(style: Style) -> str:
    """Returns a style as one writes it in a plan."""
    given = [(field.name, getattr(style, field.name)) for field in fields(style)]
    changed = [
        (name, value) for (name, value), default in zip(given, fields(style), strict=True) if value != default.default
    ]
    leading = changed == given[: len(changed)]
    arguments = [str(value) if leading else f"{name}={value}" for name, value in changed]
    return f"{type(style).__name__}({', '.join(arguments)})"


def patterns_for(styles: Mapping[str, Any]) -> dict[str, str]:
    """Returns a pattern for each path: as many of its numbers are `*` as the modules that match agree on.

    Args:
      styles: what is to agree, of every module by path: its style, or anything that can be compared.
    """
    matching: dict[str, set[str]] = {}
    for path in styles:
        for pattern in _generalisations(path):
            matching.setdefault(pattern, set()).add(path)
    return {path: _general_pattern(path, style, styles, matching) for path, style in styles.items()}


def _general_pattern(path: str, style: Any, styles: Mapping[str, Any], matching: Mapping[str, set[str]]) -> str:
    """Returns the most general one that is right, with no star that matches a single number."""
    right = [p for p in _generalisations(path) if all(styles[other] == style for other in matching[p])]
    return [p for p in right if matching[p] == matching[right[0]]][-1]


def _generalisations(path: str) -> list[str]:
    """Returns the path with some of its numbers starred, most of them and the first ones first."""
    choices = [("*", part) if part.isdigit() else (part,) for part in path.split(".")]
    found = [".".join(parts) for parts in itertools.product(*choices)]
    return sorted(found, key=lambda pattern: -pattern.split(".").count("*"))
