"""Normalisation of queries and keys before their product (arXiv 2010.04245), over each head or over all of them."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_size
from jaxtp.layers.norm import rms_normalise
from jaxtp.layers.parameter import parameter
from jaxtp.layers.precision import Precision
from jaxtp.mesh import TP

QKNormKind = Literal["none", "head", "projection"]


class QKNorm(nnx.Module):
    """RMS normalisation of a projection whose heads are split over tp.

    Args:
      kind: "head" normalises each head, with one scale `[H]` for all of them (Qwen 3); "projection" normalises the
        whole projection, with a scale `[heads * H]` split like the heads (OLMo 2): its mean square is a sum over tp.
      num_heads: heads of the projection (K for keys).
      head_dim: H.
      eps: added to the mean square.
      precision: the dtypes.

    It is called inside the attention's `device_view`, on this device's heads and its part of `scale`.
    """

    def __init__(
        self, kind: QKNormKind, num_heads: int, head_dim: int, *, eps: float, precision: Precision = Precision()
    ):
        self.per_head = kind == "head"
        self.features = num_heads * head_dim
        self.head_dim = head_dim
        self.eps = eps
        self.precision = precision
        size, self.spec = (head_dim, P()) if self.per_head else (self.features, P(TP))
        self.scale = parameter("scale", jnp.ones(size, precision.param), self.spec)

    def __call__(self, x: Array, scale_shard: Array) -> Array:
        """Normalises `[b, T, heads of this device, H]`."""
        if self.per_head:
            scale = self.precision.load(scale_shard, None, used_by_all_tp=True)
            return rms_normalise(x, self.eps) * scale
        sharing = max(1, self.head_dim * axis_size(TP) // self.features)  # devices that hold the same kv head
        scale = self.precision.load(scale_shard, None, tp_dim=0, tp_group=sharing)
        x32 = x.astype(jnp.float32)
        squares = all_reduce(jnp.sum(jnp.square(x32), axis=(-2, -1), keepdims=True), TP)
        normalised = x32 * jax.lax.rsqrt(squares / (self.features * sharing) + self.eps)
        return normalised.astype(x.dtype) * scale.reshape(x.shape[-2:])
