"""Compiling the real training step for accelerators that are not there."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtp.train.config import TrainConfig


class TargetError(RuntimeError):
    """The compiler for the target is missing, crashed or took too long."""


@dataclass(frozen=True)
class Moved:
    """Collectives of one kind over the same axes, in the final program."""

    kind: str
    """all-reduce, all-gather, reduce-scatter, all-to-all, permute."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices talk."""
    count: int
    """Times in a step."""
    bytes: int
    """Whole messages of a step, on one device."""
    asynchronous: int
    """Of `count`: those with computation between their start and their end."""
    compute_between: int
    """Operations that compute, between start and end, over all of them in a step."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler for the target made of a step. Sizes are bytes on each device."""

    peak_bytes: int
    argument_bytes: int
    temp_bytes: int
    collectives: tuple[Moved, ...]
    seconds: float
    """That the compiler took, when it was asked."""
    notes: tuple[str, ...]
    """How this differs from the program on real devices, and what the compiler warned of."""


def compile_for(
    config: TrainConfig,
    sizes: Mapping[str, int],
    hardware: str,
    *,
    hosts: int,
    devices_per_host: int,
    timeout_s: float,
) -> Compiled:
    """Compiles the training step for hardware that need not be there, in a process of its own.

    Args:
      config: the run; its own mesh is not looked at.
      sizes: devices along each axis.
      hardware: a name of the hardware table, such as `h100`.
      hosts: of the target.
      devices_per_host: of each.
      timeout_s: seconds after which the compiler is ended.

    Raises:
      TargetError: the compiler is not installed, crashed, or took too long; the message says what to do.
    """
    raise TargetError("not written yet")
