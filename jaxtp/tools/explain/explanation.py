"""`explain`: how a plan splits a model, and its collectives by module."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.analysis.audit import added_by_compiler
from jaxtp.analysis.census import count_collectives
from jaxtp.analysis.collective import (
    Axes,
    Collective,
    Traffic,
    bytes_by_axes,
    traffic_rows,
    with_joined_axes,
)
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.dataflow import ROOT
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.analysis.propose import merge_equal, undivided_parameters
from jaxtp.analysis.tables import Cells, Record, columns
from jaxtp.analysis.traced_model import Forward, ModelCall
from jaxtp.analysis.work import Objective, Product, Work, gradient, repeated_work, work_of
from jaxtp.config.hints import dotted
from jaxtp.layers.parameter import PARAMETERS, spec_of
from jaxtp.mesh import (
    BATCH,
    TP,
    MeshLike,
    Sizes,
    as_mesh,
    axes_of,
    batch_parts,
    describe_mesh,
    mesh_of,
    mesh_shape,
    mesh_sizes,
    parts,
)
from jaxtp.plans.module_wrappers import Method, original_class
from jaxtp.plans.parallelize import Build, original_model, parallelize
from jaxtp.plans.plan import Plan, PlanError, format_style, patterns_for
from jaxtp.plans.run_styles import role_of
from jaxtp.plans.styles import Colwise, Style

_SCOPE = "module:"
_KERNELS = ".kernels"  # The last word of the parameters of jaxtp's layers split by columns
_BY_PROGRAM = "the program"
_BY_COMPILER = "the compiler"
_MODULE_HEADER = ("module", "class", "style", "parameter", "shape", "split", "bytes on a device")
_TRAFFIC_HEADER = ("module", "pass", "collective", "over", "by", "count", "bytes sent")


@dataclass(frozen=True)
class SplitParameter:
    """A parameter and how it is split."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    # Axes that split each dim; trailing whole dims may be missing
    split: tuple[Axes, ...]

    def bytes(self, sizes: Sizes) -> int:
        """Returns the bytes per device."""
        divided = math.prod(parts(sizes, axes) for axes in self.split)
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize // divided


