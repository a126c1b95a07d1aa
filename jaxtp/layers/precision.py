"""Which dtype holds the parameters, which multiplies, and which sums gradients over devices."""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from jaxtp.collectives import load_weight

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Precision:
    """The dtypes of a layer. Norms and softmax are computed in float32 whatever is set here."""

    param: DType = "float32"
    """Dtype in which parameters and optimizer state are stored, but for adafactor's moments, which are float32."""

    compute: DType = "float32"
    """Dtype of activations and matrix products; weights are cast to it before they are gathered."""

    reduce: DType = "float32"
    """Dtype in which weight gradients are summed over devices, and over micro-batches if param is not wider."""

    logits: DType = "float32"
    """Dtype of the head's output; the softmax over it is float32."""

    def sum_dtype(self, param: DTypeLike) -> jnp.dtype:
        """Dtype in which the gradients of a parameter of some dtype are added up over micro-batches."""
        return jnp.promote_types(param, self.reduce)

    def load(self, shard: Array, fsdp_dim: int | None, **kwargs: bool | int | None) -> Array:
        """`collectives.load_weight` with these dtypes."""
        return load_weight(shard, fsdp_dim, compute=self.compute, reduce=self.reduce, **kwargs)  # type: ignore[arg-type]
