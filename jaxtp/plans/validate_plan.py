"""Validates a plan, and decides how each module runs and stores its parameters. Changes nothing.

Types do not show which arrays have a sequence, so a mesh with cp needs `ContextParallel`. Inside
such a module, submodules that mix positions or have no sequence run on global arrays, with gathered
weights, replicated over cp.
"""

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flax import nnx
from jax.sharding import PartitionSpec

from jaxtp.config.hints import divisors, nearest_multiples
from jaxtp.mesh import AXES, CP, TP, Sizes, axes_of, parts
from jaxtp.plans.layouts import Shape, as_tuple, declared_spec, stored_spec
from jaxtp.plans.module_wrappers import ModuleInfo, has_method, loads_shards, original_class
from jaxtp.plans.plan import Plan, PlanError, assign_styles, is_inside
from jaxtp.plans.run_styles import Role, resolve_style, role_of
from jaxtp.plans.stock import Signature, signature, supported_modules, why_not_split
from jaxtp.plans.styles import (
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

_PER_TOKEN = nnx.Linear | nnx.LayerNorm | nnx.RMSNorm


@dataclass(frozen=True)
class ModulePlan:
    """A module, its role, and its parameters' specs by name."""

    info: ModuleInfo
    role: Role | None  # None if the module keeps its class
    specs: dict[str, PartitionSpec]
    signature: Signature | None


def validate_plan(modules: Sequence[ModuleInfo], plan: Plan, sizes: Sizes) -> list[ModulePlan]:
    """Returns each module's role and its parameters' specs; a PlanError says what does not fit."""
    _check_axes(modules)
    parameters = dict(_all_parameters(modules))
    assigned = assign_styles(plan, [info.paths for info in modules], parameters)
    context: list[str] = []  # paths of `ContextParallel` modules
    stacks: dict[str, Shape] = {}
    signatures: list[Signature | None] = []
    for info, (_, style) in zip(modules, assigned, strict=True):
        if isinstance(style, ContextParallel):
            context += info.paths
        dims = signature(info.module)
        signatures.append(dims)
        if dims is not None:
            stacks[info.path] = _stacked_dims(info.module, dims)
    plans = []
    for info, (pattern, style), dims in zip(modules, assigned, signatures, strict=True):
        is_in_context = any(itertools.starmap(is_inside, itertools.product(info.paths, context)))
        role = Role(style, not isinstance(style, Replicate), is_in_context)
        stack = _nearest_stacked_dims(info.path, stacks)
        try:
            plans.append(_plan_module(info, role, dims, stack, sizes))
        except PlanError as error:
            where = f"{pattern!r}: " if pattern else ""
            raise PlanError(f"{where}{info.path!r} ({info.kind}) {error}") from None
    if sizes[CP] > 1 and not context and any(plan.role and plan.info.parameters for plan in plans):
        raise PlanError(
            f"cp={sizes[CP]} divides sequences, and the plan does not say in which modules; give "
            "ContextParallel() to the module that takes ids [B, T] or activations [B, T, ...], "
            "usually the model itself: {'': ContextParallel(), ...}; a model without sequences "
            "needs a mesh with cp=1"
        )
    _check_tied(plans)
    return plans


def parameter_specs(plans: Sequence[ModulePlan]) -> list[tuple[nnx.Param, PartitionSpec]]:
    """Returns each parameter once with its spec.

    The spec of a tied parameter is from a module with a signature, if there is one.
    """
    specs: dict[int, tuple[nnx.Param, PartitionSpec]] = {}
    for plan in sorted(plans, key=lambda plan: plan.signature is not None):
        for name, parameter in plan.info.parameters.items():
            specs[id(parameter)] = parameter, plan.specs[name]
    return list(specs.values())


def _all_parameters(modules: Sequence[ModuleInfo]) -> Iterator[tuple[str, nnx.Param]]:
    for info in modules:
        for name, parameter in info.parameters.items():
            yield f"{info.path}.{name}".removeprefix("."), parameter


def _stacked_dims(module: nnx.Module, dims: Signature) -> Shape:
    for name, letters in dims.params.items():
        if (parameter := getattr(module, name)) is not None:
            return tuple(parameter.shape[: len(parameter.shape) - len(letters)])
    return ()


def _nearest_stacked_dims(path: str, stacks: dict[str, Shape]) -> Shape:
    # A module without a signature takes the stacked dims of the nearest stock modules, inside or
    # around it.
    if path in stacks:
        return stacks[path]
    inside: set[Shape] = set()
    while path and not inside:
        inside = {stack for other, stack in stacks.items() if is_inside(other, path)}
        path = path.rpartition(".")[0]
    return inside.pop() if len(inside) == 1 else ()


def _plan_module(
    info: ModuleInfo,
    role: Role,
    dims: Signature | None,
    stack: Shape,
    sizes: Sizes,
) -> ModulePlan:
    style = role.style
    is_called = has_method(original_class(info.module), "__call__")
    if role_of(info.module) is not None:
        raise PlanError("is parallel already; pass the original model to parallelize, and one plan")
    declared: dict[str, PartitionSpec] = {}
    # Parameters of jaxtp's layers, which load exactly the shards that they declare.
    exact: set[str] = set()
    for name, parameter in info.parameters.items():
        declared[name] = declared_spec(parameter, parameter.ndim)
        if parameter.get_metadata().get("out_sharding") and loads_shards(info.module):
            exact.add(name)
    if style is not None:
        _check_layouts(style)
        if not isinstance(style, Replicate) and not is_called:
            raise PlanError(
                f"cannot be {type(style).__name__}: it has no __call__{_submodules(info)}"
            )
        if isinstance(style, PrepareInput | PrepareOutput):
            _check_keywords(info, style)
        elif exact or (isinstance(style, Replicate) and any(map(any, declared.values()))):
            raise PlanError(
                f"cannot be {type(style).__name__}: it declares the specs of its parameters itself"
            )
        else:
            _check_fits(info, style, dims)
        _check_sizes(info, style, dims, stack, sizes)
    specs = {}
    for name, parameter in info.parameters.items():
        if name in exact:
            specs[name] = _exact_spec(name, parameter, declared[name], sizes)
            continue
        stack_ndim = len(stack) if tuple(parameter.shape[: len(stack)]) == stack else 0
        tp_dim = None
        if dims is not None:
            tp_dim = resolve_style(style, dims).tp_dim(dims.params.get(name, ""))
        spec = stored_spec(parameter, parameter.ndim - stack_ndim, tp_dim, sizes, fsdp=role.fsdp)
        specs[name] = PartitionSpec(*(None,) * stack_ndim, *spec)
    keeps_class = style is None and len(exact) == len(info.parameters)
    return ModulePlan(info, role if is_called and not keeps_class else None, specs, dims)


def _check_axes(modules: Sequence[ModuleInfo]) -> None:
    examples: dict[str, str] = {}  # a parameter that is split over the axis
    for path, parameter in _all_parameters(modules):
        spec = declared_spec(parameter, parameter.ndim)
        for axis in itertools.chain.from_iterable(map(axes_of, spec)):
            examples[axis] = f"{path} is {spec}"
    if unknown := sorted(examples.keys() - set(AXES)):
        rules = ", ".join(f"({axis!r}, ...)" for axis in unknown)
        raise PlanError(
            f"the model declares splits over {', '.join(map(repr, unknown))}: "
            f"{examples[unknown[0]]}, but the mesh axes are {', '.join(AXES)}. Map the names: "
            f"flax.core.spmd.set_logical_axis_rules([{rules}])"
        )


def _exact_spec(
    name: str, parameter: nnx.Param, spec: PartitionSpec, sizes: Sizes
) -> PartitionSpec:
    for dim, entry in enumerate(spec):
        num_parts = parts(sizes, axes_of(entry))
        if parameter.shape[dim] % num_parts:
            shape = tuple(parameter.shape)
            raise PlanError(
                f"declares {name} {shape} as {spec}; {num_parts} does not divide dim {dim}"
            )
    return spec


def _check_layouts(style: Style) -> None:
    layouts = list(_layouts(style))
    if Shard(0) in layouts or (isinstance(style, SequenceParallel) and style.sequence_dim == 0):
        raise PlanError(
            f"cannot be {style}: dim 0 is the batch, which dp and fsdp split; the sequence is "
            "Shard(1)"
        )
    if (
        isinstance(style, PrepareInput | PrepareOutput)
        and not isinstance(style, ContextParallel)
        and not layouts
    ):
        raise PlanError(
            f"cannot be {type(style).__name__}() without desired layouts: it would change nothing"
        )


def _layouts(style: Style) -> Iterator[Shard | Replicate]:
    for name, value in vars(style).items():
        if "layouts" not in name:
            continue
        if isinstance(value, Mapping):
            value = tuple(value.values())
        for layout in as_tuple(value):
            if layout is None:
                continue
            if isinstance(layout, type):
                raise PlanError(
                    f"has {name}={layout.__name__}, which is a class; write {layout.__name__}(...)"
                )
            is_layout = isinstance(layout, Shard | Replicate)
            if not is_layout or not isinstance(getattr(layout, "dim", 0), int):
                raise PlanError(f"has {name}={layout!r}; a layout is Shard(dim) or Replicate()")
            yield layout


def _check_fits(info: ModuleInfo, style: Style, dims: Signature | None) -> None:
    name = type(style).__name__
    if isinstance(style, Replicate) and not info.parameters:
        raise PlanError("cannot be Replicate: it has no parameters of its own; name its submodules")
    fits = f", which fits {supported_modules(name)}"
    if isinstance(style, Colwise | Rowwise) and not (dims and resolve_style(style, dims).letter):
        why = why_not_split(info.module)
        raise PlanError(f"cannot be {name}{f': {why}' if why else fits}{_submodules(info)}")
    if isinstance(style, SequenceParallel) and dims and not isinstance(info.module, _PER_TOKEN):
        raise PlanError(f"cannot be {name}{fits}")


def _submodules(info: ModuleInfo) -> str:
    paths = []
    for name, value in vars(info.module).items():
        if isinstance(value, nnx.Module):
            paths.append(repr(f"{info.path}.{name}".removeprefix(".")))
    return f"; its parts are {', '.join(paths)}" if paths else ""


def _check_keywords(info: ModuleInfo, style: PrepareInput | PrepareOutput) -> None:
    call = inspect.signature(original_class(info.module).__call__)  # type: ignore[operator]
    if inspect.Parameter.VAR_KEYWORD in {p.kind for p in call.parameters.values()}:
        return
    for name in getattr(style, "desired_input_kwarg_layouts", None) or {}:
        if name not in call.parameters:
            nearest = ", ".join(map(repr, list(call.parameters)[1:]))
            raise PlanError(f"has no argument {name!r}; nearest: {nearest}")


def _check_sizes(
    info: ModuleInfo,
    style: Style,
    dims: Signature | None,
    stack: Shape,
    sizes: Sizes,
) -> None:
    if dims is None or (letter := resolve_style(style, dims).letter) is None:
        return
    global_sizes = dims.sizes(info.module)
    tp = sizes[TP]
    size = global_sizes[letter]
    attribute = next(name for name, letters in dims.attributes.items() if letter in letters)
    if size % tp:
        fits = ", ".join(map(str, divisors(size, 2 * tp)))
        raise PlanError(
            f"has {attribute} of {size} for {type(style).__name__} to split, not divisible by "
            f"tp={tp}; nearest: {' or '.join(map(str, nearest_multiples(size, tp)))}, or tp {fits}"
        )
    for name, parameter in info.parameters.items():
        expected = tuple(map(global_sizes.get, dims.params.get(name, "")))
        if tuple(parameter.shape[len(stack) :]) != expected:
            raise PlanError(
                f"has {name} of shape {tuple(parameter.shape)}, but its attributes say {expected}: "
                "layers may be stacked along dim 0 only (nnx.vmap with out_axes=0)"
            )


def _check_tied(plans: Sequence[ModulePlan]) -> None:
    # A module without a style or a signature takes the spec of the others.
    first: dict[int, tuple[str, PartitionSpec]] = {}
    for plan in plans:
        if plan.signature is None and plan.role is not None and plan.role.style is None:
            continue
        for name, parameter in plan.info.parameters.items():
            path = f"{plan.info.path}.{name}"
            spec = plan.specs[name]
            first_path, expected = first.setdefault(id(parameter), (path, spec))
            if spec != expected:
                raise PlanError(
                    f"{first_path!r} and {path!r} are one tied parameter, split as {expected} and "
                    f"as {spec}"
                )
