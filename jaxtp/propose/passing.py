"""Through which operations a split dim passes: each device's part of the result needs its part of the operands alone.

One rule for each kind of JAX primitive. A rule takes an equation of a jaxpr and, for each operand, the dim that is
split (None: the whole array is on every device, of which any part can be taken), and gives the dim of each result, or
raises `Blocked` with the reason. What has no rule blocks: a plan is proposed from what is known to work.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

Dims = Sequence[int | None]
Rule = Callable[[Any, Dims], list[int | None]]

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag integer_pow is_finite le lgamma log log1p
    logistic lt max min mul name ne neg nextafter not optimization_barrier or pow real reduce_precision rem round
    rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub
    tan tanh xor
    """.split()  # noqa: SIM905  # seventy lines otherwise
)
"""Primitives that treat every element on its own."""


class Blocked(Exception):  # noqa: N818  # an outcome, not an error
    """A split dim does not pass; the message says why, to follow the name of a module."""


def pass_through(equation: Any, dims: Dims) -> list[int | None]:
    """Returns the split dim of each result of an equation.

    Args:
      equation: of a jaxpr, without a jaxpr inside.
      dims: the split dim of each operand; at least one is not None.

    Raises:
      Blocked: the operation needs the whole of a split dim, or is not known.
    """
    name = equation.primitive.name
    if name in ELEMENTWISE:
        return [agree(dims)] * len(equation.outvars)
    if (rule := RULES.get(name)) is None:
        raise Blocked(f"goes into {name}, which may need all of it")
    return rule(equation, dims)


def whole(equation: Any, dim: int) -> Blocked:
    """Returns the outcome of an operation that needs a dim whole; `dim` is that of its first operand."""
    return Blocked(f"goes into {equation.primitive.name}, which needs all {equation.invars[0].aval.shape[dim]} of it")


def agree(dims: Dims) -> int:
    """Returns the one dim that all split operands share.

    Raises:
      Blocked: they differ.
    """
    found = {dim for dim in dims if dim is not None}
    if len(found) > 1:
        raise Blocked(f"meets an array that is split along another dim ({' and '.join(map(str, sorted(found)))})")
    return found.pop()


def _reduce(equation: Any, dims: Dims) -> list[int | None]:
    return [_without(equation, agree(dims), equation.params["axes"])] * len(equation.outvars)


def _without(equation: Any, dim: int, gone: Sequence[int]) -> int:
    if dim in gone:
        raise whole(equation, dim)
    return dim - sum(other < dim for other in gone)


def _reshape(equation: Any, dims: Dims) -> list[int | None]:
    """Keeps the split dim the outermost of the dims that it is cut into or merged with."""
    dim, before, after = agree(dims[:1]), equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    outside = math.prod(before[:dim])
    if before[dim] == 1 or equation.params.get("dimensions") is not None:
        raise whole(equation, dim)
    for place, size in enumerate(after):
        if size > 1 and math.prod(after[:place]) == outside:
            return [place]
    raise Blocked(f"is merged with the dim before it by reshape, {before} to {after}: its parts are no longer together")


def _slice(equation: Any, dims: Dims) -> list[int | None]:
    """Checks that slices, splits, reversals, updates, sorts and cumulative sums leave the dim as it is."""
    dim = agree(dims)
    params, source = equation.params, equation.invars[0].aval.shape
    touched = params.get("dimensions", (params.get("axis", params.get("dimension")),))
    if dim in touched or any(out.aval.shape[dim] != source[dim] for out in equation.outvars):
        parts = len(equation.outvars)
        raise Blocked(
            f"is cut into {parts} along the split dim (one layer for each could be split)"
            if parts > 1
            else f"goes into {equation.primitive.name} along the split dim"
        )
    return [dim] * len(equation.outvars)


def _concatenate(equation: Any, dims: Dims) -> list[int | None]:
    dim = agree(dims)
    if dim == equation.params["dimension"]:
        raise Blocked("is concatenated along the split dim")
    return [dim]


def _pad(equation: Any, dims: Dims) -> list[int | None]:
    dim = agree(dims[:1])
    if any(equation.params["padding_config"][dim]):
        raise Blocked("is padded along the split dim")
    return [dim]


def _gather(equation: Any, dims: Dims) -> list[int | None]:
    """Passes rows picked from an array whose other dims are taken whole."""
    dim, numbers = agree(dims), equation.params["dimension_numbers"]
    operand = equation.invars[0].aval
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    if dims[1] is not None or dim in gone or equation.params["slice_sizes"][dim] != operand.shape[dim]:
        raise whole(equation, dim)
    return [numbers.offset_dims[[d for d in range(operand.ndim) if d not in gone].index(dim)]]


def _window(equation: Any, dims: Dims) -> list[int | None]:
    dim, params = agree(dims), equation.params
    if params["window_dimensions"][dim] != 1 or params["window_strides"][dim] != 1 or any(params["padding"][dim]):
        raise whole(equation, dim)
    return [dim] * len(equation.outvars)


def _dot(equation: Any, dims: Dims) -> list[int | None]:
    """Passes a batch dim of both operands, or a dim of one that is not summed over."""
    (contracted, batch), sides = equation.params["dimension_numbers"], []
    for side, dim in enumerate(dims):
        if dim is None:
            continue
        if dim in contracted[side]:
            raise Blocked("is summed over by a product that is not a layer")
        sides.append(_place_in_product(equation, side, dim, contracted, batch))
    return [agree(sides)]


def _place_in_product(equation: Any, side: int, dim: int, contracted: Any, batch: Any) -> int:
    if dim in batch[side]:
        return batch[side].index(dim)
    free = [
        [d for d in range(operand.aval.ndim) if d not in (*contracted[i], *batch[i])]
        for i, operand in enumerate(equation.invars)
    ]
    return len(batch[0]) + side * len(free[0]) + free[side].index(dim)


RULES: dict[str, Rule] = {
    "broadcast_in_dim": lambda equation, dims: [equation.params["broadcast_dimensions"][agree(dims[:1])]],
    "transpose": lambda equation, dims: [equation.params["permutation"].index(agree(dims))],
    "squeeze": lambda equation, dims: [_without(equation, agree(dims), equation.params["dimensions"])],
    "reshape": _reshape,
    "concatenate": _concatenate,
    "pad": _pad,
    "gather": _gather,
    "dot_general": _dot,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("slice", "split", "rev", "dynamic_slice", "dynamic_update_slice"), _slice),
    **dict.fromkeys(("cumsum", "cumlogsumexp", "cumprod", "cummax", "cummin", "sort"), _slice),
    **dict.fromkeys(("reduce_window_max", "reduce_window_sum", "reduce_window_min"), _window),
}
