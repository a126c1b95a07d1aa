"""All collectives of the package, written from the point of view of one device.

A parallel layer runs its body through `device_view`; inside, arrays are this device's shards and each function below is
one collective. Autodiff derives the backward pass, except for `load_weight`:

    function                       forward          backward
    enter_parallel, no sequence    nothing          all-reduce      (Megatron's f)
    enter_parallel, sequence       all-gather       reduce-scatter
    leave_parallel, no sequence    all-reduce       nothing         (Megatron's g)
    leave_parallel, sequence       reduce-scatter   all-gather
    load_weight, split             all-gather       reduce-scatter  (over fsdp and cp), all-reduce over dp
    load_weight, not split         nothing          all-reduce over dp, fsdp and cp, and tp if `used_by_all_tp`
    load_weight of a `Float8`      all-gather       nothing          (of 8 bits, if split)
    all_reduce                     all-reduce       nothing          (where the sum meets a shard: all-reduce)
    reduce_scatter                 reduce-scatter   all-gather
    all_gather                     all-gather       reduce-scatter   (`to="invarying"`: nothing)
    all_to_all                     all-to-all       all-to-all
    permute                        permute          permute

With accumulation the all-reduces over dp, and over axes that replicate a weight, follow once per step
(`sum_over_replicas` in `layers/parameter.py`). Rings (`layers/overlap.py`) replace enter_parallel and leave_parallel.
Without a mesh every function returns its argument. `check_vma` stays on (the default): a missing reduction is then a
type error at trace time, not a wrong gradient. Megatron-LM (arXiv 1909.08053) describes f and g, arXiv 2205.05198 their
sequence-parallel forms.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxtp.config.entry import UserError
from jaxtp.mesh import AXES, BATCH, CONTEXT, STORAGE, TP, axes_of, current_mesh, gradient_sum_axes, parts

GATHERED = "gathered"
"""`checkpoint_name` of a column layer's all-gathered input; in a ring, of this device's shard."""

REDUCED = "reduced"  # `checkpoint_name` of a row layer's output

PROJECTED = "projected"
"""`checkpoint_name` of the residuals of projections: outputs of column layers, and `x @ A` of every adapter."""

ATTENDED = "attended"
"""`checkpoint_name` of an attention kernel's residuals: its output and log-sum-exp."""

CHOSEN = "chosen"  # `checkpoint_name` of a router's choice, which every remat policy saves


