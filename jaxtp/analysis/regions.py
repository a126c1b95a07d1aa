"""Regions of layers that tp splits together.

A region is a set of column layers whose outputs are combined (q, k and v; gate and up), and the row
layers that sum over them. Regions conflict if a layer is a column in one and a row in the other.
The chosen regions split the most layers, then send the fewest bytes. A region whose layers send no
more if split one by one (one column and four row layers) is dropped. A single layer (a vocabulary)
is split if that saves more parameter bytes than it sends.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from flax import nnx

from jaxtp.analysis.census import array_bytes
from jaxtp.analysis.collective import ALL_GATHER, ALL_REDUCE, total_sent
from jaxtp.analysis.dataflow import Columns, Dataflow, find_dataflow, parameter_bytes
from jaxtp.analysis.traced_model import TracedModel
from jaxtp.mesh import Sizes
from jaxtp.plans.stock import why_not_split


@dataclass(frozen=True)
class Region:
    """Layers that are split together; a vocabulary is only a row, and a head only a column."""

    columns: Columns
    rows: frozenset[str]
    # Whether the output of the columns is an output of the model, or goes into the loss
    reaches_output: bool
    # Bytes each device sends between the layers, and for split outputs of the model
    inner_bytes: float
    bytes: float
    """Bytes each device sends in a forward and backward pass; each input of columns is reduced
    once."""
    bytes_one_by_one: float
    """Bytes each device would send if every layer were a column layer with gathered output."""
    saved: float  # Bytes of parameters that a split saves on each device

    @property
    def layers(self) -> frozenset[str]:
        """Columns and rows."""
        return self.columns | self.rows

    def conflicts(self, other: "Region") -> bool:
        """Returns whether a layer is a column here and a row there, or the reverse."""
        return bool(self.columns & other.rows or self.rows & other.columns)


def find_regions(
    traced: TracedModel, sizes: Sizes
) -> tuple[list[Region], Dataflow, dict[str, str]]:
    """Returns the regions, their dataflow, and why other layers cannot be column layers."""
    dataflow = find_dataflow(traced, traced.modules, sizes)
    excluded = dict(_not_column_layers(traced, dataflow))
    while True:  # until every split output reaches row layers or the model's output
        dataflow = find_dataflow(traced, excluded, sizes)
        column_sets = _column_sets(dataflow, excluded)
        regions = [_region(traced, dataflow, columns) for columns in column_sets]
        exclude = dataflow.blocked or dict(_layers_to_exclude(regions, dataflow))
        if not exclude:
            return [*regions, *_vocabularies(traced, dataflow)], dataflow, excluded
        excluded |= exclude


def _vocabularies(traced: TracedModel, dataflow: Dataflow) -> Iterator[Region]:
    for path in dataflow.layers:
        module = traced.modules[path]
        calls = dataflow.calls_of(path)
        splits = isinstance(module, nnx.Embed) and module.num_embeddings % dataflow.tp == 0
        if splits and path not in traced.tied:
            sent = dataflow.output_bytes(call for call in calls if call.method == "__call__")
            sent += dataflow.input_bytes(call for call in calls if call.method == "attend")
            rows = frozenset({path})
            yield Region(frozenset(), rows, True, 0, sent, sent, _saved(traced, dataflow, rows))


def _saved(traced: TracedModel, dataflow: Dataflow, paths: Iterable[str]) -> float:
    return (1 - 1 / dataflow.tp) * sum(parameter_bytes(traced.modules[path]) for path in paths)


def _not_column_layers(traced: TracedModel, dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    for call in dataflow.calls:
        column = call.dims.column if call.dims else None
        size = 0 if column is None else call.avals[1].shape[column]
        if call.path in traced.tied:
            yield call.path, "it shares a parameter with another module"
        elif not call.path:
            yield call.path, "it is the model itself, and a plan splits its submodules"
        elif call.method == "attend":
            yield call.path, "it is both embedding and head"
        elif column is None:
            why = why_not_split(traced.modules[call.path])
            yield call.path, why or "its output has no features that tp can split"
        elif size % dataflow.tp:
            yield call.path, f"it makes {size} features, which tp {dataflow.tp} does not divide"


def _column_sets(dataflow: Dataflow, excluded: Mapping[str, str]) -> list[Columns]:
    # Sets of layers that must be split together, in model order.
    sets: dict[str, Columns] = {}
    feeding: dict[str, Columns] = {}
    for call in dataflow.calls:
        if call.path not in excluded:
            sets[call.path] = frozenset({call.path})
        if call.is_row:
            feeding[call.path] = feeding.get(call.path, frozenset()) | call.input.columns
    for columns in [*dataflow.joined, *feeding.values()]:
        union = frozenset[str]().union(*(sets[path] for path in columns))
        sets |= dict.fromkeys(union, union)
    return list(dict.fromkeys(sets.values()))


def _region(traced: TracedModel, dataflow: Dataflow, columns: Columns) -> Region:
    rows = frozenset(
        call.path for call in dataflow.calls if call.is_row and call.input.columns & columns
    )
    inner = 0.0
    for split_by, traffic in dataflow.collectives.items():
        if split_by & columns:
            inner += total_sent(traffic)
    reaches_output = not columns.isdisjoint(dataflow.summed)
    for split_by, aval in dataflow.outputs.items():
        if split_by.isdisjoint(columns):
            continue
        reaches_output = True
        size = array_bytes(aval)
        # An output is gathered. Without row layers it is a softmax cross-entropy's logits, which
        # need three all-reduces instead.
        if rows:
            inner += dataflow.over_tp(ALL_GATHER, size)
        else:
            inner += 3 * dataflow.over_tp(ALL_REDUCE, size / aval.shape[-1])
    column_calls = dataflow.calls_of(*columns)
    row_calls = dataflow.calls_of(*rows)
    calls = column_calls + row_calls
    sent = inner + dataflow.input_bytes(column_calls) + dataflow.output_bytes(row_calls)
    one_by_one = dataflow.input_bytes(calls) + dataflow.output_bytes(calls) / 2
    saved = _saved(traced, dataflow, columns | rows)
    return Region(columns, rows, reaches_output, inner, sent, one_by_one, saved)


def _layers_to_exclude(regions: Iterable[Region], dataflow: Dataflow) -> Iterator[tuple[str, str]]:
    called_whole = {call.path for call in dataflow.calls if not call.is_row}
    called_whole |= {call.path for call in dataflow.norms if call.input.dim is None}
    for region in regions:
        norms = {call.path for call in dataflow.norms if call.input.columns & region.columns}
        ambiguous = ", ".join(sorted(region.columns & region.rows))
        mixed = ", ".join(sorted((region.rows | norms) & called_whole))
        if ambiguous:
            why = f"its output feeds {ambiguous}, which would be a column and a row layer"
        elif mixed:
            why = f"it feeds {mixed}, which is also called on an array that is not split"
        elif not region.rows and not region.reaches_output:
            why = "it feeds no other layer"
        else:
            continue
        yield from dict.fromkeys(region.columns, why).items()


def choose(regions: list[Region]) -> list[Region]:
    """Returns the regions to split."""
    pairs: list[Region] = []
    single: list[Region] = []
    for region in regions:
        if not (region.columns and region.rows):
            single.append(region)
        elif region.bytes < region.bytes_one_by_one:
            pairs.append(region)
    best = _best(tuple(pairs))
    chosen = [region for region in pairs if region in best]
    layers = frozenset[str]().union(*(region.layers for region in chosen))
    for region in single:
        if layers.isdisjoint(region.layers) and region.saved > region.bytes:
            chosen.append(region)
    return chosen


@lru_cache(maxsize=1024)
def _best(regions: tuple[Region, ...]) -> list[Region]:
    """Returns the regions without conflicts that split the most layers."""
    if len(regions) < 2:
        return list(regions)
    components = _components(regions)
    if len(components) > 1:
        return list(chain.from_iterable(map(_best, components)))
    # Tries both to take the region with the most conflicts, and to leave it out.
    first = max(regions, key=lambda region: sum(map(region.conflicts, regions)))
    without = tuple(region for region in regions if region != first)
    compatible = tuple(region for region in without if not first.conflicts(region))
    return max([first, *_best(compatible)], _best(without), key=_value)


def _value(regions: list[Region]) -> tuple[int, float]:
    num_layers = sum(len(region.layers) for region in regions)
    return num_layers, -sum(region.bytes for region in regions)


def _components(regions: Iterable[Region]) -> list[tuple[Region, ...]]:
    """Returns the groups of regions that conflict with each other, directly or not."""
    components: list[tuple[Region, ...]] = []
    for region in regions:
        near = [component for component in components if any(map(region.conflicts, component))]
        components = [component for component in components if component not in near]
        components.append((*chain.from_iterable(near), region))
    return components
