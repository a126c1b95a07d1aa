"""Rotary position embedding (Su et al., arXiv 2104.09864), half-split as in Llama checkpoints.

Scaling follows transformers, except for longrope: it uses its long list if the sequence length, or
the number of cache slots, exceeds `original_length`. transformers decides by a batch's highest
position: packed documents depend on their neighbours, and queries past the limit meet cached keys
that were rotated with the short list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from numpy.typing import NDArray

from jaxtp.collectives import KEPT
from jaxtp.config.schema import Count, Positive, Settings

RopeScalingKind = Literal["none", "linear", "llama3", "yarn", "longrope", "proportional"]

MAX_FREQUENCY = 1024.0
"""Largest frequency, in radians per position: float64 keeps its angles within 1e-6 at four million
positions."""

Frequencies = NDArray[np.float64]  # radians per position, `[head_dim / 2]`


@dataclass(frozen=True, kw_only=True)
class RopeScaling(Settings):
    """Scaling of rotary frequencies for contexts longer than in training."""

    kind: RopeScalingKind = "none"
    """Scaling of the rotary frequencies. linear divides every frequency; llama3 divides low
    frequencies, with a smooth transition; yarn divides dims that turn seldom within
    original_length; longrope (arXiv 2402.13753) divides each frequency by its own factor. yarn and
    longrope also scale queries and keys. proportional (Gemma 4) divides every frequency, and
    rotary_fraction is the fraction of frequencies that are not 0."""

    factor: Positive = 1.0
    """Factor that divides the frequencies; for longrope it sets only the default of
    attention_factor."""

    original_length: Count = 8192
    """Tokens of the context trained on, for llama3, yarn and longrope."""

    low_freq_factor: Positive = 1.0
    """llama3: wavelengths above original_length / low_freq_factor are divided by the whole
    factor."""

    high_freq_factor: Positive = 4.0
    """llama3: wavelengths below original_length / high_freq_factor are not divided."""

    beta_fast: Positive = 32.0
    """yarn: a dim that turns more often than this within original_length is not divided."""

    beta_slow: Positive = 1.0
    """yarn: a dim that turns less often is divided by the whole factor."""

    attention_factor: Positive | None = None
    """yarn, longrope: multiplies rotated queries and keys. Default: 0.1 ln(factor) + 1 for yarn,
    sqrt(1 + ln(factor) / ln(original_length)) for longrope, and 1 for factors below 1."""

    truncate: bool = True
    """yarn: round both bounds of the transition outwards to whole dims."""

    short_factor: tuple[Positive, ...] = ()
    """longrope: divisors of the frequencies for up to original_length positions, one for each
    rotated pair."""

    long_factor: tuple[Positive, ...] = ()
    """longrope: divisors of the frequencies for more positions."""

    def __str__(self) -> str:
        """Returns the settings that are not defaults: `kind yarn, factor 2.0`.

        For lists it returns their length.
        """
        settings: list[str] = []
        for name, value in vars(self).items():
            if value != getattr(UNSCALED, name):
                text = f"of {len(value)}" if isinstance(value, tuple) else value
                settings.append(f"{name} {text}")
        return ", ".join(settings) or "none"


UNSCALED = RopeScaling()


def rotated_dims(head_dim: int, scaling: RopeScaling, fraction: float) -> tuple[int, int]:
    """Returns a period and a count: dim i of a head is rotated if `i % period < count`."""
    if scaling.kind == "proportional":
        return head_dim // 2, int(fraction * head_dim // 2)
    return head_dim, int(head_dim * fraction)


def rope_frequencies(
    head_dim: int,
    theta: float,
    scaling: RopeScaling,
    length: int,
    fraction: float = 1.0,
) -> Frequencies:
    """Returns radians per position, `[rotated / 2]` float64: `theta^(-2i / rotated)`, then scaled.

    The kind proportional has `[head_dim / 2]`: `theta^(-2i / head_dim)`, then zeros.

    Computed at trace time, so no device needs float64. `length` is the number of possible
    positions.
    """
    period, count = rotated_dims(head_dim, scaling, fraction)
    width = head_dim if scaling.kind == "proportional" else count
    plain = theta ** -(np.arange(0, width, 2) / width)
    if scaling.kind == "none":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "proportional":
        return np.where(np.arange(period) < count, plain / scaling.factor, 0)
    if scaling.kind == "longrope":
        factors = scaling.short_factor
        if length > scaling.original_length:
            factors = scaling.long_factor
        return plain / np.array(factors)
    if scaling.kind == "llama3":
        keep = _keep_by_wavelength(plain, scaling)
    else:
        keep = _keep_by_dim(width, theta, scaling)
    return plain / scaling.factor * (1 - keep) + plain * keep


def apply_rope(
    x_BTNH: Array,
    positions: Array,
    theta: float,
    scaling: RopeScaling,
    length: int,
    fraction: float = 1.0,
) -> Array:
    """Rotates each pair `(x[i], x[i + rotated/2])` of every head by `position * frequency[i]`.

    Positions are `[T]` or `[B, T]`; `length` is the number of possible positions. The first
    `rotated` dims of a head are rotated: `fraction` of them, or all with the kind proportional.
    """
    frequencies = rope_frequencies(x_BTNH.shape[-1], theta, scaling, length, fraction)
    angles = _angles(positions, frequencies)
    factor = _attention_factor(scaling)
    # Layers share these tables, [(B,) T, 1, rotated/2].
    sin = checkpoint_name(factor * jnp.sin(angles), KEPT)[..., None, :]
    cos = checkpoint_name(factor * jnp.cos(angles), KEPT)[..., None, :]
    width = 2 * angles.shape[-1]
    rotates_all = width == x_BTNH.shape[-1]
    x = x_BTNH if rotates_all else x_BTNH[..., :width]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate(halves, axis=-1).astype(x.dtype)
    if rotates_all:
        return rotated
    return jnp.concatenate([rotated, x_BTNH[..., width:]], axis=-1)


def _angles(positions: Array, frequencies: Frequencies) -> Array:
    """Returns `position * frequency` modulo whole turns, `[..., H/2]` float32 from -pi to pi.

    It is within 1e-6 of the exact angle for every int32 position; float32 products are off by up to
    2^-24 of the angle, 0.06 at a million positions (aa673834:scripts/rope_error.py).
    """
    # In units of 2^-32 turn the int32 product is exact: only whole turns overflow. float32 suffices
    # for the remainder.
    unit = 2 * math.pi / 2**32
    units = frequencies / (2 * math.pi) * 2**32
    whole_units = np.round(units)
    remainder = (units - whole_units) * unit
    # The cast to int32 and the product with it wrap around.
    wrapped_units = whole_units.astype(np.int64).astype(np.int32)
    angle_units = positions[..., None].astype(jnp.int32) * wrapped_units
    small_angle = positions[..., None].astype(jnp.float32) * remainder.astype(np.float32)
    return angle_units.astype(jnp.float32) * np.float32(unit) + small_angle


def _keep_by_wavelength(frequencies: Frequencies, scaling: RopeScaling) -> Frequencies:
    """llama3: 1 for short wavelengths, 0 for long ones, and a ramp between.

    The ramp is linear in turns within the original length.
    """
    turns = scaling.original_length * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    # Nearly equal factors overflow.
    with np.errstate(over="ignore"):
        ramp = (turns - scaling.low_freq_factor) / span
    return np.clip(ramp, 0, 1)


def _keep_by_dim(head_dim: int, theta: float, scaling: RopeScaling) -> Frequencies:
    """yarn: 1 for the first dims, 0 for the last, and a ramp between.

    See Peng et al., arXiv 2309.00071, section 3.2.
    """
    log_length = math.log(scaling.original_length)

    def dim_that_turns(times: float) -> float:
        log_wavelength = log_length - math.log(times) - math.log(2 * math.pi)
        return head_dim * log_wavelength / (2 * math.log(theta))

    low = dim_that_turns(scaling.beta_fast)
    high = dim_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, head_dim - 1)
    # As in transformers, 0.001 avoids a division by zero.
    span = high - low or 0.001
    ramp = (np.arange(head_dim // 2) - low) / span
    return 1 - np.clip(ramp, 0, 1)


def _attention_factor(scaling: RopeScaling) -> float:
    if scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1:
        return 1.0
    if scaling.kind == "longrope":
        return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_length))
    return 0.1 * math.log(scaling.factor) + 1.0
