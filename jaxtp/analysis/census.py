"""Counts collectives in a jaxpr: the program's own, before compilation.

Loops count each iteration (`loops`); conditionals count every branch, an upper bound.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtp.analysis.collective import PRIMITIVES, Collective
from jaxtp.analysis.loops import AT_MOST, Counted, runs, turns_in_jaxpr
from jaxtp.mesh import parts

_MOVES_NOTHING = {"axis_index", "pcast", "pvary"}


def count_collectives(jaxpr: Any, mesh_sizes: dict[str, int]) -> Counter[Collective]:
    """Counts collectives in a closed jaxpr, except in groups of one device.

    `Collective.counted` marks inexact counts; `mesh_sizes` is in the mesh's order.
    """
    counts: Counter[Collective] = Counter()
    for collective, times in _walk(jaxpr.jaxpr, 1, "", mesh_sizes, ""):
        if collective.group > 1:
            counts[collective] += times
    return counts


def equations(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[JaxprEqn, int]]:
    """Yields every equation that is needed, also nested but not in kernels, and how often it runs.

    Unknown loops count once.
    """
    read = set(map(id, jaxpr.outvars))
    for equation in reversed(jaxpr.eqns):
        if read.isdisjoint(map(id, equation.outvars)) and not equation.effects:
            continue  # XLA removes it: JAX keeps kernels in a recomputation that nothing reads
        read.update(map(id, equation.invars))
        yield equation, times
        for inner, each, _ in _inside(equation, "") if equation.primitive.name != "pallas_call" else ():
            yield from equations(inner, times * each)


def _walk(
    jaxpr: Jaxpr, times: int, counted: Counted, sizes: dict[str, int], outer: str
) -> Iterator[tuple[Collective, int]]:
    for equation in jaxpr.eqns:
        scope = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        if axes := _axes(equation, sizes):
            for pair in zip(equation.invars, equation.outvars, strict=False):
                yield _collective(equation, axes, arrays(*pair), sizes, scope, counted), times
        for inner, each, meant in _inside(equation, counted):
            yield from _walk(inner, times * each, meant, sizes, scope)


def _inside(equation: JaxprEqn, counted: Counted) -> Iterator[tuple[Jaxpr, int, Counted]]:
    name, params = equation.primitive.name, equation.params
    if name == "while":
        bodies, conditions, meant = runs(turns_in_jaxpr(equation), counted)
        yield params["body_jaxpr"].jaxpr, bodies, meant
        yield params["cond_jaxpr"].jaxpr, conditions, meant
        return
    branches = name == "cond" and len(params["branches"]) > 1 and not counted
    for value in params.values():
        for sub in value if isinstance(value, (tuple, list)) else (value,):
            closed: Any = getattr(sub, "jaxpr", sub)
            if hasattr(closed, "eqns"):
                yield closed, params["length"] if name == "scan" else 1, AT_MOST if branches else counted


def _axes(equation: JaxprEqn, sizes: dict[str, int]) -> tuple[str, ...]:
    if equation.primitive.name in _MOVES_NOTHING:
        return ()
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axis for axis in (named if isinstance(named, (tuple, list)) else (named,)) if axis in sizes)


def _collective(
    equation: JaxprEqn,
    axes: tuple[str, ...],
    messages: list[ShapedArray],
    sizes: dict[str, int],
    scope: str,
    counted: Counted,
) -> Collective:
    kind = PRIMITIVES.get(equation.primitive.name, equation.primitive.name)
    groups = equation.params.get("axis_index_groups")
    group = len(groups[0]) if groups else parts(sizes, axes)
    largest = max(messages, key=lambda array: math.prod(array.shape))
    spanned = tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)
    shape, dtype = tuple(largest.shape), str(largest.dtype)
    return Collective(kind, spanned, group, message_bytes(shape, dtype), scope, shape, dtype, counted)


def arrays(*variables: Any) -> list[ShapedArray]:
    """Returns shapes and dtypes of a jaxpr's variables, which are typed as any abstract value."""
    return [variable.aval for variable in variables]


def message_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Returns the bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize
