"""Rules for how a split dim passes through JAX primitives, and the walk that applies them.

A rule maps an equation and the split dims of its operands to the split dims of its results; None
means replicated. It raises `Blocked` if a device cannot compute its shard from its operands'
shards without communication. A primitive without a rule is blocked.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jax.core import Atom
from jax.extend.core import JaxprEqn, Literal

from jaxtp.analysis.census import needed_equations

Dims = Sequence[int | None]
Rule = Callable[[JaxprEqn, Dims], Dims]
Fact = TypeVar("Fact")
Result = TypeVar("Result")

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type
    copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow
    is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter not or pow real
    reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical
    sign sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905  # seventy lines otherwise
)


class Blocked(Exception):  # noqa: N818  # an outcome, not an error
    """A split dim does not pass; the message continues `its output`."""


def pass_through(equation: JaxprEqn, dims: Dims) -> Dims:
    """Returns the results' split dims, or raises `Blocked`.

    The equation has a split operand, and no inner jaxpr.
    """
    name = equation.primitive.name
    if name in ELEMENTWISE:
        return [agree(dims)] * len(equation.outvars)
    if name not in RULES:
        raise Blocked(f"goes into {name}, which may need all of it")
    return RULES[name](equation, dims)


def agree(dims: Dims) -> int:
    """Returns the common split dim, or raises `Blocked`."""
    split = {dim for dim in dims if dim is not None}
    if len(split) > 1:
        rivals = " and ".join(map(str, sorted(split)))
        raise Blocked(f"meets an array that is split along another dim ({rivals})")
    return split.pop()


def shape_of(variable: Atom) -> tuple[int, ...]:
    """Returns the shape."""
    return tuple(variable.aval.shape)  # type: ignore[attr-defined]


def _needs_whole(equation: JaxprEqn, dim: int) -> Blocked:
    name = equation.primitive.name
    size = shape_of(equation.invars[0])[dim]
    return Blocked(
        f"goes into {name}, which needs all {size} elements of the split dim on one device"
    )


def _drop_dims(equation: JaxprEqn, dims: Dims) -> Dims:
    """Passes a split dim that is not itself reduced or squeezed."""
    dim = agree(dims)
    params = equation.params
    removed = params.get("axes", params.get("dimensions", ()))
    if dim in removed:
        raise _needs_whole(equation, dim)
    return [dim - sum(other < dim for other in removed)] * len(equation.outvars)


def _broadcast(equation: JaxprEqn, dims: Dims) -> Dims:
    return [equation.params["broadcast_dimensions"][agree(dims[:1])]]


def _reshape(equation: JaxprEqn, dims: Dims) -> Dims:
    """Passes a split dim that is outermost among the dims that it becomes or is merged with."""
    dim = agree(dims[:1])
    before = shape_of(equation.invars[0])
    after = shape_of(equation.outvars[0])
    if before[dim] == 1 or equation.params.get("dimensions") is not None:
        raise _needs_whole(equation, dim)
    outer = 1
    for i, size in enumerate(after):
        if size > 1 and outer == math.prod(before[:dim]):
            return [i]
        outer *= size
    raise Blocked(
        f"goes into reshape, {before} to {after}, which merges the split dim into the dim before it"
    )


def _along_other_dims(equation: JaxprEqn, dims: Dims) -> Dims:
    """Passes a split dim if slices, sorts, sums, padding or windows are along other dims."""
    dim = agree(dims)
    params = equation.params
    num_parts = len(equation.outvars)
    is_along = dim in (params.get("axis"), params.get("dimension"), *params.get("dimensions", ()))
    if "padding_config" in params:
        is_along = any(params["padding_config"][dim])
    if "window_dimensions" in params:
        is_along = params["window_dimensions"][dim] > 1
    sizes = {shape_of(variable)[dim] for variable in (equation.invars[0], *equation.outvars)}
    if not is_along and len(sizes) == 1:
        return [dim] * num_parts
    if num_parts == 1:
        raise Blocked(f"goes into {equation.primitive.name} along the split dim")
    raise Blocked(
        f"is divided into {num_parts} along the split dim; use separate layers, which tp can split"
    )


def _gather(equation: JaxprEqn, dims: Dims) -> Dims:
    dim = agree(dims)
    numbers = equation.params["dimension_numbers"]
    shape = shape_of(equation.invars[0])
    removed = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if dims[1] is not None or dim in removed or equation.params["slice_sizes"][dim] != shape[dim]:
        raise _needs_whole(equation, dim)
    return [numbers.offset_dims[dim - sum(other < dim for other in removed)]]


def _dot(equation: JaxprEqn, dims: Dims) -> Dims:
    contracted, batch = equation.params["dimension_numbers"]
    results = []
    first = len(batch[0])  # result dim of the operand's first dim that is neither
    for operand, dim, summed, batched in zip(equation.invars, dims, contracted, batch, strict=True):
        free = [d for d in range(len(shape_of(operand))) if d not in (*summed, *batched)]
        if dim in summed:
            raise Blocked("goes into a product outside of a layer, which sums over the split dim")
        if dim in batched:
            results.append(batched.index(dim))
        elif dim is not None:
            results.append(first + free.index(dim))
        first += len(free)
    return [agree(results)]


REDUCTIONS = frozenset(
    {
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"),
        *("argmax", "argmin", "gather"),
    }
)
"""Primitives that reduce a split dim, or read an element of it, with an all-reduce of their
result."""

_ALONG_OTHER_DIMS = (
    *("concatenate", "pad", "slice", "split", "rev", "dynamic_slice", "dynamic_update_slice"),
    *("cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin", "sort"),
    *("reduce_window_max", "reduce_window_sum", "reduce_window_min"),
)

RULES: dict[str, Rule] = {
    **dict.fromkeys(REDUCTIONS, _drop_dims),
    "broadcast_in_dim": _broadcast,
    "transpose": lambda equation, dims: [equation.params["permutation"].index(agree(dims))],
    "squeeze": _drop_dims,
    "reshape": _reshape,
    "gather": _gather,
    "dot_general": _dot,
    **dict.fromkeys(_ALONG_OTHER_DIMS, _along_other_dims),
}

_CALLS = {
    *("jit", "closed_call", "core_call", "remat2", "custom_jvp_call", "custom_vjp_call"),
}


class Walk(Generic[Fact, Result]):
    """Propagates a fact about each array through a jaxpr and its inner jaxprs.

    `result` collects what the walk finds. Subclasses define `_operation` (facts about the results
    of an equation without an inner jaxpr), `_join` (the fact about a variable with several possible
    values) and `_shift` (the fact after a leading dim is removed or added).
    """

    _operation: Callable[[JaxprEqn, list[Fact], int], list[Fact]]
    _join: Callable[[Sequence[Fact], Atom, int], Fact]
    _shift: Callable[[Fact, int], Fact]

    def __init__(self, unknown: Fact, new_result: Callable[[], Result]):
        self.unknown = unknown
        self.new_result = new_result
        self.result = new_result()

    def run(self, jaxpr: Any, facts: Sequence[Fact], times: int) -> list[Fact]:
        """Returns the facts about the results of a jaxpr that runs `times` times."""
        by_variable = dict(zip(jaxpr.invars, facts, strict=True))

        def read(variable: Atom) -> Fact:
            if isinstance(variable, Literal):
                return self.unknown
            return by_variable.get(variable, self.unknown)

        for equation in needed_equations(jaxpr):
            if equation.outvars:  # a print blocks no split
                results = self._equation(equation, list(map(read, equation.invars)), times)
                by_variable.update(zip(equation.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))

    def _equation(self, equation: JaxprEqn, facts: list[Fact], times: int) -> list[Fact]:
        name = equation.primitive.name
        if name == "optimization_barrier":
            return facts
        if name == "scan":
            return self._scan(equation, facts, times)
        if name == "cond":  # walks every branch
            branches = []
            for branch in equation.params["branches"]:
                branches.append(self.run(open_jaxpr(branch), facts[1:], times))
            return self._join_all(branches, equation.outvars, times)
        body = _called(equation)
        if body is None:
            return self._operation(equation, facts, times)
        return self.run(body, facts, times)

    def _join_all(
        self, facts: Sequence[list[Fact]], variables: Sequence[Atom], times: int
    ) -> list[Fact]:
        joined = []
        for *values, variable in zip(*facts, variables, strict=True):
            joined.append(self._join(values, variable, times))
        return joined

    def _scan(self, equation: JaxprEqn, facts: list[Fact], times: int) -> list[Fact]:
        # Walks the body until the facts about the carry are stable, then once to collect the
        # result.
        body = open_jaxpr(equation.params["jaxpr"])
        times = times * equation.params["length"]
        carries = len(body.outvars) - _num_sliced(equation.outvars, body.outvars)
        num_unsliced = len(body.invars) - _num_sliced(equation.invars, body.invars)
        constants = facts[: num_unsliced - carries]
        carry = facts[num_unsliced - carries : num_unsliced]
        slices = [self._shift(fact, -1) for fact in facts[num_unsliced:]]
        for _ in range(2 + 2 * carries):
            result = self.result
            self.result = self.new_result()
            after = self.run(body, [*constants, *carry, *slices], times)[:carries]
            self.result = result
            before = carry
            carry = self._join_all([carry, after], equation.outvars[:carries], times)
            if carry == before:
                break
        results = self.run(body, [*constants, *carry, *slices], times)
        return [*results[:carries], *(self._shift(fact, 1) for fact in results[carries:])]


def _num_sliced(outside: Sequence[Atom], inside: Sequence[Atom]) -> int:
    # Counts the operands or results of a scan that its body takes or returns slice by slice.
    return sum(map(operator.ne, map(shape_of, outside), map(shape_of, inside)))


def open_jaxpr(jaxpr: object) -> Any:
    """Returns the jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _called(equation: JaxprEqn) -> Any:
    """Returns the jaxpr that an equation calls once on its operands, if any."""
    if equation.primitive.name not in _CALLS:
        return None
    params = equation.params
    body = open_jaxpr(params.get("jaxpr", params.get("call_jaxpr")))
    return body if len(body.invars) == len(equation.invars) else None
