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
for the gradient of a column layer's weights it goes around once more (`layers/remat.py` has what that comes to).

XLA schedules a permute beside a product if both are in the body of a loop whose results are in its carry. In a ring
that is written out it merges the products with one weight, which then wait for all permutes; in a loop that stacks its
results it overlaps nothing. Hence `lax.scan`, and one part of each ring outside of it, for which nothing has to move.
"""

import operator
from collections.abc import Callable, Sequence
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

BOTH_DIRECTIONS = 4
"""Devices from which on half of each part goes the other way around: two or three are all neighbours."""


@dataclass(frozen=True)
class Lane:
    """What goes around the ring in one direction: the same positions of each device's part of the sequence."""

    step: int
    """Devices that it moves by in a turn: 1 or -1."""
    begin: int
    """The first of its positions in a part."""
    size: int
    """Number of its positions in a part."""

    def position(self, turn: Array | int, part: int) -> Array:
        """Returns where in the sequence this device's positions are that have moved so often.

        Args:
          turn: how often.
          part: positions in the part of a device.
        """
        return (axis_index(TP) - self.step * turn) % axis_size(TP) * part + self.begin

    def move(self, x: Array) -> Array:
        """Returns what the device before this one holds."""
        return permute(x, TP, self.step)


@jax.tree_util.register_static
@dataclass(frozen=True)
class Wanted:
    """Of which arguments a gradient is asked. A frozen weight has none, and nothing goes around for it."""

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


def _lanes(part: int) -> tuple[Lane, ...]:
    """Returns the lanes of a ring of parts of so many positions, the first positions first."""
    half = part // 2 if axis_size(TP) >= BOTH_DIRECTIONS else 0
    return (*([Lane(-1, 0, half)] if half else []), Lane(1, half, part - half))


def _gathering(x: Array, visit: Callable[[C, Array, Array], C], carry: C) -> C:
    """Runs `carry = visit(carry, part, position)` for every part of the sequence, while the next one comes.

    Args:
      x: this device's part, `[b, T/tp, ..., D]`.
      visit: multiplies.
      carry: what it adds to.
    """
    part = x.shape[SEQUENCE_DIM]
    lanes = _lanes(part)

    def turn(state: tuple[list[Array], C], number: Array | int) -> tuple[tuple[list[Array], C], None]:
        here, carry = state
        there = [lane.move(each) for lane, each in zip(lanes, here, strict=True)]
        return (there, visit_all(here, carry, number)), None

    def visit_all(here: list[Array], carry: C, number: Array | int) -> C:
        for lane, each in zip(lanes, here, strict=True):
            carry = visit(carry, each, lane.position(number, part))
        return carry

    own = [lax.slice_in_dim(x, lane.begin, lane.begin + lane.size, axis=SEQUENCE_DIM) for lane in lanes]
    last = axis_size(TP) - 1
    (here, carry), _ = lax.scan(turn, (own, carry), jnp.arange(last))
    return visit_all(here, carry, last)  # nothing has to move any more


def _scattering(inputs: Sequence[Array], kernels: Sequence[Array]) -> Array:
    """Returns this device's part of the sum over tp of the products: sums go around, and each device adds its own."""
    tp, part = axis_size(TP), inputs[0].shape[SEQUENCE_DIM] // axis_size(TP)
    lanes = _lanes(part)

    def summands(turn: Array | int) -> list[Array]:
        at = [(lane.position(turn, part), lane.size) for lane in lanes]
        return [_product([lax.dynamic_slice_in_dim(x, *each, SEQUENCE_DIM) for x in inputs], kernels) for each in at]

    def turn(sums: list[Array], number: Array) -> tuple[list[Array], None]:
        moved = [lane.move(each) for lane, each in zip(lanes, sums, strict=True)]
        moved, own = lax.optimization_barrier(
            (moved, summands(number))
        )  # else XLA adds as it multiplies, after the move
        return [a + b for a, b in zip(moved, own, strict=True)], None

    # The sum that begins here has `tp - 1` moves before it, to the device whose part it is.
    sums, _ = lax.scan(turn, summands(1), jnp.arange(2, tp + 1))
    return jnp.concatenate(sums, axis=SEQUENCE_DIM)


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
    return tuple(_gathering(x, lambda ys, part, at: _placed(ys, part, kernels, at), empty))


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


def _product(inputs: Sequence[Array], kernels: Sequence[Array]) -> Array:
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
