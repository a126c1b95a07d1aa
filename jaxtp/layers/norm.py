"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import device_view
from jaxtp.layers.parameter import check_sizes, parameter
from jaxtp.layers.precision import Precision
from jaxtp.layers.sequence import SequenceParallel, activation_spec, sequence_dim
from jaxtp.mesh import FSDP


class RMSNorm(nnx.Module):
    """`x / sqrt(mean(x^2) + eps) * scale` over the last dim, in float32.

    Args:
      features: D.
      eps: added to the mean square.
      sequence_parallel: the input is split over tp along the sequence; the scale's gradient is then summed over tp.
      precision: the dtypes.

    Shapes: `[B, T, D] -> [B, T, D]`. The scale `[D]` is stored split by `P("fsdp")`.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float = 1e-6,
        sequence_parallel: SequenceParallel = False,
        precision: Precision = Precision(),
    ):
        check_sizes("RMSNorm", features=features)
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        self.precision = precision
        self.scale = parameter("scale", jnp.ones(features, precision.param), P(FSDP))

    def __call__(self, x_BTD: Array) -> Array:
        """Normalises the last dim of `[B, T, D]`."""
        sequence = sequence_dim(self.sequence_parallel, x_BTD.shape)
        activation = activation_spec(sequence)
        normalise = partial(self._normalise, sequence is not None)
        return device_view(normalise, "rms_norm", in_specs=(activation, P(FSDP)), out_specs=activation)(
            x_BTD, self.scale[...]
        )

    def _normalise(self, split: bool, x: Array, scale: Array) -> Array:
        scale = self.precision.load(scale, 0, used_by_all_tp=split)
        return rms_normalise(x, self.eps) * scale


def rms_normalise(x: Array, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps)` over the last dim, computed in float32, in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)).astype(x.dtype)
