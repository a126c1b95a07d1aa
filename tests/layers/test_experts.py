"""A mixture of experts against a plain loop over experts in float64: output, sums and every gradient, on all meshes."""

import dataclasses
import math
from functools import cache

import accounts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from mixtures import LORA, B, D, E, F, T, build, choose, expected, in_groups, mixture, program, scores_of, work
from support import assert_close, random_weights, sizes_of, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.layers import experts as of_experts
from jaxtp.layers.context import Sequences
from jaxtp.layers.experts import ExpertsConfig, Rows
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.config import violations


def is_expected(found, weights, x, counts, config):
    right = expected(weights, x, counts, config)
    for results in (found, right):
        results["computed"] = np.sum(results["computed"])
    # Rounding moves an entropy near 0 by more than its size.
    assert_close(*({name: np.asarray(each[name]) + (name == "entropy") for name in right} for each in (found, right)))
    return right


BASE = ExpertsConfig(num_experts=E, d_ff=F)
OF_GPT_OSS = {"router_bias": True, "experts_bias": True, "activation": "quick_gelu", "swiglu_limit": 0.7}
CONFIGS = {
    "two of them": BASE,
    "scores as they are": dataclasses.replace(BASE, normalize_experts=False),
    "one": dataclasses.replace(BASE, experts_per_token=1, normalize_experts=False),
    "one, of weight 1": dataclasses.replace(BASE, experts_per_token=1),
    "all": dataclasses.replace(BASE, experts_per_token=E),
    "biased": dataclasses.replace(BASE, experts_per_token=3, selection_bias=True),
    "deepseek v3": dataclasses.replace(
        BASE,
        experts_per_token=3,
        selection_bias=True,
        router_scores="sigmoid",
        expert_groups=3,
        groups_per_token=2,
        experts_scale=2.5,
        shared_experts=12,
    ),
    "deepseek v2": dataclasses.replace(
        BASE, normalize_experts=False, experts_scale=1.5, expert_groups=2, group_score="max", shared_experts=8
    ),
    "ernie": dataclasses.replace(BASE, selection_bias=True, normalize_floor=0.6, shared_experts=10),
    "qwen2": dataclasses.replace(BASE, normalize_experts=False, shared_experts=9, shared_experts_gate=True),
    "sigmoid, not normalized": dataclasses.replace(BASE, router_scores="sigmoid", normalize_experts=False),
    "uneven": dataclasses.replace(BASE, d_ff=7, shared_experts=10, mlp_bias=True),
    "uneven, gated": dataclasses.replace(BASE, d_ff=5, shared_experts=5, mlp_bias=True, shared_experts_gate=True),
    "plain": dataclasses.replace(BASE, mlp="plain", activation="relu2", shared_experts=5, shared_experts_gate=True),
    "mistral 4": dataclasses.replace(BASE, experts_scale=1.5, expert_groups=3, groups_per_token=2, shared_experts=4),
    "gpt-oss": dataclasses.replace(BASE, **OF_GPT_OSS),
    "everything": dataclasses.replace(
        BASE, d_ff=5, experts_per_token=3, selection_bias=True, shared_experts=9, mlp_bias=True, **OF_GPT_OSS
    ),
}
CONFIGS["everything by kernels"] = dataclasses.replace(CONFIGS["everything"], grouped="pallas")
CONFIGS["dispatched"] = dataclasses.replace(CONFIGS["everything"], d_ff=130)
ADAPTED = ("everything", "everything by kernels", "qwen2", "plain")
"""With adapters on all projections."""


@pytest.fixture(autouse=True)
def computed_in_parts(monkeypatch):
    """As in large batches: where routing is uneven, a device computes several parts of its rows."""
    monkeypatch.setattr(of_experts, "FEW_ROWS", 4)


@cache
def weights_of(name):
    lora = LORA if name in ADAPTED else LoraConfig()
    return random_weights(lambda: build(CONFIGS[name], lora=lora), scale=0.3)


@cache
def inputs():
    return np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)


def segments():
    """Documents of rows: one, several, padding from a place on, and padding alone."""
    rows = np.cumsum(np.random.default_rng(2).random((B, T)) < 0.3, axis=1).astype(np.int32) + 1
    for row, begin in ((2, 5), (4, 1), (7, 0)):
        rows[row, begin:] = 0
    return rows


