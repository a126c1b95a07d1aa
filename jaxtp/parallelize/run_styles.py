"""Runs parallel modules: each gets a subclass for its style.

Without a mesh in context it runs the original code.

A stock module's method runs on shards: a copy of the module with this device's parameters and sizes
runs Flax's code. The split letter (`stock.py`) decides the communication: if the result has the
letter, it is split by columns; if not, each device has a partial sum. Other modules run on global
arrays with gathered parameters.
"""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.dtypes import promote_dtype
from jax import Array, lax
from jax.sharding import PartitionSpec

from jaxtp.collectives import (
    WeightDtypes,
    WeightLayout,
    axis_index,
    axis_size,
    check_divides,
    constrain,
    device_view,
    enter_parallel,
    gather_weight,
    leave_parallel,
    load_weight,
)
from jaxtp.mesh import BATCH, CONTEXT, CP, STORAGE, TOKENS, TP, axes_of, current_mesh, mesh_sizes
from jaxtp.parallelize.layouts import (
    Copies,
    LeadingAxes,
    activation_spec,
    as_tuple,
    change_layout,
    change_layouts,
    constrain_layout,
    declared_spec,
    dim_over,
    gathered_spec,
    leading_axes,
    split_dim,
    stored_spec,
)
from jaxtp.parallelize.module_wrappers import CONTAINERS, original_class, set_class, subclass
from jaxtp.parallelize.stock import ATTEND, Signature, parameters_of, signature
from jaxtp.parallelize.styles import (
    Colwise,
    ContextParallel,
    Layout,
    PrepareInput,
    PrepareOutput,
    Replicate,
    Rowwise,
    SequenceParallel,
    Shard,
    Style,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Role:
    """How a module runs in a parallel model."""

    # With None, the module's code is unchanged, and its parameters are gathered over fsdp and cp.
    style: Style | None
    fsdp: bool  # its parameters are stored split over fsdp and cp
    context: bool  # it is in a `ContextParallel` module


def role_of(module: nnx.Module) -> Role | None:
    """Returns a parallel module's role; None for other modules."""
    return getattr(type(module), "_jaxtp_role", None)


def swap_class(module: nnx.Module, role: Role) -> None:
    """Sets a module's class for a role."""
    set_class(module, _class_for(original_class(module), role))


@functools.cache
def _class_for(cls: type, role: Role) -> type:
    runs = {"__call__": _call} | ({"attend": _attend} if issubclass(cls, nnx.Embed) else {})
    wraps = {
        name: functools.partial(_run, functools.partial(run, cls, role))
        for name, run in runs.items()
    }
    return subclass(cls, wraps, _jaxtp_role=role)


def _run(
    parallel: Callable[..., Any], original: Callable[..., Any], /, *args: object, **kwargs: object
) -> Any:
    return (original if current_mesh() is None else parallel)(*args, **kwargs)


def _call(cls: type, role: Role, module: nnx.Module, /, *args: object, **kwargs: object) -> Any:
    style = role.style
    context = role.context
    if isinstance(style, ContextParallel):
        args, kwargs = _split_sequence(cls, style, args, kwargs)
    if isinstance(style, PrepareInput):
        args, kwargs = _prepare_arguments(cls, style, args, kwargs, context)
    result = _compute(cls, role, module, *args, **kwargs)
    if isinstance(style, PrepareOutput):
        return change_layouts(
            result, style.output_layouts, style.desired_output_layouts, context=context
        )
    if isinstance(style, SequenceParallel):
        return change_layout(
            result, Shard(style.sequence_dim), style.output_layouts, context=context
        )
    return result


def _split_sequence(
    cls: type, style: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    name = _first_argument(cls)
    x: Any = args[0] if args else kwargs.get(name)
    if axis_size(CP) == 1 or not hasattr(x, "dtype"):
        return args, kwargs
    if x.ndim < 2 or (x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.inexact)):
        raise ValueError(
            f"{cls.__name__} as ContextParallel takes ids [B, T] or an activation [B, T, ...], "
            f"whose T is split over cp={axis_size(CP)}; its first argument is "
            f"{x.dtype}{list(x.shape)}, which has no sequence: use cp=1"
        )
    check_divides(f"{cls.__name__} as ContextParallel", x.shape, PartitionSpec(None, CONTEXT))
    if isinstance(x, Copies) or not (leading := leading_axes(x.shape, 2, 2, context=True)):
        return args, kwargs
    layout = as_tuple(style.input_layouts)[0] or Replicate()
    x = constrain(jnp.asarray(x), activation_spec(layout, x.ndim, leading))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})


