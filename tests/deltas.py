"""References of Gated DeltaNet, Kimi Delta Attention, Mamba-2 and short convolutions without the
package's code: token by token. They equal transformers' in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import reference
from latents import effective


def gated_delta(x, segments, w, config, eps, scale=0):
    """Returns the layer's output, of Kimi Delta Attention with a `delta_gate_rank`; `w` are its
    weights by name, `scale` is the factor of adapters.
    """
    group = config.delta_value_heads // config.delta_key_heads
    by_channel = config.delta_gate_rank > 0

    def projected(i, x=x, name="in_proj"):
        return x @ effective(w, name, scale, i)

    q, k, v = (convolved(projected(i), segments, w[f"{name}_conv"]) for i, name in enumerate("qkv"))
    if by_channel:
        write = projected(3)
        decay, gate = (
            projected(0, x @ effective(w, f"{name}_down", scale), f"{name}_up")
            for name in ("decay", "gate")
        )
    else:
        gate, write, decay = (projected(i) for i in (3, 4, 5))
    q, k = (each.reshape(*each.shape[:2], -1, config.delta_key_dim) for each in (q, k))
    q, k = (each / jnp.sqrt((each**2).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    q, k = (jnp.repeat(each, group, axis=2) for each in (q, k))
    values = (*v.shape[:2], -1, config.delta_value_dim)
    steps = jnp.log1p(jnp.exp(decay + w["dt_bias"]))
    rates = jnp.exp(w["decay_log"])
    if by_channel:
        rates = rates[:, None]
        steps = steps.reshape(*steps.shape[:2], len(rates), -1)
    kept = jnp.exp(-rates * steps)
    q /= config.delta_key_dim**0.5
    write = 1 / (1 + jnp.exp(-write))
    y, _ = read(q, k, v.reshape(values), kept, write, begins_of(segments))
    gate = gate.reshape(values)
    gate = 1 / (1 + jnp.exp(-gate)) if by_channel else silu(gate)
    y = reference.rms_norm(y, w["norm_scale"], eps) * gate
    return y.reshape(*x.shape[:2], -1) @ effective(w, "out", scale)


def mamba2(x, segments, w, config, eps, scale=0):
    """Returns the output of Mamba-2, as `gated_delta` does."""
    groups = config.delta_key_heads

    def projected(i):
        return x @ effective(w, "in_proj", scale, i) + w.get(f"in_proj.biases.{i}", 0)

    q, k, v = (
        convolved(projected(i), segments, w[f"{name}_conv"], w.get(f"{name}_conv_bias", 0))
        for i, name in enumerate("qkv")
    )
    step = jnp.log1p(jnp.exp(projected(4) + w["dt_bias"]))
    step = jnp.clip(step, config.mamba_min_step, config.mamba_max_step)
    heads = (*v.shape[:2], config.delta_value_heads, -1)
    q, k = (
        jnp.repeat(each.reshape(*each.shape[:2], groups, -1), heads[2] // groups, axis=2)
        for each in (q, k)
    )
    v = v.reshape(heads)
    kept = jnp.exp(-jnp.exp(w["decay_log"]) * step)
    y, _ = read(q, k, v, kept, step, begins_of(segments), subtracts=False)
    y = (y + w["skip_scale"][:, None] * v).reshape(x.shape[0], x.shape[1], groups, -1)
    y = y * silu(projected(3)).reshape(y.shape)
    if config.mamba_norm:
        scales = w["norm_scale"].reshape(groups, -1)
        y = reference.rms_norm(y, scales, eps)
    return y.reshape(*x.shape[:2], -1) @ effective(w, "out", scale) + w.get("out.bias", 0)


def short_convolution(x, segments, w):
    """Returns the output of a gated short convolution."""
    scale, gate, value = (x @ effective(w, "in_proj", 0, i) for i in range(3))
    return (gate * sums_of_taps(scale * value, segments, w["taps"])) @ w["out.kernel"]


def begins_of(segments):
    return np.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def long_memory(weights):
    """Returns weights whose states last for some tokens; most initial ones decay within one."""
    slow = {n: weights[n] - 4 for n in weights if n.endswith("decay_log") and "optimizer" not in n}
    return {**weights, **slow}


def silu(x):
    return x / (1 + jnp.exp(-x))


def convolved(x, segments, taps, bias=0):
    return silu(sums_of_taps(x, segments, taps) + bias)


def sums_of_taps(x, segments, taps):
    """Tap i reads the token W - 1 - i before, if both are of one document."""
    rows, length = segments.shape
    reads = np.zeros((rows, len(taps), length, length))
    for row, tap, t in np.ndindex(rows, len(taps), length):
        s = t - (len(taps) - 1 - tap)
        reads[row, tap, t, s] = s >= 0 and len(set(segments[row, s : t + 1])) == 1
    return jnp.einsum("bits,ic,bsc->btc", reads, taps, x)


def read(q, k, v, kept, strength, begins, state=None, *, subtracts=True):
    """Returns what each token reads, and the last state.

    q and k `[B, T, H, K]`, v `[B, T, H, V]`, kept `[B, T, H]` or `[B, T, H, K]`,
    strength `[B, T, H]`, begins `[B, T]`, state `[B, H, K, V]`.
    """

    def step(state, token):
        q, k, v, kept, strength, begins = token
        kept = kept.reshape(*kept.shape[:2], -1, 1)
        state = jnp.where(begins[:, None, None, None], 0, state) * kept
        wrong = v - subtracts * jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + strength[..., None, None] * k[..., None] * wrong[:, :, None]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state)

    if state is None:
        state = jnp.zeros((q.shape[0], *q.shape[2:], v.shape[3]), q.dtype)
    tokens = tuple(
        jnp.swapaxes(jnp.asarray(each), 0, 1) for each in (q, k, v, kept, strength, begins)
    )
    final, y = jax.lax.scan(step, state, tokens)
    return jnp.swapaxes(y, 0, 1), final
