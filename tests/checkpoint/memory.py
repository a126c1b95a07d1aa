"""Saves or restores a state in a process of its own; prints the growth at the peak of a restore, per byte read."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import jaxtp
from jaxtp.checkpoint import storage
from jaxtp.checkpoint.checksum import Sums
from jaxtp.checkpoint.manager import Checkpoints

ARRAYS, ELEMENTS = 24, 2**22
"""Arrays of 16 MiB, each in four parts."""


def resident(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


def save(folder, mesh, sharding):
    def create(seed):
        return jax.random.normal(jax.random.key(seed), (ELEMENTS,))

    with jax.set_mesh(mesh), Checkpoints(folder) as checkpoints:
        create = jax.jit(create, out_shardings=sharding)
        state = nnx.State({f"x{i}": nnx.Param(create(i), out_sharding=("fsdp",)) for i in range(ARRAYS)})
        checkpoints.save(1, state, mesh, {})


def restore(folder, sharding):
    Sums({"x": jax.device_put(jnp.ones(ELEMENTS), sharding)})  # compiles
    there = storage.read_metadata(folder / "1")
    target = {name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding) for name, each in there.items()}
    before = resident("VmRSS")
    jax.block_until_ready(storage.read_verified(folder / "1", target, storage.read_info(folder / "1")))
    print((resident("VmHWM") - before) / (ARRAYS * ELEMENTS * 4))


def main(action, folder, at_once):
    storage.MAX_BYTES_IN_FLIGHT = int(at_once)
    mesh = jaxtp.make_mesh(fsdp=4)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    if action == "save":
        save(Path(folder), mesh, sharding)
    else:
        restore(Path(folder), sharding)


if __name__ == "__main__":
    main(*sys.argv[1:])
