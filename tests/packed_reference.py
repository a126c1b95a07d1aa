"""Reference of a decoder on packed documents, with Gated DeltaNet or latent attention in its
blocks, in float64.
"""

from functools import cache

import deltas
import jax
import jax.numpy as jnp
import latents
import numpy as np
import reference
from flax import nnx
from numpy.random import default_rng
from support import by_name, decoder, sizes_of, state_on_mesh

from jaxtp.mesh import mesh_of

B = 4
T = 24
V = 19
D = 24


@cache
def batch():
    random = default_rng(0)
    ids, labels = random.integers(0, V, (2, B, T), np.int32)
    breaks = np.sort(random.integers(1, T, (B, 3)), axis=1)
    segments = 1 + (np.arange(T) >= breaks[:, :, None]).sum(axis=1).astype(np.int32)
    segments[0, 20:] = 0
    return ids, np.where(segments > 0, labels, -100), segments


def logits_of(weights, config):
    ids, _, segments = batch()
    scale = config.lora.rank and config.lora.scale
    norm = lambda x, scale: reference.rms_norm(x, scale, config.norm_eps)
    x = weights["embedding.embedding"][ids]
    for layer, block in enumerate(config.layers()):
        path = f"blocks.{layer}." if config.pattern else "blocks."
        w = {
            name.removeprefix(path): a[0 if config.pattern else layer]
            for name, a in weights.items()
            if path in name
        }
        inner = {name.removeprefix("attention."): array for name, array in w.items()}
        read = norm(x, w["attention_norm.scale"])
        if block.delta_value_heads:
            x = x + deltas.gated_delta(read, segments, inner, block, block.norm_eps, scale)
        else:
            x = x + latents.attention(read, segments, inner, block, scale)
        gate, up = (latents.effective(w, "mlp.gate_up", scale, i) for i in (0, 1))
        mlp = {"gate": gate, "up": up, "down": latents.effective(w, "mlp.down", scale)}
        x = x + reference.swiglu(norm(x, w["mlp_norm.scale"]), mlp)
    return norm(x, weights["norm.scale"]) @ weights["head.kernel"].T


def loss_and_gradients(weights, config):
    """Returns both by name, as they should be."""
    with jax.enable_x64(True):
        loss = lambda wide: reference.cross_entropy(logits_of(wide, config), batch()[1])[0]
        wide = {name: jnp.asarray(np.asarray(array, np.float64)) for name, array in weights.items()}
        total, grads = jax.jit(jax.value_and_grad(loss))(wide)
        return {"loss": total} | {name: np.asarray(grad) for name, grad in grads.items()}


def loss_and_gradients_on(mesh, config, weights, **options):
    """Returns the loss and the gradients of what is trained, by name, of a decoder on a mesh."""
    ids, labels, segments = batch()
    on = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(decoder(config), weights, on)
    trained = nnx.LoRAParam if config.lora.rank else nnx.Param

    def loss(params, others):
        model = nnx.merge(graph, params, others, copy=True)
        return model.loss(ids, labels, segments=segments, **options)[0]

    with jax.set_mesh(on):
        total, grads = jax.jit(jax.value_and_grad(loss))(*nnx.split_state(state, trained, ...))
        return {"loss": total, **by_name(grads, on)}
