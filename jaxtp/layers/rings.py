"""Rings: products of a tp group in which parts of the sequence move while others are multiplied.

Under sequence parallelism a column layer gathers its input and multiplies it; a row layer multiplies, and scatters
the sum. In a ring, a device multiplies one part of the sequence while the next one comes from its neighbour; or it
multiplies what it adds to a sum that comes (Wang et al., ASPLOS 2023, doi 10.1145/3567955.3567959):

    gather_matmul     all_gather(x) @ w      [b, T/tp, D] @ [D, F/tp] -> [b, T, F/tp]
    matmul_scatter    reduce_scatter(x @ w)  [b, T, F/tp] @ [F/tp, D] -> [b, T/tp, D]

Each is the gradient of the other by its input. Gradients by weights are rings too, and all are written by hand:
autodiff would keep every part that comes by.

Sums over devices are in the dtype of the activations, as in a reduce-scatter. The gradient of a weight is summed over
the parts in float32 and rounded once, as by one product over the whole sequence. No device ever holds the whole input:
for the gradient of a column layer's weights it goes around once more, beside products: more is sent, and less is held
(`layers/remat.py` has the numbers).

XLA schedules a permute beside a product if both are in the body of a loop whose results are in its carry. In a ring
that is written out it merges the products with one weight, which then wait for all permutes; in a loop that stacks its
results, as the transpose that autodiff makes of one does, it overlaps nothing. Hence `lax.scan`, and one part of each
ring outside of it, for which nothing has to move.

A ring goes one way around. XLA runs one collective at a time, so of two ways at once one would have no product beside
it; and a switch gives one way all of a device's bandwidth.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from jaxtp.collectives import (
    GATHERED,
    REDUCED,
    axis_index,
    axis_size,
    enter_parallel,
    leave_parallel,
    permute,
    vary_like,
)
from jaxtp.layers.activations import SEQUENCE_DIM
from jaxtp.mesh import TP

Overlap = Literal["none", "ring"]
C = TypeVar("C")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Whether a gradient is asked of each argument. Nothing goes around for that of a frozen weight."""

    inputs: tuple[bool, ...]
    kernels: tuple[bool, ...]


def enter_matmul(x: Array, kernels: Sequence[Array], sequence: int | None, overlap: Overlap) -> tuple[Array, ...]:
    """Brings an activation to every device of a tp group, and multiplies it with each kernel.

    Args:
      x: as `enter_parallel` takes it.
      kernels: this device's columns, `[D, F_i/tp]`.
      sequence: the dim of `x` that is split over tp, if one is.
      overlap: whether the two are a ring, where it is split.
    """
    if is_ring(overlap, axis_size(TP), split=sequence is not None):
        return gather_matmul(checkpoint_name(x, GATHERED), tuple(kernels))
    x = enter_parallel(x, sequence)  # [b, T, D]
    return tuple(x @ kernel for kernel in kernels)


def leave_matmul(inputs: Sequence[Array], kernels: Sequence[Array], sequence: int | None, overlap: Overlap) -> Array:
    """Multiplies each input with its kernel, and sums the products, over tp too.

    Other arguments are as of `enter_matmul`; the result is as of `leave_parallel`.
    """
    if is_ring(overlap, axis_size(TP), split=sequence is not None):
        return checkpoint_name(matmul_scatter(tuple(inputs), tuple(kernels)), REDUCED)
    return leave_parallel(_product(inputs, kernels), sequence)


def is_ring(overlap: Overlap, tp: int, *, split: bool) -> bool:
    """Returns whether a layer's products are rings: activations have to be split along the sequence."""
    return overlap == "ring" and split and tp > 1


def _gathering(x: Array, visit: Callable[[C, Array, Array], C], carry: C) -> C:
    """Runs `carry = visit(carry, part, position)` for every part of the sequence, while the next one comes.

    Args:
      x: this device's part, `[b, T/tp, ..., D]`.
      visit: multiplies a part that begins at that position.
      carry: what it adds to.
    """
    size, last = x.shape[SEQUENCE_DIM], axis_size(TP) - 1

    def turn(state: tuple[Array, C], number: Array) -> tuple[tuple[Array, C], None]:
        part, carry = state
        return (permute(part, TP), visit(carry, part, _position(number, size))), None

    (part, carry), _ = lax.scan(turn, (x, carry), jnp.arange(last))
    return visit(carry, part, _position(last, size))


def _scattering(inputs: Sequence[Array], kernels: Sequence[Array]) -> Array:
    """Returns this device's part of the sum over tp of the products: sums go around, and each device adds its own."""
    tp, size = axis_size(TP), inputs[0].shape[SEQUENCE_DIM] // axis_size(TP)

    def summand(number: Array | int) -> Array:
        at = _position(number, size)
        parts = (lax.dynamic_slice_in_dim(x, at, size, SEQUENCE_DIM) for x in inputs)
        return _product(parts, kernels)

    def turn(total: Array, number: Array) -> tuple[Array, None]:
        # Else XLA may add within the product, which then waits for what comes (seen with jax 0.12, for an H100).
        come, own = lax.optimization_barrier((permute(total, TP), summand(number)))
        return come + own, None

    total, _ = lax.scan(turn, summand(1), jnp.arange(2, tp + 1))
    return total


def _position(number: Array | int, size: int) -> Array:
    """Returns where the part begins of the device from which so many steps lead to this one."""
    return jnp.asarray((axis_index(TP) - number) % axis_size(TP) * size)


