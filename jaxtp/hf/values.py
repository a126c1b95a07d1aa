"""Values of config.json, each of the type that it should have."""

import math
from collections.abc import Mapping
from typing import Any

from jaxtp.hf.folder import HFError
from jaxtp.reading import shown


def whole(name: str, value: Any) -> int:
    """A size: an integer from 1 to below 2^31.

    Raises:
      HFError: it is something else.
    """
    if type(value) is not int or not 1 <= value < 2**31:
        raise HFError(f"{name} = {said(value)}: should be a whole number from 1 to 2,147,483,647")
    return value


def positive(name: str, value: Any) -> float:
    """A number above 0.

    Raises:
      HFError: it is something else.
    """
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    if not 0 < number < math.inf:
        raise HFError(f"{name} = {said(value)}: should be a number above 0")
    return number


def switch(name: str, value: Any) -> bool:
    """True or false.

    Raises:
      HFError: it is something else.
    """
    if not isinstance(value, bool):
        raise HFError(f"{name} = {said(value)}: should be true or false")
    return value


def choice(name: str, value: Any, choices: Mapping[Any, Any]) -> Any:
    """Returns what one of some values stands for.

    Raises:
      HFError: it is none of them.
    """
    for known, ours in choices.items():
        if type(value) is type(known) and value == known:
            return ours
    raise HFError(f"{name} = {said(value)} is not supported; {', '.join(map(str, choices))} are")


READ = {int: whole, float: positive, bool: switch}
"""By the type of an attribute."""


def said(value: Any) -> str:
    """Returns a value as a message quotes it."""
    return "missing" if value is None else shown(repr(value))
