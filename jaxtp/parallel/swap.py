"""The classes of parallel modules: each a subclass of the module's own (`calls.py`), made for one style.

Without a mesh in context a parallel module runs as it was written.
"""

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
from jaxtp.parallel.calls import original_class, set_class, subclass
from jaxtp.parallel.converting import constrained, convert, convert_all, prepare, several
from jaxtp.parallel.copies import Copies
from jaxtp.parallel.layouts import Replicate, Shard, activation_spec, dim_over, gathered, leading_axes
from jaxtp.parallel.running import Run, attend_cut, cut_of, leading_of
from jaxtp.parallel.stock import Signature, attend_signature, signature
from jaxtp.parallel.styles import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Rowwise,
    SequenceParallel,
    Style,
)

CONTAINERS = nnx.List | nnx.Dict | list | tuple | dict
"""Types that only lend their names to the paths of what is in them."""


@dataclass(frozen=True)
class Role:
    """The part that a module has in a parallel model."""

    style: Style | None
    """Style; None: it computes as it did, from parameters that are gathered over fsdp and cp."""

    fsdp: bool
    """Whether its parameters are stored split over fsdp and cp."""

    context: bool
    """Whether it is in a module whose sequences cp divides."""


def role_of(module: nnx.Module) -> Role | None:
    """Returns the role that `parallelize` gave a module, or None."""
    return getattr(type(module), "_jaxtp_role", None)


def swap_class(module: nnx.Module, role: Role) -> None:
    """Gives a module the class for its role."""
    set_class(module, _class_for(original_class(module), role))


@functools.cache
def _class_for(cls: type, role: Role) -> type:
    runs = {"__call__": _call} | ({"attend": _attend} if issubclass(cls, nnx.Embed) else {})
    wraps = {name: functools.partial(_run, functools.partial(run, cls, role)) for name, run in runs.items()}
    return subclass(cls, wraps, _jaxtp_role=role)


