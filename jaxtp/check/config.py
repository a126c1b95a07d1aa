"""The command line of `python -m jaxtp.check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp.check.shrink import MAX_DEVICES
from jaxtp.config import ConfigError
from jaxtp.mesh import AXES, DP, FSDP, TP
from jaxtp.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TrainConfig):
    """What to check: a training configuration, and on which meshes."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(name="mesh", metavar="tp=8 fsdp=2,tp=4 ...")] = ()
    """Meshes to compare with one device; an axis that is left out is 1. By default the configuration's own, scaled down
    to 16 devices, and others that use each axis alone and together."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write every number, for machines."""


def parse_mesh(text: str) -> tuple[int, int, int]:
    """`fsdp=2,tp=4` as (dp, fsdp, tp).

    Raises:
      ConfigError: it is not of that form.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES:
            raise ConfigError(f"--mesh {text}: {axis!r} is not an axis; they are {', '.join(AXES)}, as in fsdp=2,tp=4")
        if not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"--mesh {text}: {axis}={size} is not a number of devices: 1, 2, ... up to {MAX_DEVICES}")
        if axis in sizes:
            raise ConfigError(f"--mesh {text}: {axis} is there twice; write two meshes as --mesh tp=2 tp=4")
        sizes[axis] = int(size)
    mesh = sizes.get(DP, 1), sizes.get(FSDP, 1), sizes.get(TP, 1)
    if mesh == (1, 1, 1):
        raise ConfigError(f"--mesh {text}: that is the one device which meshes are compared with")
    return mesh
