"""Ring collective matmuls over tp: one part of the sequence moves while another is multiplied.

They replace sequence parallelism's all-gather or reduce-scatter and its products (Wang et al.,
ASPLOS 2023, doi 10.1145/3567955.3567959):

    gather_matmul     all_gather(x) @ w
    matmul_scatter    reduce_scatter(x @ w)
    ring_mlp          reduce_scatter(hidden(all_gather(x) @ w) @ v)

Gradients are hand-written rings, because autodiff would save every part. Weight gradients are
summed in float32 and rounded once. Rings are unidirectional: XLA runs one collective at a time, at
the full bandwidth of a switch.
"""

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jaxtp.collectives import Float8, axis_index, axis_size, by_rows, permute
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
Sums = list[Array]  # of gradients of several kernels


def is_ring(overlap: Overlap, tp: int, *, split: bool) -> bool:
    """Returns whether a layer uses rings; `split`: activations are split along the sequence."""
    return overlap == "ring" and split and tp > 1


def _beside(moving: object, compute: Callable[..., C], *args: object) -> tuple[Any, C]:
    """Computes while `moving`, if any, goes to the next device."""
    # XLA would merge products that share an operand, which then wait for all permutes, and hide
    # only one permute.
    moving, args = lax.optimization_barrier((moving, args))
    arrived = jax.tree.map(lambda each: permute(by_rows(each), TP), moving)
    return lax.optimization_barrier((arrived, compute(*args)))


def _ring_gather(
    x: Value, visit: Callable[..., tuple[list[Array], Sums]]
) -> tuple[list[Value], list[Array], Sums]:
    """Runs `found, sums = visit(sums, part, position)` for every part of the sequence.

    The next part arrives meanwhile.

    `position` is where `part` begins. Returns the parts, `found` as whole arrays `[b, T, ...]`, and
    the last sums.
    """
    tp = axis_size(TP)
    size = x.shape[SEQUENCE_DIM]
    passed = [x]
    every = []
    sums = Sums()
    for number in range(tp):  # XLA would copy what a loop sends
        part = passed[-1]
        at = _position(number, size)
        arrived, (found, sums) = _beside(part if number < tp - 1 else None, visit, sums, part, at)
        passed.append(arrived)
        every.append(found)
    reverse = [jnp.concatenate(parts[::-1], SEQUENCE_DIM) for parts in zip(*every, strict=True)]
    return passed[:-1], [jnp.roll(y, _position(-1, size), SEQUENCE_DIM) for y in reverse], sums


def _added(sums: Sums, each: list[Array]) -> Sums:
    return [*map(operator.add, sums, each)] if sums else each


def _joined(values: Sequence[Value], dim: int) -> Sequence[Value]:
    # Factors of one product instead of several, if they are not in 8 bits.
    return values if any(isinstance(w, Float8) for w in values) else [jnp.concatenate(values, dim)]  # type: ignore[arg-type]


def _ring_scatter(
    inputs: Sequence[Value],
    kernels: Sequence[Value],
    dtype: DTypeLike,
    weigh: Callable[..., Sums] = lambda s, *_: s,
) -> tuple[Array, Sums]:
    # Returns the sum's part, and the last of `sums = weigh(sums, number, at)`. Halves of the sum's
    # features take turns: one moves while a product adds to the other.
    tp = axis_size(TP)
    size = inputs[0].shape[SEQUENCE_DIM] // axis_size(TP)
    ws = _joined(kernels, 0)
    half = kernels[0].shape[-1] // 2
    lows = jax.tree.map(lambda w: w[..., :half], ws)
    highs = jax.tree.map(lambda w: w[..., half:], ws)

    def plus(total: Array | None, xs: Sequence[Value], ws: Sequence[Value]) -> Array:
        found = (product(x, w, dtype) for x, w in zip(xs, ws, strict=True))
        return reduce(operator.add, found if total is None else (total, *found))

    def begin(
        number: int, total: Array | None, sums: Sums, at: Array
    ) -> tuple[Sequence[Value], Array, Sums]:
        xs = _joined([_part(x, at, size) for x in inputs], -1)
        return xs, plus(total, xs, lows), weigh(sums, number, at)

    low = None
    high = None
    sums = Sums()
    for number in range(1, tp + 1):
        high, (xs, total, sums) = _beside(
            high, partial(begin, number), low, sums, _position(number, size)
        )
        low, high = _beside(total if number < tp else None, plus, high, xs, highs)
    return jnp.concatenate([total, high], -1), sums  # type: ignore[list-item]


