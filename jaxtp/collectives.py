"""All collectives of the package, written from the point of view of one device.

A parallel layer runs its body through `device_view`; inside, arrays are this device's shards and
each function below is one collective. Autodiff derives the backward pass, except for `load_weight`
and `average_gradient`:

    function                       forward          backward
    enter_parallel, no sequence    nothing          all-reduce      (Megatron's f)
    enter_parallel, sequence       all-gather       reduce-scatter
    leave_parallel, no sequence    all-reduce       nothing         (Megatron's g)
    leave_parallel, sequence       reduce-scatter   all-gather
    load_weight, split             all-gather       reduce-scatter  (over fsdp and cp),
                                                    all-reduce over dp
    load_weight, not split         nothing          all-reduce over dp, fsdp and cp
    load_weight, `used_by_all_tp`                   and all-reduce over tp
    load_weight, `tp_gather`       and all-gather   and reduce-scatter  (over neighbours along tp)
    average_gradient               nothing          all-gather over neighbours along tp
    vary, vary_like, vary_alike    nothing          all-reduce over the axes that are added
    all_reduce                     all-reduce       nothing
    reduce_scatter                 reduce-scatter   all-gather
    all_gather                     all-gather       reduce-scatter   (`to="invarying"`: nothing)
    all_to_all                     all-to-all       all-to-all
    permute                        permute          permute

With accumulation the all-reduces over dp, and over axes that replicate a weight, follow once per
step (`sum_over_replicas` in `layers/parameter.py`). Rings (`layers/overlap.py`) replace
enter_parallel and leave_parallel; `layers/float8.py` moves arrays in 8 bits. Without a mesh every
function returns its argument, as along axes of one device, where XLA for CPUs would copy it;
`device_view` leaves these axes out of its specs.

Groups of axes: `BATCH` (dp, fsdp) divides the rows of a batch, `CONTEXT` (cp) each row, `TOKENS`
(dp, fsdp, cp) both; `SEQUENCE` (cp, tp) divides a row between layers under sequence parallelism;
`STORAGE` (fsdp, cp) divides a stored weight, and each device of `REPLICAS` (dp) has a copy of it.
A result of `all_reduce` is the same on each device; where it meets an array that varies, JAX marks
it by `vary`, so that its gradient is summed.

`check_vma` stays on (the default): a missing reduction is then a type error at trace time, not a
wrong gradient. Megatron-LM (arXiv 1909.08053) describes f and g, arXiv 2205.05198 their
sequence-parallel forms.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtp.config.entry import UserError
from jaxtp.mesh import AXES, BATCH, CONTEXT, REPLICAS, STORAGE, TP, axes_of, current_mesh

V = TypeVar("V")
W = TypeVar("W")

# Values of `checkpoint_name`
# A column layer's all-gathered input; in a ring, this device's shard
GATHERED = "gathered"
# A row layer's output
REDUCED = "reduced"
# Residuals of projections: outputs of column layers, and `x @ A` of every adapter
PROJECTED = "projected"
# An attention kernel's residuals: its output and log-sum-exp
ATTENDED = "attended"
# Keys and values of all devices along cp
SHARED = "shared"
# What every remat policy saves: routers' choices, and sines and cosines of positions
KEPT = "kept"


def device_view(
    body: Callable[..., Any], name: str, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function that runs `body` on the shards of each device.

    Without a mesh it calls `body`.

    `name` appears in profiles and errors. A spec is a `PartitionSpec` of all arrays of an argument,
    or a pytree of specs like the argument. Axes of one device are left out of the specs: `body`
    uses the functions below, not `jax.lax`.

    Raises:
      ValueError: when called, if a dim of an argument is not divisible by its mesh axes.
      MissingReductionError: when called, if a result varies over an axis along which `out_specs`
        replicates it.
    """

    def call(*args: object) -> Any:
        mesh = current_mesh()
        with jax.named_scope(name):
            if mesh is None:
                return body(*args)
            specs = jax.tree.broadcast(in_specs, args)
            jax.tree.map(lambda spec, arg: check_divides(name, arg.shape, spec), specs, args)
            ins, outs = jax.tree.map(_split_spec, (in_specs, out_specs))
            try:
                return jax.shard_map(body, in_specs=ins, out_specs=outs)(*args)
            except ValueError as error:
                if "require replication" not in str(error):
                    raise
                raise MissingReductionError(name, str(error)) from None

    return call


