"""Gradients of micro-batches: each device adds up its own, and those of copies are summed over devices once.

A weight that the devices along dp hold in copies is used there on different tokens. Every layer sums its gradient in
its backward pass, which is once in each micro-batch. For weights from `keep_apart`, whose type says that they differ on
those devices, `load_weight` leaves that sum out, and `sum_copies` makes it after the last micro-batch. Two sums stay in
each micro-batch: that over fsdp, for else every device would hold whole gradients, and that of norms over tp, because a
norm decides by its input whether there is one (`layers/activations.py`).
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


def keep_apart(params: nnx.State) -> nnx.State:
    """Returns parameters as if they differed between the devices along `TOKENS` that hold copies; nothing moves.

    Their last dim has the copies of all those devices side by side, and so have gradients in them.
    """

    def apart(param: Variable) -> Variable:
        spec, axes = spec_of(param), _copied_over(param)
        *others, last = spec
        side_by_side = PartitionSpec(*others, (*axes_of(last), *axes))
        view = device_view(lambda shard: shard, GRADIENTS, in_specs=(spec,), out_specs=side_by_side)
        return param.copy(view(param[...]), out_sharding=side_by_side) if axes else param

    return jax.tree.map(apart, params, is_leaf=_is_variable)


def sum_copies(grads: nnx.State, params: nnx.State, dtype: DTypeLike) -> nnx.State:
    """Returns the gradients in parameters of those in what `keep_apart` makes of them, in the same dtypes.

    Args:
      grads: what each device has added up.
      params: the parameters as they are stored.
      dtype: of the sums over devices.
    """

    def total(param: Variable, grad: Variable) -> Variable:
        axes = _copied_over(param)

        def add(shard: Array) -> Array:
            return all_reduce(shard.astype(dtype), *axes).astype(shard.dtype)

        view = device_view(add, GRADIENTS, in_specs=(spec_of(grad),), out_specs=spec_of(param))
        return param.copy(view(grad[...])) if axes else grad

    return jax.tree.map(total, params, grads, is_leaf=_is_variable)


def _copied_over(param: Variable) -> tuple[str, ...]:
    """Returns the axes of `TOKENS` along which several devices hold copies of a parameter."""
    split = {axis for entry in spec_of(param) for axis in axes_of(entry)}
    return tuple(axis for axis in TOKENS if axis not in split and axis_size(axis) > 1)


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)
