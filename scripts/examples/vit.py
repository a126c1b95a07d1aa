"""A vision transformer (arXiv 2010.11929) that classifies images from disk.

python scripts/examples/vit.py --mesh fsdp=2,tp=4
"""

import optax
import tyro
from flax import nnx
from jax import Array
from textures import CLASSES, SIDE, Textures

from jaxtp import Task, Trainer
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise

# Attention is split by heads, the MLP by hidden features; the patch convolution stays whole.
PLAN = {
    # One reduction for query, key and value
    "blocks.*.attention": PrepareInput(Replicate(), Replicate()),
    "blocks.*.{attention.{query,key,value},mlp.layers.0}": Colwise(),
    "blocks.*.{attention.out,mlp.layers.2}": Rowwise(),
}


class Block(nnx.Module):
    def __init__(self, dim: int, num_heads: int, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(num_heads, dim, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(
            nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.gelu, nnx.Linear(4 * dim, dim, rngs=rngs)
        )

    def __call__(self, x: Array) -> Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class VisionTransformer(nnx.Module):
    def __init__(
        self, dim: int = 32, num_heads: int = 8, depth: int = 2, patch: int = 4, *, rngs: nnx.Rngs
    ):
        self.patches = nnx.Conv(1, dim, (patch, patch), strides=(patch, patch), rngs=rngs)
        self.positions = nnx.Param(0.02 * rngs.params.normal(((SIDE // patch) ** 2, dim)))
        self.blocks = nnx.List([Block(dim, num_heads, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.patches(images).reshape(len(images), *self.positions.shape) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss(
    model: VisionTransformer, batch: dict[str, Array], key: Array
) -> tuple[Array, int, dict[str, Array]]:
    logits = model(batch["images"])
    labels = batch["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), len(labels), {"accuracy": (logits.argmax(-1) == labels).sum()}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/vit") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


build = VisionTransformer
batches = Textures
TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
