"""How the parameters of a parallel module are stored: which dim lies over tp, which over fsdp."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jaxtp.mesh import FSDP, TP, axes_of


def stored_spec(
    shape: tuple[int, ...], tp_dim: int | None, sizes: Mapping[str, int], *, fsdp: bool = True
) -> PartitionSpec:
    """The spec of a parameter: fsdp takes the largest dim that it divides and tp leaves over.

    Args:
      shape: of the parameter of a single layer.
      tp_dim: the dim that tp splits, if any.
      sizes: devices along each axis.
      fsdp: False keeps it whole over fsdp. So does a shape in which fsdp divides no other dim.
    """
    dims: list[str | None] = [None] * len(shape)
    if tp_dim is not None:
        dims[tp_dim] = TP
    free = [i for i, size in enumerate(shape) if i != tp_dim and size > 1 and size % sizes[FSDP] == 0]
    if fsdp and free:
        dims[max(free, key=lambda i: (shape[i], -i))] = FSDP
    return PartitionSpec(*dims)


def dim_over(axis: str, spec: PartitionSpec) -> int | None:
    """The dim that lies over an axis."""
    return next((dim for dim, entry in enumerate(spec) if axis in axes_of(entry)), None)


def without(axis: str, spec: PartitionSpec) -> PartitionSpec:
    """The spec of the same array, whole over an axis."""
    return PartitionSpec(*(None if axis in axes_of(entry) else entry for entry in spec))


def stacked(spec: PartitionSpec, layers: int) -> PartitionSpec:
    """The spec of a parameter of stacked layers, with so many more dims in front, which are not split."""
    return PartitionSpec(*(None,) * layers, *spec)