def router(weights, change):
    array = np.array(weights["router"])
    change(array)
    unbiased = {"router_bias": np.zeros(E, np.float32)} if "router_bias" in weights else {}
    return {**weights, "router": array, **unbiased}


def steer(experts):
    """Changes a router so that the first input, which is 1 everywhere, decides for those experts, in that order."""

    def change(array):
        array[0] = -20.0
        array[0, list(experts)] = 20.0 - 0.5 * np.arange(len(experts))

    return change


def tie(array):
    """Makes scores of several experts equal: of those the first are to be taken."""
    array[:, [1, 3, 4]] = 0.0
    array[0, [1, 3, 4]] = 3.0
    array[:, 5] = array[:, 2]


def bias(weights):
    """Adds biases to scores, also negative ones: below them is -inf alone."""
    if "selection_bias" not in weights:
        return weights
    return {**weights, "selection_bias": np.random.default_rng(5).normal(-1, 0.4, E).astype(np.float32)}


DATA = {
    "biases": (bias, segments),
    "as it is": (lambda weights: weights, segments),
    "padded": (lambda weights: weights, segments),
    "all to one expert": (lambda weights: router(weights, steer([4])), segments),
    "empty experts": (lambda weights: router(weights, steer([5, 2])), segments),
    "ties": (lambda weights: router(weights, tie), segments),
    "padding alone": (lambda weights: weights, lambda: np.zeros((B, T), np.int32)),
}


def check_everything(name, mesh, sequence_parallel, packed=True):
    """One program of a configuration, for all that its weights and inputs may be."""
    config = CONFIGS[name]
    layer = program(config, mesh, sequence_parallel, packed, LORA if name in ADAPTED else LoraConfig())
    x = np.array(inputs())
    x[:, :, 0] = 1.0
    for kind, (change, make) in DATA.items():
        rows = make() if packed else np.ones((B, T), np.int32)
        weights = change(weights_of(name))
        found = layer(weights, x, rows)
        right = is_expected(found, weights, x, rows != 0, config)
        chosen = right["times_chosen"].sum(axis=0)
        assert chosen.sum() == config.experts_per_token * (rows != 0).sum()
        if not config.shared_experts:
            assert not np.asarray(found["output"])[rows == 0].any(), "padding comes out as 0"
        if kind == "all to one expert":
            assert chosen[4] == (rows != 0).sum() or config.selection_bias
        free = not config.selection_bias and config.expert_groups == 1
        if kind == "empty experts" and config.experts_per_token <= 2 and free:
            assert not chosen[[0, 1, 3, 4]].any()
        for e in np.flatnonzero(chosen == 0):
            for part in (part for part in found if part.partition("_")[0] in ("gate", "up", "down")):
                assert not np.asarray(found[part])[e].any(), "an expert that nobody chose has no gradient"


MESHES = [
    *((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 4), (1, 1, 1, 8), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 4, 1)),
    *((2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 4), (1, 2, 1, 4), (2, 2, 2, 2), (1, 1, 2, 8), (4, 1, 1, 3), (1, 4, 2, 1)),
]
"""Whole experts where tp is 2 or 3, and a part of each where it is 4 or 8."""

DEFAULT = [("biased", (1, 2, 2, 2), None), ("dispatched", (1, 2, 1, 4), None)]
"""Whole experts, of each of which a shard stores a part; parts of experts, and tokens of all shards."""
OF_TP = [(1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 4), (1, 1, 1, 8), (2, 2, 1, 2), (1, 1, 2, 4), (1, 2, 1, 3), (1, 2, 1, 4)]
OTHERS = [("everything", mesh, split) for mesh in ((1, 2, 2, 2), *OF_TP) for split in (None, False)]
OTHERS += [("everything by kernels", mesh, None) for mesh in ((1, 1, 1, 3), (1, 2, 1, 4))]
OTHERS += [*((name, (1, 1, 1, tp), None) for name in ("uneven", "uneven, gated") for tp in (2, 4, 5, 8))]
OTHERS += [("dispatched", mesh, None) for mesh in ((1, 2, 1, 1), (1, 2, 1, 3), (1, 1, 2, 3), (1, 1, 2, 4))]
OTHERS += [("one, of weight 1", (1, 1, 1, 1), None), ("all", (1, 1, 1, 3), False)]


