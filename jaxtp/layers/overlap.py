"""Ring collective matmuls over tp: one part of the sequence moves while another is multiplied.

They replace sequence parallelism's all-gather or reduce-scatter and its products (Wang et al., ASPLOS 2023, doi
10.1145/3567955.3567959). Each is the transpose of the other:

    gather_matmul     all_gather(x) @ w      [b, T/tp, D] @ [D, F/tp] -> [b, T, F/tp]
    matmul_scatter    reduce_scatter(x @ w)  [b, T, F/tp] @ [F/tp, D] -> [b, T/tp, D]

Gradients are hand-written rings, because autodiff would save every part that passes by. A weight gradient is summed
over the parts in float32 and rounded once; the input of a column layer goes around again for it. Rings are
unidirectional: XLA runs one collective at a time, and behind a switch one direction gets the full bandwidth.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from jaxtp.collectives import axis_index, axis_size, permute, vary_like
from jaxtp.layers.sequence_parallel import SEQUENCE_DIM
from jaxtp.mesh import TP

Overlap = Literal["none", "ring"]
C = TypeVar("C")


@jax.tree_util.register_static
@dataclass(frozen=True)
class NeedsGrad:
    """Which arguments need a gradient."""

    inputs: tuple[bool, ...]
    kernels: tuple[bool, ...]


def is_ring(overlap: Overlap, tp: int, *, split: bool) -> bool:
    """Returns whether a layer uses rings; `split`: activations are split along the sequence."""
    return overlap == "ring" and split and tp > 1


def _ring_gather(x: Array, visit: Callable[[C, Array, Array], C], carry: C) -> C:
    """Runs `carry = visit(carry, part, position)` for every part of the sequence, while the next part arrives.

    `x` is this device's part, `[b, T/tp, ..., D]`; `position` is where `part` begins.
    """
    size, last = x.shape[SEQUENCE_DIM], axis_size(TP) - 1

    # XLA overlaps a permute with a product only if both are in a loop body with their results in the carry. It merges
    # the products of an unrolled ring, which then wait for all permutes, and overlaps nothing in a loop that stacks its
    # results, like autodiff's transpose.
    def turn(state: tuple[Array, C], number: Array) -> tuple[tuple[Array, C], None]:
        part, carry = state
        return (permute(part, TP), visit(carry, part, _position(number, size))), None

    # The last part needs no permute, so it stays outside the loop.
    (part, carry), _ = lax.scan(turn, (x, carry), jnp.arange(last))
    return visit(carry, part, _position(last, size))


def _ring_scatter(inputs: Sequence[Array], kernels: Sequence[Array]) -> Array:
    """Returns this device's part of the products summed over tp; partial sums go around."""
    tp, size = axis_size(TP), inputs[0].shape[SEQUENCE_DIM] // axis_size(TP)

    def summand(number: Array | int) -> Array:
        at = _position(number, size)
        parts = (lax.dynamic_slice_in_dim(x, at, size, SEQUENCE_DIM) for x in inputs)
        return sum_of_products(parts, kernels)

    def turn(total: Array, number: Array) -> tuple[Array, None]:
        # Without a barrier XLA may fuse the sum into the product, which then waits for the permute (jax 0.12, H100).
        arrived, local = lax.optimization_barrier((permute(total, TP), summand(number)))
        return arrived + local, None

    total, _ = lax.scan(turn, summand(1), jnp.arange(2, tp + 1))
    return total


def _position(number: Array | int, size: int) -> Array:
    """Returns the start of the part that the device `number` steps back in the ring has."""
    return jnp.asarray((axis_index(TP) - number) % axis_size(TP) * size)


