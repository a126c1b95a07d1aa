"""Decisions of a plan, module by module, or why it does not fit: before anything is changed.

A module that is `ContextParallel` has all that is in it divided over cp, whatever styles that has: a plan is written
once, for meshes with cp and without, so no layout names cp. No type says which of a model's arrays have a sequence, so
the plan has to, and a mesh with cp is refused until it does. A module without a sequence, or one that mixes positions,
is computed on global arrays from gathered weights, by every device along cp alike; autodiff then sums nothing twice.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flax import nnx
from jax.sharding import PartitionSpec

from jaxtp.hints import nearest_multiples
from jaxtp.mesh import AXES, CP, TP, axes_of, parts
from jaxtp.parallel.calls import has_method, original_class
from jaxtp.parallel.layouts import Replicate, Shard, stacked, stored_spec
from jaxtp.parallel.modules import Found
from jaxtp.parallel.plan import Plan, PlanError, assign_styles
from jaxtp.parallel.running import cut_of
from jaxtp.parallel.stock import fitting, hindrance
from jaxtp.parallel.styles import (
    Colwise,
    ContextParallel,
    PrepareInput,
    PrepareOutput,
    Rowwise,
    SequenceParallel,
    Style,
)
from jaxtp.parallel.swap import Role, role_of


@dataclass(frozen=True)
class Decision:
    """A module, its role and how its parameters are stored."""

    found: Found
    role: Role | None
    """Role; None if it keeps its class."""

    specs: dict[str, PartitionSpec]
    """Specs of its own parameters, by their names in it."""


def decide(modules: Sequence[Found], plan: Plan, sizes: Mapping[str, int], fsdp: bool) -> list[Decision]:
    """Returns the role of each module and the specs of its parameters.

    Args:
      modules: of the model.
      plan: styles by pattern.
      sizes: devices along each axis.
      fsdp: parameters are stored split over fsdp and cp.

    Raises:
      PlanError: the plan does not fit.
    """
    parameters = [f"{found.path}.{name}".removeprefix(".") for found in modules for name in found.parameters]
    assigned = assign_styles(plan, [found.paths for found in modules], parameters)
    divided = _divided(modules, [style for _, style in assigned])
    decisions = [
        _decide(found, *given, sizes, fsdp, context)
        for found, given, context in zip(modules, assigned, divided, strict=True)
    ]
    if sizes[CP] > 1 and not any(divided):
        _check_declared(decisions, sizes)
    _check_tied(decisions)
    return decisions


def _divided(modules: Sequence[Found], styles: Sequence[Style | None]) -> list[bool]:
    """Returns whether cp divides the sequences of each module: of those that are `ContextParallel`, and all in them."""
    whole = [p for m, style in zip(modules, styles, strict=True) if isinstance(style, ContextParallel) for p in m.paths]
    return [any(not w or path == w or path.startswith(f"{w}.") for w in whole for path in m.paths) for m in modules]


def _check_declared(decisions: Sequence[Decision], sizes: Mapping[str, int]) -> None:
    """Checks that with no sequence to divide over cp the modules know of cp themselves, as our own layers do."""
    for decision in decisions:
        if decision.role is not None and decision.found.parameters:
            raise PlanError(
                f"cp={sizes[CP]} divides sequences, and the plan does not say in which modules; give the one that "
                "takes ids [B, T] or activations [B, T, ...], most often the model itself, ContextParallel(), as in "
                "{'': ContextParallel(), ...}; a model without sequences needs a mesh with cp=1"
            )


def _decide(
    found: Found, pattern: str, style: Style | None, sizes: Mapping[str, int], fsdp: bool, context: bool
) -> Decision:
    if role_of(found.module) is not None:
        raise PlanError(
            f"{found.path!r} is parallel already; give parallelize the model as it was written, and one plan"
        )
    try:
        declared = {
            n: _declared(n, p, sizes) for n, p in found.parameters.items() if p.get_metadata().get("out_sharding")
        }
        if style is not None:
            _check_style(style)
            _check_fits(found, style, bool(declared))
            _check_sizes(found, style, sizes)
    except PlanError as error:
        where = f"{pattern!r}: " if pattern else ""
        raise PlanError(f"{where}{found.path!r} ({found.kind}) {error}") from None
    return _decided(found, style, declared, sizes, Role(style, fsdp and not isinstance(style, Replicate), context))


def _decided(
    found: Found, style: Style | None, declared: dict[str, PartitionSpec], sizes: Mapping[str, int], role: Role
) -> Decision:
    specs = {
        name: declared.get(name) or _spec(found, name, parameter, style, sizes, role.fsdp)
        for name, parameter in found.parameters.items()
    }
    idle = not _is_called(found) or (style is None and (not found.parameters or len(declared) == len(specs)))
    return Decision(found, None if idle else role, specs)


def _spec(
    found: Found, name: str, parameter: nnx.Param[Any], style: Style | None, sizes: Mapping[str, int], fsdp: bool
) -> PartitionSpec:
    stack = found.stack if parameter.shape[: len(found.stack)] == found.stack else ()
    shape = tuple(parameter.shape[len(stack) :])
    letters = found.signature.params.get(name, "") if found.signature else ""
    tp_dim = cut_of(style, found.signature).tp_dim(letters) if found.signature else None
    return stacked(stored_spec(shape, tp_dim, sizes, fsdp=fsdp), len(stack))


def _declared(name: str, parameter: nnx.Param[Any], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the split that a parameter was given by the author of its module, as our own layers do."""
    spec = PartitionSpec(*parameter.get_metadata()["out_sharding"])
    unknown = {axis for entry in spec for axis in axes_of(entry)} - set(AXES)
    if unknown:
        raise PlanError(f"declares {name} as {spec}; the axes of the mesh are {', '.join(AXES)}")
    for dim, entry in enumerate(spec):
        among = parts(sizes, axes_of(entry))
        if parameter.shape[dim] % among:
            raise PlanError(f"declares {name} {tuple(parameter.shape)} as {spec}; {among} does not divide dim {dim}")
    return spec


