"""Heads and hidden features that tp does not divide: padded inside the layers, and nothing of it shows outside."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from support import continue_rows, random_weights, state_on_mesh, sweep, without_mesh

import jaxtp
from jaxtp.analysis.step_costs import describe_padding, step_costs
from jaxtp.checkpoint.logical import from_logical, named_variables, to_logical
from jaxtp.config.schema import ConfigError
from jaxtp.generate.decode_model import DecodeModel
from jaxtp.hf.safetensors import read_header
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.lora import LoraConfig
from jaxtp.layers.mlp import ACTIVATIONS
from jaxtp.layers.parameter import PaddedDim, logical_shape, pad, padding_of, unpad
from jaxtp.layers.rope import RopeScaling
from jaxtp.mesh import mesh_shape, mesh_sizes
from jaxtp.models.config import padded_sizes
from jaxtp.tools.check import parity
from jaxtp.tools.check.shrink import ONE_DEVICE, Case
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import DataConfig, LoopConfig, MeshConfig, OptimizerConfig, TrainConfig
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step
from jaxtp.train.validation import check

SIZES = {"9 and 3": (9, 3, 100), "28 and 4": (28, 4, 300), "7 and 1": (7, 1, 77)}
BASE = TrainConfig(
    model=jaxtp.ModelConfig(vocab_size=31, d_model=16, num_layers=2, head_dim=8, rope_theta=2.0, loss_chunk=5),
    data=DataConfig(sequence_length=8, global_batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    train=LoopConfig(steps=10),
)


def run_of(name, *, optimizer="adamw", **model):
    heads, kv_heads, d_ff = SIZES[name]
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "d_ff": d_ff, **model}
    changed = dataclasses.replace(BASE.model, **sizes)
    return dataclasses.replace(
        BASE, model=changed, optimizer=dataclasses.replace(BASE.optimizer, name=optimizer, weight_decay=0.1)
    )


EVERYTHING = {
    "attention_bias": True,
    "attention_out_bias": True,
    "mlp_bias": True,
    "qk_norm": "projection",
    "remat": "none",
    "sliding_window": 3,
    "attention_gate": True,
    "attention_sinks": True,
}
DELTA = {"delta_value_heads": 9, "delta_key_heads": 3, "delta_key_dim": 4, "delta_value_dim": 6}
VARIANTS = {
    "plain": {},
    "everything": EVERYTHING,
    "plain mlp": {"mlp": "plain", "activation": "gelu_tanh"},
    "pieces": {
        **{"qk_norm": "heads", "norm": "layer_no_bias", "qk_norm_after_rope": True, "value_norm": True},
        **{"attention_gate": True, "value_is_key": True, "clip_qkv": 0.5, "attention_bias": True},
        **{"rotary_fraction": 0.5, "query_temperature": 0.5, "rope_scaling": RopeScaling(original_length=2)},
    },
    "partial rope with biases": {"rotary_fraction": 0.25, "attention_bias": True, "norm": "layer_plus_one"},
    "learned activations": {"mlp": "plain", "activation": "xielu"},
    "shared experts": {"num_experts": 4, "d_ff": 8, "shared_experts": 30, "shared_experts_gate": True},
    "head norms": {"qk_norm": "head", "remat": "save_dots", "scan_layers": False},
    "parallel": {**EVERYTHING, "norm_placement": "parallel", "head_bias": True, "tie_embeddings": True},
    "parallel, two norms": {"norm_placement": "parallel_two", "layer_scale": True, "residual_scale": 0.5},
    "adapters": {"lora": LoraConfig(rank=3)},
    "lion": {"optimizer": "lion"},
    "adafactor": {"optimizer": "adafactor", "d_model": 128},  # from 128 on its moments are factored
    "muon": {"optimizer": "muon"},
    "gated delta": {**DELTA, "optimizer": "muon", "pattern": ({}, {"delta_value_heads": 0})},
}
TRIED = [
    *(
        (name, mesh_shape(tp=tp), "plain")
        for name in SIZES
        for tp in (2, 3, 5, 8)
        if padded_sizes(run_of(name).model, tp)
    ),
    *(("9 and 3", mesh_shape(fsdp=2, tp=4), variant) for variant in VARIANTS),
    *(("7 and 1", mesh_shape(dp=2, tp=2), variant) for variant in ("everything", "adapters", "pieces")),
    *(("28 and 4", mesh_shape(tp=tp), "partial rope with biases") for tp in (3, 8)),
]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_maps_zero_to_zero(name):
    """Otherwise the padded rows of a plain MLP's down projection get gradients."""
    assert ACTIVATIONS[name](jnp.zeros(())) == 0


