"""Steers XLA: each function orders or lays out a computation in another way, with equal results.

Without these functions compiled programs copy more, hold more memory or wait longer. Where a
docstring names no other measurement, the effect was seen in training steps that jax 0.10.2 compiled
for H100s. `scripts/step_on_h100.py` prints the copies, memory and exposed communication of such
steps, and with `--of` compares another checkout. Remove or change a function only after that.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from jaxtp.mesh import TP, current_mesh, current_platform, mesh_sizes

V = TypeVar("V")

# Columns that a tile of XLA's fused products has
_TILE = 64


def by_rows(array: Array) -> Array:
    """Forces the row-major layout of a weight's shard, of its gradient, or of what a ring sends.

    XLA gathers along the first dim, and cuBLAS on Hopper reads float8 by columns. XLA propagates
    either layout to the stack of all layers, and makes a transposed copy of it before the loop:
    41.6 GB of temporaries for Mixtral over fsdp 8.
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


def swap_sequence(x: V, sequence_dim: int | None) -> V:
    """Swaps the first dim and `sequence_dim` of arrays if tp splits the sequence.

    A second call undoes the first, so layers call it before and after their products. XLA gathers
    and scatters along the first dim: around a product of `[B, T, D]` it would swap whole
    activations. With `rows_as_heads` copies took 6 instead of 63 ms of a step of Llama 3 8B at tp
    8.
    """
    if sequence_dim is None or mesh_sizes(current_mesh())[TP] == 1:
        return x
    return jax.tree.map(lambda array: jnp.swapaxes(array, 0, sequence_dim), x)


def rows_as_heads(
    attend: Callable[..., Array], q: Array, k: Array, v: Array, segments: None
) -> Array:
    """Runs an attention kernel on the heads of all rows, as if they were heads of one row.

    With `swap_sequence` around attention's projections, activations are `[T, B, F]` in memory. A
    kernel of a GPU takes `[B, T, N, H]` row-major, so XLA would swap queries, keys, values and
    results; `[1, T, B * N, H]` is the memory as it is.
    """
    rows, length = q.shape[:2]
    one_row = (x.swapaxes(0, 1).reshape(1, length, -1, x.shape[3]) for x in (q, k, v))
    y = attend(*one_row, segments)
    return y.reshape(length, rows, -1, y.shape[3]).swapaxes(0, 1)


def computed_here(gradient: Array) -> Array:
    """Keeps the reduction of a weight's gradient in the backward pass of its layer.

    If XLA moves the reduction elsewhere, it copies the gradient. It did so for the columns of an
    MLP, after which attention's backward pass follows, and for row layers without tp.
    """
    return lax.optimization_barrier(gradient)


def in_turn(*values: object) -> Any:
    """Separates the turns of a ring: XLA moves no operation from one turn to another.

    XLA would merge products of several turns that share an operand. The merged product waits for
    all permutes, and hides only one.
    """
    return lax.optimization_barrier(values)


def product_apart(x: Array, grad: Array) -> tuple[Array, Array]:
    """Keeps the product for the gradient of a kernel apart from products for other kernels.

    XLA would merge the products for several kernels of the same activation, and copy each kernel's
    part of the result.
    """
    return lax.optimization_barrier((x, grad))


def kernel_gradient_first(
    grad_x: Array | None, grad_w: Array | None
) -> tuple[Array | None, Array | None]:
    """Computes the gradient of a kernel no later than the gradient of the layer's input.

    The reduction of the kernel's gradient over fsdp then starts early, and products hide it. Over
    tp no such order is set: there the product for the kernel hides the reduction of `grad_x`.
    """
    return lax.optimization_barrier((grad_x, grad_w))


def inputs_of_separate_products(x: Array, kernels: Sequence[object]) -> list[Array]:
    """Returns `x` for each kernel, such that XLA merges only products whose columns fill tiles.

    XLA merges products of one input into one kernel if they have few tokens, as in decoding. If the
    columns of some of them fill no tile of 64, it concatenates copies of all weights instead of
    reading each in its place. So these products get an input of their own. Qwen3.5 27B copied six
    kernels of each Gated DeltaNet layer for each token (`scripts/decode_on_h100.py`).
    """
    fills_no_tile = [isinstance(w, Array) and w.shape[-1] % _TILE > 0 for w in kernels]
    few_tokens = x.size < x.shape[-1] ** 2
    if all(fills_no_tile) or not any(fills_no_tile) or not few_tokens:
        return [x] * len(kernels)
    separate = lax.optimization_barrier(x)
    return [separate if apart else x for apart in fills_no_tile]


def matmul(x: Array, w: Array) -> Array:
    """Returns `x @ w`, whose gradients are products for which XLA has fast kernels.

    XLA for CPUs would fold a transposition into the product for the gradient of `w`, and has no
    fast kernel for that. The barrier makes it copy `w` instead, which does not pay off for few
    tokens. With no collectives along axes of one device, steps on CPUs became 4 to 13% faster.
    """
    if current_platform() != "cpu" or x.size < w.size:
        return x @ w
    return lax.dot_general(x, lax.optimization_barrier(w.T), (((x.ndim - 1,), (1,)), ((), ())))