class MissingReductionError(ValueError):
    """A layer's result varies over an axis along which its spec replicates it.

    `message` is JAX's message.
    """

    def __init__(self, name: str, message: str):
        names = ",".join(re.findall(r"(?:across mesh axis '|and not {)([\w,]+)", message))
        axes = sorted(set(filter(None, names.split(","))))
        where = f" along {' and '.join(axes)}" if axes else ""
        super().__init__(
            f"{name}: out_specs declares its result equal{where}, but it differs between devices; "
            "a reduction (leave_parallel, all_reduce) is missing"
        )


def batch_spec(*dims: str | tuple[str, ...] | None) -> PartitionSpec:
    """Returns a spec: the batch axes, then `dims`."""
    return PartitionSpec(BATCH, *dims)


def token_spec(*dims: str | tuple[str, ...] | None) -> PartitionSpec:
    """Returns the spec of tokens `[B, T, ...]` inside parallel layers."""
    return batch_spec(CONTEXT, *dims)


def constrain(x: Array, spec: PartitionSpec) -> Array:
    """Constrains the sharding of a global array; no-op without a mesh."""
    if current_mesh() is None:
        return x
    # An array created before the mesh was set has no spec yet.
    if not isinstance(x, jax.core.Tracer) and not isinstance(x.sharding, NamedSharding):
        return jax.device_put(x, NamedSharding(jax.sharding.get_mesh(), spec))
    return lax.with_sharding_constraint(x, spec)


def with_gradient(
    function: Callable[[V], W], gradient: Callable[[W], object], *, one_call: bool = False
) -> Callable[[V], W]:
    """Returns `function` with a hand-written gradient, which needs no residuals.

    With `one_call` remat sees one call, and saves nothing inside of it.
    """
    call = jax.custom_vjp(function)
    forward = call if one_call else function
    call.defvjp(lambda x: (forward(x), None), lambda _, grad: (gradient(grad),))
    return call


class DivisionError(UserError):
    """A mesh that does not divide a dim."""


def check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    """Raises a DivisionError unless the mesh axes in `spec` divide each dim."""
    for dim, axes in enumerate(spec):
        names = axes_of(axes)
        count = axis_size(*names)
        if shape[dim] % count:
            below = shape[dim] // count * count
            above = -(-shape[dim] // count) * count
            product = " x ".join(f"{axis}={axis_size(axis)}" for axis in _split_axes(names))
            raise DivisionError(
                f"{name}: dim {dim} of shape {shape} is {shape[dim]}, not divisible by {product}; "
                f"nearest: {f'{below} or {above}' if below else above}"
            )


def axis_size(*axes: str) -> int:
    """Returns the number of devices along `axes` of the mesh in context; 1 without a mesh."""
    mesh = current_mesh()
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def _split_axes(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def _split_spec(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(_split_axes(axes_of(entry)) or None for entry in spec))


def axis_index(*axes: str) -> Array | int:
    """Returns this device's position along `axes`, the last fastest.

    Call it inside `device_view`; without a mesh it returns 0.
    """
    place: Array | int = 0
    for axis in _split_axes(axes):
        place = place * axis_size(axis) + lax.axis_index(axis)
    return place


def own_part(x: Array, axis: str, dim: int) -> Array:
    """Returns this device's part of a dim along a mesh axis; all devices of the axis have `x`."""
    size = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, axis_index(axis) * size, size, dim)


def vary(x: Array, *axes: str) -> Array:
    """Marks `x`, replicated along `axes`, as varying over them.

    Its gradient is then summed over them.
    """
    axes = _split_axes(axes)
    if not axes:
        return x
    return lax.pcast(x, axes, to="varying")


def vary_like(x: Array, *arrays: Array) -> Array:
    """Marks `x` as varying over every axis over which one of `arrays` varies."""
    axes = set().union(*map(_varying_axes, arrays))
    return vary(x, *sorted(axes - _varying_axes(x)))


def vary_alike(arrays: V) -> V:
    """Marks each array of a tree as varying over every axis over which one of them varies."""
    leaves = jax.tree.leaves(arrays)
    return jax.tree.map(lambda x: vary_like(x, *leaves), arrays)


def vary_everywhere(x: Array) -> Array:
    """Marks `x` as varying over all axes."""
    return vary(x, *(axis for axis in AXES if axis not in _varying_axes(x)))


def _varying_axes(x: Array) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def swap_sequence(x: V, split_dim: int | None) -> V:
    """Swaps the first dim and `split_dim` of arrays if tp splits the sequence.

    A second call undoes the first, so layers call it before and after their products. XLA gathers
    and scatters along the first dim: around a product of `[B, T, D]` it would swap whole
    activations. With attention's `_rows_as_heads` copies took 6 instead of 63 ms of a step of Llama
    3 8B at tp 8.
    """
    if split_dim is None or axis_size(TP) == 1:
        return x
    return jax.tree.map(lambda array: jnp.swapaxes(array, 0, split_dim), x)


def enter_parallel(x: Array, split_dim: int | None) -> Array:
    """Brings an activation to every device of a tp group.

    With `split_dim`, `x` is this device's part and is all-gathered: `[B, T/tp, D] -> [B, T, D]`.
    """
    if split_dim is None or current_mesh() is None:
        return vary(checkpoint_name(x, GATHERED), TP)
    gathered = all_gather(swap_sequence(x, split_dim), TP)
    return swap_sequence(checkpoint_name(gathered, GATHERED), split_dim)


def leave_parallel(x: Array, split_dim: int | None) -> Array:
    """Sums this device's `x` over its tp group.

    With `split_dim`, each device gets its part along that dim (reduce-scatter):
    `[B, T, D] -> [B, T/tp, D]`.
    """
    if split_dim is None:
        return checkpoint_name(all_reduce(x, TP), REDUCED)
    reduced = reduce_scatter(swap_sequence(x, split_dim), TP)
    return swap_sequence(checkpoint_name(reduced, REDUCED), split_dim)


def all_reduce(x: Array, *axes: str) -> Array:
    """Returns the sum over the devices along `axes`."""
    axes = _split_axes(axes)
    if not axes:
        return x
    return lax.psum(x, axes)


def all_reduce_max(x: Array, *axes: str) -> Array:
    """Returns the maximum over the devices along `axes`, without a gradient."""
    axes = _split_axes(axes)
    x = lax.stop_gradient(x)
    if not axes:
        return x
    return lax.pmax(x, axes)


def all_gather(
    x: Array, *axes: str, dim: int = 0, to: Literal["varying", "invarying"] = "varying"
) -> Array:
    """Concatenates the shards of the devices along `axes`: `[S, ...] -> [n * S, ...]`.

    An `invarying` result counts as one array that the devices share, so `device_view` can return
    it.
    """
    axes = _split_axes(axes)
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=dim, tiled=True, to=to)


