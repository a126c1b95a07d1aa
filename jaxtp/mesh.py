"""The device mesh and its four named axes.

`dp` replicates the params, `fsdp` shards their storage, `cp` splits sequences, `tp` splits matrix
products. `dp` and `fsdp` together divide a batch's sequences. `cp` also shards the storage of
weights, like `fsdp`. `tp` varies fastest, so that neighbouring devices (one host, one NVLink
domain) form a tensor-parallel group.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Literal, Never, overload

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxtp.config.entry import UserError
from jaxtp.config.hints import divisors

DP = "dp"
FSDP = "fsdp"
CP = "cp"
TP = "tp"
AXES = (DP, FSDP, CP, TP)  # all axes; the last varies fastest
BATCH = (DP, FSDP)  # axes that divide the sequences of a batch
CONTEXT = (CP,)  # axes that divide each sequence (`layers/context.py`)
TOKENS = (*BATCH, *CONTEXT)  # axes that divide the tokens of a batch

Sizes = Mapping[str, int]  # number of devices along each axis
MeshLike = Mesh | AbstractMesh | Sizes | str | None  # None: the mesh in context

STORAGE = (FSDP, CP)
"""Axes that shard a stored weight. It is all-gathered before use; its gradient is
reduce-scattered."""

SEQUENCE = (*CONTEXT, TP)
"""Axes that split the sequence between parallel layers under sequence parallelism; tp splits each
shard of cp."""

REPLICAS = (DP,)
"""Axes along which every weight is replicated and used on different tokens; its gradient is
all-reduced."""

MAX_VIRTUAL_DEVICES = 1024  # of one process: they start in a second and share the cores
MIN_VIRTUAL_DEVICES = 8
"""The fewest virtual devices with which a single process starts: their number cannot grow, and a
later mesh, as in the next cell of a notebook, may be larger. Unused ones cost nothing."""
_MAX_LISTED = 12  # meshes listed in a message
_MADE = "build it with jaxtp.make_mesh, where an unused axis has size 1"


class MeshError(UserError):
    """The mesh cannot be built from the available devices."""


def make_mesh(
    *positions: Never,
    dp: int = 1,
    fsdp: int = 1,
    cp: int = 1,
    tp: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Builds the mesh `(dp, fsdp, cp, tp)`; make it current with `jax.set_mesh(mesh)`.

    Without accelerators it requests as many virtual CPU devices as needed, and at least eight,
    unless JAX's backend has started.

    One axis may be -1: it takes all remaining devices. `devices` defaults to `jax.devices()`. A
    mesh of a single process may be smaller, and takes the first devices.

    Raises:
      MeshError: a size has no axis or is not positive, several sizes are -1, or devices are too few
        or not distinct.
    """
    if positions:
        sizes = ", ".join(map("{}={}".format, (DP, FSDP, TP), positions))
        raise MeshError(f"make_mesh{positions}: name the axes, as in make_mesh({sizes})")
    return mesh_of(mesh_shape(dp=dp, fsdp=fsdp, cp=cp, tp=tp), devices)