def _check_style(style: Style) -> None:
    layouts = [layout for field in fields(style) if "layouts" in field.name for layout in _layouts(field.name, style)]
    if Shard(0) in layouts or (isinstance(style, SequenceParallel) and style.sequence_dim == 0):
        raise PlanError(f"cannot be {style}: dim 0 is the batch, which dp and fsdp divide; the sequence is Shard(1)")
    if isinstance(style, PrepareInput | PrepareOutput) and not isinstance(style, ContextParallel) and not layouts:
        raise PlanError(f"cannot be {type(style).__name__}() without desired layouts: it would change nothing")


def _layouts(name: str, style: Style) -> Iterator[Shard | Replicate]:
    """Yields the layouts in an argument of a style: one, several or none.

    Raises:
      PlanError: something else is among them.
    """
    value = getattr(style, name)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    for layout in value if isinstance(value, tuple) else (value,):
        if isinstance(layout, type):
            raise PlanError(f"has {name}={layout.__name__}, which is a class; write {layout.__name__}(...)")
        if not isinstance(layout, Shard | Replicate | None) or not isinstance(getattr(layout, "dim", 0), int):
            raise PlanError(f"has {name}={layout!r}; a layout is Shard(dim) or Replicate()")
        if layout is not None:
            yield layout


def _check_fits(found: Found, style: Style, declares: bool) -> None:
    name = type(style).__name__
    if not isinstance(style, Replicate) and not _is_called(found):
        raise PlanError(f"cannot be {name}: it has no __call__{_parts(found)}")
    if isinstance(style, PrepareInput | PrepareOutput):
        _check_keywords(found, style)
        return
    if declares:
        raise PlanError(f"cannot be {name}: it declares itself how its parameters are split")
    if isinstance(style, Replicate) and not found.parameters:
        raise PlanError("cannot be Replicate: it has no parameters of its own; name the modules in it")
    read = found.signature
    splits = {Colwise: read and read.column, Rowwise: read and read.row}
    if isinstance(style, Colwise | Rowwise) and not splits[type(style)]:
        why = hindrance(found.module)
        raise PlanError(f"cannot be {name}{f': {why}' if why else f', which fits {fitting(name)}'}{_parts(found)}")
    if isinstance(style, SequenceParallel) and read and not isinstance(found.module, _PER_TOKEN):
        raise PlanError(f"cannot be {name}, which fits {fitting(name)}")


