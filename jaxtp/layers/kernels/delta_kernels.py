"""The gated delta rule's recurrence over chunks as a Pallas kernel for NVIDIA GPUs, by Triton.

A program holds columns of one head's state on the chip and visits the chunks. Precision and
determinism: see `fused_attention.py`.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxtp.collectives import vary_alike
from jaxtp.layers.kernels.delta_rule import states_by
from jaxtp.layers.kernels.padding import pad_to, round_up
from jaxtp.layers.kernels.programs import padded_size, run_programs

# Widest keys whose chunks fit a GPU's shared memory
MAX_KEY_DIM = 256

# Columns of a program: with more there are too few programs, with fewer w is read too often
_COLUMNS = 32
# Bytes of a chunk of w, up to which shared memory has room for the next chunk too
_PREFETCHED = 2**14


def chunk_states(
    w: Array,
    u: Array,
    k_decayed: Array,
    decay: Array,
    state: Array,
) -> tuple[Array, Array, Array]:
    """Returns the results of `delta_rule.chunk_states`, for chunks of at most 64 tokens.

    Off CUDA the kernel runs in Pallas' interpreter, slowly, for tests.
    """
    rows, keys = w.shape[-2:]
    values = u.shape[-1]
    padded_rows = padded_size(rows)
    padded_keys = padded_size(keys)
    columns = min(_COLUMNS, padded_size(values))
    padded_values = round_up(values, columns)
    w = pad_to(w, {-2: padded_rows, -1: padded_keys})
    k_decayed = pad_to(k_decayed, {-2: padded_rows, -1: padded_keys})
    u = pad_to(u, {-2: padded_rows, -1: padded_values})
    state = pad_to(state, {-2: padded_keys, -1: padded_values})
    if decay.ndim > 3:
        decay = pad_to(decay, {-1: padded_keys})
    operands = vary_alike((w, u, k_decayed, decay, state))
    states, new, final = states_by(_run, *operands)
    states = states[..., :keys, :values]
    new = new[..., :rows, :values]
    return states, new, final[..., :keys, :values]


# Without jit, JAX 0.10 keeps a kernel in the backward pass when `jax.checkpoint` has saved its
# results.
@jax.jit
def _run(
    a: Array,
    u: Array,
    b: Array,
    decay: Array,
    state: Array,
    d_states: Array | None,
) -> Any:
    batch, heads, chunks, rows, keys = a.shape
    values = u.shape[-1]
    columns = min(_COLUMNS, values)

    def whole(x: Array) -> pl.BlockSpec:
        """Returns the spec of all of a head's numbers."""
        shape = x.shape[2:]
        origin = [0] * len(shape)
        return pl.BlockSpec((None, None, *shape), lambda j, h, i: (i, h, *origin))

    def block(*shape: int) -> pl.BlockSpec:
        """Returns the spec of a program's columns."""
        origin = [0] * len(shape)
        return pl.BlockSpec((None, None, *shape, columns), lambda j, h, i: (i, h, *origin, j))

    operands = [a, u, b, decay, state]
    in_specs = [whole(a), block(chunks, rows), whole(b), whole(decay), block(keys)]
    name = "delta_states"
    if d_states is not None:
        name = "delta_gradient"
        operands.append(d_states)
        in_specs.append(block(chunks, keys))
    prefetches = rows * keys * a.dtype.itemsize <= _PREFETCHED
    warps, stages = (4, 2) if prefetches else (8, 1)
    return run_programs(
        lambda *refs: jax.jit(partial(_kernel, d_states is not None))(*refs),
        operands,
        [
            ((batch, heads, chunks, keys, values), jnp.float32),
            ((batch, heads, chunks, rows, values), a.dtype),
            ((batch, heads, keys, values), jnp.float32),
        ],
        # Neighbours share w and k_decayed, which stay in the cache.
        grid=(values // columns, heads, batch),
        options=triton.CompilerParams(num_warps=warps, num_stages=stages),
        name=name,
        in_specs=in_specs,
        out_specs=[block(chunks, keys), block(chunks, rows), block(keys)],
    )


def _kernel(backward: bool, *refs: Any) -> None:
    """Visits the chunks as `delta_rule.states_by` says."""
    a_ref, u_ref, b_ref, decay_ref, state_ref, *d_states_ref, states_ref, new_ref, final_ref = refs
    chunks = a_ref.shape[0]

    def visit(i: Array, state: Array) -> Array:
        n = chunks - 1 - i if backward else i
        states_ref[n] = state
        a = a_ref[n]
        u = u_ref[n].astype(jnp.float32)
        product = triton.dot(a, state.astype(a.dtype))
        new = u + product if backward else u - product
        new = new.astype(a.dtype)
        new_ref[n] = new
        decay = decay_ref[n]
        state *= decay[:, None] if decay.ndim else decay
        b = b_ref[n]
        written = -new if backward else new
        state += triton.dot(b, written, trans_a=True)
        for d_state_ref in d_states_ref:
            state += d_state_ref[n]
        return state

    final_ref[...] = lax.fori_loop(0, chunks, visit, state_ref[...])
