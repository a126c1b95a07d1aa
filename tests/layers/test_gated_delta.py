"""Gated DeltaNet against a recurrence in float64, on every mesh: loss and every gradient."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from packed_reference import D, V, batch, loss_and_gradients
from support import (
    TOLERANCE,
    assert_close,
    by_name,
    random_weights,
    relative_error,
    sizes_of,
    state_on_mesh,
    sweep,
    without_mesh,
)

import jaxtp
from jaxtp.analysis.work import work_of
from jaxtp.checkpoint.logical import named_variables
from jaxtp.layers.branch import ShrinkSpec
from jaxtp.layers.context import Sequences
from jaxtp.layers.gated_delta import GatedDeltaNet
from jaxtp.layers.linear import LayerContext
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.parameter import pad, padding_of, unpad
from jaxtp.mesh import mesh_of, mesh_shape
from jaxtp.models.config import padded_sizes, shrink_model, violations

LONG = 136  # three chunks of the rule
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
    "hybrid": dataclasses.replace(CONFIG, num_layers=2, pattern=({}, {**LATENT, "value_head_dim": 10})),
    "adapters": dataclasses.replace(CONFIG, lora=LoraConfig(rank=3, alpha=5.0)),
}
MESHES = [(1, 1, 1, n) for n in (1, 2, 3, 4, 8)] + [(1, 2, 1, 2), (2, 1, 1, 2), (2, 2, 1, 2)]


def build(config):
    return lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))


def slow_weights(make):
    """Returns random weights with decays that leave a part of the state, unlike most initial ones."""
    weights = random_weights(make)
    slow = {name: weights[name] - 4 for name in weights if name.endswith("decay_log")}
    return {**weights, **slow}


@cache
def expected(name):
    """Returns weights in float32; and loss and gradients in float64."""
    config = CONFIGS[name]
    weights = slow_weights(build(config))
    return weights, *loss_and_gradients(weights, config)


def computed(name, mesh, **changes):
    """Returns the loss, and the gradients as stored."""
    ids, labels, segments = batch()
    config, on = dataclasses.replace(CONFIGS[name], **changes), mesh_of(sizes_of(mesh))
    graph, state = state_on_mesh(build(config), expected(name)[0], on)
    trained = nnx.LoRAParam if config.lora.rank else nnx.Param

    def loss(params, others):
        return nnx.merge(graph, params, others, copy=True).loss(ids, labels, segments_BT=segments)[0]

    with jax.set_mesh(on):
        total, grads = jax.jit(jax.value_and_grad(loss))(*nnx.split_state(state, trained, ...))
        return total, grads, by_name(grads, on)


def check(name, mesh, **changes):
    _, expected_loss, expected_grads = expected(name)
    total, _, grads = computed(name, mesh, **changes)
    errors = {name: relative_error(grad, expected_grads[name]) for name, grad in grads.items()}
    errors["loss"] = abs(float(total) / float(expected_loss) - 1)
    worst = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not worst, worst


SOME = [(1, 1, 1, 4), (1, 1, 1, 3), (1, 2, 1, 2)]
TRIED = [("groups", mesh, split) for mesh in MESHES for split in {mesh[-1] > 1, False}]
TRIED += [(name, mesh, split) for name in CONFIGS for mesh in [*SOME, (1, 1, 1, 8)] for split in (True, False)]


@pytest.mark.parametrize("case", sweep([*dict.fromkeys(TRIED)], ("adapters", (1, 1, 1, 4), True)), ids=str)
def test_on_every_mesh(case):
    name, mesh, sequence_parallel = case
    check(name, mesh, sequence_parallel=sequence_parallel)


@pytest.mark.wide
@pytest.mark.parametrize("remat", ["none", "save_dots", "save_gathered", "save_reduced", "full"])
@pytest.mark.parametrize("name", ["hybrid", "adapters"])
def test_every_policy(name, remat):
    check(name, (1, 2, 1, 2), remat=remat)


@pytest.mark.wide
@pytest.mark.parametrize("changes", [{"scan_layers": False}, {"overlap": "ring"}], ids=str)
@pytest.mark.parametrize("name", ["hybrid", "adapters"])
def test_other_programs(name, changes):
    check(name, (1, 1, 1, 4), **changes)


@pytest.mark.wide
@pytest.mark.parametrize("tp", [2, 3, 8])
def test_beside_an_mlp_that_shares_its_collectives(tp):
    (one, _, expected), (other, _, found) = (
        computed("groups", (1, 1, 1, n), norm_placement="parallel") for n in (1, tp)
    )
    assert_close({**found, "loss": other}, {**expected, "loss": one})


@pytest.mark.wide
@pytest.mark.parametrize("name", ["groups", "one key head"])
@pytest.mark.parametrize("tp", [3, 8])
def test_padding_gets_no_gradient(name, tp):
    stored = named_variables(computed(name, (1, 1, 1, tp))[1])
    padded = {path: variable for path, variable in stored.items() if padding_of(variable)}
    assert len(padded) >= 12
    for path, variable in padded.items():
        array, padding = np.asarray(variable[...]), padding_of(variable)
        np.testing.assert_array_equal(array, pad(unpad(array, padding, tp), padding, tp), err_msg=path)


@cache
def layer():
    """Returns a function from rows, segments and a gradient of the output to the output and the input's gradient."""
    make = lambda: GatedDeltaNet(D, CONFIG, rngs=nnx.Rngs(0))
    graph, state = without_mesh(make, slow_weights(make))

    @jax.jit
    def run(x, segments, gradient):
        y, backward = jax.vjp(lambda x: nnx.merge(graph, state)(x, Sequences(segments=segments)), x)
        return y, backward(gradient)[0]

    return run


