"""`explain`: how a model is split and what it moves, module by module."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.audit.audit import added_by_compiler
from jaxtp.audit.census import count_collectives
from jaxtp.audit.compiling import compile_with_spmd_text
from jaxtp.audit.hlo import count_collectives_in_hlo
from jaxtp.audit.loops import A_TURN, AT_MOST
from jaxtp.audit.tables import columns
from jaxtp.communication import Collective, Traffic, sums, total_sent
from jaxtp.explain.advice import advice
from jaxtp.explain.moving import module_of, passes
from jaxtp.mesh import AXES, BATCH, TP, abstract_mesh, axes_of, batch_parts, describe_mesh, mesh_of, parts
from jaxtp.parallel.calls import original_class
from jaxtp.parallel.parallelize import as_written, parallelize
from jaxtp.parallel.plan import Plan, PlanError, patterns_for, spelled
from jaxtp.parallel.styles import Style
from jaxtp.parallel.swap import role_of
from jaxtp.propose.flows import ROOT
from jaxtp.propose.subject import Meant, Subject, sizes_of, subject_of


@dataclass(frozen=True)
class Split:
    """A parameter as it is stored."""

    name: str
    """The name of the parameter in its module."""

    shape: tuple[int, ...]
    dtype: str
    spec: PartitionSpec

    def shard(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of the part on a device."""
        entries = (*self.spec, *(None,) * (len(self.shape) - len(self.spec)))
        return tuple(size // parts(sizes, axes_of(entry)) for size, entry in zip(self.shape, entries, strict=True))

    def bytes(self, sizes: Mapping[str, int]) -> int:
        """Returns the bytes on a device."""
        return math.prod(self.shard(sizes)) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Row:
    """A module that has parameters or a style."""

    path: str
    """The dotted path; the first one of a shared module."""

    kind: str
    """The name of its class."""

    style: Style | None
    parameters: tuple[Split, ...]

    @property
    def alike(self) -> tuple[Any, ...]:
        """Returns what is equal for modules that one line can stand for."""
        return self.kind, self.style, self.parameters


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; `str` of it is a text of tables, and `plot` draws it."""

    sizes: dict[str, int]
    """Devices along each axis."""

    rows: tuple[Row, ...]
    """The modules, in the model's order."""

    traffic: Traffic
    """The collectives of one forward and backward pass that the program asks for; empty without inputs."""

    added: Traffic
    """Collectives that the compiler's partitioner adds between the layers, where it was asked."""

    notes: tuple[str, ...]
    """Notes on what the plan costs that another one would not."""

    @cached_property
    def patterns(self) -> dict[str, str]:
        """Returns the pattern of each row's path."""
        return patterns_for({row.path: row.alike for row in self.rows})

    @property
    def groups(self) -> dict[str, list[Row]]:
        """Returns the rows by pattern; those of one pattern are alike."""
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(self.patterns[row.path], []).append(row)
        return groups

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all parameters."""
        return sum(split.bytes(self.sizes) for row in self.rows for split in row.parameters)

    def sent(self, axis: str) -> float:
        """Returns the bytes that a device sends along an axis, alone or with others, forward and backward."""
        along = ({one: n for one, n in found.items() if axis in one.axes} for found in (self.traffic, self.added))
        return sum(map(total_sent, along))

    def sent_by_axes(self) -> dict[tuple[str, ...], float]:
        """Returns the bytes that a device sends, forward and backward, over each group of axes."""
        each: dict[tuple[str, ...], float] = {(axis,): 0.0 for axis in AXES if self.sizes[axis] > 1}
        for one, count in (*self.traffic.items(), *self.added.items()):
            each[one.axes] = each.get(one.axes, 0.0) + total_sent({one: count})
        return {axes: sent for axes, sent in each.items() if sent}

    def record(self) -> dict[str, Any]:
        """Returns all of it as JSON can hold it; sizes in bytes."""
        modules = [
            {
                "module": row.path,
                "class": row.kind,
                "style": spelled(row.style) if row.style else None,
                "parameters": [
                    {
                        "name": split.name,
                        "shape": list(split.shape),
                        "dtype": split.dtype,
                        "split": [list(axes_of(entry)) for entry in split.spec],
                        "bytes_per_device": split.bytes(self.sizes),
                    }
                    for split in row.parameters
                ],
            }
            for row in self.rows
        ]
        moves = [
            {
                "module": module_of(one) or ROOT,
                "pass": "backward" if one.backward else "forward",
                "collective": one.kind,
                "axes": list(one.axes),
                "by": by,
                "count": count,
                "bytes_sent": total_sent({one: count}),
            }
            for traffic, by in ((self.traffic, "the program"), (self.added, "the compiler"))
            for one, count in traffic.items()
        ]
        return {
            "mesh": self.sizes,
            "parameter_bytes_per_device": self.bytes_per_device,
            "bytes_sent": {"+".join(axes): sent for axes, sent in self.sent_by_axes().items()},
            "modules": modules,
            "collectives": moves,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return "\n\n".join(_sections(self))


def explain(
    model: nnx.Module | Callable[[], nnx.Module],
    *inputs: Any,
    plan: Plan | None = None,
    mesh: Meant = None,
    call: Callable[..., Any] | None = None,
    compiled: bool = False,
) -> Explanation:
    """Returns how a model is split, and what it moves: nothing is computed, and no array is made.

    Args:
      model: what `parallelize` gave; or a model as it was written, real or abstract, or a function that makes it.
      *inputs: of one call, a global batch: pytrees of arrays or `jax.ShapeDtypeStruct`s, and anything else, which is
        passed as it is. Without them there are no collectives.
      plan: of a model that is not parallel yet.
      mesh: by default the one in context. The devices need not be there: sizes do, `{"fsdp": 2, "tp": 4}`. A parallel
        model is planned anew for it.
      call: what is run, of the model and the inputs; by default `model(*inputs)`.
      compiled: compiles too, for devices that are there, and says what the compiler adds between the layers.

    Raises:
      PlanError: the plan does not fit, or the model has one already.
      MeshError: there is no mesh; or `compiled` and there are not so many devices.
    """
    sizes = sizes_of(mesh, "explain")
    abstract = abstract_mesh(sizes)
    with jax.sharding.use_abstract_mesh(abstract):
        parallel = _planned(model, plan, abstract)
        written, styles, _ = as_written(parallel)
        subject = subject_of(written, inputs, call)
        run, state = passes(parallel, subject)
        found = count_collectives(jax.make_jaxpr(run)(state, subject.arrays), sizes) if inputs else {}
        notes = advice(subject, styles, sizes) if inputs and sizes[TP] > 1 else []
    added = _added(model, plan, subject, sizes) if inputs and compiled else {}
    return Explanation(sizes, tuple(_rows(parallel)), found, added, (*notes, *_inexact((*found, *added))))


def _planned(model: nnx.Module | Callable[[], nnx.Module], plan: Plan | None, mesh: Mesh | AbstractMesh) -> nnx.Module:
    """Returns the abstract parallel model."""
    written, made, fsdp = as_written(model)
    if made and plan:
        raise PlanError("the model is parallel already, by a plan of its own; give explain one or the other")
    return parallelize(written, plan or made, mesh=mesh, fsdp=fsdp)


def _added(model: Any, plan: Plan | None, subject: Subject, sizes: dict[str, int]) -> Traffic:
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh):
        parallel = _planned(model, plan, mesh)
        run, state = passes(parallel, subject)
        arrays = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_batch(x.shape, mesh)) for x in subject.arrays]
        traced = jax.jit(run).trace(state, arrays)
        _, text = compile_with_spmd_text(traced.lower())
    written, realised = count_collectives(traced.jaxpr, sizes), count_collectives_in_hlo(text, sizes)
    return added_by_compiler(written, realised)


def _inexact(found: Iterable[Collective]) -> Iterator[str]:
    """Yields notes on what is not counted exactly."""
    meanings = {
        A_TURN: "in a loop that turns as often as its data say, what moves is counted for one turn",
        AT_MOST: "of a conditional every branch is counted, so that less may move",
    }
    for counted, meaning in meanings.items():
        if modules := dict.fromkeys(module_of(one) or ROOT for one in found if one.counted == counted):
            yield f"{', '.join(modules)}: {meaning}"


def _batch(shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    divides = shape and shape[0] % batch_parts(mesh.shape) == 0
    return NamedSharding(mesh, PartitionSpec(BATCH) if divides else PartitionSpec())


def _rows(model: nnx.Module) -> Iterator[Row]:
    seen: set[int] = set()
    for path, module in sorted(nnx.iter_modules(model), key=lambda item: tuple(map(_in_order, item[0]))):
        role = role_of(module)
        own = {n: v for n, v in vars(module).items() if isinstance(v, nnx.Param) and id(v) not in seen}
        seen |= {id(parameter) for parameter in own.values()}
        if own or (role and role.style):
            name = ".".join(map(str, path))
            yield Row(name, original_class(module).__name__, role.style if role else None, tuple(_splits(own)))


def _in_order(name: Any) -> tuple[bool, int, str]:
    """Returns a key that sorts numbers by size, before names."""
    return (False, name, "") if isinstance(name, int) else (True, 0, str(name))


def _splits(parameters: Mapping[str, nnx.Param[Any]]) -> Iterator[Split]:
    for name, parameter in parameters.items():
        spec = PartitionSpec(*(parameter.get_metadata().get("out_sharding") or ()))
        yield Split(name, tuple(parameter.shape), str(parameter.dtype), spec)


def _sections(found: Explanation) -> Iterator[str]:
    whole = sum(math.prod(s.shape) * jnp.dtype(s.dtype).itemsize for row in found.rows for s in row.parameters)
    yield (
        f"mesh {describe_mesh(found.sizes)}: {found.bytes_per_device:,} bytes of parameters on a device, of {whole:,}"
    )
    rows = [cells for pattern, rows in found.groups.items() for cells in _group(pattern, rows, found.sizes)]
    yield columns(("module", "of", "style", "parameter", "shape", "split", "bytes on a device"), rows)
    if found.traffic or found.added:
        yield columns(("module", "pass", "collective", "over", "by", "count", "bytes sent"), list(_move_cells(found)))
        totals = ", ".join(f"{sent:,.0f} over {'+'.join(axes)}" for axes, sent in found.sent_by_axes().items())
        yield f"a device sends, forward and backward, in bytes: {totals}"
    yield from (f"note: {note}" for note in found.notes)


def _group(pattern: str, rows: list[Row], sizes: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    row, times = rows[0], f" x {len(rows)}" if len(rows) > 1 else ""
    style = spelled(row.style) if row.style else ""
    first = (f"{pattern or ROOT}{times}", row.kind, style)
    if not row.parameters:
        yield (*first, "", "", "", "")
    for i, split in enumerate(row.parameters):
        shape = "x".join(map(str, split.shape)) or "scalar"
        total = f"{len(rows) * split.bytes(sizes):,}"
        yield (*(first if i == 0 else ("", "", "")), split.name, shape, _written(split.spec, sizes), total)


def _written(spec: PartitionSpec, sizes: Mapping[str, int]) -> str:
    """Returns for each dim the axes of several devices that divide it."""
    entries = ["+".join(axis for axis in axes_of(entry) if sizes[axis] > 1) for entry in spec]
    return " ".join(entry or "-" for entry in entries) if any(entries) else "whole"


def _move_cells(found: Explanation) -> Iterator[tuple[str, ...]]:
    def place(one: Collective) -> tuple[str, ...]:
        module, direction = module_of(one), "backward" if one.backward else "forward"
        return found.patterns.get(module, module) or ROOT, direction, one.kind, "+".join(one.axes), one.counted

    for traffic, by in ((found.traffic, "the program"), (found.added, "the compiler")):
        for (*key, counted), (count, sent) in sums(traffic, place).items():
            yield *key, by, f"{count:,} {counted}".strip(), f"{sent:,.0f}"
