"""Counts collectives in a jaxpr: the program's own, before compilation.

In a conditional every branch counts, which is an upper bound. In a scan each iteration counts, also
in a `fori_loop` with constant bounds, which JAX makes a scan. In a `while` one iteration counts.
`hlo.py`, where a scan is a `while`, counts each iteration if the trip count can be read.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Final, Literal

from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn

from jaxtp.analysis.collective import PRIMITIVES, Collective, spanned
from jaxtp.layers.experts import RARELY
from jaxtp.mesh import Sizes, parts

Counted = Literal["", "at most", "a turn"]  # Meaning of a count: exact, or one of these two

AT_MOST: Final = "at most"
"""A collective in a branch of a conditional: it runs only if that branch is taken, but all branches
are counted."""

A_TURN: Final = "a turn"
"""A collective in a loop with an unknown trip count: counted for one iteration."""

_MOVES_NOTHING = {"axis_index", "pvary"}


def count_collectives(jaxpr: Any, mesh_sizes: Sizes) -> Counter[Collective]:
    """Counts collectives in a closed jaxpr, except in groups of one device.

    `Collective.counted` marks inexact counts; `mesh_sizes` is in the mesh's order.
    """
    counts: Counter[Collective] = Counter()
    for equation, times, counted, scope in equations(jaxpr.jaxpr):
        name = equation.primitive.name
        if name in _MOVES_NOTHING:
            continue
        params = equation.params
        names = params.get("axes", params.get("axis_name", ()))
        axes = spanned(_as_sequence(names), mesh_sizes)
        groups = params.get("axis_index_groups")
        group = len(groups[0]) if groups else parts(mesh_sizes, axes)
        kind = PRIMITIVES.get(name, name)
        if group == 1:
            continue
        for pair in zip(equation.invars, equation.outvars, strict=False):
            largest = max(arrays(*pair), key=lambda array: math.prod(array.shape))
            shape = tuple(largest.shape)
            dtype = str(largest.dtype)
            size = array_bytes(largest)
            counts[Collective(kind, axes, group, size, scope, shape, dtype, counted)] += times
    return counts


def equations(
    jaxpr: Jaxpr, times: int = 1, counted: Counted = "", outer: str = ""
) -> Iterator[tuple[JaxprEqn, int, Counted, str]]:
    """Yields `(equation, runs, meaning of runs, scope)` of needed equations.

    Nested equations are included, except in kernels.
    """
    for equation in needed_equations(jaxpr):
        scope = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
        yield equation, times, counted, scope
        if equation.primitive.name == "pallas_call":
            continue
        for inner, inner_times, meaning in _inside(equation, counted):
            yield from equations(inner, times * inner_times, meaning, scope)


def needed_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Returns the equations that XLA keeps.

    A jaxpr also has equations that nothing reads, such as kernels in a recomputation.
    """
    read = set(map(id, jaxpr.outvars))
    needed = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not read.isdisjoint(map(id, equation.outvars)):
            read.update(map(id, equation.invars))
            needed.append(equation)
    return needed[::-1]


def _inside(equation: JaxprEqn, counted: Counted) -> Iterator[tuple[Jaxpr, int, Counted]]:
    name = equation.primitive.name
    params = equation.params
    if name == "while":
        rarely = runs_rarely(equation)
        meaning = counted if rarely else A_TURN
        yield params["body_jaxpr"].jaxpr, int(not rarely), meaning
        yield params["cond_jaxpr"].jaxpr, 1, meaning
        return
    times = params["length"] if name == "scan" else 1
    if name == "cond" and len(params["branches"]) > 1 and not counted:
        counted = AT_MOST
    for value in chain.from_iterable(map(_as_sequence, params.values())):
        jaxpr: Any = getattr(value, "jaxpr", value)
        if hasattr(jaxpr, "eqns"):
            yield jaxpr, times, counted


def _as_sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)


def arrays(*variables: Any) -> list[ShapedArray]:
    """Returns variables' avals (shape and dtype), typed for mypy."""
    return [variable.aval for variable in variables]


def array_bytes(array: Any) -> int:
    """Returns the bytes of an array, which may be abstract."""
    return int(array.size * array.dtype.itemsize)


Products = tuple[int, int, int, int]
"""m, k and n of matrix products, and their number."""


def products_of(equation: JaxprEqn) -> Products | None:
    """Returns the products of an equation, also of a convolution and of jaxtp's kernels.

    Returns None for other equations.
    """
    name = equation.primitive.name
    groups = matrices = 1
    if name == "pallas_call":
        shapes = [operand.shape for operand in arrays(*equation.invars)]
        return kernel_products(equation.params["name"], shapes, arrays(*equation.outvars)[0].shape)
    if name == "conv_general_dilated":
        kernel, result = arrays(equation.invars[1], equation.outvars[0])
        features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
        return result.size // features, kernel.size // features, features, 1
    if name == "dot_general":
        dims = equation.params["dimension_numbers"]
    elif name == "ragged_dot_general":
        # XLA multiplies every row with the matrix of every group, except on TPUs.
        _, right, sizes = arrays(*equation.invars)
        numbers = equation.params["ragged_dot_dimension_numbers"]
        dims = numbers.dot_dimension_numbers
        groups = sizes.size
        matrices = math.prod(right.shape[dim] for dim in numbers.rhs_group_dimensions)
    else:
        return None
    left, result = arrays(equation.invars[0], equation.outvars[0])
    k = math.prod(left.shape[dim] for dim in dims[0][0])
    m = groups * left.size // max(k, 1)  # batch dims count as rows
    return m, k, matrices * result.size // max(m, 1), 1


def kernel_products(
    name: str, operands: Sequence[Sequence[int]], result: Sequence[int]
) -> Products | None:
    """Returns the products of a Pallas kernel or of cuDNN's attention (fmha), by its shapes.

    Returns None for an unknown kernel.
    """
    # Each row has a product with the matrix of its group, or its part of the matrix's gradient.
    if name.startswith("grouped_"):
        return operands[-2][0], operands[-2][1], result[-1], 1
    if name.startswith("delta_"):  # each token reads the state, then changes it
        *tokens, width = operands[0]
        return math.prod(tokens), width, result[-1], 2
    if name not in _ATTENTION:
        return None
    rows, length, heads, width = operands[0]
    return rows * heads * length, width, operands[1][1] // 2, _ATTENTION[name]  # half: it is causal


_ATTENTION = {
    "attention_forward": 2,
    "attention_queries": 2,
    "attention_keys": 3,
    "fmha": 2,
    "fmhaBackward": 5,
}
"""Products in attention kernels. Products that both backward kernels compute (the scores, and the
gradients of the weights) count once."""


def runs_rarely(loop: JaxprEqn) -> bool:
    """Returns whether a `while` equation has the scope of loops that rarely run."""
    return RARELY in str(loop.source_info.name_stack)