NAMES = list(CONFIGS)
CASES = [(NAMES[i % len(NAMES)], mesh, None) for i, mesh in enumerate(MESHES)]
CASES += [(NAMES[(i + 2) % len(NAMES)], mesh, False) for i, mesh in enumerate(MESHES) if mesh[-1] > 1]


@pytest.mark.parametrize("case", sweep(list(dict.fromkeys([*DEFAULT, *OTHERS, *CASES])), *DEFAULT), ids=str)
def test_a_layer_is_a_loop_over_experts(case):
    check_everything(*case)


@pytest.mark.wide
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_are_not_packed(name):
    check_everything(name, (1, 2, 1, 2), None, packed=False)


def without_a_mesh(config, weights, x, rows=None, **more):
    graph, state = without_mesh(lambda: build(config), weights)
    sequences = Sequences(segments=None if rows is None else jnp.asarray(rows), **more)
    return jax.jit(lambda state, x: nnx.merge(graph, state)(x, sequences))(state, x)


@pytest.mark.parametrize("mesh", [None, *(pytest.param(mesh, marks=pytest.mark.wide) for mesh in MESHES)], ids=str)
def test_equal_logits_go_to_the_first_experts(mesh):
    config = dataclasses.replace(BASE, experts_per_token=3)
    weights = router(weights_of("two of them"), lambda array: array.fill(0.0))
    if mesh is None:
        times = without_a_mesh(config, weights, inputs())[1].times_chosen.sum(axis=(0, 1))
    else:
        times = program(config, mesh, None, False)(weights, inputs(), np.ones((B, T), np.int32))["times_chosen"].sum(0)
    np.testing.assert_array_equal(times, [B * T] * 3 + [0] * 3)


def test_the_selection_bias_chooses_and_does_not_weigh():
    """It moves all tokens to other experts, and these weigh what their scores say."""
    biased = CONFIGS["biased"]
    weights = dict(weights_of("biased"))
    weights["selection_bias"] = np.array([0, 9, 0, 8, 0, 7], np.float32)
    y, routing = without_a_mesh(biased, weights, inputs())
    np.testing.assert_array_equal(routing.times_chosen.sum(axis=(0, 1)), [0, B * T] * 3)
    right = expected(weights, inputs(), np.ones((B, T), bool), biased)
    assert_close({"output": y}, {"output": right["output"]})
    given = jnp.broadcast_to(jnp.array([1, 3, 5]), (B, T, 3))
    unbiased = dataclasses.replace(biased, selection_bias=False)
    again, _ = without_a_mesh(unbiased, weights, inputs(), experts=given)
    np.testing.assert_array_equal(y, again)


@pytest.mark.wide
@given(seed=st.integers(0, 2**31), row=st.integers(0, B - 1), keep=st.integers(0, T))
@settings(max_examples=15)
def test_padding_may_hold_anything(seed, row, keep):
    """It changes no token, no sum and no gradient, and takes no place among rows."""
    config, layer = CONFIGS["two of them"], program(CONFIGS["two of them"], (1, 1, 1, 2), None, True)
    rows = np.ones((B, T), np.int32)
    rows[row, keep:] = 0
    x = inputs()
    other = np.where(rows[:, :, None] == 0, np.random.default_rng(seed).standard_normal(x.shape) * 9, x)
    one, two = (layer(weights_of("two of them"), a.astype(np.float32), rows) for a in (x, other))
    for name, array in one.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(two[name]), err_msg=name)
    assert np.asarray(one["computed"]).sum() == config.experts_per_token * (rows != 0).sum()


