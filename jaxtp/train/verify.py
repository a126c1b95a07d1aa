"""Looks for silent corruption: a device that computes or remembers something wrong, and reports no error.

Every `train.verify_every` steps, two things are compared, bit by bit, through a checksum of what each device holds:

1. copies: devices that hold the same part of an array of the state or the batch, over dp, and over tp where something
   is replicated, before and after the step. Those in the minority are named, and of two that differ both.
2. computations: the step is made twice by one program from the same state and batch. Where its gradients differ, after
   their sums and before clipping, the devices that hold them are named; where only its results do, the update is at
   fault on those that hold these. (Clipping divides by the norm of all gradients, so one wrong gradient changes the
   results of every device that shares the norm; that is why gradients are looked at first.)

Gradients have their checksums in every step, which stay on the host until the next verification: when copies of the
state have come to differ, the step at which copies of gradients first did, and the devices, are known.

What cannot be told: where a gradient differs in all its copies, or there is one only, the fault may have come before
its sum over devices, on any of those that add to it. And without copies (dp 1), a gradient that was wrong once, in a
step between two verifications, leaves nothing to compare with.

It rests on programs that give the same bits each time. On CPUs they do, and tests hold it. For GPUs the step is
compiled with `xla_gpu_exclude_nondeterministic_ops`, which leaves out sums by atomics and still times kernels. XLA's
compilers of jax 0.10.2 and 0.12 take it for an H100 that is not there (that of 0.12 once Triton's products are off,
which it cannot choose without the GPU), and sort before the one scatter that a step has. No GPU has run it. There it
rests on two more things that nobody has tried: that cuDNN's attention heeds the option; and that NCCL adds in one order
each time and, for copies, in the same order in each group of devices along an axis. Where it does not, copies differ by
rounding, which is found and is no device's fault.

The state goes to host memory and back, because the step donates it and devices have no room for two; so does the first
result, which is evidence: that is the state twice (`host_bytes`). A verification costs a step, the state's way from
devices to host twice and back once, and reading it four times where it lies: `scripts/results/verify_cost.txt`.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding

from jaxtp.checkpoint.checksum import device_checksums
from jaxtp.checkpoint.damage import CheckpointError
from jaxtp.checkpoint.logical import filled, named_variables
from jaxtp.checkpoint.manager import Checkpoints
from jaxtp.data.loader import Batch
from jaxtp.entry import WrongNumbersError
from jaxtp.launch.agreement import share, who
from jaxtp.launch.hosts import hosts
from jaxtp.layers.parameter import spec_of
from jaxtp.train import folder
from jaxtp.train.config import TrainConfig
from jaxtp.train.faults import Fault, Places, Table, changed, copies_of, copies_of_all, judge, odd_ones
from jaxtp.train.state import Blueprint, bytes_per_device, trained_parameters
from jaxtp.train.step import Scalars

Compute = Callable[[nnx.State], tuple[nnx.State, Scalars, Array]]
"""A step on a batch: it takes a state, and gives what `make_train_step(with_checksums=True)` does."""

Held = dict[str, list[tuple[jax.Device, np.ndarray]]]
"""Parts of arrays that each device of this process holds, by the name of the array, in host memory."""

VERIFIED = "verified"
"""Name, in a checkpoint's info, of the last step that was verified when it was saved."""

_BATCH = "batch."
_MOST_NAMED = 8
"""Most processes whose devices a message names."""
_AT_ONCE = 64
"""Number of steps whose checksums the processes share at once."""
_sums = jax.jit(device_checksums, static_argnums=1)


class CorruptionError(WrongNumbersError):
    """Devices hold different copies, or a step that is made twice gives different results."""


@dataclass(frozen=True)
class _Begun:
    """A step that has been made once."""

    step: int
    before: Held
    """The state before it, and the batch."""
    first: Held
    """Its result."""
    checksums: tuple[Array, ...]
    """Checksums of what was before it, of that as it is put back, of its gradients, and of its result."""


