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
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxtp.collectives import Float8, axis_index, axis_size, permute, vary_like
from jaxtp.layers.float8 import (
    Kernel,
    NeedsGrad,
    Operand,
    Value,
    gradient_of,
    input_gradient,
    perturbed,
    product,
    unwrapped,
    value_of,
)
from jaxtp.layers.mxfp8 import kernel_gradient
from jaxtp.layers.sequence_parallel import SEQUENCE_DIM
from jaxtp.mesh import TP

Overlap = Literal["none", "ring"]
C = TypeVar("C")
V = TypeVar("V", Array, Value)


def is_ring(overlap: Overlap, tp: int, *, split: bool) -> bool:
    """Returns whether a layer uses rings; `split`: activations are split along the sequence."""
    return overlap == "ring" and split and tp > 1


def _ring_gather(x: V, visit: Callable[[C, V, Array], tuple[C, list[Array]]], carry: C) -> tuple[C, list[Array]]:
    """Runs `carry, parts = visit(carry, part, position)` for every part of the sequence, while the next part arrives.

    `x` is this device's part, `[b, T/tp, ..., D]`; `position` is where `part` begins. Returns the last carry, and whole
    arrays, `[b, T, ...]`, of the parts of them that each visit returns.
    """
    tp, found = axis_size(TP), []
    # Unrolled, because XLA would copy what a loop sends. Without the barrier it would merge all products, which then
    # wait for all permutes.
    for number in range(tp):
        moved = jax.tree.map(partial(permute, axis=TP), x) if number < tp - 1 else x
        x, carry, parts = lax.optimization_barrier((moved, *visit(carry, x, _position(number, x.shape[SEQUENCE_DIM]))))
        found.append(parts)
    return carry, [_in_order(parts) for parts in zip(*found, strict=True)]


def _in_order(parts: Sequence[Array]) -> Array:
    """Joins the parts of a sequence, which came in the order of `_position`."""
    size = parts[0].shape[SEQUENCE_DIM]
    return jnp.roll(jnp.concatenate(parts[::-1], SEQUENCE_DIM), _position(-1, size), SEQUENCE_DIM)


def _ring_scatter(inputs: Sequence[Value], kernels: Sequence[Value], dtype: DTypeLike) -> Array:
    """Returns this device's part of the products summed over tp; partial sums go around."""
    tp, size = axis_size(TP), inputs[0].shape[SEQUENCE_DIM] // axis_size(TP)

    def summand(at: Array) -> Array:
        operands = zip((_part(x, at, size) for x in inputs), kernels, strict=True)
        return reduce(operator.add, (product(*pair, dtype) for pair in operands))

    total = summand(_position(1, size))
    for number in range(2, tp + 1):
        at, total = lax.optimization_barrier((_position(number, size), total))  # products stay apart
        # Without a barrier XLA may fuse the sum into the product, which then waits for the permute (jax 0.12, H100).
        arrived, local = lax.optimization_barrier((permute(total, TP), summand(at)))
        total = arrived + local
    return total


def _position(number: int, size: int) -> Array:
    """Returns the start of the part that the device `number` steps back in the ring has."""
    return jnp.asarray((axis_index(TP) - number) % axis_size(TP) * size)


@jax.custom_vjp
def gather_matmul(x: Operand, kernels: tuple[Kernel, ...]) -> tuple[Array, ...]:
    """Multiplies an activation, all-gathered along the sequence, by each kernel.

    `x` is `[b, T/tp, ..., D]`, kernels are this device's columns, `[D, F_i/tp]`; returns `[b, T, ..., F_i/tp]`. A
    kernel in float8 needs an `x` in float8.
    """
    return _gather_matmul(value_of(x), tuple(map(value_of, kernels)), x.dtype)


def _gather_matmul(x: Value, kernels: tuple[Value, ...], dtype: DTypeLike) -> tuple[Array, ...]:
    _, ys = _ring_gather(x, lambda carry, part, _: (carry, [product(part, w, dtype) for w in kernels]), None)
    return tuple(ys)


def _gather_forward(x: object, kernels: tuple[Any, ...]) -> tuple[tuple[Array, ...], Any]:
    needs_grad = NeedsGrad((perturbed(x),), tuple(perturbed(w) for w in kernels))
    dtype = unwrapped(x).dtype
    x, kernels = value_of(unwrapped(x)), tuple(map(value_of, unwrapped(kernels)))
    return _gather_matmul(x, kernels, dtype), (x, kernels, needs_grad)


