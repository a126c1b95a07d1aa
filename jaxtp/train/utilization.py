"""Model FLOPs utilization, counted one way everywhere, and the memory of a device."""

import math

import jax

from jaxtp.hardware import of_kind
from jaxtp.layers.costs import Share
from jaxtp.mesh import sized
from jaxtp.models.config import ModelConfig
from jaxtp.models.costs import costs_of


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """Returns `6 (N - V D) + 6 L S (heads * head_dim)`: causal attention, no lookup of a table, no recomputation.

    Where there are adapters, what they leave frozen counts 4 instead of 6: it has no gradient of its own.
    Of a tied table the lookup is left out and the product of the head is counted. Kaplan et al., arXiv 2001.08361;
    attention as in Megatron-LM, arXiv 2104.04473, halved for causality.

    Args:
      config: the model.
      parameters: N, without padding.
      sequence_length: S.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    lookup += (config.learned_positions or 0) * config.d_model
    share = Share(sizes=sized(), rows=1, length=max(1, sequence_length), training=False)
    costs = costs_of(config, share)
    attention = sum(product.counted * product.flops for product in costs.attention) / share.length
    trained = costs.adapters if config.lora.rank else parameters - lookup
    passes = 3.0 if sequence_length else 0.0
    return 6.0 * trained + 4.0 * (parameters - lookup - trained) + passes * attention


def peak_flops(device: jax.Device) -> float:
    """The device's dense bfloat16 peak; NaN where it is not known, as on CPUs."""
    hardware = of_kind(device.device_kind)
    return math.nan if hardware is None else hardware.flops


def describe_peak(device: jax.Device) -> str | None:
    """Why the steps of a run have no MFU; None where they have, and on CPUs."""
    if device.platform == "cpu" or of_kind(device.device_kind) is not None:
        return None
    return f"of {device.device_kind!r} not known: no mfu is logged (jaxtp/hardware.py has those that are)"


def bytes_limit(device: jax.Device) -> int | None:
    """Bytes of a device that JAX may allocate; None where it does not say, as on CPUs."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit)


def memory_record(device: jax.Device) -> dict[str, int]:
    """Bytes in use and at their peak on a device; nothing where it does not say, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}