class Verifier:
    """Verifies steps of a run, and remembers the checksums of gradients in between.

    All processes have to call each method that can raise, at the same step; each raises the same error.

    Args:
      config: the run.
      blueprint: the description of its state.
      checkpoints: those of the run, which an error speaks of.
      verified: the last step that was verified, if one was.
    """

    def __init__(self, config: TrainConfig, blueprint: Blueprint, checkpoints: Checkpoints, verified: int | None):
        self.verified = verified
        self._every, self._place = config.train.verify_every, config.run.dir / folder.CORRUPTION
        self._devices, self._checkpoints = list(blueprint.mesh.devices.flat), checkpoints
        self._hosts = hosts()
        self._gradients = {
            name: copies_of(NamedSharding(blueprint.mesh, spec_of(variable)), variable.shape)
            for name, variable in trained_parameters(blueprint).items()
        }
        self._history: dict[int, Mapping[int, list[int]]] = {}
        self._begun: _Begun | None = None

    def due(self, step: int) -> bool:
        """Returns whether a step is to be verified."""
        return step % self._every == 0

    def begin(self, step: int, state: nnx.State, batch: Batch, compute: Compute) -> nnx.State:
        """Compares copies, makes the step for the first time, and returns the state from before it.

        Args:
          step: the step.
          state: the state before it, which is donated.
          batch: its batch.
          compute: makes the step.

        Raises:
          CorruptionError: copies differ.
        """
        arrays = named_arrays(state) | {f"{_BATCH}{name}": array for name, array in batch.items()}
        before = checksums(arrays)
        (table,) = share_columns(columns(before))
        if places := odd_ones(table, copies_of_all(arrays)):
            raise self._error(step, self._traced(places), {"before": to_host(arrays)})
        held = to_host(arrays)
        first, _, gradients = compute(state)
        results = named_arrays(first)
        after, kept = checksums(results), to_host(results)
        for array in results.values():
            array.delete()  # its place is that of the state
        state = filled(state, {name: to_devices(held[name], array) for name, array in named_arrays(state).items()})
        back = checksums(arrays | named_arrays(state))
        self._begun = _Begun(step, held, kept, (before, back, gradients, after))
        return state

    def finish(self, state: nnx.State, gradients: Array) -> None:
        """Compares what the step gave the second time with what it gave the first time.

        Args:
          state: the state after it.
          gradients: the checksums of its gradients.

        Raises:
          CorruptionError: the results or their copies differ.
        """
        begun, self._begun = self._begun, None
        assert begun is not None, "a verification ends that has not begun"
        results = named_arrays(state)
        before, back, *made = share_columns(*map(columns, (*begun.checksums, gradients, checksums(results))))
        first, second = (made[0], made[1]), (made[2], made[3])
        fault: Fault | None
        if places := changed(list(begun.before), before, back):
            fault = Fault("the state came back from host memory otherwise than it went there", places)
        else:
            fault = judge(self._gradients, copies_of_all(results), first, second)
        if fault:
            evidence = {"before": begun.before, "first": begun.first, "second": to_host(results)}
            raise self._error(begun.step, fault, evidence)
        self.verified = begun.step
        self._history.clear()

    def note(self, step: int, gradients: Array) -> None:
        """Remembers the checksums of a step's gradients until the next verification."""
        self._history[step] = columns(gradients)

    def _traced(self, places: Places) -> Fault:
        """Returns the fault of copies that differ, with the gradients from which it came, if it came from gradients."""
        steps = list(self._history)
        for first in range(0, len(steps), _AT_ONCE):
            some = steps[first : first + _AT_ONCE]
            for step, table in zip(some, share_columns(*(self._history[each] for each in some)), strict=True):
                if found := odd_ones(table, self._gradients):
                    what = f"copies of the gradients of step {step} differed, and since then those of the state"
                    return Fault(what, found)
        since = f"The gradients had equal copies in each step since {steps[0]}. " if steps else ""
        return Fault("copies differ before the step", places, since)

    def _error(self, step: int, fault: Fault, evidence: Mapping[str, Held]) -> CorruptionError:
        """Keeps the evidence, and returns the error that ends the run."""
        said = f"step {step}: silent corruption: {fault.what}: {self._described(fault.places)}"
        place = self._place / str(step)
        failed = [each for each in share(_write(place, said, evidence)) if each]
        kept = "Both results, the state before them and the batch" if len(evidence) > 1 else "The state and the batch"
        kept += f" could not be kept: {failed[0]}" if failed else f" are in {place}"
        return CorruptionError(
            f"{said}. {fault.note}{kept}. Leave the host out of the run, and let its vendor's diagnostics look at it "
            f"(NVIDIA: dcgmi diag -r 4). {self._way_back()}"
        )

    def _described(self, places: Places) -> str:
        """Returns which arrays and which devices, by process."""
        name, *others = places
        arrays = f"{name} and {len(others)} more arrays" if others else name
        by_process: dict[int, list[jax.Device]] = {}
        for position in sorted(set().union(*places.values())):
            device = self._devices[position]
            by_process.setdefault(device.process_index, []).append(device)
        told = [self._of_process(*each) for each in by_process.items()]
        more = f", and those of {len(told) - _MOST_NAMED} more processes" if len(told) > _MOST_NAMED else ""
        return f"{arrays} on {'; '.join(told[:_MOST_NAMED])}{more}"

    def _of_process(self, process: int, devices: Sequence[jax.Device]) -> str:
        there = sorted(device.id for device in self._devices if device.process_index == process)
        ids = [str(device.id) for device in devices]
        numbers = [str(there.index(device.id)) for device in devices]
        plural = "s" if len(devices) > 1 else ""
        place = who(process, self._hosts[process])
        return f"device{plural} {', '.join(ids)}, number{plural} {', '.join(numbers)} of {place}"

    def _way_back(self) -> str:
        """Returns which checkpoints were verified, and how the run goes on."""
        with contextlib.suppress(CheckpointError):
            self._checkpoints.wait()
        saved, last = self._checkpoints.steps(), -1 if self.verified is None else self.verified
        if not saved:
            return "There is no checkpoint: the same command begins again"
        good, since = ([each for each in saved if (each <= last) is sound] for sound in (True, False))
        unverified = f"{'that' if len(since) == 1 else 'those'} at {', '.join(map(str, since))}"
        if not good:
            return (
                f"No checkpoint was verified after it was saved, not {unverified}: the same command goes on from step "
                f"{saved[-1]}, which may hold the corruption too"
            )
        if since:
            return (
                f"The checkpoint at step {good[-1]} is good, by the verification at step {last}; {unverified} came "
                f"later: move what came later out of {self._checkpoints.folder}, and the same command goes on from "
                f"step {good[-1]}"
            )
        return f"The same command goes on from step {good[-1]}, whose checkpoint is good by the verification at {last}"


