"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split form of Llama checkpoints.

Three ways to turn a model's dims more slowly, so that it reaches further than it was trained for (`RopeScaling`): the
formulas are those of transformers, whose checkpoints they come with.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jax import Array

from jaxtp.config import Count, Positive

RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of rotary frequencies for a context longer than the one trained on."""

    kind: RopeScalingKind = "none"
    """linear divides every frequency; llama3 those of long wavelengths, with a smooth passage; yarn those that turn
    seldom within original_length, and it scales queries and keys."""

    factor: Positive = 1.0
    """Divides the frequencies."""

    original_length: Count = 8192
    """Tokens of the context trained on, for llama3 and yarn."""

    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_length / low_freq_factor are divided by the whole factor."""

    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_length / high_freq_factor stay as they are."""

    beta_fast: Positive = 32.0
    """yarn: a dim that turns more often than this within original_length stays as it is."""

    beta_slow: Positive = 1.0
    """yarn: a dim that turns less often is divided by the whole factor."""

    attention_factor: Positive | None = None
    """yarn: multiplies rotated queries and keys; by default 0.1 ln(factor) + 1."""

    truncate: bool = True
    """yarn: round the bounds between the dims outwards to whole dims."""


UNSCALED = RopeScaling()


def rope_problems(theta: float | None, scaling: RopeScaling) -> Iterator[str]:
    """Yields why frequencies cannot be scaled."""
    if scaling.kind == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            f"model.rope_scaling.high_freq_factor={scaling.high_freq_factor} is not above "
            f"low_freq_factor={scaling.low_freq_factor}; 4 and 1 are usual"
        )
    if scaling.kind == "yarn" and theta is not None and theta <= 1:
        yield f"model.rope_theta={theta} is not above 1, which yarn needs; 10000 is usual"


def rope_frequencies(head_dim: int, theta: float, scaling: RopeScaling = UNSCALED) -> Array:
    """Angles per position, `[head_dim / 2]` float32: `theta^(-2i / head_dim)`, then scaled."""
    plain = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    kept = _kept_by_wavelength(plain, scaling) if scaling.kind == "llama3" else _kept_by_dim(head_dim, theta, scaling)
    return plain / scaling.factor * (1 - kept) + plain * kept


def apply_rope(x_BTNH: Array, positions: Array, theta: float, scaling: RopeScaling = UNSCALED) -> Array:
    """Rotates each pair `(x[i], x[i + H/2])` of every head by `position * frequency[i]`.

    Args:
      x_BTNH: queries or keys `[B, T, N, H]`, H even.
      positions: `[T]` or `[B, T]` integers.
      theta: base of the frequencies.
      scaling: of the frequencies.

    Returns:
      `[B, T, N, H]` in the dtype of the input, computed in float32.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(x_BTNH.shape[-1], theta, scaling)
    size = _length(scaling)
    sin, cos = size * jnp.sin(angles)[..., None, :], size * jnp.cos(angles)[..., None, :]  # [(B,) T, 1, H/2]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)


def _kept_by_wavelength(frequencies: Array, scaling: RopeScaling) -> Array:
    """llama3: 1 for short wavelengths, 0 for long ones, linear in the turns within the original length between."""
    turns = scaling.original_length * frequencies / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return jnp.clip(smooth, 0, 1)


def _kept_by_dim(head_dim: int, theta: float, scaling: RopeScaling) -> Array:
    """yarn (Peng et al., arXiv 2309.00071, section 3.2): 1 for the first dims, 0 for the last, a ramp between."""

    def dim_that_turns(times: float) -> float:
        wavelength = scaling.original_length / times / (2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dim_that_turns(scaling.beta_fast), dim_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = high - low if high != low else 0.001  # transformers' way around a division by zero
    return 1 - jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / span, 0, 1)


def _length(scaling: RopeScaling) -> float:
    """Returns the factor of rotated queries and keys."""
    if scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