@pytest.mark.wide
@pytest.mark.parametrize(("name", "sizes", "variant"), TRIED, ids=str)
def test_a_padded_model_is_that_of_one_device(name, sizes, variant):
    """The default suite trains one with padding in tests/train/test_muon.py."""
    config = run_of(name, **VARIANTS[variant])
    initial = parity.initial_arrays(config)
    expected = parity.run(config, ONE_DEVICE, initial)
    can_split = BASE.data.sequence_length % sizes["tp"] == 0
    actual = parity.run(config, Case(sizes, can_split), initial, audited=variant in ("plain", "adafactor", "muon"))
    assert not actual.problems
    errors = parity.compare(actual, expected)
    assert errors.within(parity.TOLERANCES["float32"]), errors


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor", "muon"])
def test_padding_stays_zero_and_moves_between_meshes(optimizer):
    config = run_of("9 and 3", optimizer=optimizer, **EVERYTHING)
    rule = optimizers.build(config.optimizer, 10)
    plan = plan_state(config.model, rule, jaxtp.make_mesh(tp=8))
    step = make_train_step(config, plan)
    state = plan.create(seed=0)
    with jax.set_mesh(plan.mesh):
        for batch in random_tokens(config):
            state, _ = step(state, {name: jnp.asarray(array) for name, array in batch.items()})
    padded = {n: v for n, v in named_variables(state).items() if logical_shape(v) != tuple(v.shape)}
    assert {"model.blocks.attention.out.kernel", "model.blocks.mlp.down.kernel"} <= padded.keys()
    for name, variable in padded.items():
        array, padding = np.asarray(variable[...]), padding_of(variable)
        np.testing.assert_array_equal(pad(unpad(array, padding, 8), padding, 8), array, err_msg=name)
    logical = to_logical(state, plan.mesh)
    for other in (jaxtp.make_mesh(), jaxtp.make_mesh(fsdp=2, tp=2), jaxtp.make_mesh(tp=5)):
        there = from_logical(
            {name: np.asarray(array) for name, array in logical.items()},
            plan_state(config.model, rule, other).abstract,
            other,
        )
        back = to_logical(there, other)
        for name, array in logical.items():
            np.testing.assert_array_equal(back[name], array, err_msg=name)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 16).map(lambda half: 2 * half), st.integers(1, 16))
def test_every_device_has_the_query_heads_of_its_kv_heads(kv_heads, group, width, tp):
    split = PaddedHeads((kv_heads, group, width))
    stored_kv, stored_group, stored_width = split.stored(tp)
    assert (stored_kv >= kv_heads, stored_group >= group, stored_width) == (True, True, width)
    assert stored_kv * stored_group % tp == 0
    if stored_kv % tp:  # a kv head is shared by whole groups of devices, each of which stores a part of it
        assert tp % stored_kv == 0
        assert stored_kv * width % tp == 0
    else:
        assert stored_group == group
    if kv_heads % tp == 0 or (tp % kv_heads == 0 and kv_heads * group % tp == 0 and kv_heads * width % tp == 0):
        assert split.stored(tp) == split.factors
    assert split.keys.stored(tp) == (stored_kv, width)


def test_an_absurd_mesh_takes_no_time():
    assert PaddedHeads((8, 4, 64)).stored(10**40) == (10**40, 4, 64)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_what_is_padded_is_cut_off_again(factors, tp, first):
    split = PaddedDim(tuple(factors))
    shape = (split.size, 3) if first else (3, split.size)
    array = np.arange(1, 1 + 3 * split.size).reshape(shape)
    padding = ((-2 if first else -1, split),)
    padded = pad(array, padding, tp)
    assert padded.shape[0 if first else 1] % tp == 0
    assert padded.sum() == array.sum()
    np.testing.assert_array_equal(unpad(padded, padding, tp), array)