@jax.custom_vjp
def gather_matmul(x: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Multiplies an activation, all-gathered along the sequence, by each kernel.

    `x` is `[b, T/tp, ..., D]`, kernels are this device's columns, `[D, F_i/tp]`; returns `[b, T, ..., F_i/tp]`.
    """
    whole = (x.shape[0], x.shape[SEQUENCE_DIM] * axis_size(TP), *x.shape[SEQUENCE_DIM + 1 : -1])
    empty = [vary_like(jnp.zeros((*whole, w.shape[-1]), x.dtype), x, w) for w in kernels]

    def visit(ys: list[Array], part: Array, at: Array) -> list[Array]:
        return _write_products(ys, part, kernels, at)

    ys = _ring_gather(x, visit, empty)
    return tuple(ys)


def _gather_forward(x: Any, kernels: tuple[Any, ...]) -> tuple[tuple[Array, ...], Any]:
    values = tuple(w.value for w in kernels)
    needs_grad = NeedsGrad((x.perturbed,), tuple(w.perturbed for w in kernels))
    return gather_matmul.fun(x.value, values), (x.value, values, needs_grad)


def _gather_backward(residuals: Any, grads: tuple[Any, ...]) -> tuple[Array | None, tuple[Array | None, ...]]:
    x, kernels, needs_grad = residuals
    used = [i for i, grad in enumerate(grads) if not isinstance(grad, SymbolicZero)]
    grad_x = _ring_scatter([grads[i] for i in used], [kernels[i].T for i in used]) if needs_grad.inputs[0] else None
    trained = [i for i in used if needs_grad.kernels[i]]

    def visit(sums: list[Array], part: Array, at: Array) -> list[Array]:
        return [_add_kernel_grad(s, part, _part(grads[i], at, part)) for s, i in zip(sums, trained, strict=True)]

    sums = _ring_gather(x, visit, [_zero_kernel_grad(x, grads[i]) for i in trained]) if trained else []
    return grad_x, _cast_kernel_grads(sums, trained, kernels)


@jax.custom_vjp
def matmul_scatter(inputs: tuple[Array, ...], kernels: tuple[Array, ...]) -> Array:
    """Reduce-scatters the sum of `inputs[i] @ kernels[i]` over tp, along the sequence.

    Inputs are `[b, T, ..., F_i/tp]`, kernels the matching rows, `[F_i/tp, D]`; returns `[b, T/tp, ..., D]`.
    """
    return _ring_scatter(inputs, kernels)


def _scatter_forward(inputs: tuple[Any, ...], kernels: tuple[Any, ...]) -> tuple[Array, Any]:
    xs, ws = (tuple(each.value for each in args) for args in (inputs, kernels))
    needs_grad = NeedsGrad(*(tuple(each.perturbed for each in args) for args in (inputs, kernels)))
    return _ring_scatter(xs, ws), (xs, ws, needs_grad)


def _scatter_backward(residuals: Any, grad: Array) -> tuple[tuple[Array | None, ...], tuple[Array | None, ...]]:
    inputs, kernels, needs_grad = residuals
    moving = [i for i, needed in enumerate(needs_grad.inputs) if needed]
    trained = [i for i, needed in enumerate(needs_grad.kernels) if needed]
    transposed = [kernels[i].T for i in moving]
    empty = [vary_like(jnp.zeros(inputs[i].shape, inputs[i].dtype), grad, kernels[i]) for i in moving]

    def visit(carry: tuple[list[Array], list[Array]], part: Array, at: Array) -> tuple[list[Array], list[Array]]:
        ys, sums = carry
        added = [_add_kernel_grad(s, _part(inputs[i], at, part), part) for s, i in zip(sums, trained, strict=True)]
        return _write_products(ys, part, transposed, at), added

    ys, sums = _ring_gather(grad, visit, (empty, [_zero_kernel_grad(inputs[i], grad) for i in trained]))
    grad_inputs = dict(zip(moving, ys, strict=True))
    return tuple(grad_inputs.get(i) for i in range(len(inputs))), _cast_kernel_grads(sums, trained, kernels)


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


def sum_of_products(inputs: Iterable[Array], kernels: Sequence[Array]) -> Array:
    """Returns the sum of `inputs[i] @ kernels[i]`."""
    return reduce(operator.add, (x @ w for x, w in zip(inputs, kernels, strict=True)))


def _part(x: Array, at: Array, like: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, at, like.shape[SEQUENCE_DIM], SEQUENCE_DIM)


def _write_products(ys: Sequence[Array], part: Array, kernels: Sequence[Array], at: Array) -> list[Array]:
    each = zip(ys, kernels, strict=True)
    return [lax.dynamic_update_slice_in_dim(y, part @ w, at, SEQUENCE_DIM) for y, w in each]


def _zero_kernel_grad(x: Array, grad: Array) -> Array:
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return vary_like(jnp.zeros((x.shape[-1], grad.shape[-1]), dtype), x, grad)


def _add_kernel_grad(total: Array, x: Array, grad: Array) -> Array:
    dims = list(range(x.ndim - 1))
    return total + jnp.tensordot(x, grad, (dims, dims), preferred_element_type=total.dtype)


def _cast_kernel_grads(sums: Sequence[Array], at: Sequence[int], kernels: Sequence[Array]) -> tuple[Array | None, ...]:
    by_index = dict(zip(at, sums, strict=True))
    return tuple(by_index[i].astype(w.dtype) if i in by_index else None for i, w in enumerate(kernels))
