"""Accumulates gradients of micro-batches on each device, and all-reduces them over replicas once per step.

By default every layer all-reduces its gradients over dp. `mark_unreduced` marks weights as different on those devices,
so `load_weight` omits the sum; `sum_copies` makes it after the last micro-batch. Sums over fsdp stay, or every
device would hold whole gradients, and so do sums of norms over tp.
"""

from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxtp.collectives import all_reduce, axis_size, device_view
from jaxtp.layers.parameter import GRADIENTS, spec_of
from jaxtp.mesh import TOKENS, axes_of

Variable = nnx.Variable[Any]


def mark_unreduced(params: nnx.State) -> nnx.State:
    """Returns params marked as different on the devices along `TOKENS` that hold replicas; nothing moves.

    The last dim of params and gradients then has all these replicas side by side.
    """

    def apart(param: Variable) -> Variable:
        spec, axes = spec_of(param), _copied_over(param)
        *others, last = spec
        side_by_side = PartitionSpec(*others, (*axes_of(last), *axes))
        view = device_view(lambda shard: shard, GRADIENTS, in_specs=(spec,), out_specs=side_by_side)
        return param.copy(view(param[...]), out_sharding=side_by_side) if axes else param

    return jax.tree.map(apart, params, is_leaf=_is_variable)


def sum_copies(grads: nnx.State, params: nnx.State, dtype: DTypeLike) -> nnx.State:
    """All-reduces, in `dtype`, accumulated gradients of params that `mark_unreduced` marked."""

    def total(param: Variable, grad: Variable) -> Variable:
        axes = _copied_over(param)

        def add(shard: Array) -> Array:
            return all_reduce(shard.astype(dtype), *axes).astype(shard.dtype)

        view = device_view(add, GRADIENTS, in_specs=(spec_of(grad),), out_specs=spec_of(param))
        return param.copy(view(grad[...])) if axes else grad

    return jax.tree.map(total, params, grads, is_leaf=_is_variable)


def _copied_over(param: Variable) -> tuple[str, ...]:
    split = {axis for entry in spec_of(param) for axis in axes_of(entry)}
    return tuple(axis for axis in TOKENS if axis not in split and axis_size(axis) > 1)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
