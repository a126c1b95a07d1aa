"""Specs of activations and stored parameters, and layout changes of activations.

Layouts describe only tp. dp and fsdp always split dim 0, the batch; cp splits dim 1, the sequence,
inside `ContextParallel` modules.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec
from numpy.lib.mixins import NDArrayOperatorsMixin

from jaxtp.collectives import axis_size, check_divides, constrain, device_view, enter_parallel
from jaxtp.mesh import BATCH, CONTEXT, STORAGE, TOKENS, TP, Sizes, axes_of, parts
from jaxtp.plans.styles import Layout, Layouts, Replicate, Shard

Shape = tuple[int, ...]
LeadingAxes = tuple[tuple[str, ...], ...]
"""The axes that split each of the first dims of an activation: of no dim, the batch, or the batch
and the sequence."""


def activation_spec(layout: Layout, ndim: int, leading: LeadingAxes = (BATCH,)) -> PartitionSpec:
    """Returns the spec of a global activation. tp is minor to cp in a dim that both split."""
    whole_dims = (None,) * (ndim - len(leading))
    dims: list[tuple[str, ...] | str | None] = [*leading, *whole_dims]
    if not isinstance(layout, Shard):
        return PartitionSpec(*dims)
    if not -ndim <= layout.dim < ndim:
        raise ValueError(f"{layout}: an activation of {ndim} dims has no such dim")
    dim = layout.dim % ndim
    if leading and dim == 0:
        raise ValueError(
            f"{layout}: dim 0 of an activation is the batch, which dp and fsdp divide, not tp"
        )
    dims[dim] = (*axes_of(dims[dim]), TP) if dims[dim] else TP
    return PartitionSpec(*dims)


def leading_axes(
    shape: Shape, batch_ndim: int = 2, sequence_ndim: int = 3, *, context: bool
) -> LeadingAxes:
    """Returns the axes that split the first dims of an activation.

    Dim 0 is a batch if there are at least `batch_ndim` dims, and dim 1 a sequence if there are at
    least `sequence_ndim`. A batch of one row stays whole. `context` is True inside
    `ContextParallel`.
    """
    cp = axis_size(*CONTEXT)
    only_cp_splits = context and cp > 1 and axis_size(*BATCH) == 1
    if len(shape) < batch_ndim or (shape[:1] == (1,) and not only_cp_splits):
        return ()
    if cp == 1:
        # The axes also have cp of size 1: shard_map tracks every axis over which a value may vary.
        return (TOKENS,)
    if context and len(shape) >= sequence_ndim and shape[1] % cp == 0:
        return (BATCH, CONTEXT)
    return (BATCH,)


def split_dim(layout: Layout, ndim: int) -> int | None:
    """Returns the dim that a layout splits, counted from the front."""
    if isinstance(layout, Shard):
        return layout.dim % ndim
    return None


def declared_spec(parameter: nnx.Variable[Any], ndim: int) -> PartitionSpec:
    """Returns the spec that a parameter declares for its last `ndim` dims.

    Flax's rules rename logical axes. In a stack of layers, a layer may have the spec of the stack,
    or the stack the spec of a layer.
    """
    declared = nnx.get_partition_spec(parameter)
    # A plain array declares nothing.
    spec = tuple(declared.get_value() if isinstance(declared, nnx.Variable) else declared)
    spec += (None,) * (ndim - len(spec))
    return PartitionSpec(*spec[len(spec) - ndim :])


def declared_specs(module: nnx.Module) -> dict[str, PartitionSpec]:
    """Returns the specs of a module's own parameters that declare a split."""
    specs = {}
    for name, value in vars(module).items():
        if isinstance(value, nnx.Param) and any(spec := declared_spec(value, value.ndim)):
            specs[name] = spec
    return specs


def stored_spec(
    parameter: nnx.Variable[Any],
    ndim: int,
    tp_dim: int | None,
    sizes: Sizes,
    *,
    fsdp: bool,
) -> PartitionSpec:
    """Returns the spec of a stored parameter's last `ndim` dims, without the dims of a stack.

    tp splits `tp_dim`. A declared split of another dim stays if its axes divide the dim. With
    `fsdp`, fsdp and cp split the largest other dim that they divide, if any. If a spec declares one
    of these two axes, both split its dim.
    """
    shape = parameter.shape[parameter.ndim - ndim :]
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    for dim, entry in enumerate(declared_spec(parameter, ndim)):
        declared = axes_of(entry)
        not_stored = tuple(axis for axis in declared if axis not in STORAGE)
        choices = [not_stored]
        if not_stored != declared and dim_over(STORAGE, dims) is None:
            choices = [(*STORAGE, *not_stored), not_stored]
        for axes in choices:
            if axes and not dims[dim] and shape[dim] % parts(sizes, axes) == 0:
                dims[dim] = axes if len(axes) > 1 else axes[0]
    if tp_dim is not None:
        dims[tp_dim] = TP
    largest = None
    for dim, size in enumerate(shape):
        divides = size > 1 and size % parts(sizes, STORAGE) == 0
        if divides and not dims[dim] and (largest is None or size > shape[largest]):
            largest = dim
    if fsdp and largest is not None and dim_over(STORAGE, dims) is None:
        dims[largest] = STORAGE
    return PartitionSpec(*dims)


