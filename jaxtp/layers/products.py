"""Products with hand-written gradients: in 8 bits, and where their order matters.

An operand is an activation or a kernel, an array or in 8 bits, and says how it is multiplied, so
layers have no modes. Autodiff would save or multiply something else; `multiply` (`transport.py`)
leaves all other products to it.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp.layers.float8 import FLOAT8, Float8, Quantised

Operand = Array | Quantised
# An operand without its gradient
Value = Array | Float8


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def product_with_gradient(x: Operand, w: Operand, output_axes: tuple[str, ...]) -> Array:
    """Returns `x @ w`, both arrays or both in 8 bits.

    Mesh axes split the output features. The gradient of a kernel that is an array is computed no
    later than the gradient of the layer's input. Its reduction over fsdp then starts early, and
    products hide it.
    """
    return product(value_of(x), value_of(w), x.dtype)


# The residuals: x if w needs a gradient, and w if x needs one, else None
_Residuals = tuple[Value | None, Value | None]


def _forward(x: object, w: object, output_axes: tuple[str, ...]) -> tuple[Array, _Residuals]:
    y = product_with_gradient.fun(primals(x), primals(w), output_axes)
    saved_x = value_of(primals(x)) if perturbed(w) else None
    saved_w = value_of(primals(w)) if perturbed(x) else None
    return y, (saved_x, saved_w)


def _backward(
    output_axes: tuple[str, ...], residuals: _Residuals, grad: Array
) -> tuple[object, object]:
    x, w = residuals
    grad_x = None
    grad_w = None
    in_8_bits = isinstance(x, Float8) or isinstance(w, Float8)
    if isinstance(x, Array):
        # XLA would merge the products for several kernels of the same activation, and copy each
        # kernel's part of the result.
        x, grad = lax.optimization_barrier((x, grad))
    if w is not None:
        scaled_grad, transposed = input_gradient_operands(grad, w, *output_axes)
        grad_x = product(scaled_grad, transposed, grad.dtype)
    if x is not None:
        grad_w = kernel_gradient(x, grad, grad.dtype)
    if in_8_bits:
        return Quantised.gradient(grad_x), Quantised.gradient(grad_w)
    return lax.optimization_barrier((grad_x, grad_w))


product_with_gradient.defvjp(_forward, _backward, symbolic_zeros=True)


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


def primals(operands: object) -> Any:
    """Returns the values of arguments."""
    return jax.tree.map(lambda leaf: leaf.value, operands)


def perturbed(operand: object) -> bool:
    """Returns whether an argument needs a gradient."""
    leaf: Any = operand.carrier if isinstance(operand, Quantised) else operand
    return bool(leaf.perturbed)


def value_of(operand: Operand) -> Value:
    """Returns an operand without its carrier: a residual."""
    return operand.array if isinstance(operand, Quantised) else operand
