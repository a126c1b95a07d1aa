"""Float8: E4M3 numbers with one scale for each token and each output feature.

How arrays get into 8 bits, and the collectives that move them. `products.py` multiplies them:

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

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp.collectives import (
    WeightDtypes,
    WeightLayout,
    all_reduce_max,
    enter_parallel,
    leave_parallel,
    vary,
    vary_like,
    with_gradient,
)
from jaxtp.config.schema import ConfigError
from jaxtp.layers.kernels.select import architecture_of, matmul_problem
from jaxtp.mesh import current_device

# Scopes of the products and of the scales, by which a compiled program's reader knows them
FLOAT8 = "float8"
SCALES = "float8_scales"
_MAX_NUMBER = float(jnp.finfo(jnp.float8_e4m3fn).max)


class Float8(NamedTuple):
    """An array in 8 bits: float8 numbers (E4M3) times a scale for each output feature or token.

    The product is within 2^-4 of the array, relatively, or within 2^-10 of the scale if that is
    more: E4M3 has 3 bits of mantissa, and 2^-6 is its smallest normal number. The fields may also
    be specs.
    """

    # The float8 numbers, as uint8: XLA for CPUs would slice and gather float8 in float16
    bits: Array
    # The largest absolute value over 448: `[..., 1, out]` for a kernel, `[..., 1]` for tokens
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return tuple(self.bits.shape)

    @classmethod
    def of(
        cls,
        array: Array | np.ndarray,
        *,
        dim: int = -2,
        axes: tuple[str, ...] = (),
    ) -> "Float8":
        """Quantises an array with one scale along `dim`; zeros stay zero.

        The mesh axes `axes` split `dim`.
        """
        with jax.named_scope(SCALES):
            local_max = jnp.max(jnp.abs(array), axis=dim, keepdims=True)
        max_size = all_reduce_max(local_max.astype(jnp.float32), *axes)
        scale = jnp.maximum(max_size / _MAX_NUMBER, jnp.finfo(jnp.float32).tiny)
        numbers = array.astype(jnp.float32) / scale
        numbers = numbers.astype(jnp.float8_e4m3fn)
        return cls(lax.bitcast_convert_type(numbers, jnp.uint8), scale)

    @property
    def numbers(self) -> Array:
        """The float8 numbers."""
        return lax.bitcast_convert_type(self.bits, jnp.float8_e4m3fn)

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the array, rounded once to `dtype`."""
        scaled = self.numbers.astype(jnp.float32) * lax.stop_gradient(self.scale)
        return scaled.astype(dtype)

    def whole(self, layout: WeightLayout) -> "Float8":
        """Gathers a kernel's shard."""
        # The scale is split like the kernel, except along `in`, where its size is 1.
        splits_in = layout.storage_dim == len(self.shape) - 2
        scale_layout = replace(layout, gathered=False) if splits_in else layout
        return Float8(layout.whole(self.bits), scale_layout.whole(self.scale))


class Quantised(NamedTuple):
    """An array in float8; `carrier` has its gradient, as integers have none."""

    array: Float8
    # Zeros of the array's shape and compute dtype, never computed
    carrier: Array

    @classmethod
    def of(cls, array: Float8, dtype: DTypeLike) -> "Quantised":
        """Adds the carrier, which varies over the axes over which the array does."""
        zeros = jnp.zeros(array.shape, dtype)
        return cls(array, vary_like(zeros, array.bits))

    @classmethod
    def gradient(cls, grad: Array | None) -> "Quantised | None":
        """Returns the gradient of an array, for a `custom_vjp`."""
        return None if grad is None else cls(None, grad)  # type: ignore[arg-type]

    @property
    def dtype(self) -> jnp.dtype:
        """The compute dtype."""
        return self.carrier.dtype

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the array, rounded once to `dtype`."""
        return self.array.astype(dtype) + self.carrier.astype(dtype)


def tokens_in_float8(x: Array, *axes: str) -> Quantised:
    """Quantises each token `[..., D]`; the gradient passes unchanged.

    The mesh axes `axes` split the features.

    Raises:
      ConfigError: this device has no products in float8; XLA would convert the operands in silence.
    """
    if problem := matmul_problem(FLOAT8, architecture_of(current_device())):
        raise ConfigError(f'matmul="{FLOAT8}": {problem}')

    def quantise(x: Array) -> Quantised:
        return Quantised(Float8.of(x, dim=-1, axes=axes), jnp.zeros_like(x))

    return with_gradient(quantise, lambda grad: grad.carrier)(x)


def enter_float8(x: Quantised, split_dim: int | None) -> Quantised:
    """Like `enter_parallel`, of tokens in 8 bits: gathers the bits and the scales.

    The gradient is reduced in the compute dtype.
    """
    dtype = x.dtype

    def gather(x: Quantised) -> Quantised:
        bits, scale = (enter_parallel(part, split_dim) for part in x.array)
        return Quantised.of(Float8(bits, scale), dtype)

    def scatter(grad: Quantised) -> Quantised | None:
        return Quantised.gradient(leave_parallel(grad.carrier, split_dim))

    return with_gradient(gather, scatter)(x)


def load_float8(
    shard: Array | Float8,
    dtypes: WeightDtypes,
    layout: WeightLayout,
    axes: tuple[str, ...],
) -> Quantised:
    """Like `load_weight`, of a kernel that is gathered and multiplied in 8 bits.

    The mesh axes `axes` split its input features.
    """
    if isinstance(shard, Float8):
        return Quantised.of(shard.whole(layout), dtypes.compute)

    def gather(shard: Array) -> Quantised:
        kernel = Float8.of(shard, axes=axes).whole(layout)
        array, carrier = Quantised.of(kernel, dtypes.compute)
        return Quantised(array, vary(carrier, *layout.axes_to_sum(shard)))

    def scatter(grad: Quantised) -> Array:
        return layout.summed(grad.carrier, shard, dtypes.reduce)

    # One call: remat saves no quantised shard.
    return with_gradient(gather, scatter, one_call=True)(shard)