def _position(number: int, size: int) -> Array:
    """Returns the start of the part that the device `number` steps back in the ring has."""
    return jnp.asarray((axis_index(TP) - number) % axis_size(TP) * size)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_matmul(keep: bool, x: Operand, kernels: tuple[Kernel, ...]) -> tuple[Array, ...]:
    """Multiplies an activation, all-gathered along the sequence, by each kernel.

    `x` is `[b, T/tp, ..., D]`, kernels are this device's columns, `[D, F_i/tp]`; returns
    `[b, T, ..., F_i/tp]`. A kernel in float8 needs an `x` in float8. `keep`: the parts of `x` are
    residuals.
    """
    return tuple(_gather_matmul(x, kernels)[1])


def _gather_matmul(
    x: Operand, kernels: tuple[Kernel, ...]
) -> tuple[list[Value], list[Array], tuple[Value, ...]]:
    factors = _joined(ws := tuple(map(value_of, kernels)), -1)
    passed, ys, _ = _ring_gather(
        value_of(x), lambda _, part, at: ([product(part, w, x.dtype) for w in factors], [])
    )
    return passed, ys if len(ys) == len(ws) else _split(ys[0], ws), ws


def _split(joined: Array, kernels: Sequence[Value]) -> list[Array]:
    return jnp.split(joined, [*accumulate(w.shape[-1] for w in kernels)][:-1], -1)


def _gather_forward(
    keep: bool, x: object, kernels: tuple[Any, ...]
) -> tuple[tuple[Array, ...], object]:
    needs_grad = NeedsGrad((perturbed(x),), tuple(map(perturbed, kernels)))
    passed, ys, ws = _gather_matmul(unwrapped(x), unwrapped(kernels))
    return tuple(ys), (passed if keep else passed[:1], ws, needs_grad)


def _gather_backward(
    keep: bool, residuals: Any, grads: tuple[Any, ...]
) -> tuple[object, tuple[object, ...]]:
    passed, kernels, needs_grad = residuals
    size = passed[0].shape[SEQUENCE_DIM]
    used = [i for i, grad in enumerate(grads) if not isinstance(grad, SymbolicZero)]
    trained = [i for i in used if needs_grad.kernels[i]]
    grad_x = None
    sums = Sums()

    def visit(sums: Sums, part: Value, at: Array) -> tuple[list[Array], Sums]:
        joined = jnp.concatenate([_part(grads[i], at, size) for i in trained], -1)
        return [], _added(sums, [_kernel_gradient(part, joined)])

    def weigh(sums: Sums, number: int, at: Array) -> Sums:
        return visit(sums, passed[number % len(passed)], at)[1] if trained and keep else sums

    if needs_grad.inputs[0]:
        ys, ws = zip(*(input_gradient(grads[i], kernels[i], TP) for i in used), strict=True)
        grad_x, sums = _ring_scatter(ys, ws, grads[used[0]].dtype, weigh)
    elif keep:
        sums = reduce(
            lambda sums, i: weigh(sums, i, _position(i, size)), range(axis_size(TP)), sums
        )
    if trained and not keep:  # one ring after the other, or XLA would join permutes of both
        x, grad_x = lax.optimization_barrier((passed[0], grad_x))
        *_, sums = _ring_gather(x, visit)
    each = _split(sums[0], [kernels[i] for i in trained]) if trained else []
    return gradient_of(passed[0], grad_x), _cast_kernel_grads(
        each, trained, kernels, grads[used[0]].dtype
    )


@jax.custom_vjp
def matmul_scatter(inputs: tuple[Operand, ...], kernels: tuple[Kernel, ...]) -> Array:
    """Reduce-scatters the sum of `inputs[i] @ kernels[i]` over tp, along the sequence.

    Inputs are `[b, T, ..., F_i/tp]`, kernels the matching rows, `[F_i/tp, D]`; returns
    `[b, T/tp, ..., D]`.
    """
    xs, ws = (tuple(map(value_of, each)) for each in (inputs, kernels))
    return _ring_scatter(xs, ws, inputs[0].dtype)[0]


def _scatter_forward(inputs: tuple[Any, ...], kernels: tuple[Any, ...]) -> tuple[Array, object]:
    needs_grad = NeedsGrad(*(tuple(map(perturbed, args)) for args in (inputs, kernels)))
    inputs, kernels = unwrapped((inputs, kernels))
    saved = tuple(
        value_of(x) if trained else None
        for x, trained in zip(inputs, needs_grad.kernels, strict=True)
    )
    return matmul_scatter.fun(inputs, kernels), (saved, tuple(map(value_of, kernels)), needs_grad)


