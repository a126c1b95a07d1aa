"""An encoder-decoder transformer (arXiv 1706.03762) that learns to reverse a sequence of symbols.

python scripts/examples/encoder_decoder.py --mesh dp=2,fsdp=2,tp=2
"""

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array

from jaxtp import Task, Trainer
from jaxtp.plans import Colwise, PrepareInput, PrepareOutput, Replicate, Rowwise

V = 16
T = 8
D = 32  # vocabulary, length, width
PLAN = {
    # One reduction for query, key and value
    "{encoder,decoder}.*.attention": PrepareInput(Replicate(), Replicate()),
    # One reduction for keys and values of all blocks
    "encoder_norm": PrepareOutput(Replicate(), Replicate()),
    "{head,{encoder,decoder}.*.{{attention,cross}.{query,key,value},mlp.layers.0}}": Colwise(),
    "{embedding,{encoder,decoder}.*.{{attention,cross}.out,mlp.layers.2}}": Rowwise(),
}


class Block(nnx.Module):
    """Self-attention, attention to the encoder's output in a decoder's block, and MLP; pre-norm."""

    def __init__(self, decodes: bool, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(8, D, decode=False, rngs=rngs)
        self.cross = nnx.MultiHeadAttention(8, D, decode=False, rngs=rngs) if decodes else None
        self.mlp = nnx.Sequential(
            nnx.Linear(D, 4 * D, rngs=rngs), nnx.relu, nnx.Linear(4 * D, D, rngs=rngs)
        )
        self.attention_norm = nnx.LayerNorm(D, rngs=rngs)
        self.mlp_norm = nnx.LayerNorm(D, rngs=rngs)
        self.cross_norm = nnx.LayerNorm(D, rngs=rngs) if decodes else None

    def __call__(self, x: Array, memory: Array | None = None) -> Array:
        x = x + self.attention(self.attention_norm(x), is_causal=self.cross is not None)
        if self.cross is not None:
            x = x + self.cross(self.cross_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class EncoderDecoder(nnx.Module):
    def __init__(self, depth: int = 2, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(V, D, rngs=rngs)
        self.positions = nnx.Embed(T, D, rngs=rngs)
        self.encoder, self.decoder = (
            nnx.List([Block(d, rngs) for _ in range(depth)]) for d in (False, True)
        )
        self.encoder_norm = nnx.LayerNorm(D, rngs=rngs)
        self.decoder_norm = nnx.LayerNorm(D, rngs=rngs)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, source: Array, target: Array) -> Array:
        positions = self.positions(jnp.broadcast_to(jnp.arange(T), source.shape))
        x = self.embedding(source) + positions
        y = self.embedding(target) + positions
        for block in self.encoder:
            x = block(x)
        memory = self.encoder_norm(x)
        for block in self.decoder:
            y = block(y, memory)
        return self.head(self.decoder_norm(y))


def loss(model: EncoderDecoder, batch: dict[str, Array], key: Array) -> tuple[Array, int]:
    source = batch["source"]
    target = batch["source"][:, ::-1]
    before = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
    return optax.softmax_cross_entropy_with_integer_labels(
        model(source, before), target
    ).sum(), target.size


def batches(step: int) -> dict[str, np.ndarray]:
    return {"source": np.random.default_rng(step).integers(1, V, size=(64, T), dtype=np.int32)}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/encoder_decoder") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


build = EncoderDecoder
TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
