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
from jaxtp.plans.styles import Style

Plan = Mapping[str, Style]  # by pattern


class PlanError(UserError):
    """A plan that does not fit its model or mesh."""


def expand_braces(pattern: str) -> list[str]:
    """Expands `a.{b,c}.d` to `a.b.d` and `a.c.d`."""
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    expanded: list[str] = []
    for choice in match[1].split(","):
        expanded += expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    return expanded


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
    if not names or not fnmatch.fnmatchcase(names[0], pattern[0]):
        return False
    return _match(pattern[1:], names[1:])


def assign_styles(
    plan: Plan, modules: Sequence[Sequence[str]], parameters: Iterable[str] = ()
) -> list[tuple[str, Style | None]]:
    """Returns each module's pattern and style; `""` and None if no pattern matches.

    `modules` has all paths of each module; `parameters` are paths for messages.

    Raises:
      PlanError: a pattern matches nothing, two match one module, or a value is not a style.
    """
    if not isinstance(plan, Mapping):
        raise PlanError(f"a plan is a dict from patterns to styles, not {plan!r}")
    paths = list(itertools.chain.from_iterable(modules))
    for pattern, style in plan.items():
        if not isinstance(pattern, str):
            raise PlanError(
                f"{pattern!r} is not a pattern; a pattern is a string such as 'blocks.*.mlp.up'"
            )
        if isinstance(style, type) and issubclass(style, Style):
            raise PlanError(f"{pattern!r}: {style.__name__} is a class; write {style.__name__}()")
        if not isinstance(style, Style):
            kinds = ", ".join(kind.__name__ for kind in Style.__args__)
            raise PlanError(f"{pattern!r}: {style!r} is not a style; the styles are {kinds}")
        try:
            hash(style)
        except TypeError:
            raise PlanError(
                f"{pattern!r}: {style}: write layouts of several arguments as a tuple"
            ) from None
        if not any(matches(pattern, path) for path in paths):
            raise PlanError(_no_match(pattern, paths, list(parameters)))
    return [_style_of(plan, aliases) for aliases in modules]


def _style_of(plan: Mapping[str, Style], paths: Sequence[str]) -> tuple[str, Style | None]:
    pairs = itertools.product(plan, paths)
    hits = [(pattern, path) for pattern, path in pairs if matches(pattern, path)]
    if not hits:
        return "", None
    patterns = list(dict(hits))
    if len(patterns) > 1 and len(paths) == 1:
        rivals = " and ".join(map(repr, patterns))
        raise PlanError(f"{rivals} match the same module, {paths[0]!r}; one module has one style")
    if len(set(map(plan.get, patterns))) > 1:
        aliases = " and ".join(f"{path!r} ({pattern!r}: {plan[pattern]})" for pattern, path in hits)
        raise PlanError(f"{aliases} are one shared module; give it one style")
    return patterns[0], plan[patterns[0]]


def _no_match(pattern: str, paths: list[str], parameters: list[str]) -> str:
    for parameter in parameters:
        prefixes = _prefixes(parameter)
        if any(matches(pattern, prefix) for prefix in prefixes):
            owner = next(prefix for prefix in prefixes if prefix in paths)
            where = repr(owner) if owner else "'', the model itself"
            return f"{pattern!r} matches a parameter; give the style to its module: {where}"
    submodules = filter(None, paths)
    near = difflib.get_close_matches(pattern, submodules, n=3, cutoff=0.3) or paths[1:4]
    nearest = ", ".join(map(repr, near)) or "there are none"
    return f"{pattern!r} matches no module; nearest: {nearest}"


def _prefixes(path: str) -> list[str]:
    prefixes = [path]
    while path:
        path = path.rpartition(".")[0]
        prefixes.append(path)
    return prefixes


def format_style(style: Style) -> str:
    """Formats a style as Python code."""
    names = []
    changed = {}
    for field in fields(style):
        names.append(field.name)
        value = getattr(style, field.name)
        if value != field.default:
            changed[field.name] = str(value)
    arguments = list(changed.values())
    if list(changed) != names[: len(changed)]:
        arguments = list(map("{}={}".format, changed, arguments))
    return f"{type(style).__name__}({', '.join(arguments)})"


def patterns_for(values: Mapping[str, object]) -> dict[str, str]:
    """Groups paths with equal values under patterns, in which `*` replaces numbers.

    Returns each path's pattern. No two patterns match one path.
    """
    patterns: dict[str, str] = {}
    # All numbers of a path are replaced if possible; else the first (a block's), or the last.
    for replaced in (slice(None), slice(1), slice(-1, None)):
        groups: dict[tuple[str | None, ...], list[str]] = {}
        for path in values:
            if path not in patterns:
                groups.setdefault(_without_numbers(path, replaced), []).append(path)
        for paths in groups.values():
            first = values[paths[0]]
            if len(paths) > 1 and all(values[path] == first for path in paths):
                pattern = _common_pattern(paths)
                if {path for path in values if matches(pattern, path)} == {*paths}:
                    patterns |= dict.fromkeys(paths, pattern)
    return {path: patterns.get(path) or _common_pattern([path]) for path in values}


def _without_numbers(path: str, replaced: slice) -> tuple[str | None, ...]:
    names: list[str | None] = [*path.split(".")]
    numbers = [i for i, name in enumerate(names) if name and name.isdigit()]
    for i in numbers[replaced]:
        names[i] = None
    return tuple(names)


def _common_pattern(paths: Iterable[str]) -> str:
    names = []
    for first, *equal_names in zip(*(path.split(".") for path in paths), strict=True):
        names.append(_escaped(first) if {first, *equal_names} == {first} else "*")
    return ".".join(names)


def _escaped(name: str) -> str:
    return re.sub(r"[{}]", "?", glob.escape(name))
