"""Products in float8: E4M3 operands with scales, sums in float32.

There is one scale for each token and each output feature.

    y  = (x_8 @ w_8) * s_x * s_w         x ~ x_8 * s_x by token, w ~ w_8 * s_w by output feature
    dx = (q_8 @ w_8.T) * s_q             q_8 * s_q ~ dy * s_w by token: the same w_8, which has
                                         no second copy
    dw = (x_8 * s_x).T @ dy              in the compute dtype

A scale is the largest absolute value over 448, of a whole token or of all inputs of an output
feature: a maximum over the mesh axes that split them. So operands do not depend on the mesh, and
there is no state.

`Float8` bounds the error e of an operand: 2^-4 of an element, or 2^-10 of its scale. A product is
then within

    |x| @ e_w + e_x @ |w| + e_x @ e_w

of x @ w, element by element; errors of random sign add up to about 4% of |y|.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp.collectives import Float8, Quantised, axis_size, vary_like
from jaxtp.config.schema import ConfigError
from jaxtp.layers.kernels.select import architecture_of, matmul_problem
from jaxtp.layers.mxfp8 import kernel_gradient, mx_matmul
from jaxtp.mesh import STORAGE, TP, current_device, current_platform


class BlockScaled(NamedTuple):
    """A kernel `[in, out]` that is multiplied in MXFP8."""

    kernel: Array


Operand = Array | Quantised
Kernel = Operand | BlockScaled
Value = Array | Float8  # of an operand, without a gradient
FLOAT8 = "float8"  # scope of the products, by which a compiled program's reader knows them


@jax.tree_util.register_static
@dataclass(frozen=True)
class NeedsGrad:
    """Which arguments of a product need a gradient."""

    inputs: tuple[bool, ...]
    kernels: tuple[bool, ...]


def tokens_in_float8(x: Array, *axes: str) -> Quantised:
    """Quantises each token `[..., D]`; the gradient passes unchanged.

    The mesh axes `axes` split the features.

    Raises:
      ConfigError: this device has no products in float8; XLA would convert the operands in silence.
    """
    if problem := matmul_problem(FLOAT8, architecture_of(current_device())):
        raise ConfigError(problem)

    def quantise(x: Array) -> Quantised:
        return Quantised(Float8.of(x, dim=-1, axes=axes), jnp.zeros_like(x))

    straight = jax.custom_vjp(quantise)
    straight.defvjp(lambda x: (quantise(x), None), lambda _, grad: (grad.carrier,))
    return straight(x)


def multiply(x: Operand, w: Kernel, *axes: str) -> Array:
    """Returns `x @ w`, in the dtype of the kernel.

    The mesh axes `axes` split the output features.
    """
    if isinstance(w, BlockScaled):
        return mx_matmul(x.astype(w.kernel.dtype), w.kernel)
    low = isinstance(x, Quantised) and isinstance(w, Quantised)
    if not low:
        x = x.astype(w.dtype)
        w = w.astype(w.dtype)
        # Over tp, the product for `w` hides the other's reduction.
        if axis_size(TP) > 1 or axis_size(*STORAGE) == 1:
            return _matmul(x, w)
        plain_x = x
        x = vary_like(x, w)
        w = vary_like(w, plain_x)

    def forward(x: object, w: object) -> tuple[Array, tuple[Value | None, Value | None]]:
        # What a gradient needs is its only residual: x for the gradient of w, w for the gradient of
        # x.
        tokens = value_of(unwrapped(x))
        kernel = value_of(unwrapped(w))
        return product(tokens, kernel, dtype), (
            tokens if perturbed(w) else None,
            kernel if perturbed(x) else None,
        )

    def backward(residuals: tuple[Value | None, Value | None], grad: Array) -> tuple[Any, Any]:
        x, w = residuals
        # XLA would join the products for several kernels, and copy their parts.
        if x is not None and not low:
            x, grad = lax.optimization_barrier((x, grad))
        grad_x = None if w is None else product(*input_gradient(grad, w, *axes), grad.dtype)
        grad_w = None if x is None else kernel_gradient(x, grad, grad.dtype)
        if not low:
            # The sum of `w`'s gradient over devices starts early.
            return lax.optimization_barrier((grad_x, grad_w))
        return Quantised.gradient(grad_x), Quantised.gradient(grad_w)

    dtype = x.dtype
    multiplied = jax.custom_vjp(lambda x, w: product(value_of(x), value_of(w), dtype))
    multiplied.defvjp(forward, backward, symbolic_zeros=True)
    return multiplied(x, w)


def _matmul(x: Array, w: Array) -> Array:
    if current_platform() != "cpu" or x.size < w.size:
        return x @ w
    # XLA for CPUs would fold a transposition into the product for `w`'s gradient, and has no fast
    # kernel for that. The barrier makes it copy `w`, which a product of few tokens is not worth.
    return lax.dot_general(x, lax.optimization_barrier(w.T), (((x.ndim - 1,), (1,)), ((), ())))


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
        dims = (((len(x.shape) - 1,), (0,)), ((), ()))
        y: Array = lax.dot_general(
            x.numbers,
            w.numbers,
            dims,
            precision=lax.Precision.HIGHEST,
            preferred_element_type=result,
        )
    return (y.astype(jnp.float32) * x.scale * w.scale[0]).astype(dtype)


def input_gradient(grad: Array, w: Value, *axes: str) -> tuple[Value, Value]:
    """Returns the operands of the gradient of `x` in `x @ w`.

    The mesh axes `axes` split the output features.
    """
    if not isinstance(w, Float8):
        return grad, w.T
    scaled = Float8.of(grad.astype(jnp.float32) * w.scale[0], dim=-1, axes=axes)
    return scaled, Float8(w.bits.T, jnp.ones((1, w.shape[0])))


def unwrapped(operands: object) -> Any:
    """Returns the values of arguments."""
    return jax.tree.map(lambda leaf: leaf.value, operands)


def perturbed(operand: object) -> bool:
    """Returns whether an argument needs a gradient."""
    leaf: Any = operand.carrier if isinstance(operand, Quantised) else operand
    return bool(leaf.perturbed)


def value_of(operand: Kernel) -> Value:
    """Returns an operand without its carrier: a residual, or what a ring sends."""
    if isinstance(operand, BlockScaled):
        raise NotImplementedError("MXFP8 has no rings")
    return operand.array if isinstance(operand, Quantised) else operand


def gradient_of(value: Value, grad: Array | None) -> Any:
    """Returns a gradient in the structure of its operand."""
    return Quantised.gradient(grad) if isinstance(value, Float8) else grad
