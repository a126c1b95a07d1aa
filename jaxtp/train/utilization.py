"""Model FLOPs utilization, counted one way everywhere, and the memory of a device."""

import math

import jax

from jaxtp.models.config import ModelConfig

PEAKS = {
    "A100": 312e12,
    "H100": 989.4e12,
    "H200": 989.4e12,
    "B200": 2250e12,
    "L40S": 362e12,
}
"""Dense bfloat16 FLOP/s by what a device's kind contains, from NVIDIA's data sheets (SXM where there are several)."""


def flops_per_token(config: ModelConfig, parameters: int, sequence_length: int) -> float:
    """`6 (N - V D) + 6 L S (heads * head_dim)`: causal attention, no lookup of the embedding, no recomputation.

    Of a tied table the lookup is left out and the product of the head is counted. Kaplan et al., arXiv 2001.08361;
    attention as in Megatron-LM, arXiv 2104.04473, halved for causality.

    Args:
      config: the model.
      parameters: N, without padding.
      sequence_length: S.
    """
    lookup = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    attention = config.num_layers * sequence_length * config.num_heads * config.head_dim
    return 6.0 * (parameters - lookup) + 6.0 * attention


def peak_flops(device: jax.Device) -> float:
    """The device's dense bfloat16 peak; NaN where it is not known, as on CPUs."""
    return next((peak for kind, peak in PEAKS.items() if kind in device.device_kind), math.nan)


def memory_record(device: jax.Device) -> dict[str, int]:
    """Bytes in use and at their peak on a device; nothing where it does not say, as on CPUs."""
    stats = device.memory_stats() or {}
    names = {"bytes_in_use": "memory_bytes", "peak_bytes_in_use": "memory_peak_bytes"}
    return {name: stats[key] for key, name in names.items() if key in stats}
