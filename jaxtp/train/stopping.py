"""Stopping together: a signal to one process stops all of them after the same step.

Each process tells the step whether it was asked to stop, in a number for each of its devices; the step gives all of
them the largest, with its other scalars. So nobody waits for an answer of the others, and all read the same one.

An exchange apart from the step was the other choice; each one would wait for the step in flight, at every step.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.interrupt import Interrupt
from jaxtp.launch.agreement import several
from jaxtp.mesh import AXES

STOP = "stop"
"""Name of the numbers among the arrays of a batch, and of the largest among the scalars of a step."""


def abstract_flags(mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns what a batch has beside its rows: with several processes, a float32 for each device; else nothing."""
    if not several():
        return {}
    return {STOP: jax.ShapeDtypeStruct((mesh.size,), np.float32, sharding=_sharding(mesh))}


def asked(batch: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the scalar that says who was asked to stop, where a batch has such numbers; in the step."""
    return {STOP: jnp.max(batch[STOP])} if STOP in batch else {}


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(AXES))


def _flags(mesh: Mesh, received: bool) -> dict[str, Array]:
    """Returns the numbers of this process: 0, or after a signal its index, from 1."""
    number = float(jax.process_index() + 1) if received else 0.0
    own = np.full(len(mesh.local_devices), number, np.float32)
    return {
        name: jax.make_array_from_process_local_data(each.sharding, own, each.shape)
        for name, each in abstract_flags(mesh).items()
    }


class Stopping:
    """Knows when all processes have to stop.

    Args:
      interrupt: signals to this process.
      mesh: devices of the run.
    """

    def __init__(self, interrupt: Interrupt, mesh: Mesh):
        self._interrupt = interrupt
        self._told = 0
        self._flags = {received: _flags(mesh, received) for received in (False, True)}

    def flags(self) -> dict[str, Array]:
        """Returns what to add to the batch of the next step."""
        return self._flags[self._interrupt.received is not None]

    def read(self, scalars: dict[str, float]) -> None:
        """Takes the answer of all processes out of the scalars of a step."""
        self._told = int(scalars.pop(STOP, 0.0))

    @property
    def reason(self) -> str | None:
        """The signal that stops the run, in words; None as long as it goes on."""
        if not several():
            return self._interrupt.received
        if not self._told:
            return None
        return self._interrupt.received or f"a signal to process {self._told - 1}"
