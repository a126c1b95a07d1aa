"""Finds the device or the process that holds up the others, at each logged step.

A step lasts as long for all as for the slowest, so its own time names nobody. Each device computes the same products by
itself instead, and each process says how long it waits for data.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxtp.launch.agreement import several, who
from jaxtp.launch.hosts import hosts
from jaxtp.train.metrics import memory_record

SLOW = 1.25
"""Times the median from which a device counts as slow."""
LATE = 0.1
"""Share of a step from which a wait for data counts as long, if it is that much longer than the median."""
IN_A_ROW = 3
"""Logged steps in a row in which the same one has to be slow, before a line says so."""
_PRODUCTS = 8
_REPEATS = 3
_SIZES = {"cpu": 256}
_SIZE = 2048


class Stragglers:
    """Compares the devices and processes of a run.

    Args:
      mesh: the devices.
      say: takes a line for the console.
      seconds: returns the time of the products on each device of this process; by default they are measured, but not
        on virtual devices of one CPU, which share its cores.
    """

    def __init__(self, mesh: Mesh, say: Callable[[str], None], seconds: Callable[[], list[float]] | None = None):
        self._devices = list(mesh.local_devices)
        self._several = several()
        self._say = say
        self._seconds = seconds
        share_a_cpu = self._devices[0].platform == "cpu" and len(set(hosts())) == 1
        if seconds is None and mesh.size > 1 and not share_a_cpu:
            self._seconds = _products(self._devices)
        self._suspect: tuple[str, int, int] | None = None
        """Who was slow at the last logged steps, since which, and at how many."""

    def record(self, step: int, record: dict[str, Any], in_flight: Any) -> dict[str, Any]:
        """Returns the record of a step with what needs all processes; says who is slow, since when and by how much.

        Args:
          step: number of the step.
          record: what this process would log, with `step_seconds` and `data_wait_seconds`.
          in_flight: arrays of the step in flight, which would take its time from the products: they wait for it.
        """
        memory = [memory_record(device) for device in self._devices]
        if not self._several and self._seconds is None:
            return record | _largest(memory)
        times = [1.0] * len(self._devices)
        if self._seconds is not None:
            jax.block_until_ready(in_flight)
            times = self._seconds()
        wait, names = record["data_wait_seconds"], sorted(memory[0])
        rows = [(seconds, wait, *map(own.get, names)) for seconds, own in zip(times, memory, strict=True)]
        everyone = _gather(np.array(rows, np.float32))  # [processes, local devices, numbers]
        waits = everyone[:, 0, 1].tolist()
        slow, factor = self._slowest(everyone[..., 0], waits, record["step_seconds"])
        self._watch(step, slow)
        largest = everyone.max(axis=(0, 1)).tolist()
        sizes = {name: int(value) for name, value in zip(names, largest[2:], strict=True)}
        compared = {"slowest_device": factor} if self._seconds is not None else {}
        return record | sizes | compared | {"data_wait_seconds": largest[1]}

    def _slowest(self, seconds: Any, waits: Sequence[float], step_seconds: float) -> tuple[str | None, float]:
        """Returns who holds up the others, in words, if anybody does, and how slow the slowest device is."""
        factor = float(seconds.max() / np.percentile(seconds, 50, method="lower"))
        process, local = divmod(int(seconds.argmax()), seconds.shape[1])
        if factor >= SLOW:
            who_is_slow = f"device {local} of {_who(process)}"
            return f"{who_is_slow} takes {factor:.2f} times the median for the same products", factor
        late = max(waits) - statistics.median_low(waits)
        if late >= LATE * step_seconds:
            process = waits.index(max(waits))
            return f"{_who(process)} waits {late:.3g} s longer for data in each step of {step_seconds:.3g} s", factor
        return None, factor

    def _watch(self, step: int, slow: str | None) -> None:
        """Says who is slow, once it has been for some time, and when it no longer is."""
        name = None if slow is None else slow.partition(")")[0] + ")"
        said = self._suspect is not None and self._suspect[2] >= IN_A_ROW
        if self._suspect is not None and self._suspect[0] != name:
            if said:
                self._say(f"step {step}: {self._suspect[0]} no longer holds up the others")
            self._suspect = None
        if name is None or slow is None:
            return
        _, since, count = self._suspect or (name, step, 0)
        self._suspect = name, since, count + 1
        if count + 1 == IN_A_ROW:
            self._say(f"step {step}: the others wait for one: {slow}, since step {since}")


def _who(process: int) -> str:
    return who(process, hosts()[process])


def _largest(memory: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: max(own[name] for own in memory) for name in memory[0]}


def _gather(numbers: Any) -> Any:
    """Returns the numbers of all processes, `[processes, ...]`."""
    return np.asarray(multihost_utils.process_allgather(numbers)).reshape(-1, *numbers.shape)


def _products(devices: Sequence[jax.Device]) -> Callable[[], list[float]]:
    """Returns a function that times the same products on each device, one after the other; the best of some times."""
    size = _SIZES.get(devices[0].platform, _SIZE)

    @jax.jit
    def multiply(matrix: jax.Array) -> jax.Array:
        for _ in range(_PRODUCTS):
            matrix = matrix @ matrix
        return matrix

    filled = np.full((size, size), 1 / size, jnp.bfloat16)
    alone = [Mesh([device], "x") for device in devices]  # in place of the mesh of the run
    matrices = [jax.device_put(filled, device) for device in devices]

    def seconds(mesh: Mesh, matrix: jax.Array) -> float:
        times = []
        with jax.set_mesh(mesh):
            multiply(matrix).block_until_ready()  # the first time it is compiled
            for _ in range(_REPEATS):
                started = time.perf_counter()
                multiply(matrix).block_until_ready()
                times.append(time.perf_counter() - started)
        return min(times)

    return lambda: [seconds(mesh, matrix) for mesh, matrix in zip(alone, matrices, strict=True)]
