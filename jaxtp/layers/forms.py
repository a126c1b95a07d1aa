"""Forms in which a device stores the frozen kernels of adapters: float8, and four bits (MXFP4).

A form has two arrays, `bits` and `scale`. `of` quantises a kernel `[..., in, out]`, `whole` gathers
a shard, and `astype` dequantises it just before its product. Adapters get the gradients of the
dequantised kernel.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from jaxtp.collectives import WeightDtypes, WeightLayout, with_gradient
from jaxtp.layers.float8 import Float8
from jaxtp.mesh import current_mesh

BLOCK = 32
"""Input features of MXFP4 that share a scale."""
# The bit at which the exponent of a float32 begins; its bias of 127 is also the bias of a scale
_EXPONENT = 23


class MXFP4(NamedTuple):
    """A kernel in MXFP4: blocks of 32 input features, each E2M1 numbers times a power of two.

    Source: OCP Microscaling Formats (MX) Specification 1.0. The scale of a block is
    2^(floor(log2(max)) - 2) for its largest absolute value (section 6.3). Numbers are rounded to
    the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times it, ties to even. So an element moves by less
    than a quarter of that maximum; of normal random numbers the error is 11.5% in norm. A
    kernel that was stored in MXFP4 does not move.
    """

    # Two numbers in each uint8, `[..., in/2, out]`; the low four bits have the first
    bits: Array
    # Exponents of the scales plus 127 (E8M0), uint8 `[..., in/32, out]`
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the kernel."""
        *stack, rows, outputs = self.bits.shape
        return (*stack, 2 * rows, outputs)

    @classmethod
    def of(cls, kernel: Array | np.ndarray) -> "MXFP4":
        """Quantises a kernel whose number of input features is a multiple of 32."""
        *stack, inputs, outputs = kernel.shape
        blocks = kernel.astype(jnp.float32).reshape(*stack, inputs // BLOCK, BLOCK, outputs)
        sizes = jnp.abs(blocks)
        max_size = jnp.max(sizes, axis=-2, keepdims=True)
        # The exponent of a float32 is the floor of its logarithm.
        exponent = lax.bitcast_convert_type(max_size, jnp.int32) >> _EXPONENT
        scale = jnp.maximum(exponent - 2, 0)
        sizes *= _power_of_two(254 - scale)
        # The codes of 0, 0.5, ... 2, of 2, 3, 4, and of 4, 6
        fine = jnp.round(2 * sizes)
        middle = jnp.round(sizes) + 2
        coarse = jnp.minimum(jnp.round(sizes / 2) + 4, 7)
        codes = jnp.where(sizes < 2, fine, jnp.where(sizes < 4, middle, coarse)).astype(jnp.uint8)
        codes |= jnp.signbit(blocks).astype(jnp.uint8) << 3
        codes = codes.reshape(*stack, inputs // 2, 2, outputs)
        bits = codes[..., 0, :] | codes[..., 1, :] << 4
        return cls(bits, scale[..., 0, :].astype(jnp.uint8))

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the kernel; bfloat16 and float32 have all of its values."""
        *stack, blocks, outputs = self.scale.shape
        pairs = self.bits.reshape(*stack, blocks, BLOCK // 2, 1, outputs)
        codes = pairs >> jnp.array([[0], [4]], jnp.uint8) & 15  # [..., blocks, 16, 2, outputs]
        exponent = codes >> 1 & 3
        # Twice the number is an integer.
        doubled = 2 * jnp.minimum(exponent, 1) + (codes & 1) << jnp.maximum(exponent, 1) - 1
        scale = self.scale.reshape(*stack, blocks, 1, 1, outputs).astype(jnp.int32)
        sizes = doubled.astype(jnp.float32) * _power_of_two(jnp.maximum(scale - 1, 0))
        return jnp.where(codes < 8, sizes, -sizes).astype(dtype).reshape(self.shape)

    def whole(self, layout: WeightLayout) -> "MXFP4":
        """Gathers a shard, which has whole blocks."""
        return MXFP4(layout.whole(self.bits), layout.whole(self.scale))


def _power_of_two(exponent: Array) -> Array:
    """Returns 2^(exponent - 127), exact for 1 to 254; 0 for 0."""
    return lax.bitcast_convert_type(exponent << _EXPONENT, jnp.float32)


Form = Float8 | MXFP4
FORMS: dict[str, type[Form]] = {"float8": Float8, "mxfp4": MXFP4}
"""Forms by their name in `lora.base`."""


def form_of(scale: Array) -> type[Form]:
    """Returns the form that has such a scale, real or abstract."""
    return MXFP4 if scale.dtype == jnp.uint8 else Float8


def load_dequantised(shard: Form, dtypes: WeightDtypes, layout: WeightLayout) -> Array:
    """Gathers a frozen kernel in its form and dequantises it; it has no gradient."""
    if current_mesh() is None:
        return shard.astype(dtypes.compute).astype(dtypes.accumulate)

    def gather(shard: Form) -> Array:
        return shard.whole(layout).astype(dtypes.compute).astype(dtypes.accumulate)

    # Remat sees a frozen weight in this call, and saves no part of it.
    return with_gradient(gather, lambda _: None)(shard)
