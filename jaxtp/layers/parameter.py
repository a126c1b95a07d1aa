"""How a layer declares a parameter: a value and the `PartitionSpec` it is stored by."""

from numbers import Integral
from typing import Any

from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import check_divides
from jaxtp.mesh import current_mesh


def parameter(
    name: str, value: Array, spec: PartitionSpec, *, kind: type[nnx.Param[Any]] = nnx.Param, **metadata: Any
) -> nnx.Param[Array]:
    """A parameter that is initialised sharded by `spec` over the mesh in context; whole if there is none.

    Raises:
      ValueError: a dim cannot be divided over its mesh axes (JAX would replicate it without a word).
    """
    check_divides(name, value.shape, spec)
    return kind(value, out_sharding=spec, eager_sharding=current_mesh() is not None, **metadata)


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
