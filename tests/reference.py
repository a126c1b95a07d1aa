"""Reference mathematics without the package's code: dense, on one device."""

import jax
import jax.numpy as jnp


def rms_norm(x, scale, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * scale


def layer_norm(x, scale, eps, bias=0.0):
    return rms_norm(x - jnp.mean(x, axis=-1, keepdims=True), scale, eps) + bias


def frequencies_of(head_dim, theta):
    return theta ** (-jnp.arange(head_dim // 2) * 2.0 / head_dim)


def rotate(x, frequencies):
    """Rotates the pairs (x[i], x[i + len(frequencies)]) as complex numbers."""
    half = len(frequencies)
    angle = jnp.arange(x.shape[1])[:, None] * frequencies
    rotated = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * angle)[None, :, None, :]
    return jnp.concatenate([rotated.real, rotated.imag, x[..., 2 * half :]], axis=-1)


def attention(x, w, num_heads, num_kv_heads, head_dim, theta, change=None):
    """Weights `w` are q, k, v, o and optionally bq, bk, bv, bo. Causal.

    `change(q, k, v)` replaces RoPE. Without v, values are keys; `gate` multiplies results by its
    sigmoid; `sinks` are a column of scores more, the values of which are 0.
    """
    batch, length, _ = x.shape
    project = lambda name, heads: (x @ w[name] + w.get("b" + name, 0.0)).reshape(
        batch, length, heads, head_dim
    )
    q = project("q", num_heads)
    k = project("k", num_kv_heads)
    v = project("v" if "v" in w else "k", num_kv_heads)
    by_rope = lambda q, k, v: (
        *(rotate(each, frequencies_of(head_dim, theta)) for each in (q, k)),
        v,
    )
    q, k, v = (change or by_rope)(q, k, v)
    seen = jnp.arange(length)[:, None] >= jnp.arange(length)
    outputs = []
    for head in range(num_heads):
        shared = head // (num_heads // num_kv_heads)
        scores = jnp.einsum("bth,bsh->bts", q[:, :, head], k[:, :, shared]) / jnp.sqrt(head_dim)
        sink = w["sinks"][head] if "sinks" in w else -jnp.inf
        scores = jnp.pad(
            jnp.where(seen, scores, -jnp.inf), ((0, 0), (0, 0), (0, 1)), constant_values=sink
        )
        outputs.append(jax.nn.softmax(scores, axis=-1)[..., :-1] @ v[:, :, shared])
    heads = jnp.concatenate(outputs, axis=-1)
    if "gate" in w:
        gate = x @ w["gate"]
        heads /= 1 + jnp.exp(-jnp.repeat(gate, heads.shape[-1] // gate.shape[-1], axis=-1))
    return heads @ w["o"] + w.get("bo", 0.0)


def xielu(x, alpha_p, alpha_n):
    """As transformers computes it."""
    positive = jnp.log1p(jnp.exp(alpha_p))
    negative = 0.5 + jnp.log1p(jnp.exp(alpha_n))
    below = (jnp.expm1(jnp.minimum(x, -1e-6)) - x) * negative
    return jnp.where(x > 0, positive * x * x, below) + 0.5 * x


def swiglu(x, w):
    """Weights `w` are gate, up, down and optionally bgate, bup, bdown."""
    gate = x @ w["gate"] + w.get("bgate", 0.0)
    up = x @ w["up"] + w.get("bup", 0.0)
    return (gate / (1 + jnp.exp(-gate)) * up) @ w["down"] + w.get("bdown", 0.0)


def cross_entropy(logits, labels):
    """Returns the sum of losses over labels other than -100, and their number."""
    valid = labels != -100
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(
        log_probabilities, jnp.where(valid, labels, 0)[..., None], axis=-1
    )[..., 0]
    return -jnp.sum(jnp.where(valid, picked, 0)), jnp.sum(valid).astype(jnp.float32)


ATTENTION = {"q": "qkv.kernels.0", "k": "qkv.kernels.1", "v": "qkv.kernels.2", "o": "out.kernel"} | {  # noqa: E501
    "bq": "qkv.biases.0", "bk": "qkv.biases.1", "bv": "qkv.biases.2", "bo": "out.bias", "sinks": "sinks"  # noqa: E501
}  # fmt: skip
MLP = {"gate": "gate_up.kernels.0", "up": "gate_up.kernels.1", "down": "down.kernel"} | {
    "bgate": "gate_up.biases.0", "bup": "gate_up.biases.1", "bdown": "down.bias"
}  # fmt: skip


def named(weights, names, prefix=""):
    """Returns the package's weights under this file's names."""
    return {
        short: weights[prefix + long] for short, long in names.items() if prefix + long in weights
    }


def decoder_logits(weights, config, ids):
    """Returns the logits of a plain model, from a dict of its weights."""
    norm = lambda x, scale: rms_norm(x, scale, config.norm_eps)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim, config.rope_theta)
    x = jnp.asarray(weights["embedding.embedding"])[ids]
    for layer in range(config.num_layers):
        w = {
            name.removeprefix("blocks."): a[layer]
            for name, a in weights.items()
            if name.startswith("blocks.")
        }
        normed = norm(x, w["attention_norm.scale"])
        x = x + attention(normed, named(w, ATTENTION, "attention."), *heads)
        x = x + swiglu(norm(x, w["mlp_norm.scale"]), named(w, MLP, "mlp."))
    table = weights.get("head.kernel", weights["embedding.embedding"])
    return norm(x, weights["norm.scale"]) @ table.T
