"""The gated delta rule, token by token: a stand-in for the chunked form."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxtp.collectives import vary_like


def delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    write: Array,
    starts: Array | None = None,
    state: Any = None,
    *,
    chunk: int = 64,
    scan: Any = None,
) -> tuple[Array, Array]:
    """Returns the results of each token, `[B, T, Hv, V]`, and the state after the last, `[B, Hv, K, V]`."""
    if state is None:
        zeros = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
        state = vary_like(zeros, q, k, v, log_decay, write, *([] if starts is None else [starts]))
    starts = jnp.zeros(write.shape[:2], bool) if starts is None else jnp.broadcast_to(starts, write.shape[:2])

    def step(state: Any, token: Any) -> tuple[Any, Any]:
        *token, begins = token
        y, state = delta_step(*token, jnp.where(begins[:, None, None, None], 0, state))
        return state, y

    state, y = jax.lax.scan(step, state, tuple(x.swapaxes(0, 1) for x in (q, k, v, log_decay, write, starts)))
    return y.swapaxes(0, 1).astype(v.dtype), state


def delta_step(q: Array, k: Array, v: Array, log_decay: Array, write: Array, state: Array) -> tuple[Array, Array]:
    """Returns one token's results `[B, Hv, V]`, and the next state."""
    q, k = (jnp.repeat(x.astype(jnp.float32), v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    state = state * jnp.exp(log_decay)[..., None, None]
    new = write[..., None] * (v.astype(jnp.float32) - jnp.einsum("bhk,bhkv->bhv", k, state))
    state = state + k[..., None] * new[:, :, None]
    return jnp.einsum("bhk,bhkv->bhv", q, state), state
