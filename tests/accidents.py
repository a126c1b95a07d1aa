"""What happens to a run after its sixth step, as functions for `--train.callbacks`."""

import shutil
import time

import jax
import numpy as np
from flips import with_flip

from jaxtp.checkpoint.logical import named_arrays, replace_arrays

WEIGHT = "model.blocks.mlp.down.kernel"


def after_step_6(happens):
    """Returns a callback; the checkpoint of the fifth step is complete before something happens."""

    def callback(trainer, step):
        if step.index == 6:
            while not (trainer.config.run.dir / "checkpoints/5").exists():
                time.sleep(0.01)
            happens(trainer)

    return callback


def poisoned(state, name, value=np.nan):
    """Returns a state in which the first element of an array has another value."""
    arrays = named_arrays(state)
    host = np.array(arrays[name])
    host.reshape(-1)[0] = value
    return replace_arrays(state, arrays | {name: jax.device_put(host, arrays[name].sharding)})


@after_step_6
def interrupt(trainer):
    raise KeyboardInterrupt


@after_step_6
def delete_the_run(trainer):
    shutil.rmtree(trainer.config.run.dir)


@after_step_6
def replace_the_checkpoints_by_a_file(trainer):
    folder = trainer.config.run.dir / "checkpoints"
    shutil.rmtree(folder)
    folder.write_text("")


@after_step_6
def unfinish_the_checkpoint(trainer):
    folder = trainer.config.run.dir / "checkpoints/5"
    folder.rename(f"{folder}.orbax-checkpoint-tmp")


@after_step_6
def poison_a_weight(trainer):
    trainer.metrics_of(6)  # the step is finished
    # There is no public way to change the memory of a run, which a fault of a device does.
    trainer._session.loop.state = poisoned(trainer._session.loop.state, WEIGHT)


@after_step_6
def flip_a_bit(trainer):
    """Turns over the lowest bit of a weight on the fourth device of the mesh."""
    trainer.metrics_of(6)
    trainer._session.loop.state = with_flip(trainer._session.loop.state, "model.norm.scale", 3)
