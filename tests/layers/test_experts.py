"""A mixture of experts against plain mathematics in float64: output, sums and every gradient, on all meshes."""

import math
from dataclasses import replace
from functools import cache

import accounts
import jax
import numpy as np
import pytest
from flax import nnx
from mixtures import (
    LORA,
    B,
    D,
    E,
    F,
    T,
    build,
    choose,
    expected,
    in_groups,
    program,
    reference_program,
    scores_of,
    work,
)
from support import assert_close, random_weights, sizes_of, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.layers import experts as of_experts
from jaxtp.layers.context import Sequences
from jaxtp.layers.experts import ExpertsConfig
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import spec_of
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.config import violations

BASE = ExpertsConfig(num_experts=E, d_ff=F)
EVERYTHING = replace(
    BASE,
    d_ff=5,
    experts_per_token=3,
    selection_bias=True,
    shared_experts=9,
    mlp_bias=True,
    router_bias=True,
    experts_bias=True,
    activation="quick_gelu",
    swiglu_limit=0.7,
)
CONFIGS = {
    "two of them": BASE,
    "one": replace(BASE, experts_per_token=1, normalize_experts=False),
    "one, of weight 1": replace(BASE, experts_per_token=1),
    "all": replace(BASE, experts_per_token=E),
    "deepseek v3": replace(
        BASE,
        experts_per_token=3,
        selection_bias=True,
        router_scores="sigmoid",
        expert_groups=3,
        groups_per_token=2,
        experts_scale=2.5,
        shared_experts=12,
    ),
    "deepseek v2": replace(
        BASE, normalize_experts=False, experts_scale=1.5, expert_groups=2, group_score="max", shared_experts=8
    ),
    "ernie": replace(BASE, selection_bias=True, normalize_floor=0.6, shared_experts=10),
    "qwen2": replace(BASE, normalize_experts=False, shared_experts=9, shared_experts_gate=True),
    "sigmoid, not normalized": replace(BASE, router_scores="sigmoid", normalize_experts=False),
    "uneven, gated": replace(BASE, d_ff=5, shared_experts=5, mlp_bias=True, shared_experts_gate=True),
    "plain": replace(BASE, mlp="plain", activation="relu2", shared_experts=5, shared_experts_gate=True),
    "everything": EVERYTHING,
    "everything by kernels": replace(EVERYTHING, grouped="pallas"),
    "dispatched": replace(EVERYTHING, d_ff=130),
}
ADAPTED = ("everything", "everything by kernels", "qwen2", "plain")
"""With adapters on all projections."""


@pytest.fixture(autouse=True)
def computed_in_parts(monkeypatch):
    """As in large batches: where routing is uneven, a device computes several parts of its rows."""
    monkeypatch.setattr(of_experts, "FEW_ROWS", 4)


def lora_of(name):
    return LORA if name in ADAPTED else LoraConfig()


@cache
def weights_of(name):
    return random_weights(lambda: build(CONFIGS[name], lora=lora_of(name)), scale=0.3)


@cache
def inputs():
    """Returns random inputs, the first of which is 1 everywhere."""
    x = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
    x[:, :, 0] = 1.0
    return x


@cache
def segments():
    """Documents of rows: one, several, padding from a place on, and padding alone."""
    rows = np.cumsum(np.random.default_rng(2).random((B, T)) < 0.3, axis=1).astype(np.int32) + 1
    for row, begin in ((2, 5), (4, 1), (7, 0)):
        rows[row, begin:] = 0
    return rows


def router(weights, change):
    """Returns weights whose router has no bias, and is changed."""
    array = np.array(weights["router"])
    change(array)
    unbiased = {"router_bias": np.zeros(E, np.float32)} if "router_bias" in weights else {}
    return {**weights, "router": array, **unbiased}


def steer(experts):
    """Changes a router so that the first input decides for those experts, in that order."""

    def change(array):
        array[0] = -20.0
        array[0, list(experts)] = 20.0 - 0.5 * np.arange(len(experts))

    return change


def tie(array):
    """Makes scores of several experts equal: of those the first are to be taken."""
    array[:, [1, 3, 4]] = 0.0
    array[0, [1, 3, 4]] = 3.0
    array[:, 5] = array[:, 2]


