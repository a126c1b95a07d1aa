"""Where the features of a stock Flax layer go in and come out: what a split of it by columns or rows means for them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flax import nnx


@dataclass(frozen=True)
class Ports:
    """Dims of a layer's input and output, counted from the front."""

    summed: tuple[int, ...]
    """Of the input, those that the layer sums over; a row layer splits the first."""

    made: int
    """Of the output, the one that a column layer splits."""

    kept: Mapping[int, int]
    """The input's other dims that pass untouched, and where they are in the output."""


def is_layer(module: Any) -> bool:
    """Whether it is a stock layer, run by Flax's own `__call__`."""
    return _kind(module) is not None


def ports_of(module: Any, method: str, ndim: int) -> Ports | None:
    """The ports of a stock layer that is called on an input of `ndim` dims; None for any other module.

    Also None where a split would mean something else: convolutions in groups, `LinearGeneral` with batch axes, an
    embedding's `attend`.
    """
    kind = _kind(module)
    return _KINDS[kind](module, ndim) if kind and method == "__call__" else None


def _kind(module: Any) -> type | None:
    return next((k for k in _KINDS if isinstance(module, k) and type(module).__call__ is k.__call__), None)


def _linear(_: nnx.Linear, ndim: int) -> Ports:
    return Ports((ndim - 1,), ndim - 1, {d: d for d in range(ndim - 1)})


def _linear_general(module: nnx.LinearGeneral, ndim: int) -> Ports | None:
    summed = tuple(axis % ndim for axis in module.axis)
    if module.batch_axis or list(summed) != sorted(summed):
        return None
    kept = [d for d in range(ndim) if d not in summed]
    return Ports(summed, len(kept), {d: i for i, d in enumerate(kept)})


def _einsum(module: nnx.Einsum, ndim: int) -> Ports | None:
    """Of `"btd,dnh->btnh"`: sums over d, makes n; dims that all three have are batches of the kernel and refused."""
    operands, _, result = module.einsum_str.replace(" ", "").partition("->")
    data, kernel = operands.split(",")
    made = [c for c in result if c in kernel and c not in data]
    summed = [c for c in data if c in kernel and c not in result]
    if "." in data or not made or not summed or set(data) & set(kernel) & set(result) or len(data) != ndim:
        return None
    kept = {i: result.index(c) for i, c in enumerate(data) if c in result}
    return Ports(tuple(data.index(c) for c in summed), result.index(made[0]), kept)


def _conv(module: nnx.Conv, ndim: int) -> Ports | None:
    if module.feature_group_count != 1:
        return None
    batch = ndim - 1 - len(module.kernel_size)
    return Ports((ndim - 1,), ndim - 1, {d: d for d in range(batch)})


def _embed(_: nnx.Embed, ndim: int) -> Ports:
    return Ports((), ndim, {})


_KINDS: dict[type, Any] = {
    nnx.Linear: _linear,
    nnx.LinearGeneral: _linear_general,
    nnx.Einsum: _einsum,
    nnx.Conv: _conv,
    nnx.Embed: _embed,
}