def mesh_of(sizes: Sizes, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Builds a mesh from axis sizes."""
    check_sizes(sizes)
    if devices is None:
        if not jax.distributed.is_initialized():
            request_virtual_devices(fixed_devices(sizes))
        devices = jax.devices()
    if not devices or len(set(devices)) < len(devices):
        raise MeshError(
            f"a mesh needs one or more distinct devices; got {len(devices)}, {len(set(devices))} "
            "distinct"
        )
    sizes = resolve_sizes(sizes, len(devices))
    needed = math.prod(sizes.values())
    _check_count(sizes, needed, devices)
    return jax.make_mesh(
        tuple(sizes.values()),
        AXES,
        devices=devices[:needed],
        axis_types=(AxisType.Auto,) * len(AXES),
    )


_numbers_of_devices: set[int] = set()  # that `request_virtual_devices` set in this process


def request_virtual_devices(count: int = 1) -> None:
    """Makes this process start with virtual CPU devices if it has no accelerator: at least `count`.

    A process among several gets `count`. One by itself gets a multiple of it, `MIN_VIRTUAL_DEVICES`
    or more, so that an axis of -1 has a size. No effect if their number is configured, the backend
    has started, or `count` > `MAX_VIRTUAL_DEVICES`.
    """
    configured = jax.config.jax_num_cpu_devices != -1  # type: ignore[attr-defined]
    if configured or count > MAX_VIRTUAL_DEVICES:
        return
    if not jax.distributed.is_initialized():
        count *= -(-MIN_VIRTUAL_DEVICES // count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return  # the backend has started; _check_count compares the mesh with its devices
    _numbers_of_devices.add(count)


def is_number_configured() -> bool:
    """Returns whether the user set the number of CPU devices.

    `request_virtual_devices` leaves spare ones otherwise.
    """
    return jax.config.jax_num_cpu_devices not in (-1, *_numbers_of_devices)  # type: ignore[attr-defined]


def all_devices() -> list[jax.Device]:
    """Returns JAX's devices.

    If this starts the backend of a single process, it has virtual ones for later meshes.
    """
    if not jax.distributed.is_initialized():
        request_virtual_devices()
    return jax.devices()


def mesh_shape(**sizes: int) -> dict[str, int]:
    """Returns the size of every axis, 1 by default."""
    return dict.fromkeys(AXES, 1) | sizes


def parts(sizes: Sizes, axes: Iterable[str]) -> int:
    """Returns the product of the sizes of `axes`."""
    return math.prod(sizes[axis] for axis in axes)


def batch_parts(sizes: Sizes) -> int:
    """Returns the number of shards of a batch's rows."""
    return parts(sizes, BATCH)


def abstract_mesh(sizes: Sizes) -> AbstractMesh:
    """Returns a mesh of these sizes without devices."""
    return AbstractMesh(
        tuple(sizes[axis] for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


@overload
def as_mesh(mesh: MeshLike, caller: str) -> Mesh | AbstractMesh: ...


@overload
def as_mesh(mesh: MeshLike, caller: str, *, abstract: Literal[True]) -> AbstractMesh: ...


def as_mesh(mesh: MeshLike, caller: str, *, abstract: bool = False) -> Mesh | AbstractMesh:
    """Returns the mesh that a user names, by default that in context.

    Args:
      mesh: a mesh, or its sizes: `{"fsdp": 2, "tp": 4}` or `"fsdp=2,tp=4"`.
      caller: the function that takes it, for messages.
      abstract: whether devices need not exist. Sizes become a mesh of devices otherwise.

    Raises:
      MeshError: it is no such thing, there is no mesh in context, or devices are too few.
    """
    if mesh is None:
        mesh = _mesh_in_context(caller)
    if isinstance(mesh, str):
        mesh = parse_mesh(mesh)
    if not isinstance(mesh, Mesh | AbstractMesh | Mapping):
        raise MeshError(
            f'{caller} takes a mesh, or its sizes as in mesh={{"fsdp": 2, "tp": 4}}, not {mesh!r}'
        )
    if isinstance(mesh, Mesh | AbstractMesh) and not abstract:
        check_axes(mesh)
        return mesh
    sizes = mesh_shape() | dict(mesh if isinstance(mesh, Mapping) else mesh.shape)
    unknown = sorted(map(str, sizes.keys() - AXES))
    if unknown:
        raise MeshError(f"{', '.join(unknown)}: not a mesh axis; the axes are {', '.join(AXES)}")
    check_sizes(sizes)
    if not abstract:
        return mesh_of(sizes)
    if -1 in sizes.values():
        raise MeshError(
            f"{describe_mesh(sizes)}: -1 means all other devices, but devices need not exist here"
        )
    return abstract_mesh(sizes)


def _mesh_in_context(caller: str) -> Mesh | AbstractMesh:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise MeshError(
            f"{caller} needs a mesh: call it under jax.set_mesh(jaxtp.make_mesh(...)), or pass "
            'mesh={"tp": 8}'
        )
    # In a trace, such as the trace of a function that builds a model, the mesh is abstract.
    with suppress(ValueError):
        concrete = jax.sharding.get_mesh()
        if not concrete.empty:
            return concrete
    return mesh


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of `fsdp=2,tp=4`; -1 means all other devices. Raises `MeshError`."""
    # The parser of flags imports pydantic, which a program that needs only a mesh does not.
    from jaxtp.config import command_line

    try:
        return command_line.parse_mesh(text, AXES, allow_rest=True)
    except UserError as error:
        raise MeshError(str(error).removeprefix("--")) from None


def as_current(mesh: Mesh | AbstractMesh) -> AbstractContextManager[object]:
    """Makes a mesh current in a `with` block.

    Under an abstract mesh functions can only be traced.
    """
    if isinstance(mesh, Mesh):
        return jax.set_mesh(mesh)
    return jax.sharding.use_abstract_mesh(mesh)


@contextmanager
def as_only(mesh: AbstractMesh) -> Iterator[None]:
    """Makes an abstract mesh current in a `with` block, whatever mesh is current outside."""
    # A context mesh cannot change its size directly.
    none = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(mesh):
        yield


def mesh_sizes(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    """Returns the size of each axis, all 1 for None or an empty mesh."""
    if mesh is None:
        return mesh_shape()
    return mesh_shape() | dict(mesh.shape)


def current_mesh() -> AbstractMesh | None:
    """Returns the mesh set by `jax.set_mesh`, or None.

    Raises as `check_axes`, or if axes are explicit.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return None
    check_axes(mesh)
    if mesh.explicit_axes:
        raise MeshError(
            f"axes {mesh.explicit_axes} of the mesh have AxisType.Explicit, not Auto; {_MADE}"
        )
    return mesh


def check_axes(mesh: Mesh | AbstractMesh) -> None:
    """Raises a `MeshError` if a mesh lacks one of `AXES`."""
    missing = [axis for axis in AXES if axis not in mesh.axis_names]
    if missing:
        raise MeshError(f"the mesh has axes {mesh.axis_names} and lacks {missing}; {_MADE}")


def current_device() -> jax.Device | AbstractDevice:
    """Returns the device, possibly abstract, of the mesh in context, else `jax.devices()[0]`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.abstract_device is None:
        return all_devices()[0]
    return mesh.abstract_device


def current_platform() -> str:
    """Returns `platform_of(current_device())`."""
    return platform_of(current_device())


def platform_of(device: jax.Device | AbstractDevice) -> str:
    """Returns cpu, cuda, rocm or tpu; JAX reports "gpu" for both NVIDIA and AMD."""
    if device.platform != "gpu":
        return device.platform
    # An abstract device has no client. The kind of an AMD GPU may be `gfx942`.
    version = getattr(getattr(device, "client", None), "platform_version", "")
    description = f"{device.device_kind} {version}".lower()
    return "rocm" if re.search("amd|gfx|rocm", description) else "cuda"


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def describe_mesh(sizes: Sizes, axes: Iterable[str] = AXES) -> str:
    """Returns `dp 1 x fsdp 2 x tp 4` for messages."""
    return " x ".join(f"{axis} {sizes[axis]}" for axis in axes)


def describe_split(sizes: Sizes) -> str:
    """Returns `fsdp 2 x tp 4`, without axes of size 1."""
    axes = [axis for axis, size in sizes.items() if size > 1]
    return describe_mesh(sizes, axes) or "one device"


def fitting_meshes(num_devices: int, axes: Sequence[str] = AXES) -> list[dict[str, int]]:
    """Returns the sizes of every mesh of `num_devices`, sorted by the last axis first."""
    *slower_axes, last = axes
    if not slower_axes:
        return [mesh_shape(**{last: num_devices})]
    meshes = []
    for size in divisors(num_devices):
        for mesh in fitting_meshes(num_devices // size, slower_axes):
            meshes.append(mesh | {last: size})
    return meshes


def check_sizes(sizes: Sizes) -> None:
    """Raises a `MeshError` unless sizes are positive integers, or -1 for at most one axis."""
    invalid = []
    for axis, size in sizes.items():
        if type(size) is not int or (size < 1 and size != -1):
            invalid.append(f"{axis}={size!r}")
    if invalid:
        raise MeshError(
            f"{', '.join(invalid)}: a mesh axis is a positive number of devices, or -1 for the "
            "remaining ones"
        )
    if list(sizes.values()).count(-1) > 1:
        raise MeshError(f"{describe_mesh(sizes)}: only one axis can be -1 (the remaining devices)")


def fixed_devices(sizes: Sizes) -> int:
    """Returns the number of devices, without an axis of size -1."""
    # The product is negative if an axis has size -1.
    return abs(math.prod(sizes.values()))


def resolve_sizes(sizes: Sizes, num_devices: int) -> dict[str, int]:
    """Replaces -1 by the remaining devices.

    Raises a MeshError if the other sizes do not divide `num_devices`.
    """
    fixed = fixed_devices(sizes)
    if -1 in sizes.values() and num_devices % fixed:
        raise MeshError(
            f"{describe_mesh(sizes)}: {num_devices} devices cannot be divided by {fixed}; "
            f"meshes that fit: {_list_meshes(num_devices, sizes)}"
        )
    remaining = num_devices // fixed
    return {axis: remaining if size == -1 else size for axis, size in sizes.items()}


def _check_count(sizes: Sizes, needed: int, devices: Sequence[jax.Device]) -> None:
    if needed == len(devices) or (needed < len(devices) and jax.process_count() == 1):
        return
    first = devices[0]
    problem = (
        f"mesh {describe_mesh(sizes)} needs {needed} devices, and there are {len(devices)} "
        f"({first.device_kind})"
    )
    if first.platform == "cpu" and needed > MAX_VIRTUAL_DEVICES:
        raise MeshError(f"{problem}; the limit of virtual CPU devices is {MAX_VIRTUAL_DEVICES}")
    if first.platform == "cpu" and needed > len(devices):
        raise MeshError(
            f"{problem}: JAX's backend has started, or JAX_NUM_CPU_DEVICES is set. Restart Python "
            "(in a notebook, its "
            "kernel), and make the largest mesh by jaxtp.make_mesh before any other JAX "
            "operation, or "
            f'jax.config.update("jax_num_cpu_devices", {needed}) at the start'
        )
    raise MeshError(
        f"{problem}; meshes that fit ({', '.join(AXES)}): {_list_meshes(len(devices), sizes)}"
    )


def _list_meshes(num_devices: int, requested: Sizes) -> str:
    """Lists meshes of `num_devices`, powers of two first, with cp only if requested."""
    axes = [axis for axis in AXES if axis not in CONTEXT or requested[axis] != 1]
    shapes = [tuple(sizes.values()) for sizes in fitting_meshes(num_devices, axes)]
    shapes.sort(key=lambda shape: sum(size.bit_count() > 1 for size in shape))
    listed = ", ".join(map(str, shapes[:_MAX_LISTED]))
    return f"{listed}, ..." if len(shapes) > _MAX_LISTED else listed
