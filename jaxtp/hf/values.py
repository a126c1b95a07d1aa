"""Values of config.json, each of the type that it should have."""

import math
from typing import Any

from jaxtp.hf.folder import HFError


def whole(name: str, value: Any) -> int:
    """A size: an integer from 1 to below 2^31.

    Raises:
      HFError: it is something else.
    """
    if type(value) is not int or not 1 <= value < 2**31:
        raise HFError(f"{name} = {_shown(value)}: should be a whole number, 1 or more")
    return value


def positive(name: str, value: Any) -> float:
    """A number above 0.

    Raises:
      HFError: it is something else.
    """
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise HFError(f"{name} = {_shown(value)}: should be a number above 0")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """True or false.

    Raises:
      HFError: it is something else.
    """
    if not isinstance(value, bool):
        raise HFError(f"{name} = {_shown(value)}: should be true or false")
    return value


READ = {int: whole, float: positive, bool: switch}
"""By the type of an attribute."""


def _shown(value: Any) -> str:
    return "missing" if value is None else str(value)[:100] if not isinstance(value, str) else repr(value[:100])
