"""Running a stock module's own code on shards.

Inside `device_view` a copy of the module holds this device's part of each parameter and the sizes that go with it,
and runs the code that Flax wrote: dtypes, precision and hooks are those of the module. What surrounds it follows from
the letter that is split (`stock`): one that the result has is split by columns, one that it lacks leaves a summand on
each device.
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
    axis_index,
    axis_size,
    check_divides,
    constrain,
    device_view,
    enter_parallel,
    leave_parallel,
    load_weight,
)
from jaxtp.mesh import STORAGE, TP, current_mesh, mesh_sizes
from jaxtp.parallel.calls import original_class, set_class
from jaxtp.parallel.copies import Copies, copies_spec
from jaxtp.parallel.layouts import (
    Layout,
    Leading,
    Replicate,
    Shard,
    activation_spec,
    all_differ,
    dim_over,
    gathered,
    leading_axes,
    same_layout,
    stored_spec,
)
from jaxtp.parallel.stock import Signature
from jaxtp.parallel.styles import Colwise, Rowwise, SequenceParallel, Style


@dataclass(frozen=True)
class Cut:
    """A style, applied to a module of some signature."""

    letter: str | None
    """The letter that is split; None if parameters are whole along tp."""

    arrives: Layout
    """Layout in which the body wants its input."""

    leaves: Layout
    """Layout in which the result leaves."""

    fsdp: bool = True
    """Parameters are stored split over fsdp and cp too."""

    def tp_dim(self, letters: str) -> int | None:
        """Returns the dim that tp splits of a parameter with these letters."""
        return letters.index(self.letter) if self.letter is not None and self.letter in letters else None


def cut_of(style: Style | None, signature: Signature, *, fsdp: bool = True) -> Cut:
    """Returns how a style splits a module; None and those that change layouts only leave it whole along tp."""
    if isinstance(style, Colwise) and signature.column:
        natural = Shard(signature.outputs[signature.column])
        return Cut(signature.column, style.input_layouts, style.output_layouts or natural, fsdp)
    if isinstance(style, Rowwise) and signature.row:
        dim = signature.inputs.get(signature.row)
        return Cut(signature.row, Replicate() if dim is None else Shard(dim), style.output_layouts, fsdp)
    if isinstance(style, SequenceParallel):
        return Cut(None, Shard(style.sequence_dim), Shard(style.sequence_dim), fsdp)
    return Cut(None, Replicate(), Replicate(), fsdp)


def attend_cut(lookup: Cut, signature: Signature) -> Cut:
    """Returns how `nnx.Embed.attend` runs on a table that is split for lookups.

    The query lies as the embeddings do that the lookup gives: it is the other end of the same stream.
    """
    if lookup.letter == "v":
        return Cut("v", lookup.leaves, Shard(signature.outputs["v"]), lookup.fsdp)
    if lookup.letter == "d":
        return Cut("d", Shard(signature.inputs["d"]), Replicate(), lookup.fsdp)
    return lookup


@dataclass(frozen=True)
class Run:
    """A call of a module's method on global arrays."""

    module: Any
    """An `nnx.Module`."""

    method: Callable[..., Array]
    """Called with a module of the class that its author gave it, and the input."""

    signature: Signature
    cut: Cut
    name: str
    """Name for the profile and for errors."""

    context: bool = False
    """Whether it is in a module whose sequences cp divides."""

    def __call__(self, x: Any) -> Array:
        """Returns the result, a global array; `x` is one, or `Copies`."""
        copied = isinstance(x, Copies) and x.copies is not None and self._splits_columns
        x = x if copied else jnp.asarray(x)
        leading = leading_of(x.shape, self.signature, context=self.context)
        stored = all_differ(leading)
        weights = {name: getattr(self.module, name)[...] for name in self._names}
        specs = {name: self._spec(name, weight.shape, stored) for name, weight in weights.items()}
        leaves = activation_spec(self._body_leaves, x.ndim + self.signature.more_dims, leading)
        spec, array = (copies_spec(x), x.copies) if copied else (activation_spec(self.cut.arrives, x.ndim, leading), x)
        body = partial(self._body, specs if stored else None, copied)
        run = device_view(body, self.name, in_specs=(spec, *specs.values()), out_specs=leaves)
        return self._leave(run(array, *weights.values()), leading)

    @property
    def _splits_columns(self) -> bool:
        return self.cut.letter in self.signature.outputs

    @property
    def _sums(self) -> bool:
        return self.cut.letter is not None and not self._splits_columns

    @property
    def _names(self) -> list[str]:
        return [name for name in self.signature.params if getattr(self.module, name) is not None]

    @property
    def _late(self) -> list[str]:
        """Parameters to be added once, after the reduction: those without the letter that is summed over."""
        return [n for n in self._names if self._sums and self.cut.tp_dim(self.signature.params[n]) is None]

    @property
    def _body_leaves(self) -> Layout:
        split = self._splits_columns and self.cut.letter is not None
        return Shard(self.signature.outputs[self.cut.letter]) if split else self.cut.leaves  # type: ignore[index]

    def _spec(self, name: str, shape: tuple[int, ...], stored: bool) -> PartitionSpec:
        """Returns the spec as stored; gathered, where devices that store its parts compute the same tokens."""
        sizes = mesh_sizes(current_mesh())
        spec = stored_spec(shape, self.cut.tp_dim(self.signature.params[name]), sizes, fsdp=self.cut.fsdp)
        return spec if stored else gathered(spec)

    def _leave(self, y: Array, leading: Leading) -> Array:
        if same_layout(self._body_leaves, self.cut.leaves, y.ndim):
            return y
        spec = activation_spec(self.cut.leaves, y.ndim, leading)
        check_divides(self.name, y.shape, spec)
        return constrain(y, spec)

    def _body(self, specs: Mapping[str, PartitionSpec] | None, copied: bool, x: Array, *shards: Array) -> Array:
        if self._splits_columns:
            x = x[0] if copied else enter_parallel(x, _dim(self.cut.arrives, x.ndim))
        weights = {n: self._load(n, shard, specs) for n, shard in zip(self._names, shards, strict=True)}
        local = self._local({n: w for n, w in weights.items() if n not in self._late})
        if not self._sums:
            return self.method(local, x)
        look_up = isinstance(self.module, nnx.Embed) and not self.signature.inputs
        y = _look_up(self.method, local, x, self.module.num_embeddings) if look_up else self.method(local, x)
        split = _dim(self.cut.leaves, y.ndim)
        if split is not None and y.shape[split] % axis_size(TP):
            raise ValueError(
                f"{self.name}: leaves as {self.cut.leaves}, and dim {split} is {y.shape[split]}, not divisible by "
                f"tp={axis_size(TP)}"
            )
        y = leave_parallel(y, split)
        for name in self._late:
            y = y + self._beside(weights[name].astype(y.dtype), self.signature.params[name], y)
        return y

    def _load(self, name: str, shard: Array, specs: Mapping[str, PartitionSpec] | None) -> Array:
        if specs is None:
            return shard
        data_split = isinstance(self.cut.leaves if name in self._late else self.cut.arrives, Shard)
        return load_weight(
            shard,
            dim_over(STORAGE, specs[name]),
            compute=self._compute_dtype(shard),
            reduce=jnp.promote_types(shard.dtype, jnp.float32),
            used_by_all_tp=dim_over(TP, specs[name]) is None and (self._splits_columns or data_split),
        )

    def _compute_dtype(self, shard: Array) -> Any:
        """Returns the dtype to which the module would cast its weights anyway: cast before, the gather moves less."""
        dtype = self.module.dtype
        return dtype if dtype is not None and self.module.promote_dtype is promote_dtype else shard.dtype

    def _local(self, weights: Mapping[str, Array]) -> nnx.Module:
        """Returns the module as this device sees it."""
        local: Any = nnx.clone(self.module)
        set_class(local, original_class(self.module))
        for name, weight in weights.items():
            setattr(local, name, nnx.Param(weight))
        for name in self._late:
            setattr(local, name, nnx.data(None))
            local.use_bias = False
        for name, letters in self.signature.attributes.items():
            if (dim := self.cut.tp_dim(letters)) is not None:
                setattr(local, name, _divided(getattr(local, name), dim))
        return local

    def _beside(self, weight: Array, letters: str, y: Array) -> Array:
        """Returns a weight in the shape of the result, of which this device may hold a part of one dim."""
        dims = [self.signature.outputs[letter] % y.ndim for letter in letters]
        shape = [1] * y.ndim
        for dim, size in zip(dims, weight.shape, strict=True):
            shape[dim] = size
        weight = weight.reshape(shape)
        split = _dim(self.cut.leaves, y.ndim)
        if split not in dims:
            return weight
        return lax.dynamic_slice_in_dim(weight, axis_index(TP) * y.shape[split], y.shape[split], split)


