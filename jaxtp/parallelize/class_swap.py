"""Makes each parallel module's class: a subclass per style, which runs the original code without a mesh in context."""

import functools
import inspect
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from jaxtp.collectives import axis_size, check_divides, constrain, gather_weight
from jaxtp.mesh import BATCH, CONTEXT, CP, STORAGE, current_mesh
from jaxtp.parallelize.layouts import (
    Copies,
    activation_spec,
    as_tuple,
    change_layout,
    change_layouts,
    constrain_layout,
    dim_over,
    gathered_spec,
    leading_axes,
    prepare_arguments,
)
from jaxtp.parallelize.module_wrappers import CONTAINERS, original_class, set_class, subclass
from jaxtp.parallelize.run_styles import ShardedCall, module_leading_axes, resolve_attend, resolve_style
from jaxtp.parallelize.stock import Signature, attend_signature, signature
from jaxtp.parallelize.styles import (
    Colwise,
    ContextParallel,
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

    style: Style | None  # none: its code is unchanged, and its parameters are gathered over fsdp and cp
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
    wraps = {name: functools.partial(_run, functools.partial(run, cls, role)) for name, run in runs.items()}
    return subclass(cls, wraps, _jaxtp_role=role)


def _run(parallel: Callable[..., Any], original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return (original if current_mesh() is None else parallel)(*args, **kwargs)


def _call(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    style, context = role.style, role.context
    if isinstance(style, ContextParallel):
        args, kwargs = _split_sequence(cls, style, args, kwargs)
    if isinstance(style, PrepareInput):
        args, kwargs = prepare_arguments(cls, style, args, kwargs, context=context)
    result = _compute(cls, role, module, *args, **kwargs)
    if isinstance(style, PrepareOutput):
        return change_layouts(result, style.output_layouts, style.desired_output_layouts, context=context)
    if isinstance(style, SequenceParallel):
        return change_layout(result, Shard(style.sequence_dim), style.output_layouts, context=context)
    return result


def _split_sequence(cls: type, style: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    name = _first_argument(cls)
    x: Any = args[0] if args else kwargs.get(name)
    if axis_size(CP) == 1 or not hasattr(x, "dtype"):
        return args, kwargs
    if x.ndim < 2 or (x.ndim == 2 and jnp.issubdtype(x.dtype, jnp.inexact)):
        raise ValueError(
            f"{cls.__name__} as ContextParallel takes ids [B, T] or an activation [B, T, ...], whose T is divided over "
            f"cp={axis_size(CP)}; its first argument is {x.dtype}{list(x.shape)}, which has no sequence: use cp=1"
        )
    check_divides(f"{cls.__name__} as ContextParallel", x.shape, PartitionSpec(None, CONTEXT))
    if isinstance(x, Copies) or not (leading := leading_axes(x.shape, 2, 2, context=True)):
        return args, kwargs
    layout = as_tuple(style.input_layouts)[0] or Replicate()
    x = constrain(jnp.asarray(x), activation_spec(layout, x.ndim, leading))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})


def _compute(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    if not args and (name := _first_argument(cls)) in kwargs:
        args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    equation = {name: value for name, value in kwargs.items() if name == "einsum_str"}
    dims = signature(module, **equation) if args and not _has_arrays((args[1:], kwargs)) else None
    splits = isinstance(role.style, Colwise | Rowwise)
    if dims is None and splits:
        raise TypeError(f"{cls.__name__} as {role.style} takes one array and no others")
    if dims is None or not (splits or _divides_rows(args[0], dims, role)):
        return _on_global_arrays(cls, role, module, *args, **kwargs)
    style = resolve_style(role.style, dims, fsdp=role.fsdp)

    def method(local: nnx.Module, x: Any) -> Any:
        return cls.__call__(local, x, *args[1:], **kwargs)  # type: ignore[operator]

    return ShardedCall(module, method, dims, style, _call_name(cls, role.style), role.context)(args[0])


@functools.cache
def _first_argument(cls: type) -> str:
    """Returns `self` if `__call__` has no other argument."""
    return list(inspect.signature(cls.__call__).parameters)[:2][-1]  # type: ignore[operator]


def _attend(cls: type, role: Role, module: nnx.Embed, /, query: Any, **kwargs: Any) -> Any:
    lookup, dims = signature(module), attend_signature()
    if lookup is None or not (isinstance(role.style, Colwise | Rowwise) or _divides_rows(query, dims, role)):
        with _gathered_parameters(module, role):
            return cls.attend(module, jnp.asarray(query), **kwargs)  # type: ignore[attr-defined]
    style = resolve_attend(resolve_style(role.style, lookup, fsdp=role.fsdp), dims)
    attend = functools.partial(cls.attend, **kwargs)  # type: ignore[attr-defined]
    return ShardedCall(module, attend, dims, style, f"{_call_name(cls, role.style)}_attend", role.context)(query)


def _on_global_arrays(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
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
    # Only the batch stays split: XLA would split the other dims over cp, and the kernel's gradient would be too large,
    # by the number of devices along other axes that hold copies (an openxla bug, seen in jaxlib 0.10 and 0.12).
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
        vars(module).update({n: before[n] for n, value in changed.items() if vars(module).get(n) is value})


def _gather(value: Any) -> Any:
    if isinstance(value, nnx.Param) and dim_over(STORAGE, spec := _current_spec(value)) is not None:
        return value.replace(gather_weight(value[...], spec, gathered_spec(spec)))
    if not isinstance(value, CONTAINERS):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
    gathered = [_gather(leaf) for leaf in leaves]
    return value if all(map(operator.is_, gathered, leaves)) else jax.tree.unflatten(tree, gathered)


def _current_spec(parameter: nnx.Param[Any]) -> PartitionSpec:
    # Without the leading dim that a scan over stacked layers removed.
    spec = tuple(parameter.get_metadata().get("out_sharding") or ())
    return PartitionSpec(*spec[max(len(spec) - parameter.ndim, 0) :])


def _divides_rows(x: Any, dims: Signature, role: Role) -> bool:
    # Without a sequence, devices along cp repeat the rows.
    shape = jnp.shape(x) if not isinstance(x, Copies) else x.shape
    leading = module_leading_axes(shape, dims, context=role.context)
    return bool(leading) and shape[0] % axis_size(*BATCH) == 0


def _has_arrays(tree: object) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Copies)))


def _call_name(cls: type, style: Style | None) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    return f"{words}_{type(style).__name__.lower()}" if style else words
