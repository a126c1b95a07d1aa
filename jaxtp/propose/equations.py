"""Reading the equations of a jaxpr: bodies, scans, what is needed, what was broadcast."""

from typing import Any

import jax.numpy as jnp

from jaxtp.propose.flows import Flow

_CALLS = {
    *("jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
}


def live(jaxpr: Any) -> list[Any]:
    """Returns the equations that the results need, in order."""
    needed, live = set(map(id, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(id(variable) in needed for variable in equation.outvars):
            needed |= set(map(id, equation.invars))
            live.append(equation)
    return live[::-1]


def body_of(equation: Any) -> Any:
    """Returns the jaxpr that an equation calls on its operands; None for an operation, and for loops and branches."""
    if equation.primitive.name not in _CALLS:
        return None
    found = next((equation.params[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in equation.params), None)
    body = opened(found)
    return body if body is not None and len(body.invars) == len(equation.invars) else None


def opened(jaxpr: Any) -> Any:
    """Returns a jaxpr that may be closed, without the values of its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def parts_of_scan(equation: Any, body: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a scan, whose dims are the same in its body."""
    sliced = sum(v.aval.ndim != b.aval.ndim for v, b in zip(equation.invars, body.invars, strict=True))
    carried = sum(v.aval.ndim == b.aval.ndim for v, b in zip(equation.outvars, body.outvars, strict=True))
    return len(body.invars) - carried - sliced, carried


def differentiable(aval: Any) -> bool:
    """Returns whether an abstract value is of a dtype that has gradients."""
    return bool(jnp.issubdtype(aval.dtype, jnp.inexact))


def source_of(equation: Any, flows: list[Flow]) -> tuple[int, frozenset[int]] | None:
    """Returns the bytes and dims of what was broadcast to a result; None if nothing was."""
    name, arrays = equation.primitive.name, [v.aval for v in equation.invars if v.aval.ndim]
    if name == "broadcast_in_dim" and arrays:
        (aval, flow), dims = (arrays[0], flows[0]), equation.params["broadcast_dimensions"]
        size, varying = flow.source or (aval.size * aval.dtype.itemsize, frozenset(range(aval.ndim)))
        return size, frozenset(dims[d] for d in varying if aval.shape[d] > 1)
    if name in ("convert_element_type", "mul", "add", "neg") and len(arrays) == 1:
        return next(flow.source for flow, v in zip(flows, equation.invars, strict=True) if v.aval.ndim)
    return None


def has_split_dim(equation: Any, flows: list[Flow], flow: Flow, aval: Any) -> bool:
    """Returns whether a whole operand has the dim split in another one; if not, the split one multiplies all of it."""
    side, dim = next((i, f.dim) for i, f in enumerate(flows) if f.dim is not None)
    if equation.primitive.name == "dot_general":
        return dim in equation.params["dimension_numbers"][1][side]
    if flow.source:
        return dim in flow.source[1]
    return bool(aval.ndim > (dim or 0) and aval.shape[dim] > 1)
