"""Tier 2: the real step, compiled for virtual CPU devices, and what it moves beside what tier 1 says.

Nothing is allocated or run: the shapes are those of the run.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from jaxtp.audit.audit import audit
from jaxtp.audit.compiling import captured_stderr
from jaxtp.communication import Axes, Traffic, sums
from jaxtp.config import ConfigError, changed
from jaxtp.estimate.report import is_plain
from jaxtp.estimate.search import Setting
from jaxtp.mesh import mesh_of, request_virtual_devices
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig, kernel_problems
from jaxtp.train.memory import with_attention
from jaxtp.train.optimizer_state import OPTIMIZER_SCOPE
from jaxtp.train.state import plan_state
from jaxtp.train.step import trace_step

MAX_DEVICES = 1024
"""Virtual ones in a process: each has threads of its own, and XLA's CPU client refuses 4,096."""

QUICK = {"xla_backend_optimization_level": 0}
"""Less of what comes after partitioning, which is all that is read."""

Bytes = Mapping[tuple[str, Axes], float]
"""Bytes that each device sends, by kind and mesh axes."""


@dataclass(frozen=True)
class Partitioned:
    """A training step after SPMD partitioning, beside tier 1."""

    planned: Bytes
    """Bytes by tier 1."""
    realised: Bytes
    """After SPMD partitioning, sums of single numbers apart."""
    problems: tuple[str, ...]
    """Lines about what the compiled step does that nobody planned."""
    warnings: tuple[str, ...]
    """Lines that the compiler printed."""
    seconds: float
    """Time to trace and compile."""
    notes: tuple[str, ...]
    """Lines about what differs from the program for the hardware."""
    bound: bool
    """Tier 1 gives the most that can be moved, of this model."""

    @property
    def equal(self) -> bool:
        """Whether the two accounts agree in kind, axes and bytes."""
        return not self.differences

    @property
    def within(self) -> bool:
        """Whether nothing is moved that tier 1 does not say, or no more than it says where that is the most."""
        more = [key for key in self.differences if self.realised.get(key, 0) > self.planned.get(key, 0)]
        return not self.problems and (not more if self.bound else self.equal)

    @property
    def differences(self) -> list[tuple[str, Axes]]:
        """Kinds and axes whose bytes differ by more than rounding."""
        keys = dict.fromkeys((*self.planned, *self.realised))
        return [key for key in keys if abs(self.planned.get(key, 0) - self.realised.get(key, 0)) > 1]


def request_devices(setting: Setting) -> None:
    """Asks for the virtual devices of a mesh; before JAX does anything else.

    Raises:
      ConfigError: they are too many.
    """
    if setting.target.devices > MAX_DEVICES:
        raise ConfigError(
            f"tier 2 compiles for at most {MAX_DEVICES:,} virtual CPU devices, not {setting.target.devices:,}; a mesh "
            "with less dp shows the same collectives, as in --hardware h100x512"
        )
    request_virtual_devices(setting.target.devices)


def compile_partitioned(setting: Setting) -> Partitioned:
    """Compiles the step of a setting for as many virtual CPU devices as its mesh has.

    Raises:
      MeshError: JAX has started already, with fewer devices.
    """
    started = time.monotonic()
    config, notes = _for_cpu(setting.config)
    mesh = mesh_of(setting.sizes)
    blueprint = plan_state(config.model, optimizers.build(config.optimizer, config.train.steps), mesh)
    with captured_stderr() as printed:
        found = audit(
            trace_step(config, blueprint),
            blueprint.sharded,
            mesh=mesh,
            budget=setting.costs.budget,
            global_view=() if optimizers.is_modelled(config.optimizer) else (OPTIMIZER_SCOPE,),
            compiler_options=QUICK,
        )
    return Partitioned(
        bytes_sent(setting.costs.traffic),
        bytes_sent({one: times for one, times in found.realised.items() if one.shape}),
        tuple(found.problems()),
        tuple(line.rstrip() for line in printed if line.strip()),
        time.monotonic() - started,
        tuple(notes),
        not is_plain(config.model),
    )


def bytes_sent(moved: Traffic) -> Bytes:
    """Returns the bytes that each device sends, by kind and mesh axes."""
    return {place: sent for place, (_, sent) in sums(moved, lambda one: (one.kind, one.axes)).items()}


def _for_cpu(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Returns the same program with what only an accelerator has left out, and notes on it."""
    notes = []
    if any(kernel_problems(config, config.mesh.sizes, "cpu")):
        notes.append(f"compiled with a CPU's attention, which moves the same as {config.model.attention}'s")
        config = with_attention(config, "auto")
    if config.model.remat == "offload":
        config = changed(config, {"model.remat": "full"})
        notes.append("compiled with remat full, which moves the same as offload")
    return config, notes
