"""Memory of a run's devices, and processes that the others wait for."""

import statistics
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxtp.distributed.agreement import host_names, is_multiprocess, process_name
from jaxtp.guards.hook import Hook, Loop

LATE = 0.1  # A wait for data is long if it exceeds the median by this fraction of a step
IN_A_ROW = 3  # Number of logged steps in a row after which a late process is reported


def memory_record(device: jax.Device) -> dict[str, int]:
    """Returns current and peak bytes in use; empty if not reported, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}


class Stragglers(Hook):
    """Compares the memory of a run's devices, and its processes' waits for data."""

    def __init__(self, mesh: Mesh):
        self._devices = list(mesh.local_devices)
        # The late process, its first logged step, and the number of logged steps in a row
        self._suspect = ""
        self._since = 0
        self._count = 0

    def at_log(self, loop: Loop, record: dict[str, float]) -> None:
        """Adds maxima over all processes to the record, and reports a process that is late.

        Args:
          record: with `step`, `step_seconds` and `data_wait_seconds`.
        """
        used = [memory_record(device) for device in self._devices]
        memory = {}
        for name in used[0]:
            memory[name] = max(by_name[name] for by_name in used)
        if not is_multiprocess():
            record.update(memory)
            return
        names = sorted(memory)
        numbers = [record["data_wait_seconds"], *map(memory.__getitem__, names)]
        # [processes, numbers]
        gathered = gather_numbers(np.array(numbers, np.float32))
        step = int(record["step"])
        self._compare(loop, step, gathered[:, 0].tolist(), record["step_seconds"])
        wait, *max_memory = gathered.max(axis=0).tolist()
        record.update(zip(names, map(int, max_memory), strict=True))
        record["data_wait_seconds"] = wait

    def _compare(self, loop: Loop, step: int, waits: Sequence[float], step_seconds: float) -> None:
        late = max(waits) - statistics.median_low(waits)
        name = ""
        if late >= LATE * step_seconds:
            process = waits.index(max(waits))
            name = process_name(process, host_names()[process])
        if name != self._suspect:
            if self._count >= IN_A_ROW:
                loop.line(f"step {step}: {self._suspect} no longer holds up the run")
            self._suspect = name
            self._since = step
            self._count = 0
        self._count += bool(name)
        if self._count == IN_A_ROW:
            loop.line(
                f"step {step}: the run waits for {name}, which waits {late:.3g} s longer for data "
                f"in each step of {step_seconds:.3g} s, since step {self._since}"
            )


def gather_numbers(numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of all processes, `[processes, ...]`."""
    return np.asarray(multihost_utils.process_allgather(numbers)).reshape(-1, *numbers.shape)
