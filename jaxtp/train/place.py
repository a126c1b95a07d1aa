"""The devices that a run will have, and a mesh of them that its model fits."""

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from jaxtp.config import changed
from jaxtp.mesh import (
    AXES,
    CONTEXT,
    REPLICAS,
    TP,
    batch_parts,
    check_sizes,
    fitting_meshes,
    mesh_of,
    mesh_sizes,
    parts,
    platform_of,
    request_virtual_devices,
)
from jaxtp.models.config import padded_sizes
from jaxtp.train.config import TrainConfig, check, check_devices, check_platform, violations_on
from jaxtp.train.memory import costs_of_step

VIRTUAL_KIND = "virtual CPU devices"
BATCH_SIZE = "data.global_batch_size"


@dataclass(frozen=True)
class Place:
    """The devices that a run will have."""

    devices: int
    """Number of devices."""

    per_process: int
    """Number of devices of a process."""

    bfloat16: bool
    """Whether products in bfloat16 are faster there."""

    kind: str
    """Name of the devices, for messages."""

    @property
    def is_virtual(self) -> bool:
        """Whether they are parts of a CPU."""
        return self.kind == VIRTUAL_KIND


def open_mesh(config: TrainConfig) -> Mesh:
    """Returns the mesh of a run; what does not fit it is refused before JAX's backend starts, if no size is -1.

    Raises:
      ConfigError: with every violation, each with the nearest values that work; or a kernel that the platform lacks.
      MeshError: there is no such mesh.
      RematError: a remat policy that the platform cannot carry out.
    """
    sizes = config.mesh.sizes
    check_sizes(sizes)
    if -1 not in sizes.values():
        check(config, sizes)
        check_devices(config, sizes)
    mesh = mesh_of(sizes)
    check(config, mesh_sizes(mesh))
    check_platform(config, mesh_sizes(mesh), platform_of(mesh.devices.flat[0]))
    return mesh


def place_for(mesh: Mapping[str, int]) -> Place:
    """Describes the devices that are there; starts JAX's backend.

    Args:
      mesh: what is asked for, -1 for what is left; virtual CPU devices are as many as it needs.

    Raises:
      MeshError: more than the machine can have.
    """
    request_virtual_devices(math.prod(size for size in mesh.values() if size != -1))
    first = jax.devices()[0]
    kind = VIRTUAL_KIND if first.platform == "cpu" else first.device_kind
    return Place(jax.device_count(), jax.local_device_count(), _has_bfloat16(first), kind)


def fits(config: TrainConfig, mesh: Mapping[str, int], place: Place) -> bool:
    """Returns whether the run can be on that mesh of the devices."""
    count = math.prod(mesh.values())
    enough = count == place.devices or (count < place.devices and place.per_process == place.devices)
    return enough and not any(violations_on(config, mesh))


def with_batch(config: TrainConfig, mesh: Mapping[str, int]) -> TrainConfig:
    """Returns the run with the smallest batch size, from the configured one on, that the mesh divides."""
    divided = batch_parts(mesh) * config.train.accumulation
    return changed(config, {BATCH_SIZE: -(-config.data.global_batch_size // divided) * divided})


def fitting_mesh(
    config: TrainConfig, axes: Set[str], place: Place, *, any_batch: bool
) -> tuple[dict[str, int], int] | None:
    """Returns the mesh of the most devices that the run can be on, and its batch size; None if there is none.

    Of several one that pads nothing, then the one that divides the parameters the most, and of those the one that moves
    the fewest bytes in a step.

    Args:
      config: the run.
      axes: those whose size in the configuration stays; -1 is what is left.
      place: the devices.
      any_batch: whether the batch may be larger than configured.
    """
    given = {axis: config.mesh.sizes[axis] for axis in axes}
    tried = [axis for axis in AXES if axis not in CONTEXT or axis in axes]  # sequences stay whole unless asked for
    asked = {axis: size for axis, size in given.items() if size != -1}
    whole = place.per_process < place.devices or -1 in given.values()
    for count in (place.devices,) if whole else range(place.devices, 0, -1):
        found = []
        for mesh in fitting_meshes(count, tried):
            if not asked.items() <= mesh.items() or place.per_process % mesh[TP]:  # tp stays inside a process
                continue
            run = with_batch(config, mesh) if any_batch else config
            if fits(run, mesh, place):
                pads = bool(padded_sizes(config.model, mesh[TP]))
                found.append((pads, parts(mesh, REPLICAS), run.data.global_batch_size, _bytes(run, mesh), mesh))
        if found:
            *_, batch, _, best = min(found, key=lambda each: each[:4])
            return best, batch
    return None


def _bytes(config: TrainConfig, mesh: Mapping[str, int]) -> float:
    """Returns the bytes that a device sends in a step."""
    return sum(costs_of_step(config, mesh).budget.values())


def _has_bfloat16(device: jax.Device) -> bool:
    """Returns whether a device computes in bfloat16: TPUs do, GPUs from compute capability 8.0 on; CPUs emulate it."""
    if device.platform == "cpu":
        return False
    major, _, _ = str(getattr(device, "compute_capability", "")).partition(".")
    return not (major.isdecimal() and int(major) < 8)