def device_view(body: Callable[..., Any], name: str, in_specs: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """Returns a function that runs `body` on the shards of each device; without a mesh it calls `body`.

    `name` appears in profiles and errors. Each spec is a `PartitionSpec`, or a pytree of specs like its argument.

    Raises:
      ValueError: when called, if a dim of an argument is not divisible by its mesh axes.
      MissingReductionError: when called, if a result varies over an axis along which `out_specs` replicates it.
    """

    def call(*args: Any) -> Any:
        mesh = current_mesh()
        with jax.named_scope(name):
            if mesh is None:
                return body(*args)
            jax.tree.map(lambda spec, arg: check_divides(name, arg.shape, spec), in_specs, args)
            try:
                return jax.shard_map(body, in_specs=in_specs, out_specs=out_specs)(*args)
            except ValueError as error:
                if "require replication" not in str(error):
                    raise
                raise MissingReductionError(name, str(error)) from None

    return call


class MissingReductionError(ValueError):
    """A layer's result varies over an axis along which its spec replicates it; `message` is JAX's message."""

    def __init__(self, name: str, message: str):
        axes = sorted(set(re.findall(r"across mesh ax[ie]s \(?'(\w+)'", message)))
        where = f" along {' and '.join(axes)}" if axes else ""
        super().__init__(
            f"{name}: out_specs declares its result equal{where}, but it differs between devices; a reduction "
            f"(leave_parallel, all_reduce) is missing"
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


def gather_weight(x: Array, stored: PartitionSpec, gathered: PartitionSpec) -> Array:
    """Gathers a global weight from spec `stored` to `gathered`; its gradient gets spec `stored`.

    For global arrays; inside `device_view` use `load_weight`.
    """
    gather = jax.custom_vjp(lambda x: constrain(x, gathered))
    gather.defvjp(lambda x: (constrain(x, gathered), None), lambda _, grad: (constrain(grad, stored),))
    return gather(x)


class DivisionError(UserError):
    """A mesh that does not divide a dim."""


def check_divides(name: str, shape: tuple[int, ...], spec: PartitionSpec) -> None:
    """Raises a DivisionError unless the mesh axes in `spec` divide each dim."""
    for dim, axes in enumerate(spec):
        names = axes_of(axes)
        count = axis_size(*names)
        if shape[dim] % count:
            below, above = shape[dim] // count * count, -(-shape[dim] // count) * count
            product = " x ".join(f"{axis}={axis_size(axis)}" for axis in names if axis_size(axis) > 1)
            raise DivisionError(
                f"{name}: dim {dim} of shape {shape} is {shape[dim]}, not divisible by {product}; "
                f"nearest: {f'{below} or {above}' if below else above}"
            )


def axis_size(*axes: str) -> int:
    """Returns the number of devices along `axes` of the mesh in context; 1 without a mesh."""
    mesh = current_mesh()
    return 1 if mesh is None else parts(mesh.shape, axes)


def axis_index(axis: str) -> Array | int:
    """Returns this device's position along `axis`, inside `device_view`; 0 without a mesh."""
    return 0 if current_mesh() is None else lax.axis_index(axis)


def vary(x: Array, *axes: str) -> Array:
    """Marks `x`, replicated along `axes`, as varying over them, so that its gradient is summed over them."""
    return x if current_mesh() is None else lax.pcast(x, axes, to="varying")


def vary_like(x: Array, *others: Array) -> Array:
    """Marks `x` as varying over every axis over which one of `others` varies."""
    varying = [jax.typeof(array).manual_axis_type.varying for array in (x, *others)]
    return vary(x, *sorted(set().union(*varying) - varying[0]))


def vary_everywhere(x: Array) -> Array:
    """Marks `x` as varying over all axes."""
    return vary(x, *(axis for axis in AXES if axis not in jax.typeof(x).manual_axis_type.varying))


def enter_parallel(x: Array, sequence_dim: int | None) -> Array:
    """Brings an activation to every device of a tp group.

    With `sequence_dim`, `x` is this device's part and is all-gathered: `[B, T/tp, D] -> [B, T, D]`.
    """
    if sequence_dim is not None and current_mesh() is not None:
        return checkpoint_name(all_gather(x, TP, dim=sequence_dim), GATHERED)
    return vary(checkpoint_name(x, GATHERED), TP)


def leave_parallel(x: Array, sequence_dim: int | None) -> Array:
    """Sums this device's `x` over its tp group.

    With `sequence_dim`, each device gets its part along that dim (reduce-scatter): `[B, T, D] -> [B, T/tp, D]`.
    """
    if current_mesh() is not None and sequence_dim is None:
        x = lax.psum(x, TP)
    elif current_mesh() is not None:
        x = lax.psum_scatter(x, TP, scatter_dimension=sequence_dim, tiled=True)
    return checkpoint_name(x, REDUCED)


def all_reduce(x: Array, *axes: str) -> Array:
    """Returns the sum over the devices along `axes`."""
    return x if current_mesh() is None else lax.psum(x, axes)


def all_reduce_max(x: Array, axis: str) -> Array:
    """Returns the maximum over the devices along `axis`, without a gradient."""
    x = lax.stop_gradient(x)
    return x if current_mesh() is None else lax.pmax(x, axis)


def all_gather(x: Array, *axes: str, dim: int = 0, to: Literal["varying", "invarying"] = "varying") -> Array:
    """Concatenates the shards of the devices along `axes`: `[S, ...] -> [n * S, ...]`.

    An `invarying` result counts as one array that the devices share, so `device_view` can return it.
    """
    if axis_size(*axes) == 1 and (to == "varying" or current_mesh() is None):
        return x  # XLA for CPUs would copy `x` even on one device
    return lax.all_gather(x, axes, axis=dim, tiled=True, to=to)


def reduce_scatter(x: Array, axis: str) -> Array:
    """Returns this device's part of the sum over the devices along `axis`: `[n * S, ...] -> [S, ...]`."""
    return x if current_mesh() is None else lax.psum_scatter(x, axis, tiled=True)


def all_to_all(x: Array, *axes: str, split: int, join: int) -> Array:
    """Sends part i of dim `split` to device i along `axes`, and concatenates the received parts along `join`."""
    return x if current_mesh() is None else lax.all_to_all(x, axes, split, join, tiled=True)


def permute(x: Array, axis: str, pairs: Iterable[tuple[int, int]] | None = None) -> Array:
    """Returns the array of the previous device along `axis`, or of the source in (source, target) `pairs`.

    A device that is not a target gets zeros.
    """
    size = axis_size(axis)
    if current_mesh() is None:
        return x
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)] if pairs is None else list(pairs))


