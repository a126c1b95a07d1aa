"""How a layer declares and loads a parameter: its value, the `PartitionSpec` it is stored by, and the dtypes.

A layer's body in `device_view` gets its weights by name: `own` gives a module's parameters and their specs.
"""

from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxtp.collectives import check_divides, load_weight
from jaxtp.mesh import current_mesh

Weights = dict[str, Array]
"""A layer's parameters by the path of the attribute that holds them, such as `kernels.0`."""

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


def parameter(
    name: str, value: Array, spec: PartitionSpec, *, kind: type[nnx.Param[Any]] = nnx.Param, **metadata: Any
) -> nnx.Param[Array]:
    """Returns a parameter that is initialised sharded by `spec` over the mesh in context; whole if there is none.

    Raises:
      ValueError: a dim cannot be divided over its mesh axes (JAX would replicate it without a word).
    """
    check_divides(name, value.shape, spec)
    spec = PartitionSpec(*spec, *(None,) * (value.ndim - len(spec)))  # an entry for each dim: `own` counts them
    return kind(value, out_sharding=spec, eager_sharding=current_mesh() is not None, **metadata)


def own(*modules: nnx.Module) -> tuple[Weights, dict[str, PartitionSpec]]:
    """Returns the parameters of modules by name, and the specs that they are stored by.

    A parameter of stacked layers has the spec of the stack; the entries of the dims that it has here are the last ones.
    """
    weights: Weights = {}
    specs: dict[str, PartitionSpec] = {}
    for module in modules:
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
            name = ".".join(map(str, path))
            weights[name] = jnp.asarray(variable[...])
            declared = tuple(variable.get_metadata()["out_sharding"])
            specs[name] = PartitionSpec(*declared[max(0, len(declared) - weights[name].ndim) :])
    return weights, specs


def check_sizes(layer: str, **sizes: Any) -> None:
    """Checks the sizes that a layer is built with.

    Raises:
      ValueError: one is no whole number, or below 1.
    """
    bad = [f"{name}={size!r}" for name, size in sizes.items() if not isinstance(size, Integral) or size < 1]
    if bad:
        raise ValueError(f"{layer}: {', '.join(bad)}: should be a whole number, 1 or more")


def logical_shape(variable: nnx.Variable[Any]) -> tuple[int, ...]:
    """The shape of a variable without padding, which does not depend on the mesh."""
    return tuple(variable.get_metadata().get("logical_shape", variable.shape))
