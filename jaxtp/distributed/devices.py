"""Number, order and memory of a run's devices, and the allocator of an NVIDIA GPU's memory.

- `default`: JAX's BFC allocator. Fragmentation can make an allocation fail despite enough free
  memory (marin-community/marin#7115), or make collectives wait for each other without an error
  (#7298).
- `cuda_async`: CUDA's pool, which joins fragments. Its share of the memory is a release threshold:
  a step with a higher peak maps memory again each time, which may fail hours later (#8490, #8507).

JAX's backend reads the choice from `jax_pjrt_client_create_options` at its start.
XLA_PYTHON_CLIENT_ALLOCATOR had no effect for some users of jax 0.10.1 (#7115).
"""

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
from jax.sharding import Mesh

from jaxtp import mesh as meshes
from jaxtp.config.console import size_text
from jaxtp.distributed.agreement import host_names, is_multiprocess
from jaxtp.distributed.environment import (
    accept_absent_gpus,
    has_nvidia_gpu,
    num_processes,
    process_counts,
    require_joinable,
)
from jaxtp.mesh import MeshError, Sizes, check_sizes, describe_mesh, fixed_devices, mesh_of

Allocator = Literal["default", "cuda_async"]

MEMORY_FRACTION: dict[Allocator, float] = {"default": 0.75, "cuda_async": 0.85}
"""Default share of a GPU's memory for each allocator; JAX's defaults, except for cuda_async."""

OUTSIDE = 0.1
"""Minimum share of a GPU's memory outside of the pool: NCCL, cuBLAS and CUDA's context need 10% to
15% (28.6 of 184 GiB in marin#8490)."""

FRAGMENTED = 0.1
"""Assumed share of its memory that the default allocator may lose to fragmentation."""

FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SMALLER_STEP = "XLA_FLAGS=--xla_gpu_memory_limit_slop_factor=85"
"""Makes XLA plan a smaller step; the default is 95 (marin#8507)."""

_OPTIONS = "jax_pjrt_client_create_options"


def build_mesh(sizes: Sizes) -> Mesh:
    """Builds a run's mesh with `mesh_of`; devices of one host are neighbors."""
    check_sizes(sizes)
    request_virtual_devices(fixed_devices(sizes))
    if not is_multiprocess():
        return mesh_of(sizes, jax.devices())
    devices = by_host(jax.devices(), host_names())
    _check_processes(sizes, devices)
    return mesh_of(sizes, devices)


def request_virtual_devices(count: int) -> None:
    """Requests a total of `count` virtual CPU devices over all processes, before JAX starts.

    Raises `LaunchError` if this process is one of several that have not been joined.
    """
    accept_absent_gpus()
    if is_multiprocess():
        count = -(-count // num_processes())
    else:
        require_joinable()
    meshes.request_virtual_devices(count)


def most_devices() -> int | None:
    """Starts JAX's backend and returns the number of devices.

    Returns None for CPU devices whose number was not configured.
    """
    request_virtual_devices(1)
    devices = jax.devices()
    if devices[0].platform == "cpu" and not meshes.is_number_configured():
        return None
    return len(devices)


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


def choose_allocator(allocator: Allocator) -> None:
    """Sets JAX's allocator before its backend starts, if there is an NVIDIA GPU.

    The backend of a TPU would crash at an unknown option.
    """
    if allocator == "default" or not has_nvidia_gpu():
        return
    configured = getattr(jax.config, _OPTIONS) or {}
    if isinstance(configured, str):
        configured = dict(re.findall(r"([^;:]*):([^;]*)", configured))
    fraction = memory_fraction(allocator)
    jax.config.update(_OPTIONS, {"memory_fraction": fraction, **configured, "allocator": allocator})


def memory_fraction(allocator: Allocator, environment: Mapping[str, str] = os.environ) -> float:
    """Returns the share of a GPU's memory that the allocator takes."""
    fraction = environment.get("XLA_CLIENT_MEM_FRACTION") or environment.get(FRACTION)
    try:
        return float(fraction or MEMORY_FRACTION[allocator])
    except ValueError:  # JAX reports it
        return MEMORY_FRACTION[allocator]


def most_bytes(allocator: Allocator, limit: float, fraction: float) -> float:
    """Returns the maximum bytes that a step can use.

    `limit` is `fraction` of the memory; only cuda_async can exceed it.
    """
    if allocator != "cuda_async":
        return limit
    return max(limit, limit / fraction * (1 - OUTSIDE))


def advice(allocator: Allocator, peak: float, limit: float, fraction: float) -> str | None:
    """Returns advice on a step's `peak` bytes, or None.

    `limit` is the number of bytes that JAX may allocate (with cuda_async, the release threshold),
    and `fraction` is its share of the memory.
    """
    if allocator == "default" and limit * (1 - FRAGMENTED) < peak <= limit:
        return (
            f"{size_text(limit - peak)} to spare; {size_text(limit * FRAGMENTED)} are advisable, "
            "because fragments of free memory can be too small, above all after a resume; "
            "--launch.allocator cuda_async joins fragments"
        )
    if allocator == "cuda_async" and peak > limit:
        return (
            f"WARNING: above the {size_text(limit)} that the pool of cuda_async retains: each step "
            "maps memory again, and hours later one of many processes may fail to get it. Raise "
            f"{FRACTION} from {fraction:g} to at most {1 - OUTSIDE:g}, or let XLA plan a smaller "
            f"step: {SMALLER_STEP} (its default is 95)"
        )
    if allocator == "cuda_async" and fraction > 1 - OUTSIDE:
        return (
            f"WARNING: {FRACTION}={fraction:g} leaves less than {OUTSIDE:.0%} of the memory "
            "outside of the pool: NCCL, cuBLAS and CUDA's context need 10% to 15%"
        )
    return None


def describe_out_of_memory(error: BaseException, allocator: Allocator) -> str | None:
    """Returns advice on an out-of-memory error; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    if allocator == "cuda_async":
        instead = f"raise {FRACTION} (up to {1 - OUTSIDE:g}), or set {SMALLER_STEP}"
    else:
        instead = (
            "if the error names more free memory than it requested, or the run did fit before it "
            "was resumed, the free memory is fragmented: --launch.allocator cuda_async joins "
            "fragments"
        )
    return (
        "A device ran out of memory. To use less: more devices along fsdp or tp, --model.remat "
        f"full, a larger --train.accumulation. Otherwise: {instead}. jaxtp estimate shows which "
        "settings fit."
    )
