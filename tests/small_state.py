"""A state of two arrays, for tests of checkpoints that need no model."""

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.parameter import PaddedDim, parameter
from jaxtp.mesh import make_mesh


def variable(array, mesh, *spec):
    """Returns a parameter on a mesh, whose dims are split as in `spec`."""
    placed = jax.device_put(np.asarray(array), NamedSharding(mesh, PartitionSpec(*spec)))
    with jax.set_mesh(mesh):
        return nnx.Param(placed, out_sharding=spec)


def small_state(value=1.0, mesh=None, *spec):
    """Returns a weight that begins with a value, split as in `spec`, and a counter, by default
    on one device.
    """
    mesh = mesh or make_mesh()
    weight = np.arange(24, dtype=np.float32).reshape(4, 6) + np.float32(value)
    state = {
        "model": {"weight": variable(weight, mesh, *spec)},
        "step": variable(np.int32(3), mesh),
    }
    return nnx.State(state)


def weight_of(state):
    return np.asarray(state["model"]["weight"][...])


def save_steps(folder, *steps, **options):
    """Saves small states, each of which begins with its step; returns the open checkpoints."""
    checkpoints = Checkpoints(folder, **options)
    for step in steps:
        checkpoints.save(step, small_state(step), make_mesh(), {"next_sample": step})
    checkpoints.wait()
    return checkpoints


PADDINGS = {"queries": PaddedHeads((3, 3, 4), 4), "hidden": PaddedDim((22,))}


def padded_variable(name, array, row):
    """Returns a parameter on the mesh in context, split and padded as a row of a table says."""
    padding = tuple((dim, PADDINGS[kind]) for dim, kind in row.get("padding", {}).items())
    return parameter(name, array, PartitionSpec(*row["spec"]), padding=padding)
