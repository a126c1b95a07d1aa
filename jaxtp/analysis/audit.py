"""Audit of a compiled step: planned against realized shardings and communication.

A layer that moves too much makes its budget (`layer_costs.py`) and the jaxpr differ. A sharding
that the compiler has to repair makes the jaxpr and the HLO after SPMD partitioning differ.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec, Sharding
from jax.stages import Compiled

from jaxtp.analysis.census import A_TURN, count_collectives
from jaxtp.analysis.collective import Axes, Collective, Place, bytes_by_place, traffic_rows
from jaxtp.analysis.compiling import compile_with_spmd_text
from jaxtp.analysis.hlo import count_collectives_in_hlo
from jaxtp.analysis.tables import Cells, columns
from jaxtp.config.entry import BriefError
from jaxtp.layers.parameter import is_variable
from jaxtp.mesh import REPLICAS, TP, MeshError, MeshLike, Sizes, as_mesh, mesh_sizes, parts
from jaxtp.plans.layouts import dim_over

Budget = Mapping[Place, float]  # Bytes that each device may send in a step, by place
LARGE = 2**20  # Bytes above which an unintended replication is an error
ROUNDING = 1e-9  # Relative error of a budget, which is a sum of fractions


class AuditError(BriefError, ValueError):
    """A compiled step breaks its plan."""


@dataclass(frozen=True)
class Holding:
    """An array of the state, as a compiled step holds it."""

    name: str  # dotted path
    shape: tuple[int, ...]
    shard: tuple[int, ...]  # shape of the part on one device
    dtype: str
    itemsize: int
    declared: PartitionSpec | None
    # Mesh axes of more than one device along which the compiled step holds copies
    replicated_over: Axes

    @property
    def bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def bytes_per_device(self) -> int:
        """Bytes of one shard."""
        return math.prod(self.shard) * self.itemsize

    @property
    def unintended(self) -> Axes:
        """Replicated axes that its spec names; all replicated axes if it declares no spec."""
        declared = self.declared
        if declared is None:
            return self.replicated_over
        return tuple(axis for axis in self.replicated_over if dim_over(axis, declared) is not None)

    @property
    def declaration(self) -> str:
        """The declared spec, in words."""
        if self.declared is None:
            return "no spec declared"
        if self.unintended:
            return f"{self.declared}, which the compiler did not keep"
        return str(self.declared)

    def matrices(self) -> set[tuple[int, ...]]:
        """Returns the shapes in which it may be sent: each dim whole or sharded.

        A stacked variable may also be sent layer by layer.
        """
        if len(self.shape) < 2:
            return set()
        shapes = {*itertools.product(*zip(self.shape, self.shard, strict=True))}
        if len(self.shape) > 2:
            shapes |= {shape[1:] for shape in shapes}
        return shapes


@dataclass(frozen=True)
class Audit:
    """Result of `audit`."""

    holdings: tuple[Holding, ...]  # every array of the state
    written: Counter[Collective]  # collectives that the program asks for, and how often each runs
    realised: Counter[Collective]  # collectives after partitioning
    budget: Budget | None  # bytes that the modules may send
    sizes: Sizes  # devices along each axis of the mesh
    # Modules that are written on global arrays: the compiler chooses their collectives
    global_view: tuple[str, ...]
    # Modules whose loops may have unknown trip counts; one iteration is counted
    uncounted: tuple[str, ...]
    compiled: Compiled  # the program itself: it can be run, and has a `memory_analysis()`

    @property
    def added(self) -> Counter[Collective]:
        """Collectives that the partitioner added."""
        return added_by_compiler(self.written, self.realised)

    def problems(self, large: int = LARGE) -> list[str]:
        """Returns violations of the plan, one line each.

        Args:
          large: bytes above which an undeclared replication over fsdp or tp counts.
        """
        return [
            *self._unintended_replication(large),
            *self._weights_over_tp(),
            *self._added_collectives(),
            *self._uncounted(),
            *self._over_budget(),
        ]

    def check(self, large: int = LARGE) -> None:
        """Raises an `AuditError` that lists the `problems`, if there are any."""
        problems = self.problems(large)
        if problems:
            raise AuditError("\n  ".join(["the compiled step breaks its plan:", *problems]))

    def __str__(self) -> str:
        """Returns tables of the state's arrays and of communication by module."""
        arrays = []
        for holding in self.holdings:
            sizes = _by(holding.shape), _by(holding.shard), holding.dtype
            per_device = f"{holding.bytes_per_device:,}"
            arrays.append((holding.name, *sizes, per_device, holding.declaration))
        moved = [
            *traffic_rows(self.added, "the compiler", _place),
            *traffic_rows(self.realised - self.added, "the program", _place),
        ]
        table = columns(
            ("array", "shape", "on a device", "dtype", "bytes on a device", "declared"), arrays
        )
        header = ("module", "collective", "over", "asked for by", "count", "bytes sent by a device")
        return f"{table}\n\n{columns(header, moved)}"

    def _unintended_replication(self, large: int) -> Iterator[str]:
        for holding in self.holdings:
            axes = [axis for axis in holding.unintended if axis not in REPLICAS]
            if axes and holding.bytes > large:
                yield (
                    f"{holding.name} {_by(holding.shape)} is replicated over {' and '.join(axes)}, "
                    f"each device holds {holding.bytes_per_device:,} of its {holding.bytes:,} "
                    f"bytes: {holding.declaration}"
                )

    def _weights_over_tp(self) -> Iterator[str]:
        # Not with a budget, which limits traffic anyway: an activation may have a weight's shape by
        # chance. Gathers over only part of a tp group are of shared kv heads, and allowed.
        if self.budget is not None:
            return
        for collective, times in self.written.items():
            weight = self._weight_like(collective)
            if weight and collective.group == parts(self.sizes, collective.axes):
                yield (
                    f"{times} x {_describe(collective)}, a weight moves (it has the shape of "
                    f"{weight}): a shard of a weight over {TP} should stay on its device"
                )

    def _added_collectives(self) -> Iterator[str]:
        for collective, times in self.added.items():
            if math.prod(collective.shape) <= 1 or _outermost(collective) in self.global_view:
                continue  # global norms need sums of scalars
            weight = self._weight_like(collective)
            if weight and self.global_view and not collective.module:
                # XLA reshards weights for a rule that sees them without padding, and names no
                # module
                continue
            note = f", a weight moves (it has the shape of {weight})" if weight else ""
            yield (
                f"{times} x {_describe(collective)}{note}: no module asked for it, the compiler "
                "added it"
            )

    def _uncounted(self) -> Iterator[str]:
        # A budget is compared with the jaxpr, where the compiler may count more iterations.
        moved = self.realised if self.budget is None else {**self.written, **self.realised}
        for collective, times in moved.items():
            name = _outermost(collective)
            if collective.counted == A_TURN and name not in self.uncounted:
                allow = f'uncounted=("{name}",)'
                if not name:
                    allow = 'jax.named_scope("name") and uncounted=("name",)'
                yield (
                    f"{times} x {_describe(collective)}, in each iteration of a loop whose trip "
                    f"count is unknown; {allow} allows it"
                )

    def _weight_like(self, collective: Collective) -> str | None:
        for holding in self.holdings:
            if TP in collective.axes and collective.shape in holding.matrices():
                return holding.name
        return None

    def _over_budget(self) -> Iterator[str]:
        if self.budget is None:
            return
        for (module, axes), sent in bytes_by_place(self.written).items():
            allowed = self.budget.get((module, axes), 0)
            if sent > allowed * (1 + ROUNDING):
                where = module or "the step"
                yield (
                    f"{where} sends {sent:,.0f} bytes over {'+'.join(axes)}; its budget is "
                    f"{allowed:,.0f}"
                )