def _prepare_arguments(
    cls: type, style: PrepareInput, args: tuple[Any, ...], kwargs: dict[str, Any], context: bool
) -> Arguments:
    desired = as_tuple(style.desired_input_layouts)
    if any(layout is not None for layout in desired[len(args) :]):
        raise TypeError(
            f"{cls.__name__} as {style} was called with {len(args)} positional arguments; for "
            "keyword arguments use input_kwarg_layouts and desired_input_kwarg_layouts"
        )
    args = change_layouts(args, style.input_layouts, desired, context=context)
    before = style.input_kwarg_layouts or {}
    after = style.desired_input_kwarg_layouts or {}
    return args, {
        k: change_layout(v, before.get(k), after.get(k), context=context) for k, v in kwargs.items()
    }


def _compute(cls: type, role: Role, module: nnx.Module, /, *args: object, **kwargs: object) -> Any:
    if not args and (name := _first_argument(cls)) in kwargs:
        args = (kwargs[name],)
        kwargs = {k: v for k, v in kwargs.items() if k != name}
    equation = {name: value for name, value in kwargs.items() if name == "einsum_str"}
    dims = signature(module, **equation) if args and not _has_arrays((args[1:], kwargs)) else None
    splits = isinstance(role.style, Colwise | Rowwise)
    if dims is None and splits:
        raise TypeError(f"{cls.__name__} as {role.style} takes one array and no others")
    if dims is None or not (splits or _runs_on_shards(module, args[0], dims, role)):
        return _on_global_arrays(cls, role, module, *args, **kwargs)

    def method(local: nnx.Module, x: object) -> Any:
        return cls.__call__(local, x, *args[1:], **kwargs)  # type: ignore[operator]

    return _ShardedCall(
        module, method, dims, role, resolve_style(role.style, dims), _call_name(cls, role)
    )(args[0])


@functools.cache
def _first_argument(cls: type) -> str:
    """Returns `self` if `__call__` has no other argument."""
    return list(inspect.signature(cls.__call__).parameters)[:2][-1]  # type: ignore[operator]


def _attend(cls: type, role: Role, module: nnx.Embed, /, query: object, **kwargs: object) -> Any:
    lookup = signature(module)
    splits = isinstance(role.style, Colwise | Rowwise)
    if lookup is None or not (splits or _runs_on_shards(module, query, ATTEND, role)):
        with _gathered_parameters(module, role):
            return cls.attend(module, jnp.asarray(query), **kwargs)  # type: ignore[attr-defined]
    style = resolve_style(role.style, lookup)
    if style.letter == "v":  # the query has the layout of a lookup's result
        style = ResolvedStyle("v", style.output_layout, Shard(ATTEND.outputs["v"]))
    elif style.letter == "d":
        style = ResolvedStyle("d", Shard(ATTEND.inputs["d"]), Replicate())
    attend = functools.partial(cls.attend, **kwargs)  # type: ignore[attr-defined]
    return _ShardedCall(module, attend, ATTEND, role, style, f"{_call_name(cls, role)}_attend")(
        query
    )


