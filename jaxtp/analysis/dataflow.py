"""Finds which layers feed which other layers, through which operations, in a model's jaxpr.

The walk assumes that every stock layer is a column layer. It follows each split dim through the
jaxpr (with jit, remat and scans) until a layer sums over it (the row layer of a pair) or an
operation needs it whole. `propagation_rules.py` has the rules of primitives. `regions.py` excludes
layers whose output is needed whole, and repeats the walk.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Atom
from jax.extend.core import JaxprEqn

from jaxtp.analysis.census import array_bytes
from jaxtp.analysis.collective import ALL_GATHER, ALL_REDUCE, Collective
from jaxtp.analysis.propagation_rules import (
    REDUCTIONS,
    Blocked,
    Dims,
    Walk,
    agree,
    pass_through,
    shape_of,
)
from jaxtp.analysis.traced_model import Boundary, TracedModel, read_boundary
from jaxtp.mesh import TOKENS, TP, Sizes, parts
from jaxtp.plans.stock import signature

ROOT = "the model itself"  # Name in messages of the module whose path is empty
Columns = frozenset[str]  # Paths of the column layers whose outputs split an array


@dataclass(frozen=True)
class ArrayInfo:
    """Facts about an array."""

    dim: int | None = None  # split over tp if the layers of `columns` are column layers
    columns: Columns = frozenset()
    has_grad: bool = False  # depends on a parameter
    batched: bool = False  # depends on the inputs, so it is split along the batch
    summed: Columns = frozenset()  # paths of the column layers whose split outputs it reduces
    broadcast_from: tuple[int, frozenset[int]] | None = field(default=None, compare=False)
    """Bytes before a broadcast, and the dims that are not broadcast."""
    key: object = field(default_factory=object, compare=False)  # the same in all uses of one array
    entered: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """Modules that took the array unchanged, outermost first, with the argument's name or
    position."""
    left: tuple[str, ...] = field(default=(), compare=False)
    """Modules that returned the array unchanged, innermost first."""


@dataclass(frozen=True)
class LayerDims:
    """Dims of input and output, counted from the front."""

    row: int | None  # the input dim that a row layer splits; None for ids and norms
    column: int | None  # the output dim that a column layer splits; None for norms
    passed: Mapping[int, int]  # input dims with independent entries, and their output dims


@dataclass(frozen=True)
class LayerCall:
    """A stock layer's call."""

    path: str
    method: str
    input: ArrayInfo
    avals: tuple[Any, Any]  # of input and output
    times: int  # calls in one forward pass, more than one in a scan
    # None for `attend`, and layers whose output features do not follow from their input's
    dims: LayerDims | None

    @property
    def is_row(self) -> bool:
        """Whether its input is split along the dim that a row layer splits."""
        dim = self.input.dim
        return self.dims is not None and dim is not None and dim == self.dims.row


@dataclass
class Dataflow:
    """The dataflow between layers; bytes per device are for a forward and backward pass."""

    tp: int
    batch_shards: int  # shards of a batch's tokens
    calls: list[LayerCall] = field(default_factory=list)
    # Norms can run on shards of dims that they do not normalise.
    norms: list[LayerCall] = field(default_factory=list)
    joined: list[Columns] = field(default_factory=list)  # layers that must be split together
    # Layers whose output is needed whole, and why
    blocked: dict[str, str] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)  # layers whose split output a loss reduces
    collectives: dict[Columns, Counter[Collective]] = field(default_factory=dict)
    """Collectives over tp between layers, by the column layers that cause them."""
    outputs: dict[Columns, Any] = field(default_factory=dict)
    """Avals of split model outputs."""

    @property
    def layers(self) -> list[str]:
        """Stock layers in call order."""
        return list(dict.fromkeys(call.path for call in self.calls))

    def calls_of(self, *paths: str) -> list[LayerCall]:
        """Returns the calls of layers."""
        return [call for call in self.calls if call.path in paths]

    def input_bytes(self, calls: Iterable[LayerCall]) -> float:
        """Returns the bytes to reduce input gradients of column layers, once for each input."""
        inputs = {(call.input.key, call.times): call for call in calls if call.input.has_grad}
        return sum(self.reduced(call, 0) for call in inputs.values())

    def output_bytes(self, calls: Iterable[LayerCall]) -> float:
        """Returns the bytes to reduce row layers' outputs."""
        return sum(self.reduced(call, 1) for call in calls)

    def reduced(self, call: LayerCall, side: int) -> float:
        """Returns the bytes to all-reduce a call's input (0) or output (1)."""
        return call.times * self.over_tp(ALL_REDUCE, array_bytes(call.avals[side]))

    def over_tp(self, kind: str, size: float) -> float:
        """Returns the bytes of a collective on an array of the global batch."""
        return Collective(kind, (TP,), self.tp, size / self.batch_shards).bytes_sent


