"""Which column layers go with which row layers, and which of the possible pairs are taken.

A region is a set of column layers whose outputs meet (q, k and v; gate and up), and the row layers that sum over what
they make: inside, nothing moves. Regions exclude each other where one's column layer is another's row layer. Taken is
the set of regions that splits most layers; of those, the one that moves least. A region that moves more than its
layers would without each other (a layer that feeds four row layers) is none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from jaxtp.communication import ALL_GATHER, ALL_REDUCE, Collective, total_sent
from jaxtp.mesh import TOKENS, TP, parts
from jaxtp.propose.dataflow import walk
from jaxtp.propose.flows import Call, Labels, Record
from jaxtp.propose.marking import Traced
from jaxtp.propose.ports import ports_of


@dataclass(frozen=True)
class Region:
    """Layers that are split together."""

    columns: Labels
    rows: Labels
    open: bool
    """Whether the output of the columns is an output of the model, too."""

    inside: float
    """Bytes that a device sends because of what lies between: the gradients of whole operands of split ones, and the
    outputs of the model."""

    bytes: float
    """Bytes that a device sends in all, in a forward and a backward pass; each input of a column is reduced once."""

    alone: float
    """Bytes that it would send if each layer were split alone: a column layer whose output is gathered."""

    @property
    def layers(self) -> Labels:
        """Returns all of them."""
        return self.columns | self.rows


@dataclass(frozen=True)
class Group:
    """The numbers of devices on which all costs depend."""

    tp: int
    parts: int
    """Devices among which the tokens of a batch are divided."""

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "Group":
        """Returns the group of a mesh of these sizes."""
        return cls(sizes[TP], parts(sizes, TOKENS))

    def columns(self, calls: Iterable[Call]) -> float:
        """Returns the bytes that a device sends to sum the gradients of column layers' inputs, each input once."""
        read = {(call.given.key, call.times): call for call in calls if call.given.trained}
        return sum(self.sent(call, 0, ALL_REDUCE) for call in read.values())

    def rows(self, calls: Iterable[Call]) -> float:
        """Returns the bytes that a device sends to sum the outputs of row layers."""
        return sum(self.sent(call, 1, ALL_REDUCE) for call in calls)

    def sent(self, call: Call, which: int, kind: str = ALL_GATHER) -> float:
        """Returns the bytes that a device sends to gather or to sum the inputs (0) or outputs (1) of a call."""
        aval = call.shapes[which]
        return call.times * self.over_tp(kind, aval.size * aval.dtype.itemsize)

    def over_tp(self, kind: str, size: float) -> float:
        """Returns the bytes that a device sends for one collective, of `size` bytes in the whole batch."""
        return Collective(kind, (TP,), self.tp, size / self.parts).bytes_sent


def find_regions(traced: Traced, group: Group) -> tuple[list[Region], Record, dict[str, str]]:
    """Walks until every split output that is left reaches row layers, or the end of the model.

    Returns:
      The regions, in the model's order; the last walk; and for each layer whose output cannot be left split, why.
    """
    calls = walk(traced, traced.modules, tp=group.tp, parts=group.parts).calls
    closed = dict(_unfit(traced, calls, group.tp))
    while True:
        record = walk(traced, closed, tp=group.tp, parts=group.parts)
        found = [_region(record, members, group) for members in _classes(record, closed)]
        refused = record.blocked or dict(_refused(found, record))
        if not refused:
            return found, record, closed
        closed |= refused


def choose(regions: list[Region]) -> list[Region]:
    """Returns regions that exclude each other nowhere and split most layers, at the least cost.

    A region that moves no less than its layers would alone is none of them.
    """
    paired = [region for region in regions if region.rows and region.bytes < region.alone]
    chosen = [region for component in _components(paired) for region in _best(component)]
    return [region for region in paired if region in chosen]


def excludes(one: Region, other: Region) -> bool:
    """Returns whether a layer would be a column of one and a row of the other."""
    return bool(one.columns & other.rows or one.rows & other.columns)


