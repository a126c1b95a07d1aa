"""The command line of `python -m jaxtp.check`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp.config import ConfigError
from jaxtp.mesh import AXES
from jaxtp.train.config import TrainConfig

ALL = -1


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
    sizes = dict.fromkeys(AXES, 1)
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or not size.isdecimal() or int(size) < 1:
            raise ConfigError(f"--mesh {text}: {part!r} is not an axis and its size; write it as fsdp=2,tp=4")
        sizes[axis] = int(size)
    dp, fsdp, tp = sizes.values()
    return dp, fsdp, tp
