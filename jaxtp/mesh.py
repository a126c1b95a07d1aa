"""The device mesh: four named axes, and how many devices lie along each.

`dp` replicates the parameters, `fsdp` shards their storage, `cp` splits sequences, `tp` splits the matrix products. A
batch's sequences are divided over `dp` and `fsdp` together. For weights `cp` is like `fsdp`: it shards their storage,
and they are used on different tokens. `tp` is the fastest-varying axis, so that neighbouring devices (one host, one
NVLink domain) form a tensor-parallel group.
"""

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxtp.entry import UserError
from jaxtp.launch.agreement import several
from jaxtp.launch.environment import accept_absent_gpus
from jaxtp.launch.hosts import by_host, hosts
from jaxtp.reading import shown

DP = "dp"
FSDP = "fsdp"
CP = "cp"
TP = "tp"
AXES = (DP, FSDP, CP, TP)
"""The axes, the last of which varies fastest."""

BATCH = (DP, FSDP)
"""Axes that divide the sequences of a batch."""

CONTEXT = (CP,)
"""Axes that divide each sequence (`layers/context.py`)."""

TOKENS = (*BATCH, *CONTEXT)
"""Axes that divide the tokens of a batch, inside parallel layers too."""

STORAGE = (FSDP, CP)
"""Axes that divide what is stored of a weight, which is gathered before use; its gradient is reduce-scattered."""

SEQUENCE = (*CONTEXT, TP)
"""Axes that divide activations along the sequence between parallel layers, under sequence parallelism. In this order
tp gathers the tokens of one device along cp."""

REPLICAS = tuple(axis for axis in AXES if axis not in (*STORAGE, TP))
"""Axes along which every weight is held in copies, used on different tokens; its gradient is all-reduced."""

MAX_VIRTUAL_DEVICES = 1024
"""Most virtual devices: so many take a second to make, and share the machine's cores."""
MAX_LISTED = 12
"""Meshes in a message."""
_MAX_DIGITS = 100
"""Most digits of a size in a command line."""
_MAX_DEVICES = 2**31 - 1
"""Most devices of a mesh: JAX counts them in 32 bits."""


class MeshError(UserError):
    """A mesh that cannot be built from the devices that are there."""