def reduce_scatter(x: Array, *axes: str, dim: int = 0) -> Array:
    """Returns this device's part of the sum along `axes`: `[n * S, ...] -> [S, ...]`."""
    axes = _split_axes(axes)
    if not axes:
        return x
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def all_to_all(x: Array, *axes: str, split: int, join: int) -> Array:
    """Sends part i of dim `split` to device i, and concatenates the received parts along `join`."""
    axes = _split_axes(axes)
    if not axes:
        return x
    return lax.all_to_all(x, axes, split, join, tiled=True)


def permute(x: Array, axis: str, pairs: Iterable[tuple[int, int]] | None = None) -> Array:
    """Returns the array of the previous device along `axis`.

    With (source, target) `pairs` it is the array of the source; a device that is no target gets
    zeros.
    """
    size = axis_size(axis)
    if size == 1:
        return x
    if pairs is None:
        pairs = [(i, (i + 1) % size) for i in range(size)]
    return lax.ppermute(x, axis, list(pairs))


def by_rows(array: Array) -> Array:
    """Forces the row-major layout of a weight's shard, of its gradient, or of what a ring sends.

    XLA gathers along the first dim, and cuBLAS on Hopper reads float8 by columns. XLA propagates
    either layout to the stack of all layers, and makes a transposed copy of it before the loop:
    41.6 GB of temporaries for Mixtral over fsdp 8.
    """
    return with_layout_constraint(array, Layout(major_to_minor=tuple(range(array.ndim))))


class WeightDtypes(NamedTuple):
    """The dtypes in which `load_weight` moves a weight and its gradient."""

    # Of the gather over devices
    compute: DTypeLike
    # Of the sum of gradients over devices
    reduce: DTypeLike
    # Dtype of the gathered weight, in which gradients of its uses accumulate; `compute` or wider
    accumulate: DTypeLike


