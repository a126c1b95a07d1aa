"""jaxtp's decoder with a loss of one's own: label smoothing, and a head for the token after next.

    python scripts/examples/own_loss.py --mesh fsdp=2,tp=4

The additional head is as in arXiv 2404.19737. The text is the source of these examples, in bytes.
"""

from pathlib import Path

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array

import jaxtp

CONFIG = jaxtp.ModelConfig(
    vocab_size=256, d_model=64, num_layers=2, num_heads=4, num_kv_heads=4, head_dim=16, d_ff=128
)
TEXT = np.frombuffer(
    b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py"))), np.uint8
)


class TwoTokens(jaxtp.Decoder):
    def __init__(self, config: jaxtp.ModelConfig = CONFIG, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.second = nnx.Linear(config.d_model, config.vocab_size, rngs=rngs)


def loss(
    model: TwoTokens, batch: dict[str, Array], key: Array
) -> tuple[Array, int, dict[str, Array]]:
    tokens = batch["tokens"]
    hidden = model.hidden(tokens[:, :-2])
    first = smoothed(model.logits_of_hidden(hidden), tokens[:, 1:-1])
    second = smoothed(model.second(hidden), tokens[:, 2:])
    return first + 0.3 * second, tokens[:, 2:].size, {"first": first, "second": second}


def smoothed(logits: Array, labels: Array, amount: float = 0.1) -> Array:
    targets = optax.smooth_labels(jax.nn.one_hot(labels, logits.shape[-1]), amount)
    return optax.softmax_cross_entropy(logits, targets).sum()


def batches(step: int, size: int = 16, length: int = 64) -> dict[str, np.ndarray]:
    starts = np.random.default_rng(step).integers(len(TEXT) - length - 1, size=(size, 1))
    return {"tokens": TEXT[starts + np.arange(length + 2)].astype(np.int32)}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/own_loss") -> None:
    with jaxtp.Trainer(
        model=build,
        loss=loss,
        batches=batches,
        mesh=mesh,
        steps=steps,
        folder=folder,
    ) as trainer:
        trainer.run_to_end()


build = TwoTokens
if __name__ == "__main__":
    tyro.cli(main)