@pytest.mark.parametrize("over_tp", sweep([True, False], True))
def test_choices_that_are_given_take_the_place_of_the_router(over_tp):
    """And what the router would choose is recorded, with its margin."""
    config = BASE
    given = np.random.default_rng(3).permuted(np.tile(np.arange(E), (B, T, 1)), axis=2)[:, :, :2].astype(np.int32)
    weights, x = weights_of("two of them"), inputs()
    on = mesh_of(sizes_of((1, 2, 2, 2) if over_tp else (1, 1, 2, 4)))
    graph, state = state_on_mesh(lambda: build(config), weights, on)
    with jax.set_mesh(on):
        call = lambda state: nnx.merge(graph, state)(x, Sequences(experts=jnp.asarray(given), record=True))
        y, routing = jax.jit(call)(state)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(array, jnp.float64) for name, array in weights.items()}
        flat = jnp.asarray(x, jnp.float64).reshape(-1, D)
        right, sums = mixture(wide, flat, np.ones(len(flat), bool), config, given.reshape(-1, 2))
        scores = np.asarray(jax.nn.softmax(flat @ wide["router"]))
    times = np.asarray(sums["times_chosen"]).reshape(B, T, E).sum(axis=1)
    assert_close({"output": y.reshape(-1, D)}, {"output": right})
    np.testing.assert_array_equal(routing.times_chosen.sum(axis=1), times)
    np.testing.assert_array_equal(np.asarray(routing.experts).reshape(-1, 2), choose(scores, 2))
    ordered = -np.sort(-scores, axis=1)
    np.testing.assert_allclose(np.asarray(routing.margin).reshape(-1), ordered[:, 1] - ordered[:, 2], atol=1e-6)


def test_a_margin_is_no_more_than_the_lead_of_a_group():
    """A group that rounding would choose instead changes experts, however far apart the scores inside are."""
    config, weights = CONFIGS["deepseek v3"], bias(weights_of("deepseek v3"))
    margin = np.asarray(without_a_mesh(config, weights, inputs(), record=True)[1].margin).reshape(-1)
    scores, _ = scores_of(inputs().reshape(-1, D).astype(np.float64) @ weights["router"], config)
    limited, of_groups = in_groups(np.asarray(scores, np.float64) + weights["selection_bias"], config)
    ordered = (-np.sort(-each, axis=1) for each in (limited, of_groups))
    of_experts, of_groups = (
        each[:, k - 1] - each[:, k] for each, k in zip(ordered, (config.experts_per_token, 2), strict=True)
    )
    assert (of_groups < of_experts).any()
    np.testing.assert_allclose(margin, np.minimum(of_experts, of_groups), atol=1e-6)


CHOICES = (6, 3)


@given(st.lists(st.integers(0, 4), min_size=18, max_size=18))
def test_each_choice_has_one_place_among_rows_of_its_expert(choices):
    """Expert 4 is none of this device: its choices have no place."""
    flat, count = np.array(choices, np.int32), 4
    sizes, places, held = map(np.asarray, places_of(flat.reshape(CHOICES)))
    np.testing.assert_array_equal(sizes, [(flat == e).sum() for e in range(count)])
    owners = np.repeat(np.arange(count), sizes)
    for choice, place in enumerate(places.reshape(-1)):
        assert place == flat.size if flat[choice] == count else (owners[place], held[place]) == (flat[choice], choice)
    assert (held[len(owners) :] == flat.size).all()


@jax.jit
def places_of(experts):
    rows = Rows.of(experts, 4)
    return rows.sizes, rows.row_of_choice, rows.choice_of_row


@pytest.mark.parametrize("mesh", sweep([(1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 2, 4), (1, 1, 1, 8)], (1, 2, 2, 2)), ids=str)
def test_no_array_of_all_tokens_for_all_experts(mesh):
    """With the kernels for GPUs a device holds a row for each choice of its tp group's tokens, at most, forward and
    backward, and multiplies nothing with all experts but the router."""
    experts, width, hidden, batch, length = 24, 64, 48, 32, 32
    many, sizes = ExpertsConfig(num_experts=experts, d_ff=hidden, grouped="pallas"), sizes_of(mesh)
    inside, largest = work(mesh, many, width, batch, length)
    tokens = batch * length // (sizes["dp"] * sizes["fsdp"] * sizes["cp"])
    rows = tokens * many.experts_per_token
    parts = hidden if many.over_tp(sizes["tp"]) else hidden // sizes["tp"]
    assert rows * width <= largest < experts * tokens * parts
    names = [equation.primitive.name for equation in inside]
    assert names.count("pallas_call") >= 9, "three products, and two for the gradients of each"
    assert not [name for name in names if "ragged" in name]
    router = tokens // sizes["tp"] * width * experts
    calls = [jaxpr_of(equation) for equation in inside if equation.primitive.name == "pallas_call"]
    kernels = {id(equation) for call in calls for equation in accounts.equations(call)}
    dots = [e for e in inside if e.primitive.name == "dot_general" and id(e) not in kernels]
    assert dots
    assert all(multiplications(dot) == router for dot in dots), "the router's alone"


