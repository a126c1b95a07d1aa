"""Detects silent corruption: a device that computes or stores something wrong without an error.

Every `train.verify_every` steps, checksums of each device's shards are compared, bit by bit:

1. Copies: devices that hold the same shard of the state or the batch, before and after the step.
2. Computations: one program computes the step twice from the same state and batch. Gradients, after
   reduction and before clipping, are compared first, because clipping spreads one wrong gradient to
   all results.

Checksums of every step's gradients show in which step copies first differed. Programs must be
bitwise reproducible (`step.compiler_options`). With dp 1, a gradient that is wrong once, between
two verifications, goes unnoticed. On CPUs a verification takes as long as 1.6 steps.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.checkpoint.checksum import (
    DIAGNOSE,
    MeshPositions,
    describe_devices,
    device_checksums,
    minority_devices,
    replica_groups,
    replica_groups_by_name,
)
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.logical import Variable, named_arrays, replace_arrays
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.collectives import constrain
from jaxtp.config.entry import NumericsError
from jaxtp.data.loader import Batch
from jaxtp.distributed.agreement import host_names
from jaxtp.guards.hook import VERIFIED, FinishedStep, Hook, Loop, NextStep
from jaxtp.layers.parameter import spec_of

Compute = Callable[[nnx.State], tuple[nnx.State, Array]]
"""Computes a step on a batch, as `NextStep.compute`."""

HostShards = dict[str, list[tuple[jax.Device, np.ndarray]]]
"""Copies of this process's shards of each array, in host memory."""

_BEFORE_SUM = (
    "All copies of some shard differ, or it has only one copy, so the fault may precede the "
    "reduction of these gradients: then it is on one of the devices that contribute to them. "
)
_BATCH = "batch."


class CorruptionError(NumericsError):
    """Copies differ, or a repeated step gives different results."""


