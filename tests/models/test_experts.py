"""Mixtures of experts: what evens out their load is that of one device. (Updates:
test_updates.py.)"""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_close, by_name, random_weights, sizes_of, state_on_mesh
from variants import variant

import jaxtp
from jaxtp.data.rows import SEGMENTS
from jaxtp.mesh import mesh_of
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.step import loss_and_grads

MIXTURE = jaxtp.ModelConfig(
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=4,
    d_ff=24,
    num_experts=6,
    experts_per_token=2,
    selection_bias=True,
)
# The weights make the gradient of a router that of these losses.
RUN = TrainConfig(
    model=MIXTURE,
    data=DataConfig(sequence_length=16, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10, balance_loss=300.0, router_z_loss=20.0),
)

# More experts than a batch has choices of, and as many as adafactor factors the moments of.
UNCHOSEN = variant(
    RUN,
    {
        "model": {"num_experts": 128, "d_model": 128, "d_ff": 8, "num_layers": 1, "selection_bias": False},
        "optimizer": {"name": "adafactor", "weight_decay": 0.0},
        "train": {"balance_loss": 0.0, "router_z_loss": 0.0},
    },
)
ROUTERS = {
    "softmax": ((1, 2, 1, 2), {}),
    "with a floor": ((2, 1, 2, 2), {"normalize_floor": 1e-3}),
    "sigmoid": ((1, 8, 1, 1), {"router_scores": "sigmoid", "expert_groups": 4, "groups_per_token": 2}),
}


@pytest.mark.wide
@pytest.mark.parametrize("router", ROUTERS)
def test_columns_of_a_router_that_no_token_chose_stay_as_they_are(router):
    """Adafactor divides a gradient by its size: of the rounding of a zero it made a full step,
    another on each mesh."""
    mesh, changes = ROUTERS[router]
    run = variant(UNCHOSEN, {"model": changes})
    initial = parity.initial_arrays(run)
    found = [parity.run(run, each, initial) for each in (ONE_DEVICE, Case(sizes_of(mesh), False))]
    for numbers in found:
        gradient = numbers.gradients["blocks.mlp.router"][0]
        chosen = np.unique(numbers.choices[0][0][0])
        unchosen = np.setdiff1d(np.arange(128), chosen)
        assert unchosen.size
        assert not gradient[:, unchosen].any()
    errors = parity.compare(*reversed(found))
    assert errors.within(parity.TOLERANCES["float32"]), errors


@pytest.mark.wide
def test_bfloat16_is_finite():
    precision = {"param": "bfloat16", "compute": "bfloat16"}
    more = {"router_scores": "sigmoid", "shared_experts": 9, "shared_experts_gate": True, "experts_per_token": 3}
    losses = {"balance_loss": 0.3, "router_z_loss": 0.1}
    run = variant(RUN, {"model": {"precision": precision, **more}, "train": losses})
    initial = parity.initial_arrays(run)
    numbers = parity.run(run, Case(sizes_of((1, 2, 2, 2)), True), initial, audited=True)
    expected = parity.run(run, ONE_DEVICE, initial)
    assert numbers.problems == ()
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in numbers.state.values())
    np.testing.assert_allclose(numbers.losses, expected.losses, rtol=0.05)


# What evens out the load, in the gradient of a whole step: of a layer in tests/layers, of a run in
# tests/train.
RATE = 0.125


def build(config=MIXTURE):
    return jaxtp.Decoder(config, rngs=nnx.Rngs(0))


@cache
def weights():
    return random_weights(build)


@cache
def stepped(mesh, accumulation, remat, scan_layers=True):
    """Losses and gradients, counts, the selection biases after an update and what was dropped, of a
    batch on a mesh."""
    config = dataclasses.replace(MIXTURE, remat=remat, scan_layers=scan_layers)
    run = variant(RUN, {"train": {"accumulation": accumulation}})
    on = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(lambda: build(config), weights(), on)
    (batch, *_) = random_tokens(RUN)

    @jax.jit
    def step(state, batch):
        model = nnx.merge(graph, state)
        terms, _, grads = loss_and_grads(model, batch, run, jax.random.key(0))
        model.move_selection_biases(terms.balance, RATE)
        return terms, grads, model.blocks.mlp.selection_bias[...]

    with jax.set_mesh(on):
        terms, grads, biases = step(state, {name: jnp.asarray(array) for name, array in batch.items()})
        sums = {name: np.asarray(getattr(terms.balance, name)) for name in ("balance_loss", "router_z_loss", "entropy")}
        (times,) = terms.balance.times_chosen
        return {**sums, **by_name(grads, on)}, np.asarray(times), np.asarray(biases), float(terms.balance.dropped)


@pytest.mark.wide
@pytest.mark.parametrize(
    "step",
    [
        ((1, 1, 1, 1), 8, "full"),
        ((1, 1, 1, 4), 1, "save_gathered"),
        ((1, 1, 8, 1), 1, "full"),
        ((1, 2, 1, 4), 1, "save_reduced"),
        ((2, 1, 2, 2), 2, "save_dots"),
        ((1, 2, 1, 2), 1, "full", False),
    ],
    ids=str,
)
def test_balance_is_that_of_one_device(step):
    """Losses, their gradients, counts and biases, whatever the mesh, accumulation or policy of remat is: nothing is
    counted twice because it is computed again."""
    found, times, biases, dropped = stepped(*step)
    expected, right, _, _ = stepped((1, 1, 1, 1), 1, "none")
    assert_close(found, expected)
    np.testing.assert_array_equal(times, right)
    tokens = (random_tokens(RUN)[0][SEGMENTS] != 0).sum()
    np.testing.assert_array_equal(times.sum(axis=1), [tokens * MIXTURE.experts_per_token] * MIXTURE.num_layers)
    assert dropped == 0
    if len(step) == 3:  # layers that are written out have their biases apart
        towards = np.sign(times.sum(axis=1, keepdims=True) - MIXTURE.num_experts * times)
        before = np.asarray(weights()["blocks.mlp.selection_bias"])
        np.testing.assert_array_equal(biases, before + RATE * towards.astype(np.float32))
