"""Injects silent corruption: flips a bit on one device."""

import jax
import numpy as np

from jaxtp.checkpoint.logical import named_arrays, replace_arrays


def flipped(array, position, bit=0):
    """Returns the array with one bit flipped on the device at a mesh position; works in several
    processes.
    """
    wrong = array.sharding.mesh.devices.flat[position]
    parts = []
    for shard in array.addressable_shards:
        part = np.array(shard.data)
        if shard.device == wrong:
            byte = bit // 8 % part.nbytes
            part.reshape(-1).view(np.uint8)[byte] ^= 1 << bit % 8
        parts.append(jax.device_put(part, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def with_flip(state, name, position, bit=0):
    arrays = named_arrays(state)
    return replace_arrays(state, arrays | {name: flipped(arrays[name], position, bit)})
