"""Gated DeltaNet, Kimi Delta Attention and Mamba-2 against a recurrence in float64, on meshes:
outputs and every gradient.
"""

from dataclasses import replace
from functools import cache

import deltas
import jax
import numpy as np
from flax import nnx
from layer_programs import LayerProgram, delta_layer, in_float64, in_order
from numpy.random import default_rng
from packed_reference import D, V, batch
from support import assert_close, by_name, random_weights, swept
from tables import read_table
from variants import variant, variants

import jaxtp
from jaxtp.checkpoint.logical import named_variables
from jaxtp.layers.gated_delta import GatedDeltaNet
from jaxtp.mesh import mesh_shape
from jaxtp.models.config import padded_sizes, violations
from jaxtp.tools.check.small_model import ShrinkSpec, shrink_model
from jaxtp.train.run_report import describe_block

TABLE = read_table(__file__)
CONFIG = variant(jaxtp.ModelConfig(vocab_size=V, d_model=D), TABLE["base"])
CONFIGS = variants(CONFIG, TABLE["configs"])
CASES = [(name, tuple(mesh), split) for name, mesh, split in TABLE["cases"]]


@cache
def expected(name):
    """Returns weights, input and the output's gradient in float32; and results in float64."""
    config = CONFIGS[name]
    *_, segments = batch()
    weights = deltas.long_memory(random_weights(delta_layer(config, D)))
    arrays = default_rng(0).standard_normal((2, *segments.shape, D))
    scale = config.lora.scale if config.lora.rank else 0
    layer = deltas.mamba2 if config.delta_kind == "mamba2" else deltas.gated_delta
    rule = lambda w, x: layer(x, segments, w, config, config.norm_eps, scale)
    return weights, arrays.astype(np.float32), in_float64(rule, weights, *arrays)


@swept("case", CASES)
def test_a_layer_is_the_recurrence_on_every_mesh(case):
    """Of packed documents."""
    name, mesh, split = case
    weights, arrays, right = expected(name)
    trained = nnx.LoRAParam if CONFIGS[name].lora.rank else nnx.Param
    build = delta_layer(CONFIGS[name], D, sequence_parallel=split)
    run = LayerProgram(build, weights, mesh, trained=trained, call=in_order(zigzag=False))
    found = run(*arrays, batch()[2])
    assert_close(found, {path: right[path] for path in found})


def test_initial_values_are_those_of_transformers_on_every_mesh():
    config = replace(CONFIG, delta_value_heads=600, delta_key_heads=200, delta_key_dim=1)
    make = jax.jit(lambda: nnx.state(GatedDeltaNet(8, config, rngs=nnx.Rngs(0))))
    on = jaxtp.make_mesh(tp=3)
    with jax.set_mesh(on):
        split = by_name(make(), on)
    whole = {name: np.asarray(variable[...]) for name, variable in named_variables(make()).items()}
    assert_close(split, whole, tolerance=0)
    rates = np.exp(whole["decay_log"])
    assert 0.01 <= rates.min() < 0.2
    assert 15.8 < rates.max() <= 16.0001
    assert abs(rates.mean() - 8) < 0.6
    assert (whole["dt_bias"] == 1).all()


def test_settings_of_a_hybrid_may_be_those_of_the_model_or_of_its_pattern():
    sizes = {name: getattr(CONFIG, name) for name in ("delta_value_heads", "delta_key_heads")}
    one = replace(CONFIG, num_layers=2, pattern=({}, {"delta_value_heads": 0}))
    other = replace(
        one, delta_value_heads=0, delta_key_heads=0, pattern=(sizes, {"delta_key_heads": 2})
    )
    assert list(one.layers()) == list(other.layers())
    assert describe_block(one) == describe_block(other)
    assert "6 heads with states" in describe_block(one)
    assert not [*violations(one, mesh_shape(tp=3)), *violations(other, mesh_shape(tp=3))]


def test_a_small_model_is_padded_like_the_large_one():
    pattern = ({}, {"delta_value_heads": 0, "num_heads": 6})
    wide = {
        "num_layers": 4,
        "delta_key_dim": 128,
        "delta_value_dim": 128,
        "head_dim": 64,
        "norm_eps": 1e-6,
    }
    large = replace(CONFIG, pattern=pattern, **wide)
    for tp in (2, 3, 4, 8):
        small = shrink_model(
            large, ShrinkSpec(tps=frozenset({1, tp}), shards=1, length=32, before=4096)
        )
        assert (small.delta_key_dim, small.delta_value_dim, small.norm_eps) == (8, 10, 1.0)
        sizes = [padded_sizes(each, tp) for each in (large, small)]
        padded = [{name: n for name, n in each.items() if "heads" in name} for each in sizes]
        assert padded[0] == padded[1]


def test_a_small_model_lists_each_kind_of_block_once():
    window = {"sliding_window": 256}
    large = replace(
        CONFIG,
        experts_per_token=6,
        first_blocks=(window, {"num_experts": 64}, window),
        pattern=({}, {}, window),
    )
    kinds = lambda config: {
        (bool(block.sliding_window), bool(block.num_experts)) for block in config.layers()
    }
    for num_layers, kept in ((10, 6), (4, 3), (3, 2)):
        large = replace(large, num_layers=num_layers)
        small = shrink_model(large, ShrinkSpec(frozenset({1}), shards=1, length=32, before=4096))
        assert small.num_layers == kept
        assert kinds(small) == kinds(large)
        assert not [*violations(small, mesh_shape())]
