"""An MLP-mixer (arXiv 2105.01601) that classifies images from disk.

python scripts/examples/mixer.py --mesh tp=8
"""

import optax
import tyro
from flax import nnx
from jax import Array
from textures import CLASSES, SIDE, Textures

from jaxtp import Task, Trainer
from jaxtp.plans import Colwise, Rowwise

PATCH = 4
TOKENS = (SIDE // 4) ** 2
PLAN = {  # both MLPs are split by hidden features; the token-mixing MLP reads the transposed array
    "blocks.*.{tokens,channels}.layers.0": Colwise(),
    "blocks.*.{tokens,channels}.layers.2": Rowwise(),
}


def mlp(dim: int, hidden: int, rngs: nnx.Rngs) -> nnx.Sequential:
    return nnx.Sequential(
        nnx.Linear(dim, hidden, rngs=rngs), nnx.gelu, nnx.Linear(hidden, dim, rngs=rngs)
    )


class Block(nnx.Module):
    def __init__(self, dim: int, rngs: nnx.Rngs):
        self.token_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.channel_norm = nnx.LayerNorm(dim, rngs=rngs)
        self.tokens = mlp(TOKENS, 2 * TOKENS, rngs)
        self.channels = mlp(dim, 4 * dim, rngs)

    def __call__(self, x: Array) -> Array:
        x = x + self.tokens(self.token_norm(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.channel_norm(x))


class Mixer(nnx.Module):
    def __init__(self, dim: int = 32, depth: int = 2, *, rngs: nnx.Rngs):
        self.patches = nnx.Conv(1, dim, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        self.blocks = nnx.List([Block(dim, rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(dim, rngs=rngs)
        self.head = nnx.Linear(dim, CLASSES, rngs=rngs)

    def __call__(self, images: Array) -> Array:
        x = self.patches(images).reshape(len(images), TOKENS, -1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def loss(model: Mixer, batch: dict[str, Array], key: Array) -> tuple[Array, int, dict[str, Array]]:
    logits = model(batch["images"])
    labels = batch["labels"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.sum(), len(labels), {"accuracy": (logits.argmax(-1) == labels).sum()}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/mixer") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


build = Mixer
batches = Textures
TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