def _gather_backward(residuals: Any, grads: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    x, kernels, needs_grad = residuals
    used = [i for i, grad in enumerate(grads) if not isinstance(grad, SymbolicZero)]
    grad_x = None
    if needs_grad.inputs[0]:
        ys, ws = zip(*(input_gradient(grads[i], kernels[i], TP) for i in used), strict=True)
        grad_x = _ring_scatter(ys, ws, grads[used[0]].dtype)
    trained = [i for i in used if needs_grad.kernels[i]]

    def visit(sums: list[Array], part: Value, at: Array) -> tuple[list[Array], list[Array]]:
        size = part.shape[SEQUENCE_DIM]
        return [_add_kernel_grad(s, part, _part(grads[i], at, size)) for s, i in zip(sums, trained, strict=True)], []

    sums = _ring_gather(x, visit, [_zero_kernel_grad(x, grads[i]) for i in trained])[0] if trained else []
    return gradient_of(x, grad_x), _cast_kernel_grads(sums, trained, kernels, grads[used[0]].dtype)


@jax.custom_vjp
def matmul_scatter(inputs: tuple[Operand, ...], kernels: tuple[Kernel, ...]) -> Array:
    """Reduce-scatters the sum of `inputs[i] @ kernels[i]` over tp, along the sequence.

    Inputs are `[b, T, ..., F_i/tp]`, kernels the matching rows, `[F_i/tp, D]`; returns `[b, T/tp, ..., D]`.
    """
    xs, ws = (tuple(map(value_of, each)) for each in (inputs, kernels))
    return _ring_scatter(xs, ws, inputs[0].dtype)


def _scatter_forward(inputs: tuple[Any, ...], kernels: tuple[Any, ...]) -> tuple[Array, Any]:
    needs_grad = NeedsGrad(*(tuple(map(perturbed, args)) for args in (inputs, kernels)))
    dtype = unwrapped(inputs[0]).dtype
    xs, ws = (tuple(map(value_of, unwrapped(args))) for args in (inputs, kernels))
    saved = tuple(x if trained else None for x, trained in zip(xs, needs_grad.kernels, strict=True))
    return _ring_scatter(xs, ws, dtype), (saved, ws, needs_grad)


def _scatter_backward(residuals: Any, grad: Array) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    inputs, kernels, needs_grad = residuals
    moving = [i for i, needed in enumerate(needs_grad.inputs) if needed]
    trained = [i for i, needed in enumerate(needs_grad.kernels) if needed]

    def visit(sums: list[Array], part: Array, at: Array) -> tuple[list[Array], list[Array]]:
        size = part.shape[SEQUENCE_DIM]
        added = [_add_kernel_grad(s, _part(inputs[i], at, size), part) for s, i in zip(sums, trained, strict=True)]
        return added, [product(*input_gradient(part, kernels[i]), part.dtype) for i in moving]

    sums, ys = _ring_gather(grad, visit, [_zero_kernel_grad(inputs[i], grad) for i in trained])
    grad_inputs = dict(zip(moving, ys, strict=True))
    each = tuple(gradient_of(w, grad_inputs.get(i)) for i, w in enumerate(kernels))  # both are in 8 bits, or neither
    return each, _cast_kernel_grads(sums, trained, kernels, grad.dtype)


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


def _part(x: V, at: Array, size: int) -> V:
    part: V = jax.tree.map(lambda each: lax.dynamic_slice_in_dim(each, at, size, SEQUENCE_DIM), x)
    return part


def _zero_kernel_grad(x: Value, grad: Array) -> Array:
    zeros = jnp.zeros((x.shape[-1], grad.shape[-1]), jnp.promote_types(grad.dtype, jnp.float32))
    return vary_like(zeros, x.bits if isinstance(x, Float8) else x, grad)


def _add_kernel_grad(total: Array, x: Value, grad: Array) -> Array:
    return total + kernel_gradient(x, grad, total.dtype)


def _cast_kernel_grads(
    sums: Sequence[Array], at: Sequence[int], kernels: Sequence[Value], dtype: DTypeLike
) -> tuple[Any, ...]:
    by_index = {i: total.astype(dtype) for i, total in zip(at, sums, strict=True)}
    return tuple(gradient_of(w, by_index.get(i)) for i, w in enumerate(kernels))
