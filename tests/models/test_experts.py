"""Mixtures of experts: outputs, gradients and three updates of any mesh are those of one device, and so is balance."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import assert_close, by_name, random_weights, sizes_of, state_on_mesh, sweep

import jaxtp
from jaxtp.data.rows import SEGMENTS
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train.config import DataConfig, LoopConfig, OptimizerConfig, TrainConfig
from jaxtp.train.step import loss_and_grads

T = 16
MIXTURE = jaxtp.ModelConfig(
    vocab_size=29,
    d_model=16,
    num_layers=2,
    num_heads=8,
    num_kv_heads=8,
    head_dim=4,
    d_ff=24,
    rope_theta=2.0,
    num_experts=6,
    experts_per_token=2,
)
BASE = TrainConfig(
    model=MIXTURE,
    data=DataConfig(sequence_length=T, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10, balance_loss=0.3, router_z_loss=0.1),
)
TWICE = dataclasses.replace(BASE.train, accumulation=2, z_loss=1e-3)
BIASED = {"selection_bias": True, "experts_per_token": 3}
OF_GPT_OSS = {"router_bias": True, "experts_bias": True, "activation": "quick_gelu", "swiglu_limit": 0.5}


def variant(*, optimizer="adamw", packed=True, loop=BASE.train, **model):
    return dataclasses.replace(
        BASE,
        model=dataclasses.replace(MIXTURE, **model),
        data=dataclasses.replace(BASE.data, packing="documents" if packed else "stream"),
        optimizer=dataclasses.replace(BASE.optimizer, name=optimizer, weight_decay=0.1),
        train=loop,
    )


CONFIGS = {
    "mixture": variant(selection_bias=True, loop=dataclasses.replace(BASE.train, selection_bias_rate=0.25)),
    "some layers are dense": variant(
        num_layers=4,
        num_kv_heads=2,
        pattern=({"sliding_window": 3, "selection_bias": True}, {"num_experts": 0, "d_ff": 20}),
        dropout=0.2,
        loop=TWICE,
    ),
    "biased": variant(**BIASED, num_kv_heads=2, remat="none", loop=TWICE),
    "kinds of experts": variant(
        num_layers=3,
        first_blocks=(
            {"num_experts": 0, "d_ff": 40},
            {"num_experts": 4, "experts_per_token": 1, "normalize_experts": False},
        ),
        pattern=({"selection_bias": True, "num_experts": 5, "d_ff": 8},),
        num_kv_heads=1,
        tie_embeddings=True,
        remat="save_dots",
    ),
    "written out": variant(scan_layers=False, normalize_experts=False, remat="save_gathered", loop=TWICE),
    "rings": variant(num_kv_heads=2, overlap="ring", remat="save_reduced", activation="gelu_tanh"),
    "adapters": variant(lora=LoraConfig(rank=3), dropout=0.1, remat="save_gathered", loop=TWICE),
    "gpt-oss": variant(**OF_GPT_OSS, num_kv_heads=2, d_ff=21, optimizer="muon", loop=TWICE),
    "adapters of gpt-oss": variant(
        **OF_GPT_OSS, d_ff=21, shared_experts=10, lora=LoraConfig(rank=2, rslora=True), remat="save_reduced"
    ),
    "adapters beside a dense MLP": variant(
        lora=LoraConfig(rank=3, targets=("q_proj", "up_proj", "down_proj")), dense_mlp=22, norm_placement="both"
    ),
    "one expert a token": variant(experts_per_token=1, packed=False, remat="save_reduced"),
    "all experts a token": variant(experts_per_token=6, remat="none", norm_placement="both"),
    "muon": variant(optimizer="muon", **BIASED),
    "muon of square kernels": variant(optimizer="muon", d_ff=16, num_experts=4, loop=TWICE),
    "adafactor": variant(optimizer="adafactor", d_model=128, d_ff=192),
    "lion": variant(optimizer="lion", loop=TWICE),
    "deepseek v3": variant(
        **BIASED,
        router_scores="sigmoid",
        expert_groups=3,
        groups_per_token=2,
        experts_scale=2.5,
        shared_experts=20,
        num_layers=3,
        first_blocks=({"num_experts": 0, "d_ff": 40},),
        loop=TWICE,
    ),
    "qwen2": variant(
        normalize_experts=False, shared_experts=22, shared_experts_gate=True, remat="none", optimizer="muon", loop=TWICE
    ),
    "plain": variant(
        mlp="plain", activation="relu2", shared_experts=9, normalize_floor=0.6, experts_scale=1.5, remat="save_dots"
    ),
    "adapters beside shared": variant(
        lora=LoraConfig(rank=3, targets=("q_proj", "gate_proj")),
        shared_experts=10,
        shared_experts_gate=True,
        remat="save_gathered",
    ),
    "learned activations": variant(
        num_experts=0, mlp="plain", activation="xielu", d_ff=22, loop=dataclasses.replace(LoopConfig(), accumulation=2)
    ),
}
"""Rows are packed: documents cross chunks, the last row is padding alone, and one from its middle on."""

FIRST = [("mixture", (1, 2, 2, 2))]
"""Experts over tp; what is divided inside is in the tests of the layer."""

TRIED = [
    ("mixture", (1, 1, 1, 2)),
    ("biased", (1, 1, 1, 3)),
    ("written out", (1, 1, 1, 4)),
    ("one expert a token", (1, 1, 1, 6)),
    ("mixture", (1, 1, 1, 8)),
    ("adafactor", (8, 1, 1, 1)),
    ("all experts a token", (1, 8, 1, 1)),
    ("mixture", (1, 1, 8, 1)),
    ("muon", (2, 2, 1, 2)),
    ("muon of square kernels", (1, 2, 1, 4)),
    ("some layers are dense", (2, 1, 2, 2)),
    *FIRST,
    ("rings", (1, 1, 2, 4)),
    ("adapters", (2, 2, 2, 2)),
    ("kinds of experts", (1, 1, 2, 8)),
    ("lion", (1, 2, 4, 2)),
    ("deepseek v3", (1, 2, 1, 3)),
    ("qwen2", (1, 2, 1, 4)),
    ("plain", (1, 1, 2, 3)),
    ("adapters beside shared", (2, 2, 1, 2)),
    ("learned activations", (2, 1, 1, 4)),
    ("gpt-oss", (1, 2, 2, 2)),
    ("gpt-oss", (2, 1, 1, 4)),
    ("adapters of gpt-oss", (1, 2, 1, 3)),
    ("adapters of gpt-oss", (1, 1, 2, 4)),
    ("adapters beside a dense MLP", (1, 2, 1, 4)),
]
"""Meshes, each with another mixture than the next."""


@cache
def on_one_device(name):
    initial = parity.initial_arrays(CONFIGS[name])
    return initial, parity.run(CONFIGS[name], ONE_DEVICE, initial)


@pytest.mark.parametrize("tried", sweep(TRIED, *FIRST), ids=str)
def test_a_mesh_equals_one_device(tried):
    name, mesh = tried
    initial, expected = on_one_device(name)
    split = mesh[-1] > 1 and T % (mesh[-1] * mesh[-2]) == 0
    numbers = parity.run(CONFIGS[name], Case(sizes_of(mesh), split), initial, audited=True)
    errors = parity.compare(numbers, expected)
    # A second moment is a square, with twice the gradient's relative error.
    updates = {path: error / 2 if ".nu." in path else error for path, error in errors.updates.items()}
    assert dataclasses.replace(errors, updates=updates).within(parity.TOLERANCES["float32"]), errors
    assert numbers.problems == ()
    model = CONFIGS[name].model
    assert any("mlp.router" in name for name in numbers.gradients) or model.lora.rank or not model.num_experts


UNCHOSEN = variant(
    optimizer="adafactor",
    num_experts=128,  # a dim from which on adafactor factors
    d_model=128,
    d_ff=8,
    num_layers=1,
    loop=LoopConfig(steps=10, balance_loss=0.0),
)
"""More experts than a batch has choices of."""
ROUTERS = {
    "softmax": {},
    "with a floor": {"normalize_floor": 1e-3},
    "sigmoid": {"router_scores": "sigmoid", "expert_groups": 4, "groups_per_token": 2},
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("mesh", sweep([(1, 2, 1, 2), (2, 1, 2, 2), (1, 8, 1, 1)]), ids=str)
def test_columns_of_a_router_that_no_token_chose_stay_as_they_are(mesh, router):
    """Adafactor divides a gradient by its size: of the rounding of a zero it made a full step, another on each mesh."""
    config = dataclasses.replace(
        UNCHOSEN,
        optimizer=dataclasses.replace(UNCHOSEN.optimizer, weight_decay=0.0),
        model=dataclasses.replace(UNCHOSEN.model, **ROUTERS[router]),
    )
    initial = parity.initial_arrays(config)
    found = [parity.run(config, each, initial) for each in (ONE_DEVICE, Case(sizes_of(mesh), False))]
    for numbers in found:
        gradient = numbers.gradients["blocks.mlp.router"][0]
        chosen = np.unique(numbers.choices[0][0][0])
        unchosen = np.setdiff1d(np.arange(128), chosen)
        assert unchosen.size
        assert not gradient[:, unchosen].any()
    errors = parity.compare(*reversed(found))
    assert errors.within(parity.TOLERANCES["float32"]), errors


@pytest.mark.wide
@pytest.mark.parametrize("more", [{}, {"router_scores": "sigmoid", "shared_experts": 9, "shared_experts_gate": True}])
def test_bfloat16_is_finite(more):
    config = variant(precision=jaxtp.Precision(param="bfloat16", compute="bfloat16"), **BIASED, **more)
    initial = parity.initial_arrays(config)
    numbers = parity.run(config, Case(sizes_of((1, 2, 2, 2)), True), initial, audited=True)
    expected = parity.run(config, ONE_DEVICE, initial)
    assert numbers.problems == ()
    assert all(np.isfinite(np.asarray(array, np.float32)).all() for array in numbers.state.values())
    np.testing.assert_allclose(numbers.losses, expected.losses, rtol=0.05)


# What evens out the load, in the gradient of a whole step: of a layer in tests/layers, of a run in tests/train.
RATE = 0.125
HEAVY = LoopConfig(steps=10, balance_loss=300.0, router_z_loss=20.0)
"""Weights with which the gradient of a router is that of these losses."""
BALANCED = variant(num_kv_heads=2, selection_bias=True).model


@cache
def stepped(mesh, accumulation, remat, scan_layers=True):
    """Losses and gradients, counts, the selection biases after an update and what was dropped, of a batch on a mesh."""
    model = dataclasses.replace(BALANCED, remat=remat, scan_layers=scan_layers)
    on, config = (
        mesh_of(sizes_of(mesh)),
        TrainConfig(model=model, train=dataclasses.replace(HEAVY, accumulation=accumulation)),
    )
    build = lambda: jaxtp.Decoder(model, rngs=nnx.Rngs(0))
    graph, state = state_on_mesh(build, random_weights(lambda: jaxtp.Decoder(BALANCED, rngs=nnx.Rngs(0))), on)
    (batch, *_) = random_tokens(BASE)

    @jax.jit
    def step(state, batch):
        merged = nnx.merge(graph, state)
        terms, _, grads = loss_and_grads(merged, batch, config, jax.random.key(0))
        merged.move_selection_biases(terms.balance, RATE)
        return terms, grads, merged.blocks.mlp.selection_bias[...]

    with jax.set_mesh(on):
        terms, grads, biases = step(state, {name: jnp.asarray(array) for name, array in batch.items()})
        sums = {name: np.asarray(getattr(terms.balance, name)) for name in ("balance_loss", "router_z_loss", "entropy")}
        (times,) = terms.balance.times_chosen
        return {**sums, **by_name(grads, on)}, np.asarray(times), np.asarray(biases), float(terms.balance.dropped)


POLICIES = ("none", "save_dots", "save_gathered", "save_reduced", "full")
STEPS = [
    *(((1, 1, 1, 1), accumulation, "full") for accumulation in (2, 8)),
    *((mesh, 1, "full") for mesh in ((1, 1, 1, 4), (1, 1, 8, 1), (1, 2, 1, 4), (1, 1, 2, 4))),
    *(((2, 1, 2, 2), 2, policy) for policy in POLICIES),
]
STEPS = list(dict.fromkeys(STEPS))


@pytest.mark.wide
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_balance_is_that_of_one_device(step):
    """Losses, their gradients, counts and biases, whatever the mesh, accumulation or policy of remat is: nothing is
    counted twice because it is computed again."""
    found, times, biases, dropped = stepped(*step)
    expected, right, _, _ = stepped((1, 1, 1, 1), 1, "none")
    assert_close(found, expected)
    np.testing.assert_array_equal(times, right)
    tokens = (random_tokens(BASE)[0][SEGMENTS] != 0).sum()
    np.testing.assert_array_equal(times.sum(axis=1), [tokens * BALANCED.experts_per_token] * BALANCED.num_layers)
    assert dropped == 0
    before = random_weights(lambda: jaxtp.Decoder(BALANCED, rngs=nnx.Rngs(0)))["blocks.mlp.selection_bias"]
    towards = np.sign(times.sum(axis=1, keepdims=True) - BALANCED.num_experts * times)
    np.testing.assert_array_equal(biases, np.asarray(before) + RATE * towards.astype(np.float32))


@pytest.mark.wide
def test_written_out_layers_have_the_same_balance():
    assert_close(stepped((1, 2, 1, 2), 1, "full", False)[0], stepped((1, 1, 1, 1), 1, "none")[0])
