"""Injects silent corruption: flips a bit on one device."""

import jax
import numpy as np

from jaxtp.checkpoint.logical import replace_arrays
from jaxtp.train.state import named_arrays
from jaxtp.train.trainer import Trainer


def flipped(array, position, bit=0):
    """Returns the array with one bit flipped on the device at a mesh position; works in several processes."""
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


def flip_in_run(step, name, position, bit=0):
    """Patches `Trainer` to flip a bit of the state once, after `step`; returns the original method."""
    finish, left = Trainer._finish_step, [step]

    def finish_and_flip(self):
        finish(self)
        if self._run.step in left:
            left.remove(self._run.step)
            self._run.state = with_flip(self._run.state, name, position, bit)

    Trainer._finish_step = finish_and_flip
    return finish
