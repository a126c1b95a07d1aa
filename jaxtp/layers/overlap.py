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
from functools import partial, reduce
from itertools import accumulate
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxtp.collectives import GATHERED, REDUCED, axis_index, axis_size, by_rows, permute
from jaxtp.layers.float8 import Float8
from jaxtp.layers.products import (
    Operand,
    Value,
    gradient_of,
    input_gradient_operands,
    kernel_gradient,
    perturbed,
    product,
    unwrapped,
    value_of,
)
from jaxtp.layers.transport import SEQUENCE_DIM, Transport
from jaxtp.mesh import TP

Overlap = Literal["none", "ring"]
V = TypeVar("V", Array, Value)
Sums = TypeVar("Sums", Array, list[Array])


@dataclass(frozen=True)
class Ring(Transport):
    """Overlaps products with communication under sequence parallelism, else as `Transport`."""

    keep: bool = False
    """As in `gather_matmul`; see `LayerContext.recomputed`."""

    def is_ring(self, tp: int, *, split: bool) -> bool:
        """See `Transport`."""
        return split and tp > 1

    def enter(
        self, x: Operand, kernels: Sequence[Operand], sequence_dim: int | None
    ) -> tuple[Array, ...]:
        """See `Transport`."""
        if not self.is_ring(axis_size(TP), split=sequence_dim is not None):
            return super().enter(x, kernels, sequence_dim)
        shard = jax.tree.map(lambda array: checkpoint_name(array, GATHERED), x)
        return gather_matmul(self.keep, shard, tuple(kernels))

    def leave(
        self, inputs: Sequence[Operand], kernels: Sequence[Operand], sequence_dim: int | None
    ) -> Array:
        """See `Transport`."""
        if not self.is_ring(axis_size(TP), split=sequence_dim is not None):
            return super().leave(inputs, kernels, sequence_dim)
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
def gather_matmul(keep: bool, x: Operand, kernels: tuple[Operand, ...]) -> tuple[Array, ...]:
    """Multiplies an activation, all-gathered along the sequence, by each kernel.

    `x` is `[b, T/tp, ..., D]`, kernels are this device's columns, `[D, F_i/tp]`; returns
    `[b, T, ..., F_i/tp]`. A kernel in float8 needs an `x` in float8. `keep`: the parts of `x` are
    residuals.
    """
    _, products = _gather_matmul(x, tuple(map(value_of, kernels)))
    return tuple(products)


def _gather_matmul(x: Operand, kernels: Sequence[Value]) -> tuple[list[Value], list[Array]]:
    """Returns the parts of `x` by turn, and the whole products."""
    factors = _as_one_factor(kernels, -1)
    part = value_of(x)
    parts = []
    products_by_turn = []
    for turn in range(axis_size(TP)):
        parts.append(part)
        arriving, _, part, _ = _begin_gather_turn(turn, part)
        products = [product(part, w, x.dtype) for w in factors]
        part, products = _barrier(arriving, products)
        products_by_turn.append(products)
    ys = _in_order(products_by_turn)
    if len(ys) < len(kernels):
        ys = _split(ys[0], kernels)
    return parts, ys


def _gather_forward(
    keep: bool, x: object, kernels: tuple[Any, ...]
) -> tuple[tuple[Array, ...], object]:
    needs_grad = (_perturbed([x]), _perturbed(kernels))
    values = tuple(map(value_of, unwrapped(kernels)))
    parts, ys = _gather_matmul(unwrapped(x), values)
    saved_parts = parts if keep else parts[:1]
    return tuple(ys), (saved_parts, values, needs_grad)


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
        operands = [input_gradient_operands(grads[i], kernels[i], TP) for i in used]
        ys, ws = zip(*operands, strict=True)
        grad_x, grad_w = _scatter_ring(ys, ws, dtype, kept_parts, trained_grads)
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
    return gradient_of(parts[0], grad_x), _as_operands(kernel_grads, trained, kernels, dtype)


