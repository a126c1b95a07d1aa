"""Names the device or process that slows down the others, at each logged step.

A step takes the slowest device's time everywhere, so each device times the same products by itself.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxtp.distributed.agreement import host_names, is_multiprocess, process_name
from jaxtp.train.metrics import memory_record

SLOW = 1.25
"""A device is slow from this multiple of the median on."""
LATE = 0.1
"""A wait for data is long if it exceeds the median by this fraction of a step."""
IN_A_ROW = 3
"""Logged steps in a row before a slow device is reported."""
_PRODUCTS, _REPEATS = 8, 3
_SIZE, _SIZE_ON_CPU = 2048, 256


class Stragglers:
    """Compares the devices and processes of a run.

    Args:
      warn: takes a line for the console.
      seconds: times the products on local devices; by default not for virtual devices, which share a CPU's cores.
    """

    def __init__(self, mesh: Mesh, warn: Callable[[str], None], seconds: Callable[[], list[float]] | None = None):
        self._devices = list(mesh.local_devices)
        self._warn = warn
        self._seconds = seconds
        share_a_cpu = self._devices[0].platform == "cpu" and len(set(host_names())) == 1
        if seconds is None and mesh.size > 1 and not share_a_cpu:
            self._seconds = _products(self._devices)
        self._suspect, self._since, self._count = "", 0, 0
        """Name, first logged step, and number of logged steps in a row."""

    def record(self, step: int, record: dict[str, float], in_flight: object) -> dict[str, float]:
        """Returns the record with maxima over all processes; reports who is slow.

        Args:
          record: with `step_seconds` and `data_wait_seconds`.
          in_flight: arrays to wait for: a step in flight would slow down the products.
        """
        memory = [memory_record(device) for device in self._devices]
        names = sorted(memory[0])
        if not is_multiprocess() and self._seconds is None:
            return record | {name: max(used[name] for used in memory) for name in names}
        times = [1.0] * len(self._devices)
        if self._seconds is not None:
            jax.block_until_ready(in_flight)
            times = self._seconds()
        wait = record["data_wait_seconds"]
        rows = [(seconds, wait, *map(used.get, names)) for seconds, used in zip(times, memory, strict=True)]
        everyone = _gather(np.array(rows, np.float32))  # [processes, local devices, numbers]
        factor = self._compare(step, everyone[..., 0], everyone[:, 0, 1].tolist(), record["step_seconds"])
        _, longest_wait, *largest = everyone.max(axis=(0, 1)).tolist()
        compared = {"slowest_device": factor} if self._seconds is not None else {}
        return (
            record | dict(zip(names, map(int, largest), strict=True)) | compared | {"data_wait_seconds": longest_wait}
        )

    def _compare(self, step: int, seconds: np.ndarray, waits: Sequence[float], step_seconds: float) -> float:
        # Returns how many times the median the slowest device takes.
        factor = float(seconds.max() / np.percentile(seconds, 50, method="lower"))
        late = max(waits) - statistics.median_low(waits)
        name = how = ""
        if factor >= SLOW:
            process, local = divmod(int(seconds.argmax()), seconds.shape[1])
            name = f"device {local} of {_name_of(process)}"
            how = f"takes {factor:.2f} times the median for the same products"
        elif late >= LATE * step_seconds:
            name = _name_of(waits.index(max(waits)))
            how = f"waits {late:.3g} s longer for data in each step of {step_seconds:.3g} s"
        if name != self._suspect:
            if self._count >= IN_A_ROW:
                self._warn(f"step {step}: {self._suspect} no longer holds up the others")
            self._suspect, self._since, self._count = name, step, 0
        self._count += bool(name)
        if self._count == IN_A_ROW:
            self._warn(f"step {step}: the others wait for one: {name} {how}, since step {self._since}")
        return factor


def _name_of(process: int) -> str:
    return process_name(process, host_names()[process])


def _gather(numbers: np.ndarray) -> np.ndarray:
    # [processes, ...]
    return np.asarray(multihost_utils.process_allgather(numbers)).reshape(-1, *numbers.shape)


def _products(devices: Sequence[jax.Device]) -> Callable[[], list[float]]:
    # Returns a function that times the same products on each device in turn: the best of a few runs.
    size = _SIZE_ON_CPU if devices[0].platform == "cpu" else _SIZE

    @jax.jit
    def multiply(matrix: jax.Array) -> jax.Array:
        for _ in range(_PRODUCTS):
            matrix = matrix @ matrix
        return matrix

    filled = np.full((size, size), 1 / size, jnp.bfloat16)
    alone = [Mesh([device], "x") for device in devices]  # replaces the run's mesh
    matrices = [jax.device_put(filled, device) for device in devices]

    def seconds(mesh: Mesh, matrix: jax.Array) -> float:
        times = []
        with jax.set_mesh(mesh):
            multiply(matrix).block_until_ready()  # compiles at first
            for _ in range(_REPEATS):
                started = time.perf_counter()
                multiply(matrix).block_until_ready()
                times.append(time.perf_counter() - started)
        return min(times)

    return lambda: [seconds(mesh, matrix) for mesh, matrix in zip(alone, matrices, strict=True)]