def biased(weights):
    """Adds biases to scores, also negative ones: below them is -inf alone."""
    if "selection_bias" not in weights:
        return weights
    return {**weights, "selection_bias": np.random.default_rng(5).normal(-1, 0.4, E).astype(np.float32)}


ROUTERS = {
    "as it is": lambda weights: weights,
    "biases": biased,
    "all to one expert": lambda weights: router(weights, steer([4])),
    "empty experts": lambda weights: router(weights, steer([5, 2])),
    "ties": lambda weights: router(weights, tie),
    "equal logits": lambda weights: router(weights, lambda array: array.fill(0.0)),
    "padding alone": lambda weights: weights,
}


@cache
def right_for(name, routed, packed):
    """Returns weights and segments, and what they should give."""
    rows = segments() if packed else np.ones((B, T), np.int32)
    rows = 0 * rows if routed == "padding alone" else rows
    weights = ROUTERS[routed](weights_of(name))
    return weights, rows, expected(weights, inputs(), rows != 0, CONFIGS[name])


def check_everything(name, mesh, sequence_parallel, packed=True):
    """One program of a configuration, for all that its weights and inputs may be."""
    config = CONFIGS[name]
    layer = program(config, mesh, sequence_parallel, packed, lora_of(name))
    for routed in ROUTERS if packed else ("as it is",):
        weights, rows, right = right_for(name, routed, packed)
        found = layer(weights, inputs(), rows)
        # Devices count rows that they got from others. Rounding moves an entropy near 0 by more than its size.
        changes = {"computed": np.sum, "entropy": lambda a: a + 1}
        compared = [{n: changes.get(n, np.asarray)(np.asarray(each[n])) for n in right} for each in (found, right)]
        assert_close(*compared)
        chosen = right["times_chosen"].sum(axis=0)
        assert chosen.sum() == config.experts_per_token * (rows != 0).sum()
        if not config.shared_experts:
            assert not np.asarray(found["output"])[rows == 0].any(), "padding comes out as 0"
        if not config.selection_bias and config.expert_groups == 1:
            check_routing(routed, config, chosen, (rows != 0).sum())
        for part in found:
            if part.partition("_")[0] in ("gate", "up", "down"):
                assert not np.asarray(found[part])[chosen == 0].any(), "an expert that nobody chose has no gradient"


def check_routing(routed, config, chosen, tokens):
    """Checks what the data is for: a router that chooses by its scores alone does what it was changed to do."""
    if routed == "all to one expert":
        assert chosen[4] == tokens
    if routed == "empty experts" and config.experts_per_token <= 2:
        assert not chosen[[0, 1, 3, 4]].any()
    if routed == "equal logits":
        assert not chosen[config.experts_per_token :].any()


MESHES = [
    *((1, 1, 1, 1), (1, 1, 1, 2), (1, 1, 1, 3), (1, 1, 1, 4), (1, 1, 1, 8), (8, 1, 1, 1), (1, 8, 1, 1), (1, 1, 4, 1)),
    *((2, 2, 1, 2), (1, 2, 2, 2), (2, 1, 2, 4), (1, 2, 1, 4), (2, 2, 2, 2), (1, 1, 2, 8), (4, 1, 1, 3), (1, 4, 2, 1)),
]
"""Whole experts where tp is 2 or 3, and a part of each where it is 4 or 8."""
NAMES = list(CONFIGS)
DEFAULT = [("ernie", (1, 2, 2, 2), None)]
"""Whole experts, of each of which a shard stores a part."""
CASES = [*DEFAULT, *((NAMES[i % len(NAMES)], mesh, None) for i, mesh in enumerate(MESHES))]
# Interpreted kernels take long on many devices.
CASES[CASES.index(("everything by kernels", (2, 2, 2, 2), None))] = ("everything", (2, 2, 2, 2), None)
CASES += [(NAMES[(i + 2) % len(NAMES)], mesh, False) for i, mesh in enumerate(MESHES) if mesh[-1] > 1]
CASES += [("everything", (1, 1, 1, tp), split) for tp, split in ((2, None), (3, False), (4, False), (8, None))]
CASES += [("everything", mesh, split) for mesh, split in (((1, 2, 2, 2), False), ((1, 2, 1, 4), None))]
CASES += [("everything by kernels", mesh, None) for mesh in ((1, 1, 1, 3), (1, 2, 1, 4))]
CASES += [("uneven, gated", (1, 1, 1, tp), None) for tp in (4, 5)]
CASES += [("dispatched", mesh, None) for mesh in ((1, 2, 1, 1), (1, 2, 1, 3), (1, 2, 1, 4), (1, 1, 2, 4))]
CASES = sorted(dict.fromkeys(CASES), key=lambda case: NAMES.index(case[0]))  # cases of a name share what is right