def _on_global_arrays(
    cls: type, role: Role, module: nnx.Module, /, *args: object, **kwargs: object
) -> Any:
    convolves = issubclass(cls, nnx.Conv | nnx.ConvTranspose) and axis_size(CP) > 1 and bool(args)
    if convolves:
        args = (_unsplit_window_dims(module, args[0]), *args[1:])
    if isinstance(role.style, SequenceParallel):
        layout = Shard(role.style.sequence_dim)
        args = (constrain_layout(args[0], layout, context=role.context), *args[1:])
    with _gathered_parameters(module, role):
        result = cls.__call__(module, *args, **kwargs)  # type: ignore[operator]
    if isinstance(role.style, SequenceParallel):
        return constrain_layout(result, layout, context=role.context)
    return _unsplit_window_dims(module, result) if convolves else result


def _unsplit_window_dims(module: Any, x: Any) -> Array:
    # Splits only the batch. Otherwise XLA splits the other dims over cp, and multiplies the
    # kernel's gradient by the number of replicas along the other axes (an openxla bug, seen in
    # jaxlib 0.10 and 0.12).
    x = jnp.asarray(x)
    leading = leading_axes(x.shape, len(module.kernel_size) + 2, context=False)
    divides = bool(leading) and x.shape[0] % axis_size(*BATCH) == 0
    return constrain(x, activation_spec(Replicate(), x.ndim, leading if divides else ()))


@contextmanager
def _gathered_parameters(module: nnx.Module, role: Role) -> Iterator[None]:
    before = dict(vars(module)) if role.fsdp else {}
    gathered = {name: _gather(value) for name, value in before.items()}
    changed = {name: value for name, value in gathered.items() if value is not before[name]}
    vars(module).update(changed)
    try:
        yield
    finally:
        vars(module).update(
            {n: before[n] for n, value in changed.items() if vars(module).get(n) is value}
        )


def _gather(value: object) -> Any:
    if isinstance(value, nnx.Param):
        spec = declared_spec(value, value.ndim)
        split = dim_over(STORAGE, spec) is not None
        return (
            value.replace(gather_weight(value[...], spec, gathered_spec(spec))) if split else value
        )
    if not isinstance(value, CONTAINERS):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
    gathered = [_gather(leaf) for leaf in leaves]
    return value if all(map(operator.is_, gathered, leaves)) else jax.tree.unflatten(tree, gathered)


def _leading_axes(shape: tuple[int, ...], dims: Signature, role: Role) -> LeadingAxes:
    """Returns the axes that split the first dims of a stock module's input and result."""
    context = role.context and len(shape) > 1 and dims.keeps_positions(len(shape))
    return leading_axes(shape, dims.batch_ndim or len(shape) + 1, 2, context=context)


def _runs_on_shards(module: nnx.Module, x: Any, dims: Signature, role: Role) -> bool:
    # Rows without a sequence are replicated over cp. The compiler splits products whose specs the
    # model declares.
    shape = x.shape if isinstance(x, Copies) else jnp.shape(x)
    divides = bool(_leading_axes(shape, dims, role)) and shape[0] % axis_size(*BATCH) == 0
    specs = [declared_spec(value, value.ndim) for value in parameters_of(module, dims).values()]
    return divides and all(set(axes_of(entry)) <= set(STORAGE) for spec in specs for entry in spec)


def _has_arrays(tree: object) -> bool:
    return any(
        hasattr(leaf, "dtype")
        for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Copies))
    )


def _call_name(cls: type, role: Role) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    return f"{words}_{type(role.style).__name__.lower()}" if role.style else words


@dataclass(frozen=True)
class ResolvedStyle:
    """A style applied to a module with a signature."""

    letter: str | None  # the letter that tp splits; None if parameters are replicated over tp
    input_layout: Layout
    output_layout: Layout

    def tp_dim(self, letters: str) -> int | None:
        """Returns the dim of a parameter that tp splits."""
        return (
            letters.index(self.letter)
            if self.letter is not None and self.letter in letters
            else None
        )