class Verifier(Hook):
    """Verifies steps, and records checksums of gradients in between.

    All processes must call the methods that may raise, at the same step; all raise the same error.

    Args:
      trained: the trained parameters, in the order of the gradients' checksums.
      every: number of steps from one verification to the next.
      checkpoints: errors say from which of them to resume.
      verified: the last verified step, if any.
    """

    def __init__(
        self,
        mesh: Mesh,
        trained: Mapping[str, Variable],
        every: int,
        checkpoints: Checkpoints,
        verified: int | None,
    ):
        self.verified = verified
        self._every = every
        self._devices = list(mesh.devices.flat)
        self._checkpoints = checkpoints
        self._hosts = host_names()
        self._gradients = {
            name: replica_groups(NamedSharding(mesh, spec_of(variable)), variable.shape)
            for name, variable in trained.items()
        }
        self._history: dict[int, np.ndarray] = {}
        self._compared: list[str] = []
        """Names of the arrays of the state and the batch."""
        self._tables: list[Array] = []
        """Checksums of the state and the batch, before and after the way to the host and back; of
        the gradients; and of the result."""

    def due(self, step: int) -> bool:
        """Returns whether to verify a step."""
        return step % self._every == 0

    def before_step(self, loop: Loop, step: NextStep) -> None:
        """Computes the step once, if it is due; it is computed again as usual."""
        if self.due(step.index):
            loop.finish_step()
            with loop.phase(f"the verification of step {step.index}", "verify"):
                loop.state = self.begin(step.index, loop.state, step.batch, step.compute)

    def after_dispatch(self, loop: Loop) -> None:
        """Waits for a step that is due, because the next one donates its result."""
        if self.due(loop.step):
            loop.finish_step()

    def after_step(self, loop: Loop, step: FinishedStep) -> None:
        """Records the gradients' checksums, and compares the results of a step that is due."""
        assert step.checksums is not None
        self.record(step.index, step.checksums)
        if self.due(step.index):
            with loop.phase(f"the verification of step {step.index}", "verify"):
                self.finish(step.index, loop.state, step.checksums)
            loop.line(
                f"step {step.index}: verified; copies agree on all devices, and so do two "
                "computations of the step"
            )

    def at_save(self, info: dict[str, Any]) -> None:
        """Stores the last verified step."""
        info[VERIFIED] = self.verified

    def begin(self, step: int, state: nnx.State, batch: Batch, compute: Compute) -> nnx.State:
        """Compares copies, computes the step once, and returns the state before it; donates
        `state`.

        Raises:
          CorruptionError: copies differ.
        """
        arrays = named_arrays(state) | {f"{_BATCH}{name}": array for name, array in batch.items()}
        before = checksums(arrays)
        if places := minority_devices(np.asarray(before), replica_groups_by_name(arrays)):
            raise self._unequal_copies(step, places)
        # The step donates the state, so a copy on the host restores it.
        donated = named_arrays(state)
        on_host = to_host(donated)
        first, gradients = compute(state)
        results = named_arrays(first)
        after = jax.block_until_ready(checksums(results))
        # Makes room for the restored state
        for array in results.values():
            array.delete()
        copies = {name: to_devices(on_host[name], donated[name]) for name in donated}
        state = replace_arrays(state, copies)
        returned = checksums(arrays | named_arrays(state))
        self._compared = list(arrays)
        self._tables = [before, returned, gradients, after]
        return state

    def finish(self, step: int, state: nnx.State, gradients: Array) -> None:
        """Compares the step's second result, and its gradient checksums, with the first.

        Raises:
          CorruptionError: results or copies differ.
        """
        results = named_arrays(state)
        tables = map(np.asarray, (*self._tables, gradients, checksums(results)))
        before, back, first_gradients, first_result, second_gradients, second_result = tables
        twice = changed(self._gradients, first_gradients, second_gradients)
        faults = {
            "the state changed on its way to host memory and back": changed(
                self._compared, before, back
            ),
            "the gradients of the step, computed twice from the same state and "
            "batch, differ": twice,
            "copies of the gradients differ, each time in the same way": minority_devices(
                second_gradients, self._gradients
            ),
            "the update, computed twice from equal gradients, differs": changed(
                results, first_result, second_result
            ),
            "copies differ after the update, each time in the same way": minority_devices(
                second_result, replica_groups_by_name(results)
            ),
        }
        for fault, places in faults.items():
            if places:
                note = _BEFORE_SUM if places is twice and self._in_all_copies(twice) else ""
                raise self._error(step, fault, places, note)
        self.verified = step
        self._history.clear()

    def _in_all_copies(self, places: MeshPositions) -> bool:
        # Whether all copies of some shard are wrong
        for name, wrong in places.items():
            if any(wrong.issuperset(group) for group in self._gradients[name]):
                return True
        return False

    def record(self, step: int, gradients: Array) -> None:
        """Keeps a step's gradient checksums until the next verification."""
        self._history[step] = np.asarray(gradients)

    def _unequal_copies(self, step: int, places: MeshPositions) -> CorruptionError:
        # If unequal gradients made the copies of the state differ, the error names their step.
        for earlier, table in self._history.items():
            wrong = minority_devices(table, self._gradients)
            if wrong:
                fault = (
                    f"the gradients of step {earlier} differed between copies, and the state "
                    "since then"
                )
                return self._error(step, fault, wrong)
        note = ""
        if self._history:
            first = next(iter(self._history))
            note = f"The gradients had equal copies in each step since {first}. "
        return self._error(step, "copies differ before the step", places, note)

    def _error(
        self, step: int, fault: str, places: MeshPositions, note: str = ""
    ) -> CorruptionError:
        where = describe_devices(places, self._devices, self._hosts)
        return CorruptionError(
            f"step {step}: silent corruption: {fault}: {where}. {note}{DIAGNOSE}. "
            f"{self._recovery_hint()}"
        )

    def _recovery_hint(self) -> str:
        with contextlib.suppress(CheckpointError, NumericsError):
            self._checkpoints.wait()
        saved = self._checkpoints.steps()
        last = -1 if self.verified is None else self.verified
        if not saved:
            return "There is no checkpoint: the same command starts again"
        good = [step for step in saved if step <= last]
        later = saved[len(good) :]
        unverified = f"the checkpoint{'s' * (len(later) > 1)} at {', '.join(map(str, later))}"
        if not good:
            return (
                f"No verification followed {unverified}: the same command resumes from step "
                f"{saved[-1]}, which may be corrupted too"
            )
        if later:
            return (
                f"The verification at step {last} shows that the checkpoint at step {good[-1]} is "
                f"good; later ones are unverified: move {unverified} out of "
                f"{self._checkpoints.folder}, and the same command resumes from step {good[-1]}"
            )
        return (
            f"The same command resumes from step {good[-1]}, which the verification at step "
            f"{last} shows to be good"
        )


def changed(names: Iterable[str], first: np.ndarray, second: np.ndarray) -> MeshPositions:
    """Returns where two tables of checksums differ."""
    rows = zip(names, first != second, strict=True)
    return {name: set(np.flatnonzero(row).tolist()) for name, row in rows if row.any()}


def checksums(arrays: Mapping[str, Array]) -> Array:
    """Returns the `device_checksums` of arrays, on every device."""
    return _checksums(
        tuple(arrays.values()),
        tuple(array.sharding.spec for array in arrays.values()),  # type: ignore[attr-defined]
    )


@partial(jax.jit, static_argnums=1)
def _checksums(arrays: tuple[Array, ...], specs: tuple[PartitionSpec, ...]) -> Array:
    return constrain(device_checksums(arrays, specs), PartitionSpec())


def to_host(arrays: Mapping[str, Array]) -> HostShards:
    """Copies this process's shards to host memory."""
    for array in arrays.values():
        array.copy_to_host_async()
    return {name: _shards_on_host(array) for name, array in arrays.items()}


def _shards_on_host(array: Array) -> list[tuple[jax.Device, np.ndarray]]:
    return [(shard.device, _copy(shard.data)) for shard in array.addressable_shards]


def _copy(data: Array) -> np.ndarray:
    host = np.asarray(data)
    # On CPUs the array shares the device's memory.
    return host.copy() if data.platform() == "cpu" else host


def to_devices(shards: Sequence[tuple[jax.Device, np.ndarray]], like: Array) -> Array:
    """Puts the shards from `to_host` back on their devices."""
    parts = [jax.device_put(shard, device) for device, shard in shards]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)