def _layer_dims(module: nnx.Module, method: str, ndim: int) -> LayerDims | None:
    dims = signature(module)
    if dims is None or method != "__call__":
        return None
    inputs = {letter: dim % ndim for letter, dim in dims.inputs.items()}
    output_ndim = ndim + dims.more_dims
    outputs = {letter: dim % output_ndim for letter, dim in dims.outputs.items()}
    row = inputs.get(dims.row or "")
    column = outputs.get(dims.column or "")
    if row is None and column is None and inputs.keys() != outputs.keys():
        return None
    passed = {}
    if dims.batch_ndim is not None:
        input_dims = sorted({*range(ndim)} - {*inputs.values()})
        output_dims = sorted({*range(output_ndim)} - {*outputs.values()})
        windows = dims.batch_ndim - 1 - max(len(inputs), 1)  # dims that a convolution mixes
        passed = dict(zip(input_dims[: len(input_dims) - windows], output_dims, strict=False))
    return LayerDims(row, column, passed)


def parameter_bytes(module: nnx.Module) -> int:
    """Returns the parameter bytes of a module with its submodules."""
    return sum(map(array_bytes, jax.tree.leaves(nnx.state(module, nnx.Param))))


def find_dataflow(traced: TracedModel, excluded: Iterable[str], sizes: Sizes) -> Dataflow:
    """Follows the split output of every stock layer outside `excluded`.

    tp must divide every split dim.
    """
    walk = _DataflowWalk(traced, frozenset(excluded), sizes)
    jaxpr = traced.jaxpr.jaxpr
    infos = [ArrayInfo(has_grad=is_param) for is_param in traced.is_param]
    infos += [ArrayInfo(batched=True) for _ in jaxpr.invars[len(infos) :]]
    for info, variable in zip(walk.run(jaxpr, infos, 1), jaxpr.outvars, strict=True):
        if info.dim is not None:
            walk.result.outputs[info.columns] = variable.aval
    return walk.result


