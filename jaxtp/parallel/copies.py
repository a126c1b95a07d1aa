"""An activation of which every device of a tp group has its copy.

Column layers that read one replicated array would each reduce its gradient over tp. `Copies` instead holds the array
once for each device, `[tp, *shape]` split over tp in dim 0, which takes the memory of a replicated array. Each column
layer reads the copy of its device and gives back that device's summand of the gradient; the summands add up where
they are, and are reduced once, by the transpose of what made the copies.

The plan of the usual Llama tutorial then moves over tp what the decoder's fused column layers do, to the byte.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import axis_size, constrain, device_view, enter_parallel
from jaxtp.mesh import TP
from jaxtp.parallel.layouts import Layout, Replicate, Shard, activation_spec, leading_axes


@jax.tree_util.register_pytree_node_class
class Copies:
    """Stands for a global array wherever JAX takes one: in `jax.numpy`, in arithmetic, as `[...]`, by its methods.

    `jax.lax` wants arrays: `jnp.asarray(copies)` is one. As a pytree it is the array alone: what `jax.tree.map`,
    `jax.vmap` or `jax.checkpoint` makes of it has no copies, and each column layer reduces its gradient for itself.

    Args:
      array: the array itself, as it arrived. Nothing is gathered for it unless somebody reads it.
      copies: `[tp, *shape]`, for column layers; None if there are none.
      context: cp may divide its sequences.
    """

    def __init__(self, array: Any, copies: Any, context: bool = False):
        self.array = array
        self.copies = copies
        self.context = context

    def tree_flatten(self) -> tuple[tuple[Any], bool]:
        """Returns the array: functions of leaves see its shape, not that of the copies."""
        return (self.array,), self.context

    @classmethod
    def tree_unflatten(cls, context: bool, children: tuple[Any]) -> "Copies":
        """Returns the array without copies: nobody knows what was made of it."""
        return cls(*children, None, context)

    @property
    def spec(self) -> PartitionSpec:
        """Returns the spec of the array, whole along tp."""
        leading = leading_axes(self.array.shape, context=self.context)
        return activation_spec(Replicate(), self.array.ndim, leading)

    def __jax_array__(self) -> Array:
        return constrain(self.array, self.spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.array if name in _FACTS else self.__jax_array__(), name)

    def __neg__(self) -> Array:
        return -self.__jax_array__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.__jax_array__(), dtype)

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        return f"Copies({self.array!r})"


_FACTS = {"shape", "dtype", "ndim", "size", "itemsize", "nbytes", "aval", "weak_type"}


def _binary(operation: Callable[[Any, Any], Any], *, swapped: bool = False) -> Callable[[Copies, Any], Any]:
    def call(self: Copies, other: Any) -> Any:
        other = jnp.asarray(other) if isinstance(other, Copies) else other
        return operation(other, self.__jax_array__()) if swapped else operation(self.__jax_array__(), other)

    return call


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor"):
    _operation, _bare = getattr(operator, _name), _name.rstrip("_")
    setattr(Copies, f"__{_bare}__", _binary(_operation))
    setattr(Copies, f"__r{_bare}__", _binary(_operation, swapped=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "getitem"):
    setattr(Copies, f"__{_name}__", _binary(getattr(operator, _name)))


def make_copies(x: Array, layout: Layout, *, context: bool = False) -> Array | Copies:
    """Brings an activation to every device of a tp group, for all column layers that will read it.

    The gradient of what they read is all-reduced here, or reduce-scattered where the sequence was split. With one
    device along tp there is nothing to share, and the array is returned.

    Args:
      x: a global activation `[B, ...]`.
      layout: how it lies along tp.
      context: cp may divide its sequences.
    """
    if axis_size(TP) == 1:
        return x
    dim = layout.dim % x.ndim if isinstance(layout, Shard) else None
    leading = leading_axes(x.shape, context=context)
    whole, arrives = (activation_spec(lies, x.ndim, leading) for lies in (Replicate(), layout))
    if not isinstance(x, jax.core.Tracer):  # it may have been made before there was a mesh
        x = constrain(x, arrives)
    gather = device_view(
        lambda part: enter_parallel(part, dim)[None],
        "make_copies",
        in_specs=(arrives,),
        out_specs=PartitionSpec(TP, *whole),
    )
    return Copies(x, gather(x), context)


def copies_spec(x: Copies) -> PartitionSpec:
    """Returns the spec of `x.copies`."""
    return PartitionSpec(TP, *x.spec)