def _is_called(found: Found) -> bool:
    return has_method(original_class(found.module), "__call__")


def _check_keywords(found: Found, style: PrepareInput | PrepareOutput) -> None:
    names = style.desired_input_kwarg_layouts or {} if isinstance(style, PrepareInput) else {}
    parameters = inspect.signature(original_class(found.module).__call__).parameters  # type: ignore[operator]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if unknown := [name for name in names if name not in parameters and not open_ended]:
        raise PlanError(f"has no argument {unknown[0]!r}; nearest: {', '.join(map(repr, list(parameters)[1:]))}")


_PER_TOKEN = nnx.Linear | nnx.LayerNorm | nnx.RMSNorm


def _parts(found: Found) -> str:
    parts = [name for name, value in vars(found.module).items() if isinstance(value, nnx.Module)]
    inside = ", ".join(repr(f"{found.path}.{name}" if found.path else name) for name in parts)
    return f"; its parts are {inside}" if parts else ""


def _check_sizes(found: Found, style: Style, sizes: Mapping[str, int]) -> None:
    read = found.signature
    letter = cut_of(style, read).letter if read else None
    if read is None or letter is None:
        return
    tp, size = sizes[TP], read.sizes(found.module)[letter]
    attribute = next(name for name, letters in read.attributes.items() if letter in letters)
    if size % tp:
        fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0 and n <= 2 * tp)
        raise PlanError(
            f"has {attribute} of {size} for {type(style).__name__} to split, not divisible by tp={tp}; "
            f"nearest: {' or '.join(map(str, nearest_multiples(size, tp)))}, or tp {fits}"
        )
    for name, parameter in found.parameters.items():
        letters = read.params.get(name, "")
        expected = tuple(read.sizes(found.module)[letter] for letter in letters)
        if tuple(parameter.shape[len(found.stack) :]) != expected:
            raise PlanError(
                f"has {name} of shape {tuple(parameter.shape)}, and its sizes say {expected}: layers may be stacked "
                "along dim 0 only (nnx.vmap with out_axes=0)"
            )


def _check_tied(decisions: Sequence[Decision]) -> None:
    """Checks that a parameter of several modules is stored in one way; where no type is known it follows the others."""
    first: dict[int, tuple[str, PartitionSpec]] = {}
    for decision in decisions:
        follows = decision.found.signature is None and decision.role is not None and decision.role.style is None
        for name, parameter in decision.found.parameters.items() if not follows else ():
            path, spec = f"{decision.found.path}.{name}", decision.specs[name]
            other, expected = first.setdefault(id(parameter), (path, spec))
            if spec != expected:
                raise PlanError(f"{other!r} and {path!r} are one tied parameter, split as {expected} and as {spec}")


def declarations(decisions: Sequence[Decision]) -> list[tuple[nnx.Param[Any], PartitionSpec]]:
    """Returns every parameter and its spec; for a tied one, that of a module whose type is known."""
    ordered = sorted(decisions, key=lambda decision: decision.found.signature is not None)
    found = {id(p): (p, d.specs[name]) for d in ordered for name, p in d.found.parameters.items()}
    return list(found.values())
