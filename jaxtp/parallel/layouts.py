"""Layouts of activations along tp, split in one dim or whole on every device; specs of stored parameters.

The names of layouts are those of `torch.distributed.tensor`. A layout says nothing of the batch, which dp and fsdp
divide in dim 0, and nothing of parameters, whose split follows from the style of their module.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtp.mesh import BATCH, STORAGE, TP, axes_of, parts


@dataclass(frozen=True)
class Shard:
    """Layout in which each device of a tp group holds its part of one dim.

    Args:
      dim: the dim; a negative one counts from the last.
    """

    dim: int


@dataclass(frozen=True)
class Replicate:
    """Every device of a tp group holds the whole.

    As the style of a module: its parameters are whole on every device, over fsdp too, and it runs as it is written.
    """


Layout = Shard | Replicate


def activation_spec(layout: Layout, ndim: int, *, batched: bool = True) -> PartitionSpec:
    """Returns the spec of a global activation of so many dims.

    Args:
      layout: along tp.
      ndim: of the activation.
      batched: dp and fsdp divide dim 0.

    Raises:
      ValueError: the layout names a dim that the activation does not have, or the batch.
    """
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    if batched:
        dims[0] = BATCH
    if isinstance(layout, Shard):
        dims[_dim_of(layout, ndim, batched)] = TP
    return PartitionSpec(*dims)


def has_batch(shape: tuple[int, ...], batch_ndim: int = 2) -> bool:
    """Returns whether dp and fsdp divide dim 0 of an activation: not if it has too few dims, or one row for all."""
    return len(shape) >= batch_ndim and shape[0] != 1


def same_layout(one: Layout, other: Layout, ndim: int) -> bool:
    """Returns whether two layouts of an activation are one: `Shard(-1)` is `Shard(2)` where `ndim` is 3."""
    if isinstance(one, Shard) and isinstance(other, Shard):
        return one.dim % ndim == other.dim % ndim
    return one == other


def _dim_of(layout: Shard, ndim: int, batched: bool) -> int:
    if not -ndim <= layout.dim < ndim:
        raise ValueError(f"{layout}: an activation of {ndim} dims has none of that number")
    dim = layout.dim % ndim
    if batched and dim == 0:
        raise ValueError(f"{layout}: dim 0 of an activation is the batch, which dp and fsdp divide, not tp")
    return dim


def stored_spec(
    shape: tuple[int, ...], tp_dim: int | None, sizes: Mapping[str, int], *, fsdp: bool = True
) -> PartitionSpec:
    """Returns the spec of a parameter: fsdp takes the largest dim that it divides and tp leaves over.

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
    """Returns the spec of a parameter of stacked layers, with so many more dims in front, which are not split."""
    return PartitionSpec(*(None,) * layers, *spec)