class _DataflowWalk(Walk[ArrayInfo, Dataflow]):
    def __init__(self, traced: TracedModel, excluded: Columns, sizes: Sizes):
        super().__init__(ArrayInfo(), lambda: Dataflow(sizes[TP], parts(sizes, TOKENS)))
        self.modules = traced.modules
        self.excluded = excluded
        self.path: list[str] = []
        self.is_loss = all(shape_of(variable) == () for variable in traced.jaxpr.jaxpr.outvars)
        self.why_summed: dict[str, str] = {}
        # The stock layer around the equation, and its input
        self.layer: tuple[Boundary, ArrayInfo, Any] | None = None

    def _equation(self, equation: JaxprEqn, facts: list[ArrayInfo], times: int) -> list[ArrayInfo]:
        if boundary := read_boundary(equation):
            return [self.cross(boundary, equation, facts[0], times)]
        if self.layer:  # `leave_layer` decides the facts about a stock layer's output
            return [self.unknown] * len(equation.outvars)
        return super()._equation(equation, facts, times)

    def cross(
        self, boundary: Boundary, equation: JaxprEqn, info: ArrayInfo, times: int
    ) -> ArrayInfo:
        aval = equation.invars[0].aval
        path = boundary.path
        if boundary.enters:
            if not self.path or self.path[-1] != path:
                self.path.append(path)
            if boundary.argument:
                info = replace(info, entered=(*info.entered, (path, boundary.argument)))
            if self.layer is None and signature(self.modules[path]):
                self.layer = (boundary, info, aval)
            return info
        if path in self.path:
            del self.path[self.path.index(path) :]
        if self.layer and self.layer[0].path == path:
            info = self.leave_layer(*self.layer, aval, times)
        left = (*info.left, path) if boundary.argument else info.left
        return replace(info, left=left, entered=())

    def leave_layer(
        self, boundary: Boundary, info: ArrayInfo, before: Any, after: Any, times: int
    ) -> ArrayInfo:
        self.layer = None
        self.result.blocked |= {path: self.why_summed[path] for path in info.summed}
        module = self.modules[boundary.path]
        dims = _layer_dims(module, boundary.method, before.ndim)
        call = LayerCall(boundary.path, boundary.method, info, (before, after), times, dims)
        is_norm = dims is not None and dims.column is None and dims.row is None
        (self.result.norms if is_norm else self.result.calls).append(call)
        output = ArrayInfo(has_grad=True, batched=info.batched)
        if info.dim is not None and not call.is_row:
            if dims and info.dim in dims.passed:
                if is_norm:  # runs on shards; the gradient of its parameters is all-reduced
                    self.count(info.columns, ALL_REDUCE, parameter_bytes(module), 1)
                else:  # runs on whole arrays: its input and the gradient of its output are gathered
                    self.count(info.columns, ALL_GATHER, self.bytes(info, before), times)
                    self.count(info.columns, ALL_GATHER, self.bytes(output, after), times)
                return replace(output, dim=dims.passed[info.dim], columns=info.columns)
            whole = f"all {before.shape[info.dim]} elements of the split dim on one device"
            self.block(info.columns, f"goes into {boundary.path}, which needs {whole}")
        if dims is None or dims.column is None or boundary.path in self.excluded:
            return output
        return replace(output, dim=dims.column, columns=frozenset({boundary.path}))

    def _operation(self, equation: JaxprEqn, facts: list[ArrayInfo], times: int) -> list[ArrayInfo]:
        merged = _merged(facts)
        columns = merged.columns
        summed = merged.summed
        has_grad = merged.has_grad and equation.primitive.name != "stop_gradient"
        source = _broadcast_source(equation, facts)
        dims: Dims = [None] * len(equation.outvars)
        if columns:
            dims = self.pass_operation(equation, facts, columns, times)
        if self.reduces(equation) and set(dims) <= {None}:
            summed |= columns
        results = []
        for dim, variable in zip(dims, equation.outvars, strict=True):
            split_by: Columns = frozenset() if dim is None else columns
            aval: Any = variable.aval
            result_grad = has_grad and bool(jnp.issubdtype(aval.dtype, jnp.inexact))
            results.append(ArrayInfo(dim, split_by, result_grad, merged.batched, summed, source))
        return results

    def reduces(self, equation: JaxprEqn) -> bool:
        """Returns whether an all-reduce of the result suffices, as in a loss of split logits."""
        return self.is_loss and equation.primitive.name in REDUCTIONS

    def pass_operation(
        self, equation: JaxprEqn, infos: list[ArrayInfo], columns: Columns, times: int
    ) -> Dims:
        name = equation.primitive.name
        tp = self.result.tp
        try:
            dims = pass_through(equation, [info.dim for info in infos])
            for dim, result in zip(dims, equation.outvars, strict=True):
                size = 0 if dim is None else shape_of(result)[dim]
                if size % tp:
                    raise Blocked(
                        f"becomes a dim of {size} by {name}, which tp {tp} does not divide"
                    )
        except Blocked as why:
            innermost = self.path[-1] if self.path else ""
            why_here = f"{why} (in {innermost or ROOT})"
            if self.reduces(equation):
                self.result.summed |= columns
                # The reason is used if a layer reads the result.
                self.why_summed |= dict.fromkeys(columns, f"its output {why_here}")
                for result in equation.outvars:
                    reduced = self.bytes(ArrayInfo(batched=True), result.aval)
                    self.count(columns, ALL_REDUCE, reduced, times)
            else:
                self.block(columns, why_here)
            return [None] * len(equation.outvars)
        self.result.joined.append(columns)
        for info, operand in zip(infos, equation.invars, strict=True):
            # The gradient of a whole operand is partial on each device.
            if info.dim is None and info.has_grad:
                has_split_dim = _has_split_dim(equation, infos, info, operand.aval)
                kind = ALL_GATHER if has_split_dim else ALL_REDUCE
                self.count(columns, kind, self.bytes(info, operand.aval), times)
        return dims

    def _scan(self, equation: JaxprEqn, facts: list[ArrayInfo], times: int) -> list[ArrayInfo]:
        return super()._scan(equation, [replace(info, entered=()) for info in facts], times)

    def _join(self, facts: Sequence[ArrayInfo], variable: Atom, times: int) -> ArrayInfo:
        """Splits a variable if a value is split; gradients of whole values are gathered."""
        merged = _merged(facts)
        columns = merged.columns
        if not columns:
            return merged
        try:
            dim = agree([info.dim for info in facts])
        except Blocked as why:
            self.block(columns, str(why))
            return ArrayInfo(has_grad=merged.has_grad, batched=merged.batched)
        self.result.joined.append(columns)
        for info in facts:
            if info.dim is None and info.has_grad:
                self.count(columns, ALL_GATHER, self.bytes(info, variable.aval), times)
        return replace(merged, dim=dim)

    def _shift(self, fact: ArrayInfo, by: int) -> ArrayInfo:
        fact = replace(fact, key=object(), broadcast_from=None, entered=(), left=())
        if fact.dim is None:
            return fact
        if fact.dim + by < 0:
            self.block(fact.columns, "is the dim that a scan runs over")
            return replace(fact, dim=None, columns=frozenset())
        return replace(fact, dim=fact.dim + by)

    def block(self, columns: Columns, why: str) -> None:
        for path in columns:
            self.result.blocked.setdefault(path, f"its output {why}")

    def count(self, columns: Columns, kind: str, size: float, times: int) -> None:
        traffic = self.result.collectives.setdefault(columns, Counter())
        traffic[Collective(kind, (TP,), self.result.tp, size)] += times

    def bytes(self, info: ArrayInfo, aval: Any) -> float:
        size = info.broadcast_from[0] if info.broadcast_from else array_bytes(aval)
        return size / (self.result.batch_shards if info.batched else 1)


