"""A check of a mixture of experts: choices are compared by themselves, numbers with the choices
of one device.
"""

from dataclasses import replace

import numpy as np
import optax
import pytest
import yaml
from support import sizes_of

from jaxtp.collectives import axis_size
from jaxtp.config.schema import validate
from jaxtp.layers.experts import router
from jaxtp.tools.check import __main__ as command
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import Subject
from jaxtp.train.config import TrainConfig
from jaxtp.train.parts import Parts

pytestmark = pytest.mark.wide

SETTINGS = """
model: {vocab_size: 32, d_model: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, head_dim: 4, d_ff: 8, num_experts: 4}
data: {sequence_length: 8, global_batch_size: 4}
optimizer: {learning_rate: 0.01, warmup_steps: 1}
train: {steps: 10, accumulation: 2}
"""  # noqa: E501
CONFIG = validate(TrainConfig, yaml.safe_load(SETTINGS), source="here")
TOLERANCE = parity.TOLERANCES["float32"]
OVER_TP = Case(sizes_of((1, 2, 2)), True)
NUM_CHOICES = 3 * 4 * 8  # updates, rows, tokens


@pytest.fixture(scope="module")
def initial():
    return parity.initial_arrays(CONFIG)


@pytest.fixture(scope="module")
def expected(initial):
    return parity.run(CONFIG, ONE_DEVICE, initial)


def test_choices_of_every_update_are_compared(initial, expected):
    actual = parity.run(CONFIG, OVER_TP, initial, audited=True, replayed=expected)
    errors = parity.compare(actual, expected)
    assert errors.within(TOLERANCE), errors
    assert errors.choices == NUM_CHOICES


def test_a_router_that_chooses_other_experts_is_found_though_all_numbers_agree(monkeypatch):
    """Whatever it chooses, the experts of one device are used."""
    named = router.checkpoint_name

    def other_choices_over_tp(array, name):
        if name == router.KEPT and axis_size("tp") > 1:
            array = array.at[:, 0].set((array[:, 0] + 1) % CONFIG.model.num_experts)
        return named(array, name)

    monkeypatch.setattr(router, "checkpoint_name", other_choices_over_tp)
    # Without the choices of one device, outputs would differ too.
    monkeypatch.setattr(command, "first_difference", lambda *_, **options: None)
    (verdict,) = command.verdicts(CONFIG, [OVER_TP])
    errors = verdict.errors
    assert max(errors.gradients.values()) < TOLERANCE.tensor
    assert errors.flips > 0
    assert errors.margin > TOLERANCE.tensor
    assert not verdict.passed
    differing = f"{errors.flips} of {NUM_CHOICES} expert choices differ"
    assert f"a router: {differing}" in verdict.first_difference
    assert differing in verdict.lines()[1]


def test_rounding_errors_that_grow_on_one_device_too_are_allowed(monkeypatch):
    tolerance = parity.Tolerance(1e-9, 1e-9)
    monkeypatch.setitem(parity.TOLERANCES, "float32", tolerance)
    (verdict,) = command.verdicts(CONFIG, [OVER_TP])
    assert not replace(verdict.errors, rounding={}).within(tolerance)
    assert verdict.passed


def with_other_choices(numbers):
    def other(update):
        return tuple((3 - experts, margin) for experts, margin in update)

    return replace(numbers, choices=tuple(map(other, numbers.choices)))


def test_with_an_optimizer_of_the_user_all_runs_use_the_given_choices(expected):
    """In 16 bits these are the choices in float32, as on the meshes."""
    given = with_other_choices(expected)
    subject = Subject(Parts(optimizer=optax.sgd(1e-2)))
    initial = parity.initial_arrays(CONFIG, subject)
    _, numbers, again = parity.on_one_device(CONFIG, initial, subject, replayed=given)
    mesh = parity.run(CONFIG, OVER_TP, initial, replayed=given, subject=subject)
    assert parity.compare(mesh, numbers, again).within(TOLERANCE)


def test_numbers_are_those_of_the_given_choices(initial, expected):
    given = with_other_choices(expected)
    replayed = parity.run(CONFIG, ONE_DEVICE, initial, replayed=given)
    assert np.array_equal(replayed.choices[0][0][0], expected.choices[0][0][0])
    assert abs(replayed.losses[0] - expected.losses[0]) > 1e-4
