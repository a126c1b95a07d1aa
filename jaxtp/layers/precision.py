"""Which dtype holds the parameters, which multiplies, and which sums gradients over devices."""

from dataclasses import dataclass
from typing import Literal

from jax import Array

from jaxtp.collectives import load_weight

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a layer. Norms and softmax are computed in float32 whatever is set here."""

    param: DType = "float32"
    """Dtype in which parameters and optimizer state are stored."""

    compute: DType = "float32"
    """Dtype of activations and matrix products; weights are cast to it before they are gathered."""

    reduce: DType = "float32"
    """Dtype in which weight gradients are summed over devices."""

    logits: DType = "float32"
    """Dtype of the head's output; the softmax over it is float32."""

    def load(self, shard: Array, fsdp_dim: int | None, **kwargs: bool | int | None) -> Array:
        """`collectives.load_weight` with these dtypes."""
        return load_weight(shard, fsdp_dim, compute=self.compute, reduce=self.reduce, **kwargs)  # type: ignore[arg-type]
