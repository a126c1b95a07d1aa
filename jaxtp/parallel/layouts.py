"""Layouts of activations along tp, split in one dim or whole on every device; specs of stored parameters.

The names of layouts are those of `torch.distributed.tensor`. A layout says nothing of the batch, which dp and fsdp
divide in dim 0, nothing of the sequence, which cp divides in dim 1 where a plan says so (`ContextParallel`), and
nothing of parameters, whose split follows from the style of their module.

The spec of a parameter is a function of its shape, its letters and the mesh. It is asked when the model is split and
again when a module is called, so inside a scan over stacked layers no spec has to be shifted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtp.collectives import axis_size
from jaxtp.mesh import BATCH, CONTEXT, STORAGE, TOKENS, TP, axes_of, parts


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

Leading = tuple[tuple[str, ...], ...]
"""Axes that divide each of the first dims of an activation: none, the batch, or the batch and the sequence."""


def activation_spec(layout: Layout, ndim: int, leading: Leading = (BATCH,)) -> PartitionSpec:
    """Returns the spec of a global activation of so many dims.

    Args:
      layout: along tp.
      ndim: of the activation.
      leading: what divides its first dims. Where tp splits the sequence too, it divides what cp leaves.

    Raises:
      ValueError: the layout names a dim that the activation does not have, or the batch.
    """
    dims: list[tuple[str, ...] | str | None] = [*leading, *(None,) * (ndim - len(leading))]
    if isinstance(layout, Shard):
        dim = _dim_of(layout, ndim, bool(leading))
        dims[dim] = (*axes_of(dims[dim]), TP) if dims[dim] else TP
    return PartitionSpec(*dims)


def leading_axes(shape: tuple[int, ...], batch_ndim: int = 2, sequence_ndim: int = 3, *, context: bool) -> Leading:
    """Returns what divides the first dims of an activation: nothing if it has too few dims, or one row for all.

    Args:
      shape: of the activation.
      batch_ndim: dims from which on dim 0 is a batch.
      sequence_ndim: dims from which on dim 1 is a sequence.
      context: it is in a module whose sequences cp divides; one that cp does not divide stays whole.
    """
    cp = axis_size(*CONTEXT)
    one_for_all = len(shape) > 0 and shape[0] == 1 and not (context and cp > 1 and axis_size(*BATCH) == 1)
    if len(shape) < batch_ndim or one_for_all:
        return ()
    if cp == 1:
        return (TOKENS,)  # its one device may stand anywhere; a layer that differs along no axis has to name it
    divides = context and len(shape) >= sequence_ndim and shape[1] % cp == 0
    return (BATCH, CONTEXT) if divides else (BATCH,)


def all_differ(leading: Leading) -> bool:
    """Returns whether all devices that hold parts or copies of a weight use it on different tokens."""
    return {axis for axes in leading for axis in axes} == set(TOKENS)


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
    """Returns the spec of a parameter: fsdp and cp take the largest dim that they divide and tp leaves over.

    Args:
      shape: of the parameter of a single layer.
      tp_dim: the dim that tp splits, if any.
      sizes: devices along each axis.
      fsdp: False keeps it whole over both. So does a shape in which they divide no other dim.
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
