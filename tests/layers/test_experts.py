"""A mixture of experts against plain mathematics in float64: output, sums and every gradient, on
all meshes.
"""

from functools import cache

import accounts
import jax
import numpy as np
import pytest
from flax import nnx
from mixtures import (
    LORA,
    WORK,
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
from numpy.testing import assert_allclose, assert_array_equal
from support import assert_close, random_weights, sizes_of, state_on_mesh, swept, without_mesh
from tables import read_table
from variants import variants

from jaxtp.layers.context import Sequences
from jaxtp.layers.experts import ExpertsConfig, placement
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of

BASE = ExpertsConfig(num_experts=E, d_ff=F)
TABLE = read_table(__file__)
CONFIGS = variants(BASE, TABLE["configs"])
CASES = [(name, tuple(mesh), *whole) for name, mesh, *whole in TABLE["cases"]]
DEFAULT = ("ernie", (1, 2, 2, 2))
"""Whole experts, of each of which a shard stores a part."""


@pytest.fixture(autouse=True)
def computed_in_parts(monkeypatch):
    """As in large batches: where routing is uneven, a device computes several parts of its rows."""
    monkeypatch.setattr(placement, "FEW_ROWS", 4)


@cache
def weights_of(name):
    return random_weights(lambda: build(CONFIGS[name], lora=lora_of(name)), scale=0.3)


def lora_of(name):
    return LORA if name in TABLE["adapted"] else LoraConfig()


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
    return {
        **weights,
        "selection_bias": np.random.default_rng(5).normal(-1, 0.4, E).astype(np.float32),
    }


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


def check_everything(name, mesh, sequence_parallel=None, packed=True):
    """One program of a configuration, for all that its weights and inputs may be."""
    config = CONFIGS[name]
    layer = program(config, mesh, sequence_parallel, packed, lora_of(name))
    for routed in ROUTERS if packed else ("as it is",):
        weights, rows, right = right_for(name, routed, packed)
        found = layer(weights, inputs(), rows)
        # Devices count rows that they got from others. Rounding moves an entropy near 0 by more
        # than its size.
        changes = {"computed": np.sum, "entropy": lambda a: a + 1}
        compared = [
            {n: changes.get(n, np.asarray)(np.asarray(each[n])) for n in right}
            for each in (found, right)
        ]
        assert_close(*compared)
        chosen = right["times_chosen"].sum(axis=0)
        assert chosen.sum() == config.experts_per_token * (rows != 0).sum()
        if not config.shared_experts:
            assert not np.asarray(found["output"])[rows == 0].any(), "padding comes out as 0"
        if not config.selection_bias and config.expert_groups == 1:
            check_routing(routed, config, chosen, (rows != 0).sum())
        for part in found:
            if part.partition("_")[0] in ("gate", "up", "down"):
                assert not np.asarray(found[part])[chosen == 0].any(), (
                    "an expert that nobody chose has no gradient"
                )


def check_routing(routed, config, chosen, tokens):
    """Checks what the data is for: a router that chooses by its scores alone does what it was
    changed to do.
    """
    if routed == "all to one expert":
        assert chosen[4] == tokens
    if routed == "empty experts" and config.experts_per_token <= 2:
        assert not chosen[[0, 1, 3, 4]].any()
    if routed == "equal logits":
        assert not chosen[config.experts_per_token :].any()


@swept("case", CASES, DEFAULT)
def test_a_layer_equals_plain_mathematics(case):
    check_everything(*case)


@swept("name", ["two of them", "qwen2", "everything"])
def test_a_layer_without_documents_equals_plain_mathematics(name):
    check_everything(name, (1, 2, 1, 2), packed=False)


@swept("over_tp", [True, False])
def test_given_choices_take_the_place_of_the_router(over_tp):
    """And what the router would choose is recorded, with its margin."""
    given = (
        np.random.default_rng(3)
        .permuted(np.tile(np.arange(E), (B, T, 1)), axis=2)[:, :, :2]
        .astype(np.int32)
    )
    weights = weights_of("two of them")
    x = inputs()
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
    assert_array_equal(routing.times_chosen.sum(axis=1), right["times_chosen"])
    assert_array_equal(np.asarray(routing.experts).reshape(-1, 2), choose(scores, 2))
    ordered = -np.sort(-scores, axis=1)
    assert_allclose(
        np.asarray(routing.margin).reshape(-1), ordered[:, 1] - ordered[:, 2], atol=1e-6
    )


def test_a_margin_is_no_more_than_the_lead_of_a_group():
    """A group that rounding would choose instead changes experts, however far apart the scores
    inside are.
    """
    config = CONFIGS["deepseek v3"]
    weights = biased(weights_of("deepseek v3"))
    graph, state = without_mesh(lambda: build(config), weights)
    layer = jax.jit(lambda state, x: nnx.merge(graph, state)(x, Sequences(record=True))[1].margin)
    margin = np.asarray(layer(state, inputs())).reshape(-1)
    scores, _ = scores_of(inputs().reshape(-1, D).astype(np.float64) @ weights["router"], config)
    limited, of_groups = in_groups(
        np.asarray(scores, np.float64) + weights["selection_bias"], config
    )
    leads = []
    for each, k in ((limited, config.experts_per_token), (of_groups, config.groups_per_token)):
        ordered = -np.sort(-each, axis=1)
        leads.append(ordered[:, k - 1] - ordered[:, k])
    assert (leads[1] < leads[0]).any()
    assert_allclose(margin, np.minimum(*leads), atol=1e-6)


@swept("mesh", [(1, 1, 1, 1), (1, 2, 2, 2), (1, 1, 1, 8)], (1, 2, 2, 2))
def test_no_array_has_rows_of_all_tokens_for_all_experts(mesh):
    """With the kernels for GPUs a device holds a row for each choice of its tp group's tokens, at
    most, forward and backward, and multiplies nothing with all experts but the router.
    """
    config = ExpertsConfig(num_experts=24, d_ff=48, grouped="pallas")
    sizes = sizes_of(mesh)
    inside, largest = work(mesh, config)
    tokens = WORK[0] * WORK[1] // (sizes["dp"] * sizes["fsdp"] * sizes["cp"])
    hidden = config.d_ff if config.over_tp(sizes["tp"]) else config.d_ff // sizes["tp"]
    assert largest < config.num_experts * tokens * hidden
    kernels = [
        equation.params["jaxpr"] for equation in inside if equation.primitive.name == "pallas_call"
    ]
    of_kernels = [
        equation
        for kernel in kernels
        for equation in accounts.equations(getattr(kernel, "jaxpr", kernel))
    ]
    products = [
        e
        for e in inside
        if "dot" in e.primitive.name and all(e is not other for other in of_kernels)
    ]
    router = 2 * tokens // sizes["tp"] * WORK[2] * config.num_experts
    assert {accounts.flops_of_product(product) for product in products} == {router}
