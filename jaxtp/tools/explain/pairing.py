"""Pairs column layers with row layers, and chooses which layers to split.

A region is a set of column layers whose outputs meet (q, k and v; gate and up), and the row layers that sum over them,
without communication inside. Regions conflict if a layer is a column in one and a row in the other. The choice splits
the most layers, then sends the fewest bytes. It drops a region if splitting its layers singly would not send more (one
column layer that feeds four row layers).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property

from flax import nnx

from jaxtp.analysis.collective import ALL_GATHER, ALL_REDUCE, Collective, total_sent
from jaxtp.mesh import TOKENS, TP, parts
from jaxtp.parallelize.plan import patterns_for
from jaxtp.parallelize.styles import Colwise, Rowwise, SequenceParallel, Style
from jaxtp.tools.explain.dataflow import Columns, Dataflow, LayerCall, find_dataflow, layer_dims, parameter_bytes
from jaxtp.tools.explain.traced_model import TracedModel


@dataclass(frozen=True)
class Region:
    """Layers that are split together."""

    columns: Columns
    rows: frozenset[str]
    ends_model: bool  # the output of the columns is also an output of the model
    inner_bytes: float
    """Bytes each device sends for gradients of whole operands of split ones, and for split outputs of the model."""
    bytes: float
    """All bytes each device sends in a forward and backward pass; each input of columns is reduced once."""
    bytes_one_by_one: float
    """Bytes it would send if each layer were a column layer whose output is gathered."""

    @property
    def layers(self) -> frozenset[str]:
        """Columns and rows."""
        return self.columns | self.rows

    def conflicts(self, other: "Region") -> bool:
        """Returns whether a layer is a column here and a row there, or the reverse."""
        return bool(self.columns & other.rows or self.rows & other.columns)


@dataclass(frozen=True)
class TPGroup:
    """The device counts that determine all costs."""

    tp: int
    batch_shards: int  # devices that divide the tokens of a batch

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "TPGroup":
        """Returns a mesh's group."""
        return cls(sizes[TP], parts(sizes, TOKENS))

    def columns(self, calls: Iterable[LayerCall]) -> float:
        """Returns the bytes per device to reduce column layers' input gradients, each input once."""
        inputs = {(call.input.key, call.times): call for call in calls if call.input.has_grad}
        return sum(self.sent(call, 0, ALL_REDUCE) for call in inputs.values())

    def rows(self, calls: Iterable[LayerCall]) -> float:
        """Returns the bytes per device to reduce row layers' outputs."""
        return sum(self.sent(call, 1, ALL_REDUCE) for call in calls)

    def sent(self, call: LayerCall, which: int, kind: str = ALL_GATHER) -> float:
        """Returns the bytes per device for a collective on a call's input (0) or output (1)."""
        aval = call.avals[which]
        return call.times * self.over_tp(kind, aval.size * aval.dtype.itemsize)

    def over_tp(self, kind: str, size: float) -> float:
        """Returns the bytes per device for `size` bytes of the global batch."""
        return Collective(kind, (TP,), self.tp, size / self.batch_shards).bytes_sent


@dataclass
class PlanDraft:
    """Styles by module path, and their grounds."""

    traced: TracedModel
    group: TPGroup
    dataflow: Dataflow
    regions: list[Region]  # all
    excluded: dict[str, str]  # layers that cannot be column layers, and why
    chosen: list[Region]
    styles: dict[str, Style] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)  # that each device sends because of a module's style
    shared: dict[str, list[str]] = field(default_factory=dict)
    """Column layers that read an array which a module makes whole, by module."""

    @cached_property
    def patterns(self) -> dict[str, str]:
        """A pattern for each module, after all styles are set."""
        return patterns_for({path: self.styles.get(path) for path in self.traced.modules})

    @property
    def layers(self) -> list[str]:
        """Stock layers in call order."""
        return list(dict.fromkeys(call.path for call in self.dataflow.calls))

    def calls(self, path: str, method: str | None = None) -> list[LayerCall]:
        """Returns a layer's calls."""
        return [call for call in self.dataflow.calls if call.path == path and method in (None, call.method)]

    def region(self, path: str) -> Region | None:
        """Returns a layer's chosen region."""
        return next((region for region in self.chosen if path in region.layers), None)

    def saved(self, *paths: str) -> float:
        """Returns the parameter bytes per device that a split saves."""
        return (1 - 1 / self.group.tp) * sum(parameter_bytes(self.traced.modules[path]) for path in paths)

    def has_vocabulary(self, path: str) -> bool:
        """Returns whether tp can split an embedding's rows."""
        module = self.traced.modules[path]
        splits = isinstance(module, nnx.Embed) and module.num_embeddings % self.group.tp == 0
        return splits and path not in self.traced.tied

    def vocabulary_bytes(self, path: str) -> float:
        """Returns the bytes per device to reduce looked-up vectors, and gradients of `attend`."""
        return self.group.rows(self.calls(path, "__call__")) + self.group.columns(self.calls(path, "attend"))


def draft_plan(traced: TracedModel, group: TPGroup) -> PlanDraft:
    """Pairs layers, then splits heads and vocabularies if that saves more than it sends."""
    regions, dataflow, excluded = _find_regions(traced, group)
    draft = PlanDraft(traced, group, dataflow, regions, excluded, _choose(regions))
    taken = {path for region in draft.chosen for path in region.layers}
    heads = [region for region in regions if not region.rows and not region.layers & taken]
    draft.chosen += [region for region in heads if draft.saved(*region.columns) > region.bytes]
    for path in draft.layers:
        region = draft.region(path)
        if region and path in region.columns:
            draft.styles[path] = Colwise()
            draft.bytes[path] = region.inner_bytes if path == min(region.columns) else 0
        elif region or (draft.has_vocabulary(path) and draft.saved(path) > draft.vocabulary_bytes(path)):
            draft.styles[path] = Rowwise()
            draft.bytes[path] = group.rows(draft.calls(path)) if region else draft.vocabulary_bytes(path)
    for call in dataflow.norms:
        if call.input.dim is not None and any(call.input.columns <= region.columns for region in draft.chosen):
            draft.styles[call.path] = SequenceParallel(call.input.dim)
    return draft


