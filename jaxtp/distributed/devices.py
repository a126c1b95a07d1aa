"""Number, memory and order of a run's devices."""

import math
import os
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxtp import mesh as meshes
from jaxtp.distributed.agreement import host_names, is_multiprocess
from jaxtp.distributed.environment import (
    accept_absent_gpus,
    num_processes,
    process_counts,
    require_joinable,
)
from jaxtp.mesh import MeshError, Sizes, check_sizes, describe_mesh, fixed_devices, mesh_of


def build_mesh(sizes: Sizes) -> Mesh:
    """Builds a run's mesh with `mesh_of`; devices of one host are neighbors."""
    check_sizes(sizes)
    _require_joined()
    request_virtual_devices(fixed_devices(sizes))
    if not is_multiprocess():
        return mesh_of(sizes)
    devices = by_host(jax.devices(), host_names())
    _check_processes(sizes, devices)
    return mesh_of(sizes, devices)


def request_virtual_devices(count: int) -> None:
    """Requests a total of `count` virtual CPU devices over all processes."""
    accept_absent_gpus()
    if is_multiprocess():
        count = -(-count // num_processes())
    meshes.request_virtual_devices(count)


def most_devices() -> int | None:
    """Starts JAX's backend and returns the number of devices.

    Returns None for CPU devices whose number was not configured.
    """
    _require_joined()
    accept_absent_gpus()
    devices = meshes.all_devices()
    if devices[0].platform == "cpu" and not meshes.is_number_configured():
        return None
    return len(devices)


def _require_joined() -> None:
    """Raises `LaunchError` if this process is one of several that have not been joined."""
    if not is_multiprocess():
        require_joinable()


def host_memory() -> int:
    """Returns this machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def bytes_limit(device: jax.Device) -> int | None:
    """Returns the bytes that JAX may allocate on a device; None if unknown, as on CPUs."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_per_device(devices: Sequence[jax.Device]) -> int | None:
    """Returns the bytes of each device of this process, or None if unknown.

    CPU devices share the host's memory.
    """
    if devices[0].platform == "cpu":
        return host_memory() // len(devices)
    return bytes_limit(devices[0])


def _check_processes(sizes: Sizes, devices: Sequence[jax.Device]) -> None:
    needed = math.prod(sizes.values())
    if devices[0].platform != "cpu" or -1 in sizes.values() or needed == len(devices):
        return
    processes = jax.process_count()
    share, remainder = divmod(needed, processes)
    hint = (
        f"each of {processes} processes needs {share}: `jaxtp launch --devices {share}` or "
        f"JAX_NUM_CPU_DEVICES={share}"
    )
    if remainder:
        hint = (
            f"{processes} processes cannot divide {needed} evenly: start {process_counts(needed)} "
            f"processes, or choose a mesh whose size is a multiple of {processes}"
        )
    raise MeshError(
        f"mesh {describe_mesh(sizes)} needs {needed} devices, and there are {len(devices)}; {hint}"
    )


def by_host(devices: Sequence[jax.Device], hosts: Sequence[str]) -> list[jax.Device]:
    """Sorts devices by host, even if consecutive processes are on different hosts.

    The last mesh axes then stay within a host, if they fit. JAX's `create_hybrid_device_mesh`
    groups by process or TPU slice, not by host.
    """
    first_process: dict[str, int] = {}
    for process, host in enumerate(hosts):
        first_process.setdefault(host, process)

    def key(device: jax.Device) -> tuple[int, int, int]:
        process = device.process_index
        return first_process[hosts[process]], process, device.id

    return sorted(devices, key=key)