def gradient_sum_axes(*, stored_split: bool, used_by_all_tp: bool) -> tuple[str, ...]:
    """Returns the axes over which a weight's gradient is all-reduced.

    `stored_split`: `STORAGE` splits a dim. `used_by_all_tp`: each device along tp computes a
    summand of the gradient, from other tokens or other features.
    """
    axes = [*REPLICAS]
    if not stored_split:
        axes += STORAGE
    if used_by_all_tp:
        axes.append(TP)
    return tuple(axes)


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How a device's shard of a weight is stored, and which part the device multiplies with."""

    storage_dim: int | None
    """Dim that the storage, fsdp and cp, splits and that is gathered; None if it holds replicas."""

    gathered: bool = True
    """False keeps the weight split over the storage, for layers that gather tokens; its gradient is
    only all-reduced, over `axes_to_sum`."""

    tp_gather: tuple[int, int] = (0, 1)
    """(dim, group size): groups of neighbours along tp gather this dim, because tp exceeds the kv
    heads."""

    used_by_all_tp: bool = False
    """The weight is replicated over tp, and each device computes a summand of its gradient: it uses
    the weight on other tokens (a norm under sequence parallelism) or for other features (an
    adapter)."""

    reduce_in_layer: bool = False
    """Keeps the reduction of the gradient in the backward pass of its layer. If XLA moves the
    reduction elsewhere, it copies the gradient. It did so for the columns of an MLP, after which
    attention's backward pass follows, and for row layers without tp."""

    def whole(self, shard: Array) -> Array:
        """Gathers a shard over its neighbours along tp (`tp_gather`), then over fsdp and cp."""
        dim, group = self.tp_gather
        shard = by_rows(shard)
        if group > 1:
            groups = _groups_over_tp(group)
            shard = lax.all_gather(shard, TP, axis=dim, axis_index_groups=groups, tiled=True)
        if self.storage_dim is None or not self.gathered:
            return shard
        return all_gather(shard, *STORAGE, dim=self.storage_dim)

    def summed(self, grad: Array, shard: Array, dtype: DTypeLike) -> Array:
        """Returns the gradient of `shard`, summed in `dtype`.

        It is `whole` transposed, and a sum over `axes_to_sum`.
        """
        dim, group = self.tp_gather
        grad = grad.astype(dtype)
        if self.storage_dim is not None and self.gathered:
            grad = reduce_scatter(grad, *STORAGE, dim=self.storage_dim)
            if self.reduce_in_layer and axis_size(*STORAGE) > 1:
                grad = lax.optimization_barrier(grad)
        if group > 1:
            groups = _groups_over_tp(group)
            grad = lax.psum_scatter(
                grad, TP, scatter_dimension=dim, axis_index_groups=groups, tiled=True
            )
        return by_rows(all_reduce(grad, *self.axes_to_sum(shard))).astype(shard.dtype)

    def axes_to_sum(self, shard: Array) -> tuple[str, ...]:
        """Returns the axes to sum the gradient over: those that replicate the shard.

        Axes over which it varies already are left out.
        """
        if current_mesh() is None:
            return ()
        copied = gradient_sum_axes(
            stored_split=self.storage_dim is not None, used_by_all_tp=self.used_by_all_tp
        )
        return tuple(axis for axis in copied if axis not in _varying_axes(shard))


def load_weight(shard: Array, dtypes: WeightDtypes, layout: WeightLayout) -> Array:
    """Gathers a stored shard into the weight that this device multiplies with.

    The shard is cast to the compute dtype *before* the gather, its gradient to the reduction dtype
    *before* the reduction. These dtypes differ, so the transpose is hand-written. The gradient is
    not summed over axes over which the shard already varies (`layers.parameter.mark_unreduced`).
    """
    if current_mesh() is None:
        return shard.astype(dtypes.compute).astype(dtypes.accumulate)

    def gather(shard: Array) -> Array:
        # With this mark JAX leaves the gradient unsummed; `summed` sums it over the replicas last,
        # on the smaller result of the reduce-scatter.
        varying = vary(shard.astype(dtypes.compute), *layout.axes_to_sum(shard))
        return layout.whole(varying).astype(dtypes.accumulate)

    load = with_gradient(gather, lambda grad: layout.summed(grad, shard, dtypes.reduce))
    return load(shard)


def average_gradient(y: Array, group: int) -> Array:
    """Returns `y`; its gradient is averaged over groups of neighbours along tp.

    The devices of a group compute the same `y`.
    """
    if group == 1:
        return y

    def average(grad: Array) -> Array:
        groups = _groups_over_tp(group)
        grads = lax.all_gather(grad.astype(jnp.float32), TP, axis_index_groups=groups)
        return jnp.mean(grads, axis=0).astype(grad.dtype)

    return with_gradient(lambda y: y, average)(y)


def _groups_over_tp(size: int) -> list[list[int]]:
    return [list(range(first, first + size)) for first in range(0, axis_size(TP), size)]
