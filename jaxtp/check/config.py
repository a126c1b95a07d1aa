"""The command line of `python -m jaxtp.check`."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jaxtp.config import ConfigError
from jaxtp.mesh import parse_mesh
from jaxtp.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TrainConfig):
    """What to check: a training configuration, and on which meshes."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(name="mesh", metavar="tp=8 fsdp=2,tp=4 ...")] = ()
    """Meshes to compare with one device; an axis that is left out is 1. By default the configuration's own, scaled down
    to 16 devices, and others that use each axis alone and together."""

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Where to write every number, for machines."""


def chosen_mesh(text: str) -> dict[str, int]:
    """Returns `fsdp=2,tp=4` as the size of each axis.

    Raises:
      MeshError: it is not of that form.
      ConfigError: it is a single device.
    """
    sizes = parse_mesh(text)
    if math.prod(sizes.values()) == 1:
        raise ConfigError(f"--mesh {text}: that is the one device which meshes are compared with")
    return sizes