class Float8(NamedTuple):
    """A frozen kernel `[..., in, out]` in 8 bits: float8 numbers (E4M3), and a float32 scale for each output feature.

    Their product is within 2^-4 of the kernel, relatively, or within 2^-10 of the scale if that is more: E4M3 has 3
    bits of mantissa, and 2^-6 is its smallest normal number. Both fields may also be specs.
    """

    bits: Array  # of the float8 numbers, as uint8: XLA for CPUs would slice and gather float8 in float16
    scale: Array  # `[..., 1, out]`: the largest absolute value over 448, the largest number of E4M3

    @property
    def ndim(self) -> int:
        """Number of dims of the kernel."""
        return int(self.bits.ndim)

    @classmethod
    def of(cls, kernel: Array | np.ndarray) -> "Float8":
        """Quantises a kernel; zero channels stay zero."""
        most = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True).astype(jnp.float32)
        scale = jnp.maximum(most / float(jnp.finfo(jnp.float8_e4m3fn).max), jnp.finfo(jnp.float32).tiny)
        numbers = (kernel.astype(jnp.float32) / scale).astype(jnp.float8_e4m3fn)
        return cls(lax.bitcast_convert_type(numbers, jnp.uint8), scale)

    def astype(self, dtype: DTypeLike) -> Array:
        """Returns the kernel, rounded once to `dtype`."""
        numbers = lax.bitcast_convert_type(self.bits, jnp.float8_e4m3fn).astype(jnp.float32)
        kernel: Array = (numbers * self.scale).astype(dtype)
        return kernel


class WeightDtypes(NamedTuple):
    """The dtypes in which `load_weight` moves a weight and its gradient."""

    compute: DTypeLike  # of the gather over devices
    reduce: DTypeLike  # of the sum of gradients over devices
    result: DTypeLike  # of the gathered weight, in which gradients of its uses accumulate; `compute` or wider


