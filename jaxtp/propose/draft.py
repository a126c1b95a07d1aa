"""A plan module by module: which layers are split, and what each split moves."""

from dataclasses import dataclass, field
from functools import cached_property

from flax import nnx

from jaxtp.parallel.plan import patterns_for
from jaxtp.parallel.styles import Colwise, Rowwise, SequenceParallel, Style
from jaxtp.propose.flows import Call, Record
from jaxtp.propose.marking import Traced
from jaxtp.propose.pairing import Group, Region, choose, find_regions
from jaxtp.propose.ports import parameter_bytes


@dataclass
class Draft:
    """A plan by path, and what is known of it."""

    traced: Traced
    group: Group
    record: Record
    regions: list[Region]
    """Every region that there is."""

    closed: dict[str, str]
    """Layers whose output cannot be left split, and why."""

    chosen: list[Region]
    styles: dict[str, Style] = field(default_factory=dict)
    bytes: dict[str, float] = field(default_factory=dict)
    """Bytes that a device sends for each styled module."""

    shared: dict[str, list[str]] = field(default_factory=dict)
    """Column layers for which a module brings an array to all devices at once, by module."""

    @cached_property
    def patterns(self) -> dict[str, str]:
        """The shortest pattern for each module, once all have their styles."""
        return patterns_for({path: self.styles.get(path) for path in self.traced.modules})

    @property
    def layers(self) -> list[str]:
        """Every stock layer that was called, in order."""
        return list(dict.fromkeys(call.path for call in self.record.calls))

    def calls(self, path: str, method: str | None = None) -> list[Call]:
        """Returns the calls of a layer."""
        return [call for call in self.record.calls if call.path == path and method in (None, call.method)]

    def region(self, path: str) -> Region | None:
        """Returns the chosen region that a layer belongs to."""
        return next((region for region in self.chosen if path in region.layers), None)

    def saved(self, *paths: str) -> float:
        """Returns the bytes of parameters that a device does without where some layers are split."""
        return (1 - 1 / self.group.tp) * sum(parameter_bytes(self.traced.modules[path]) for path in paths)


def draft_plan(traced: Traced, group: Group) -> Draft:
    """Pairs what can be paired, then splits of the rest what saves more than it moves: heads and vocabularies."""
    regions, record, closed = find_regions(traced, group)
    draft = Draft(traced, group, record, regions, closed, choose(regions))
    taken = {path for region in draft.chosen for path in region.layers}
    draft.chosen += [region for region in regions if not region.layers & taken and _head_pays(draft, region)]
    for path in draft.layers:
        region = draft.region(path)
        if region and path in region.columns:
            draft.styles[path] = Colwise()
            draft.bytes[path] = region.inside if path == min(region.columns) else 0
        elif region or (is_vocabulary(draft, path) and draft.saved(path) > vocabulary_bytes(draft, path)):
            draft.styles[path] = Rowwise()
            draft.bytes[path] = group.rows(draft.calls(path)) if region else vocabulary_bytes(draft, path)
    for call in record.norms:
        if call.given.dim is not None and any(call.given.labels <= region.columns for region in draft.chosen):
            draft.styles[call.path] = SequenceParallel(call.given.dim)
    return draft


def _head_pays(draft: Draft, region: Region) -> bool:
    """Returns whether layers that end the model save more bytes of parameters than their split moves."""
    return not region.rows and draft.saved(*region.columns) > region.bytes


def is_vocabulary(draft: Draft, path: str) -> bool:
    """Returns whether a layer is an embedding whose rows can be split."""
    module = draft.traced.modules[path]
    tied = {*draft.traced.tied, *draft.traced.tied.values()}
    return isinstance(module, nnx.Embed) and path not in tied and module.num_embeddings % draft.group.tp == 0


def vocabulary_bytes(draft: Draft, path: str) -> float:
    """Returns the bytes a device sends to sum what an embedding looks up, and the gradients of its inputs as a head."""
    looked_up, attended = draft.calls(path, "__call__"), draft.calls(path, "attend")
    return draft.group.rows(looked_up) + draft.group.columns(attended)
