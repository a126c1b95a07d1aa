"""Compares the error and cost of jaxtp's rotary angles with float32 products.

The products are of positions and frequencies.

    python scripts/rope_error.py

An error is the largest difference from float64, in radians, over random positions below a length
and all dims of a head of 128. Times are medians of a gradient through queries `[1, 4096, 8, 128]`;
the two methods take turns.
"""

import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.layers import rope

HEAD_DIM = 128
LENGTHS = [4096, 131_072, 2**20, 2**22, 2**31 - 1]
REPEATS = 31


def products(positions, frequencies):
    """Returns angles as most implementations compute them."""
    return positions[..., None].astype(jnp.float32) * frequencies.astype(np.float32)


def largest_error(angles, length, theta):
    """Returns the largest error of sines and cosines over 20,000 positions below a length.

    The last position is among them.
    """
    positions = np.append(np.random.default_rng(0).integers(0, length, 20_000), length - 1).astype(
        np.int32
    )
    frequencies = rope.rope_frequencies(HEAD_DIM, theta, rope.UNSCALED, length)
    found = jax.jit(lambda positions: angles(positions, frequencies))(positions)
    exact = positions[:, None] * frequencies
    off = np.asarray(found, np.float64) - exact
    return np.abs(off - 2 * math.pi * np.round(off / (2 * math.pi))).max()


def square(x):
    """Returns a scalar that depends on all rotated queries."""
    rotated = rope.apply_rope(x, jnp.arange(x.shape[1]), 1e4, rope.UNSCALED, x.shape[1])
    return (rotated.astype(jnp.float32) ** 2).sum()


def times(*ways):
    """Returns the median seconds of a rotation's gradient for each method."""
    x = jnp.ones((1, 4096, 8, HEAD_DIM), jnp.bfloat16)
    programs = []
    for angles in ways:
        rope._angles = angles
        programs.append(jax.jit(jax.grad(square)).lower(x).compile())
    seconds = [[] for _ in ways]
    for _ in range(REPEATS):
        for program, found in zip(programs, seconds, strict=True):
            started = time.perf_counter()
            program(x).block_until_ready()
            found.append(time.perf_counter() - started)
    return map(statistics.median, seconds)


if __name__ == "__main__":
    ours = rope._angles
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    print(f"{'positions below':>15} {'theta':>9} {'products':>9} {'ours':>9}  (radians)")
    for length in LENGTHS:
        for theta in (1e4, 5e5):
            before, after = (largest_error(way, length, theta) for way in (products, ours))
            print(f"{length:15,} {theta:9,.0f} {before:9.1e} {after:9.1e}")
    before, after = times(products, ours)
    print(f"gradient of a rotation: products {1e3 * before:.1f} ms, ours {1e3 * after:.1f} ms")
