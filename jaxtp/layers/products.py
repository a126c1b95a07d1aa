"""Products of a layer's operands: an activation and a kernel, each an array or in 8 bits.

An operand says how it is multiplied, so layers have no modes. `as_operand` and `load_kernel` make
the operands of a layer, and `multiply` multiplies them, with hand-written gradients where autodiff
would save or multiply something else.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp import compiler_hints
from jaxtp.collectives import WeightDtypes, WeightLayout, axis_size, vary_like
from jaxtp.layers.float8 import (
    FLOAT8,
    Float8,
    Quantised,
    load_float8,
    tokens_in_float8,
)
from jaxtp.layers.parameter import Matmul, Precision
from jaxtp.mesh import STORAGE, TP

Operand = Array | Quantised
# An operand without its gradient
Value = Array | Float8


@jax.tree_util.register_static
@dataclass(frozen=True)
class NeedsGrad:
    """Which arguments of a product need a gradient."""

    inputs: tuple[bool, ...]
    kernels: tuple[bool, ...]

    @classmethod
    def of(cls, inputs: Iterable[object], kernels: Iterable[object]) -> "NeedsGrad":
        """Reads the arguments of the forward pass of a `custom_vjp`."""
        return cls(tuple(map(perturbed, inputs)), tuple(map(perturbed, kernels)))


def as_operand(x: Array, matmul: Matmul, *feature_axes: str) -> Operand:
    """Returns an activation as an operand of a layer.

    Mesh axes split its features: in float8 their devices share the scales.
    """
    return tokens_in_float8(x, *feature_axes) if matmul == "float8" else x


def load_kernel(
    precision: Precision,
    matmul: Matmul,
    shard: Array | Float8,
    storage_dim: int,
    input_axes: tuple[str, ...],
    **layout: Any,
) -> Operand:
    """Loads a kernel as an operand of a layer; mesh axes split its input features."""
    if matmul == "float8":
        dtypes = WeightDtypes(precision.compute, precision.reduce, precision.compute)
        weight_layout = WeightLayout(storage_dim=storage_dim, **layout)
        return load_float8(shard, dtypes, weight_layout, input_axes)
    return precision.load(shard, storage_dim, **layout)


def multiply(x: Operand, w: Operand, *output_axes: str) -> Array:
    """Returns `x @ w`, in the dtype of the kernel.

    Mesh axes split the output features: in float8 their devices share the scales of the gradient.
    """
    if isinstance(x, Quantised) and isinstance(w, Quantised):
        return _multiply(x, w, output_axes)
    x = x.astype(w.dtype)
    # Dequantises a kernel in 8 bits, whose dtype is the compute dtype.
    w = w.astype(w.dtype)
    # The gradients have an order only where a reduction over the storage can start early, and not
    # with tp, where XLA chooses it: see `kernel_gradient_first`.
    if axis_size(TP) > 1 or axis_size(*STORAGE) == 1:
        return compiler_hints.matmul(x, w)
    return _multiply(vary_like(x, w), vary_like(w, x), output_axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _multiply(x: Operand, w: Operand, output_axes: tuple[str, ...]) -> Array:
    return product(value_of(x), value_of(w), x.dtype)


# The residuals: x if w needs a gradient, and w if x needs one, else None
_Residuals = tuple[Value | None, Value | None]


def _multiply_forward(
    x: object, w: object, output_axes: tuple[str, ...]
) -> tuple[Array, _Residuals]:
    y = _multiply.fun(unwrapped(x), unwrapped(w), output_axes)
    saved_x = value_of(unwrapped(x)) if perturbed(w) else None
    saved_w = value_of(unwrapped(w)) if perturbed(x) else None
    return y, (saved_x, saved_w)


def _multiply_backward(
    output_axes: tuple[str, ...], residuals: _Residuals, grad: Array
) -> tuple[object, object]:
    x, w = residuals
    grad_x = None
    grad_w = None
    in_8_bits = isinstance(x, Float8) or isinstance(w, Float8)
    if isinstance(x, Array):
        x, grad = compiler_hints.product_apart(x, grad)
    if w is not None:
        scaled_grad, transposed = input_gradient_operands(grad, w, *output_axes)
        grad_x = product(scaled_grad, transposed, grad.dtype)
    if x is not None:
        grad_w = kernel_gradient(x, grad, grad.dtype)
    if in_8_bits:
        return Quantised.gradient(grad_x), Quantised.gradient(grad_w)
    return compiler_hints.kernel_gradient_first(grad_x, grad_w)


_multiply.defvjp(_multiply_forward, _multiply_backward, symbolic_zeros=True)


def product(x: Value, w: Value, dtype: DTypeLike) -> Array:
    """Returns `x @ w` in the compute dtype.

    A `w` in float8 needs an `x` in float8, and is multiplied in it.
    """
    if not isinstance(w, Float8):
        return x.astype(dtype) @ w
    assert isinstance(x, Float8)
    # Without HIGHEST, cuBLAS sums float8 in fewer bits than float32 has. The sum is not written in
    # float32: no kernel applies scales that the same program computes, so it would be read once
    # more. Sums of float8 can exceed float16.
    result = jnp.float32 if dtype == jnp.float16 else dtype
    with jax.named_scope(FLOAT8):
        y: Array = lax.dot_general(
            x.numbers,
            w.numbers,
            (((len(x.shape) - 1,), (0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=result,
        )
    scaled = y.astype(jnp.float32) * x.scale * w.scale[0]
    return scaled.astype(dtype)


def input_gradient_operands(grad: Array, w: Value, *output_axes: str) -> tuple[Value, Value]:
    """Returns the operands of the gradient of `x` in `x @ w`.

    Mesh axes split the output features.
    """
    if not isinstance(w, Float8):
        return grad, w.T
    scaled_grad = grad.astype(jnp.float32) * w.scale[0]
    quantised = Float8.of(scaled_grad, dim=-1, axes=output_axes)
    return quantised, Float8(w.bits.T, jnp.ones((1, w.shape[0])))


def kernel_gradient(x: Value, grad: Array, dtype: DTypeLike) -> Array:
    """Returns the gradient of `w` in `x @ w`, multiplied in the dtype of `grad`."""
    tokens = list(range(grad.ndim - 1))
    x = x.astype(grad.dtype)
    return jnp.tensordot(x, grad, (tokens, tokens), preferred_element_type=dtype)


def unwrapped(operands: object) -> Any:
    """Returns the values of arguments."""
    return jax.tree.map(lambda leaf: leaf.value, operands)


def perturbed(operand: object) -> bool:
    """Returns whether an argument needs a gradient."""
    leaf: Any = operand.carrier if isinstance(operand, Quantised) else operand
    return bool(leaf.perturbed)


def value_of(operand: Operand) -> Value:
    """Returns an operand without its carrier: a residual, or what a ring sends."""
    return operand.array if isinstance(operand, Quantised) else operand


def gradient_of(value: Value, grad: Array | None) -> object:
    """Returns a gradient in the structure of its operand."""
    return Quantised.gradient(grad) if isinstance(value, Float8) else grad
