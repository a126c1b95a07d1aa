"""What known bugs are planted with: gradients that are changed on their way, and errors against
a reference.
"""

import jax
import numpy as np
from support import relative_error

from jaxtp.layers import parameter


def with_gradient(change):
    """Returns the identity, which changes the gradient that goes through it."""
    identity = jax.custom_vjp(lambda x: x)
    identity.defvjp(lambda x: (x, None), lambda _, grad: (change(grad),))
    return identity


def cut_evenly(weights, names, count):
    """Returns kernels as `count` devices would have them if all were columns of one matrix that tp
    cuts.
    """
    ends = np.cumsum([weights[name].shape[1] // count for name in names])
    packed = np.split(np.concatenate([weights[name] for name in names], axis=1), count, axis=1)
    of_devices = [np.split(device, ends[:-1], axis=1) for device in packed]
    return {
        name: np.concatenate(parts, axis=1) for name, *parts in zip(names, *of_devices, strict=True)
    }


def gathered_without_sum(axis):
    """Returns a gather of dim 1, whose gradient lacks what the other devices add."""
    gather = jax.custom_vjp(lambda x: jax.lax.all_gather(x, axis, axis=1, tiled=True))

    def forward(x):
        return gather(x), x.shape[1]

    def backward(length, grad):
        return (jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index(axis) * length, length, 1),)

    gather.defvjp(forward, backward)
    return gather


def plant_weights(monkeypatch, change, is_it=lambda shape: True):
    """Applies `change` to the loaded weights whose shape satisfies `is_it`."""
    load = parameter.load_weight

    def loaded(shard, *args, **kwargs):
        weight = load(shard, *args, **kwargs)
        return change(weight) if is_it(shard.shape) else weight

    monkeypatch.setattr(parameter, "load_weight", loaded)


def errors_of(found, expected):
    """Returns how far each part of a result is from what is expected; a NaN is infinitely far."""
    errors = {name: relative_error(found[name], array) for name, array in expected.items()}
    return {name: error if error == error else float("inf") for name, error in errors.items()}