@pytest.mark.parametrize("seed", sweep([*range(3)], 0))
def test_a_document_packed_equals_it_alone(seed):
    """Forward and backward, whatever its neighbours are."""
    random = np.random.default_rng(seed)
    x, gradient = random.standard_normal((2, 1, LONG, D)).astype(np.float32)
    lengths = random.multinomial(LONG - 4, np.ones(4) / 4) + 1
    segments = np.repeat([3, 1, 3, 0], lengths)[None]
    packed = layer()(x, segments, gradient)
    for end, length in zip(np.cumsum(lengths), lengths, strict=True):
        own = slice(end - length, end)
        alone = [np.zeros_like(array) for array in (x, segments, gradient)]
        for array, whole in zip(alone, (x, np.ones_like(segments), gradient), strict=True):
            array[:, :length] = whole[:, own]
        found = [array[:, :length] for array in layer()(*alone)]
        assert_close(dict(enumerate(found)), {i: array[:, own] for i, array in enumerate(packed)})


@pytest.mark.parametrize("tp", sweep([2, 4], 4))
def test_tp_divides_the_products_and_moves_the_two_collectives_of_a_block(tp):
    config = dataclasses.replace(CONFIG, delta_key_heads=4, delta_value_heads=8)

    def work(tp):
        sizes = mesh_shape(tp=tp)
        with jax.set_mesh(mesh_of(sizes)):
            make = lambda: GatedDeltaNet(D, config, LayerContext(sequence_parallel=tp > 1), rngs=nnx.Rngs(0))
            graph, state = nnx.split(nnx.eval_shape(make))
            loss = lambda params, x: jnp.sum(nnx.merge(graph, params[0])(params[1] + x))
            x = jax.ShapeDtypeStruct((2, 128, D), jnp.float32)
            return work_of(loss, sizes, (state, x), x)

    one, split = work(1), work(tp)
    assert tp * sum(product.flops for product in split.products) == sum(product.flops for product in one.products)
    large = [c.kind for c, times in split.traffic.items() for _ in range(times) if len(c.shape) > 2]
    assert sorted(large) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]
    assert all(c.bytes <= 4 * config.delta_value_dim for c in split.traffic if len(c.shape) < 2)  # the norm's gradient


