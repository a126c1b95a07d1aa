"""Checks that a run fits the memory of its devices, before anything is allocated."""

from jax.sharding import Mesh

from jaxtp.config import ConfigError
from jaxtp.mesh import bytes_limit, host_memory, mesh_sizes
from jaxtp.train.config import TrainConfig
from jaxtp.train.memory import Memory, memory_per_device
from jaxtp.train.state import Blueprint, total_bytes

GB = 1e9


def require_memory(config: TrainConfig, blueprint: Blueprint) -> None:
    """Checks that the state fits the machine, on virtual CPU devices, or that a step fits each device that has a limit.

    Raises:
      ConfigError: it does not, and `train.allow_oversize` does not allow it.
    """
    if blueprint.mesh.devices.flat[0].platform == "cpu":
        _require_host_memory(blueprint)
    limit = bytes_limit(blueprint.mesh.local_devices[0])
    needed = memory_per_device(config, mesh_sizes(blueprint.mesh)) if limit is not None else None
    if limit is None or needed is None or needed.total <= limit or config.train.allow_oversize:
        return
    raise ConfigError(
        f"a step takes {_account(needed)} on each device, and JAX has {limit / GB:,.1f} GB there; "
        "python -m jaxtp.estimate with these settings and --hardware says what fits, and --train.allow-oversize tries "
        "it all the same"
    )


def describe_memory(config: TrainConfig, mesh: Mesh) -> str | None:
    """Says what a step takes of each device; None where a device does not say what it has, as CPUs do not."""
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None:
        return None
    needed = memory_per_device(config, mesh_sizes(mesh))
    verdict = "fits" if needed.total <= limit else "does not fit"
    return f"{_account(needed)} on each device at a step's peak, of {limit / GB:,.1f} GB that JAX has there: {verdict}"


def _account(memory: Memory) -> str:
    return f"{memory.total / GB:,.1f} GB ({memory.state / GB:,.1f} of state, exact; the rest modelled)"


def _require_host_memory(blueprint: Blueprint) -> None:
    """Checks that the state fits the machine, whose memory virtual CPU devices share."""
    needed, there = total_bytes(blueprint), host_memory()
    if needed > there:
        raise ConfigError(
            f"the state alone needs {needed / GB:,.0f} GB, and this machine has {there / GB:,.0f} GB and no GPU; "
            "try the configuration without training by python -m jaxtp.check, and ask what it needs by "
            "python -m jaxtp.estimate"
        )
