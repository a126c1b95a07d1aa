"""Computes checksums of arrays on their devices, and compares replicas.

Corrupted memory raises no error by itself.

The bits of each element are mixed with its position (by the finalizer of MurmurHash3, Austin
Appleby, public domain) and summed modulo 2^32, twice with different seeds. Integer sums do not
depend on the order, and so not on the mesh. Mixing is invertible, so a change of one element is
always detected. A change of several elements is missed with a probability of 2^-64 (2^-32 in
`device_checksums`, which has one seed).
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxtp.collectives import axis_index, constrain, device_view, vary_everywhere
from jaxtp.config.entry import NumericsError
from jaxtp.distributed.agreement import process_name
from jaxtp.mesh import AXES, axes_of

# Name of the checksums in an audit of collectives
_CHECKSUMS = "checksums"
DIAGNOSE = (
    "Leave the host out of the run, and run its vendor's diagnostics (NVIDIA: dcgmi diag -r 4)"
)

ReplicaGroups = list[list[int]]
"""For each part of an array, the mesh positions of the devices that hold it."""
# Mesh positions of devices, by array name
MeshPositions = dict[str, set[int]]

_SEEDS = (np.uint32(0x9E3779B9), np.uint32(0x7F4A7C15))
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}
# Maximum number of processes in a message
_MAX_PROCESSES = 8


class UnequalCopiesError(NumericsError):
    """Replicas of an array differ between devices."""


class NonFiniteError(NumericsError):
    """A state, a gradient or an update is not finite; such a state is never saved: training could
    not recover from it."""


GROUP = 64
"""Maximum number of arrays that one program sums."""


class Sums:
    """Sums of arrays, which the devices may still be computing; all processes must create it.

    Elements have at most 4 bytes. Each device reads its part of an array once. An array may be part
    of a whole along the first dim, from index `first` on: `totals` of its parts add up to its own.
    """

    def __init__(self, arrays: Mapping[str, Array], first: int = 0):
        alike = defaultdict[object, list[str]](list)
        for name, array in arrays.items():
            key: object = _mesh_of(array) or array.sharding
            # With many arrays, a program sums only arrays of equal shape, dtype and sharding.
            if len(arrays) > GROUP:
                key = (array.shape, array.dtype, array.sharding)
            alike[key].append(name)
        self._groups = []
        for names in alike.values():
            for start in range(0, len(names), GROUP):
                group = names[start : start + GROUP]
                columns = _columns(list(map(arrays.__getitem__, group)), np.uint32(first))
                self._groups.append((group, columns))
        self.shapes = {}
        self.dtypes = {}
        for name, array in arrays.items():
            self.shapes[name] = list(array.shape)
            self.dtypes[name] = str(array.dtype)
        self.replicas = replica_groups_by_name(arrays)

    @cached_property
    def rows(self) -> dict[str, np.ndarray]:
        """Sums of each array by its name, uint32 `[3, devices]`.

        They are two checksums, and the number of elements that are not finite (for a scalar, NaN).
        """
        rows: dict[str, np.ndarray] = {}
        for names, columns in self._groups:
            rows.update(zip(names, np.asarray(columns), strict=True))
        return rows

    @cached_property
    def totals(self) -> dict[str, np.ndarray]:
        """Sums of each array over its parts, uint64 `[3]`, as in `rows`."""
        totals = {}
        for name, groups in self.replicas.items():
            first_devices = [group[0] for group in groups]
            totals[name] = self.rows[name][:, first_devices].sum(1, dtype=np.uint64)
        return totals

    def checksums(self) -> dict[str, str]:
        """Returns 16 hexadecimal digits for each array, the same on any mesh."""
        return {name: as_digits(total) for name, total in self.totals.items()}

    def unequal_replicas(self) -> MeshPositions:
        """Returns the devices whose replica differs from the majority."""
        return minority_devices([self.rows[name][0] for name in self.replicas], self.replicas)

    def not_finite(self) -> dict[str, int]:
        """Returns nonzero counts of non-finite elements."""
        return {name: int(count) for name, (*_, count) in self.totals.items() if count}


def as_digits(total: np.ndarray) -> str:
    """Returns the checksum of an array with these `Sums.totals`."""
    first, second, _ = map(int, total)
    return f"{first % 2**32:08x}{second % 2**32:08x}"


def device_checksums(arrays: Sequence[Array], specs: tuple[PartitionSpec, ...]) -> Array:
    """Returns a checksum of each device's part of each array, uint32 `[arrays, devices]`.

    This takes no communication.
    """

    def on_device(*parts: Array) -> Array:
        # Not layer by layer: a loop would make XLA write out gradients that it otherwise fuses with
        # the update.
        mixed = [_mixed(part, _SEEDS[0], [0] * part.ndim) for part in parts]
        sums = [vary_everywhere(jnp.sum(bits, dtype=jnp.uint32)) for bits in mixed]
        return jnp.stack(sums)[:, None]

    out = PartitionSpec(None, AXES)
    return device_view(on_device, _CHECKSUMS, in_specs=specs, out_specs=out)(*arrays)


@cache
def replica_groups(sharding: Sharding, shape: tuple[int, ...]) -> ReplicaGroups:
    """Returns groups of devices that hold the same part of an array."""
    if not isinstance(sharding, NamedSharding):
        return [[0]]
    indices = sharding.devices_indices_map(shape)
    groups = defaultdict[str, list[int]](list)
    for position, device in enumerate(sharding.mesh.devices.flat):
        # Slices can be compared as text.
        groups[str(indices[device])].append(position)
    return list(groups.values())


def replica_groups_by_name(arrays: Mapping[str, Array]) -> dict[str, ReplicaGroups]:
    """Returns the `replica_groups` of each array."""
    return {name: replica_groups(array.sharding, array.shape) for name, array in arrays.items()}


def minority_devices(
    table: Iterable[np.ndarray], replicas: Mapping[str, ReplicaGroups]
) -> MeshPositions:
    """Returns the devices whose checksum is not the most common one in their group.

    `table` has the checksums, `[arrays, devices]`. In a tie, all devices of the group are returned.
    """
    positions: MeshPositions = {}
    for row, (name, groups) in zip(table, replicas.items(), strict=True):
        for group in groups:
            ranked = Counter(row[group].tolist()).most_common(2)
            if len(ranked) == 1:
                continue
            (usual, count), (_, next_count) = ranked
            tied = next_count == count
            minority = [position for position in group if tied or row[position] != usual]
            positions.setdefault(name, set()).update(minority)
    return positions


def describe_devices(
    positions: MeshPositions, devices: Sequence[jax.Device], hosts: Sequence[str]
) -> str:
    """Describes arrays and devices by process.

    `positions` index `devices`; `hosts` are host names by process.
    """
    by_process = defaultdict[int, list[int]](list)
    for position in sorted(set().union(*positions.values())):
        device = devices[position]
        by_process[device.process_index].append(device.id)
    described = []
    for process, ids in by_process.items():
        local = sorted(device.id for device in devices if device.process_index == process)
        plural = "s" if len(ids) > 1 else ""
        numbers = map(str, map(local.index, ids))
        described.append(
            f"device{plural} {', '.join(map(str, ids))}, number{plural} {', '.join(numbers)} of "
            f"{process_name(process, hosts[process])}"
        )
    listed = "; ".join(described[:_MAX_PROCESSES])
    if len(described) > _MAX_PROCESSES:
        listed += f", and devices of {len(described) - _MAX_PROCESSES} more processes"
    arrays = next(iter(positions))
    if len(positions) > 1:
        arrays += f" and {len(positions) - 1} more array{'s' if len(positions) > 2 else ''}"
    return f"{arrays} on {listed}"


def describe_not_finite(counts: Mapping[str, int]) -> str:
    """Describes non-finite arrays by their counts."""
    name, count = next(iter(counts.items()))
    text = f"{name} has {count:,} element{'s that are' if count > 1 else ' that is'} not finite"
    if len(counts) == 1:
        return text
    more = len(counts) - 1
    return f"{text}, as do {more} more arrays" if more > 1 else f"{text}, as does 1 more array"


def _columns(arrays: Sequence[Array], first: np.uint32) -> Array:
    """Returns the sums of arrays on one mesh, uint32 `[arrays, 3, devices]`."""
    mesh = _mesh_of(arrays[0])
    if mesh is None:
        return _sum_arrays(first, *arrays)
    with jax.set_mesh(mesh):
        return _sum_parts(tuple(array.sharding.spec for array in arrays), first, *arrays)  # type: ignore[attr-defined]


def _mesh_of(array: Array) -> Mesh | None:
    mesh = array.sharding.mesh if isinstance(array.sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) else None


# With XLA's default width of 256, a CPU with AVX-512 takes 2.8 times as long. With AVX2, both
# widths take the same time.
_OPTIONS = {"xla_cpu_prefer_vector_width": 512}


@partial(jax.jit, compiler_options=_OPTIONS)
def _sum_arrays(first: Array, *arrays: Array) -> Array:
    starts = [[first, *[0] * array.ndim][: array.ndim] for array in arrays]
    return jnp.stack(list(map(_sums_at, arrays, starts)))[:, :, None]


@partial(jax.jit, static_argnums=0, compiler_options=_OPTIONS)
def _sum_parts(specs: tuple[PartitionSpec, ...], first: Array, *arrays: Array) -> Array:
    def sum_part(first: Array, part: Array, spec: PartitionSpec) -> Array:
        axes = [*map(axes_of, spec), *[()] * (part.ndim - len(spec))]
        starts = [axis_index(*dim) * size for dim, size in zip(axes, part.shape, strict=True)]
        if starts:
            starts[0] += first
        return vary_everywhere(_sums_at(part, starts))

    def on_device(first: Array, *parts: Array) -> Array:
        return jnp.stack(list(map(partial(sum_part, first), parts, specs)))[:, :, None]

    out = PartitionSpec(None, None, AXES)
    in_specs = (PartitionSpec(), *specs)
    view = device_view(on_device, _CHECKSUMS, in_specs=in_specs, out_specs=out)
    columns: Array = view(first, *arrays)
    # Each process reads all columns.
    return constrain(columns, PartitionSpec())


# A jitted function, so that arrays of equal shape and dtype, such as a parameter and its moments,
# are traced once.
@jax.jit
def _sums_at(part: Array, starts: Sequence[int | Array]) -> Array:
    """Returns the sums, uint32 `[3]`, of a part that begins at `starts` in each dim."""
    # A scalar may be infinite, such as the initial value of the lowest loss so far in an
    # optimizer's state.
    if not jnp.issubdtype(part.dtype, jnp.floating):
        wrong = jnp.zeros_like(part, bool)
    elif part.ndim == 0:
        wrong = jnp.isnan(part)
    else:
        wrong = ~jnp.isfinite(part)
    terms = *(_mixed(part, seed, starts) for seed in _SEEDS), wrong.astype(jnp.uint32)
    # One reduction of several operands reads the array once, and needs no temporary memory.
    add = lambda sums, more: tuple(map(operator.add, sums, more))  # noqa: E731
    return jnp.stack(lax.reduce(terms, (jnp.uint32(0),) * 3, add, tuple(range(part.ndim))))


def _mixed(array: Array, seed: np.uint32, starts: Sequence[int | Array]) -> Array:
    bits = array.astype(jnp.uint8) if array.dtype == bool else array
    bits = lax.bitcast_convert_type(bits, _UNSIGNED[bits.dtype.itemsize]).astype(jnp.uint32)
    position = lax.full(array.shape, seed)
    for dim, start in enumerate(starts):
        along = lax.add(
            lax.broadcasted_iota(jnp.uint32, array.shape, dim),
            lax.convert_element_type(start, jnp.uint32),
        )
        position = _mix(lax.add(position, along))
    return _mix(lax.bitwise_xor(bits, position))


def _mix(x: Array) -> Array:
    # Functions of `lax` trace faster than the operators of arrays.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = lax.mul(
            lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(shift))), np.uint32(factor)
        )
    return lax.bitwise_xor(x, lax.shift_right_logical(x, np.uint32(16)))
