"""Measurements: times, mean loss, model FLOPs utilization, memory, profiler traces."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from jaxtp.mesh import mesh_shape
from jaxtp.models.config import ModelConfig

MEAN_LOSS = "mean_loss"
"""Key of `MeanLoss.sums` in a checkpoint's info."""


class Timing:
    """Measures step times, waits for data, and time lost between steps, in seconds.

    A step lasts from the previous step's end to its own, as seen by the host, without time `lost_to` a cause.
    """

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._useful = 0.0
        self._lost: Counter[str] = Counter()
        self._steps: list[float] = []
        self._waited = 0.0

    @contextmanager
    def lost_to(self, cause: str) -> Iterator[None]:
        """Counts the time inside as lost to `cause`."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter()
            self._lost[cause] += self._last - started  # type: ignore[assignment]

    def end_start(self) -> None:
        """Counts all time so far as lost to the start."""
        self._last = time.perf_counter()
        self._lost["start"] = self._last - self._started  # type: ignore[assignment]

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measures a wait inside a step."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def tick(self) -> None:
        """Counts a step that ends now."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._useful += now - self._last
        self._last = now

    @property
    def step_seconds(self) -> float:
        """Mean step time since the last `record`; needs a step."""
        return sum(self._steps) / len(self._steps)

    def record(self) -> dict[str, float]:
        """Returns statistics since the last record.

        Times are in seconds; `goodput` and `lost_to_CAUSE` are fractions of the time since the start.
        """
        steps, waited = np.array(self._steps), self._waited
        self._steps, self._waited = [], 0.0
        wall = time.perf_counter() - self._started
        return {
            "step_seconds": float(steps.mean()),
            "step_seconds_p50": float(np.percentile(steps, 50)),
            "step_seconds_p90": float(np.percentile(steps, 90)),
            "step_seconds_max": float(steps.max()),
            "data_wait_seconds": waited / len(steps),
            "goodput": self._useful / wall,
            **{f"lost_to_{cause}": seconds / wall for cause, seconds in self._lost.items()},
        }


class MeanLoss:
    """Mean loss per token since the last record; `sums` continues a checkpoint's."""

    def __init__(self, sums: Sequence[float] = ()):
        self.sums = list(sums) or [0.0, 0.0]
        """Summed loss, and number of tokens."""

    def add(self, loss: float, tokens: float) -> None:
        """Adds a step's mean loss over its tokens."""
        self.sums = [self.sums[0] + loss * tokens, self.sums[1] + tokens]

    def record(self, loss: float) -> float:
        """Returns the mean, or `loss` if no step was added, and restarts."""
        (total, tokens), self.sums = self.sums, [0.0, 0.0]
        return total / tokens if tokens else loss


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """Returns `6 (N - V D) + 6 L S (heads * head_dim)`, the definition for every utilization, with N `parameters`.

    Embedding lookups, recomputation and unused experts do not count; a tied table counts as the head's product. Frozen
    parameters count 4 instead of 6. Kaplan et al., arXiv 2001.08361; attention as in Megatron-LM, arXiv 2104.04473,
    halved for causality.
    """
    from jaxtp.analysis.layer_costs import Workload
    from jaxtp.analysis.step_costs import active_parameters, costs_of

    lookup = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    lookup += (config.learned_positions or 0) * config.d_model
    share = Workload(sizes=mesh_shape(), rows=1, length=max(1, sequence_length), training=False)
    costs = costs_of(config, share)
    forward = sum(product.counted * product.flops for product in costs.attention) / share.length
    used = active_parameters(config, parameters) - lookup
    trained = costs.adapters if config.lora.rank else used
    return 6.0 * trained + 4.0 * (used - trained) + (3.0 * forward if sequence_length else 0.0)


def peak_flops(device: jax.Device) -> float:
    """Returns the dense bfloat16 peak in FLOP/s; NaN if unknown, as on CPUs."""
    if device.platform == "cpu":
        return math.nan
    from jaxtp.analysis.hardware import of_kind

    hardware = of_kind(device.device_kind)
    return math.nan if hardware is None else hardware.flops


def describe_peak(device: jax.Device) -> str | None:
    """Explains why no MFU is logged; None on CPUs, or if it is logged."""
    if device.platform == "cpu" or not math.isnan(peak_flops(device)):
        return None
    return f"of {device.device_kind!r} not known: no mfu is logged (jaxtp/analysis/hardware.py has those that are)"


def memory_record(device: jax.Device) -> dict[str, int]:
    """Returns current and peak bytes in use; empty if not reported, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}


class Profiler:
    """Traces `steps` steps from `start`, for XProf and Perfetto; 0 disables it.

    A failure, such as a full disk, does not stop the run.
    """

    def __init__(self, folder: Path, start: int, steps: int):
        self._folder = folder
        self.first, self.last = start, start + steps - 1
        self.tracing = False
        self._failure: str | None = None

    def start(self) -> None:
        """Starts the trace; call before step `first`."""
        self.tracing = True
        self._attempt(lambda: jax.profiler.start_trace(self._folder, create_perfetto_trace=True))

    def stop(self, results: object) -> str:
        """Ends the trace after the results of step `last`; returns its location or failure."""
        jax.block_until_ready(results)
        self.close()
        steps = f"profile of steps {self.first} to {self.last}"
        return f"{steps} in {self._folder}" if self._failure is None else f"no {steps}: {self._failure}"

    def close(self) -> None:
        """Ends an unfinished trace."""
        if self.tracing:
            self.tracing = False
            if self._failure is None:
                self._attempt(jax.profiler.stop_trace)

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # from the file system, or another trace in this process
            self._failure = str(error).partition("\n")[0] or type(error).__name__
