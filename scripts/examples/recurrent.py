"""A recurrent network that classifies waveforms, split as far as it can be.

    python scripts/examples/recurrent.py --mesh fsdp=2,tp=4

The units of an LSTM can be split: a unit's four gates, and its memory c, are on one device. The
output h cannot be split: each gate of the next step reads all of h, so each step all-gathers it.
This pays off only in memory, and only for wide cells. `nnx.GRUCell` and `nnx.OptimizedLSTMCell`
stay whole: they compute all gates in one layer and slice its output, so a device would get one gate
of all units.
"""

import numpy as np
import optax
import tyro
from flax import nnx
from jax import Array

from jaxtp import Task, Trainer
from jaxtp.plans import Colwise, PrepareInput, Replicate, Rowwise, Shard

PLAN = {
    # The input x in (carry, x), for the four layers below
    "rnn.cell": PrepareInput((None, Replicate()), (None, Replicate())),
    "rnn.cell.{ii,if_,ig,io}": Colwise(),
    "rnn.cell.{hi,hf,hg,ho}": Colwise(input_layouts=Shard(-1)),  # h is split, and all-gathered
    "up": Colwise(),
    "down": Rowwise(),
}


class Recurrent(nnx.Module):
    def __init__(self, width: int = 32, *, rngs: nnx.Rngs):
        self.embedding = nnx.Linear(1, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(width, width, rngs=rngs), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, 4, rngs=rngs)

    def __call__(self, samples: Array) -> Array:
        h = self.rnn(nnx.gelu(self.embedding(samples)))
        return self.down(nnx.gelu(self.up(h[:, -1])))


def loss(model: Recurrent, batch: dict[str, Array], key: Array) -> tuple[Array, int]:
    logits = model(batch["samples"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).sum(), len(
        logits
    )


def batches(step: int, size: int = 64) -> dict[str, np.ndarray]:
    """Returns samples `[64, 16, 1]` (sine, square, triangle, sawtooth) and labels `[64]`."""
    random = np.random.default_rng(step)
    labels = random.integers(4, size=size)
    turns = (np.arange(16) / 8 + random.uniform(size=(size, 1))) % 1
    waves = [
        sine := np.sin(2 * np.pi * turns),
        np.sign(sine),
        4 * np.abs(turns - 0.5) - 1,
        2 * turns - 1,
    ]
    samples = np.stack(waves)[labels, np.arange(size)] + 0.05 * random.normal(size=turns.shape)
    return {"samples": samples[..., None], "labels": labels}


def main(mesh: str = "fsdp=2,tp=4", steps: int = 60, folder: str = "runs/recurrent") -> None:
    with Trainer(TASK, mesh=mesh, steps=steps, folder=folder) as trainer:
        trainer.run_to_end()


build = Recurrent
TASK = Task(model=build, plan=PLAN, loss=loss, batches=batches, optimizer=optax.adamw(3e-3))
if __name__ == "__main__":
    tyro.cli(main)
