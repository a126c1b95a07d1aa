"""Gated DeltaNet against a recurrence in float64, on meshes: outputs and every gradient."""

import dataclasses
from functools import cache

import deltas
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from layer_programs import LayerProgram
from packed_reference import D, V, batch, loss_and_gradients
from support import assert_close, by_name, random_weights, sizes_of, state_on_mesh, sweep

import jaxtp
from jaxtp.analysis.work import work_of
from jaxtp.checkpoint.logical import named_variables
from jaxtp.layers.branch import ShrinkSpec
from jaxtp.layers.context import Sequences
from jaxtp.layers.gated_delta import GatedDeltaNet
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.lora import LoraConfig
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.config import padded_sizes, shrink_model, violations

LATENT = {"delta_value_heads": 0, "kv_rank": 16, "query_rank": 8, "head_dim": 12, "rope_head_dim": 4}
CONFIG = jaxtp.ModelConfig(
    vocab_size=V,
    d_model=D,
    num_layers=1,
    num_heads=6,
    num_kv_heads=6,
    delta_value_heads=6,
    delta_key_heads=2,
    delta_key_dim=8,
    delta_value_dim=10,
    d_ff=24,
    norm_eps=1e-3,
    rope_theta=20.0,
    loss_chunk=8,
)
CONFIGS = {
    "groups": CONFIG,
    "single": dataclasses.replace(CONFIG, delta_key_heads=6, delta_key_dim=5, delta_conv=2),
    "one key head": dataclasses.replace(CONFIG, delta_value_heads=4, delta_key_heads=1, delta_key_dim=12, delta_conv=6),
    "adapters": dataclasses.replace(CONFIG, lora=LoraConfig(rank=3, alpha=5.0)),
}


def slow_weights(make):
    """Returns random weights with decays that leave a part of the state, unlike most initial ones."""
    weights = random_weights(make)
    slow = {name: weights[name] - 4 for name in weights if name.endswith("decay_log")}
    return {**weights, **slow}


def layer_of(config, **context):
    context = LayerContext(lora=config.lora, **context)
    norm = jaxtp.NormConfig(norm_eps=config.norm_eps)
    return lambda: GatedDeltaNet(D, config, context, norm=norm, rngs=nnx.Rngs(0))


@cache
def expected(name):
    """Returns weights, input and the output's gradient in float32; and results in float64."""
    config, (*_, segments) = CONFIGS[name], batch()
    weights = slow_weights(layer_of(config))
    arrays = np.random.default_rng(0).standard_normal((2, *segments.shape, D))
    scale = config.lora.scale if config.lora.rank else 0
    rule = lambda w, x: deltas.gated_delta(x, segments, w, config, config.norm_eps, scale)
    with jax.enable_x64(True):
        wide = {path: np.asarray(array, np.float64) for path, array in weights.items()}
        y, backward = jax.vjp(jax.jit(rule), wide, arrays[0])
        grads, grad_x = backward(arrays[1])
        return weights, arrays.astype(np.float32), {"y": y, "x": grad_x, **grads}


MESHES = [(1, 1, 1, 1), (1, 1, 1, 3), (1, 1, 1, 4), (1, 1, 1, 8), (1, 2, 1, 2), (2, 2, 1, 2)]
CASES = [("groups", mesh, mesh[-1] > 1) for mesh in MESHES]
CASES += [("groups", (1, 1, 1, 4), False), ("single", (1, 1, 1, 3), True), ("single", (1, 1, 1, 8), False)]
CASES += [("one key head", (1, 1, 1, 3), False), ("one key head", (1, 1, 1, 8), True)]
CASES += [("adapters", (1, 1, 1, 4), True), ("adapters", (1, 2, 1, 2), False)]


@pytest.mark.parametrize("case", sweep(CASES, ("adapters", (1, 1, 1, 4), True)), ids=str)
def test_a_layer_is_the_recurrence_on_every_mesh(case):
    """Of packed documents."""
    name, mesh, split = case
    weights, arrays, right = expected(name)
    trained = nnx.LoRAParam if CONFIGS[name].lora.rank else nnx.Param
    call = lambda layer, x, segments: layer(x, Sequences(segments=segments))
    run = LayerProgram(layer_of(CONFIGS[name], sequence_parallel=split), weights, mesh, trained=trained, call=call)
    found = run(*arrays, batch()[2])
    assert_close(found, {path: right[path] for path in found})


HYBRID = dataclasses.replace(CONFIGS["adapters"], num_layers=2, pattern=({}, {**LATENT, "value_head_dim": 10}))
PROGRAMS = [
    ((1, 1, 1, 4), {"remat": "none", "overlap": "ring"}),
    ((1, 2, 1, 2), {"remat": "save_dots"}),
    ((1, 1, 1, 3), {"remat": "save_gathered"}),
    ((1, 2, 1, 2), {"remat": "save_reduced"}),
    ((1, 1, 1, 4), {"remat": "full", "scan_layers": False}),
]


def decoder_on(mesh, config, weights):
    """Returns the loss of a decoder and its gradients."""
    ids, labels, segments = batch()
    on = mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)), weights, on)
    trained = nnx.LoRAParam if config.lora.rank else nnx.Param

    def loss(params, others):
        return nnx.merge(graph, params, others, copy=True).loss(ids, labels, segments_BT=segments)[0]

    with jax.set_mesh(on):
        total, grads = jax.jit(jax.value_and_grad(loss))(*nnx.split_state(state, trained, ...))
        return {"loss": total, **by_name(grads, on)}


