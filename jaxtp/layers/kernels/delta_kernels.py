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
from jax.typing import DTypeLike

from jaxtp.collectives import vary_like
from jaxtp.layers.kernels.delta_rule import states_by
from jaxtp.mesh import current_platform

DTYPES = ("bfloat16", "float16", "float32")  # dtypes of the operands

# Width of keys, and tokens of a chunk, that a program multiplies at once
MAX_KEY_DIM = 256
MAX_TOKENS = 64

_MIN_SIZE = 16  # narrowest product that Triton computes
# Columns of a program: with more there are too few programs, with fewer w is read too often
_COLUMNS = 32
# Bytes of a chunk of w, up to which shared memory has room for the next chunk too
_PREFETCHED = 2**14


def chunk_states(
    w: Array, u: Array, k_decayed: Array, decay: Array, state: Array
) -> tuple[Array, Array, Array]:
    """Returns the results of `delta_rule.chunk_states`.

    Off CUDA the kernel runs in Pallas' interpreter, slowly, for tests.

    Raises:
      ValueError: unsupported dtypes or sizes.
    """
    rows = w.shape[-2]
    keys = w.shape[-1]
    values = u.shape[-1]
    if {x.dtype for x in (w, u, k_decayed)} != {w.dtype} or w.dtype.name not in DTYPES:
        dtypes = ", ".join(x.dtype.name for x in (w, u, k_decayed))
        raise ValueError(
            f"w, u and k_decayed are {dtypes}: the kernel takes one of {', '.join(DTYPES)}"
        )
    if keys > MAX_KEY_DIM or rows > MAX_TOKENS:
        raise ValueError(
            f"chunks of {rows} tokens of width {keys} do not fit a GPU's shared memory: at most "
            f"{MAX_TOKENS} tokens of width {MAX_KEY_DIM}"
        )
    columns = min(_COLUMNS, _padded(values))
    more_rows = _padded(rows) - rows
    more_keys = _padded(keys) - keys
    more_values = -values % columns
    w = _pad(w, more_rows, more_keys)
    k_decayed = _pad(k_decayed, more_rows, more_keys)
    u = _pad(u, more_rows, more_values)
    state = _pad(state, more_keys, more_values)
    arrays = (w, u, k_decayed, decay, state)
    states, new, final = states_by(_run, *(vary_like(x, *arrays) for x in arrays))
    return states[..., :keys, :values], new[..., :rows, :values], final[..., :keys, :values]


def _padded(size: int) -> int:
    return max(_MIN_SIZE, pl.next_power_of_2(size))


def _pad(x: Array, rows: int, columns: int) -> Array:
    return jnp.pad(x, (*[(0, 0)] * (x.ndim - 2), (0, rows), (0, columns)))


# Without jit, JAX 0.10 keeps a kernel in the backward pass when `jax.checkpoint` has saved its
# results.
@jax.jit
def _run(a: Array, u: Array, b: Array, decay: Array, state: Array, d_states: Array | None) -> Any:
    batch, heads, chunks, rows, keys = a.shape
    columns = min(_COLUMNS, u.shape[-1])
    prefetches = rows * keys * a.dtype.itemsize <= _PREFETCHED
    varying = jax.typeof(a).manual_axis_type  # all inputs vary equally

    def whole(x: Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *x.shape[2:]), lambda j, h, i: (i, h, *[0] * (x.ndim - 2)))

    def block(*shape: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, *shape, columns), lambda j, h, i: (i, h, *[0] * len(shape), j)
        )

    def result(dtype: DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(
            (batch, heads, *shape, u.shape[-1]), dtype, manual_axis_type=varying
        )

    def program(*refs: object) -> None:  # jit: see `fused_attention.py`
        jax.jit(partial(_kernel, d_states is not None))(*refs)

    operands = [a, u, b, decay, state]
    in_specs = [whole(a), block(chunks, rows), whole(b), whole(decay), block(keys)]
    if d_states is not None:
        operands.append(d_states)
        in_specs.append(block(chunks, keys))
    options = {"num_warps": 4, "num_stages": 2} if prefetches else {"num_warps": 8, "num_stages": 1}
    return pl.pallas_call(
        program,
        # Neighbours share w and k_decayed, which stay in the cache.
        grid=(u.shape[-1] // columns, heads, batch),
        in_specs=in_specs,
        out_specs=[block(chunks, keys), block(chunks, rows), block(keys)],
        out_shape=[
            result(jnp.float32, chunks, keys),
            result(a.dtype, chunks, rows),
            result(jnp.float32, keys),
        ],
        compiler_params=triton.CompilerParams(**options),
        interpret=current_platform() != "cuda",
        name="delta_states" if d_states is None else "delta_gradient",
    )(*operands)


def _kernel(backward: bool, *refs: Any) -> None:
    a_ref, u_ref, b_ref, decay_ref, state_ref, *d_states_ref, states_ref, new_ref, final_ref = refs
    chunks = a_ref.shape[0]

    def visit(i: Array, state: Array) -> Array:
        n = chunks - 1 - i if backward else i
        states_ref[n] = state
        a = a_ref[n]
        u = u_ref[n].astype(jnp.float32)
        product = triton.dot(a, state.astype(a.dtype))
        new = (u + product if backward else u - product).astype(a.dtype)
        new_ref[n] = new
        state *= decay_ref[n]
        state += triton.dot(b_ref[n], -new if backward else new, trans_a=True)
        return state + d_states_ref[0][n] if backward else state

    final_ref[...] = lax.fori_loop(0, chunks, visit, state_ref[...])