@pytest.mark.wide
def test_a_cache_of_padded_heads_generates_what_one_device_does():
    config = run_of("9 and 3", qk_norm="projection").model
    build = lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0))
    weights = random_weights(build)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (4, 6), np.int32)

    def logits(mesh):
        graph, state = state_on_mesh(build, weights, mesh)

        def read(state):
            model = nnx.merge(graph, state)
            reader = DecodeModel(model, model.in_order())
            first, caches = continue_rows(reader, ids[:, :4], reader.empty(4, 6), jnp.zeros(4, jnp.int32))
            last, _ = continue_rows(reader, ids[:, 4:], caches, jnp.full(4, 4))
            return model.logits_of_hidden(jnp.concatenate([first, last], axis=1)), model(ids)

        with jax.set_mesh(mesh):
            return [np.asarray(found) for found in jax.jit(read)(state)]

    expected = logits(jaxtp.make_mesh())
    for found in logits(jaxtp.make_mesh(fsdp=2, tp=4)):
        np.testing.assert_allclose(found, expected[1], atol=1e-4)


@pytest.mark.parametrize("tp", sweep([2, 5, 8], 8))
def test_files_have_no_padding(tmp_path, tp):
    config = run_of(
        "9 and 3",
        **EVERYTHING | {"qk_norm": "none", "sliding_window": None, "attention_gate": False, "attention_sinks": False},
    ).model
    weights = random_weights(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = without_mesh(lambda: jaxtp.Decoder(config, rngs=nnx.Rngs(0)), weights)
    jaxtp.save_hf(nnx.merge(graph, state), tmp_path / "whole")
    with jax.set_mesh(jaxtp.make_mesh(tp=tp)):
        jaxtp.save_hf(jaxtp.load_hf(tmp_path / "whole"), tmp_path / "padded")
    one, other = (dict(read_header(tmp_path / name / "model.safetensors")) for name in ("whole", "padded"))
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        rows = tensor.shape[0]
        for (_, expected), (_, actual) in zip(tensor.blocks(0, rows), other[name].blocks(0, rows), strict=True):
            np.testing.assert_array_equal(actual, expected, err_msg=name)


def test_what_padding_costs_is_said_and_counted():
    config = run_of("28 and 4").model
    assert describe_padding(config, mesh_shape(tp=4)) is None
    text = describe_padding(config, mesh_shape(tp=8))
    assert describe_padding(config, mesh_shape(cp=4, tp=8)) == text
    assert text.startswith("with tp 8: 28 query heads to 32, 300 d_ff to 304, ")
    assert "WARNING" not in text
    much = describe_padding(run_of("7 and 1").model, mesh_shape(tp=5))
    assert much.endswith("much padding; tp 1 needs none")
    shape = {"batch_size": 8, "sequence_length": 8}
    padded, plain = (step_costs(config, mesh_shape(tp=8), **shape), step_costs(config, mesh_shape(), **shape))
    assert 8 * padded.flops > plain.flops
    assert padded.padding > plain.padding == 0


def test_a_run_may_refuse_padding():
    config = dataclasses.replace(run_of("9 and 3"), mesh=MeshConfig(dp=1, fsdp=1, tp=2, allow_padding=False))
    message = r"mesh.tp=2 pads 9 query heads to 12, and mesh.allow_padding is false; tp can be 1"
    with pytest.raises(ConfigError, match=message):
        check(config, mesh_shape(tp=2))
    check(dataclasses.replace(config, mesh=MeshConfig()), mesh_shape(tp=2))
    assert mesh_sizes(jaxtp.make_mesh(tp=2)) == mesh_shape(tp=2)


def test_what_padding_costs_is_said_under_a_mesh():
    """As where a run prints its summary."""
    config = dataclasses.replace(run_of("9 and 3").model, num_layers=3)
    with jax.set_mesh(jaxtp.make_mesh(tp=2)):
        assert describe_padding(config, mesh_shape(tp=2)) == describe_padding(
            dataclasses.replace(config, loss_chunk=6), mesh_shape(tp=2)
        )