def _run(parallel: Callable[..., Any], written: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return (written if current_mesh() is None else parallel)(*args, **kwargs)


def _call(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    style, context = role.style, role.context
    if isinstance(style, ContextParallel):
        args, kwargs = _over_context(cls, style, args, kwargs)
    if isinstance(style, PrepareInput):
        args, kwargs = prepare(cls, style, args, kwargs, context=context)
    result = _compute(cls, role, module, *args, **kwargs)
    if isinstance(style, PrepareOutput):
        return convert_all(result, style.output_layouts, style.desired_output_layouts, context=context)
    if isinstance(style, SequenceParallel):
        return convert(result, Shard(style.sequence_dim), style.output_layouts, context=context)
    return result


def _over_context(
    cls: type, style: ContextParallel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, the first of them split along the sequence over cp.

    Raises:
      ValueError: it has no sequence, or one that cp does not divide.
    """
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
    arrives = several(style.input_layouts)[0] or Replicate()
    x = constrain(jnp.asarray(x), activation_spec(arrives, x.ndim, leading))
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})


def _compute(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Computes on shards if the rows of the input can be told apart, else on global arrays."""
    if not args and (name := _first_argument(cls)) in kwargs:
        args, kwargs = (kwargs[name],), {k: v for k, v in kwargs.items() if k != name}
    equation = {name: value for name, value in kwargs.items() if name == "einsum_str"}
    read = signature(module, **equation) if args and not _arrays((args[1:], kwargs)) else None
    splits = isinstance(role.style, Colwise | Rowwise)
    if read is None and splits:
        raise TypeError(f"{cls.__name__} as {role.style} takes one array, and nothing else that is one")
    if read is None or not (splits or _divides_rows(args[0], read, role)):
        return _on_global_arrays(cls, role, module, *args, **kwargs)
    cut = cut_of(role.style, read, fsdp=role.fsdp)

    def method(local: nnx.Module, x: Any) -> Any:
        return cls.__call__(local, x, *args[1:], **kwargs)  # type: ignore[operator]

    return Run(module, method, read, cut, _name(cls, role.style), role.context)(args[0])


@functools.cache
def _first_argument(cls: type) -> str:
    """Returns its name; that of `self` where there is none."""
    return list(inspect.signature(cls.__call__).parameters)[:2][-1]  # type: ignore[operator]


def _attend(cls: type, role: Role, module: nnx.Embed, /, query: Any, **kwargs: Any) -> Any:
    lookup, read = signature(module), attend_signature()
    if lookup is None or not (isinstance(role.style, Colwise | Rowwise) or _divides_rows(query, read, role)):
        with _gathered(module, role):
            return cls.attend(module, jnp.asarray(query), **kwargs)  # type: ignore[attr-defined]
    cut = attend_cut(cut_of(role.style, lookup, fsdp=role.fsdp), read)
    attend = functools.partial(cls.attend, **kwargs)  # type: ignore[attr-defined]
    return Run(module, attend, read, cut, f"{_name(cls, role.style)}_attend", role.context)(query)


def _on_global_arrays(cls: type, role: Role, module: nnx.Module, /, *args: Any, **kwargs: Any) -> Any:
    convolves = issubclass(cls, nnx.Conv | nnx.ConvTranspose) and axis_size(CP) > 1 and bool(args)
    if convolves:
        args = (_with_whole_sequences(module, args[0]), *args[1:])
    if isinstance(role.style, SequenceParallel):
        layout = Shard(role.style.sequence_dim)
        args = (constrained(args[0], layout, context=role.context), *args[1:])
    with _gathered(module, role):
        result = cls.__call__(module, *args, **kwargs)  # type: ignore[operator]
    if isinstance(role.style, SequenceParallel):
        return constrained(result, layout, context=role.context)
    return _with_whole_sequences(module, result) if convolves else result


def _with_whole_sequences(module: Any, x: Any) -> Array:
    """Returns an input or a result of a convolution with none of the dims split that it runs over.

    Left to itself XLA splits them over cp. The gradient of the kernel then comes out as often too large as there are
    devices along other axes that hold copies (openxla, of jaxlib 0.10 as of 0.12).
    """
    x = jnp.asarray(x)
    leading = leading_axes(x.shape, len(module.kernel_size) + 2, context=False)
    divides = bool(leading) and x.shape[0] % axis_size(*BATCH) == 0
    return constrain(x, activation_spec(Replicate(), x.ndim, leading if divides else ()))


@contextmanager
def _gathered(module: nnx.Module, role: Role) -> Iterator[None]:
    """Gathers the module's own parameters over fsdp and cp while it lasts, those in containers too."""
    before = dict(vars(module)) if role.fsdp else {}
    whole = {name: _whole(value) for name, value in before.items()}
    changed = {name: value for name, value in whole.items() if value is not before[name]}
    vars(module).update(changed)
    try:
        yield
    finally:
        vars(module).update({n: before[n] for n, value in changed.items() if vars(module).get(n) is value})


def _whole(value: Any) -> Any:
    """Returns an attribute with the parameters in it gathered; itself if there are none."""
    if isinstance(value, nnx.Param) and dim_over(STORAGE, spec := _spec_here(value)) is not None:
        return value.replace(gather_weight(value[...], spec, gathered(spec)))
    if not isinstance(value, CONTAINERS):
        return value
    leaves, tree = jax.tree.flatten(value, is_leaf=lambda leaf: leaf is not value)
    whole = [_whole(leaf) for leaf in leaves]
    return value if all(map(operator.is_, whole, leaves)) else jax.tree.unflatten(tree, whole)


def _spec_here(parameter: nnx.Param[Any]) -> PartitionSpec:
    """Returns how a parameter is stored; in a loop over stacked layers it has lost the dim in front."""
    spec = tuple(parameter.get_metadata().get("out_sharding") or ())
    return PartitionSpec(*spec[max(len(spec) - parameter.ndim, 0) :])


def _divides_rows(x: Any, read: Signature, role: Role) -> bool:
    """Returns whether each device can compute a part of a module's rows, along cp the same where it has no sequence."""
    shape = jnp.shape(x) if not isinstance(x, Copies) else x.shape
    leading = leading_of(shape, read, context=role.context)
    return bool(leading) and shape[0] % axis_size(*BATCH) == 0


def _arrays(tree: Any) -> bool:
    return any(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, Copies)))


def _name(cls: type, style: Style | None) -> str:
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()
    return f"{words}_{type(style).__name__.lower()}" if style else words
