"""Llama 3 of Tunix, a public collection of Flax NNX models, with a loss and batches of one's own.

    pip install google-tunix
    python scripts/examples/public_model.py --mesh fsdp=2,tp=2

The model declares its PartitionSpecs, whose axes have the same names, so the plan is empty.
"""

import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array
from own_loss import TEXT
from tunix.models.llama3.model import Llama3, ModelConfig

from jaxtp import Task, Trainer

SIZES = {
    "num_layers": 2,
    "vocab_size": 256,
    "embed_dim": 64,
    "hidden_dim": 128,
    "num_heads": 4,
    "num_kv_heads": 4,
}
CONFIG = ModelConfig(**SIZES, head_dim=16, rope_theta=500_000, norm_eps=1e-5)
PLAN: dict[str, object] = {}


def build(rngs: nnx.Rngs) -> Llama3:
    return Llama3(CONFIG, rngs=rngs)


def loss(model: Llama3, batch: dict[str, Array], key: Array) -> tuple[Array, int]:
    inputs = batch["tokens"][:, :-1]
    labels = batch["tokens"][:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
    causal = nnx.make_causal_mask(inputs)[:, 0]
    logits, _ = model(inputs, positions, None, causal)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum(), labels.size


def batches(step: int, size: int = 16, length: int = 64) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(step).integers(len(TEXT) - length, size=(size, 1))
    return {"tokens": TEXT[starts + np.arange(length + 1)].astype(np.int32)}


def main(mesh: str = "fsdp=2,tp=2", steps: int = 60, folder: str = "runs/public_model") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches)
if __name__ == "__main__":
    tyro.cli(main)