def load_weight(
    shard: Array | Float8,
    fsdp_dim: int | None,
    dtypes: WeightDtypes,
    *,
    gathered: bool = True,
    tp_gather: tuple[int, int] | None = None,
    used_by_all_tp: bool = False,
) -> Array:
    """Gathers a stored shard into the weight that this device multiplies with.

    The shard is cast to the compute dtype *before* the gather, its gradient to the reduction dtype *before* the
    reduction. These dtypes differ, so the transpose is hand-written. The gradient is not summed over axes over which
    the shard already varies (`layers.parameter.mark_unreduced`). A `Float8` is gathered in 8 bits, and has no gradient.

    Args:
      shard: this device's part, in the param dtype.
      fsdp_dim: dim that is split over fsdp and all-gathered here; None if fsdp holds replicas.
      dtypes: see `WeightDtypes`.
      gathered: False keeps the weight split over fsdp, for layers that gather tokens instead; its gradient is summed
        over replicas only.
      tp_gather: (dim, group size): groups of neighbours along tp gather this dim, because tp exceeds the kv heads.
      used_by_all_tp: the weight is replicated over tp but used on different tokens (a norm under sequence parallelism),
        so its gradient is summed over tp.
    """
    if current_mesh() is None:
        return shard.astype(dtypes.compute).astype(dtypes.result)
    copied = gradient_sum_axes(stored_split=fsdp_dim is not None, used_by_all_tp=used_by_all_tp)
    tp_dim, tp_group = tp_gather or (0, 1)
    groups = [list(range(first, first + tp_group)) for first in range(0, axis_size(TP), tp_group)]
    fsdp_dim = fsdp_dim if gathered else None

    def whole(w: Array, fsdp_dim: int | None) -> Array:
        if tp_group > 1:
            w = lax.all_gather(w, TP, axis=tp_dim, axis_index_groups=groups, tiled=True)
        return w if fsdp_dim is None else _gather_shards(w, fsdp_dim)

    def gather_bits(shard: Float8) -> Array:
        # The scale `[..., 1, out]` is split like the kernel, except along `in`, where its size is 1.
        scale = whole(shard.scale, None if fsdp_dim == shard.ndim - 2 else fsdp_dim)
        return Float8(whole(shard.bits, fsdp_dim), scale).astype(dtypes.compute).astype(dtypes.result)

    if isinstance(shard, Float8):
        load_bits = jax.custom_vjp(gather_bits)  # one call, so that remat sees a frozen weight and saves no part of it
        load_bits.defvjp(lambda shard: (gather_bits(shard), None), lambda *_: (None,))
        return load_bits(shard)
    summed = tuple(axis for axis in copied if axis not in jax.typeof(shard).manual_axis_type.varying)

    def gather(shard: Array) -> Array:
        # Replicas first: their gradients are summed last, on the smaller result of the reduce-scatter.
        return whole(vary(shard.astype(dtypes.compute), *summed), fsdp_dim).astype(dtypes.result)

    def backward(_: None, grad: Array) -> tuple[Array]:
        grad = grad.astype(dtypes.reduce)
        if fsdp_dim is not None:
            grad = _reduce_scatter_shards(grad, fsdp_dim)
        if tp_group > 1:
            grad = lax.psum_scatter(grad, TP, scatter_dimension=tp_dim, axis_index_groups=groups, tiled=True)
        return (lax.psum(grad, summed).astype(shard.dtype),)

    load = jax.custom_vjp(gather)
    load.defvjp(lambda shard: (gather(shard), None), backward)  # not `load`: remat must see the gather itself
    return load(shard)


# XLA gathers along the first dim. To gather along another dim it would first transpose the shards of all layers at
# once, which takes as much memory as all expert kernels. These two functions transpose each stacked kernel alone.


def _gather_shards(w: Array, dim: int) -> Array:
    if axis_size(*STORAGE) == 1 or not _is_inside_stack(w, dim):
        return all_gather(w, *STORAGE, dim=dim)
    whole = jnp.moveaxis(lax.all_gather(w, STORAGE), 0, dim)
    return whole.reshape(*w.shape[:dim], -1, *w.shape[dim + 1 :])


def _reduce_scatter_shards(grad: Array, dim: int) -> Array:
    if not _is_inside_stack(grad, dim):
        return lax.psum_scatter(grad, STORAGE, scatter_dimension=dim, tiled=True)
    parted = grad.reshape(*grad.shape[:dim], axis_size(*STORAGE), -1, *grad.shape[dim + 1 :])
    return lax.psum_scatter(jnp.moveaxis(parted, dim, 0), STORAGE)


def _is_inside_stack(w: Array, dim: int) -> bool:
    return w.ndim > 2 and dim > 0


def is_tp_reduction(primitive: Any, params: dict[str, Any]) -> bool:
    """Returns whether a jaxpr primitive sums over tp."""
    axes = params.get("axes", params.get("axis_name", ()))
    return primitive.name in ("psum", "psum_invariant", "reduce_scatter") and TP in axes


def is_weight_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Returns whether a jaxpr primitive is `load_weight`'s gather, which remat policies never save."""
    over_storage = set(STORAGE) <= set(params.get("axis_name", ()))
    return primitive.name == "all_gather" and (over_storage or params["axis_index_groups"] is not None)