@pytest.mark.parametrize("case", sweep(CASES, *DEFAULT), ids=str)
def test_a_layer_equals_plain_mathematics(case):
    check_everything(*case)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["two of them", "qwen2", "everything"])
def test_a_layer_without_documents_equals_plain_mathematics(name):
    check_everything(name, (1, 2, 1, 2), None, packed=False)


@pytest.mark.parametrize("over_tp", sweep([True, False], True))
def test_given_choices_take_the_place_of_the_router(over_tp):
    """And what the router would choose is recorded, with its margin."""
    given = np.random.default_rng(3).permuted(np.tile(np.arange(E), (B, T, 1)), axis=2)[:, :, :2].astype(np.int32)
    weights, x = weights_of("two of them"), inputs()
    on = mesh_of(sizes_of((1, 2, 2, 2) if over_tp else (1, 1, 2, 4)))
    graph, state = state_on_mesh(lambda: build(BASE), weights, on)
    with jax.set_mesh(on):
        call = lambda state: nnx.merge(graph, state)(x, Sequences(experts=given, record=True))
        y, routing = jax.jit(call)(state)
    scores = np.asarray(scores_of(x.reshape(-1, D).astype(np.float64) @ weights["router"], BASE)[0])
    with jax.enable_x64(True):
        wide = {name: np.asarray(array, np.float64) for name, array in weights.items()}
        run = reference_program(BASE, x.shape)
        (_, right), _ = run(wide, np.float64(x), np.ones((B, T), bool), given.reshape(-1, 2))
    assert_close({"output": y}, {"output": right["output"]})
    np.testing.assert_array_equal(routing.times_chosen.sum(axis=1), right["times_chosen"])
    np.testing.assert_array_equal(np.asarray(routing.experts).reshape(-1, 2), choose(scores, 2))
    ordered = -np.sort(-scores, axis=1)
    np.testing.assert_allclose(np.asarray(routing.margin).reshape(-1), ordered[:, 1] - ordered[:, 2], atol=1e-6)


def test_a_margin_is_no_more_than_the_lead_of_a_group():
    """A group that rounding would choose instead changes experts, however far apart the scores inside are."""
    config, weights = CONFIGS["deepseek v3"], biased(weights_of("deepseek v3"))
    graph, state = without_mesh(lambda: build(config), weights)
    layer = jax.jit(lambda state, x: nnx.merge(graph, state)(x, Sequences(record=True))[1].margin)
    margin = np.asarray(layer(state, inputs())).reshape(-1)
    scores, _ = scores_of(inputs().reshape(-1, D).astype(np.float64) @ weights["router"], config)
    limited, of_groups = in_groups(np.asarray(scores, np.float64) + weights["selection_bias"], config)
    leads = []
    for each, k in ((limited, config.experts_per_token), (of_groups, config.groups_per_token)):
        ordered = -np.sort(-each, axis=1)
        leads.append(ordered[:, k - 1] - ordered[:, k])
    assert (leads[1] < leads[0]).any()
    np.testing.assert_allclose(margin, np.minimum(*leads), atol=1e-6)


