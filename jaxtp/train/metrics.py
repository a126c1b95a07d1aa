"""Numbers that a logged step has beside its loss: shares of the time, model FLOPs utilization, and memory."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import numpy as np

from jaxtp.hardware import of_kind
from jaxtp.layers.costs import Share
from jaxtp.mesh import sized
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import active_parameters, costs_of


class Timing:
    """Measures the time of each step, what each waits for, and what is lost between them; all in seconds.

    A step lasts from the end of the one before it to its own, as the host sees them, without what is `lost_to`
    something else in between.
    """

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._useful = 0.0
        self._lost: Counter[str] = Counter()
        self._steps: list[float] = []
        self._waited = 0.0

    @contextmanager
    def lost_to(self, cause: str) -> Iterator[None]:
        """Counts the time of what runs inside as lost to a cause."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter()
            self._lost[cause] += self._last - started  # type: ignore[assignment]

    def begun(self) -> None:
        """Counts all time until now as lost to the start."""
        self._last = time.perf_counter()
        self._lost["start"] = self._last - self._started  # type: ignore[assignment]

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Measures a wait that is part of a step."""
        started = time.perf_counter()
        yield
        self._waited += time.perf_counter() - started

    def tick(self) -> None:
        """Counts a step that has just finished."""
        now = time.perf_counter()
        self._steps.append(now - self._last)
        self._useful += now - self._last
        self._last = now

    @property
    def step_seconds(self) -> float:
        """Mean time of the steps since the last `record`; there must be one."""
        return sum(self._steps) / len(self._steps)

    def record(self) -> dict[str, float]:
        """Returns statistics of the steps since the last record, and shares of the time since the run began to start.

        The steps give their mean, median, 90th percentile and maximum, and the mean wait for data; the shares are that
        spent in steps (`goodput`) and that lost to each cause.
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


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """Returns `6 (N - V D) + 6 L S (heads * head_dim)`: the one definition that every utilization is computed by.

    Attention is causal; the embedding's lookup, recomputation, and experts that a token did not choose do not count.
    Parameters that adapters leave frozen count 4 instead of 6, because they have no gradient. A tied table counts as
    the head's product. Kaplan et al., arXiv 2001.08361; attention as in Megatron-LM, arXiv 2104.04473, halved for
    causality.

    Args:
      config: the model.
      parameters: N, without padding.
      sequence_length: S.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    lookup += (config.learned_positions or 0) * config.d_model
    share = Share(sizes=sized(), rows=1, length=max(1, sequence_length), training=False)
    costs = costs_of(config, share)
    forward = sum(product.counted * product.flops for product in costs.attention) / share.length
    used = active_parameters(config, parameters) - lookup
    trained = costs.adapters if config.lora.rank else used
    return 6.0 * trained + 4.0 * (used - trained) + (3.0 * forward if sequence_length else 0.0)


def peak_flops(device: jax.Device) -> float:
    """Returns the device's dense bfloat16 peak; NaN where it is not known, as on CPUs."""
    hardware = of_kind(device.device_kind)
    return math.nan if hardware is None else hardware.flops


def describe_peak(device: jax.Device) -> str | None:
    """Says why the steps of a run have no MFU; None where they have one, and on CPUs."""
    if device.platform == "cpu" or of_kind(device.device_kind) is not None:
        return None
    return f"of {device.device_kind!r} not known: no mfu is logged (jaxtp/hardware.py has those that are)"


def memory_record(device: jax.Device) -> dict[str, int]:
    """Returns the bytes in use on a device, now and at most so far; nothing where it does not say, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}
