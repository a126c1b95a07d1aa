"""The record of a collective, for layers, jaxprs, HLO, schedules, proposals and measurements.

Only this module computes the bytes that a device sends around a ring.
"""

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, TypeVar

from jaxtp.analysis.tables import Cells
from jaxtp.mesh import AXES, Sizes

ALL_REDUCE = "all-reduce"
ALL_GATHER = "all-gather"
REDUCE_SCATTER = "reduce-scatter"
ALL_TO_ALL = "all-to-all"
PERMUTE = "permute"

Axes = tuple[str, ...]
Key = TypeVar("Key", bound=Hashable)

Place = tuple[str, Axes]
"""A module and mesh axes, as `Collective.module` and `Collective.axes` have them."""

_WRAPPERS = re.compile(
    r"jit\([^()]*\)/?|\b(?:jit|jvp|transpose|vmap|remat)\(|\)|\bbranch_\d+_fun\b"
)
PRIMITIVES = {
    "psum": ALL_REDUCE,
    "psum_invariant": ALL_REDUCE,
    "pmax": "all-reduce-max",
    "pmin": "all-reduce-min",
    "all_gather": ALL_GATHER,
    "all_gather_invariant": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "all_to_all": ALL_TO_ALL,
    "ragged_all_to_all": "ragged-all-to-all",
    "ppermute": PERMUTE,
    "pbroadcast": "broadcast",
}
"""Kinds of collectives by the primitive of a jaxpr."""
_PLUMBING = {
    "",
    *PRIMITIVES,
    *("while", "body", "cond", "branch", "scan", "shard_map", "pvary", "name"),
    *("closed_call", "eval_jaxpr", "core_call", "custom_vjp_call", "custom_jvp_call"),
    *("checkpoint", "rematted_computation", "remat"),
}


@dataclass(frozen=True)
class Collective:
    """A collective, as one device sees it; `Traffic` has its count."""

    kind: str  # all-reduce, all-gather, ...
    axes: Axes  # mesh axes between the devices, without axes of size 1
    group: int  # number of devices that take part
    bytes: float  # size of the whole message: the larger of operand and result on one device
    # The `jax.named_scope` it was written in, as JAX spells it, or the name of its module
    scope: str = ""
    shape: tuple[int, ...] = ()  # shape and dtype of the message, where it is read from a program
    dtype: str = ""
    counted: str = ""  # meaning of its count; empty where the count is exact
    # The `file:line` of Python that it comes from, where that is known
    source: str = field(default="", compare=False)

    @property
    def module(self) -> str:
        """Scope without JAX's transformations: `mlp/rms_norm`."""
        parts = _WRAPPERS.sub("", self.scope).split("/")
        return "/".join(part for part in parts if part not in _PLUMBING)

    @property
    def backward(self) -> bool:
        """Whether the scope is in a backward pass."""
        return "transpose(" in self.scope

    @property
    def bytes_sent(self) -> float:
        """The bytes that each device sends.

        In a ring of n devices each sends (n-1)/n of the message, twice that for an all-reduce, and
        the whole message for a permute.
        """
        if self.kind == PERMUTE:
            return float(self.bytes)
        rounds = 2 if self.kind.startswith(ALL_REDUCE) else 1
        return rounds * (self.group - 1) / self.group * self.bytes


Traffic = Mapping[Collective, int]  # Collectives, and how often each runs in a step


def spanned(axes: Sequence[str], sizes: Sizes) -> Axes:
    """Returns the axes of more than one device, in the mesh's order."""
    return tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)


def total_sent(moved: Traffic) -> float:
    """Returns the bytes each device sends."""
    return sum(times * collective.bytes_sent for collective, times in moved.items())


def sums(moved: Traffic, by: Callable[[Collective], Key]) -> dict[Key, tuple[int, float]]:
    """Returns counts and bytes each device sends, grouped by `by`."""
    totals: dict[Key, tuple[int, float]] = {}
    for collective, times in moved.items():
        key = by(collective)
        count, sent = totals.get(key, (0, 0.0))
        totals[key] = count + times, sent + times * collective.bytes_sent
    return totals


def traffic_rows(
    moved: Traffic, asked_by: str, place: Callable[[Collective], Cells]
) -> Iterator[Cells]:
    """Yields rows of a table: place, kind, axes, who asked for it, count and bytes sent."""

    def key(collective: Collective) -> Cells:
        axes = "+".join(collective.axes)
        return *place(collective), collective.kind, axes, collective.counted

    for (*cells, counted), (count, sent) in sums(moved, key).items():
        yield *cells, asked_by, f"{count:,} {counted}".strip(), f"{sent:,.0f}"


def bytes_by(moved: Traffic, *fields: str) -> dict[Any, float]:
    """Returns the bytes each device sends, grouped by fields of `Collective`."""
    return {key: sent for key, (_, sent) in sums(moved, attrgetter(*fields)).items()}


def bytes_by_place(moved: Traffic) -> dict[Place, float]:
    """Returns the bytes each device sends, by module and axes."""
    return bytes_by(moved, "module", "axes")


def bytes_by_axes(moved: Traffic) -> dict[Axes, float]:
    """Returns the bytes each device sends, by axes in the mesh's order."""
    sent = bytes_by(moved, "axes")
    in_order = sorted(sent, key=lambda axes: list(map(AXES.index, axes)))
    return {axes: sent[axes] for axes in in_order if sent[axes]}


def with_joined_axes(values: Mapping[Axes, float]) -> dict[str, float]:
    """Returns values by the names of their axes, such as `dp+fsdp`, for JSON."""
    return {"+".join(axes): value for axes, value in values.items()}
