"""Mixtures of experts: what evens out their load is that of one device. (Updates:
test_updates.py.)"""

from dataclasses import replace
from functools import cache

import jax
import numpy as np
from flax import nnx
from numpy.testing import assert_array_equal
from support import (
    assert_close,
    by_name,
    new_decoder,
    random_weights,
    sizes_of,
    state_on_mesh,
    swept,
)
from tables import read_table
from variants import variant

from jaxtp.data.rows import SEGMENTS
from jaxtp.mesh import mesh_of
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train.config import TrainConfig
from jaxtp.train.parts import step_settings
from jaxtp.train.step import loss_and_grads

TABLE = read_table(__file__)
RUN = variant(TrainConfig(), TABLE["run"])
MIXTURE = RUN.model
UNCHOSEN = variant(RUN, TABLE["unchosen"])
ROUTERS = TABLE["routers"]


@swept("router", ROUTERS)
def test_columns_of_a_router_that_no_token_chose_stay_as_they_are(router):
    """Adafactor divides a gradient by its size: of the rounding of a zero it made a full step,
    another on each mesh."""
    run = variant(UNCHOSEN, {"model": ROUTERS[router]["model"]})
    initial = parity.initial_arrays(run)
    cases = ONE_DEVICE, Case(sizes_of(ROUTERS[router]["mesh"]), False)
    found = [parity.run(run, case, initial) for case in cases]
    for numbers in found:
        gradient = numbers.gradients["blocks.mlp.router"][0]
        chosen = np.unique(numbers.choices[0][0][0])
        unchosen = np.setdiff1d(np.arange(128), chosen)
        assert unchosen.size
        assert not gradient[:, unchosen].any()
    errors = parity.compare(*reversed(found))
    assert errors.within(parity.TOLERANCES["float32"]), errors


# What evens out the load, in the gradient of a whole step: of a layer in tests/layers, of a run in
# tests/train.
RATE = 0.125


def build(config=MIXTURE):
    return new_decoder(config)


@cache
def weights():
    return random_weights(build)


@cache
def stepped(mesh, accumulation, remat, scan_layers=True):
    """Losses and gradients, counts, the selection biases after an update and what was dropped, of a
    batch on a mesh."""
    config = replace(MIXTURE, remat=remat, scan_layers=scan_layers)
    run = variant(RUN, {"train": {"accumulation": accumulation}})
    on = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(lambda: build(config), weights(), on)
    batch, *_ = random_tokens(RUN)

    @jax.jit
    def step(state, batch):
        model = nnx.merge(graph, state)
        terms, _, grads = loss_and_grads(model, batch, step_settings(run), jax.random.key(0))
        model.move_selection_biases(terms.balance, RATE)
        return terms, grads, model.blocks.mlp.selection_bias[...]

    with jax.set_mesh(on):
        terms, grads, biases = step(state, batch)
        sums = dict(vars(terms.balance))
        (times,) = sums.pop("times_chosen")
        dropped = float(sums.pop("dropped"))
        return sums | by_name(grads, on), np.asarray(times), np.asarray(biases), dropped


@swept("name", TABLE["steps"])
def test_balance_is_that_of_one_device(name):
    """Losses, their gradients, counts and biases, whatever the mesh, accumulation or policy of
    remat is: nothing is counted twice because it is computed again.
    """
    mesh, *options = TABLE["steps"][name]
    found, times, biases, dropped = stepped(tuple(mesh), *options)
    expected, right, _, _ = stepped((1, 1, 1, 1), 1, "none")
    assert_close(found, expected)
    assert_array_equal(times, right)
    tokens = (random_tokens(RUN)[0][SEGMENTS] != 0).sum()
    assert_array_equal(times.sum(axis=1), [tokens * MIXTURE.experts_per_token] * MIXTURE.num_layers)
    assert dropped == 0
    if name != "written out":  # whose layers have their biases apart
        towards = np.sign(times.sum(axis=1, keepdims=True) - MIXTURE.num_experts * times)
        before = np.asarray(weights()["blocks.mlp.selection_bias"])
        assert_array_equal(biases, before + RATE * towards.astype(np.float32))
