"""The command line of `jaxtp check`."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxtp.config import UserPath
from jaxtp.train.config import FIRST, TrainConfig

SHOWN_FIRST = ("meshes", "json", *FIRST)


@dataclass(frozen=True, kw_only=True)
class CheckConfig(TrainConfig):
    """Command line of a check: a training configuration, and the meshes to check it on."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(name="mesh", metavar="tp=8 cp=2,tp=4 ...")] = ()
    """Meshes to compare with one device; an axis that is left out is 1. By default the configuration's own, scaled down
    to 16 devices, and others that use each axis alone and together. With cp, attention by each method that is possible;
    mesh.context leaves one."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write every number to, for machines."""
