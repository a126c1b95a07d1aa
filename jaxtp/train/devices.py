"""Devices of a run, and meshes that fit its model."""

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from jaxtp.config.schema import replace_nested
from jaxtp.distributed.devices import build_mesh, bytes_limit, request_virtual_devices
from jaxtp.layers.kernels.select import architecture_of
from jaxtp.mesh import AXES, CONTEXT, REPLICAS, TP, batch_parts, check_sizes, fitting_meshes, mesh_sizes, parts
from jaxtp.models.config import padded_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.validation import check, check_devices, check_platform, violations_on

if TYPE_CHECKING:
    from jaxtp.train.memory import StoredArray

VIRTUAL_KIND = "virtual CPU devices"
BATCH_SIZE = "data.global_batch_size"


@dataclass(frozen=True)
class DeviceInfo:
    """The devices available to a run."""

    count: int
    per_process: int
    bfloat16: bool
    """Whether bfloat16 products are faster than float32 ones."""
    kind: str
    """Name for messages."""
    memory: float | None = None
    """Bytes of each device that JAX may allocate; None if unknown, as on CPUs."""
    platform: str = "cpu"
    """As returned by `architecture_of`; decides the kernels."""

    @property
    def is_virtual(self) -> bool:
        """Whether they share a CPU."""
        return self.kind == VIRTUAL_KIND


def open_mesh(config: TrainConfig) -> Mesh:
    """Returns a run's checked mesh; unless a size is -1, checks before JAX's backend starts.

    Raises:
      ConfigError: all violations with the nearest values that work, or an unsupported kernel.
      MeshError: impossible mesh.
      RematError: unsupported remat policy.
    """
    sizes = config.mesh.sizes
    check_sizes(sizes)
    if -1 in sizes.values():
        mesh = build_mesh(sizes)
        check(config, mesh_sizes(mesh))
    else:
        check(config, sizes)
        check_devices(config, sizes)
        mesh = build_mesh(sizes)
    check_platform(config, mesh_sizes(mesh), architecture_of(mesh.devices.flat[0]))
    return mesh


def probe_devices(mesh: Mapping[str, int]) -> DeviceInfo:
    """Describes the available devices; starts JAX's backend, with virtual CPU devices if needed.

    Raises:
      MeshError: more devices than the machine can have.
    """
    request_virtual_devices(math.prod(size for size in mesh.values() if size != -1))
    first = jax.devices()[0]
    return DeviceInfo(
        count=jax.device_count(),
        per_process=jax.local_device_count(),
        bfloat16=_has_bfloat16(first),
        kind=VIRTUAL_KIND if first.platform == "cpu" else first.device_kind,
        memory=bytes_limit(jax.local_devices()[0]),
        platform=architecture_of(first),
    )


def _has_bfloat16(device: jax.Device) -> bool:
    # TPUs do, GPUs from compute capability 8.0 on; CPUs emulate it.
    if device.platform == "cpu":
        return False
    major, _, _ = str(getattr(device, "compute_capability", "")).partition(".")
    return not (major.isdecimal() and int(major) < 8)


def fits(config: TrainConfig, mesh: Mapping[str, int], devices: DeviceInfo) -> bool:
    """Returns whether the run can use the mesh, ignoring memory."""
    count = math.prod(mesh.values())
    enough = count == devices.count or (count < devices.count and devices.per_process == devices.count)
    return enough and not any(violations_on(config, mesh))


def missing_bytes(
    config: TrainConfig, mesh: Mapping[str, int], devices: DeviceInfo, arrays: Iterable["StoredArray"] | None = None
) -> float:
    """Returns the bytes that a step lacks on each device, or 0.

    Args:
      arrays: `stored_arrays(config)`, if known.
    """
    if devices.memory is None:
        return 0.0
    from jaxtp.train.memory import memory_per_device

    return max(0.0, memory_per_device(config, mesh, arrays, platform=devices.platform).total - devices.memory)


def with_divisible_batch(config: TrainConfig, mesh: Mapping[str, int]) -> TrainConfig:
    """Rounds the batch size up so that the mesh divides it."""
    divisor = batch_parts(mesh) * config.train.accumulation
    return replace_nested(config, {BATCH_SIZE: -(-config.data.global_batch_size // divisor) * divisor})


def best_mesh(
    config: TrainConfig, axes: Set[str], devices: DeviceInfo, *, any_batch: bool
) -> tuple[dict[str, int], int, float] | None:
    """Returns the best mesh with the most devices, its batch size and `missing_bytes`; None if none fits.

    Args:
      axes: have a fixed configured size; -1 means any.
      any_batch: the batch may be larger than configured.
    """
    from jaxtp.train.memory import costs_of_step, stored_arrays

    tried = [axis for axis in AXES if axis not in CONTEXT or axis in axes]  # cp only on request
    fixed = {axis: size for axis, size in config.mesh.sizes.items() if axis in axes and size != -1}
    arrays = () if devices.memory is None else stored_arrays(config)
    use_all = devices.per_process < devices.count or any(config.mesh.sizes[axis] == -1 for axis in axes)
    for count in (devices.count,) if use_all else range(devices.count, 0, -1):
        found = []
        for mesh in fitting_meshes(count, tried):
            if not fixed.items() <= mesh.items() or devices.per_process % mesh[TP]:  # tp stays inside a process
                continue
            run = with_divisible_batch(config, mesh) if any_batch else config
            if fits(run, mesh, devices):
                missing, pads = missing_bytes(run, mesh, devices, arrays), bool(padded_sizes(config.model, mesh[TP]))
                sent = sum(costs_of_step(run, mesh).budget.values())
                found.append((missing, pads, parts(mesh, REPLICAS), run.data.global_batch_size, sent, mesh))
        if found:
            # Prefers, in order: fewest missing bytes, no padding, most shards of parameters, smallest batch, fewest
            # bytes sent.
            missing, *_, batch, _, best = min(found, key=lambda each: each[:5])
            return best, batch, missing
    return None
