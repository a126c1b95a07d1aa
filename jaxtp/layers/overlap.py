"""Ring collective matmuls over tp: one part of the sequence moves while another is multiplied.

They replace sequence parallelism's all-gather or reduce-scatter and its products (Wang et al.,
ASPLOS 2023, doi 10.1145/3567955.3567959):

    gather_matmul     all_gather(x) @ w
    matmul_scatter    reduce_scatter(x @ w)

Gradients are hand-written rings, because autodiff would save every part; `gather_matmul` saves
them only on request (`keep`). Weight gradients are summed in float32 and rounded once. Rings are
unidirectional: XLA runs one collective at a time, at the full bandwidth of a switch.

In each turn of a ring that gathers, a device sends its part to the next device, multiplies the same
part meanwhile, and has the part of the previous device when the turn ends. A ring that scatters
sends one half of a sum's features while it adds products to the other half. `_barrier` stands
before the products, inside `_begin_send`, and after them. The loops over turns are unrolled,
because XLA would copy what a loop sends.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxtp.collectives import GATHERED, REDUCED, axis_index, axis_size, by_rows, permute
from jaxtp.layers.products import kernel_gradient, perturbed, primals
from jaxtp.layers.transport import SEQUENCE_DIM, Transport
from jaxtp.mesh import TP

Overlap = Literal["none", "ring"]
Sums = TypeVar("Sums", Array, list[Array])


@dataclass(frozen=True)
class Ring(Transport):
    """Overlaps products with communication under sequence parallelism, else as `Transport`.

    Its operands are arrays: layers in 8 bits have no rings.
    """

    keep: bool = False
    """As in `gather_matmul`; see `LayerContext.recomputed`."""

    def is_ring(self, tp: int, *, split: bool) -> bool:
        """See `Transport`."""
        return split and tp > 1

    def enter(self, x: Any, kernels: Sequence[Any], split_dim: int | None) -> tuple[Array, ...]:
        """See `Transport`."""
        if not self.is_ring(axis_size(TP), split=split_dim is not None):
            return super().enter(x, kernels, split_dim)
        return gather_matmul(self.keep, checkpoint_name(x, GATHERED), tuple(kernels))

    def leave(self, inputs: Sequence[Any], kernels: Sequence[Any], split_dim: int | None) -> Array:
        """See `Transport`."""
        if not self.is_ring(axis_size(TP), split=split_dim is not None):
            return super().leave(inputs, kernels, split_dim)
        reduced = matmul_scatter(tuple(inputs), tuple(kernels))
        return checkpoint_name(reduced, REDUCED)


# A ring that gathers: the part of the sequence that each device holds in each turn.
#
#     turn    device 0   device 1   device 2   device 3
#        0      part 0     part 1     part 2     part 3    multiplied while it moves to the right
#        1      part 3     part 0     part 1     part 2
#        2      part 2     part 3     part 0     part 1
#        3      part 1     part 2     part 3     part 0    multiplied; nothing moves


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_matmul(keep: bool, x: Array, kernels: tuple[Array, ...]) -> tuple[Array, ...]:
    """Multiplies an activation, all-gathered along the sequence, by each kernel.

    `x` is `[b, T/tp, ..., D]`, kernels are this device's columns, `[D, F_i/tp]`; returns
    `[b, T, ..., F_i/tp]`. `keep`: the parts of `x` are residuals.
    """
    _, products = _gather_matmul(x, kernels)
    return tuple(products)


def _gather_matmul(x: Array, kernels: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    """Returns the parts of `x` by turn, and the whole products."""
    # One product instead of several
    w = jnp.concatenate(kernels, -1)
    part = x
    parts = []
    products = []
    for turn in range(axis_size(TP)):
        parts.append(part)
        arriving, _, part, _ = _begin_gather_turn(turn, part)
        part, y = _barrier(arriving, part @ w)
        products.append(y)
    y = _in_order(products)
    return parts, _split(y, kernels) if len(kernels) > 1 else [y]


def _gather_forward(keep: bool, x: Any, kernels: Any) -> tuple[tuple[Array, ...], object]:
    needs_grad = (_perturbed([x]), _perturbed(kernels))
    kernels = primals(kernels)
    parts, ys = _gather_matmul(primals(x), kernels)
    saved_parts = parts if keep else parts[:1]
    return tuple(ys), (saved_parts, kernels, needs_grad)


def _gather_backward(
    keep: bool, residuals: Any, grads: tuple[Any, ...]
) -> tuple[object, tuple[object, ...]]:
    parts, kernels, (x_index, kernel_indices) = residuals
    used = [i for i, grad in enumerate(grads) if not isinstance(grad, SymbolicZero)]
    trained = [i for i in used if i in kernel_indices]
    trained_grads = [grads[i] for i in trained]
    kept_parts = parts if keep and trained else []
    dtype = grads[used[0]].dtype
    grad_x = None
    grad_w = None
    if x_index:
        transposed = [kernels[i].T for i in used]
        used_grads = [grads[i] for i in used]
        grad_x, grad_w = _scatter_ring(used_grads, transposed, kept_parts, trained_grads)
    else:
        for turn, part in enumerate(kept_parts):
            start = _part_start(turn, part.shape[SEQUENCE_DIM])
            grad_w = _plus_kernel_gradient(grad_w, part, trained_grads, start)
    if trained and not keep:
        # One ring after the other, or XLA would join permutes of both.
        x, grad_x = _barrier(parts[0], grad_x)
        grad_w = _kernel_gradient_ring(x, trained_grads)
    kernel_grads = []
    if grad_w is not None:
        kernel_grads = _split(grad_w, [kernels[i] for i in trained])
    return grad_x, _for_each(kernels, kernel_grads, trained, dtype)


def _kernel_gradient_ring(x: Array, grads: Sequence[Array]) -> Array | None:
    """Gathers `x` again, and returns the gradient of the kernels, concatenated."""
    part = x
    grad_w = None
    for turn in range(axis_size(TP)):
        arriving, grad_w, part, start = _begin_gather_turn(turn, part, grad_w)
        grad_w = _plus_kernel_gradient(grad_w, part, grads, start)
        part, grad_w = _barrier(arriving, grad_w)
    return grad_w


# A ring that scatters: the part of the result to which each device adds in each turn. A partial sum
# begins on the device after the one that gets it, and its last summand is that device's.
#
#     turn    device 0   device 1   device 2   device 3
#        1       sum 3      sum 0      sum 1      sum 2
#        2       sum 2      sum 3      sum 0      sum 1    arrived from the left, goes to the right
#        3       sum 1      sum 2      sum 3      sum 0
#        4       sum 0      sum 1      sum 2      sum 3
#
# A turn has two halves, of the sum's features: while the low features are added, the high ones
# arrive from the turn before; while the high ones are added, the low ones leave.


@jax.custom_vjp
def matmul_scatter(inputs: tuple[Array, ...], kernels: tuple[Array, ...]) -> Array:
    """Reduce-scatters the sum of `inputs[i] @ kernels[i]` over tp, along the sequence.

    Inputs are `[b, T, ..., F_i/tp]`, kernels the matching rows, `[F_i/tp, D]`; returns
    `[b, T/tp, ..., D]`.
    """
    y, _ = _scatter_ring(inputs, kernels)
    return y


def _scatter_ring(
    inputs: Sequence[Array],
    kernels: Sequence[Array],
    kept_parts: Sequence[Array] = (),
    grads: Sequence[Array] = (),
) -> tuple[Array, Array | None]:
    """Returns this device's part of the sum, and a gradient of kernels.

    The backward pass of `gather_matmul` asks for that gradient: of its kernels, whose transposes
    `kernels` are then. `kept_parts` are the parts that its ring had in each turn, and `grads` the
    gradients of its products. The gradient is computed together with the sum.
    """
    tp = axis_size(TP)
    size = inputs[0].shape[SEQUENCE_DIM] // tp
    half = kernels[0].shape[-1] // 2
    w = jnp.concatenate(kernels, 0)
    low_w = w[..., :half]
    high_w = w[..., half:]
    low_sum = None
    high_sum = None
    grad_w = None
    for turn in range(1, tp + 1):
        start = _part_start(turn, size)
        arriving, low_sum, grad_w, start = _begin_send(high_sum, low_sum, grad_w, start)
        parts = [_part(x, start, size) for x in inputs]
        part = jnp.concatenate(parts, -1)
        low_sum = _plus(low_sum, part @ low_w)
        if kept_parts:
            # In turn t this ring has the part that a gathering ring has in turn t mod tp.
            grad_w = _plus_kernel_gradient(grad_w, kept_parts[turn % tp], grads, start)
        high_sum, part, low_sum, grad_w = _barrier(arriving, part, low_sum, grad_w)

        sending = low_sum if turn < tp else None
        arriving, high_sum, part, factor = _begin_send(sending, high_sum, part, high_w)
        high_sum = _plus(high_sum, part @ factor)
        arrived, high_sum = _barrier(arriving, high_sum)
        low_sum = arrived if turn < tp else low_sum
    return jnp.concatenate([low_sum, high_sum], -1), grad_w  # type: ignore[list-item]


def _scatter_forward(inputs: Any, kernels: Any) -> tuple[Array, object]:
    needed = _perturbed(inputs)
    trained = _perturbed(kernels)
    inputs = primals(inputs)
    kernels = primals(kernels)
    saved_inputs = {i: inputs[i] for i in trained}
    return matmul_scatter.fun(inputs, kernels), (saved_inputs, kernels, needed)


def _scatter_backward(residuals: Any, grad: Array) -> tuple[tuple[object, ...], tuple[object, ...]]:
    # An input is saved if its kernel needs a gradient.
    saved_inputs, kernels, needed = residuals
    size = grad.shape[SEQUENCE_DIM]
    sums: Any = None
    products_by_turn = []
    part = grad
    for turn in range(axis_size(TP)):
        arriving, sums, part, start = _begin_gather_turn(turn, part, sums)
        products = [part @ kernels[i].T for i in needed]
        kernel_grads = [
            _kernel_gradient(_part(x, start, size), part) for x in saved_inputs.values()
        ]
        sums = _plus(sums, kernel_grads)
        part, products, sums = _barrier(arriving, products, sums)
        products_by_turn.append(products)
    input_grads = list(map(_in_order, zip(*products_by_turn, strict=True)))
    return (
        _for_each(kernels, input_grads, needed, grad.dtype),
        _for_each(kernels, sums, saved_inputs, grad.dtype),
    )


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


def _barrier(*values: object) -> Any:
    """Separates the turns of a ring: XLA moves no operation from one turn to another.

    XLA would merge products of several turns that share an operand. The merged product waits for
    all permutes, and hides only one.
    """
    return lax.optimization_barrier(values)


def _begin_send(sending: Any, *operands: object) -> Any:
    """Sends an array to the next device; returns what arrives, and operands to multiply now."""
    sending, *operands_now = _barrier(sending, *operands)
    arriving = None if sending is None else permute(by_rows(sending), TP)
    return arriving, *operands_now


def _begin_gather_turn(turn: int, part: Array, sums: object = None) -> Any:
    """Returns what arrives, `sums`, the part to multiply now, and where it begins."""
    start = _part_start(turn, part.shape[SEQUENCE_DIM])
    is_last = turn == axis_size(TP) - 1
    return _begin_send(None if is_last else part, sums, part, start)


def _part_start(turn: int, size: int) -> Array:
    """Returns where the part begins that this device has in a turn; parts have `size` tokens."""
    index = (axis_index(TP) - turn) % axis_size(TP)
    return jnp.asarray(index * size)


def _part(x: Array, start: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x, start, size, SEQUENCE_DIM)


def _in_order(parts: Sequence[Array]) -> Array:
    """Returns the whole array `[b, T, ...]` of the parts that a ring computed in each turn."""
    size = parts[0].shape[SEQUENCE_DIM]
    # In reverse, the turns of device d are the parts d + 1, d + 2, ..., d. `_part_start` gives the
    # first of them for turn -1.
    y = jnp.concatenate(parts[::-1], SEQUENCE_DIM)
    return jnp.roll(y, _part_start(-1, size), SEQUENCE_DIM)


def _split(joined: Array, kernels: Sequence[Array]) -> list[Array]:
    *ends, _ = accumulate(w.shape[-1] for w in kernels)
    return jnp.split(joined, ends, -1)


def _perturbed(operands: Any) -> dict[int, None]:
    """Returns the indices of operands that need a gradient.

    They are keys, because the residuals of a `custom_vjp` are a tree of arrays.
    """
    return {i: None for i, operand in enumerate(operands) if perturbed(operand)}


def _plus(total: Sums | None, summand: Sums) -> Sums:
    """Adds two arrays, or each array of two lists."""
    return summand if total is None else jax.tree.map(operator.add, total, summand)


def _plus_kernel_gradient(
    total: Array | None,
    part: Array,
    grads: Sequence[Array],
    start: Array,
) -> Array:
    """Adds the gradient of concatenated kernels, from the part of the sequence at `start`."""
    size = part.shape[SEQUENCE_DIM]
    joined = jnp.concatenate([_part(grad, start, size) for grad in grads], -1)
    return _plus(total, _kernel_gradient(part, joined))


def _kernel_gradient(x: Array, grad: Array) -> Array:
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    return kernel_gradient(x, grad, wide)


def _for_each(
    operands: Sequence[Array],
    grads: Sequence[Array],
    needed: Iterable[int],
    dtype: DTypeLike,
) -> tuple[object, ...]:
    """Returns a gradient for each operand, rounded to `dtype`; None if it needs none."""
    by_index = {i: grad.astype(dtype) for i, grad in zip(needed, grads, strict=True)}
    return tuple(map(by_index.get, range(len(operands))))
