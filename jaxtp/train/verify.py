"""Detects silent corruption: a device that computes or stores something wrong without an error.

Every `train.verify_every` steps, checksums of each device's shards are compared, bit by bit:

1. Copies: devices that hold the same shard of the state or the batch, before and after the step.
2. Computations: one program computes the step twice from the same state and batch. Gradients, after
   reduction and before clipping, are compared first, because clipping spreads one wrong gradient to
   all results.

Checksums of every step's gradients show in which step copies first differed. Programs must be
bitwise reproducible (`step.compiler_options`). With dp 1, a gradient that is wrong once, between
two verifications, goes unnoticed. Cost: `scripts/results/verify_cost.txt`.

The errors for non-finite losses, gradients and updates are here too.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.checkpoint.checksum import (
    DIAGNOSE,
    MeshPositions,
    NonFiniteError,
    Sums,
    describe_devices,
    describe_not_finite,
    device_checksums,
    minority_devices,
    replica_groups,
    replica_groups_by_name,
)
from jaxtp.checkpoint.io_errors import CheckpointError
from jaxtp.checkpoint.logical import replace_arrays
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.collectives import constrain
from jaxtp.config.entry import NumericsError, UserError
from jaxtp.data.loader import Batch
from jaxtp.distributed.agreement import host_names
from jaxtp.layers.parameter import spec_of
from jaxtp.train.config import TrainConfig
from jaxtp.train.run_folder import NON_FINITE, replacing
from jaxtp.train.setup import Run
from jaxtp.train.state import Blueprint, named_arrays, trained_parameters
from jaxtp.train.step import StepOutput

Compute = Callable[[nnx.State], tuple[nnx.State, StepOutput]]
"""A step on a batch, as from `make_train_step(with_checksums=True)`."""

HostShards = dict[str, list[tuple[jax.Device, np.ndarray]]]
"""Copies of this process's shards of each array, in host memory."""

_BEFORE_SUM = (
    "All copies of some shard differ, or it has only one copy, so the fault may precede the "
    "reduction of these gradients: then it is on one of the devices that contribute to them. "
)
_BATCH = "batch."


class CorruptionError(NumericsError):
    """Copies differ, or a repeated step gives different results."""


class Verifier:
    """Verifies steps, and records checksums of gradients in between.

    All processes must call the methods that may raise, at the same step; all raise the same error.

    Args:
      checkpoints: errors say from which of them to resume.
      verified: the last verified step, if any.
    """

    def __init__(
        self,
        config: TrainConfig,
        blueprint: Blueprint,
        checkpoints: Checkpoints,
        verified: int | None,
    ):
        self.verified = verified
        self._every = config.train.verify_every
        self._devices = list(blueprint.mesh.devices.flat)
        self._checkpoints = checkpoints
        self._hosts = host_names()
        self._gradients = {
            name: replica_groups(NamedSharding(blueprint.mesh, spec_of(variable)), variable.shape)
            for name, variable in trained_parameters(blueprint).items()
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
        first, output = compute(state)
        assert output.checksums is not None
        results = named_arrays(first)
        after = jax.block_until_ready(checksums(results))
        # Makes room for the restored state
        for array in results.values():
            array.delete()
        copies = {name: to_devices(on_host[name], donated[name]) for name in donated}
        state = replace_arrays(state, copies)
        returned = checksums(arrays | named_arrays(state))
        self._compared = list(arrays)
        self._tables = [before, returned, output.checksums, after]
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


def nonfinite_gradient(
    run: Run, description: str, step: int, batch: Batch, info: dict[str, object]
) -> NonFiniteError:
    """Saves the unchanged state and the batch, and returns the error.

    Replaces the files of an earlier failure. The message begins with `description`.
    """
    remedy = "leave such steps out with --train.non-finite skip"
    if run.config.train.non_finite == "skip":
        remedy = (
            f"allow more than --train.max-skipped {run.config.train.skips_allowed} such steps in a "
            "row"
        )
    folder = run.config.run.dir / NON_FINITE
    try:
        _save_state_and_batch(run, step, batch, info)
        saved = f"are in {folder / str(step)}, from which a new run can start (--run.init-from)"
    except (UserError, OSError) as error:
        saved = f"could not be saved for inspection ({error})"
    return NonFiniteError(
        f"{description}: not finite. The update was not applied; the weights and the batch "
        f"{saved}. {_resume_hint(run.checkpoints)}. Look for the cause (a learning rate too high, "
        f"a bad sample), or {remedy}"
    )


def nonfinite_update(run: Run, step: int, values: dict[str, float]) -> NonFiniteError:
    """Returns the error for a non-finite update, whose weights are not saved."""
    loss, gradient, weights = (values[name] for name in ("loss", "grad_norm", "param_norm"))
    rate = f", which was {values['learning_rate']:g}" if "learning_rate" in values else ""
    counts = Sums(named_arrays(run.state)).not_finite()
    where = f": {describe_not_finite(counts)}" if counts else ""
    return NonFiniteError(
        f"step {step}: loss {loss:g}, gradient norm {gradient:g}, norm of the new weights "
        f"{weights:g}: the update is not finite{where}. These weights are not saved. "
        f"{_resume_hint(run.checkpoints)}. Lower the learning rate{rate}"
    )


def _save_state_and_batch(run: Run, step: int, batch: Batch, info: dict[str, object]) -> None:
    rows = {}
    for name, array in batch.items():
        for shard in array.addressable_shards:
            rows[f"{name}_{shard.index[0].start or 0}"] = np.asarray(shard.data)
    with replacing(run.config.run.dir / NON_FINITE) as new:
        checkpoints = Checkpoints(new)
        checkpoints.save(step, run.blueprint.stored(run.state), run.blueprint.mesh, info)
        checkpoints.close()
        np.savez(new / str(step) / f"batch_{jax.process_index()}.npz", **rows)  # type: ignore[arg-type]


def _resume_hint(checkpoints: Checkpoints) -> str:
    checkpoints.describe_newest()  # waits for a save in progress
    saved = checkpoints.steps()
    if not saved:
        return "The same command starts again: there is no checkpoint yet"
    return f"The same command resumes from the checkpoint at step {saved[-1]}"
