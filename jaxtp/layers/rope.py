"""Rotary position embedding (Su et al., arXiv 2104.09864), in the half-split form of Llama checkpoints."""

import jax.numpy as jnp
from jax import Array


def rope_frequencies(head_dim: int, theta: float) -> Array:
    """Angles per position, `[head_dim / 2]` float32: `theta^(-2i / head_dim)`."""
    return 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)


def apply_rope(x_BTNH: Array, positions: Array, theta: float) -> Array:
    """Rotates each pair `(x[i], x[i + H/2])` of every head by `position * frequency[i]`.

    Args:
      x_BTNH: queries or keys `[B, T, N, H]`, H even.
      positions: `[T]` or `[B, T]` integers.
      theta: base of the frequencies.

    Returns:
      `[B, T, N, H]` in the dtype of the input, computed in float32.
    """
    angles = positions[..., None].astype(jnp.float32) * rope_frequencies(x_BTNH.shape[-1], theta)
    sin, cos = jnp.sin(angles)[..., None, :], jnp.cos(angles)[..., None, :]  # [(B,) T, 1, H/2]
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BTNH.dtype)
