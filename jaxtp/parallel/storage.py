"""How the parameters of a parallel module are stored: which dim lies over tp, which over fsdp."""

from collections.abc import Mapping

from jax.sharding import PartitionSpec

from jaxtp.mesh import STORAGE, TP, axes_of, parts


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
    dims: list[str | tuple[str, ...] | None] = [None] * len(shape)
    if tp_dim is not None:
        dims[tp_dim] = TP
    free = [i for i, size in enumerate(shape) if i != tp_dim and size > 1 and size % parts(sizes, STORAGE) == 0]
    if fsdp and free:
        dims[max(free, key=lambda i: (shape[i], -i))] = STORAGE
    return PartitionSpec(*dims)


def dim_over(axes: str | tuple[str, ...], spec: PartitionSpec) -> int | None:
    """Returns the dim that is split over these axes."""
    return next((dim for dim, entry in enumerate(spec) if not set(axes_of(axes)).isdisjoint(axes_of(entry))), None)


def gathered(spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of the same array gathered from where it is stored."""
    return PartitionSpec(*(entry if set(STORAGE).isdisjoint(axes_of(entry)) else None for entry in spec))


def stacked(spec: PartitionSpec, layers: int) -> PartitionSpec:
    """The spec of a parameter of stacked layers, with so many more dims in front, which are not split."""
    return PartitionSpec(*(None,) * layers, *spec)
