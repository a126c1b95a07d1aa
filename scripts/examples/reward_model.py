"""A reward model (Bradley-Terry), which scores a text, trained on pairs with one preferred text.

    python scripts/examples/reward_model.py --mesh fsdp=2,tp=4

The score is a linear head on the decoder's hidden state of the last token. The preferred text is
the source of these examples; the rejected text is the same with a tenth of its bytes replaced.
"""

import jax
import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from own_loss import CONFIG, TEXT

import jaxtp


class RewardModel(jaxtp.Decoder):
    def __init__(self, config: jaxtp.ModelConfig = CONFIG, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.score = nnx.Linear(
            config.d_model, 1, kernel_metadata={"out_sharding": P("fsdp", None)}, rngs=rngs
        )

    def rewards(self, ids: Array) -> Array:
        sequences = self.sequences(ids)
        hidden = sequences.natural(self.hidden(ids, sequences=sequences))
        return self.score(hidden[:, -1])[:, 0]


def loss(
    model: RewardModel, batch: dict[str, Array], key: Array
) -> tuple[Array, int, dict[str, Array]]:
    margins = model.rewards(batch["chosen"]) - model.rewards(batch["rejected"])
    return (
        -jax.nn.log_sigmoid(margins).sum(),
        len(margins),
        {"accuracy": (margins > 0).sum(), "margin": margins.sum()},
    )


def batches(step: int, size: int = 32, length: int = 32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(step)
    chosen = TEXT[random.integers(len(TEXT) - length, size=(size, 1)) + np.arange(length)].astype(
        np.int32
    )
    noise = random.integers(32, 127, chosen.shape, np.int32)
    return {
        "chosen": chosen,
        "rejected": np.where(random.random(chosen.shape) < 0.1, noise, chosen),
    }


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/reward_model") -> None:
    with jaxtp.Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        for step in trainer:
            if step.index % 10 in (0, 1):
                trainer.line(f"accuracy {step.metrics['accuracy']:.2f}")


build = RewardModel
TASK = jaxtp.Task(model=build, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
