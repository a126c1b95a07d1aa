"""A small network of a user's own: its loss, batches, optimizer and plan, and runs of it."""

import jax
import numpy as np
import optax
from flax import nnx
from numpy.random import default_rng

import jaxtp
from jaxtp.plans import Colwise, Rowwise

ROWS = 32
FILE = __file__


class Net(nnx.Module):
    def __init__(self, width=32, *, rngs):
        self.up = nnx.Linear(16, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


class Normalised(Net):
    """Has statistics, which a call of the model changes."""

    def __init__(self, width=32, *, rngs):
        super().__init__(width, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.norm(x))


PLAN = {"up": Colwise(), "down": Rowwise()}
optimizer = optax.sgd(0.1)


def losses_of(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def loss(model, batch, key):
    """Returns also `noise`, which depends on the key of the step."""
    losses = losses_of(model, batch)
    return losses.sum(), losses.size, {"noise": jax.random.normal(key, losses.shape).sum()}


def batches(step):
    random = default_rng(step)
    y = random.integers(0, 10, ROWS)
    return {"x": np.eye(10, 16)[y] + 0.3 * random.normal(size=(ROWS, 16)), "y": y}


def trainer_of(folder, mesh="dp=1", steps=3, settings=None, **parts):
    """Returns a trainer of the network; `parts` replace those of its task."""
    own = {"model": Net, "loss": loss, "batches": batches, "optimizer": optimizer}
    return jaxtp.Trainer(
        **own | parts, mesh=mesh, folder=folder, steps=steps, settings=settings or {}
    )


def train(*arguments, **named):
    """Returns loss and noise of each step, and the arrays of the trained model by path."""
    with trainer_of(*arguments, **named) as trainer:
        found = [step.metrics for step in trainer]
        state = nnx.state(trainer.model, nnx.Not(nnx.RngState))
    variables = [
        (path, each) for path, each in nnx.to_flat_state(state) if isinstance(each, nnx.Variable)
    ]
    numbers = [[each["loss"], each.get("noise", 0.0)] for each in found]
    return numbers, {path: np.asarray(each[...]) for path, each in variables}


def checkpoints_in(folder):
    """Returns the steps of a run's checkpoints."""
    return sorted(int(each.name) for each in folder.glob("checkpoints/*"))
