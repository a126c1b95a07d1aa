"""Saves or restores a state in a process of its own; prints the growth at the peak of a restore,
per byte read.
"""

import sys
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from numpy.random import default_rng

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_state import variable

import jaxtp
from jaxtp.checkpoint import storage
from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.manager import Checkpoints

ARRAYS = 24
ELEMENTS = 2**22
"""Arrays of 16 MiB, each in four parts."""


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def save(folder, mesh):
    values = default_rng(0).standard_normal(ELEMENTS, np.float32)
    with Checkpoints(folder) as checkpoints:
        state = nnx.State({f"x{i}": variable(values, mesh, "fsdp") for i in range(ARRAYS)})
        checkpoints.save(1, state, mesh, {})


def restore(folder, mesh):
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    Sums({"x": jax.device_put(np.ones(ELEMENTS, np.float32), sharding)})  # compiles
    there = storage.read_metadata(folder / "1")
    target = {
        name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
        for name, each in there.items()
    }
    before = resident("VmRSS")
    jax.block_until_ready(
        storage.read_verified(folder / "1", target, storage.read_info(folder / "1"))
    )
    print((resident("VmHWM") - before) / (ARRAYS * ELEMENTS * 4))


if __name__ == "__main__":
    storage.MAX_BYTES_IN_FLIGHT = int(sys.argv[3])
    {"save": save, "restore": restore}[sys.argv[1]](Path(sys.argv[2]), jaxtp.make_mesh(fsdp=4))