@pytest.mark.parametrize("mesh", sweep([(1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 1, 8)], (1, 2, 2, 2)), ids=str)
def test_no_array_has_rows_of_all_tokens_for_all_experts(mesh):
    """With the kernels for GPUs a device holds a row for each choice of its tp group's tokens, at most, forward and
    backward, and multiplies nothing with all experts but the router."""
    experts, width, hidden, batch, length = 24, 64, 48, 32, 32
    many, sizes = ExpertsConfig(num_experts=experts, d_ff=hidden, grouped="pallas"), sizes_of(mesh)
    inside, largest = work(mesh, many, width, batch, length)
    tokens = batch * length // (sizes["dp"] * sizes["fsdp"] * sizes["cp"])
    parts = hidden if many.over_tp(sizes["tp"]) else hidden // sizes["tp"]
    assert tokens * many.experts_per_token * width <= largest < experts * tokens * parts
    calls = [equation for equation in inside if equation.primitive.name == "pallas_call"]
    assert len(calls) >= 9, "three products, and two for the gradients of each"
    assert not [equation for equation in inside if "ragged" in equation.primitive.name]
    bodies = [getattr(call.params["jaxpr"], "jaxpr", call.params["jaxpr"]) for call in calls]
    in_kernels = {id(equation) for body in bodies for equation in accounts.equations(body)}
    dots = [e for e in inside if e.primitive.name == "dot_general" and id(e) not in in_kernels]
    router = tokens // sizes["tp"] * width * experts
    assert {multiplications(dot) for dot in dots} == {router}


def multiplications(dot):
    (contracted, _), _ = dot.params["dimension_numbers"]
    return dot.outvars[0].aval.size * math.prod(dot.invars[0].aval.shape[dim] for dim in contracted)


MIXTURE = jaxtp.ModelConfig(d_model=16, num_experts=E, d_ff=F)
REFUSED = [
    ({"num_experts": 0, "selection_bias": True}, "model.selection_bias=true", "--model.num-experts"),
    ({"num_experts": 0, "experts_bias": True}, "model.experts_bias=true", "needs experts"),
    ({"experts_per_token": 7}, "model.experts_per_token=7", "model.num_experts=6", "at most 6"),
    (
        {"num_layers": 2, "pattern": ({"num_experts": 0}, {"experts_per_token": 7})},
        *("model.pattern[1]: model.experts_per_token=7", "at most 6"),
    ),
    ({"activation": "xielu"}, "model.activation=xielu", "no learned activations"),
    ({"mlp_bias": True}, "model.mlp_bias=true", "model.experts_bias"),
    ({"mlp": "plain", "swiglu_limit": 7.0}, "model.swiglu_limit=7.0", "model.mlp=gated"),
    (
        {"expert_groups": 2, "groups_per_token": 3},
        *("model.groups_per_token=3", "model.expert_groups=2", "at most 2"),
    ),
    ({"expert_groups": 4}, "model.num_experts=6", "model.expert_groups=4", "can be 1, 2, 3, or num_experts 8"),
    (
        {"expert_groups": 3, "experts_per_token": 4, "groups_per_token": 1},
        *("model.experts_per_token=4", "1 of model.expert_groups=3", "at most 2"),
    ),
    ({"shared_experts_gate": True}, "model.shared_experts_gate=true", "model.shared_experts"),
]


def test_settings_that_do_not_fit_are_refused_with_the_nearest_that_do():
    for changes, *words in REFUSED:
        (problem,) = violations(replace(MIXTURE, **changes), mesh_shape())
        assert not [word for word in words if word not in problem], problem


def test_every_tp_fits_and_so_do_adapters():
    for tp in (1, 2, 3, 4, 6, 8):
        assert not list(violations(replace(MIXTURE, num_heads=24, num_kv_heads=24), mesh_shape(tp=tp)))
    assert not list(violations(replace(MIXTURE, lora=LORA), mesh_shape(tp=2)))


PARTS = [
    # Devices along fsdp and tp; devices that split a and b of up, then a and b of down.
    ((2, 3), (6, 6, 6, 6)),
    ((2, 2), (4, 2, 2, 4)),
    ((4, 4), (4, 4, 4, 4)),
    ((1, 4), (1, 4, 4, 1)),
]


def test_adapters_of_experts_are_split_as_their_kernels():
    for (fsdp, tp), parts in PARTS:
        mesh = mesh_of(mesh_shape(fsdp=fsdp, tp=tp))
        with jax.set_mesh(mesh):
            layer = nnx.eval_shape(lambda: build(BASE, lora=LORA))
        factors = ((layer.up_lora.a, D), (layer.up_lora.b, F), (layer.down_lora.a, F), (layer.down_lora.b, D))
        for (factor, dim), devices in zip(factors, parts, strict=True):
            shard = jax.NamedSharding(mesh, spec_of(factor)).shard_shape(factor.shape)
            assert math.prod(shard) == E * LORA.rank * dim / devices, (fsdp, tp)
