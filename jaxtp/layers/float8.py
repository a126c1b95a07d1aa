"""Products in float8: E4M3 operands with one scale for each token and each output feature, sums in float32.

    y  = (x_8 @ w_8) * s_x * s_w         x ~ x_8 * s_x by token, w ~ w_8 * s_w by output feature
    dx = (q_8 @ w_8.T) * s_q             q_8 * s_q ~ dy * s_w by token: the same w_8, which has no second copy
    dw = (x_8 * s_x).T @ dy              in the compute dtype

A scale is the largest absolute value over 448, of a whole token or of all inputs of an output feature: a maximum over
the mesh axes that split them. So operands do not depend on the mesh, and there is no state.

`Float8` bounds the error e of an operand: 2^-4 of an element, or 2^-10 of its scale. A product is then within

    |x| @ e_w + e_x @ |w| + e_x @ e_w     of x @ w, element by element; errors of random sign add up to about 4% of |y|.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp.collectives import Float8

Operand = Array | Float8
FLOAT8 = "float8"  # scope of the products, by which a compiled program's reader knows them


@jax.tree_util.register_static
@dataclass(frozen=True)
class NeedsGrad:
    """Which arguments of a product need a gradient."""

    inputs: tuple[bool, ...]
    kernels: tuple[bool, ...]


def tokens_in_float8(x: Array, *axes: str) -> Float8:
    """Quantises each token `[..., D]`, whose features the mesh axes `axes` split; the gradient passes unchanged."""

    def quantise(x: Array) -> Float8:
        return Float8.of(x, dim=-1, axes=axes)._replace(carrier=jnp.zeros_like(x))

    straight = jax.custom_vjp(quantise)
    straight.defvjp(lambda x: (quantise(x), None), lambda _, grad: (grad.carrier,))
    return straight(x)


def product(x: Operand, w: Operand, dtype: DTypeLike) -> Array:
    """Returns `x @ w` in the compute dtype, without a gradient if both are in float8; see `multiply`."""
    if not isinstance(w, Float8):
        return x.astype(dtype) @ w
    # GPUs accumulate in float32 whatever the result's dtype. A float32 result would be written and read once more: the
    # scales are computed in the same program, so no kernel applies them itself.
    with jax.named_scope(FLOAT8):
        dims = (((x.bits.ndim - 1,), (0,)), ((), ()))
        y: Array = lax.dot_general(x.numbers, w.numbers, dims, preferred_element_type=dtype)
    return (y.astype(jnp.float32) * x.scale * w.scale[0]).astype(dtype)


def input_gradient(grad: Array, w: Operand, *axes: str) -> tuple[Operand, Operand]:
    """Returns the operands of the gradient of `x` in `x @ w`; the mesh axes `axes` split the output features."""
    if not isinstance(w, Float8):
        return grad, w.T
    return Float8.of(grad.astype(jnp.float32) * w.scale[0], dim=-1, axes=axes), Float8(w.bits.T, jnp.ones((1, 1)))


def kernel_gradient(x: Operand, grad: Array, dtype: DTypeLike) -> Array:
    """Returns the gradient of `w` in `x @ w`."""
    tokens = list(range(grad.ndim - 1))
    return jnp.tensordot(x.astype(grad.dtype), grad, (tokens, tokens), preferred_element_type=dtype)


def multiply(x: Operand, w: Operand, *axes: str) -> Array:
    """Returns `x @ w`; the mesh axes `axes` split the output features."""
    if not isinstance(w, Float8):
        return product(x, w, w.dtype)

    def forward(x: Float8, w: Float8) -> tuple[Array, tuple[Float8 | None, Float8 | None]]:
        trained, moving = perturbed(w), perturbed(x)
        x, w = (without_carrier(unwrapped(operand)) for operand in (x, w))
        return product(x, w, dtype), (x if trained else None, w if moving else None)

    def backward(residuals: tuple[Float8 | None, Float8 | None], grad: Array) -> tuple[Any, Any]:
        x, w = residuals
        grad_x = None if w is None else gradient_of(w, product(*input_gradient(grad, w, *axes), grad.dtype))
        return grad_x, None if x is None else gradient_of(x, kernel_gradient(x, grad, grad.dtype))

    dtype = x.carrier.dtype
    multiplied = jax.custom_vjp(partial(product, dtype=dtype))
    multiplied.defvjp(forward, backward, symbolic_zeros=True)
    return multiplied(x, w)


def unwrapped(operand: Any) -> Any:
    """Returns the values of an argument of a `custom_vjp` with symbolic zeros."""
    return jax.tree.map(lambda leaf: leaf.value, operand)


def perturbed(operand: Any) -> bool:
    """Returns whether such an argument needs a gradient."""
    return bool((operand.carrier if isinstance(operand, Float8) else operand).perturbed)


def without_carrier(operand: Operand) -> Operand:
    """Returns an operand as a residual or as what a ring sends."""
    return operand._replace(carrier=None) if isinstance(operand, Float8) else operand


def gradient_of(operand: Operand, grad: Array | None) -> Float8 | Array | None:
    """Returns a gradient in the structure of its operand."""
    return Float8(None, None, grad) if isinstance(operand, Float8) and grad is not None else grad  # type: ignore[arg-type]
