"""An MLP-mixer (arXiv 2105.01601), written for one device, without a mesh.

    python scripts/examples/mixer.py --mesh fsdp=2,tp=4

It classifies the textures of `vit.py`, as patches from the host. The plan is in `mixer_plan.py`, the training loop in
`train.py`.
"""

import numpy as np
import optax
import vit
from flax import nnx
from jax import Array

TOKENS, PIXELS = (vit.IMAGE // vit.PATCH) ** 2, vit.PATCH**2


class Mlp(nnx.Module):
    """Two layers on the last dim."""

    def __init__(self, width: int, hidden: int, rngs: nnx.Rngs):
        self.up = nnx.Linear(width, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, width, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """Mixes the tokens, then the channels, of `[B, T, C]`."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.token_norm = nnx.LayerNorm(width, rngs=rngs)
        self.tokens = Mlp(TOKENS, 2 * TOKENS, rngs)
        self.channel_norm = nnx.LayerNorm(width, rngs=rngs)
        self.channels = Mlp(width, 4 * width, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.tokens(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.channel_norm(x))


class Mixer(nnx.Module):
    """Maps patches `[B, 16, 16]` to logits `[B, 8]`."""

    def __init__(self, width: int = 32, depth: int = 2, *, rngs: nnx.Rngs):
        self.patches = nnx.Linear(PIXELS, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vit.CLASSES, rngs=rngs)

    def __call__(self, patches: Array) -> Array:
        x = self.patches(patches)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def build() -> Mixer:
    return Mixer(rngs=nnx.Rngs(0))


def loss(model: Mixer, patches: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(patches), labels).mean()


def batch(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns patches `[size, 16, 16]` (tokens, pixels) float32, and labels `[size]` int32."""
    images, labels = vit.batch(random, size)
    side = vit.IMAGE // vit.PATCH
    cut = images.reshape(size, side, vit.PATCH, side, vit.PATCH).swapaxes(2, 3)
    return cut.reshape(size, TOKENS, PIXELS), labels


if __name__ == "__main__":
    import train
    from mixer_plan import PLAN

    train.main(build, loss, batch, PLAN)