def _unfit(traced: Traced, calls: Iterable[Call], tp: int) -> Iterable[tuple[str, str]]:
    """Yields layers that can be no column layers whatever they feed, and why."""
    for call in calls:
        ports = ports_of(traced.modules[call.path], call.method, call.shapes[0].ndim)
        size = call.shapes[1].shape[ports.column] if ports and ports.column is not None else 0
        if call.path in traced.tied or call.path in traced.tied.values():
            yield call.path, "it shares a parameter with another module"
        elif not call.path:
            yield call.path, "it is the model itself, and a plan names the modules in it"
        elif call.method == "attend":
            yield call.path, "it is embedding and head in one"
        elif ports is None:
            yield call.path, "it keeps groups of features apart"
        elif size % tp:
            yield call.path, f"it makes {size} features, which tp {tp} does not divide"


def _classes(record: Record, closed: Mapping[str, str]) -> list[Labels]:
    """Returns the sets of column layers that are split together, in the model's order."""
    classes = {call.path: frozenset({call.path}) for call in record.calls if call.path not in closed}
    fed: dict[str, Labels] = {}
    for call in record.calls:
        if call.row:
            fed[call.path] = fed.get(call.path, frozenset()) | call.given.labels
    for labels in [*record.joined, *fed.values()]:
        union = frozenset[str]().union(*(classes[label] for label in labels))
        classes |= dict.fromkeys(union, union)
    return list(dict.fromkeys(classes.values()))


def _region(record: Record, members: Labels, group: Group) -> Region:
    rows = frozenset(call.path for call in record.calls if call.row and call.given.labels & members)
    results = [aval for labels, aval in record.open.items() if labels & members]
    inside = sum(total_sent(moved) for labels, moved in record.moved.items() if labels & members)
    for aval in results:  # gathered; at the end of a model, three all-reduces of a softmax cross-entropy
        size = aval.size * aval.dtype.itemsize
        inside += group.over_tp(ALL_GATHER, size) if rows else 3 * group.over_tp(ALL_REDUCE, size / aval.shape[-1])
    of_columns = [call for call in record.calls if call.path in members]
    of_rows = [call for call in record.calls if call.path in rows]
    sent = inside + group.columns(of_columns) + group.rows(of_rows)
    alone = group.columns(of_columns + of_rows) + group.rows(of_columns + of_rows) / 2
    return Region(members, rows, bool(results), inside, sent, alone)


def _refused(regions: Iterable[Region], record: Record) -> Iterable[tuple[str, str]]:
    """Yields column layers of regions that cannot be, and why."""
    whole = {call.path for call in record.calls if not call.row}
    whole |= {call.path for call in record.norms if call.given.dim is None}
    for region in regions:
        norms = {call.path for call in record.norms if call.given.labels & region.columns}
        itself, also = sorted(region.columns & region.rows), sorted((region.rows | norms) & whole)
        for path in region.columns:
            if itself:
                yield path, f"its output comes back to {', '.join(itself)}, which makes a part of it"
            elif also:
                yield path, f"it feeds {', '.join(also)}, which is also called on an array that is not split"
            elif not region.rows and not region.open:
                yield path, "it feeds no other layer"


def _components(regions: Iterable[Region]) -> list[list[Region]]:
    """Returns groups of regions that exclude each other, directly or by others between them."""
    components: list[list[Region]] = []
    for region in regions:
        near = [component for component in components if any(excludes(region, other) for other in component)]
        components = [component for component in components if component not in near]
        components.append([*(other for component in near for other in component), region])
    return components


def _best(component: list[Region]) -> list[Region]:
    """Tries the region that excludes most others, in and out; what is left falls apart."""

    def value(chosen: list[Region]) -> tuple[int, float]:
        return sum(len(region.layers) for region in chosen), -sum(region.bytes for region in chosen)

    @cache
    def best(left: tuple[Region, ...]) -> list[Region]:
        if len(left) < 2:
            return list(left)
        parts = _components(left)
        if len(parts) > 1:
            return [region for part in parts for region in best(tuple(part))]
        region = max(left, key=lambda region: sum(excludes(region, other) for other in left))
        rest = tuple(other for other in left if other != region)
        taken = [region, *best(tuple(other for other in rest if not excludes(region, other)))]
        return max(taken, best(rest), key=value)

    return best(tuple(component))
