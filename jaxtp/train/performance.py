"""Performance of devices: utilization, memory in use, late processes, and traces."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jaxtp.analysis.hardware import of_kind
from jaxtp.analysis.layer_costs import Workload
from jaxtp.analysis.step_costs import active_parameters, costs_of
from jaxtp.distributed.agreement import host_names, is_multiprocess, process_name
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import ModelConfig
from jaxtp.train.metrics import Timing
from jaxtp.train.state import Blueprint, MakeModel, parameter_count
from jaxtp.train.step import StepSettings
from jaxtp.train.task import Shapes

LATE = 0.1  # A wait for data is long if it exceeds the median by this fraction of a step
IN_A_ROW = 3  # Number of logged steps in a row after which a late process is reported


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """Returns `6 (N - V D) + 6 L S (heads * head_dim)`, where N is `parameters`.

    All utilizations use this definition: Kaplan et al., arXiv 2001.08361, with attention as in
    Megatron-LM, arXiv 2104.04473, halved for causality.

    For a layer of Gated DeltaNet, 18 (value heads * K V), three products with its states, replace
    the term of attention. Embedding lookups, recomputation and unused experts do not count; a tied
    table counts as the product of the head. Frozen parameters count 4 instead of 6.
    """
    rows = config.learned_positions or 0
    if not config.tie_embeddings:
        rows += config.vocab_size
    lookup = rows * config.d_model
    share = Workload(sizes=mesh_shape(), rows=1, length=max(1, sequence_length), once=True)
    costs = costs_of(config, share)
    attention = sum(product.counted * product.flops for product in costs.attention) / share.length
    used = active_parameters(config, parameters) - lookup
    trained = costs.adapters if config.lora.rank else used
    return 6.0 * trained + 4.0 * (used - trained) + (attention if sequence_length else 0.0)


def peak_flops(device: jax.Device) -> float:
    """Returns the dense bfloat16 peak in FLOP/s; NaN if unknown, as on CPUs."""
    hardware = of_kind(device.device_kind)
    return math.nan if hardware is None else hardware.flops


def row_flops(
    settings: StepSettings, blueprint: Blueprint, make_model: MakeModel, batch: Shapes
) -> float:
    """Returns the FLOPs of a row of a batch: `flops_per_token`, or `row_work` for a user's loss.

    They are NaN if the loss cannot be traced on one device. Call it without a mesh in context.

    Args:
      make_model: makes the model, not split over a mesh.
    """
    if settings.objective.has_formulas:
        length = batch["inputs"].shape[1]
        return length * flops_per_token(blueprint.config, parameter_count(blueprint), length)
    from jaxtp.train.user_step import row_work

    # The loss may need the run's mesh, and a missing metric must not end the run.
    try:
        return row_work(settings, make_model, batch)[0]
    except Exception:
        return math.nan


def utilization(mesh: Mesh, flops_per_second: float) -> dict[str, float]:
    """Returns `mfu`, given the FLOP/s of all devices; empty if the devices' peak is unknown."""
    mfu = flops_per_second / mesh.size / peak_flops(mesh.devices.flat[0])
    return {"mfu": mfu} if math.isfinite(mfu) else {}


def describe_peak(device: jax.Device) -> str | None:
    """Explains why no MFU is logged; None on CPUs, or if it is logged."""
    if device.platform == "cpu" or not math.isnan(peak_flops(device)):
        return None
    return (
        f"of {device.device_kind!r} not known: no mfu is logged (jaxtp/analysis/hardware.toml "
        "lists known devices)"
    )


def memory_record(device: jax.Device) -> dict[str, int]:
    """Returns current and peak bytes in use; empty if not reported, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}


class Stragglers:
    """Compares the memory of a run's devices, and its processes' waits for data.

    Args:
      warn: prints a line on the console.
    """

    def __init__(self, mesh: Mesh, warn: Callable[[str], None]):
        self._devices = list(mesh.local_devices)
        self._warn = warn
        # The late process, its first logged step, and the number of logged steps in a row
        self._suspect = ""
        self._since = 0
        self._count = 0

    def record(self, step: int, record: Mapping[str, float]) -> dict[str, float]:
        """Returns the record with maxima over all processes; reports a process that is late.

        Args:
          record: with `step_seconds` and `data_wait_seconds`.
        """
        used = [memory_record(device) for device in self._devices]
        memory = {}
        for name in used[0]:
            memory[name] = max(by_name[name] for by_name in used)
        if not is_multiprocess():
            return {**record, **memory}
        names = sorted(memory)
        numbers = [record["data_wait_seconds"], *map(memory.__getitem__, names)]
        # [processes, numbers]
        gathered = gather_numbers(np.array(numbers, np.float32))
        self._compare(step, gathered[:, 0].tolist(), record["step_seconds"])
        wait, *max_memory = gathered.max(axis=0).tolist()
        maxima = dict(zip(names, map(int, max_memory), strict=True))
        return {**record, **maxima, "data_wait_seconds": wait}

    def _compare(self, step: int, waits: Sequence[float], step_seconds: float) -> None:
        late = max(waits) - statistics.median_low(waits)
        name = ""
        if late >= LATE * step_seconds:
            process = waits.index(max(waits))
            name = process_name(process, host_names()[process])
        if name != self._suspect:
            if self._count >= IN_A_ROW:
                self._warn(f"step {step}: {self._suspect} no longer holds up the run")
            self._suspect = name
            self._since = step
            self._count = 0
        self._count += bool(name)
        if self._count == IN_A_ROW:
            self._warn(
                f"step {step}: the run waits for {name}, which waits {late:.3g} s longer for data "
                f"in each step of {step_seconds:.3g} s, since step {self._since}"
            )


def gather_numbers(numbers: np.ndarray) -> np.ndarray:
    """Returns the numbers of all processes, `[processes, ...]`."""
    return np.asarray(multihost_utils.process_allgather(numbers)).reshape(-1, *numbers.shape)


class Profiler:
    """Traces `steps` steps from `start`, for XProf and Perfetto.

    If the trace fails, for example on a full disk, the run continues.
    """

    def __init__(self, folder: Path, start: int, steps: int, timing: Timing):
        self._folder = folder
        self._timing = timing
        self._first = start
        self._last = start + steps - 1
        self._tracing = False
        self._failure: str | None = None

    def before(self, step: int) -> None:
        """Starts the trace before its first step."""
        if step == self._first:
            self._tracing = True
            with self._timing.lost_to("profile"):
                self._attempt(
                    lambda: jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
                )

    def after(self, step: int, results: object) -> str | None:
        """Ends the trace after the results of its last step; returns its location or failure."""
        if step != self._last or not self._tracing:
            return None
        with self._timing.lost_to("profile"):
            jax.block_until_ready(results)
            self.close()
        profile = f"profile of steps {self._first} to {self._last}"
        if self._failure is None:
            return f"{profile} in {self._folder}"
        return f"no {profile}: {self._failure}"

    def close(self) -> None:
        """Ends an unfinished trace."""
        if self._tracing and self._failure is None:
            self._attempt(jax.profiler.stop_trace)
        self._tracing = False

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        # The file system, or another trace in this process, may fail.
        except Exception as error:
            self._failure = str(error).partition("\n")[0] or type(error).__name__
