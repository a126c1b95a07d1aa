"""Products in MXFP8, which NVIDIA's Blackwell computes.

Elements are E4M3, and each block of 32 has an E8M0 scale.

    y  = x @ w        blocks of x and w along K
    dx = dy @ w.T     blocks of dy and w along N: w is quantised again, so no second copy lives
                      until the backward pass
    dw = x.T @ dy     in the compute dtype, summed in float32

E4M3 also for gradients: E5M2 trains worse with blocks (arXiv 2506.08027). Blocks do not depend on
the mesh while each device has whole ones.

A scale s is the smallest power of two with `max |block| <= 448 s`, the largest number of E4M3, so
nothing overflows and `s < max |block| / 224`. E4M3 has 3 bits of mantissa and 2^-6 as smallest
normal number: an element a has an error of at most

    e(a) = max(2^-4 |a|, 2^-10 s)

and a product is within `|x| @ e(w) + e(x) @ |w| + e(x) @ e(w)` of `x @ w`, element by element,
before it is rounded to the compute dtype. As `2^-10 s sqrt(32)` is less than `2^-15 |block|`, where
|v| is the norm of a vector, the error of y is less than `0.13 |x| |w|` for a row of x and a column
of w; errors of random sign add up to about 4% of |y|.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import CustomVJPPrimal

from jaxtp.collectives import vary_like
from jaxtp.config.schema import ConfigError
from jaxtp.layers.float8 import kernel_gradient
from jaxtp.layers.kernels.select import architecture_of, installed_cudnn, matmul_problem
from jaxtp.mesh import current_device, current_platform

BLOCK = 32
# The first cuDNN with these products; with older ones XLA multiplies in bfloat16 without a word
# (jax 0.10.2, compiled for a B200)
_FIRST_CUDNN = (9, 10)


def mx_problem(k: int, n: int, architecture: str = "cpu") -> str | None:
    """Returns why a device cannot multiply with a kernel `[K, N]` in MXFP8, or None."""
    for kind, size in (("input", k), ("output", n)):
        if size % BLOCK or not size:
            below = size // BLOCK * BLOCK
            nearest = f"{below} or {below + BLOCK}" if below else BLOCK
            return (
                f"{size} {kind} features on a device are not divisible by blocks of {BLOCK}; "
                f"nearest: {nearest}"
            )
    if problem := matmul_problem("mxfp8", architecture):
        return problem
    if not architecture.startswith("cuda"):
        return None
    if (installed_cudnn() or _FIRST_CUDNN) < _FIRST_CUDNN:
        return "it needs cuDNN 9.10 or newer: pip install --upgrade nvidia-cudnn-cu13"
    return None


def mx_matmul(x: Array, w: Array) -> Array:
    """Returns `x @ w`, `[..., K] @ [K, N]`, in MXFP8; a CPU multiplies the same numbers in float32.

    Raises:
      ConfigError: this device does not support it (`mx_problem`).
    """
    k, n = w.shape
    if problem := mx_problem(k, n, architecture_of(current_device())):
        raise ConfigError(f'matmul="mxfp8": {problem}')
    return _matmul(vary_like(x, w), vary_like(w, x))


@jax.custom_vjp
def _matmul(x: Array, w: Array) -> Array:
    return _product(x, w.T)


# The residuals: x if w needs a gradient, and w if x needs one, else None
_Pair = tuple[Array | None, Array | None]


def _forward(x: CustomVJPPrimal, w: CustomVJPPrimal) -> tuple[Array, _Pair]:
    saved_x = x.value if w.perturbed else None
    saved_w = w.value if x.perturbed else None
    return _matmul.fun(x.value, w.value), (saved_x, saved_w)


def _backward(residuals: _Pair, grad: Array) -> _Pair:
    x, w = residuals
    grad_x = None if w is None else _product(grad, w)
    grad_w = None if x is None else kernel_gradient(x, grad, grad.dtype)
    return grad_x, grad_w


_matmul.defvjp(_forward, _backward, symbolic_zeros=True)


def _product(a: Array, b: Array) -> Array:
    """Returns `a @ b.T` with blocks along the last dims, `[..., K]` and `[N, K]`, rounded once."""
    a_8, a_scale = _quantise(a.reshape(1, -1, a.shape[-1]))
    b_8, b_scale = _quantise(b[None])
    # JAX 0.10 has no such product for CPUs.
    multiply = jax.nn.scaled_matmul if current_platform() == "cuda" else _multiply
    # The function scaled_matmul forgets where its result varies.
    y = vary_like(multiply(a_8, b_8, a_scale, b_scale, a.dtype), a, b)
    return y.reshape(*a.shape[:-1], -1)


def _quantise(x: Array) -> tuple[Array, Array]:
    """Returns the elements `[..., K]` and the scales `[..., K / 32]`."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    max_sizes = jnp.max(jnp.abs(blocks), axis=-1)
    max_bits = lax.bitcast_convert_type(max_sizes, jnp.uint32)
    # From the bits of max / 448 = max / (1.75 * 2^8): up unless the mantissa is at most 1.75. At
    # least 2^-126: CPUs and GPUs may take smaller numbers for zero.
    exponent = jnp.maximum(max_bits + (2**21 - 1) >> 23, 9) - 8
    inverse = lax.bitcast_convert_type(254 - exponent << 23, jnp.float32)
    elements = (blocks * inverse[..., None]).astype(jnp.float8_e4m3fn)
    elements = elements.reshape(x.shape)
    scales = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return elements, scales


def _multiply(
    a: Array,
    b: Array,
    a_scale: Array,
    b_scale: Array,
    dtype: jnp.dtype,
) -> Array:
    y = jnp.einsum("zmk,znk->zmn", _scaled(a, a_scale), _scaled(b, b_scale))
    return y.astype(dtype)


def _scaled(elements: Array, scales: Array) -> Array:
    blocks = elements.astype(jnp.float32).reshape(*scales.shape, -1)
    return (blocks * scales.astype(jnp.float32)[..., None]).reshape(elements.shape)
