"""The command line of `jaxtp estimate`."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from pydantic import Field

from jaxtp.config import CountOrZero, Positive, Switch, UserPath, allowed
from jaxtp.hardware import TABLE
from jaxtp.train.config import FIRST, TrainConfig

HARDWARE = (
    f"What it is meant to run on, x how many: {', '.join(TABLE)} (jaxtp/hardware.py has their numbers), or a YAML file "
    "of your own, as in mine.yamlx8."
)


SHOWN_FIRST = ("hardware", "tier", "meshes", "as_configured", "price", "generate", "json", "write", "plot", *FIRST)


@dataclass(frozen=True, kw_only=True)
class EstimateConfig(TrainConfig):
    """Command line of an estimate: a training configuration, and the hardware that it is meant for."""

    hardware: Annotated[str, tyro.conf.arg(metavar="h100x8", help=HARDWARE)] = "h100x8"
    """Hardware that it is meant to run on: `HARDWARE` is its help, which names what there is."""

    tier: Literal[1, 2, 3] = 1
    """Depth of the estimate. 1: arithmetic, in seconds. 2: also compiles the best mesh for virtual CPU devices, and
    compares what it moves. 3: also compiles it for the hardware itself, which need not be there (pip install
    'jaxtp[estimate-gpu]', with cuDNN's attention 'jaxtp[estimate-cudnn]', or 'jaxtp[estimate-tpu]')."""

    meshes: Annotated[tuple[str, ...], tyro.conf.arg(name="mesh", metavar="tp=8 fsdp=2,tp=4 ...")] = ()
    """Meshes to ask about; an axis that is left out is 1. By default every one that the devices make."""

    as_configured: Switch = False
    """Keep remat and accumulation as configured; by default those that are fastest on each mesh are found."""

    memory_fraction: Annotated[float, Field(gt=0, le=1), allowed("above 0, up to 1")] = 0.75
    """Share of a GPU's memory that JAX takes. The default is JAX's own; its variable XLA_PYTHON_CLIENT_MEM_FRACTION is
    not read: give the share here if the run will have another."""

    price: Positive | None = None
    """Price of an hour of one device, in any currency, for the cost of all steps."""

    generate: CountOrZero = 0
    """Texts to generate at a time, each data.sequence_length tokens long: weights, KV cache and speed on each mesh too.
    0 for training alone."""

    json: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE")] = None
    """File to write every number to, for machines."""

    write: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """File to write the best setting to, for jaxtp train --config FILE.yaml: all that was asked for, with the
    best mesh, remat and micro-batches. Not written if nothing fits."""

    plot: Annotated[UserPath | None, tyro.conf.arg(metavar="FILE.png")] = None
    """File to draw memory by kind and time by part over tp in (pip install 'jaxtp[plot]')."""

    timeout: Positive = 300.0
    """Seconds that tier 3 waits for the compiler."""
