"""Trip counts of loops, known only for comparisons of integers with constant start and step.

Jaxpr and HLO use the same rule, so that both accounts know the same counts. Other loops count one iteration, and are a
problem unless the caller allows them by name.
"""

import re
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from jax.extend import core

from jaxtp.analysis.text import Instruction, Module, Operand, named, root_of

Counted = Literal["", "at most", "a turn"]
"""Meaning of a count: exact, or one of these two."""

AT_MOST: Final = "at most"
"""A collective in a branch of a conditional: it runs as often as that branch is taken, and all are counted."""

A_TURN: Final = "a turn"
"""A collective in a loop that turns as often as its data say: its count is that of one turn."""

LARGEST = 2**31
"""Counters that go further may wrap around in their dtype."""

_DIRECTIONS = {"lt": "LT", "le": "LE", "gt": "GT", "ge": "GE", "ne": "NE"}


class Progression(NamedTuple):
    """An integer that changes by a constant per iteration."""

    first: int
    step: int


def turns(direction: str, left: Progression | None, right: Progression | None) -> int | None:
    """Returns the trip count of `while left direction right` (LT, LE, GT, GE or NE); None if unknown."""
    if left is None or right is None:
        return None
    gap, step = right.first - left.first, right.step - left.step
    if direction in ("GT", "GE"):
        gap, step = -gap, -step
    if direction == "NE":
        count = gap // -step if step and gap % step == 0 else 0 if gap == 0 else -1
    else:
        gap += direction in ("LE", "GE")
        count = 0 if gap <= 0 else -(gap // step) if step < 0 else -1
    last = max(abs(one.first + count * one.step) for one in (left, right))
    return None if count < 0 or last >= LARGEST else count


def runs(turns: int | None, counted: Counted) -> tuple[int, int, Counted]:
    """Returns how often a loop runs its body and its condition, and the counts' meaning.

    Args:
      turns: trip count; None if unknown.
      counted: meaning of the loop's own count.
    """
    return (1, 1, A_TURN) if turns is None else (turns, turns + 1, counted)


def turns_in_jaxpr(loop: core.JaxprEqn) -> int | None:
    """Returns the trip count of a `while` equation; None if data-dependent."""
    condition = loop.params["cond_jaxpr"].jaxpr
    test = _maker(condition, condition.outvars[0])
    if test is None or test.primitive.name not in _DIRECTIONS:
        return None
    left, right = (_compared(loop, operand) for operand in test.invars)
    return turns(_DIRECTIONS[test.primitive.name], left, right)


def _compared(loop: core.JaxprEqn, operand: core.Var | core.Literal) -> Progression | None:
    if (constant := _integer(operand)) is not None:
        return Progression(constant, 0)
    condition, body = loop.params["cond_jaxpr"].jaxpr, loop.params["body_jaxpr"].jaxpr
    outside, inside = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    at = next((i for i, variable in enumerate(condition.invars) if variable is operand), None)
    if at is None:
        return None
    carried = at - outside
    first = _integer(loop.invars[at if carried < 0 else at + inside])
    step = 0 if carried < 0 else _step(body, body.invars[inside + carried], body.outvars[carried])
    return None if first is None or step is None else Progression(first, step)


def _step(body: core.Jaxpr, before: core.Var, after: Any) -> int | None:
    # The constant that an iteration adds to a carried value, if any.
    if after is before:
        return 0
    made = _maker(body, after)
    if made is None or made.primitive.name not in ("add", "sub") or not any(v is before for v in made.invars):
        return None
    if made.primitive.name == "sub":
        step = _integer(made.invars[1])
        return None if step is None else -step
    return _integer(made.invars[1] if made.invars[0] is before else made.invars[0])


def _maker(jaxpr: core.Jaxpr, variable: Any) -> core.JaxprEqn | None:
    return next((e for e in jaxpr.eqns if any(made is variable for made in e.outvars)), None)


def _integer(operand: Any) -> int | None:
    if not isinstance(operand, core.Literal):
        return None
    kind: Any = operand.aval
    return int(operand.val) if kind.shape == () and kind.dtype in (np.int32, np.int64) else None


def turns_in_hlo(module: Module, around: Sequence[Instruction], loop: Instruction) -> int | None:
    """Returns a `while`'s trip count, from the compiler's note or the condition; None if unknown.

    Args:
      around: the computation that contains the loop.
    """
    if known := re.search(r'known_trip_count"?:?\{"?n"?:?"(\d+)"', loop.rest):
        return int(known[1])
    condition, body = (module[loop.attribute(name) or ""] for name in ("condition", "body"))
    test = root_of(condition)
    if test is None or test.opcode != "compare":
        return None
    values = (_value(condition, operand) for operand in test.operands)
    left, right = (_progression(value, around, loop, body) for value in values)
    return turns(test.attribute("direction") or "", left, right)


class _Carried(NamedTuple):
    """An element of the carried tuple."""

    at: int


def _progression(
    value: int | _Carried | None, around: Sequence[Instruction], loop: Instruction, body: Sequence[Instruction]
) -> Progression | None:
    if not isinstance(value, _Carried):
        return None if value is None else Progression(value, 0)
    began, ends = named(around, loop.operands[0][0]), root_of(body)
    if began is None or ends is None or {began.opcode, ends.opcode} != {"tuple"}:
        return None
    first, step = _value(around, began.operands[value.at]), _step_in_hlo(body, ends.operands[value.at], value)
    return Progression(first, step) if isinstance(first, int) and step is not None else None


def _step_in_hlo(body: Sequence[Instruction], operand: Operand, before: _Carried) -> int | None:
    if _value(body, operand) == before:
        return 0
    made = named(body, operand[0])
    if made is None or made.opcode not in ("add", "subtract"):
        return None
    one, other = (_value(body, operand) for operand in made.operands)
    if one != before and made.opcode == "add":
        one, other = other, one
    if one != before or not isinstance(other, int):
        return None
    return other if made.opcode == "add" else -other


def _value(computation: Sequence[Instruction], operand: Operand) -> int | _Carried | None:
    name, part = operand
    made = named(computation, name)
    if made is None:
        return None
    if made.opcode == "copy":
        return _value(computation, made.operands[0])
    if made.opcode == "constant" and made.type.startswith(("s32[]", "s64[]")):
        number = re.match(r"-?\d+(?=\))", made.rest)
        return int(number[0]) if number else None
    if made.opcode == "get-tuple-element":
        part, made = int(made.attribute("index") or 0), named(computation, made.operands[0][0])
    return _Carried(part) if made is not None and made.opcode == "parameter" and part is not None else None
