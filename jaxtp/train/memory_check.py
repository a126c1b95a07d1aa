"""Checks that a run fits the memory of its devices and of the host."""

from typing import TYPE_CHECKING

from jax.sharding import Mesh

from jaxtp.config.schema import ConfigError
from jaxtp.distributed.allocator import advice, memory_fraction, most_bytes
from jaxtp.distributed.devices import bytes_limit, host_memory
from jaxtp.layers.kernels.select import architecture_of
from jaxtp.mesh import mesh_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.state import Blueprint, bytes_per_device, total_bytes

if TYPE_CHECKING:
    from jaxtp.train.memory import Memory

_GB = 1e9


def require_memory(config: TrainConfig, blueprint: Blueprint) -> None:
    """Checks that the state fits the host (shared by virtual CPU devices), or a step each device.

    Raises:
      ConfigError: it does not fit, and `train.allow_oversize` is off.
    """
    mesh = blueprint.mesh
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if on_cpu and (needed := total_bytes(blueprint)) > (available := host_memory()):
        raise ConfigError(
            f"the state alone needs {needed / _GB:,.0f} GB, and this machine has {available / _GB:,.0f} GB and no GPU; "
            "jaxtp check tries the configuration at a small size, and jaxtp estimate says what hardware it needs"
        )
    if config.train.verify_every:
        needed = verification_bytes(blueprint) + (total_bytes(blueprint) if on_cpu else 0)
        if needed > (available := host_memory()):
            raise ConfigError(
                f"train.verify_every={config.train.verify_every} keeps the state of this process's devices in host "
                f"memory, twice: that takes {needed / _GB:,.0f} GB, and this machine has {available / _GB:,.0f} GB; "
                "--train.verify-every 0 trains without verification"
            )
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None or config.train.allow_oversize:
        return
    step, _, most = _step_on(config, mesh, limit)
    if step.total > most:
        raise ConfigError(
            f"a step takes {_summary(step)} on each device, and JAX has {limit / _GB:,.1f} GB there; "
            "jaxtp estimate with these settings and --hardware says what fits, and --train.allow-oversize "
            "tries it all the same"
        )


def describe_memory(config: TrainConfig, mesh: Mesh) -> str | None:
    """Describes a step's memory; None without a limit, as on CPUs."""
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None:
        return None
    step, fraction, most = _step_on(config, mesh, limit)
    verdict = "fits" if step.total <= most else "does not fit"
    hint = advice(config.launch.allocator, step.total, limit, fraction)
    return (
        f"{_summary(step)} on each device at a step's peak, of {limit / _GB:,.1f} GB that JAX has there: {verdict}"
        f"{'' if hint is None else f'; {hint}'}"
    )


def verification_bytes(blueprint: Blueprint) -> int:
    """Returns a verification's host memory per process: its part of the state, twice."""
    return 2 * bytes_per_device(blueprint) * len(blueprint.mesh.local_devices)


def _step_on(config: TrainConfig, mesh: Mesh, limit: float) -> tuple["Memory", float, float]:
    # The step's memory, the allocator's fraction of the device, and the most that it can allocate.
    from jaxtp.train.memory import memory_per_device

    step = memory_per_device(config, mesh_sizes(mesh), platform=architecture_of(mesh.devices.flat[0]))
    fraction = memory_fraction(config.launch.allocator)
    return step, fraction, most_bytes(config.launch.allocator, limit, fraction)


def _summary(memory: "Memory") -> str:
    return f"{memory.total / _GB:,.1f} GB ({memory.state / _GB:,.1f} of state, exact; the rest modelled)"