def make_mesh(
    dp: int = 1, fsdp: int = 1, tp: int = 1, *, cp: int = 1, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Builds the mesh `(dp, fsdp, cp, tp)`.

    On a machine without accelerators the devices are virtual CPU devices, as many as the mesh needs, provided
    that JAX has not started its backend yet.

    Args:
      dp: replicas of the parameters. `-1`, for at most one axis, takes all devices that are left.
      fsdp: shards of each parameter that are gathered before use.
      tp: shards of each matrix product.
      cp: parts of each sequence.
      devices: what to build the mesh of; default `jax.devices()`. A mesh smaller than the machine takes the
        first devices in a single process, and is refused in a multi-process run.

    Returns:
      A `jax.sharding.Mesh`; make it current with `jax.set_mesh(mesh)`.

    Raises:
      MeshError: a size is not positive, more than one is -1, or the devices are too few, or one is there twice.
    """
    return mesh_of(sized(dp=dp, fsdp=fsdp, cp=cp, tp=tp), devices)


def mesh_of(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh of these sizes, as `make_mesh` does."""
    check_sizes(sizes)
    if devices is None:
        request_virtual_devices(math.prod(size for size in sizes.values() if size != -1))
        devices = by_host(jax.devices(), hosts()) if several() else jax.devices()
    if not devices or len(set(devices)) < len(devices):
        given = f"{len(devices)} devices are given, {len(set(devices))} of them different"
        raise MeshError(f"{given}: a mesh is made of at least one device, and of none twice")
    sizes = fill(sizes, len(devices))
    needed = math.prod(sizes.values())
    _check_count(sizes, needed, devices)
    return jax.make_mesh(tuple(sizes.values()), AXES, devices=devices[:needed], axis_types=(AxisType.Auto,) * len(AXES))


def request_virtual_devices(count: int) -> None:
    """Asks for `count` virtual CPU devices, unless their number is set already.

    Without effect once the backend has started, on GPUs, and for more than `MAX_VIRTUAL_DEVICES`.
    """
    accept_absent_gpus()
    if jax.config.jax_num_cpu_devices != -1 or count > MAX_VIRTUAL_DEVICES:  # type: ignore[attr-defined]  # -1: not set
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # the backend has started: make_mesh compares the mesh with the devices that there are


def most_devices() -> int | None:
    """Returns the most devices a mesh can have; None for virtual CPU devices, which are made as a mesh needs them.

    Starts JAX's backend.
    """
    accept_absent_gpus()
    devices = jax.devices()
    any_number = devices[0].platform == "cpu" and jax.config.jax_num_cpu_devices == -1  # type: ignore[attr-defined]
    return None if any_number else len(devices)


def sized(**sizes: int) -> dict[str, int]:
    """Returns the size of every axis of a mesh, in their order; one that is left out has one device."""
    return dict.fromkeys(AXES, 1) | sizes


def parts(sizes: Mapping[str, int], axes: Iterable[str]) -> int:
    """Returns the number of parts into which the devices along some axes divide an array."""
    return math.prod(sizes[axis] for axis in axes)


def batch_parts(sizes: Mapping[str, int]) -> int:
    """Returns the number of parts into which the devices divide a batch."""
    return parts(sizes, BATCH)


def copies(*, stored_split: bool, used_by_all_tp: bool) -> tuple[str, ...]:
    """Returns the axes along which copies of a weight are used on different tokens, so that its gradient is summed.

    Args:
      stored_split: a dim of it is divided over `STORAGE`.
      used_by_all_tp: it is equal over tp, and used on different tokens there.
    """
    return REPLICAS + (() if stored_split else STORAGE) + ((TP,) if used_by_all_tp else ())


def abstract_mesh(sizes: Mapping[str, int]) -> AbstractMesh:
    """Returns a mesh of these sizes without devices."""
    return AbstractMesh(tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    """Returns the number of devices along each axis; all 1 for an empty mesh (no mesh in context) or None."""
    return sized() if mesh is None else sized() | dict(mesh.shape)


def host_memory() -> int:
    """Returns the bytes of memory of the machine, which its virtual CPU devices share."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_limit(device: jax.Device) -> int | None:
    """Returns the bytes of a device that JAX may allocate; None where it does not say, as on CPUs."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_per_device(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes that each of some devices of this process has, or None; CPU devices share the machine's."""
    return host_memory() // len(devices) if devices[0].platform == "cpu" else bytes_limit(devices[0])


def current_mesh() -> AbstractMesh | None:
    """Returns the mesh set by `jax.set_mesh`, or None.

    Raises:
      MeshError: the mesh in context lacks one of this package's axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise MeshError(
            f"the mesh in context has axes {mesh.axis_names} and lacks {missing}; "
            "build it with jaxtp.make_mesh, where an unused axis has size 1"
        )
    return mesh


def platform_here() -> str:
    """Returns the kind of device that a program runs on: cpu, cuda, rocm or tpu.

    It is that of the mesh in context, whose devices need not be there, else that of JAX's own devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    device = (None if mesh.empty else mesh.abstract_device) or jax.devices()[0]
    return platform_of(device)


def platform_of(device: Any) -> str:
    """Returns cpu, cuda, rocm or tpu for a `jax.Device`, or what describes one; JAX calls GPUs of both makers gpu."""
    if device.platform != "gpu":
        return str(device.platform)
    return "rocm" if "amd" in device.device_kind.lower() else "cuda"


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a `PartitionSpec` names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def describe_mesh(sizes: Mapping[str, int], axes: Iterable[str] = AXES) -> str:
    """Returns the sizes of some axes for messages: `dp 1 x fsdp 2 x tp 4`."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def settings_of(axes: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the settings that size some axes: `mesh.fsdp`."""
    return tuple(f"mesh.{axis}" for axis in axes)


def product_of(axes: Iterable[str], sizes: Mapping[str, int]) -> str:
    """Returns what divides an array, in words: `mesh.fsdp * mesh.cp`, without axes of one device."""
    return " * ".join(settings_of(axis for axis in axes if sizes[axis] > 1))


def fitting_meshes(num_devices: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Returns the sizes of every mesh that uses exactly `num_devices`, those with the smallest last axes first.

    Args:
      num_devices: number of devices.
      axes: those that may have several; the others have one.
    """

    def sizes(axes: Sequence[str], devices: int) -> Iterator[dict[str, int]]:
        if len(axes) == 1:
            yield {axes[0]: devices}
            return
        for size in divisors(devices):
            yield from ({**others, axes[-1]: size} for others in sizes(axes[:-1], devices // size))

    return [sized(**found) for found in sizes(axes, num_devices)]


def divisors(number: int) -> list[int]:
    """Returns the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return small + [number // divisor for divisor in reversed(small) if divisor * divisor != number]


def parse_mesh(text: str, *, what_is_left: bool = False) -> dict[str, int]:
    """Returns the size of each axis in `fsdp=2,tp=4`; one that is left out is 1.

    Args:
      text: the sizes.
      what_is_left: accepts -1, for the devices that the others leave.

    Raises:
      MeshError: it is not of that form.
    """
    sizes: dict[str, int] = {}
    said = f"--mesh {shown(text)}"
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise MeshError(
                f"{said}: {shown(repr(axis))} is not an axis; they are {', '.join(AXES)}, as in fsdp=2,tp=4"
            )
        fits = size.isdecimal() and len(size) <= _MAX_DIGITS and int(size) >= 1
        if not fits and not (what_is_left and size == "-1"):
            raise MeshError(f"{said}: {axis}={shown(size)} is not a number of devices: 1, 2, ...")
        if axis in sizes:
            raise MeshError(f"{said}: {axis} is there twice; a mesh has one size for each axis")
        sizes[axis] = int(size)
    if (devices := math.prod(sizes.values())) > _MAX_DEVICES:
        raise MeshError(f"{said}: these are {devices:,} devices, and JAX counts {_MAX_DEVICES:,} at most")
    return sized(**sizes)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Checks that every size is a positive whole number, or -1 for at most one.

    Raises:
      MeshError: with the sizes that are not.
    """
    bad = [f"{axis}={size!r}" for axis, size in sizes.items() if type(size) is not int or (size < 1 and size != -1)]
    if bad:
        raise MeshError(f"{', '.join(bad)}: a mesh axis is a positive number of devices, or -1 for what is left")
    if list(sizes.values()).count(-1) > 1:
        raise MeshError(f"{describe_mesh(sizes)}: only one axis can be -1 (what is left)")


def fill(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Returns the sizes, with -1 replaced by the devices that are left.

    Raises:
      MeshError: the others do not divide the devices.
    """
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if -1 in sizes.values() and num_devices % fixed:
        raise MeshError(
            f"{describe_mesh(sizes)}: {num_devices} devices cannot be divided by {fixed}; "
            f"meshes that fit: {_list_meshes(num_devices, sizes)}"
        )
    return {axis: num_devices // fixed if size == -1 else size for axis, size in sizes.items()}


def _check_count(sizes: Mapping[str, int], needed: int, devices: Sequence[jax.Device]) -> None:
    if needed == len(devices) or (needed < len(devices) and jax.process_count() == 1):
        return
    problem = (
        f"mesh {describe_mesh(sizes)} needs {needed} devices, and there are {len(devices)} ({devices[0].device_kind})"
    )
    if devices[0].platform == "cpu" and needed > MAX_VIRTUAL_DEVICES:
        raise MeshError(f"{problem}; of virtual CPU devices at most {MAX_VIRTUAL_DEVICES} are made")
    if devices[0].platform == "cpu" and needed > len(devices):
        raise MeshError(
            f"{problem}: JAX's backend had started, or JAX_NUM_CPU_DEVICES is set. Call jaxtp.make_mesh before any "
            f'other JAX operation, or jax.config.update("jax_num_cpu_devices", {needed}) at the start'
        )
    raise MeshError(f"{problem}; meshes that fit ({', '.join(AXES)}): {_list_meshes(len(devices), sizes)}")


def _list_meshes(num_devices: int, asked: Mapping[str, int]) -> str:
    """Lists some of the meshes of so many devices, those of powers of two first; with cp only where it is asked for."""
    axes = [axis for axis in AXES if axis not in CONTEXT or asked[axis] != 1]
    found = (tuple(sizes.values()) for sizes in fitting_meshes(num_devices, axes))
    meshes = sorted(found, key=lambda mesh: sum(size & (size - 1) > 0 for size in mesh))
    return ", ".join(map(str, meshes[:MAX_LISTED])) + (", ..." if len(meshes) > MAX_LISTED else "")
