"""Plans: match patterns with module paths, and format styles.

A path joins names with dots: `blocks.0.attn.query`. In a pattern `*` matches a name or a part of it
(`w*`), `**` any number of names, `{a,b}` either name.
"""

import difflib
import fnmatch
import functools
import glob
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields

from jaxtp.config.entry import UserError
from jaxtp.parallelize.styles import Compute, Style

Plan = Mapping[str, Style | Compute]  # by pattern


class PlanError(UserError):
    """A plan that does not fit its model or mesh."""


def expand_braces(pattern: str) -> list[str]:
    """Expands `a.{b,c}.d` to `a.b.d` and `a.c.d`."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    parts = (
        pattern[: match.start()] + choice + pattern[match.end() :] for choice in match[1].split(",")
    )
    return [expanded for part in parts for expanded in expand_braces(part)]


def matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a whole path."""
    return any(_match(_names(p), _names(path)) for p in expand_braces(pattern))


def is_inside(path: str, outer: str) -> bool:
    """Returns whether a path is `outer`, or within it."""
    return not outer or path == outer or path.startswith(f"{outer}.")


def _names(path: str) -> tuple[str, ...]:
    return tuple(path.split(".")) if path else ()


@functools.lru_cache(maxsize=4096)  # several ** try the same suffixes again and again
def _match(pattern: tuple[str, ...], names: tuple[str, ...]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return _match(pattern[1:], names) or (bool(names) and _match(pattern, names[1:]))
    return (
        bool(names) and fnmatch.fnmatchcase(names[0], pattern[0]) and _match(pattern[1:], names[1:])
    )


def assign_styles(
    plan: Plan, modules: Sequence[Sequence[str]], parameters: Iterable[str] = ()
) -> list[tuple[str, Style | None]]:
    """Returns each module's pattern and style; `""` and None if no pattern matches.

    `modules` has all paths of each module; `parameters` are for messages.

    Raises:
      PlanError: a pattern matches nothing, two match one module, or a value is not a style.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(f"a plan is a dict from patterns to styles, not {plan!r}")
    paths = [path for aliases in modules for path in aliases]
    styles: dict[str, Style] = {}
    for pattern, entry in plan.items():
        style = entry.style if isinstance(entry, Compute) else entry
        if not isinstance(pattern, str):
            raise PlanError(
                f"{pattern!r} is not a pattern; a pattern is a string such as 'blocks.*.mlp.up'"
            )
        if isinstance(style, type) and issubclass(style, Style):
            raise PlanError(f"{pattern!r}: {style.__name__} is a class; write {style.__name__}()")
        if isinstance(style, Style):
            styles[pattern] = style
        elif style is not None or not isinstance(entry, Compute):
            kinds = ", ".join(kind.__name__ for kind in (*Style.__args__, Compute))
            raise PlanError(f"{pattern!r}: {style!r} is not a style; the styles are {kinds}")
        try:
            hash(style)
        except TypeError:
            raise PlanError(
                f"{pattern!r}: {style}: write layouts of several arguments as a tuple"
            ) from None
        if not any(matches(pattern, path) for path in paths):
            raise PlanError(_no_match(pattern, paths, list(parameters)))
    return [_style_of(styles, aliases) for aliases in modules]


def _style_of(plan: Mapping[str, Style], paths: Sequence[str]) -> tuple[str, Style | None]:
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


def _no_match(pattern: str, paths: list[str], parameters: list[str]) -> str:
    parameter = next(
        (p for p in parameters if any(matches(pattern, prefix) for prefix in _prefixes(p))), None
    )
    if parameter is not None:
        owner = next(prefix for prefix in _prefixes(parameter) if prefix in paths)
        where = repr(owner) if owner else "'', the model itself"
        return f"{pattern!r} matches a parameter; give the style to its module: {where}"
    near = (
        difflib.get_close_matches(pattern, [path for path in paths if path], n=3, cutoff=0.3)
        or paths[1:4]
    )
    return (
        f"{pattern!r} matches no module; nearest: {', '.join(map(repr, near)) or 'there are none'}"
    )


def _prefixes(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:n]) for n in range(len(names), -1, -1)]


def format_style(style: Style) -> str:
    """Formats a style as Python code."""
    values = [(field.name, getattr(style, field.name)) for field in fields(style)]
    changed = [
        pair for pair, field in zip(values, fields(style), strict=True) if pair[1] != field.default
    ]
    positional = changed == values[: len(changed)]
    arguments = [str(value) if positional else f"{name}={value}" for name, value in changed]
    return f"{type(style).__name__}({', '.join(arguments)})"


def patterns_for(values: Mapping[str, object]) -> dict[str, str]:
    """Returns a general pattern for each path that matches only equal values; `*` replaces numbers.

    No two patterns match one path.
    """
    matching: dict[str, set[str]] = {}
    for path in values:
        for pattern in _candidate_patterns(path):
            matching.setdefault(pattern, set()).add(path)
    chosen: dict[str, str] = {}

    def fits(pattern: str, path: str) -> bool:
        others = matching[pattern]
        if any(other in chosen or values[other] != values[path] for other in others):
            return False
        return others == {other for other in values if matches(pattern, other)}

    for path in values:
        if path not in chosen:
            candidates = _candidate_patterns(path)
            first = next((pattern for pattern in candidates if fits(pattern, path)), candidates[-1])
            # The pattern with the fewest `*`
            pattern = [other for other in candidates if matching[other] == matching[first]][-1]
            chosen |= dict.fromkeys(matching[first], pattern)
    return {path: chosen[path] for path in values}


def _candidate_patterns(path: str) -> list[str]:
    literal = re.sub(r"[{}]", "?", glob.escape(path))
    choices = [("*", part) if part.isdigit() else (part,) for part in literal.split(".")]
    patterns = [".".join(parts) for parts in itertools.product(*choices)]
    return sorted(patterns, key=lambda pattern: -pattern.split(".").count("*"))