@dataclass(frozen=True)
class ModuleRow:
    """A module with parameters or a style."""

    path: str  # a shared module has its first path
    kind: str  # class name
    style: Style | None
    parameters: tuple[SplitParameter, ...]


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`; `str` formats it."""

    sizes: dict[str, int]  # devices along each axis
    rows: tuple[ModuleRow, ...]  # in the model's order
    traffic: Traffic
    """Collectives of the program in one forward and backward pass; empty without inputs."""
    added: Traffic
    """Collectives that the compiler adds between the layers; empty unless `explain` compiled the
    model."""
    products: tuple[Product, ...]  # in the forward and backward pass; empty without inputs
    saved: float  # bytes of residuals on a device
    notes: tuple[str, ...]
    """About parameters and work that tp does not divide."""

    @cached_property
    def patterns(self) -> dict[str, str]:
        """Each row's pattern; equal rows share a pattern."""
        return patterns_for({row.path: (row.kind, row.style, row.parameters) for row in self.rows})

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all parameters per device."""
        return sum(parameter.bytes(self.sizes) for parameter in self.parameters)

    @property
    def parameters(self) -> list[SplitParameter]:
        """All parameters, in the model's order."""
        return list(chain.from_iterable(row.parameters for row in self.rows))

    @property
    def flops(self) -> float:
        """FLOPs of a device in all products."""
        return sum(product.flops for product in self.products)

    def sent(self, axis: str) -> float:
        """Returns the bytes per device over groups of axes that contain `axis`."""
        return sum(sent for axes, sent in self.sent_by_axes().items() if axis in axes)

    def sent_by_axes(self) -> dict[Axes, float]:
        """Returns the bytes per device over each group of axes."""
        return bytes_by_axes(Counter(self.traffic) + Counter(self.added))

    def record(self) -> Record:
        """Returns everything as JSON values."""
        return {
            "mesh": self.sizes,
            "parameter_bytes_per_device": self.bytes_per_device,
            "flops_per_device": self.flops,
            "saved_bytes_per_device": self.saved,
            "bytes_sent": with_joined_axes(self.sent_by_axes()),
            "modules": list(map(self._module_record, self.rows)),
            "collectives": [
                *_traffic_records(_BY_PROGRAM, self.traffic),
                *_traffic_records(_BY_COMPILER, self.added),
            ],
            "notes": list(self.notes),
        }

    def _module_record(self, row: ModuleRow) -> Record:
        parameters = []
        for parameter in row.parameters:
            per_device = parameter.bytes(self.sizes)
            parameters.append({**asdict(parameter), "bytes_per_device": per_device})
        return {
            "module": row.path,
            "class": row.kind,
            "style": format_style(row.style) if row.style else None,
            "parameters": parameters,
        }

    def __str__(self) -> str:
        return "\n\n".join(_sections(self))


def _traffic_records(by: str, traffic: Traffic) -> Iterator[Record]:
    for collective, count in traffic.items():
        yield {
            "module": _module_of(collective) or ROOT,
            "pass": _pass_of(collective),
            "collective": collective.kind,
            "axes": list(collective.axes),
            "by": by,
            "count": count,
            "bytes_sent": count * collective.bytes_sent,
        }


def _pass_of(collective: Collective) -> str:
    return "backward" if collective.backward else "forward"


def explain(
    model: nnx.Module | Build,
    *inputs: object,
    plan: Plan | None = None,
    mesh: MeshLike = None,
    call: Forward | None = None,
    compiled: bool = False,
) -> Explanation:
    """Returns how a model is split and which collectives it runs, without computing or allocating.

    Args:
      model: a model, real or abstract, or a function that returns one; also the result of
        `parallelize`.
      *inputs: a global batch: pytrees of arrays or `jax.ShapeDtypeStruct`s; other values pass
        unchanged. Without inputs there are no collectives.
      plan: the plan of a model that is not parallel yet.
      mesh: by default the mesh in context; also sizes, `{"fsdp": 2, "tp": 4}` or
        `"fsdp=2,tp=4"`. A parallel model is split again.
      call: a function of the model and the inputs; by default `model(*inputs)`.
      compiled: also compile the model, to list the collectives that the compiler adds. This needs
        the devices.

    Raises:
      PlanError: the plan does not fit, or the model has one already.
      MeshError: there is no mesh, or `compiled` lacks devices.
    """
    abstract = as_mesh(mesh, "explain", abstract=True)
    sizes = mesh_sizes(abstract)
    with jax.sharding.use_abstract_mesh(abstract):
        parallel = _parallelized(model, plan, abstract)
        original, _ = original_model(parallel)
        model_call = ModelCall.of(original, inputs, call)
        loss, *state = _loss(parallel, model_call)
        work = work_of(loss, sizes, *state, model_call.arrays) if inputs else Work({}, (), 0.0)
        undivided = merge_equal(undivided_parameters(parallel, sizes))
        notes = [*undivided, *repeated_work(work.products, sizes[TP])]
    added = _compiler_collectives(model, plan, model_call, sizes) if inputs and compiled else {}
    return Explanation(
        sizes=sizes,
        rows=tuple(_rows(parallel)),
        traffic=work.traffic,
        added=added,
        products=work.products,
        saved=work.saved,
        notes=tuple(notes),
    )


def _parallelized(
    model: nnx.Module | Build, plan: Plan | None, mesh: Mesh | AbstractMesh
) -> nnx.Module:
    original, plan_of_model = original_model(model)
    if plan_of_model and plan:
        raise PlanError("the model is already parallel and has a plan; do not pass another one")
    return parallelize(original, plan or plan_of_model, mesh=mesh)


def _loss(model: nnx.Module, call: ModelCall) -> tuple[Objective, nnx.State, nnx.State]:
    """Returns the sum of all outputs as a function of parameters, other state and inputs.

    Also returns the parameters and the other state. Each equation has its module's path in its name
    stack.
    """

    def scoped(path: str, _: str, method: Method, /, *args: object, **kwargs: object) -> Any:
        with jax.named_scope(f"{_SCOPE}{path}"):
            return method(*args, **kwargs)

    function, state = call.functional(model, scoped)

    def loss(params: nnx.State, other: nnx.State, arrays: list[Any]) -> jax.Array:
        return _sum_of_outputs(function(nnx.merge_state(params, other), arrays))

    params, other = nnx.split_state(state, nnx.Param, ...)
    return loss, params, other


def _sum_of_outputs(outputs: object) -> jax.Array:
    """Returns the sum of all floating-point outputs, in float32."""
    total = jnp.zeros(())
    for array in map(jnp.asarray, jax.tree.leaves(outputs)):
        if jnp.issubdtype(array.dtype, jnp.floating):
            total = total + jnp.sum(array.astype(jnp.float32))
    return total


def _compiler_collectives(
    model: nnx.Module | Build,
    plan: Plan | None,
    call: ModelCall,
    sizes: dict[str, int],
) -> Traffic:
    mesh = mesh_of(sizes)

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        divides = shape and shape[0] % batch_parts(mesh.shape) == 0
        return NamedSharding(mesh, PartitionSpec(BATCH) if divides else PartitionSpec())

    with jax.set_mesh(mesh):
        loss, *state = _loss(_parallelized(model, plan, mesh), call)
        arrays = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x.shape)) for x in call.arrays
        ]
        traced = jax.jit(lambda *inputs: gradient(loss)(*inputs)[1]).trace(*state, arrays)
        _, text = compile_with_spmd_text(traced.lower())
    return added_by_compiler(
        count_collectives(traced.jaxpr, sizes), count_collectives_in_hlo(text, sizes)
    )


def _rows(model: nnx.Module) -> Iterator[ModuleRow]:
    listed: set[int] = set()  # ids of parameters: modules may share them
    for path, module in sorted(nnx.iter_modules(model), key=_sort_key):
        parameters = []
        for name, variable in vars(module).items():
            if isinstance(variable, PARAMETERS) and id(variable) not in listed:
                listed.add(id(variable))
                dtype = str(variable.get_value().dtype)
                split = tuple(map(axes_of, spec_of(variable)))
                parameters.append(SplitParameter(name, tuple(variable.shape), dtype, split))
        role = role_of(module)
        style = role.style if role else None
        if parameters or style:
            kind = original_class(module).__name__
            yield ModuleRow(dotted(path), kind, style, tuple(parameters))


def _sort_key(item: tuple[Sequence[object], nnx.Module]) -> list[str]:
    # The key sorts 10 after 9, and numbers before names.
    path, _ = item
    return [f"{name:09}" if isinstance(name, int) else str(name) for name in path]


def _module_of(collective: Collective) -> str:
    paths = re.findall(rf"{_SCOPE}([\w.]*)", collective.scope)
    return paths[-1] if paths else ""


def _sections(explanation: Explanation) -> Iterator[str]:
    sizes = explanation.sizes
    patterns = explanation.patterns
    total = sum(parameter.bytes(mesh_shape()) for parameter in explanation.parameters)
    yield (
        f"mesh {describe_mesh(sizes)}: {explanation.bytes_per_device:,} bytes of parameters on "
        f"each device, {total:,} in total"
    )
    groups: dict[str, list[ModuleRow]] = {}
    for row in explanation.rows:
        groups.setdefault(patterns[row.path], []).append(row)
    lines: list[Cells] = []
    for pattern, rows in groups.items():
        lines += _module_cells(pattern, rows, sizes)
    yield columns(_MODULE_HEADER, lines)

    def place(collective: Collective) -> Cells:
        path = _module_of(collective)
        return explanation.patterns.get(path, path) or ROOT, _pass_of(collective)

    traffic = [
        *traffic_rows(explanation.traffic, _BY_PROGRAM, place),
        *traffic_rows(explanation.added, _BY_COMPILER, place),
    ]
    if traffic:
        yield columns(_TRAFFIC_HEADER, traffic)
        sent_by_axes = with_joined_axes(explanation.sent_by_axes())
        totals = ", ".join(f"{sent:,.0f} over {axes}" for axes, sent in sent_by_axes.items())
        yield f"each device sends, forward and backward, in bytes: {totals}"
        yield from _missing_sum(explanation)
    if explanation.products:
        yield (
            f"each device computes {explanation.flops:,.0f} FLOPs in matrix products, and saves "
            f"{explanation.saved:,.0f} bytes for the backward pass"
        )
    for note in explanation.notes:
        yield f"note: {note}"


def _missing_sum(explanation: Explanation) -> Iterator[str]:
    """Yields why the first layer that is split by columns has no sum backward, if it has none."""
    over_tp = [collective for collective in explanation.traffic if TP in collective.axes]
    by_columns = [
        row.path.removesuffix(_KERNELS)
        for row in explanation.rows
        if isinstance(row.style, Colwise) or row.path.endswith(_KERNELS)
    ]
    if not over_tp or not by_columns:
        return
    # Layers that share an input share the sum, which may be counted in one beside or around them.
    block = by_columns[0].rpartition(".")[0]
    summed = {_module_of(collective) for collective in over_tp if collective.backward}
    if not any(path.startswith(block) or block.startswith(path) for path in summed):
        yield (
            f"{by_columns[0]} has no sum over tp backward: no parameter comes before it, so its "
            "input needs no gradient"
        )


def _module_cells(pattern: str, rows: list[ModuleRow], sizes: Sizes) -> Iterator[Cells]:
    row = rows[0]
    times = f" x {len(rows)}" if len(rows) > 1 else ""
    first = (f"{pattern or ROOT}{times}", row.kind, format_style(row.style) if row.style else "")
    if not row.parameters:
        yield (*first, "", "", "", "")
    for parameter in row.parameters:
        shape = "x".join(map(str, parameter.shape)) or "scalar"
        dims = [_join_axes(axes, sizes) for axes in parameter.split]
        split = " ".join(dim or "-" for dim in dims) if any(dims) else "whole"
        yield (*first, parameter.name, shape, split, f"{len(rows) * parameter.bytes(sizes):,}")
        first = ("", "", "")


def _join_axes(axes: Iterable[str], sizes: Sizes) -> str:
    return "+".join(axis for axis in axes if sizes[axis] > 1)