def _scatter_backward(residuals: Any, grad: Array) -> tuple[tuple[object, ...], tuple[object, ...]]:
    inputs, kernels, needs_grad = residuals
    moving = [i for i, needed in enumerate(needs_grad.inputs) if needed]
    trained = [i for i, needed in enumerate(needs_grad.kernels) if needed]

    def visit(sums: Sums, part: Array, at: Array) -> tuple[list[Array], Sums]:
        size = part.shape[SEQUENCE_DIM]
        found = [product(*input_gradient(part, kernels[i]), part.dtype) for i in moving]
        return found, _added(
            sums, [_kernel_gradient(_part(inputs[i], at, size), part) for i in trained]
        )

    _, ys, sums = _ring_gather(grad, visit)
    grad_inputs = dict(zip(moving, ys, strict=True))
    # Both are in 8 bits, or neither is.
    each = tuple(gradient_of(w, grad_inputs.get(i)) for i, w in enumerate(kernels))
    return each, _cast_kernel_grads(sums, trained, kernels, grad.dtype)


gather_matmul.defvjp(_gather_forward, _gather_backward, symbolic_zeros=True)
matmul_scatter.defvjp(_scatter_forward, _scatter_backward, symbolic_zeros=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_mlp(hidden: Callable[[Array], Array], x: Array, columns: Array, rows: Array) -> Array:
    """Reduce-scatters `hidden(x @ columns) @ rows` over tp, of an all-gathered `x`.

    `x` and the result are `[b, T/tp, ..., D]`; `hidden` sees each token alone.
    """
    return _accompany(lambda x: (hidden(x @ columns), None), lambda h: h @ rows, lambda *_: [], x)[
        0
    ]


def _mlp_forward(hidden: Callable[[Array], Array], *args: Any) -> tuple[Array, object]:
    return ring_mlp.fun(hidden, *unwrapped(args)), (
        unwrapped(args),
        NeedsGrad((), tuple(map(perturbed, args[1:]))),
    )


def _mlp_backward(
    hidden: Callable[[Array], Array], residuals: Any, grad: Array
) -> tuple[object, ...]:
    (x, columns, rows), needs_grad = residuals

    def work(x: Array, grad: Array) -> tuple[Array, Array]:
        h, transpose = jax.vjp(hidden, x @ columns)
        return transpose(grad @ rows.T)[0], h

    def weigh(sums: Sums, grad_y: Array, h: Array, x: Array, grad: Array) -> Sums:
        pairs = (x, grad_y), (h, grad)
        return _added(sums, [_kernel_gradient(*pairs[i]) for i in trained])

    trained = [i for i, needed in enumerate(needs_grad.kernels) if needed]
    grad_x, sums = _accompany(work, lambda grad_y: grad_y @ columns.T, weigh, x, grad)
    return grad_x, *_cast_kernel_grads(sums, trained, (columns, rows), grad.dtype)


ring_mlp.defvjp(_mlp_forward, _mlp_backward, symbolic_zeros=True)


def _accompany(
    work: Callable[..., tuple[Array, object]],
    finish: Callable[[Array], Array],
    weigh: Callable[..., Sums],
    *parts: Array,
) -> tuple[Array, Sums]:
    # Returns this device's part of the sum over tp of `finish(found)`, where
    # `found, kept = work(*parts)`, and the last of `sums = weigh(sums, found, kept, *parts)`. Parts
    # go around, and sums over tp follow them: a sum begins on the device after its part's and ends
    # at home, which computes `work` while its part leaves, and `finish` last.

    def plus(before: Array | None, found: Array) -> Array:
        return finish(found) if before is None else before + finish(found)

    def weighed(sums: Sums, found: Array, *rest: object) -> tuple[Sums, Array]:
        return weigh(sums, found, *rest), found  # `found` waits, so that `rest` is freed

    tp = axis_size(TP)
    total = None
    first, (own, kept) = _beside(parts[0], work, *parts)
    others, (sums, own) = _beside(parts[1:], weighed, Sums(), own, kept, *parts)
    for number in range(1, tp):
        parts = (first, *others)
        moves = number < tp - 1
        before, (found, kept) = _beside(total, work, *parts)
        others, (sums, found) = _beside(
            parts[1:] if moves else None, weighed, sums, found, kept, *parts
        )
        first, total = _beside(parts[0] if moves else None, plus, before, found)
    return operator.add(*_beside(total, finish, own)), sums


def _part(x: V, at: Array, size: int) -> V:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, at, size, SEQUENCE_DIM), x)


def _kernel_gradient(x: Value, grad: Array) -> Array:
    return kernel_gradient(x, grad, jnp.promote_types(grad.dtype, jnp.float32))


def _cast_kernel_grads(
    sums: Sums, at: Sequence[int], kernels: Sequence[Value], dtype: DTypeLike
) -> tuple[object, ...]:
    by_index = {i: total.astype(dtype) for i, total in zip(at, sums, strict=True)}
    return tuple(gradient_of(w, by_index.get(i)) for i, w in enumerate(kernels))