def jaxpr_of(call):
    return getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"])


def multiplications(dot):
    (contracted, _), _ = dot.params["dimension_numbers"]
    return dot.outvars[0].aval.size * np.prod([dot.invars[0].aval.shape[dim] for dim in contracted], dtype=int)


MIXTURE = jaxtp.ModelConfig(d_model=16, num_experts=E, d_ff=F)
TOO_MANY = "model.experts_per_token=7 is more than model.num_experts=6; at most 6 works"
OF_EXPERTS = "the 6 experts of model.num_experts have"
CANNOT_BE = {
    "no experts": (
        {},
        {"num_experts": 0, "selection_bias": True},
        "model.selection_bias=true needs experts; add --model.num-experts, or leave it out",
    ),
    "more than there are": ({}, {"experts_per_token": 7}, TOO_MANY),
    "more in a layer": (
        {},
        {"num_layers": 2, "pattern": ({"num_experts": 0}, {"experts_per_token": 7})},
        f"model.pattern[1]: {TOO_MANY}",
    ),
    "learned": ({}, {"activation": "xielu"}, f"model.activation=xielu: {OF_EXPERTS} no learned activations"),
    "biases": ({}, {"mlp_bias": True}, f"model.mlp_bias=true: {OF_EXPERTS} their biases by model.experts_bias; use it"),
    "a limit of nothing": (
        {},
        {"mlp": "plain", "swiglu_limit": 7.0},
        "model.swiglu_limit=7.0 needs model.mlp=gated, or leave it out",
    ),
    "biases of nothing": ({}, {"num_experts": 0, "experts_bias": True}, "model.experts_bias=true needs experts; add"),
    "more groups": (
        {},
        {"expert_groups": 2, "groups_per_token": 3},
        "model.groups_per_token=3 is more than model.expert_groups=2; at most 2 works",
    ),
    "unequal groups": (
        {},
        {"expert_groups": 4},
        "model.num_experts=6 is not divisible by model.expert_groups=4; expert_groups can be 1, 2, 3, or num_experts 8",
    ),
    "more than in groups": (
        {},
        {"expert_groups": 3, "experts_per_token": 4, "groups_per_token": 1},
        "model.experts_per_token=4 is more than the experts in 1 of model.expert_groups=3; at most 2 works",
    ),
    "a gate of nothing": (
        {},
        {"shared_experts_gate": True},
        "model.shared_experts_gate=true needs model.shared_experts, the width of its MLP",
    ),
}


@pytest.mark.parametrize(("mesh", "changes", "message"), CANNOT_BE.values(), ids=CANNOT_BE)
def test_what_cannot_be_is_one_message_with_the_nearest_that_works(mesh, changes, message):
    (found,) = violations(dataclasses.replace(MIXTURE, **changes), mesh_shape(**mesh))
    assert found.startswith(message)


def test_what_fits():
    for tp in (1, 2, 3, 4, 6, 8):
        assert not list(violations(dataclasses.replace(MIXTURE, num_heads=24, num_kv_heads=24), mesh_shape(tp=tp)))
    assert not list(violations(dataclasses.replace(MIXTURE, lora=LORA), mesh_shape(tp=2)))


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ({"fsdp": 2, "tp": 3}, (6, 6, 6, 6)),
        ({"fsdp": 2, "tp": 2}, (4, 2, 2, 4)),
        ({"fsdp": 4, "tp": 4}, (4, 4, 4, 4)),
        ({"tp": 4}, (1, 4, 4, 1)),
    ],
    ids=str,
)
def test_adapters_of_experts_are_split_as_their_kernels(sizes, parts):
    """4 bytes for each of E * rank * (in + out), over the devices that split it."""
    mesh = mesh_of(mesh_shape(**sizes))
    with jax.set_mesh(mesh):
        layer = nnx.eval_shape(lambda: build(BASE, lora=LORA))
    factors = ((layer.up_lora.a, D), (layer.up_lora.b, F), (layer.down_lora.a, F), (layer.down_lora.b, D))
    for (factor, dim), devices in zip(factors, parts, strict=True):
        shard = jax.NamedSharding(mesh, spec_of(factor)).shard_shape(factor.shape)
        assert factor.dtype.itemsize * math.prod(shard) == 4 * E * LORA.rank * dim / devices
