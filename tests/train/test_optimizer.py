"""Rules, schedules and groups: against Optax's own and against one device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.random import default_rng
from numpy.testing import assert_allclose
from support import assert_close, swept
from tables import read_table
from variants import small_model, variant

from jaxtp import Precision, make_mesh
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, GroupConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.parts import Parts
from jaxtp.train.setup import Plan
from jaxtp.train.validation import violations_on

TABLES = read_table(__file__)
SMALL = small_model(num_heads=8, head_dim=12, rope_theta=2.0)
# from 128 on, adafactor factors
WIDE = replace(SMALL, d_model=128, head_dim=16, d_ff=128)
GROUPS = {
    "blocks.mlp*": GroupConfig(learning_rate_scale=0.5),
    "*.scale": GroupConfig(weight_decay=0.3),
}
RULES = {
    "lion": (SMALL, {"name": "lion", "groups": GROUPS}),
    "adafactor": (WIDE, {"name": "adafactor"}),
}
"""The default rule is in tests/tools/check, and muon in test_muon.py."""


def config_of(rule):
    model, settings = RULES[rule]
    return TrainConfig(
        model=model,
        data=DataConfig(sequence_length=8, global_batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, **settings),
        train=LoopConfig(steps=10),
    )


@swept("rule", RULES)
def test_every_rule_moves_every_parameter_as_on_one_device(rule):
    config = config_of(rule)
    initial = parity.initial_arrays(config)
    expected = parity.run(config, ONE_DEVICE, initial)
    actual = parity.run(config, Case(mesh_shape(dp=2, fsdp=2, tp=2), True), initial)
    errors = parity.compare(actual, expected)
    assert errors.within(parity.TOLERANCES["float32"]), errors
    moved = {
        name: parity.relative_error(expected.state[name], array) for name, array in initial.items()
    }
    assert not [
        name for name, change in moved.items() if name.startswith("model.") and change < 1e-3
    ]


SHAPES = {"blocks.up.kernel": (2, 6, 4), "blocks.norm.scale": (2, 6), "head.kernel": (8, 6)}


def arrays():
    random = default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def updated(rule, params, gradients, updates=1):
    """Returns the last of some updates, and the parameters after them."""

    @jax.jit
    def run(params):
        state = rule.init(params)
        for _ in range(updates):
            changes, state = rule.update(gradients, state, params)
            params = optax.apply_updates(params, changes)
        return changes, params

    return run(params)


def test_lion_is_optax_s_own():
    config = OptimizerConfig(name="lion", learning_rate=1e-2, warmup_steps=0, clip_norm=1e9)
    mask = {path: optimizers.is_matrix(path) for path in SHAPES}
    theirs = optax.lion(
        optimizers.learning_rate(config, 10), 0.9, 0.95, weight_decay=0.1, mask=mask
    )
    before = arrays()
    gradients = jax.tree.map(np.cos, before)
    _, expected = updated(theirs, before, gradients, 3)
    _, found = updated(optimizers.build(config, 10), before, gradients, 3)
    assert_close(found, expected, 1e-6)


def stored(config, steps=10):
    """Shape and dtype of each array of the optimizer's state, by where a checkpoint has it."""
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    state = jax.eval_shape(optimizers.build(config, steps).init, params)
    return {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_the_rule_alone_decides_what_a_checkpoint_holds(name):
    """Any other setting may change when a run resumes: a weight decay may become that of a
    group, say.
    """
    settings = {setting for changes in TABLES["other_values"] for setting in changes}
    assert settings | {"name", "build", "first_moment"} == set(vars(OptimizerConfig()))
    grouped = OptimizerConfig(name=name, groups={"*.scale": GroupConfig(weight_decay=0.3)})
    expected = stored(grouped)
    for changes in TABLES["other_values"]:
        assert stored(variant(grouped, changes)) == expected, changes
    assert stored(grouped, steps=1) == expected
    smaller = stored(replace(grouped, first_moment="bfloat16"))
    assert smaller.keys() == expected.keys()
    changed = {path for path, array in expected.items() if smaller[path] != array}
    assert changed == {path for path in expected if ".mu" in path}


BFLOAT16 = replace(SMALL, precision=Precision(param="bfloat16"))


def test_moments_that_would_never_forget_are_refused():
    """In bfloat16 0.999 of a moment is the moment."""

    def problems(name, model, **betas):
        optimizer = OptimizerConfig(name=name, warmup_steps=1, **betas)
        config = replace(config_of("lion"), model=model, optimizer=optimizer)
        return list(violations_on(config, mesh_shape()))

    (problem,) = problems("adamw", BFLOAT16, beta2=0.999)
    assert "at most 0.9921875, or model.precision.param=float32" in problem
    assert len(problems("muon", BFLOAT16, beta1=0.995, beta2=0.995)) == 2
    assert not problems("adamw", BFLOAT16, beta2=0.9921875)
    assert not problems("adafactor", BFLOAT16, beta2=0.999)
    (problem,) = problems("adamw", SMALL, beta2=0.99999999)
    assert problem.endswith("at most 0.9999998807907104")


def test_a_moment_without_gradient_shrinks():
    """With the largest beta that is allowed in bfloat16."""
    rule = optimizers.build(OptimizerConfig(beta2=0.9921875, clip_norm=1e9), 10)
    params = {"head.kernel": jnp.ones(1, jnp.bfloat16)}

    def update(state, gradient):
        _, state = rule.update({"head.kernel": gradient}, state, params)
        return state, state[1].nu["head.kernel"][0]

    gradients = np.zeros((200, 1), jnp.bfloat16)
    gradients[0] = 1
    _, moments = jax.jit(lambda: jax.lax.scan(update, rule.init(params), gradients))()
    assert np.all(np.diff(np.asarray(moments, np.float32)) < 0)


def test_adafactor_keeps_its_moments_in_float32():
    """They are small, and after a thousand steps it changes them by less than a bfloat16's last
    digit.
    """
    params = {
        "blocks.up.kernel": jnp.ones((128, 128), jnp.bfloat16),
        "norm.scale": jnp.ones(128, jnp.bfloat16),
    }
    rule = optimizers.build(OptimizerConfig(name="adafactor"), 10)
    state = jax.eval_shape(rule.init, params)
    _, after = jax.eval_shape(rule.update, params, state, params)
    for moments in (state[1], after[1]):
        assert {array.dtype for array in jax.tree.leaves((moments.v_row, moments.v))} == {
            jnp.dtype("float32")
        }


def test_muon_orthogonalises_each_layer_s_matrix():
    config = OptimizerConfig(
        name="muon", learning_rate=1.0, warmup_steps=0, weight_decay=0, schedule="constant"
    )
    before = arrays()
    changes, _ = updated(optimizers.build(config, 10), before, jax.tree.map(np.cos, before))
    for layer in changes["blocks.up.kernel"]:
        singular = np.linalg.svd(layer / (0.2 * 6**0.5), compute_uv=False)
        assert np.all((singular > 0.5) & (singular < 1.5)), singular  # Newton-Schulz's own accuracy
    assert_allclose(np.abs(changes["head.kernel"]), 1, rtol=1e-3)  # Adam's first step


GROUPED = {  # how many times as much the head moves, and whether scales move as before
    "frozen": (
        {"head.*": GroupConfig(learning_rate_scale=0.0), "*.kernel": GroupConfig()},
        0,
        True,
    ),
    "half": ({"*.kernel": GroupConfig(learning_rate_scale=0.5)}, 0.5, True),
    "decayed": ({"*.scale": GroupConfig(weight_decay=0.1)}, 1, False),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_change_rate_and_decay_of_their_parameters_alone(name):
    groups, share, scales_stay = GROUPED[name]
    base = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    rules = [optimizers.build(replace(base, groups=each), 10) for each in ({}, groups)]
    before = arrays()
    plain, changed = (updated(rule, before, before)[0] for rule in rules)
    assert_allclose(changed["head.kernel"], share * plain["head.kernel"], rtol=1e-6)
    scales = [changes["blocks.norm.scale"] for changes in (plain, changed)]
    assert np.allclose(*scales, rtol=1e-6) == scales_stay


def test_a_group_of_frozen_parameters_is_refused():
    groups = {"embedding.*": GroupConfig(weight_decay=0.0)}
    config = replace(config_of("lion"), optimizer=OptimizerConfig(groups=groups))
    adapted = replace(SMALL, lora=LoraConfig(rank=2))
    plan = Plan(config=config, parts=Parts(), shapes={})
    plan.state_on(make_mesh())
    with pytest.raises(ConfigError, match=r"'embedding.\*' matches no trained parameter"):
        Plan(config=replace(config, model=adapted), parts=Parts(), shapes={}).state_on(make_mesh())


def rates(steps, at, **settings):
    config = OptimizerConfig(learning_rate=1.0, final_fraction=0.1, **settings)
    return np.asarray(jax.jit(jax.vmap(optimizers.learning_rate(config, steps)))(np.array(at)))


@pytest.mark.parametrize("schedule", TABLES["schedules"])
def test_a_schedule_warms_up_and_decays(schedule):
    expected = TABLES["schedules"][schedule]
    found = rates(10, list(expected), warmup_steps=2, schedule=schedule)
    assert_allclose(found, list(expected.values()), atol=1e-6)
    assert rates(10, [0], warmup_steps=0, schedule=schedule) == 1
    found = rates(5, np.arange(5), warmup_steps=20, schedule=schedule)
    assert_allclose(
        found, np.arange(5) / 5, atol=1e-6, err_msg="a longer warm-up is cut to the run"
    )


def test_a_decay_longer_than_what_follows_the_warm_up_starts_there():
    found = rates(10, [4, 7, 10], warmup_steps=4, schedule="wsd", decay_fraction=1.0)
    assert_allclose(found, [1, 0.55, 0.1], atol=1e-6)
