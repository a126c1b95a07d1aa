"""Dims at which the features of a stock layer go in and come out, which a split by columns or rows divides."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
from flax import nnx

from jaxtp.parallel.stock import Signature, signature


@dataclass(frozen=True)
class Ports:
    """Dims of a layer's input and output, counted from the front."""

    row: int | None
    """Dim of the input that a row layer splits; None for ids and norms."""

    column: int | None
    """Dim of the output that a column layer splits; None for norms."""

    kept: Mapping[int, int]
    """Dims of the input that the layer leaves alone, and where they are in the output."""


def is_stock(module: nnx.Module) -> bool:
    """Returns whether a module runs a stock layer's own code."""
    return signature(module) is not None


def is_norm(module: nnx.Module) -> bool:
    """Returns whether it is a stock layer that gives features back as it got them."""
    read = signature(module)
    return read is not None and read.inputs.keys() == read.outputs.keys()


def ports_of(module: nnx.Module, method: str, ndim: int) -> Ports | None:
    """Returns the ports of a stock layer that is called on an input of `ndim` dims; None for what no style splits.

    That is an embedding's `attend`, a convolution in groups, a `LinearGeneral` with batch axes.
    """
    read = signature(module)
    if read is None or method != "__call__":
        return None
    if is_norm(module):
        return Ports(None, None, _kept(read, ndim))
    if read.column is None:
        return None
    row = read.inputs.get(read.row) if read.row else None
    column = read.outputs[read.column] % (ndim + read.more_dims)
    return Ports(None if row is None else row % ndim, column, _kept(read, ndim))


def parameter_bytes(module: nnx.Module) -> int:
    """Returns the bytes of parameters of a module and those in it."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _kept(read: Signature, ndim: int) -> dict[int, int]:
    """Returns the dims that a layer leaves alone; of a convolution the batch: its windows reach over the other dims."""
    if read.batch_ndim is None:
        return {}
    unnamed = [
        [dim for dim in range(dims) if dim not in {named % dims for named in names.values()}]
        for dims, names in ((ndim, read.inputs), (ndim + read.more_dims, read.outputs))
    ]
    windows = read.batch_ndim - 1 - max(len(read.inputs), 1)
    return dict(list(zip(*unnamed, strict=False))[: len(unnamed[0]) - windows])
