"""A check of a mixture of experts: choices are compared by themselves, numbers with the choices of one device."""

import numpy as np
import optax
import pytest
from support import sizes_of

import jaxtp
from jaxtp.collectives import axis_size
from jaxtp.layers.experts import MixtureOfExperts
from jaxtp.mesh import TP
from jaxtp.tools.check import parity
from jaxtp.tools.check.__main__ import Verdict, _remaining_cause
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import Subject
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.task import Task

pytestmark = pytest.mark.wide

MODEL = jaxtp.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=4, d_ff=8, num_experts=4
)
CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(sequence_length=8, global_batch_size=4),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10, accumulation=2),
)
TOLERANCE = parity.TOLERANCES["float32"]
OVER_TP = Case(sizes_of((1, 2, 2)), True)
NUM_CHOICES = 3 * 4 * 8  # updates, rows, tokens


@pytest.fixture(scope="module")
def expected():
    initial = parity.initial_arrays(CONFIG)
    return initial, parity.run(CONFIG, ONE_DEVICE, initial)


def test_choices_of_every_update_are_compared(expected):
    initial, one = expected
    errors = parity.compare(parity.run(CONFIG, OVER_TP, initial, audited=True, replayed=one), one)
    assert errors.within(TOLERANCE), errors
    assert errors.choices == NUM_CHOICES


def test_a_router_that_chooses_otherwise_is_found_where_all_numbers_agree(expected, monkeypatch):
    """Whatever it chooses, the experts of one device are used."""
    initial, one = expected
    route = MixtureOfExperts._route

    def reversed_over_tp(self, sequence, record, x, weights, *others):
        experts, shares, routing = route(self, sequence, record, x, weights, *others)
        if axis_size(TP) > 1:
            chosen = routing.experts.at[:, 0].set((routing.experts[:, 0] + 1) % self.config.num_experts)
            routing = type(routing)(**{**vars(routing), "experts": chosen})
        return experts, shares, routing

    monkeypatch.setattr(MixtureOfExperts, "_route", reversed_over_tp)
    errors = parity.compare(parity.run(CONFIG, OVER_TP, initial, replayed=one), one)
    assert max(errors.gradients.values()) < TOLERANCE.tensor
    assert errors.flips > 0
    assert errors.margin > TOLERANCE.tensor
    assert not errors.within(TOLERANCE)
    assert _remaining_cause(errors, TOLERANCE).startswith(
        f"a router: {errors.flips} of {NUM_CHOICES} expert choices differ"
    )
    said = Verdict(OVER_TP, "float32", TOLERANCE, errors, ()).lines()
    assert f"{errors.flips} of {NUM_CHOICES} expert choices differ" in said[1]


def with_other_choices(one):
    others = [[(3 - experts, margin) for experts, margin in update] for update in one.choices]
    return parity.Numbers(one.losses, one.grad_norms, one.gradients, one.state, choices=tuple(map(tuple, others)))


def test_with_an_optimizer_of_the_users_all_runs_have_the_choices_that_are_given(expected):
    """In 16 bits these are the choices in float32, as on the meshes."""
    given, subject = with_other_choices(expected[1]), Subject(Task(optimizer=optax.sgd(1e-2)))
    initial = parity.initial_arrays(CONFIG, subject)
    _, numbers, again = parity.on_one_device(CONFIG, initial, subject, replayed=given)
    mesh = parity.run(CONFIG, OVER_TP, initial, replayed=given, subject=subject)
    assert parity.compare(mesh, numbers, again).within(TOLERANCE)


def test_numbers_are_those_of_the_choices_that_are_given(expected):
    initial, one = expected
    given = with_other_choices(one)
    replayed = parity.run(CONFIG, ONE_DEVICE, initial, replayed=given)
    assert np.array_equal(replayed.choices[0][0][0], one.choices[0][0][0])
    assert abs(replayed.losses[0] - one.losses[0]) > 1e-4