def resolve_style(style: Style | None, dims: Signature) -> ResolvedStyle:
    """Resolves a style; None and layout-only styles replicate parameters over tp."""
    if isinstance(style, Colwise) and dims.column:
        split = Shard(dims.outputs[dims.column])
        return ResolvedStyle(dims.column, style.input_layouts, style.output_layouts or split)
    if isinstance(style, Rowwise) and dims.row:
        dim = dims.inputs.get(dims.row)
        return ResolvedStyle(
            dims.row, Replicate() if dim is None else Shard(dim), style.output_layouts
        )
    layout = Shard(style.sequence_dim) if isinstance(style, SequenceParallel) else Replicate()
    return ResolvedStyle(None, layout, layout)


@dataclass(frozen=True)
class _ShardedCall:
    """A stock module's method on global arrays, computed on shards."""

    module: Any  # an `nnx.Module`
    method: Callable[..., Array]  # called with a module of the original class, and the input
    dims: Signature
    role: Role
    style: ResolvedStyle
    name: str  # name in profiles and errors

    def __call__(self, x: Any) -> Array:
        """Returns a global array."""
        has_copies = isinstance(x, Copies) and x.copies is not None and self.splits_columns
        x = x if has_copies else jnp.asarray(x)
        leading = _leading_axes(x.shape, self.dims, self.role)
        # If all token axes split the input, the body gathers the stored shards; otherwise they are
        # gathered before it.
        gathers_in_body = {axis for axes in leading for axis in axes} == set(TOKENS)
        parameters = parameters_of(self.module, self.dims)
        sizes = mesh_sizes(current_mesh())
        weights = {name: parameter[...] for name, parameter in parameters.items()}
        tp_dims = {name: self.style.tp_dim(self.dims.params[name]) for name in parameters}
        specs = {
            n: stored_spec(p, p.ndim, tp_dims[n], sizes, fsdp=self.role.fsdp)
            for n, p in parameters.items()
        }
        specs = (
            specs
            if gathers_in_body
            else {name: gathered_spec(spec) for name, spec in specs.items()}
        )
        split = (
            Shard(self.dims.outputs[self.style.letter or ""])
            if self.splits_columns
            else self.style.output_layout
        )
        out_spec = activation_spec(split, x.ndim + self.dims.more_dims, leading)
        in_spec = activation_spec(self.style.input_layout, x.ndim, leading)
        array = x
        if has_copies:
            in_spec = PartitionSpec(TP, *x.spec)
            array = x.copies
        body = functools.partial(self.body, specs if gathers_in_body else None, has_copies)
        run = device_view(body, self.name, in_specs=(in_spec, *specs.values()), out_specs=out_spec)
        y = run(array, *weights.values())
        if split_dim(split, y.ndim) == split_dim(self.style.output_layout, y.ndim):
            return y
        spec = activation_spec(self.style.output_layout, y.ndim, leading)
        check_divides(self.name, y.shape, spec)
        return constrain(y, spec)

    @property
    def splits_columns(self) -> bool:
        return self.style.letter in self.dims.outputs

    @property
    def params(self) -> list[str]:
        return list(parameters_of(self.module, self.dims))

    @property
    def post_reduction_params(self) -> list[str]:
        """Parameters without the summed letter (a bias), added once after the reduction."""
        sums = self.style.letter is not None and not self.splits_columns
        return [
            name
            for name in self.params
            if sums and self.style.tp_dim(self.dims.params[name]) is None
        ]

    def body(
        self, specs: Mapping[str, PartitionSpec] | None, has_copies: bool, x: Array, *shards: Array
    ) -> Array:
        if self.splits_columns:
            x = (
                x[0]
                if has_copies
                else enter_parallel(x, split_dim(self.style.input_layout, x.ndim))
            )
        weights = {
            n: self.load(n, shard, specs) for n, shard in zip(self.params, shards, strict=True)
        }
        local = self.local_module(
            {n: w for n, w in weights.items() if n not in self.post_reduction_params}
        )
        if self.style.letter is None or self.splits_columns:
            return self.method(local, x)
        is_lookup = isinstance(self.module, nnx.Embed) and not self.dims.inputs
        y = (
            _masked_lookup(self.method, local, x, self.module.num_embeddings)
            if is_lookup
            else self.method(local, x)
        )
        dim = split_dim(self.style.output_layout, y.ndim)
        if dim is not None and y.shape[dim] % axis_size(TP):
            raise ValueError(
                f"{self.name}: dim {dim} of its {self.style.output_layout} result is "
                f"{y.shape[dim]}, not divisible by "
                f"tp={axis_size(TP)}"
            )
        y = leave_parallel(y, dim)
        for name in self.post_reduction_params:
            y = y + self.broadcastable(weights[name].astype(y.dtype), self.dims.params[name], y)
        return y

    def load(self, name: str, shard: Array, specs: Mapping[str, PartitionSpec] | None) -> Array:
        if specs is None:
            return shard
        # Casts to the compute dtype before the gather, which then sends fewer bytes.
        casts = self.module.dtype is not None and self.module.promote_dtype is promote_dtype
        layout = (
            self.style.output_layout
            if name in self.post_reduction_params
            else self.style.input_layout
        )
        compute = self.module.dtype if casts else shard.dtype
        dtypes = WeightDtypes(compute, jnp.promote_types(shard.dtype, jnp.float32), compute)
        used_by_all_tp = dim_over(TP, specs[name]) is None and (
            self.splits_columns or isinstance(layout, Shard)
        )
        layout_of_weight = WeightLayout(
            fsdp_dim=dim_over(STORAGE, specs[name]), used_by_all_tp=used_by_all_tp
        )
        return load_weight(shard, dtypes, layout_of_weight)

    def local_module(self, weights: Mapping[str, Array]) -> nnx.Module:
        local: Any = nnx.clone(self.module)
        set_class(local, original_class(self.module))
        for name, weight in weights.items():
            setattr(local, name, nnx.Param(weight))
        for name in self.post_reduction_params:
            setattr(local, name, nnx.data(None))
            local.use_bias = False
        for name, letters in self.dims.attributes.items():
            if (dim := self.style.tp_dim(letters)) is not None:
                sizes = getattr(local, name)
                tp = axis_size(TP)
                divided = (
                    sizes // tp
                    if isinstance(sizes, int)
                    else (*sizes[:dim], sizes[dim] // tp, *sizes[dim + 1 :])
                )
                setattr(local, name, divided)
        return local

    def broadcastable(self, weight: Array, letters: str, y: Array) -> Array:
        """Reshapes a weight to broadcast against `y`, sliced where tp splits `y`."""
        dims = [self.dims.outputs[letter] % y.ndim for letter in letters]
        shape = [1] * y.ndim
        for dim, size in zip(dims, weight.shape, strict=True):
            shape[dim] = size
        weight = weight.reshape(shape)
        split = split_dim(self.style.output_layout, y.ndim)
        if split not in dims:
            return weight
        return lax.dynamic_slice_in_dim(
            weight, axis_index(TP) * y.shape[split], y.shape[split], split
        )


def _masked_lookup(method: Callable[..., Array], local: Any, ids: Array, vocabulary: int) -> Array:
    """Looks up ids in this device's rows; ids of other rows give zeros.

    Invalid ids behave as in Flax.
    """
    ids = jnp.where(ids < 0, ids + vocabulary, ids)
    rows = local.num_embeddings
    position = ids - axis_index(TP) * rows
    mine = (position >= 0) & (position < rows)
    exists = (ids >= 0) & (ids < vocabulary)
    embeddings = method(local, jnp.where(mine, position, jnp.where(exists, 0, rows)))
    return jnp.where((mine | ~exists)[..., None], embeddings, 0)