@jax.custom_vjp
def gather_matmul(x: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Multiplies the whole of an activation that is split along the sequence with each kernel.

    Args:
      x: this device's part, `[b, T/tp, ..., D]`.
      kernels: this device's columns, `[D, F_i/tp]`.

    Returns:
      For each kernel `[b, T, ..., F_i/tp]`.
    """
    whole = (x.shape[0], x.shape[SEQUENCE_DIM] * axis_size(TP), *x.shape[SEQUENCE_DIM + 1 : -1])
    empty = [vary_like(jnp.zeros((*whole, w.shape[-1]), x.dtype), x, w) for w in kernels]

    def visit(ys: list[Array], part: Array, at: Array) -> list[Array]:
        return _placed(ys, part, kernels, at)

    ys = _gathering(x, visit, empty)
    return tuple(ys)


def _gather_forward(x: Any, kernels: tuple[Any, ...]) -> tuple[tuple[Array, ...], Any]:
    values = tuple(w.value for w in kernels)
    wanted = Wanted((x.perturbed,), tuple(w.perturbed for w in kernels))
    return gather_matmul.fun(x.value, values), (x.value, values, wanted)


def _gather_backward(kept: Any, grads: tuple[Any, ...]) -> tuple[Array | None, tuple[Array | None, ...]]:
    x, kernels, wanted = kept
    used = [i for i, grad in enumerate(grads) if not isinstance(grad, SymbolicZero)]
    grad_x = _scattering([grads[i] for i in used], [kernels[i].T for i in used]) if wanted.inputs[0] else None
    asked = [i for i in used if wanted.kernels[i]]

    def visit(sums: list[Array], part: Array, at: Array) -> list[Array]:
        return [_added(s, part, _part(grads[i], at, part)) for s, i in zip(sums, asked, strict=True)]

    sums = _gathering(x, visit, [_no_sum(x, grads[i]) for i in asked]) if asked else []
    return grad_x, _rounded(sums, asked, kernels)


@jax.custom_vjp
def matmul_scatter(inputs: tuple[Array, ...], kernels: tuple[Array, ...]) -> Array:
    """Multiplies each input with its kernel, and sums the products over all of them and over tp.

    Args:
      inputs: this device's features, `[b, T, ..., F_i/tp]`.
      kernels: the rows of those features, `[F_i/tp, D]`.

    Returns:
      This device's part of the sum, `[b, T/tp, ..., D]`.
    """
    return _scattering(inputs, kernels)


def _scatter_forward(inputs: tuple[Any, ...], kernels: tuple[Any, ...]) -> tuple[Array, Any]:
    xs, ws = (tuple(each.value for each in given) for given in (inputs, kernels))
    wanted = Wanted(*(tuple(each.perturbed for each in given) for given in (inputs, kernels)))
    return _scattering(xs, ws), (xs, ws, wanted)


def _scatter_backward(kept: Any, grad: Array) -> tuple[tuple[Array | None, ...], tuple[Array | None, ...]]:
    inputs, kernels, wanted = kept
    moving = [i for i, asked in enumerate(wanted.inputs) if asked]
    asked = [i for i, asked in enumerate(wanted.kernels) if asked]
    transposed = [kernels[i].T for i in moving]
    empty = [vary_like(jnp.zeros(inputs[i].shape, inputs[i].dtype), grad, kernels[i]) for i in moving]

    def visit(carry: tuple[list[Array], list[Array]], part: Array, at: Array) -> tuple[list[Array], list[Array]]:
        ys, sums = carry
        added = [_added(s, _part(inputs[i], at, part), part) for s, i in zip(sums, asked, strict=True)]
        return _placed(ys, part, transposed, at), added

    ys, sums = _gathering(grad, visit, (empty, [_no_sum(inputs[i], grad) for i in asked]))
    grad_inputs = dict(zip(moving, ys, strict=True))
    return tuple(grad_inputs.get(i) for i in range(len(inputs))), _rounded(sums, asked, kernels)


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


def _product(inputs: Iterable[Array], kernels: Sequence[Array]) -> Array:
    """Returns the sum of the products."""
    return reduce(operator.add, (x @ w for x, w in zip(inputs, kernels, strict=True)))


def _part(x: Array, at: Array, like: Array) -> Array:
    """Returns the positions of `x` from `at` on, as many as another has."""
    return lax.dynamic_slice_in_dim(x, at, like.shape[SEQUENCE_DIM], SEQUENCE_DIM)


def _placed(ys: Sequence[Array], part: Array, kernels: Sequence[Array], at: Array) -> list[Array]:
    """Returns the results with the products of a part in their places."""
    each = zip(ys, kernels, strict=True)
    return [lax.dynamic_update_slice_in_dim(y, part @ w, at, SEQUENCE_DIM) for y, w in each]


def _no_sum(x: Array, grad: Array) -> Array:
    """Returns the zeros that the gradient of a weight begins as."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    return vary_like(jnp.zeros((x.shape[-1], grad.shape[-1]), dtype), x, grad)


def _added(total: Array, x: Array, grad: Array) -> Array:
    """Returns the gradient of a weight with what a part adds to it."""
    dims = list(range(x.ndim - 1))
    return total + jnp.tensordot(x, grad, (dims, dims), preferred_element_type=total.dtype)


def _rounded(sums: Sequence[Array], at: Sequence[int], kernels: Sequence[Array]) -> tuple[Array | None, ...]:
    """Returns the gradients of all kernels, None of those of which none is asked."""
    found = dict(zip(at, sums, strict=True))
    return tuple(found[i].astype(w.dtype) if i in found else None for i, w in enumerate(kernels))