def _kernel_gradient_ring(x: Value, grads: Sequence[Array]) -> Array | None:
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
def matmul_scatter(inputs: tuple[Operand, ...], kernels: tuple[Operand, ...]) -> Array:
    """Reduce-scatters the sum of `inputs[i] @ kernels[i]` over tp, along the sequence.

    Inputs are `[b, T, ..., F_i/tp]`, kernels the matching rows, `[F_i/tp, D]`; returns
    `[b, T/tp, ..., D]`.
    """
    xs = tuple(map(value_of, inputs))
    ws = tuple(map(value_of, kernels))
    y, _ = _scatter_ring(xs, ws, inputs[0].dtype)
    return y


def _scatter_ring(
    inputs: Sequence[Value],
    kernels: Sequence[Value],
    dtype: DTypeLike,
    kept_parts: Sequence[Value] = (),
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
    factors = _as_one_factor(kernels, 0)
    low_factors = jax.tree.map(lambda w: w[..., :half], factors)
    high_factors = jax.tree.map(lambda w: w[..., half:], factors)
    low_sum = None
    high_sum = None
    grad_w = None
    for turn in range(1, tp + 1):
        start = _part_start(turn, size)
        arriving, low_sum, grad_w, start = _begin_send(high_sum, low_sum, grad_w, start)
        parts = [_part(x, start, size) for x in inputs]
        part = _as_one_factor(parts, -1)
        low_sum = _plus_products(low_sum, part, low_factors, dtype)
        if kept_parts:
            # In turn t this ring has the part that a gathering ring has in turn t mod tp.
            grad_w = _plus_kernel_gradient(grad_w, kept_parts[turn % tp], grads, start)
        high_sum, part, low_sum, grad_w = _barrier(arriving, part, low_sum, grad_w)

        sending = low_sum if turn < tp else None
        arriving, high_sum, part, ws = _begin_send(sending, high_sum, part, high_factors)
        high_sum = _plus_products(high_sum, part, ws, dtype)
        arrived, high_sum = _barrier(arriving, high_sum)
        low_sum = arrived if turn < tp else low_sum
    return jnp.concatenate([low_sum, high_sum], -1), grad_w  # type: ignore[list-item]


def _scatter_forward(inputs: tuple[Any, ...], kernels: tuple[Any, ...]) -> tuple[Array, object]:
    needed = _perturbed(inputs)
    trained = _perturbed(kernels)
    inputs = unwrapped(inputs)
    kernels = unwrapped(kernels)
    saved_inputs = {i: value_of(inputs[i]) for i in trained}
    saved_kernels = tuple(map(value_of, kernels))
    return matmul_scatter.fun(inputs, kernels), (saved_inputs, saved_kernels, needed)


def _scatter_backward(residuals: Any, grad: Array) -> tuple[tuple[object, ...], tuple[object, ...]]:
    # An input is saved if its kernel needs a gradient.
    saved_inputs, kernels, needed = residuals
    size = grad.shape[SEQUENCE_DIM]
    sums: Any = None
    products_by_turn = []
    part = grad
    for turn in range(axis_size(TP)):
        arriving, sums, part, start = _begin_gather_turn(turn, part, sums)
        products = [product(*input_gradient_operands(part, kernels[i]), part.dtype) for i in needed]
        kernel_grads = [
            _kernel_gradient(_part(x, start, size), part) for x in saved_inputs.values()
        ]
        sums = _plus(sums, kernel_grads)
        part, products, sums = _barrier(arriving, products, sums)
        products_by_turn.append(products)
    input_grads = _in_order(products_by_turn)
    # An input is in 8 bits if its kernel is.
    return (
        _as_operands(input_grads, needed, kernels, grad.dtype),
        _as_operands(sums, saved_inputs, kernels, grad.dtype),
    )


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


def _barrier(*values: object) -> Any:
    """Separates the turns of a ring: XLA moves no operation from one turn to another.

    XLA would merge products of several turns that share an operand. The merged product waits for
    all permutes, and hides only one.
    """
    return lax.optimization_barrier(values)


def _begin_send(sending: object, *operands: object) -> Any:
    """Sends an array to the next device; returns what arrives, and operands to multiply now."""
    sending, *operands_now = _barrier(sending, *operands)
    arriving = jax.tree.map(lambda array: permute(by_rows(array), TP), sending)
    return arriving, *operands_now


def _begin_gather_turn(turn: int, part: Value, sums: object = None) -> Any:
    """Returns what arrives, `sums`, the part to multiply now, and where it begins."""
    start = _part_start(turn, part.shape[SEQUENCE_DIM])
    is_last = turn == axis_size(TP) - 1
    return _begin_send(None if is_last else part, sums, part, start)


def _part_start(turn: int, size: int) -> Array:
    """Returns where the part begins that this device has in a turn; parts have `size` tokens."""
    index = (axis_index(TP) - turn) % axis_size(TP)
    return jnp.asarray(index * size)


def _part(x: V, start: Array, size: int) -> V:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, SEQUENCE_DIM), x)


