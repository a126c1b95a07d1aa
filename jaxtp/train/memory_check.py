"""Checks that a run fits the memory of its devices and of the host."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtp.config.console import size_text
from jaxtp.config.schema import ConfigError
from jaxtp.distributed.devices import (
    Allocator,
    advice,
    bytes_limit,
    host_memory,
    memory_fraction,
    most_bytes,
)
from jaxtp.layers.kernels.select import architecture_of
from jaxtp.mesh import mesh_sizes
from jaxtp.train.state import Blueprint, bytes_per_device, total_bytes

if TYPE_CHECKING:
    from jaxtp.train.memory import Memory
    from jaxtp.train.setup import Plan


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step, compared with a device's limit."""

    step: "Memory"
    # Bytes that JAX may allocate
    limit: float
    allocator: Allocator

    @property
    def fits(self) -> bool:
        """Whether the device can allocate the step."""
        fraction = memory_fraction(self.allocator)
        return self.step.total <= most_bytes(self.allocator, self.limit, fraction)

    def __str__(self) -> str:
        hint = advice(self.allocator, self.step.total, self.limit, memory_fraction(self.allocator))
        text = (
            f"{self.amount} on each device at a step's peak, of {size_text(self.limit)} that JAX "
            f"has there: {'fits' if self.fits else 'does not fit'}"
        )
        return text if hint is None else f"{text}; {hint}"

    @property
    def amount(self) -> str:
        """The bytes, and the part of them that is exact."""
        step = self.step
        return (
            f"{size_text(step.total)} ({size_text(step.state)} of state, exact; the rest modelled)"
        )


def require_memory(plan: "Plan", blueprint: Blueprint) -> StepMemory | None:
    """Checks that a step fits each device, or on virtual CPU devices that the state fits the host.

    Returns:
      The memory of a step; None if the devices report no limit, as on CPUs.

    Raises:
      ConfigError: the state or the copy for verification does not fit the host; or a step does not
        fit a device, and `train.allow_oversize` is off.
    """
    config = plan.config
    mesh = blueprint.mesh
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    available = host_memory()
    # Virtual CPU devices store the state in the host's memory.
    needed = total_bytes(blueprint) if on_cpu else 0
    if needed > available:
        raise ConfigError(
            f"the state alone needs {size_text(needed)}, and this machine has "
            f"{size_text(available)} and no GPU; "
            "jaxtp check tries the configuration at a small size, and jaxtp estimate says what "
            "hardware it needs"
        )
    if config.train.verify_every:
        needed += verification_bytes(blueprint)
        if needed > available:
            raise ConfigError(
                f"train.verify_every={config.train.verify_every} keeps the state of this process's "
                f"devices in host memory: that takes {size_text(needed)}, and this machine "
                f"has {size_text(available)}; --train.verify-every 0 trains without verification"
            )
    limit = bytes_limit(mesh.local_devices[0])
    if limit is None:
        return None
    if plan.objective.has_formulas:
        from jaxtp.train.memory import memory_per_device

        step = memory_per_device(
            config, mesh_sizes(mesh), platform=architecture_of(mesh.devices.flat[0])
        )
    else:
        from jaxtp.train.user_step import trace_step

        step, _ = trace_step(plan.step_settings, blueprint, plan.shapes)
    memory = StepMemory(step, limit, config.launch.allocator)
    if not memory.fits and not config.train.allow_oversize:
        raise ConfigError(
            f"a step takes {memory.amount} on each device, and JAX has {size_text(limit)} there; "
            "jaxtp estimate with these settings and --hardware says what fits, and "
            "--train.allow-oversize tries it anyway"
        )
    return memory


def verification_bytes(blueprint: Blueprint) -> int:
    """Returns the host memory of a verification: a copy of the process's part of the state."""
    return bytes_per_device(blueprint) * len(blueprint.mesh.local_devices)
