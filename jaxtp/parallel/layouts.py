"""How an activation lies along tp: split in one dim, or whole on every device.

The names are those of `torch.distributed.tensor`. A layout says nothing of the batch, which dp and fsdp divide in dim
0, and nothing of parameters, whose split follows from the style of their module.
"""

from dataclasses import dataclass

from jax.sharding import PartitionSpec

from jaxtp.mesh import BATCH, TP


@dataclass(frozen=True)
class Shard:
    """Each device of a tp group holds its part of one dim.

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
    """The spec of a global activation of so many dims.

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
    """Whether dp and fsdp divide dim 0 of an activation: not if it has too few dims, or a single row for all."""
    return len(shape) >= batch_ndim and shape[0] != 1


def same_layout(one: Layout, other: Layout, ndim: int) -> bool:
    """Whether two layouts of an activation of so many dims are one: `Shard(-1)` is `Shard(2)` where `ndim` is 3."""
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