def _in_order(results_by_turn: Sequence[Sequence[Array]]) -> list[Array]:
    """Returns whole arrays `[b, T, ...]` of the results that a ring computed in each turn."""
    # In reverse, the turns of device d are the parts d + 1, d + 2, ..., d.
    whole = []
    for parts in zip(*results_by_turn, strict=True):
        size = parts[0].shape[SEQUENCE_DIM]
        y = jnp.concatenate(parts[::-1], SEQUENCE_DIM)
        # In reverse the first part is d + 1, which `_part_start` gives for turn -1.
        whole.append(jnp.roll(y, _part_start(-1, size), SEQUENCE_DIM))
    return whole


def _as_one_factor(values: Sequence[Value], dim: int) -> Sequence[Value]:
    """Concatenates factors, for one product instead of several, unless they are in 8 bits."""
    if any(isinstance(value, Float8) for value in values):
        return values
    return [jnp.concatenate(values, dim)]  # type: ignore[arg-type]


def _split(joined: Array, kernels: Sequence[Value]) -> list[Array]:
    *ends, _ = accumulate(w.shape[-1] for w in kernels)
    return jnp.split(joined, ends, -1)


def _perturbed(operands: Sequence[object]) -> dict[int, None]:
    """Returns the indices of operands that need a gradient.

    They are keys, because the residuals of a `custom_vjp` are a tree of arrays.
    """
    return {i: None for i, operand in enumerate(operands) if perturbed(operand)}


def _plus(total: Sums | None, summand: Sums) -> Sums:
    """Adds two arrays, or each array of two lists."""
    return summand if total is None else jax.tree.map(operator.add, total, summand)


def _plus_products(
    total: Array | None,
    inputs: Sequence[Value],
    kernels: Sequence[Value],
    dtype: DTypeLike,
) -> Array:
    products = [product(x, w, dtype) for x, w in zip(inputs, kernels, strict=True)]
    summands = products if total is None else [total, *products]
    return reduce(operator.add, summands)


def _plus_kernel_gradient(
    total: Array | None,
    part: Value,
    grads: Sequence[Array],
    start: Array,
) -> Array:
    """Adds the gradient of concatenated kernels, from the part of the sequence at `start`."""
    size = part.shape[SEQUENCE_DIM]
    joined = jnp.concatenate([_part(grad, start, size) for grad in grads], -1)
    return _plus(total, _kernel_gradient(part, joined))


def _kernel_gradient(x: Value, grad: Array) -> Array:
    wide = jnp.promote_types(grad.dtype, jnp.float32)
    return kernel_gradient(x, grad, wide)


def _as_operands(
    grads: Sequence[Array],
    needed: Iterable[int],
    operands: Sequence[Value],
    dtype: DTypeLike,
) -> tuple[object, ...]:
    """Returns a gradient for each operand, rounded to `dtype`; None if it needs none."""
    by_index = {i: grad.astype(dtype) for i, grad in zip(needed, grads, strict=True)}
    return tuple(gradient_of(w, by_index.get(i)) for i, w in enumerate(operands))
