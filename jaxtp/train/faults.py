"""Which devices are at fault, read off tables of checksums of what each holds (`train/verify.py` has them made)."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax import Array
from jax.sharding import NamedSharding, Sharding

Table = np.ndarray
"""Checksums of what devices hold, uint32 `[arrays, devices]`, in the order of the mesh."""

Copies = list[list[int]]
"""Positions in the mesh of the devices that hold the same part of an array, for each part."""

Places = dict[str, set[int]]
"""Positions in the mesh of the devices that stand out, by the name of the array."""

_BEFORE_SUM = (
    "Every copy of some part differs, or there is one only, so the fault may have come before these gradients were "
    "summed: then it is on one of the devices that add to them. "
)


@dataclass(frozen=True)
class Fault:
    """Something that is not equal and should be."""

    what: str
    """A clause that says what differs."""

    places: Places

    note: str = ""
    """A sentence more on where it comes from."""


def judge(
    gradients: Mapping[str, Copies],
    results: Mapping[str, Copies],
    first: tuple[Table, Table],
    second: tuple[Table, Table],
) -> Fault | None:
    """Compares a step that was made twice; returns what is at fault, or None.

    Args:
      gradients: the copies of the gradients.
      results: the copies of the arrays of the state.
      first: checksums of the gradients and of the results, the first time.
      second: those of the second time.
    """
    if places := changed(list(gradients), first[0], second[0]):
        everywhere = any(places[name].issuperset(each) for name in places for each in gradients[name])
        note = _BEFORE_SUM if everywhere else ""
        return Fault("the gradients of the step, made twice from the same state and batch, differ", places, note)
    if places := odd_ones(second[0], gradients):
        return Fault("copies of the gradients differ, each time in the same way", places)
    if places := changed(list(results), first[1], second[1]):
        return Fault("the update, made twice from the same gradients, differs", places)
    if places := odd_ones(second[1], results):
        return Fault("copies differ after the update, each time in the same way", places)
    return None


def changed(names: Iterable[str], one: Table, other: Table) -> Places:
    """Returns where two tables differ."""
    rows = zip(names, one != other, strict=True)
    return {name: set(np.flatnonzero(row).tolist()) for name, row in rows if row.any()}


def odd_ones(table: Table, arrays: Mapping[str, Copies]) -> Places:
    """Returns which devices hold another copy than most that should hold the same; all of them, if there is no most."""
    found: Places = {}
    for row, (name, copies) in zip(table, arrays.items(), strict=True):
        for group in copies:
            (usual, times), *others = Counter(row[group].tolist()).most_common()
            if others:
                tied = others[0][1] == times
                found.setdefault(name, set()).update(each for each in group if tied or row[each] != usual)
    return found


def copies_of(sharding: Sharding, shape: tuple[int, ...]) -> Copies:
    """Returns which devices hold the same part of an array."""
    assert isinstance(sharding, NamedSharding), "every array of a run is on its mesh"
    indices = sharding.devices_indices_map(shape)
    parts: dict[tuple[Any, ...], list[int]] = {}
    for position, device in enumerate(sharding.mesh.devices.flat):
        part = tuple((dim.start, dim.stop) for dim in indices[device] or ())
        parts.setdefault(part, []).append(position)
    return list(parts.values())


def copies_of_all(arrays: Mapping[str, Array]) -> dict[str, Copies]:
    """Returns for each array which devices hold the same part of it."""
    return {name: copies_of(array.sharding, array.shape) for name, array in arrays.items()}
