"""Runs parallel modules: each gets a subclass for its style.

The subclass runs the original code if there is no mesh in context.

A stock module's method runs on shards: a copy of the module with this device's parameters and sizes
runs Flax's code. The split letter (`stock.py`) decides the communication: if the result has the
letter, it is split by columns; if not, each device has a partial sum. Other modules run on global
arrays with gathered parameters.
"""

import functools
import inspect
import itertools
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
    leave_parallel,
    load_weight,
    with_gradient,
)
from jaxtp.mesh import BATCH, CONTEXT, CP, STORAGE, TOKENS, TP, axes_of, current_mesh, mesh_sizes
from jaxtp.plans.layouts import (
    Copies,
    LeadingAxes,
    Shape,
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
from jaxtp.plans.module_wrappers import (
    CONTAINERS,
    Method,
    original_class,
    set_class,
    subclass,
)
from jaxtp.plans.stock import ATTEND, Signature, parameters_of, signature
from jaxtp.plans.styles import (
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
    wraps = {"__call__": functools.partial(_run, _call, cls, role)}
    if issubclass(cls, nnx.Embed):
        wraps["attend"] = functools.partial(_run, _attend, cls, role)
    return subclass(cls, wraps, _jaxtp_role=role)


def _run(
    on_mesh: Method,
    cls: type,
    role: Role,
    original: Method,
    module: nnx.Module,
    /,
    *args: object,
    **kwargs: object,
) -> Any:
    if current_mesh() is None:
        return original(module, *args, **kwargs)
    return on_mesh(cls, role, module, *args, **kwargs)


def _call(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    style = role.style
    context = role.context
    if isinstance(style, ContextParallel):
        args, kwargs = _split_sequence(cls, style, args, kwargs)
    if isinstance(style, PrepareInput):
        args, kwargs = _prepare_arguments(cls, style, args, kwargs, context)
    result = _compute(cls, role, module, *args, **kwargs)
    if isinstance(style, PrepareOutput):
        before = style.output_layouts
        return change_layouts(result, before, style.desired_output_layouts, context=context)
    if isinstance(style, SequenceParallel):
        before = Shard(style.sequence_dim)
        return change_layout(result, before, style.output_layouts, context=context)
    return result


def _split_sequence(
    cls: type, style: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Arguments:
    name = _first_parameter(cls).name
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
    leading = leading_axes(x.shape, 2, 2, context=True)
    layout = as_tuple(style.input_layouts)[0] or Replicate()
    x = constrain(jnp.asarray(x), activation_spec(layout, x.ndim, leading))
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, name: x}


def _prepare_arguments(
    cls: type, style: PrepareInput, args: tuple[Any, ...], kwargs: dict[str, Any], context: bool
) -> Arguments:
    desired = as_tuple(style.desired_input_layouts)
    if set(desired[len(args) :]) - {None}:
        raise TypeError(
            f"{cls.__name__} as {style} was called with {len(args)} positional arguments; for "
            "keyword arguments use input_kwarg_layouts and desired_input_kwarg_layouts"
        )
    args = change_layouts(args, style.input_layouts, desired, context=context)
    before = style.input_kwarg_layouts or {}
    after = style.desired_input_kwarg_layouts or {}
    for name, value in kwargs.items():
        kwargs[name] = change_layout(value, before.get(name), after.get(name), context=context)
    return args, kwargs


def _compute(cls: type, role: Role, module: nnx.Module, /, *args: object, **kwargs: object) -> Any:
    name = _first_parameter(cls).name
    if not args and name in kwargs:
        args = (kwargs.pop(name),)
    dims = None
    # An equation in the call would replace the module's own, which `signature` reads.
    if args and not _has_arrays((args[1:], kwargs)) and "einsum_str" not in kwargs:
        dims = signature(module)
    if dims is None and isinstance(role.style, Colwise | Rowwise):
        raise TypeError(f"{cls.__name__} as {role.style} takes one array and no others")
    if dims is None or not _runs_on_shards(module, args[0], dims, role):
        return _on_global_arrays(cls, role, module, *args, **kwargs)

    def method(local: nnx.Module, x: object) -> Any:
        return cls.__call__(local, x, *args[1:], **kwargs)  # type: ignore[operator]

    style = resolve_style(role.style, dims)
    plan = _plan_call(module, args[0], dims, role, style, _call_name(cls, role))
    return _run_on_shards(plan, method, args[0])


@functools.cache
def _first_parameter(cls: type) -> inspect.Parameter:
    """Returns the first parameter of `__call__` after `self`; `self` if there is no other."""
    parameters = inspect.signature(cls.__call__).parameters  # type: ignore[operator]
    return list(parameters.values())[:2][-1]


def _attend(cls: type, role: Role, module: nnx.Embed, /, query: object, **kwargs: object) -> Any:
    lookup = signature(module)
    if lookup is None or not _runs_on_shards(module, query, ATTEND, role):
        with _gathered_parameters(module, role):
            return cls.attend(module, jnp.asarray(query), **kwargs)  # type: ignore[attr-defined]
    style = resolve_style(role.style, lookup)
    if style.letter == "v":  # the query has the layout of a lookup's result
        style = ResolvedStyle("v", style.output_layout, Shard(ATTEND.outputs["v"]))
    elif style.letter == "d":
        style = ResolvedStyle("d", Shard(ATTEND.inputs["d"]), Replicate())
    attend = functools.partial(cls.attend, **kwargs)  # type: ignore[attr-defined]
    plan = _plan_call(module, query, ATTEND, role, style, f"{_call_name(cls, role)}_attend")
    return _run_on_shards(plan, attend, query)


def _on_global_arrays(
    cls: type, role: Role, module: nnx.Module, /, *args: object, **kwargs: object
) -> Any:
    convolves = issubclass(cls, nnx.Conv | nnx.ConvTranspose) and axis_size(CP) > 1 and bool(args)
    if convolves:
        args = (_unsplit_window_dims(module, args[0]), *args[1:])
    if isinstance(role.style, SequenceParallel):
        layout = Shard(role.style.sequence_dim)
        args = (constrain_layout(args[0], layout, context=role.context), *args[1:])
    first = _first_parameter(cls)
    if first.kind is first.KEYWORD_ONLY and args:
        kwargs[first.name], *args = args  # type: ignore[assignment]
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
    if leading and x.shape[0] % axis_size(*BATCH):
        leading = ()
    return constrain(x, activation_spec(Replicate(), x.ndim, leading))


@contextmanager
def _gathered_parameters(module: nnx.Module, role: Role) -> Iterator[None]:
    attributes = vars(module)
    stored = dict(attributes) if role.fsdp else {}
    gathered = dict(zip(stored, map(_gather, stored.values()), strict=True))
    attributes |= gathered
    try:
        yield
    finally:
        # An attribute that the module has set itself keeps its new value.
        for name, value in gathered.items():
            if attributes.get(name) is value:
                attributes[name] = stored[name]


def _gather(value: object) -> Any:
    if isinstance(value, nnx.Param):
        spec = declared_spec(value, value.ndim)
        if dim_over(STORAGE, spec) is None:
            return value

        def gather(weight: Array) -> Array:
            return constrain(weight, gathered_spec(spec))

        load = with_gradient(gather, lambda grad: constrain(grad, spec))
        return value.replace(load(value[...]))
    if not isinstance(value, CONTAINERS):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
    gathered = list(map(_gather, leaves))
    if all(map(operator.is_, gathered, leaves)):
        return value
    return jax.tree.unflatten(tree, gathered)


def _leading_axes(shape: Shape, dims: Signature, role: Role) -> LeadingAxes:
    """Returns the axes that split the first dims of a stock module's input and result."""
    context = role.context and len(shape) > 1 and dims.keeps_positions(len(shape))
    return leading_axes(shape, dims.batch_ndim or len(shape) + 1, 2, context=context)


def _runs_on_shards(module: nnx.Module, x: Any, dims: Signature, role: Role) -> bool:
    if isinstance(role.style, Colwise | Rowwise):
        return True
    # Rows without a sequence are replicated over cp. If the model declares specs over other axes,
    # the compiler splits the product.
    shape = _shape_of(x)
    has_batch = bool(_leading_axes(shape, dims, role))
    divides = has_batch and shape[0] % axis_size(*BATCH) == 0
    for parameter in parameters_of(module, dims).values():
        for entry in declared_spec(parameter, parameter.ndim):
            if not set(axes_of(entry)) <= set(STORAGE):
                return False
    return divides


def _shape_of(x: Any) -> Shape:
    return x.shape if isinstance(x, Copies) else jnp.shape(x)


def _has_arrays(tree: object) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Copies))
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def _call_name(cls: type, role: Role) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    if role.style is None:
        return words
    return f"{words}_{type(role.style).__name__.lower()}"


@dataclass(frozen=True)
class ResolvedStyle:
    """A style applied to a module with a signature."""

    letter: str | None  # the letter that tp splits; None if parameters are replicated over tp
    input_layout: Layout
    output_layout: Layout

    def tp_dim(self, letters: str) -> int | None:
        """Returns the dim of a parameter that tp splits."""
        if self.letter is None or self.letter not in letters:
            return None
        return letters.index(self.letter)


def resolve_style(style: Style | None, dims: Signature) -> ResolvedStyle:
    """Resolves a style; None and layout-only styles replicate parameters over tp."""
    if isinstance(style, Colwise) and dims.column:
        split = Shard(dims.outputs[dims.column])
        return ResolvedStyle(dims.column, style.input_layouts, style.output_layouts or split)
    if isinstance(style, Rowwise) and dims.row:
        input_layout: Layout = Replicate()
        if dims.row in dims.inputs:
            input_layout = Shard(dims.inputs[dims.row])
        return ResolvedStyle(dims.row, input_layout, style.output_layouts)
    layout = Shard(style.sequence_dim) if isinstance(style, SequenceParallel) else Replicate()
    return ResolvedStyle(None, layout, layout)


@dataclass(frozen=True)
class _CallPlan:
    """How a stock module's method runs on shards: specs, and what its body communicates."""

    name: str  # name in profiles and errors
    module: Any
    dims: Signature
    style: ResolvedStyle
    has_copies: bool  # the input is `Copies`, and each device reads its own copy
    input_spec: PartitionSpec
    stored_specs: Mapping[str, PartitionSpec]  # specs of the parameters
    gathers_in_body: bool  # else the parameters are gathered before the body
    output_spec: PartitionSpec  # spec of the body's result
    final_spec: PartitionSpec  # spec of the call's result

    @property
    def weight_specs(self) -> list[PartitionSpec]:
        """The specs of the weights that the body takes."""
        specs = list(self.stored_specs.values())
        if self.gathers_in_body:
            return specs
        return list(map(gathered_spec, specs))

    @property
    def splits_columns(self) -> bool:
        """Whether the body's result is split over tp; each device has all its terms."""
        return self.style.letter in self.dims.outputs

    @property
    def sums(self) -> bool:
        """Whether each device has a partial sum of the result."""
        return self.style.letter is not None and not self.splits_columns

    def is_added_last(self, name: str) -> bool:
        """Returns whether a parameter (a bias) is added once, after the sum over tp."""
        return self.sums and self.style.tp_dim(self.dims.params[name]) is None


def _plan_call(
    module: nnx.Module, x: Any, dims: Signature, role: Role, style: ResolvedStyle, name: str
) -> _CallPlan:
    shape = _shape_of(x)
    leading = _leading_axes(shape, dims, role)
    output = style.output_layout
    input_spec = activation_spec(style.input_layout, len(shape), leading)
    has_copies = False
    if style.letter is not None and style.letter in dims.outputs:
        output = Shard(dims.outputs[style.letter])
        has_copies = isinstance(x, Copies) and x.copies is not None
    if has_copies:
        input_spec = PartitionSpec(TP, *x.spec)
    sizes = mesh_sizes(current_mesh())
    stored_specs = {}
    for parameter_name, parameter in parameters_of(module, dims).items():
        tp_dim = style.tp_dim(dims.params[parameter_name])
        spec = stored_spec(parameter, parameter.ndim, tp_dim, sizes, fsdp=role.fsdp)
        stored_specs[parameter_name] = spec
    output_ndim = len(shape) + dims.more_dims
    return _CallPlan(
        name=name,
        module=module,
        dims=dims,
        style=style,
        has_copies=has_copies,
        input_spec=input_spec,
        stored_specs=stored_specs,
        # If all token axes split the input, the body gathers the stored shards.
        gathers_in_body={*itertools.chain.from_iterable(leading)} == set(TOKENS),
        output_spec=activation_spec(output, output_ndim, leading),
        final_spec=activation_spec(style.output_layout, output_ndim, leading),
    )


def _run_on_shards(plan: _CallPlan, method: Callable[..., Array], x: Any) -> Array:
    """Returns a stock module's result, a global array.

    `method` is called with a module of the original class, and the input.
    """
    array = x.copies if plan.has_copies else jnp.asarray(x)
    weights = [parameter[...] for parameter in parameters_of(plan.module, plan.dims).values()]
    run = device_view(
        functools.partial(_body, plan, method),
        plan.name,
        in_specs=(plan.input_spec, *plan.weight_specs),
        out_specs=plan.output_spec,
    )
    y = run(array, *weights)
    if plan.final_spec == plan.output_spec:
        return y
    check_divides(plan.name, y.shape, plan.final_spec)
    return constrain(y, plan.final_spec)


def _body(plan: _CallPlan, method: Callable[..., Array], x: Array, *shards: Array) -> Array:
    style = plan.style
    if plan.has_copies:
        x = x[0]
    elif plan.splits_columns:
        x = enter_parallel(x, split_dim(style.input_layout, x.ndim))
    weights = {}
    for name, shard in zip(plan.stored_specs, shards, strict=True):
        weights[name] = shard
        if plan.gathers_in_body:
            weights[name] = _load(plan, name, shard)
    local = _local_module(plan, weights)
    if plan.sums and isinstance(plan.module, nnx.Embed) and not plan.dims.inputs:
        y = _masked_lookup(method, local, x, plan.module.num_embeddings)
    else:
        y = method(local, x)
    if not plan.sums:
        return y
    dim = split_dim(style.output_layout, y.ndim)
    if dim is not None and y.shape[dim] % axis_size(TP):
        raise ValueError(
            f"{plan.name}: dim {dim} of its {style.output_layout} result is {y.shape[dim]}, not "
            f"divisible by tp={axis_size(TP)}"
        )
    y = leave_parallel(y, dim)
    for name, weight in weights.items():
        if plan.is_added_last(name):
            y = y + _broadcastable(plan, weight.astype(y.dtype), plan.dims.params[name], y)
    return y


def _load(plan: _CallPlan, name: str, shard: Array) -> Array:
    module = plan.module
    spec = plan.stored_specs[name]
    # Casts to the compute dtype before the gather, which then sends fewer bytes.
    casts = module.dtype is not None and module.promote_dtype is promote_dtype
    compute = module.dtype if casts else shard.dtype
    dtypes = WeightDtypes(compute, jnp.promote_types(shard.dtype, jnp.float32), compute)
    style = plan.style
    layout = style.output_layout if plan.is_added_last(name) else style.input_layout
    used_by_all_tp = plan.splits_columns or isinstance(layout, Shard)
    layout_of_weight = WeightLayout(
        storage_dim=dim_over(STORAGE, spec),
        used_by_all_tp=used_by_all_tp and dim_over(TP, spec) is None,
    )
    return load_weight(shard, dtypes, layout_of_weight)


def _local_module(plan: _CallPlan, weights: Mapping[str, Array]) -> nnx.Module:
    """Returns a copy of the module with this device's weights and sizes."""
    local: Any = nnx.clone(plan.module)
    set_class(local, original_class(plan.module))
    for name, weight in weights.items():
        if plan.is_added_last(name):
            setattr(local, name, nnx.data(None))
            local.use_bias = False
        else:
            setattr(local, name, nnx.Param(weight))
    tp = axis_size(TP)
    for name, letters in plan.dims.attributes.items():
        dim = plan.style.tp_dim(letters)
        if dim is None:
            continue
        sizes = getattr(local, name)
        if isinstance(sizes, int):
            sizes //= tp
        else:
            sizes = (*sizes[:dim], sizes[dim] // tp, *sizes[dim + 1 :])
        setattr(local, name, sizes)
    return local


def _broadcastable(plan: _CallPlan, weight: Array, letters: str, y: Array) -> Array:
    """Reshapes a weight to broadcast against `y`, sliced where tp splits `y`."""
    shape = [1] * y.ndim
    for letter, size in zip(letters, weight.shape, strict=True):
        shape[plan.dims.outputs[letter]] = size
    weight = weight.reshape(shape)
    split = split_dim(plan.style.output_layout, y.ndim)
    if split is None or shape[split] == 1:
        return weight
    size = y.shape[split]
    return lax.dynamic_slice_in_dim(weight, axis_index(TP) * size, size, split)


def _masked_lookup(method: Callable[..., Array], local: Any, ids: Array, vocabulary: int) -> Array:
    """Looks up ids in this device's rows; the result is zero for ids in other devices' rows.

    Invalid ids behave as in Flax.
    """
    ids = jnp.where(ids < 0, ids + vocabulary, ids)
    rows = local.num_embeddings
    position = ids - axis_index(TP) * rows
    mine = (position >= 0) & (position < rows)
    exists = (ids >= 0) & (ids < vocabulary)
    # Ids in other devices' rows become 0, and invalid ids stay invalid.
    other_position = jnp.where(exists, 0, rows)
    embeddings = method(local, jnp.where(mine, position, other_position))
    return jnp.where((mine | ~exists)[..., None], embeddings, 0)
