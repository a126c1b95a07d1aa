"""Gated DeltaNet over cp: states and convolutions reach over chunks, and no gradient stops at one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import assert_close, sizes_of

from jaxtp.collectives import device_view
from jaxtp.layers.context import Sequences
from jaxtp.mesh import BATCH, CONTEXT, TP, mesh_of

B, HEADS, K, V = 2, 2, 3, 5


def states_before(m, u):
    """The state before each chunk of maps `[n, B, H, K, ...]`, one after the other."""
    states = [jnp.zeros_like(u[0])]
    for chunk in range(len(u) - 1):
        states.append(m[chunk] @ states[-1] + u[chunk])
    return jnp.stack(states)


@pytest.mark.parametrize("zigzag", [False, True], ids=["natural", "zigzag"])
@pytest.mark.parametrize("cp", [2, 4])
def test_every_chunk_starts_with_the_state_of_all_before_it(cp, zigzag):
    count, chunks = cp * (1 + zigzag), 1 + zigzag
    draw = np.random.default_rng(0).standard_normal
    m, u, upstream = (draw((count, B, HEADS, K, width)).astype(np.float32) for width in (K, V, V))
    expected, pull = jax.vjp(states_before, m, u)
    with jax.set_mesh(mesh_of(sizes_of((1, 2, cp, 2)))):
        sequences = Sequences(zigzag=zigzag)
        order = sequences.positions(count)

        def body(m, u):  # of a device, [chunks, b, h, K, ...]
            stacked = [jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:]) for x in (m, u)]
            states = sequences.initial_states(*stacked)
            return jnp.moveaxis(states.reshape(-1, chunks, *states.shape[1:]), 1, 0)

        spec = P(CONTEXT, BATCH, TP)

        @jax.jit
        def run(m, u, upstream):
            view = device_view(body, "states", (spec, spec), spec)
            found, back = jax.vjp(lambda m, u: sequences.natural(view(m[order], u[order]), 0), m, u)
            return found, *back(upstream)

        found = run(m, u, upstream)
    names = ("states", "d m", "d u")
    assert_close(dict(zip(names, found, strict=True)), dict(zip(names, (expected, *pull(upstream)), strict=True)))