@cache
def of_hybrid():
    weights = slow_weights(lambda: jaxtp.Decoder(HYBRID, rngs=nnx.Rngs(0)))
    total, grads = loss_and_gradients(weights, HYBRID)
    return weights, {"loss": total, **grads}


@pytest.mark.wide
@pytest.mark.parametrize(("mesh", "changes"), PROGRAMS, ids=str)
def test_a_hybrid_with_adapters_is_plain_mathematics_with_every_policy(mesh, changes):
    weights, right = of_hybrid()
    found = decoder_on(mesh, dataclasses.replace(HYBRID, **changes), weights)
    assert_close(found, {path: right[path] for path in found})


@pytest.mark.wide
def test_a_block_whose_mlp_shares_its_collectives_is_that_of_one_device():
    config = dataclasses.replace(CONFIG, norm_placement="parallel")
    weights = slow_weights(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))
    assert_close(decoder_on((1, 1, 1, 3), config, weights), decoder_on((1, 1, 1, 1), config, weights))


def test_tp_divides_the_products_and_moves_the_two_collectives_of_a_block():
    config = dataclasses.replace(CONFIG, delta_key_heads=4, delta_value_heads=8)

    def work(tp):
        sizes = mesh_shape(tp=tp)
        with jax.set_mesh(mesh_of(sizes)):
            graph, state = nnx.split(nnx.eval_shape(layer_of(config, sequence_parallel=tp > 1)))
            loss = lambda params, x: jnp.sum(nnx.merge(graph, params[0])(params[1] + x))
            x = jax.ShapeDtypeStruct((2, 128, D), jnp.float32)
            return work_of(loss, sizes, (state, x), x)

    one, split = work(1), work(4)
    assert 4 * sum(product.flops for product in split.products) == sum(product.flops for product in one.products)
    large = [c.kind for c, times in split.traffic.items() for _ in range(times) if len(c.shape) > 2]
    assert sorted(large) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]
    assert all(c.bytes <= 4 * config.delta_value_dim for c in split.traffic if len(c.shape) < 2)  # the norm's gradient


def test_initial_values_are_those_of_transformers_on_every_mesh():
    config = dataclasses.replace(CONFIG, delta_value_heads=600, delta_key_heads=200, delta_key_dim=1)
    make, on = jax.jit(lambda: nnx.state(GatedDeltaNet(8, config, rngs=nnx.Rngs(0)))), jaxtp.make_mesh(tp=3)
    with jax.set_mesh(on):
        split = by_name(make(), on)
    whole = {name: np.asarray(variable[...]) for name, variable in named_variables(make()).items()}
    assert_close(split, whole, tolerance=0)
    rates = np.exp(whole["decay_log"])
    assert 0.01 <= rates.min() < 0.2
    assert 15.8 < rates.max() <= 16.0001
    assert abs(rates.mean() - 8) < 0.6
    assert (whole["dt_bias"] == 1).all()


REFUSED = [
    ({"delta_key_heads": 0}, {}, "model.delta_key_heads=0", "6 works"),
    ({"delta_key_dim": 0}, {}, "model.delta_key_dim=0", "128 works"),
    ({"delta_value_dim": 0}, {}, "model.delta_value_dim=0", "128 works"),
    ({"delta_key_heads": 4}, {}, "model.delta_value_heads=6", "model.delta_key_heads=4", "can be 1, 2, 3, 6"),
    (
        dict.fromkeys(("delta_value_heads", "delta_key_heads", "delta_key_dim", "delta_value_dim"), 0)
        | {"delta_conv": 3},
        *({}, "model.delta_conv=3", "set model.delta_value_heads"),
    ),
    ({}, {"tp": 16}, "mesh.tp=16", "twice model.delta_value_heads=6"),
]


def test_settings_that_do_not_fit_are_refused_by_name():
    for changes, sizes, *words in REFUSED:
        (problem,) = violations(dataclasses.replace(CONFIG, **changes), mesh_shape(**sizes))
        assert not [word for word in words if word not in problem], problem


def test_settings_of_a_hybrid_may_be_those_of_the_model_or_of_its_pattern():
    sizes = {name: getattr(CONFIG, name) for name in ("delta_value_heads", "delta_key_heads")}
    one = dataclasses.replace(CONFIG, num_layers=2, pattern=({}, {"delta_value_heads": 0}))
    other = dataclasses.replace(one, delta_value_heads=0, delta_key_heads=0, pattern=(sizes, {"delta_key_heads": 2}))
    assert list(one.layers()) == list(other.layers())
    assert one.describe_block() == other.describe_block()
    assert "6 heads with states (2 key) of 8 x 10 in 1 of 2 layers, 6 heads (6 kv) of 16 in 1" in one.describe_block()
    assert not [*violations(one, mesh_shape(tp=3)), *violations(other, mesh_shape(tp=3))]


def test_a_small_model_is_padded_like_the_large_one():
    pattern = ({}, {"delta_value_heads": 0, "num_heads": 6})
    wide = {"num_layers": 4, "delta_key_dim": 128, "delta_value_dim": 128, "head_dim": 64, "norm_eps": 1e-6}
    large = dataclasses.replace(CONFIG, pattern=pattern, **wide)
    for tp in (2, 3, 4, 8):
        small = shrink_model(large, ShrinkSpec(tps=frozenset({1, tp}), shards=1, length=32, before=4096))
        assert (small.delta_key_dim, small.delta_value_dim, small.norm_eps) == (8, 10, 1.0)
        sizes = [padded_sizes(each, tp) for each in (large, small)]
        padded = [{name: n for name, n in each.items() if "heads" in name} for each in sizes]
        assert padded[0] == padded[1]
