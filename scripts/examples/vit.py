"""A vision transformer (arXiv 2010.11929), written for one device, without a mesh.

    python scripts/examples/vit.py --mesh fsdp=2,tp=4

It classifies eight textures with random phase and noise. The plan is in `vit_plan.py`, the training loop in
`train.py`.
"""

import jax
import numpy as np
import optax
from flax import nnx
from jax import Array

IMAGE, PATCH, CLASSES = 16, 4, 8


class Block(nnx.Module):
    """Pre-norm attention and MLP on `[B, T, D]`."""

    def __init__(self, width: int, num_heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, width, decode=False, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(width, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(width, 4 * width, rngs=rngs), nnx.gelu, nnx.Linear(4 * width, width, rngs=rngs)
        )

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nnx.Module):
    """Maps images `[B, 16, 16, 1]` to logits `[B, 8]`."""

    def __init__(self, width: int = 32, num_heads: int = 8, depth: int = 2, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, width, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((IMAGE // PATCH) ** 2, width)))
        self.blocks = nnx.List([Block(width, num_heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build() -> VisionTransformer:
    return VisionTransformer(rngs=nnx.Rngs(0))


def loss(model: VisionTransformer, images: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def batch(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns images `[size, 16, 16, 1]` float32, labels `[size]` int32: direction and frequency of a wave."""
    labels = random.integers(CLASSES, size=size, dtype=np.int32)
    directions = np.array([(1, 0), (0, 1), (1, 1), (1, -1)], np.float32)[labels % 4]
    waves = directions * np.where(labels < 4, 0.8, 1.6)[:, None]
    grid = np.stack(np.meshgrid(np.arange(IMAGE), np.arange(IMAGE), indexing="ij"))
    phase = random.uniform(0, 2 * np.pi, (size, 1, 1))
    images = np.sin(np.einsum("bk,kxy->bxy", waves, grid) + phase) + 0.3 * random.normal(size=(size, IMAGE, IMAGE))
    return images[..., None].astype(np.float32), labels


if __name__ == "__main__":
    import train
    from vit_plan import PLAN

    train.main(build, loss, batch, PLAN)