def leading_of(shape: tuple[int, ...], signature: Signature, *, context: bool) -> Leading:
    """Returns what divides the first dims of a module's input, and of its result."""
    context = context and len(shape) > 1 and signature.keeps_positions(len(shape))
    return leading_axes(shape, signature.batch_ndim or len(shape) + 1, 2, context=context)


def _dim(layout: Layout, ndim: int) -> int | None:
    return layout.dim % ndim if isinstance(layout, Shard) else None


def _divided(sizes: int | tuple[int, ...], dim: int) -> int | tuple[int, ...]:
    tp = axis_size(TP)
    return sizes // tp if isinstance(sizes, int) else (*sizes[:dim], sizes[dim] // tp, *sizes[dim + 1 :])


def _look_up(method: Callable[..., Array], local: Any, ids: Array, vocabulary: int) -> Array:
    """Returns rows of this device's part of the table; zero where another has them; for no id at all, as Flax does."""
    ids = jnp.where(ids < 0, ids + vocabulary, ids)
    rows = local.num_embeddings
    position = ids - axis_index(TP) * rows
    mine = (position >= 0) & (position < rows)
    exists = (ids >= 0) & (ids < vocabulary)
    found = method(local, jnp.where(mine, position, jnp.where(exists, 0, rows)))
    return jnp.where((mine | ~exists)[..., None], found, 0)