def dim_over(
    axes: str | tuple[str, ...], spec: Iterable[str | tuple[str, ...] | None]
) -> int | None:
    """Returns the first dim split over any of these axes, or None."""
    for dim, entry in enumerate(spec):
        if not set(axes_of(axes)).isdisjoint(axes_of(entry)):
            return dim
    return None


def gathered_spec(spec: PartitionSpec) -> PartitionSpec:
    """Returns a parameter's spec after the gather over fsdp and cp."""
    dims = list(spec)
    for dim, entry in enumerate(spec):
        if not set(STORAGE).isdisjoint(axes_of(entry)):
            dims[dim] = None
    return PartitionSpec(*dims)


class Copies(NDArrayOperatorsMixin):
    """A replicated activation with a separate copy on each device of a tp group.

    Column layers that read one replicated array would each reduce its gradient over tp. Here each
    layer reads its device's copy (`copies` is `[tp, *shape]`, split over tp). Autodiff sums the
    layers' gradients locally, and the transpose of `make_copies` reduces the sum once. The object
    acts like the global array, but `jax.lax` needs `jnp.asarray(copies)`. Its pytree has only the
    array: after `jax.vmap` or `jax.checkpoint` each column layer reduces its own gradient.
    """

    def __init__(self, array: Any, copies: Any, context: bool = False):
        self.array = array
        self.copies = copies
        self.context = context

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the array, whole along tp."""
        return activation_spec(
            Replicate(), self.array.ndim, leading_axes(self.array.shape, context=self.context)
        )

    def __jax_array__(self) -> Array:
        return constrain(self.array, self.spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.array if name in _ARRAY_METADATA else self.__jax_array__(), name)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *operands: Any, **kwargs: Any) -> Any:
        arrays = (jnp.asarray(x) if isinstance(x, Copies) else x for x in operands)
        return getattr(jnp, ufunc.__name__)(*arrays)

    def __getitem__(self, index: Any) -> Array:
        return self.__jax_array__()[index]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.__jax_array__(), dtype)

    def __len__(self) -> int:
        return len(self.array)


_ARRAY_METADATA = {"shape", "dtype", "ndim", "size", "itemsize", "nbytes", "aval", "weak_type"}
jax.tree_util.register_pytree_node(  # the only leaf is the global array, without the dim of copies
    Copies,
    lambda x: ((x.array,), x.context),
    lambda context, children: Copies(*children, None, context),
)


def make_copies(x: Array, layout: Layout, *, context: bool = False) -> Array | Copies:
    """Gathers an activation `[B, ...]` once for all column layers that read it.

    Returns `x` if tp is 1. The transpose all-reduces the gradient, or reduce-scatters it if
    `layout` is `Shard`.
    """
    if axis_size(TP) == 1:
        return x
    dim = split_dim(layout, x.ndim)
    leading = leading_axes(x.shape, context=context)
    whole = activation_spec(Replicate(), x.ndim, leading)
    split = activation_spec(layout, x.ndim, leading)
    if not isinstance(x, jax.core.Tracer):  # a concrete array may be on one device
        x = constrain(x, split)
    gather = device_view(
        lambda part: enter_parallel(part, dim)[None],
        "make_copies",
        in_specs=(split,),
        out_specs=PartitionSpec(TP, *whole),
    )
    return Copies(x, gather(x), context)


def as_tuple(layouts: Layouts) -> tuple[Layout | None, ...]:
    """Returns layouts as a tuple."""
    return layouts if isinstance(layouts, tuple) else (layouts,)


def change_layouts(values: Any, before: Layouts, after: Layouts, *, context: bool) -> Any:
    """Changes the layout of a value, or of each value of a tuple."""
    if not isinstance(values, tuple):
        return change_layout(values, as_tuple(before)[0], as_tuple(after)[0], context=context)
    unchanged = (None,) * len(values)
    old_layouts = (*as_tuple(before), *unchanged)
    new_layouts = (*as_tuple(after), *unchanged)
    return tuple(map(partial(change_layout, context=context), values, old_layouts, new_layouts))


def change_layout(x: Any, before: Layout | None, after: Layout | None, *, context: bool) -> Any:
    """Changes the layout of a value; None for `after` leaves it unchanged."""
    if x is None or after is None:
        return x
    if after != Replicate():
        return constrain_layout(x, after, context=context)
    if isinstance(x, Copies) and x.copies is not None:
        return x
    return make_copies(jnp.asarray(x), before or Replicate(), context=context)


def constrain_layout(x: Any, layout: Layout, *, context: bool) -> Array:
    """Changes a global array's layout with the compiler's collectives."""
    x = jnp.asarray(x)
    spec = activation_spec(layout, x.ndim, leading_axes(x.shape, context=context))
    check_divides(f"an activation with the plan's layout {layout}", x.shape, spec)
    return constrain(x, spec)
