"""Rules, schedules and groups: against Optax's own and against one device."""

import dataclasses
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import sizes_of

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.config.schema import ConfigError
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_shape
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.train import optimizer as optimizers
from jaxtp.train.__main__ import COMMAND as TRAIN
from jaxtp.train.config import DataConfig, GroupConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.setup import plan
from jaxtp.train.state import parameters, plan_state
from jaxtp.train.validation import violations_on

SMALL = jaxtp.ModelConfig(
    vocab_size=61, d_model=16, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=12, d_ff=24, rope_theta=2.0
)
WIDE = dataclasses.replace(SMALL, d_model=128, head_dim=16, d_ff=128)  # from 128 on, adafactor factors
GROUPS = {"blocks.mlp*": GroupConfig(learning_rate_scale=0.5), "*.scale": GroupConfig(weight_decay=0.3)}
RULES = {
    "lion": (SMALL, {"name": "lion", "groups": GROUPS}),
    "adafactor": (WIDE, {"name": "adafactor"}),
    "muon": (SMALL, {"name": "muon", "groups": GROUPS}),
}


def config_of(rule):
    model, settings = RULES[rule]
    return TrainConfig(
        model=model,
        data=DataConfig(sequence_length=8, global_batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, **settings),
        train=LoopConfig(steps=10),
    )


@pytest.fixture(scope="module")
def one_device(request):
    config = config_of(request.param)
    initial = parity.initial_arrays(config)
    return config, initial, parity.run(config, ONE_DEVICE, initial)


MESHES = [(2, 2, 2), (1, 1, 8)]


@pytest.mark.wide
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("one_device", RULES, indirect=True)
def test_every_rule_equals_one_device(one_device, mesh):
    config, initial, expected = one_device
    errors = parity.compare(parity.run(config, Case(sizes_of(mesh), True), initial), expected)
    assert errors.within(parity.TOLERANCES["float32"]), errors


@pytest.mark.wide
@pytest.mark.parametrize("one_device", RULES, indirect=True)
def test_every_rule_moves_every_parameter(one_device):
    _, initial, numbers = one_device
    for name, array in initial.items():
        if name.startswith("model."):
            assert parity.relative_error(numbers.state[name], array) > 1e-3, name


def test_factored_moments_are_split_like_their_parameter():
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    blueprint = plan_state(WIDE, optimizers.build(config_of("adafactor").optimizer, 10), mesh)
    state = named_variables(blueprint.abstract)
    moments = {name.split(".v_")[1]: v for name, v in state.items() if "mlp.down" in name and ".v_" in name}
    assert moments["row.blocks.mlp.down.kernel"].get_metadata()["out_sharding"] in {
        jax.sharding.PartitionSpec(None, "tp"),
        jax.sharding.PartitionSpec(None, ("fsdp", "cp")),
    }
    assert moments["row.blocks.mlp.down.kernel"].shape == (2, 128)


def arrays():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"blocks.up.kernel": (2, 6, 4), "blocks.norm.scale": (2, 6), "head.kernel": (8, 6)}
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def three_updates(transformation):
    params, gradients = arrays(), jax.tree.map(jnp.cos, arrays())

    @jax.jit
    def updated(params, state):
        updates, state = transformation.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(transformation.init)(params)
    for _ in range(3):
        params, state = updated(params, state)
    return params


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw", lambda rate, mask: optax.adamw(rate, 0.9, 0.95, eps=1e-8, weight_decay=0.1, mask=mask)),
        ("lion", lambda rate, mask: optax.lion(rate, 0.9, 0.95, weight_decay=0.1, mask=mask)),
    ],
)
def test_rule_is_optax_s_own(name, theirs):
    config = OptimizerConfig(name=name, learning_rate=1e-2, warmup_steps=0, clip_norm=1e9)
    mask = {path: optimizers.is_matrix(path) for path in arrays()}
    rules = (theirs(optimizers.learning_rate(config, 10), mask), optimizers.build(config, 10))
    expected, actual = jax.jit(lambda: [three_updates(rule) for rule in rules])()
    for path, array in expected.items():
        np.testing.assert_allclose(actual[path], array, rtol=1e-6)


def stored(config, steps=10):
    """Shape and dtype of each array of the optimizer's state, by where a checkpoint has it."""
    state = jax.eval_shape(optimizers.build(config, steps).init, arrays())
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}