def named_arrays(state: nnx.State) -> dict[str, Array]:
    """Returns the arrays of a state by dotted path."""
    return {name: variable[...] for name, variable in named_variables(state).items()}


def checksums(arrays: Mapping[str, Array]) -> Array:
    """Returns the `device_checksums` of arrays on the mesh in context."""
    specs = tuple(array.sharding.spec for array in arrays.values())  # type: ignore[attr-defined]
    sums: Array = _sums(tuple(arrays.values()), specs)
    return sums


def columns(table: Array) -> dict[int, list[int]]:
    """Waits for checksums and returns those of the devices of this process, by their positions in the mesh."""
    return {shard.index[1].start or 0: np.asarray(shard.data)[:, 0].tolist() for shard in table.addressable_shards}


def share_columns(*tables: Mapping[int, list[int]]) -> list[Table]:
    """Returns tables of all devices, of the columns that each process has."""
    shared: list[dict[int, list[int]]] = [{} for _ in tables]
    for of_process in share([list(table.items()) for table in tables]):
        for whole, part in zip(shared, of_process, strict=True):
            whole.update(part)
    return [np.array([whole[position] for position in sorted(whole)], np.uint32).T for whole in shared]


def to_host(arrays: Mapping[str, Array]) -> Held:
    """Returns copies in host memory of what this process's devices hold."""
    for array in arrays.values():
        array.copy_to_host_async()
    return {
        name: [(shard.device, _copy(shard.data)) for shard in array.addressable_shards]
        for name, array in arrays.items()
    }


def _copy(data: Array) -> np.ndarray:
    there = np.asarray(data)
    return there.copy() if data.platform() == "cpu" else there  # of a CPU device it would be the device's own memory


def to_devices(held: Sequence[tuple[jax.Device, np.ndarray]], like: Array) -> Array:
    """Returns an array of what `to_host` gave, each part on the device that it is from."""
    parts = [jax.device_put(part, device) for device, part in held]
    return jax.make_array_from_single_device_arrays(like.shape, like.sharding, parts)


def _write(place: Path, said: str, evidence: Mapping[str, Held]) -> str | None:
    """Writes what each device of this process held, a file for each; returns why it could not, or None.

    NumPy has no name for bfloat16: such arrays are read as two bytes each.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (place / "fault.txt").write_text(f"{said}\n")
        for what, held in evidence.items():
            for device in jax.local_devices():
                arrays = {name: part for name, parts in held.items() for at, part in parts if at == device}
                np.savez(place / f"{what}_device_{device.id}.npz", **arrays)  # type: ignore[arg-type]
    except OSError as error:
        return f"{place}: {error.strerror}"
    return None


def host_bytes(blueprint: Blueprint) -> int:
    """Returns the bytes of host memory that a verification takes in each process: its part of the state, twice."""
    return 2 * bytes_per_device(blueprint) * len(blueprint.mesh.local_devices)


def describe_verification(config: TrainConfig, blueprint: Blueprint) -> str | None:
    """Returns a line on what verification costs; None where there is none."""
    if not config.train.verify_every:
        return None
    return (
        f"every {config.train.verify_every:,} steps: a step more, and {host_bytes(blueprint) / 2**30:,.2f} GiB of host "
        "memory in each process, for the state before it and its first result"
    )


def compiler_options(config: TrainConfig, platform: str) -> dict[str, bool | str]:
    """Returns the options by which a step is compiled so that it gives the same bits each time, where it has to."""
    gpu = platform in ("cuda", "rocm")
    return {"xla_gpu_exclude_nondeterministic_ops": True} if gpu and config.train.verify_every else {}
