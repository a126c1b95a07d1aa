"""Runs a stock module's code on shards: a copy of the module with this device's parameters and sizes runs Flax's code.

The split letter (`stock.py`) sets the communication: a result with the letter is split by columns; without it, each
device has a partial sum.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxtp.collectives import (
    WeightDtypes,
    axis_index,
    axis_size,
    check_divides,
    constrain,
    device_view,
    enter_parallel,
    leave_parallel,
    load_weight,
)
from jaxtp.mesh import STORAGE, TOKENS, TP, current_mesh, mesh_sizes
from jaxtp.parallelize.layouts import (
    Copies,
    LeadingAxes,
    activation_spec,
    dim_over,
    gathered_spec,
    leading_axes,
    same_layout,
    stored_spec,
)
from jaxtp.parallelize.module_wrappers import original_class, set_class
from jaxtp.parallelize.stock import Signature
from jaxtp.parallelize.styles import Colwise, Layout, Replicate, Rowwise, SequenceParallel, Shard, Style


@dataclass(frozen=True)
class ResolvedStyle:
    """A style applied to a module with a signature."""

    letter: str | None  # the letter that tp splits; None if parameters are whole along tp
    input_layout: Layout
    output_layout: Layout
    fsdp: bool = True  # parameters are stored split over fsdp and cp

    def tp_dim(self, letters: str) -> int | None:
        """Returns the dim of a parameter that tp splits."""
        return letters.index(self.letter) if self.letter is not None and self.letter in letters else None


def resolve_style(style: Style | None, signature: Signature, *, fsdp: bool = True) -> ResolvedStyle:
    """Resolves a style; None and layout-only styles leave parameters whole along tp."""
    if isinstance(style, Colwise) and signature.column:
        split = Shard(signature.outputs[signature.column])
        return ResolvedStyle(signature.column, style.input_layouts, style.output_layouts or split, fsdp)
    if isinstance(style, Rowwise) and signature.row:
        dim = signature.inputs.get(signature.row)
        return ResolvedStyle(signature.row, Replicate() if dim is None else Shard(dim), style.output_layouts, fsdp)
    if isinstance(style, SequenceParallel):
        return ResolvedStyle(None, Shard(style.sequence_dim), Shard(style.sequence_dim), fsdp)
    return ResolvedStyle(None, Replicate(), Replicate(), fsdp)


def resolve_attend(lookup: ResolvedStyle, signature: Signature) -> ResolvedStyle:
    """Resolves the style of `nnx.Embed.attend`; the query has the layout of a lookup's result."""
    if lookup.letter == "v":
        return ResolvedStyle("v", lookup.output_layout, Shard(signature.outputs["v"]), lookup.fsdp)
    if lookup.letter == "d":
        return ResolvedStyle("d", Shard(signature.inputs["d"]), Replicate(), lookup.fsdp)
    return lookup


def module_leading_axes(shape: tuple[int, ...], signature: Signature, *, context: bool) -> LeadingAxes:
    """Returns the axes that split the first dims of input and result."""
    context = context and len(shape) > 1 and signature.keeps_positions(len(shape))
    return leading_axes(shape, signature.batch_ndim or len(shape) + 1, 2, context=context)


