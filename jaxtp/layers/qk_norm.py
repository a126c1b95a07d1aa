"""Normalisation of queries and keys before their product (arXiv 2010.04245), over each head or over all of them."""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxtp.collectives import all_reduce, axis_size
from jaxtp.layers.costs import FLOAT32, Cost, Share, Weight, sums_over
from jaxtp.layers.norm import rms_normalise
from jaxtp.layers.parameter import Precision, Split, parameter
from jaxtp.mesh import TP

ATTEND = "attend"
"""Name of the part of attention between its projections."""

QKNormKind = Literal["none", "head", "projection"]


class QKNorm(nnx.Module):
    """RMS normalisation of a projection whose heads are split over tp.

    Args:
      kind: "head" normalises each head, with one scale `[H]` for all of them (Qwen 3); "projection" normalises the
        whole projection, with a scale `[heads * H]` split like the heads (OLMo 2): its mean square is a sum over tp.
      heads: heads of the projection, as tp divides them.
      head_dim: H.
      eps: added to the mean square.
      plus_one: the factor is 1 + scale (Gemma 3).
      precision: the dtypes.

    It is called inside the attention's `device_view`, on this device's heads and its part of `scale`.
    """

    def __init__(
        self,
        kind: QKNormKind,
        heads: Split,
        head_dim: int,
        *,
        eps: float,
        plus_one: bool = False,
        precision: Precision = Precision(),
    ):
        self.per_head = kind == "head"
        self.heads = heads
        self.head_dim = head_dim
        self.eps, self.plus_one = eps, plus_one
        self.precision = precision
        size, spec = (head_dim, P()) if self.per_head else (heads.size, P(TP))
        initial = (jnp.zeros if plus_one else jnp.ones)(size, precision.param)
        self.scale = parameter("scale", initial, spec, padding=() if self.per_head else ((-1, heads),))

    def __call__(self, x: Array, scale_shard: Array) -> Array:
        """Normalises `[b, T, heads of this device, H]`."""
        if self.per_head:
            scale = self.precision.load(scale_shard, None, used_by_all_tp=True)
            if self.plus_one:
                x32 = x.astype(jnp.float32)
                return (rms_normalise(x32, self.eps) * (1 + scale.astype(jnp.float32))).astype(x.dtype)
            return rms_normalise(x, self.eps) * scale
        sharing = self._sharing(axis_size(TP))
        scale = self.precision.load(scale_shard, None, tp_dim=0, tp_group=sharing)
        x32 = x.astype(jnp.float32)
        squares = all_reduce(jnp.sum(jnp.square(x32), axis=(-2, -1), keepdims=True), TP)
        normalised = x32 * jax.lax.rsqrt(squares / (self.heads.size * sharing) + self.eps)
        return normalised.astype(x.dtype) * scale.reshape(x.shape[-2:])

    def _sharing(self, tp: int) -> int:
        """Returns the number of devices that hold the same kv head."""
        return max(1, self.head_dim * tp // self.heads.padded(tp))

    def costs(self, share: Share) -> Iterator[Cost]:
        """Yields what it costs: of a whole projection, also a sum of a float per token, forward, again and backward."""
        if self.per_head:
            size = self.head_dim
            kind: dict[str, Any] = {"tp": False, "used_by_all_tp": True}
        else:
            size, kind = self.heads.size, {"group": self._sharing(share.tp), "split": self.heads}
            count = 3 if share.training else 1
            yield sums_over(ATTEND, (TP,), share.sizes, share.tokens * FLOAT32, count)
        yield Weight(module=ATTEND, size=size, precision=self.precision, fsdp=False, **kind)