def test_initial_values_are_those_of_transformers_on_every_mesh():
    config = dataclasses.replace(CONFIG, delta_value_heads=600, delta_key_heads=200, delta_key_dim=1)
    make, on = jax.jit(lambda: nnx.state(GatedDeltaNet(D, config, rngs=nnx.Rngs(0)))), jaxtp.make_mesh(tp=3)
    with jax.set_mesh(on):
        split = by_name(make(), on)
    whole = {name: np.asarray(variable[...]) for name, variable in named_variables(make()).items()}
    assert_close(split, whole, tolerance=0)
    rates = np.exp(whole["decay_log"])
    assert 0.01 <= rates.min() < 0.2
    assert 15.8 < rates.max() <= 16.0001
    assert abs(rates.mean() - 8) < 0.6
    assert (whole["dt_bias"] == 1).all()


UNFIT = {
    "model.delta_key_heads=0, but model.delta_value_heads=6 needs it; 6 works": {"delta_key_heads": 0},
    "model.delta_key_dim=0, but model.delta_value_heads=6 needs it; 128 works": {"delta_key_dim": 0},
    "model.delta_value_dim=0, but model.delta_value_heads=6 needs it; 128 works": {"delta_value_dim": 0},
    "model.delta_value_heads=6 is not divisible by model.delta_key_heads=4; delta_key_heads can be 1, 2, 3, 6": {
        "delta_key_heads": 4
    },
    "model.delta_conv=3 needs Gated DeltaNet in a block; set model.delta_value_heads": {
        **{"delta_value_heads": 0, "delta_key_heads": 0, "delta_key_dim": 0, "delta_value_dim": 0, "delta_conv": 3},
    },
}


@pytest.mark.parametrize("text", UNFIT)
def test_settings_that_do_not_fit_are_named(text):
    (problem,) = violations(dataclasses.replace(CONFIG, **UNFIT[text]), mesh_shape(fsdp=2, tp=2))
    assert problem.startswith(text)


def test_more_devices_than_twice_the_heads_are_refused():
    (problem,) = violations(CONFIG, mesh_shape(tp=16))
    assert problem.startswith("mesh.tp=16 is more than twice model.delta_value_heads=6")


def test_settings_of_a_hybrid_may_stand_on_either_side():
    sizes = {name: getattr(CONFIG, name) for name in ("delta_value_heads", "delta_key_heads")}
    one = dataclasses.replace(CONFIG, num_layers=2, pattern=({}, {"delta_value_heads": 0}))
    other = dataclasses.replace(one, delta_value_heads=0, delta_key_heads=0, pattern=(sizes, {"delta_key_heads": 2}))
    assert list(one.layers()) == list(other.layers())
    heads = "6 heads with states (2 key) of 8 x 10 in 1 of 2 layers, 6 heads (6 kv) of 16 in 1"
    described = f"d_model 24, {heads}, d_ff 24, and 1 other kind of block"
    assert one.describe_block() == other.describe_block() == described
    assert not [*violations(one, mesh_shape(tp=3)), *violations(other, mesh_shape(tp=3))]


@pytest.mark.parametrize("tp", sweep([2, 3, 4, 8], 3, 8))
def test_a_small_model_is_padded_alike(tp):
    large = dataclasses.replace(
        CONFIG, num_layers=4, delta_key_dim=128, delta_value_dim=128, head_dim=64, norm_eps=1e-6
    )
    large = dataclasses.replace(large, pattern=({}, {"delta_value_heads": 0, "num_heads": 6}))
    small = shrink_model(large, ShrinkSpec(tps=frozenset({1, tp}), shards=1, length=32, before=4096))
    assert (small.delta_key_dim, small.delta_value_dim, small.norm_eps) == (8, 10, 1.0)
    padded = [{name: n for name, n in padded_sizes(each, tp).items() if "heads" in name} for each in (large, small)]
    assert padded[0] == padded[1]
