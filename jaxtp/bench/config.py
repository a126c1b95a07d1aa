"""The command line of `jaxtp bench`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import jax
import tyro

from jaxtp.config import ConfigError, Count, UserPath
from jaxtp.hardware import TABLE, Hardware, of_kind
from jaxtp.hardware_file import find
from jaxtp.mesh import CONTEXT, batch_parts, parts, sized
from jaxtp.models.config import ModelConfig, padded_sizes, violations
from jaxtp.train.config import FIRST, TrainConfig

KIB = 2**10
SIZES = tuple(KIB * 4**i for i in range(2, 10))
"""Bytes, 16 KiB to 256 MiB: what layers move, from one token's activations to a gathered weight."""

CPU_SIZES = tuple(KIB * 4**i for i in range(2, 6))
"""Bytes, up to 1 MiB: a laptop holds every virtual device's array, and copies each."""


SHOWN_FIRST = ("message_bytes", "rounds", "in_a_row", "out", "like", "json", "plot", *FIRST)


@dataclass(frozen=True, kw_only=True)
class CommConfig(TrainConfig):
    """Command line of a measurement: the mesh and the sizes of a training configuration."""

    message_bytes: Annotated[tuple[Count, ...], tyro.conf.arg(metavar="16384 1048576 ...")] = ()
    """Sizes of messages in bytes. By default 16 KiB to 256 MiB in steps of four, on CPUs to 1 MiB."""

    rounds: Count = 10
    """Measurements of each thing, in turn with what it is compared with; the median is what is shown."""

    in_a_row: Count = 10
    """Runs in each measurement, divided by their number, so that starting one from Python counts for little."""

    out: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """Hardware file to write with what was measured, for jaxtp estimate --hardware FILE.yamlx8."""

    like: Annotated[str | None, tyro.conf.arg(metavar="h100")] = None
    """Hardware that the rest of the file is taken from, and whose peak products are compared with; by default what the
    devices say that they are."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write every number to, for machines."""

    plot: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.png")] = None
    """File to draw bandwidth over size, and computing beside communication over tp, in (pip install 'jaxtp[plot]')."""


def message_sizes(asked: CommConfig, platform: str) -> Sequence[int]:
    """Returns the sizes that are asked for, or those that suit the platform."""
    return asked.message_bytes or (CPU_SIZES if platform == "cpu" else SIZES)


def tokens_on_a_device(config: TrainConfig, mesh: dict[str, int]) -> tuple[int, int]:
    """Returns the sequences of a micro-batch on each device of the mesh, and the tokens of each; at least 1."""
    rows = config.data.global_batch_size // (batch_parts(mesh) * config.train.accumulation)
    return max(1, rows), max(1, config.data.sequence_length // parts(mesh, CONTEXT))


def usable_tps(model: ModelConfig, devices: int) -> list[int]:
    """Returns the powers of two, up to the number of devices, that divide a block of the model.

    Raises:
      ConfigError: not even one device can hold it.
    """
    if problems := list(violations(model, sized())):
        raise ConfigError("\n  ".join(("these settings do not fit each other:", *problems)))
    return [tp for i in range(devices.bit_length()) if not padded_sizes(model, tp := 2**i)]


def hardware_of(asked: CommConfig, device: jax.Device) -> Hardware | None:
    """Returns the row of the hardware table that the devices are compared with; None if there is none.

    Raises:
      ConfigError: the name that is asked for is not known, or a file is to be written with nothing to base it on.
    """
    if asked.like is not None:
        if asked.like.endswith((".yaml", ".yml")):
            raise ConfigError(f"--like {asked.like}: should be a name of the table, one of {', '.join(TABLE)}")
        return find(asked.like)
    known = of_kind(device.device_kind)
    if known is None and asked.out is not None:
        raise ConfigError(
            f"--out {asked.out}: {device.device_kind!r} is not in the hardware table (jaxtp/hardware.py); name the row "
            "that memory and the rest are taken from, as in --like h100"
        )
    return known
