"""Reference of multi-head latent attention without the package's code: plain, head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import reference


def effective(weights, module, scale, i=0):
    """Returns a kernel of a module, or its kernel i, with its adapter."""
    kernel = weights.get(f"{module}.kernel", weights.get(f"{module}.kernels.{i}"))
    adapter = f"{module}.loras.{i}"
    return kernel + scale * weights[f"{adapter}.a"] @ weights[f"{adapter}.b"] if scale else kernel


def attention(x, segments, w, config, scale):
    """Multi-head latent attention, head by head."""
    length = x.shape[1]
    nope = config.head_dim - config.rope_head_dim
    values = config.value_head_dim
    kernel = lambda name: effective(w, name, scale)
    place = np.stack(
        [
            np.concatenate([np.arange((row == s).sum()) for s in dict.fromkeys(row)])
            for row in segments
        ]
    )
    angle = place[..., None] * config.rope_theta ** (
        -np.arange(config.rope_head_dim // 2) * 2 / config.rope_head_dim
    )

    def rotate(x):
        half = x.shape[-1] // 2
        turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
        return jnp.concatenate([turned.real, turned.imag], axis=-1)

    down = x @ kernel("latent_down")
    kv = reference.rms_norm(down[..., : config.kv_rank], w["latent_norm.scale"], 1e-6) @ kernel(
        "latent_up"
    )
    shared = rotate(down[..., config.kv_rank :])
    if config.query_rank:
        x = reference.rms_norm(x @ kernel("query_down"), w["query_norm.scale"], 1e-6)
    q = x @ kernel("query_up")
    q *= (1 + config.query_temperature * np.log1p(place // config.rope_scaling.original_length))[
        ..., None
    ]
    distance = np.arange(length)[:, None] - np.arange(length)
    seen = (distance >= 0) & (distance < (config.sliding_window or length))
    seen = seen & (segments[:, :, None] == segments[:, None])
    outputs = []
    for head in range(config.num_heads):
        query = q[..., head * config.head_dim :][..., : config.head_dim]
        of_head = kv[..., head * (nope + values) :][..., : nope + values]
        scores = query[..., :nope] @ of_head[..., :nope].swapaxes(1, 2)
        scores += rotate(query[..., nope:]) @ shared.swapaxes(1, 2)
        scores *= config.query_scale or config.head_dim**-0.5
        outputs.append(
            jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1) @ of_head[..., nope:]
        )
    return jnp.concatenate(outputs, axis=-1) @ kernel("out")
