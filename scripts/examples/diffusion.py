"""A diffusion transformer (arXiv 2212.09748) that learns to draw the textures of a class.

    python scripts/examples/diffusion.py --mesh fsdp=2,tp=4

Times and noise of its flow matching (arXiv 2210.02747) come from the key of the loss.
"""

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jax import Array
from textures import CLASSES, SIDE, Textures

from jaxtp import Task, Trainer
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise

PATCH = (4, 4)
D = 32
PLAN = {
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),
    "blocks.*.{attention.{query,key,value},mlp.layers.0}": Colwise(),
    "blocks.*.{attention.out,mlp.layers.2}": Rowwise(),
}


class Block(nnx.Module):
    """Attention and MLP, scaled, shifted and gated by a condition `[B, D]`."""

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(8, D, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 4 * D, rngs=rngs), nnx.gelu, nnx.Linear(4 * D, D, rngs=rngs)
        )
        self.norm = nnx.LayerNorm(D, use_bias=False, use_scale=False, rngs=rngs)
        self.modulation = nnx.Linear(D, 6 * D, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, x: Array, condition: Array) -> Array:
        changes = self.modulation(nnx.silu(condition)).reshape(len(x), 2, 3, 1, D)
        for index, part in enumerate((self.attention, self.mlp)):
            scale, shift, gate = (changes[:, index, each] for each in range(3))
            x = x + gate * part(self.norm(x) * (1 + scale) + shift)
        return x


class DiffusionTransformer(nnx.Module):
    def __init__(self, depth: int = 2, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, D, PATCH, strides=PATCH, rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal((SIDE**2 // 16, D)))
        self.times = nnx.Linear(16, D, rngs=rngs)
        self.labels = nnx.Embed(CLASSES, D, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.out = nnx.ConvTranspose(D, 1, PATCH, strides=PATCH, rngs=rngs)

    def __call__(self, images: Array, times: Array, labels: Array) -> Array:
        """Returns the velocity of noisy images `[B, 16, 16, 1]` at times `[B]` from 0 to 1."""
        waves = 2.0 ** jnp.arange(8) * times[:, None]
        condition = self.times(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1)) + self.labels(
            labels
        )
        x = (cut := self.patches(images)).reshape(
            len(images), *self.positions.shape
        ) + self.positions[...]
        for block in self.blocks:
            x = block(x, condition)
        return self.out(self.norm(x).reshape(cut.shape))


def loss(model: DiffusionTransformer, batch: dict[str, Array], key: Array) -> tuple[Array, int]:
    images = batch["images"]
    for_times, for_noise = jax.random.split(key)
    at = jax.random.uniform(for_times, (len(images), 1, 1, 1))
    noise = jax.random.normal(for_noise, images.shape)
    velocity = model((1 - at) * noise + at * images, at.reshape(-1), batch["labels"])
    return optax.squared_error(velocity, images - noise).mean((1, 2, 3)).sum(), len(images)


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/diffusion") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


build = DiffusionTransformer
batches = Textures
TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