@dataclass(frozen=True)
class ShardedCall:
    """A stock module's method on global arrays, computed on shards."""

    module: Any  # an `nnx.Module`
    method: Callable[..., Array]  # called with a module of the original class, and the input
    signature: Signature
    style: ResolvedStyle
    name: str  # name in profiles and errors
    context: bool = False  # cp divides the sequences of this module

    def __call__(self, x: Any) -> Array:
        """Returns a global array."""
        has_copies = isinstance(x, Copies) and x.copies is not None and self._splits_columns
        x = x if has_copies else jnp.asarray(x)
        leading = module_leading_axes(x.shape, self.signature, context=self.context)
        # If the devices that share a weight have different tokens, each gathers it from where it is stored.
        stored = {axis for axes in leading for axis in axes} == set(TOKENS)
        weights = {name: getattr(self.module, name)[...] for name in self._params}
        specs = {name: self._spec(name, weight.shape, stored) for name, weight in weights.items()}
        out_spec = activation_spec(self._body_layout, x.ndim + self.signature.more_dims, leading)
        in_spec, array = activation_spec(self.style.input_layout, x.ndim, leading), x
        if has_copies:
            in_spec, array = PartitionSpec(TP, *x.spec), x.copies
        body = partial(self._body, specs if stored else None, has_copies)
        run = device_view(body, self.name, in_specs=(in_spec, *specs.values()), out_specs=out_spec)
        y = run(array, *weights.values())
        if same_layout(self._body_layout, self.style.output_layout, y.ndim):
            return y
        spec = activation_spec(self.style.output_layout, y.ndim, leading)
        check_divides(self.name, y.shape, spec)
        return constrain(y, spec)

    @property
    def _splits_columns(self) -> bool:
        return self.style.letter in self.signature.outputs

    @property
    def _sums(self) -> bool:
        return self.style.letter is not None and not self._splits_columns

    @property
    def _params(self) -> list[str]:
        return [name for name in self.signature.params if getattr(self.module, name) is not None]

    @property
    def _post_reduction_params(self) -> list[str]:
        """Parameters without the summed letter (a bias), added once after the reduction."""
        return [n for n in self._params if self._sums and self.style.tp_dim(self.signature.params[n]) is None]

    @property
    def _body_layout(self) -> Layout:
        outputs, letter = self.signature.outputs, self.style.letter
        return Shard(outputs[letter]) if letter is not None and letter in outputs else self.style.output_layout

    def _spec(self, name: str, shape: tuple[int, ...], stored: bool) -> PartitionSpec:
        sizes = mesh_sizes(current_mesh())
        spec = stored_spec(shape, self.style.tp_dim(self.signature.params[name]), sizes, fsdp=self.style.fsdp)
        return spec if stored else gathered_spec(spec)

    def _body(self, specs: Mapping[str, PartitionSpec] | None, has_copies: bool, x: Array, *shards: Array) -> Array:
        if self._splits_columns:
            x = x[0] if has_copies else enter_parallel(x, _shard_dim(self.style.input_layout, x.ndim))
        weights = {n: self._load(n, shard, specs) for n, shard in zip(self._params, shards, strict=True)}
        local = self._local_module({n: w for n, w in weights.items() if n not in self._post_reduction_params})
        if not self._sums:
            return self.method(local, x)
        is_lookup = isinstance(self.module, nnx.Embed) and not self.signature.inputs
        y = _masked_lookup(self.method, local, x, self.module.num_embeddings) if is_lookup else self.method(local, x)
        dim = _shard_dim(self.style.output_layout, y.ndim)
        if dim is not None and y.shape[dim] % axis_size(TP):
            raise ValueError(
                f"{self.name}: leaves as {self.style.output_layout}, and dim {dim} is {y.shape[dim]}, not divisible by "
                f"tp={axis_size(TP)}"
            )
        y = leave_parallel(y, dim)
        for name in self._post_reduction_params:
            y = y + self._broadcastable(weights[name].astype(y.dtype), self.signature.params[name], y)
        return y

    def _load(self, name: str, shard: Array, specs: Mapping[str, PartitionSpec] | None) -> Array:
        if specs is None:
            return shard
        # Cast to the dtype in which the module computes before the gather: it sends less.
        casts = self.module.dtype is not None and self.module.promote_dtype is promote_dtype
        layout = self.style.output_layout if name in self._post_reduction_params else self.style.input_layout
        compute = self.module.dtype if casts else shard.dtype
        dtypes = WeightDtypes(compute, jnp.promote_types(shard.dtype, jnp.float32), compute)
        used_by_all_tp = dim_over(TP, specs[name]) is None and (self._splits_columns or isinstance(layout, Shard))
        return load_weight(shard, dim_over(STORAGE, specs[name]), dtypes, used_by_all_tp=used_by_all_tp)

    def _local_module(self, weights: Mapping[str, Array]) -> nnx.Module:
        local: Any = nnx.clone(self.module)
        set_class(local, original_class(self.module))
        for name, weight in weights.items():
            setattr(local, name, nnx.Param(weight))
        for name in self._post_reduction_params:
            setattr(local, name, nnx.data(None))
            local.use_bias = False
        for name, letters in self.signature.attributes.items():
            if (dim := self.style.tp_dim(letters)) is not None:
                setattr(local, name, _local_size(getattr(local, name), dim))
        return local

    def _broadcastable(self, weight: Array, letters: str, y: Array) -> Array:
        """Reshapes a weight to broadcast against `y`, sliced where tp splits `y`."""
        dims = [self.signature.outputs[letter] % y.ndim for letter in letters]
        shape = [1] * y.ndim
        for dim, size in zip(dims, weight.shape, strict=True):
            shape[dim] = size
        weight = weight.reshape(shape)
        split = _shard_dim(self.style.output_layout, y.ndim)
        if split not in dims:
            return weight
        return lax.dynamic_slice_in_dim(weight, axis_index(TP) * y.shape[split], y.shape[split], split)


def _shard_dim(layout: Layout, ndim: int) -> int | None:
    return layout.dim % ndim if isinstance(layout, Shard) else None


def _local_size(sizes: int | tuple[int, ...], dim: int) -> int | tuple[int, ...]:
    tp = axis_size(TP)
    return sizes // tp if isinstance(sizes, int) else (*sizes[:dim], sizes[dim] // tp, *sizes[dim + 1 :])


def _masked_lookup(method: Callable[..., Array], local: Any, ids: Array, vocabulary: int) -> Array:
    """Looks ids up in this device's rows; other rows give zeros. Invalid ids behave as in Flax."""
    ids = jnp.where(ids < 0, ids + vocabulary, ids)
    rows = local.num_embeddings
    position = ids - axis_index(TP) * rows
    mine = (position >= 0) & (position < rows)
    exists = (ids >= 0) & (ids < vocabulary)
    embeddings = method(local, jnp.where(mine, position, jnp.where(exists, 0, rows)))
    return jnp.where((mine | ~exists)[..., None], embeddings, 0)