OTHER_VALUES = {
    "schedule": ("linear", "constant", "wsd"),
    "decay_fraction": (1.0,),
    "groups": (
        {"*.scale": GroupConfig(weight_decay=0.3)},
        {"*.scale": GroupConfig(weight_decay=0.1), "*": GroupConfig(weight_decay=0.0, learning_rate_scale=0.0)},
    ),
    "learning_rate": (1.0,),
    "warmup_steps": (0, 1),
    "final_fraction": (0.0, 1.0),
    "beta1": (0.0, 0.5),
    "beta2": (0.0, 0.5),
    "eps": (1e-3,),
    "weight_decay": (0.0, 0.3),
    "clip_norm": (1e9,),
}


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "muon"])
def test_the_rule_alone_decides_what_a_checkpoint_holds(name):
    """Any other setting may change when a run resumes: a weight decay may become that of a group, say."""
    assert OTHER_VALUES.keys() | {"name", "build", "first_moment"} == {
        field.name for field in dataclasses.fields(OptimizerConfig)
    }
    grouped = OptimizerConfig(name=name, groups={"*.scale": GroupConfig(weight_decay=0.3)})
    expected = stored(grouped)
    assert expected
    for setting, values in OTHER_VALUES.items():
        for value in values:
            assert stored(dataclasses.replace(grouped, **{setting: value})) == expected, (setting, value)
    assert stored(grouped, steps=1) == expected
    smaller = stored(dataclasses.replace(grouped, first_moment="bfloat16"))
    assert smaller.keys() == expected.keys()
    changed = {path for path, array in expected.items() if smaller[path] != array}
    assert changed == {path for path in expected if ".mu" in path}


BFLOAT16 = dataclasses.replace(SMALL, precision=jaxtp.Precision(param="bfloat16"))


def test_moments_that_would_never_forget_are_refused():
    """In bfloat16 0.999 of a moment is the moment."""

    def problems(name, model, **betas):
        optimizer = OptimizerConfig(name=name, warmup_steps=1, **betas)
        config = dataclasses.replace(config_of("lion"), model=model, optimizer=optimizer)
        return list(violations_on(config, mesh_shape()))

    (problem,) = problems("adamw", BFLOAT16, beta2=0.999)
    assert "optimizer.beta2=0.999" in problem
    assert "at most 0.9921875, or model.precision.param=float32" in problem
    assert len(problems("muon", BFLOAT16, beta1=0.995, beta2=0.995)) == 2
    assert not problems("adamw", BFLOAT16, beta2=0.9921875)
    assert not problems("adamw", SMALL, beta2=0.9999)
    (problem,) = problems("adamw", SMALL, beta2=0.99999999)
    assert problem.endswith("at most 0.9999998807907104")
    assert not problems("adafactor", BFLOAT16, beta2=0.999)


@pytest.mark.parametrize("beta", [0.9, 0.95, 0.9921875])
def test_a_moment_without_gradient_shrinks(beta):
    rule = optimizers.build(OptimizerConfig(beta2=beta, clip_norm=1e9), 10)
    params = {"head.kernel": jnp.ones(1, jnp.bfloat16)}
    moments = []
    update = jax.jit(rule.update)
    state = rule.init(params)
    for gradient in (1.0, *[0.0] * 200):
        _, state = update({"head.kernel": jnp.full(1, gradient, jnp.bfloat16)}, state, params)
        moments.append(float(state[1].nu["head.kernel"][0]))
    assert all(later < earlier for earlier, later in pairwise(moments))


def test_an_epsilon_that_is_zero_in_float32_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.eps"):
        TRAIN.load(["--optimizer.eps", "1e-46"])


def test_adafactor_keeps_its_moments_in_float32():
    """They are small, and after a thousand steps it changes them by less than a bfloat16's last digit."""
    params = {"blocks.up.kernel": jnp.ones((128, 128), jnp.bfloat16), "norm.scale": jnp.ones(128, jnp.bfloat16)}
    rule = optimizers.build(OptimizerConfig(name="adafactor"), 10)
    state, after = jax.jit(lambda params: (state := rule.init(params), rule.update(params, state, params)[1]))(params)
    for moments in (state[1], after[1]):
        assert {array.dtype for array in jax.tree.leaves((moments.v_row, moments.v))} == {jnp.dtype("float32")}
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)


