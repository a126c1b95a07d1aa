"""A recurrent classifier, written for one device, without a mesh.

    python scripts/examples/recurrent.py --mesh fsdp=2,tp=4

It classifies four waveforms. The plan, in `recurrent_plan.py`, explains which parts of a recurrent model can be split.
The training loop is in `train.py`.
"""

import numpy as np
import optax
from flax import nnx
from jax import Array

STEPS, CLASSES = 16, 4


class Recurrent(nnx.Module):
    """Maps samples `[B, T, 1]` to logits `[B, 4]` with an LSTM, and an MLP on its last output."""

    def __init__(self, width: int = 32, *, rngs: nnx.Rngs):
        self.embedding = nnx.Linear(1, width, rngs=rngs)
        self.rnn = nnx.RNN(nnx.LSTMCell(width, width, rngs=rngs), rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, CLASSES, rngs=rngs)

    def __call__(self, samples: Array) -> Array:
        h = self.rnn(nnx.gelu(self.embedding(samples)))
        return self.down(nnx.gelu(self.up(h[:, -1])))


def build() -> Recurrent:
    return Recurrent(rngs=nnx.Rngs(0))


def loss(model: Recurrent, samples: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(samples), labels).mean()


def batch(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns samples `[size, 16, 1]` float32, labels `[size]` int32: sine, square, triangle or sawtooth waves."""
    labels = random.integers(CLASSES, size=size, dtype=np.int32)
    turns = (np.arange(STEPS) / 8 + random.uniform(size=(size, 1))) % 1
    sine = np.sin(2 * np.pi * turns)
    forms = np.stack([sine, np.sign(sine), 4 * np.abs(turns - 0.5) - 1, 2 * turns - 1])
    samples = forms[labels, np.arange(size)] + 0.05 * random.normal(size=turns.shape)
    return samples[..., None].astype(np.float32), labels


if __name__ == "__main__":
    import train
    from recurrent_plan import PLAN

    train.main(build, loss, batch, PLAN)
