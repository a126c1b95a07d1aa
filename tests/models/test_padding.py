"""Heads and hidden features that tp does not divide: padded inside the layers, and nothing of it
shows outside.

(Updates on meshes: test_updates.py.)
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from safetensors.numpy import load_file
from support import decoder, random_weights, swept, use_mesh, without_mesh
from tables import read_table
from variants import variant

import jaxtp
from jaxtp import make_mesh
from jaxtp.analysis.step_costs import describe_padding, step_costs
from jaxtp.checkpoint.logical import from_logical, named_variables, to_logical
from jaxtp.config.schema import ConfigError
from jaxtp.layers.attention import PaddedHeads
from jaxtp.layers.mlp import ACTIVATIONS
from jaxtp.layers.parameter import PaddedDim, logical_shape, pad, padding_of, unpad
from jaxtp.mesh import mesh_shape
from jaxtp.models.block import BlockConfig, padded_dims
from jaxtp.tools.check.subject import random_tokens
from jaxtp.train import optimizer as optimizers
from jaxtp.train.config import TrainConfig
from jaxtp.train.parts import step_settings
from jaxtp.train.state import plan_state
from jaxtp.train.step import make_train_step
from jaxtp.train.validation import check

TABLE = read_table(__file__)
RUN = variant(TrainConfig(), TABLE["run"])


def test_an_activation_maps_zero_to_zero():
    """Otherwise the padded rows of a plain MLP's down projection get gradients."""
    found = jax.jit(lambda x: {name: activation(x) for name, activation in ACTIVATIONS.items()})(
        np.zeros(())
    )
    assert found == dict.fromkeys(ACTIVATIONS, 0)


@swept("optimizer", ["adafactor", "muon"])
def test_padding_stays_zero_and_moves_between_meshes(optimizer):
    run = variant(RUN, {"model": TABLE["everything"], "optimizer": {"name": optimizer}})
    rule = optimizers.build(run.optimizer, 10)
    plan = plan_state(run.model, rule, make_mesh(tp=8))
    step = make_train_step(step_settings(run), plan)
    state = plan.create(seed=0)
    with jax.set_mesh(plan.mesh):
        for batch in random_tokens(run):
            state, _ = step(state, {name: jnp.asarray(array) for name, array in batch.items()})
    padded = {n: v for n, v in named_variables(state).items() if logical_shape(v) != tuple(v.shape)}
    assert {"model.blocks.attention.out.kernel", "model.blocks.mlp.down.kernel"} <= padded.keys()
    for name, variable in padded.items():
        array = np.asarray(variable[...])
        padding = padding_of(variable)
        assert_array_equal(pad(unpad(array, padding, 8), padding, 8), array, err_msg=name)
    logical = {name: np.asarray(array) for name, array in to_logical(state, plan.mesh).items()}
    for other in (make_mesh(fsdp=2, tp=2), make_mesh(tp=5)):
        there = from_logical(logical, plan_state(run.model, rule, other).abstract, other)
        back = to_logical(there, other)
        for name, array in logical.items():
            assert_array_equal(back[name], array, err_msg=name)


@given(
    st.integers(1, 12),
    st.integers(1, 9),
    st.integers(1, 16).map(lambda half: 2 * half),
    st.integers(1, 16),
)
def test_every_device_has_the_query_heads_of_its_kv_heads(kv_heads, group, width, tp):
    split = PaddedHeads((kv_heads, group, width), width)
    stored_kv, stored_group, stored_width = split.stored(tp)
    assert (stored_kv >= kv_heads, stored_group >= group, stored_width) == (True, True, width)
    assert stored_kv * stored_group % tp == 0
    # A kv head is shared by whole groups of devices, each of which stores a part of it
    if stored_kv % tp:
        assert tp % stored_kv == 0
        assert stored_kv * width % tp == 0
    else:
        assert stored_group == group
    if kv_heads % tp == 0 or (
        tp % kv_heads == 0 and kv_heads * group % tp == 0 and kv_heads * width % tp == 0
    ):
        assert split.stored(tp) == split.factors
    assert split.keys.stored(tp) == (stored_kv, width)


def test_an_absurd_mesh_takes_no_time():
    assert PaddedHeads((8, 4, 64), 64).stored(10**40) == (10**40, 4, 64)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_what_is_padded_is_cut_off_again(factors, tp, first):
    split = PaddedDim(tuple(factors))
    shape = (split.size, 3) if first else (3, split.size)
    array = np.arange(1, 1 + 3 * split.size).reshape(shape)
    padding = ((-2 if first else -1, split),)
    padded = pad(array, padding, tp)
    assert padded.shape[0 if first else 1] % tp == 0
    assert padded.sum() == array.sum()
    assert_array_equal(unpad(padded, padding, tp), array)


@swept("tp", [2, 5])
def test_files_have_no_padding(tmp_path, tp):
    config = variant(RUN.model, TABLE["small"])
    build = decoder(config)
    jaxtp.hf.save(nnx.merge(*without_mesh(build, random_weights(build))), tmp_path / "whole")
    with use_mesh(tp=tp):
        jaxtp.hf.save(jaxtp.hf.load(tmp_path / "whole"), tmp_path / "padded")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "padded"))
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert_array_equal(array, other[name], err_msg=name)


def test_what_padding_costs_is_said_and_counted():
    config = variant(RUN.model, TABLE["many"])
    assert describe_padding(config, mesh_shape(tp=4)) is None
    text = describe_padding(config, mesh_shape(tp=8))
    assert describe_padding(config, mesh_shape(cp=4, tp=8)) == text
    assert text.startswith("with tp 8: 28 query heads to 32, 300 d_ff to 304, ")
    assert "WARNING" not in text
    # As where a run prints its summary.
    with use_mesh(tp=2):
        assert describe_padding(replace(config, loss_chunk=6), mesh_shape(tp=8)) == text
    much = describe_padding(variant(RUN.model, TABLE["few"]), mesh_shape(tp=5))
    assert much.endswith("much padding; tp 1 needs none")
    shape = {"batch_size": 8, "sequence_length": 8}
    padded, plain = (step_costs(config, mesh_shape(tp=tp), **shape) for tp in (8, 1))
    assert 8 * padded.flops > plain.flops
    assert padded.padding > plain.padding == 0


def test_a_run_may_refuse_padding():
    refusing = variant(RUN, {"mesh": {"dp": 1, "fsdp": 1, "tp": 2, "allow_padding": False}})
    with pytest.raises(
        ConfigError, match=r"tp=2 pads 9 query heads to 12.*allow_padding.*tp can be 1"
    ):
        check(refusing, mesh_shape(tp=2))
    check(RUN, mesh_shape(tp=2))


def test_heads_of_gated_deltanet_are_padded_by_groups():
    """A group is a key head with its value heads; groups that tp does not divide are padded."""
    block = BlockConfig(delta_value_heads=6, delta_key_heads=3)
    value_heads, key_heads, _ = padded_dims(block, 2)
    assert value_heads == ("delta value heads", 6, 8)
    assert key_heads == ("delta key heads", 3, 4)
