"""Everything that `jaxtp bench comm` measures."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.bench.computing import Pair, TimedProduct
from jaxtp.bench.fit import Line, measured_fields
from jaxtp.bench.moving import Message
from jaxtp.config import ConfigError
from jaxtp.hardware import Hardware
from jaxtp.mesh import TP

VIRTUAL = "virtual CPU devices share one processor: their times mean nothing for hardware"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Devices that were measured, and how."""

    kind: str
    """Name that JAX gives the devices."""

    platform: str
    """cpu, gpu or tpu."""

    devices: int
    """Number of devices in the mesh."""

    processes: int
    """Number of processes that drive them."""

    sizes: dict[str, int]
    """Devices along each axis of the mesh."""

    dtype: str
    """Dtype of messages and products."""

    hardware: Hardware | None
    """The row of the table that they are compared with."""

    @property
    def peak(self) -> float | None:
        """FLOP/s of the hardware in the dtype: in float32 half of its bfloat16."""
        if self.hardware is None:
            return None
        return self.hardware.flops * jnp.dtype("bfloat16").itemsize / jnp.dtype(self.dtype).itemsize

    @property
    def virtual(self) -> bool:
        """Whether the devices are none."""
        return self.platform == "cpu"

    def __str__(self) -> str:
        """Returns number and kind of the devices: `8 x NVIDIA H100 80GB HBM3`."""
        return f"{self.devices} virtual CPU devices" if self.virtual else f"{self.devices} x {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Results of a measurement."""

    place: Place
    """Devices that were measured."""

    messages: Sequence[Message]
    """Collectives."""

    lines: Sequence[Line]
    """Through them, an axis each."""

    products: Sequence[TimedProduct]
    """Products of a block; at tp 1 at least."""

    pairs: Sequence[Pair]
    """Pairs of layers."""

    @property
    def matmul_efficiency(self) -> float | None:
        """Share of the peak that a block's products reach, at the mesh's tp or the nearest; None if unknown."""
        if self.place.peak is None:
            return None
        tp = min({product.tp for product in self.products}, key=lambda tp: abs(tp - self.place.sizes[TP]))
        taken = [product for product in self.products if product.tp == tp]
        return sum(one.flops for one in taken) / sum(one.seconds for one in taken) / self.place.peak

    def hardware_file(self) -> str:
        """Returns a YAML file of the measured fields, for `jaxtp.hardware_file.read`; the place names its hardware.

        Raises:
          ConfigError: the times of an axis have no line.
        """
        if without := {message.axis for message in self.messages} - {line.axis for line in self.lines}:
            raise ConfigError(
                f"--out: over {' and '.join(sorted(without))} times do not grow with messages, so there is no "
                "bandwidth to write; give a wider range of --message-bytes, or more --rounds"
            )
        hardware, efficiency = self.place.hardware, self.matmul_efficiency
        assert hardware is not None
        assert efficiency is not None
        fields = measured_fields(hardware, self.place.sizes, self.lines, efficiency)
        lines = [f"# jaxtp bench comm on {self.place}, jax {jax.__version__}"]
        if self.place.virtual:
            lines.append(f"# {VIRTUAL}")
        lines += [f"like: {hardware.name} # what is not below", *(f"{name}: {x:.3e}" for name, x in fields.items())]
        return "\n".join(lines) + "\n"

    def record(self) -> dict[str, Any]:
        """Returns every number, in seconds, bytes and FLOPs, as plain dicts and lists."""
        plain = dataclasses.asdict(self) | {"messages": [message.record() for message in self.messages]}
        note = {"note": VIRTUAL} if self.place.virtual else {}
        return {"jax": jax.__version__, **note, **plain, "matmul_efficiency": self.matmul_efficiency}