def test_muon_orthogonalises_each_layer_s_matrix():
    config = OptimizerConfig(name="muon", learning_rate=1.0, warmup_steps=0, weight_decay=0, schedule="constant")
    params, gradients = arrays(), jax.tree.map(jnp.cos, arrays())
    transformation = optimizers.build(config, 10)
    updated = jax.jit(lambda gradients, params: transformation.update(gradients, transformation.init(params), params))
    updates, _ = updated(gradients, params)
    for layer in updates["blocks.up.kernel"]:
        singular = np.linalg.svd(layer / (0.2 * 6**0.5), compute_uv=False)
        assert np.all((singular > 0.5) & (singular < 1.5)), singular  # Newton-Schulz's own accuracy
    np.testing.assert_allclose(np.abs(updates["head.kernel"]), 1, rtol=1e-3)  # Adam's first step


def test_groups():
    base = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
    frozen = dataclasses.replace(
        base, groups={"head.*": GroupConfig(learning_rate_scale=0.0), "*.kernel": GroupConfig()}
    )
    half = dataclasses.replace(base, groups={"*.kernel": GroupConfig(learning_rate_scale=0.5)})
    decayed = dataclasses.replace(base, groups={"*.scale": GroupConfig(weight_decay=0.1)})
    before, plain = arrays(), three_updates(optimizers.build(base, 10))
    np.testing.assert_array_equal(three_updates(optimizers.build(frozen, 10))["head.kernel"], before["head.kernel"])
    once = optimizers.build(half, 10)
    first, _ = once.update(before, once.init(before), before)
    full = optimizers.build(base, 10)
    reference, _ = full.update(before, full.init(before), before)
    np.testing.assert_allclose(first["head.kernel"], reference["head.kernel"] / 2, rtol=1e-6)
    np.testing.assert_allclose(first["blocks.norm.scale"], reference["blocks.norm.scale"], rtol=1e-6)
    shrunk = three_updates(optimizers.build(decayed, 10))
    assert not np.allclose(shrunk["blocks.norm.scale"], plain["blocks.norm.scale"])
    np.testing.assert_allclose(shrunk["head.kernel"], plain["head.kernel"])


def test_patterns_that_do_nothing_are_refused():
    blueprint = plan_state(SMALL, optimizers.build(OptimizerConfig(), 10), jaxtp.make_mesh())
    names = list(parameters(blueprint))
    for pattern, message in {
        "blocks.mpl.*": "matches no trained parameter",
        "blocks.mlp.*": "earlier patterns match everything",
    }.items():
        config = OptimizerConfig(groups={"blocks.*": GroupConfig(), pattern: GroupConfig()})
        with pytest.raises(ConfigError, match=message):
            optimizers.check_patterns("optimizer.groups", config.groups, names)
    optimizers.check_patterns("optimizer.groups", GROUPS, names)


def test_a_group_of_frozen_parameters_is_refused():
    groups = {"embedding.*": GroupConfig(weight_decay=0.0)}
    config = dataclasses.replace(config_of("lion"), optimizer=OptimizerConfig(groups=groups))
    adapted = dataclasses.replace(SMALL, lora=LoraConfig(rank=2))
    plan(config, jaxtp.make_mesh())
    with pytest.raises(ConfigError, match=r"'embedding.\*' matches no trained parameter"):
        plan(dataclasses.replace(config, model=adapted), jaxtp.make_mesh())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    {
        # 2 steps of warm-up, 10 in all, peak 1, end 0.1
        "cosine": {0: 0, 1: 0.5, 2: 1, 6: 0.55, 10: 0.1, 99: 0.1},
        "linear": {0: 0, 2: 1, 6: 0.55, 10: 0.1, 99: 0.1},
        "constant": {0: 0, 2: 1, 6: 1, 10: 1, 99: 1},
        "wsd": {0: 0, 2: 1, 8: 1, 9: 0.55, 10: 0.1, 99: 0.1},
    }.items(),
)
def test_schedule(schedule, expected):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, final_fraction=0.1, schedule=schedule)
    rate = optimizers.learning_rate(config, 10)
    for step, value in expected.items():
        np.testing.assert_allclose(rate(step), value, atol=1e-6, err_msg=f"{schedule} {step}")
    assert optimizers.learning_rate(dataclasses.replace(config, warmup_steps=0), 10)(0) == 1


def test_a_decay_longer_than_what_follows_the_warm_up_starts_there():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.1, schedule="wsd", decay_fraction=1.0)
    rate = optimizers.learning_rate(config, 10)
    np.testing.assert_allclose([rate(4), rate(7), rate(10)], [1, 0.55, 0.1], atol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_warm_up_longer_than_the_run_is_cut_to_it(schedule, steps):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=20, schedule=schedule)
    rate = optimizers.learning_rate(config, steps)
    np.testing.assert_allclose([rate(step) for step in range(steps)], np.arange(steps) / steps, atol=1e-6)
