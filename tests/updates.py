"""Updates of a model in Hugging Face format by AdamW."""

import jax
import numpy as np
from flax import nnx

import jaxtp
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import fetch, make_train_step


def shifted(labels):
    """Of the token that follows each position; transformers shifts inside."""
    return np.concatenate([labels[:, 1:], np.full((len(labels), 1), -100)], axis=1).astype(np.int32)


def updated(folder, mesh, batches, eps):
    """Returns the model after one update per batch at a constant rate, and the loss and gradient
    norm of each.

    Nothing balances experts.
    """
    settings = OptimizerConfig(learning_rate=1e-3, schedule="constant", warmup_steps=0, eps=eps)
    with jax.set_mesh(mesh):
        model = jaxtp.hf.load(folder)
    blueprint = plan_state(model.config, optimizers.build(settings, 10), mesh)
    state = blueprint.create(0)
    state["model"] = nnx.state(model)
    loop = LoopConfig(steps=len(batches), balance_loss=0, selection_bias_rate=0)
    step = make_train_step(TrainConfig(optimizer=settings, train=loop), blueprint)
    losses = []
    norms = []
    with jax.set_mesh(mesh):
        for ids in batches:
            state, output = step(state, {"inputs": ids.astype(np.int32), "labels": shifted(ids)})
            losses.append(fetch(output)["loss"])
            norms.append(fetch(output)["grad_norm"])
        nnx.update(model, state["model"])
    return model, losses, norms
