"""Reference of Gated DeltaNet without the package's code: plain, token by token and head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import reference
from latents import effective


def gated_delta(x, segments, w, config, eps, scale=0):
    """Returns the layer's output; `w` are its weights by name, `scale` is the factor of adapters."""
    key_heads, group = config.delta_key_heads, config.delta_value_heads // config.delta_key_heads

    def projected(i):
        kernel, adapter = w[f"in_proj.kernels.{i}"], f"in_proj.loras.{i}"
        return x @ (kernel + scale * w[f"{adapter}.a"] @ w[f"{adapter}.b"] if scale else kernel)

    q, k, v = (convolved(projected(i), segments, w[f"{name}_conv"]) for i, name in enumerate("qkv"))
    gate, write, decay = (projected(i) for i in (3, 4, 5))
    begins = np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    results = []
    for head in range(key_heads * group):
        of_keys = slice(head // group * config.delta_key_dim, (head // group + 1) * config.delta_key_dim)
        of_values = slice(head * config.delta_value_dim, (head + 1) * config.delta_value_dim)
        query, key = (
            each[..., of_keys] / jnp.sqrt((each[..., of_keys] ** 2).sum(-1, keepdims=True) + 1e-6) for each in (q, k)
        )
        kept = jnp.exp(-jnp.exp(w["decay_log"][head]) * jnp.log1p(jnp.exp(decay[..., head] + w["dt_bias"][head])))
        strength = 1 / (1 + jnp.exp(-write[..., head]))
        y = read(query / config.delta_key_dim**0.5, key, v[..., of_values], kept, strength, begins)
        y = reference.rms_norm(y, w["norm.scale"], eps)
        results.append(y * silu(gate[..., of_values]))
    return jnp.concatenate(results, axis=-1) @ effective(w, "out", scale)


def silu(x):
    return x / (1 + jnp.exp(-x))


def convolved(x, segments, taps):
    """Tap i reads W - 1 - i tokens back, in the document."""
    batch, length, _ = x.shape
    rows = []
    for row in range(batch):
        matrix = np.zeros((len(taps), length, length))
        for t in range(length):
            for tap in range(len(taps)):
                s = t - (len(taps) - 1 - tap)
                if s >= 0 and len(set(segments[row, s : t + 1])) == 1:
                    matrix[tap, t, s] = 1
        rows.append(jnp.einsum("wts,wc,sc->tc", matrix, taps, x[row]))
    return silu(jnp.stack(rows))


def read(q, k, v, kept, strength, begins):
    """One head, token by token: q and k `[B, T, K]`, v `[B, T, V]`, others `[B, T]`."""

    def step(state, token):
        q, k, v, kept, strength, begins = token
        state = jnp.where(begins[:, None, None], 0, state) * kept[:, None, None]
        wrong = v - jnp.einsum("bk,bkv->bv", k, state)
        state = state + strength[:, None, None] * k[:, :, None] * wrong[:, None]
        return state, jnp.einsum("bk,bkv->bv", q, state)

    state = jnp.zeros((*q.shape[::2], v.shape[2]), q.dtype)
    tokens = tuple(jnp.swapaxes(jnp.asarray(each), 0, 1) for each in (q, k, v, kept, strength, begins))
    return jnp.swapaxes(jax.lax.scan(step, state, tokens)[1], 0, 1)