def _find_regions(traced: TracedModel, group: TPGroup) -> tuple[list[Region], Dataflow, dict[str, str]]:
    # Excludes layers, with reasons, until every split output reaches row layers or the end of the model.
    sizes = {"tp": group.tp, "batch_shards": group.batch_shards}
    excluded = dict(_unfit(traced, find_dataflow(traced, traced.modules, **sizes).calls, group.tp))
    while True:
        dataflow = find_dataflow(traced, excluded, **sizes)
        regions = [_region(dataflow, columns, group) for columns in _column_sets(dataflow, excluded)]
        refused = dataflow.blocked or dict(_refused(regions, dataflow))
        if not refused:
            return regions, dataflow, excluded
        excluded |= refused


def _unfit(traced: TracedModel, calls: Iterable[LayerCall], tp: int) -> Iterator[tuple[str, str]]:
    for call in calls:
        dims = layer_dims(traced.modules[call.path], call.method, call.avals[0].ndim)
        size = call.avals[1].shape[dims.column] if dims and dims.column is not None else 0
        if call.path in traced.tied:
            yield call.path, "it shares a parameter with another module"
        elif not call.path:
            yield call.path, "it is the model itself, and a plan names the modules in it"
        elif call.method == "attend":
            yield call.path, "it is both embedding and head"
        elif dims is None:
            yield call.path, "it keeps groups of features apart"
        elif size % tp:
            yield call.path, f"it makes {size} features, which tp {tp} does not divide"


def _column_sets(dataflow: Dataflow, excluded: Mapping[str, str]) -> list[Columns]:
    # Sets that must be split together, in model order.
    sets = {call.path: frozenset({call.path}) for call in dataflow.calls if call.path not in excluded}
    feeding: dict[str, Columns] = {}
    for call in dataflow.calls:
        if call.is_row:
            feeding[call.path] = feeding.get(call.path, frozenset()) | call.input.columns
    for columns in [*dataflow.joined, *feeding.values()]:
        union = frozenset[str]().union(*(sets[path] for path in columns))
        sets |= dict.fromkeys(union, union)
    return list(dict.fromkeys(sets.values()))


def _region(dataflow: Dataflow, columns: Columns, group: TPGroup) -> Region:
    rows = frozenset(call.path for call in dataflow.calls if call.is_row and call.input.columns & columns)
    outputs = [aval for split_by, aval in dataflow.outputs.items() if split_by & columns]
    inner = sum(total_sent(traffic) for split_by, traffic in dataflow.collectives.items() if split_by & columns)
    for aval in outputs:  # gathered, or three all-reduces of a softmax cross-entropy if it only ends the model
        size = aval.size * aval.dtype.itemsize
        inner += group.over_tp(ALL_GATHER, size) if rows else 3 * group.over_tp(ALL_REDUCE, size / aval.shape[-1])
    column_calls = [call for call in dataflow.calls if call.path in columns]
    row_calls = [call for call in dataflow.calls if call.path in rows]
    sent = inner + group.columns(column_calls) + group.rows(row_calls)
    one_by_one = group.columns(column_calls + row_calls) + group.rows(column_calls + row_calls) / 2
    return Region(columns, rows, bool(outputs), inner, sent, one_by_one)


def _refused(regions: Iterable[Region], dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    called_whole = {call.path for call in dataflow.calls if not call.is_row}
    called_whole |= {call.path for call in dataflow.norms if call.input.dim is None}
    for region in regions:
        norms = {call.path for call in dataflow.norms if call.input.columns & region.columns}
        both, mixed = sorted(region.columns & region.rows), sorted((region.rows | norms) & called_whole)
        for path in region.columns:
            if both:
                yield path, f"its output comes back to {', '.join(both)}, which makes a part of it"
            elif mixed:
                yield path, f"it feeds {', '.join(mixed)}, which is also called on an array that is not split"
            elif not region.rows and not region.ends_model:
                yield path, "it feeds no other layer"


def _choose(regions: list[Region]) -> list[Region]:
    paired = [region for region in regions if region.rows and region.bytes < region.bytes_one_by_one]

    def value(chosen: list[Region]) -> tuple[int, float]:
        return sum(len(region.layers) for region in chosen), -sum(region.bytes for region in chosen)

    @cache
    def best(remaining: tuple[Region, ...]) -> list[Region]:
        components = _components(remaining)
        if len(components) > 1:
            return [region for component in components for region in best(component)]
        if len(remaining) < 2:
            return list(remaining)
        first = max(remaining, key=lambda region: sum(region.conflicts(other) for other in remaining))
        rest = tuple(region for region in remaining if region != first)
        with_first = [first, *best(tuple(region for region in rest if not first.conflicts(region)))]
        return max(with_first, best(rest), key=value)

    chosen = best(tuple(paired))
    return [region for region in paired if region in chosen]


def _components(regions: Iterable[Region]) -> list[tuple[Region, ...]]:
    components: list[tuple[Region, ...]] = []
    for region in regions:
        near = [component for component in components if any(region.conflicts(other) for other in component)]
        components = [component for component in components if component not in near]
        components.append((*(other for component in near for other in component), region))
    return components
