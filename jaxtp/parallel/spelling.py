"""Plans as one writes them: styles in words, and one pattern for modules that are alike."""

import itertools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from jaxtp.parallel.styles import Style


def spelled(style: Style) -> str:
    """A style as one writes it in a plan."""
    given = [(field.name, getattr(style, field.name)) for field in fields(style)]
    changed = [
        (name, value) for (name, value), default in zip(given, fields(style), strict=True) if value != default.default
    ]
    leading = changed == given[: len(changed)]
    arguments = [str(value) if leading else f"{name}={value}" for name, value in changed]
    return f"{type(style).__name__}({', '.join(arguments)})"


def patterns_for(styles: Mapping[str, Any]) -> dict[str, str]:
    """A pattern for each path: as many of its numbers are `*` as the modules that match agree on.

    Args:
      styles: what is to agree, of every module by path: its style, or anything that can be compared.
    """
    matching: dict[str, set[str]] = {}
    for path in styles:
        for pattern in _generalisations(path):
            matching.setdefault(pattern, set()).add(path)
    return {path: _pattern(path, style, styles, matching) for path, style in styles.items()}


def _pattern(path: str, style: Any, styles: Mapping[str, Any], matching: Mapping[str, set[str]]) -> str:
    """The most general one that is right, with no star that matches a single number."""
    right = [p for p in _generalisations(path) if all(styles[other] == style for other in matching[p])]
    return [p for p in right if matching[p] == matching[right[0]]][-1]


def _generalisations(path: str) -> list[str]:
    """The path with some of its numbers starred, most of them and the first ones first."""
    choices = [("*", part) if part.isdigit() else (part,) for part in path.split(".")]
    found = [".".join(parts) for parts in itertools.product(*choices)]
    return sorted(found, key=lambda pattern: -pattern.split(".").count("*"))
