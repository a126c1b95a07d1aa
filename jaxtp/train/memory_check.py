"""Checks that a run fits the memory of its devices, before anything is allocated."""

from jax.sharding import Mesh

from jaxtp.config import ConfigError
from jaxtp.mesh import bytes_limit, host_memory, mesh_sizes, platform_of
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import Memory, memory_per_device
from jaxtp.train.state import Blueprint, total_bytes
from jaxtp.train.verify import host_bytes

GB = 1e9


def require_memory(config: TrainConfig, blueprint: Blueprint) -> None:
    """Checks that the state fits the machine, whose memory virtual CPU devices share, or a step each device's limit.

    Raises:
      ConfigError: it does not, and `train.allow_oversize` does not allow it.
    """
    mesh = blueprint.mesh
    if mesh.devices.flat[0].platform == "cpu" and (state := total_bytes(blueprint)) > (there := host_memory()):
        raise ConfigError(
            f"the state alone needs {state / GB:,.0f} GB, and this machine has {there / GB:,.0f} GB and no GPU; "
            "try the configuration without training by jaxtp check, and ask what it needs by "
            "jaxtp estimate"
        )
    _require_host_memory(config, blueprint)
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None or config.train.allow_oversize:
        return
    needed = _step_memory(config, mesh)
    if needed.total > limit:
        raise ConfigError(
            f"a step takes {_account(needed)} on each device, and JAX has {limit / GB:,.1f} GB there; "
            "jaxtp estimate with these settings and --hardware says what fits, and --train.allow-oversize "
            "tries it all the same"
        )


def _require_host_memory(config: TrainConfig, blueprint: Blueprint) -> None:
    """Checks that the host can hold what a verification keeps there, beside the state itself on CPUs."""
    if not config.train.verify_every:
        return
    on_cpu = blueprint.mesh.devices.flat[0].platform == "cpu"
    needed = host_bytes(blueprint) + (total_bytes(blueprint) if on_cpu else 0)
    if needed > (there := host_memory()):
        raise ConfigError(
            f"train.verify_every={config.train.verify_every} keeps the state of this process's devices in host memory, "
            f"twice: that takes {needed / GB:,.0f} GB, and this machine has {there / GB:,.0f} GB; "
            "--train.verify-every 0 trains without verification"
        )


def describe_memory(config: TrainConfig, mesh: Mesh) -> str | None:
    """Returns a line on the memory of a step; None where a device does not say what it has, as CPUs do not."""
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None:
        return None
    needed = _step_memory(config, mesh)
    verdict = "fits" if needed.total <= limit else "does not fit"
    return f"{_account(needed)} on each device at a step's peak, of {limit / GB:,.1f} GB that JAX has there: {verdict}"


def _step_memory(config: TrainConfig, mesh: Mesh) -> Memory:
    return memory_per_device(config, mesh_sizes(mesh), platform=platform_of(mesh.devices.flat[0]))


def _account(memory: Memory) -> str:
    return f"{memory.total / GB:,.1f} GB ({memory.state / GB:,.1f} of state, exact; the rest modelled)"
