"""Seconds of collectives along each axis of a mesh.

A measurement is a loop of them in one program, each on what the one before has left, as they come in a compiled step:
starting a program from Python takes longer than a small message. All groups of devices along an axis talk at once.
Compiled for an H100 the loop adds nothing to an all-reduce, a local copy of 1/n of the message to an all-gather and a
reduce-scatter, and one of all of it to a permute. Of an all-to-all 1/n of the message goes to each device, and a
device keeps its own part.

The bytes of a measurement are counted in the jaxpr of what is timed, and a test reads in the HLO that the compiler
keeps every turn of the loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.audit.census import count_collectives
from jaxtp.bench.timing import Program, Repeats, medians
from jaxtp.collectives import all_gather, all_reduce, all_to_all, axis_size, device_view, permute, reduce_scatter, vary
from jaxtp.communication import ALL_TO_ALL, PERMUTE, Collective
from jaxtp.mesh import AXES


@dataclass(frozen=True)
class Message:
    """A collective along one axis, and its time."""

    collective: Collective
    """Collective whose bytes are those of the array that each device ends with (all-reduce, all-gather, all-to-all,
    permute) or begins with."""

    seconds: float
    """Median."""

    @property
    def axis(self) -> str:
        """The axis of the mesh along which it goes."""
        return self.collective.axes[0]

    @property
    def speed(self) -> float:
        """Bytes/s that each device sends around a ring."""
        return self.collective.bytes_sent / self.seconds

    def record(self) -> dict[str, Any]:
        """Returns every number, as plain values."""
        one = self.collective
        sizes = {"bytes": int(one.bytes), "bytes_sent": one.bytes_sent}
        return {"axis": self.axis, "devices": one.group, "kind": one.kind, **sizes, "seconds": self.seconds}


def _all_reduce(x: Array, axis: str) -> Array:
    return vary(all_reduce(x, axis), axis)


def _all_gather(x: Array, axis: str) -> Array:
    """Gathers the part of `x` that a device contributes, which lies where then the first device's does."""
    part = x.shape[0] // axis_size(axis)
    return all_gather(x[:part], axis)


def _reduce_scatter(x: Array, axis: str) -> Array:
    """Scatters into the first part of `x`; the rest stays as it is."""
    return lax.dynamic_update_slice_in_dim(x, reduce_scatter(x, axis), 0, 0)


def _all_to_all(x: Array, axis: str) -> Array:
    return all_to_all(x, axis, split=0, join=0)


KINDS: Mapping[str, Callable[[Array, str], Array]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    ALL_TO_ALL: _all_to_all,
    PERMUTE: permute,
}
"""Functions by kind, each from an array of a device to one of the same shape, so that a loop can repeat it."""


def measure_messages(
    mesh: Mesh, dtype: str, sizes: Sequence[int], repeats: Repeats, *, axes: Sequence[str] = AXES
) -> Iterator[Message]:
    """Times every kind of collective along every axis of more than one device.

    Args:
      mesh: of the devices.
      dtype: of what moves.
      sizes: bytes of a message, rounded to whole elements on each device.
      repeats: how often.
      axes: those to measure.
    """
    for axis in (axis for axis in axes if mesh.shape[axis] > 1):
        for size in sizes:
            yield from _together(mesh, axis, _random(mesh, axis, dtype, size), repeats)


def repeated(kind: str, axis: str, times: int) -> Callable[[Array], Array]:
    """Returns a function of an array, split over all devices, that runs a collective `times` times on their parts."""

    def body(x: Array) -> Array:
        return lax.scan(lambda x, _: (KINDS[kind](x, axis), None), x, length=times)[0]

    return device_view(body, f"bench_{kind}", (P(AXES),), P(AXES))


def _together(mesh: Mesh, axis: str, x: Array, repeats: Repeats) -> Iterator[Message]:
    """Times messages of one size, every kind in turn."""
    programs: dict[str, Program] = {}
    moved: dict[str, Collective] = {}
    with jax.set_mesh(mesh):
        for kind in KINDS:
            traced = jax.jit(repeated(kind, axis, repeats.in_a_row)).trace(x)
            (moved[kind],) = count_collectives(traced.jaxpr, dict(mesh.shape))
            programs[kind] = partial(traced.lower().compile(), x)
    seconds = medians(programs, repeats.rounds)
    for kind, one in moved.items():
        yield Message(one, seconds[kind] / repeats.in_a_row)


def _random(mesh: Mesh, axis: str, dtype: str, size: int) -> Array:
    """Returns an array of `size` bytes on each device, or a little less: a number of elements that the axis divides."""
    parts = mesh.shape[axis]
    each = max(1, size // (jnp.dtype(dtype).itemsize * parts)) * parts
    make = jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=NamedSharding(mesh, P(AXES)))
    made: Array = make(jax.random.key(0), (mesh.size * each,), dtype)
    return made