def _merged(infos: Iterable[ArrayInfo]) -> ArrayInfo:
    """Returns the facts about an array that depends on others, without its split dim."""
    columns: set[str] = set()
    summed: set[str] = set()
    has_grad = batched = False
    for info in infos:
        columns |= info.columns
        summed |= info.summed
        has_grad |= info.has_grad
        batched |= info.batched
    return ArrayInfo(None, frozenset(columns), has_grad, batched, frozenset(summed))


def _broadcast_source(
    equation: JaxprEqn, infos: list[ArrayInfo]
) -> tuple[int, frozenset[int]] | None:
    name = equation.primitive.name
    if name == "broadcast_in_dim" and shape_of(equation.invars[0]):
        aval: Any = equation.invars[0].aval
        dims = equation.params["broadcast_dimensions"]
        unbroadcast = array_bytes(aval), frozenset(range(aval.ndim))
        size, varying = infos[0].broadcast_from or unbroadcast
        return size, frozenset(dims[dim] for dim in varying if aval.shape[dim] > 1)
    if name in ("convert_element_type", "mul", "add", "neg"):
        arrays = [info for info, x in zip(infos, equation.invars, strict=True) if shape_of(x)]
        if len(arrays) == 1:
            return arrays[0].broadcast_from
    return None


def _has_split_dim(equation: JaxprEqn, infos: list[ArrayInfo], info: ArrayInfo, aval: Any) -> bool:
    side, dim = next((i, other.dim) for i, other in enumerate(infos) if other.dim is not None)
    if equation.primitive.name == "dot_general":
        return dim in equation.params["dimension_numbers"][1][side]
    if info.broadcast_from:
        return dim in info.broadcast_from[1]
    return bool(aval.ndim > (dim or 0) and aval.shape[dim] > 1)