def audit(
    step: Any,
    state: Any,
    *args: Any,
    mesh: MeshLike = None,
    budget: Budget | None = None,
    global_view: tuple[str, ...] = (),
    uncounted: tuple[str, ...] = (),
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Audit:
    """Compiles a step and compares the result with the plan.

    Args:
      step: `jax.jit` of a function of `state, *args`, or its `trace`; may return a new state,
        first.
      state: pytree of real or abstract arrays (`jax.ShapeDtypeStruct` with a sharding);
        `nnx.State`s declare theirs.
      mesh: by default the mesh in context; its devices may be virtual.
      budget: bytes that each module may send; by default, whatever the program requests.
      global_view: outermost modules on global arrays (an optimizer that averages over whole dims),
        where the compiler may add collectives.
      uncounted: outermost modules (`jax.named_scope`) where loops with data-dependent trip counts
        are allowed, and count once.

    Raises:
      MeshError: there is no mesh, or it has no devices.
      TypeError: `step` is not a `jax.jit` function, or `state` holds no arrays.
    """
    is_traced = isinstance(step, jax.stages.Traced)
    is_jit = is_traced or hasattr(step, "trace")
    if not is_jit or not jax.tree.leaves(state) or isinstance(state, nnx.Module):
        raise TypeError(
            "audit takes a jax.jit function and the pytree of arrays that is its first argument. "
            "For an nnx.Module: pass `state` of graph, state = nnx.split(module), and call "
            "nnx.merge(graph, state) inside the function"
        )
    placed_on = as_mesh(mesh, "audit")
    if not isinstance(placed_on, Mesh):
        raise MeshError("audit compiles, and an abstract mesh has no devices; pass mesh=")
    with jax.set_mesh(placed_on):
        traced = step if is_traced else step.trace(state, *args)
        compiled, text = compile_with_spmd_text(traced.lower(), compiler_options)
    sizes = mesh_sizes(placed_on)
    return Audit(
        holdings=read_holdings(compiled, state, placed_on),
        written=count_collectives(traced.jaxpr, sizes),
        realised=count_collectives_in_hlo(text, sizes),
        budget=budget,
        sizes=sizes,
        global_view=global_view,
        uncounted=uncounted,
        compiled=compiled,
    )


def read_holdings(compiled: Compiled, state: object, mesh: Mesh) -> tuple[Holding, ...]:
    """Returns how a compiled step holds its state.

    Args:
      compiled: of `state, ... -> state` or `-> (state, ...)`; if it returns no state, reads the
        input's sharding.
      state: real or abstract; its `nnx.Variable`s can declare a spec.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable)
    holdings = []
    shardings = jax.tree.leaves(_state_shardings(compiled, state))
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        spec = None
        if is_variable(leaf):
            spec = leaf.get_metadata().get("out_sharding")
        holding = Holding(
            name=jax.tree_util.keystr(path, simple=True, separator="."),
            shape=tuple(leaf.shape),
            shard=tuple(sharding.shard_shape(leaf.shape)),
            dtype=str(leaf.dtype),
            itemsize=leaf.dtype.itemsize,
            declared=None if spec is None else PartitionSpec(*spec),
            replicated_over=tuple(_replicated_over(sharding, leaf.shape, mesh)),
        )
        holdings.append(holding)
    return tuple(holdings)


def _state_shardings(compiled: Compiled, state: object) -> Any:
    returned = compiled.output_shardings
    first = returned[:1] if isinstance(returned, tuple) else ()
    for shardings in (returned, *first):
        if _paths(shardings) == _paths(state):
            return shardings
    return compiled.input_shardings[0][0]


def _replicated_over(sharding: Sharding, shape: tuple[int, ...], mesh: Mesh) -> Iterator[str]:
    # The axes along which the first device and its neighbour hold the same part.
    indices = sharding.devices_indices_map(tuple(shape))
    first = mesh.devices.flat[0]
    for dim, (axis, size) in enumerate(mesh.shape.items()):
        if size > 1:
            neighbour = mesh.devices.take([1], dim).flat[0]
            if indices[neighbour] == indices[first]:
                yield axis


def _paths(tree: object) -> list[Any]:
    return list(dict(jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)))


def added_by_compiler(
    written: Mapping[Collective, int], realised: Mapping[Collective, int]
) -> Counter[Collective]:
    """Returns the collectives of partitioned HLO (`realised`) that the jaxpr (`written`) lacks.

    Those that are like one in a loop with an unknown trip count are never among them.
    """
    left = Counter[tuple[object, ...]]()
    for collective, times in written.items():
        left[_likeness(collective)] += times
    # The program may run a collective in a loop with an unknown trip count any number of times.
    in_loops = {_likeness(collective) for collective in written if collective.counted == A_TURN}
    added: Counter[Collective] = Counter()
    for collective, times in realised.items():
        likeness = _likeness(collective)
        if likeness in in_loops:
            continue
        added[collective] = max(times - left[likeness], 0)
        left[likeness] -= times - added[collective]
    return +added


def _likeness(collective: Collective) -> tuple[object, ...]:
    # The fields that survive partitioning, which turns a maximum into an all-reduce.
    return (
        re.sub("^all-reduce.*", "all-reduce", collective.kind),
        collective.axes,
        collective.group,
        collective.dtype,
        math.prod(collective.shape),
    )


def _outermost(collective: Collective) -> str:
    return collective.module.split("/")[0]


def _describe(collective: Collective) -> str:
    array = f"{collective.dtype} {_by(collective.shape)} ({collective.bytes:,} bytes)"
    text = f"{collective.kind} of {array} over {'+'.join(collective.axes)}"
    if collective.module:
        text += f" in {collective.module}"
    if collective.source:
        text += f", {collective.source}"
    return text


def _place(collective: Collective) -> Cells:
    return (collective.module or "(step)",)


def _by(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
